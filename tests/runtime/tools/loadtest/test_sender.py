"""The sender on a fake backend: when requests are sent, how many at once, and the content of each record."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncGenerator, Callable

import pytest
from quire.runtime.tools.loadtest.records import LoadRequest, ReceivedChunk, RequestFailed, StreamEnd
from quire.runtime.tools.loadtest.sender import LoadProgress, SendResult, send_closed_loop, send_open_loop


class FakeBackend:
    """Answers with one token every `step_s`, once `min_running` requests are running.

    The prompt `fail` fails after one token, `silent` ends without a token.
    """

    def __init__(self, step_s: float = 0.0, min_running: int = 0, chunk_tokens: int = 1) -> None:
        self.step_s = step_s
        self.min_running = min_running
        self.chunk_tokens = chunk_tokens
        self.running = self.max_running = 0
        self.cancelled: list[LoadRequest] = []

    async def stream(self, request: LoadRequest) -> AsyncGenerator[ReceivedChunk, None]:
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        ended = False
        try:
            while self.max_running < self.min_running:
                await asyncio.sleep(0.001)
            for index in range(0 if request.prompt == "silent" else request.max_tokens):
                await asyncio.sleep(self.step_s)
                yield ReceivedChunk(float(index), self.chunk_tokens, "x")
                if request.prompt == "fail":
                    raise RequestFailed("INTERNAL", "broken")
            ended = True
            yield ReceivedChunk(0.0, 0, "", StreamEnd("length", 7, request.max_tokens, 3, 1.0, 2.0, 3.0, 4.0))
        finally:
            self.running -= 1
            if not ended and request.prompt != "fail":
                self.cancelled.append(request)

    async def close(self) -> None: ...


def request(
    prompt: str = "a", max_tokens: int = 3, cancel_after: int | None = None, pause_s: float = 0.0
) -> LoadRequest:
    return LoadRequest(prompt, 1, max_tokens, cancel_after, pause_s)


async def test_an_open_loop_sends_on_schedule_however_slow_the_server_is() -> None:
    backend = FakeBackend(min_running=4)
    progress = LoadProgress()
    sent = await send_open_loop(backend, [request()] * 4, [0.0, 0.01, 0.02, 0.03], progress)
    scheduled = [record.scheduled_s - sent.started_s for record in sent.records]
    assert scheduled == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert all(record.sent_s >= record.scheduled_s for record in sent.records)
    assert len(sent.generator_delays_s) == 4
    assert (progress.sent, progress.done, progress.running, progress.tokens) == (4, 4, 0, 12)


async def test_requests_beyond_the_limit_wait_and_their_delay_is_recorded() -> None:
    backend = FakeBackend(step_s=0.01)
    sent = await send_open_loop(backend, [request()] * 4, [0.0] * 4, LoadProgress(), max_concurrency=2)
    assert backend.max_running == 2
    first, _, third, _ = sent.records
    assert third.sent_s - third.scheduled_s > first.sent_s - first.scheduled_s
    assert third.sent_s >= first.ended_s


async def test_a_closed_loop_keeps_its_number_of_users_busy() -> None:
    backend = FakeBackend(step_s=0.001)
    sent = await send_closed_loop(backend, [request()] * 7, LoadProgress(), max_concurrency=3)
    assert backend.max_running == 3
    assert [record.index for record in sent.records] == list(range(7))
    assert all(record.sent_s >= record.scheduled_s for record in sent.records)
    assert sent.generator_delays_s == []


def test_a_closed_loop_starts_no_request_after_its_duration(in_virtual_time: Callable[..., SendResult]) -> None:
    """Each of two users starts a request of 3 seconds at 0, 3 and 6 seconds."""
    backend = FakeBackend(step_s=1.0)
    endless = itertools.repeat(request())
    sent = in_virtual_time(
        lambda: send_closed_loop(backend, endless, LoadProgress(), max_concurrency=2, duration_s=8.0)
    )
    assert [record.sent_s - sent.started_s for record in sent.records] == [0, 0, 3, 3, 6, 6]
    assert all(record.finish_reason == "length" for record in sent.records)
    assert sent.duration_s == 9


async def test_a_record_holds_tokens_times_and_server_figures() -> None:
    sent = await send_closed_loop(FakeBackend(), [request()], LoadProgress(), max_concurrency=1)
    (record,) = sent.records
    assert (record.token_times, record.token_counts, record.text) == ([0.0, 1.0, 2.0], [1, 1, 1], "xxx")
    assert (record.prompt_tokens, record.cached_tokens, record.finish_reason) == (7, 3, "length")
    assert (record.queue_ms, record.prefill_ms, record.decode_ms, record.stall_ms) == (1.0, 2.0, 3.0, 4.0)
    assert record.ended_s >= record.sent_s >= record.scheduled_s


async def test_a_cancelled_request_ends_after_its_number_of_tokens() -> None:
    backend = FakeBackend()
    progress = LoadProgress()
    requests = [request(max_tokens=9, cancel_after=2), request()]
    sent = await send_closed_loop(backend, requests, progress, max_concurrency=1)
    first, finished = sent.records
    assert (first.cancelled, first.output_tokens, first.finish_reason, first.error) == (True, 2, None, None)
    assert (finished.cancelled, finished.finish_reason) == (False, "length")
    assert [each.cancel_after for each in backend.cancelled] == [2]
    assert (progress.cancelled, progress.failed, progress.done) == (1, 0, 2)


async def test_a_cancelled_request_counts_tokens_and_not_chunks() -> None:
    backend = FakeBackend(chunk_tokens=3)
    sent = await send_closed_loop(backend, [request(max_tokens=9, cancel_after=4)], LoadProgress(), max_concurrency=1)
    assert (sent.records[0].cancelled, sent.records[0].output_tokens) == (True, 6)


def test_a_slow_reader_pauses_after_each_chunk(in_virtual_time: Callable[..., SendResult]) -> None:
    requests = [request(pause_s=0.5), request()]
    sent = in_virtual_time(lambda: send_closed_loop(FakeBackend(), requests, LoadProgress(), max_concurrency=1))
    slow, fast = sent.records
    assert (slow.slow_reader, fast.slow_reader) == (True, False)
    assert (slow.ended_s - slow.sent_s, fast.ended_s - fast.sent_s) == (1.5, 0)


async def test_failures_are_counted_by_code_and_affect_no_other_request() -> None:
    progress = LoadProgress()
    requests = [request("fail"), request("silent"), request()]
    sent = await send_open_loop(FakeBackend(), requests, [0.0] * 3, progress)
    assert [(each.error_code, each.error) for each in sent.records] == [
        ("INTERNAL", "broken"),
        ("NO_TOKENS", "the stream ended without a token"),
        (None, None),
    ]
    assert [each.finish_reason for each in sent.records] == [None, None, "length"]
    assert (progress.failed, progress.done) == (2, 3)


async def test_any_other_exception_ends_the_run() -> None:
    class BrokenBackend(FakeBackend):
        async def stream(self, request: LoadRequest) -> AsyncGenerator[ReceivedChunk, None]:
            raise ZeroDivisionError
            yield

    with pytest.raises(ExceptionGroup):
        await send_open_loop(BrokenBackend(), [request()], [0.0], LoadProgress())
    assert gc.get_freeze_count() == 0


async def test_the_servers_token_count_is_spread_over_the_chunks() -> None:
    class BundlingBackend(FakeBackend):
        async def stream(self, request: LoadRequest) -> AsyncGenerator[ReceivedChunk, None]:
            yield ReceivedChunk(1.0, 1, "ab")
            yield ReceivedChunk(2.0, 1, "cd")
            yield ReceivedChunk(3.0, 0, "", StreamEnd("stop", None, 5))

    sent = await send_closed_loop(BundlingBackend(), [request()], LoadProgress(), max_concurrency=1)
    assert sent.records[0].token_counts == [3, 2]
    assert sent.records[0].prompt_tokens == 1  # requested tokens: the server reported none
