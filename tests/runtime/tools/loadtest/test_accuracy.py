"""A load test reports what happened: the whole load test against answers whose delays are known.

Exactly in virtual time, and once for real against servers in processes of their own, where only what does not depend on
the machine's speed is checked; tests/bench/harness_truth.py measures the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from quire.runtime.tools.loadtest.openai_backend import OpenAIBackend, OpenAITarget
from quire.runtime.tools.loadtest.options import CHAT_COMPLETIONS, COMPLETIONS
from quire.runtime.tools.loadtest.quire_backend import QuireBackend, QuireTarget
from quire.runtime.tools.loadtest.records import Backend, LoadRequest, ReceivedChunk, StreamEnd
from quire.runtime.tools.loadtest.results import RunOptions, summarize
from quire.runtime.tools.loadtest.sender import LoadProgress, SendResult, send_closed_loop, send_open_loop

from .fake_server import PROMPT_TOKENS, Script, ScriptRanges, fake_server, known_ms, scripts

PERCENTILES = (50, 90, 99)
NUM_REQUESTS = 60
USERS = 7


class ReplayBackend:
    """A Backend whose answers follow scripts, in the loop's time."""

    def __init__(self, answers: Sequence[Script]) -> None:
        self._answers = answers

    async def stream(self, request: LoadRequest) -> AsyncGenerator[ReceivedChunk, None]:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for due_s in self._answers[int(str(request.prompt))].token_times:
            await asyncio.sleep(start_s + due_s - loop.time())
            yield ReceivedChunk(loop.time(), 1, "x ")
        yield ReceivedChunk(loop.time(), 0, "", StreamEnd("length"))

    async def close(self) -> None:
        pass


def requests_for(answers: Sequence[Script]) -> list[LoadRequest]:
    return [LoadRequest(f"{index}", PROMPT_TOKENS, answer.num_tokens) for index, answer in enumerate(answers)]


def result_of(sent: SendResult) -> dict[str, Any]:
    options = RunOptions(backend="fake", duration_s=sent.duration_s, metric_percentiles=PERCENTILES)
    return summarize(sent.records, options)


def check_figures(result: dict[str, Any], answers: Sequence[Script]) -> None:
    for metric, values in known_ms(answers).items():
        assert result[f"mean_{metric}_ms"] == pytest.approx(np.mean(values), abs=1e-6)
        assert result[f"std_{metric}_ms"] == pytest.approx(np.std(values), abs=1e-6)
        assert result[f"median_{metric}_ms"] == pytest.approx(np.median(values), abs=1e-6)
        for percent in PERCENTILES:
            assert result[f"p{percent}_{metric}_ms"] == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_an_open_loop_reports_exact_figures(in_virtual_time: Callable[..., SendResult]) -> None:
    answers = scripts(NUM_REQUESTS, seed=1)
    times = [0.03 * index for index in range(NUM_REQUESTS)]
    requests = requests_for(answers)
    sent = in_virtual_time(lambda: send_open_loop(ReplayBackend(answers), requests, times, LoadProgress()))
    result = result_of(sent)
    check_figures(result, answers)
    last_s = max(at + answer.e2el_s for at, answer in zip(times, answers, strict=True))
    assert result["duration"] == pytest.approx(last_s)
    assert result["total_output_tokens"] == sum(answer.num_tokens for answer in answers)
    assert result["x_quire"]["schedule_delay_ms"]["p99"] == pytest.approx(0.0, abs=1e-6)


def test_waiting_for_a_slot_is_reported_as_schedule_delay(in_virtual_time: Callable[..., SendResult]) -> None:
    """Send three requests at once to one slot: their latencies exclude the wait, their schedule delays include it."""
    answers = [Script(0.1, (0.1,))] * 3
    sent = in_virtual_time(
        lambda: send_open_loop(
            ReplayBackend(answers), requests_for(answers), [0.0] * 3, LoadProgress(), max_concurrency=1
        )
    )
    result = result_of(sent)
    check_figures(result, answers)
    delays_ms = [1000 * (record.sent_s - record.scheduled_s) for record in sent.records]
    assert delays_ms == pytest.approx([0, 200, 400])
    assert result["x_quire"]["e2el_from_schedule_ms"]["mean"] == pytest.approx(400)


def test_a_closed_loop_reports_exact_figures(in_virtual_time: Callable[..., SendResult]) -> None:
    answers = scripts(NUM_REQUESTS, seed=2)
    sent = in_virtual_time(
        lambda: send_closed_loop(ReplayBackend(answers), requests_for(answers), LoadProgress(), max_concurrency=USERS)
    )
    result = result_of(sent)
    check_figures(result, answers)
    free_s = [0.0] * USERS  # each user sends the next request when the user's last request has ended
    for answer in answers:
        free_s[free_s.index(min(free_s))] += answer.e2el_s
    assert result["duration"] == pytest.approx(max(free_s))


async def connect(protocol: str, address: str, endpoint: str) -> Backend:
    if protocol == "quire":
        return await QuireBackend.open(QuireTarget(address))
    return await OpenAIBackend.open(OpenAITarget(f"http://{address}", endpoint))


@pytest.mark.parametrize("protocol", ["quire", "openai"])
async def test_tokens_of_a_real_server_arrive_in_order(protocol: str) -> None:
    """Send half of the requests in an open loop, half in a closed one, which uses OpenAI's other endpoint."""
    with fake_server(protocol, 12, 3, ScriptRanges(ttft_ms=(5, 20), itl_ms=(1, 5), tokens=(1, 12))) as server:
        requests = requests_for(server.expected)
        records = []
        backend = await connect(protocol, server.address, COMPLETIONS)
        try:
            records += (
                await send_open_loop(backend, requests[:6], [0.005 * i for i in range(6)], LoadProgress())
            ).records
        finally:
            await backend.close()
        backend = await connect(protocol, server.address, CHAT_COMPLETIONS)
        try:
            records += (await send_closed_loop(backend, requests[6:], LoadProgress(), max_concurrency=3)).records
        finally:
            await backend.close()
    for record, expected, actual in zip(records, server.expected, server.actual, strict=True):
        assert record.error is None
        assert record.finish_reason == "length"
        assert record.output_tokens == expected.num_tokens == actual.num_tokens
        assert record.prompt_tokens == PROMPT_TOKENS
        assert record.text.split() == [str(index) for index in range(expected.num_tokens)]
        assert record.scheduled_s <= record.sent_s < record.token_times[0]
        assert record.token_times == sorted(record.token_times)
        assert record.token_times[-1] <= record.ended_s
        assert record.token_times[0] - record.sent_s >= actual.ttft_s  # no token is seen before it was sent
        assert record.token_times[-1] - record.sent_s >= actual.e2el_s
        assert actual.ttft_s >= expected.ttft_s
