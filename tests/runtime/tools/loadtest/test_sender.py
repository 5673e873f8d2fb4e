"""Driving a backend of scripts: who is sent when, how many at once, and what is on record of each end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator

import pytest
from quire.runtime.tools.loadtest.records import LoadRequest, ReceivedChunk, RequestFailed, StreamEnd
from quire.runtime.tools.loadtest.sender import LoadProgress, send_closed_loop, send_open_loop


class Scripted:
    """Answers token by token, each after `step_s`, not before `crowd` have asked at once; a prompt `fail` breaks after
    one, `silent` ends without any.
    """

    def __init__(self, step_s: float = 0.0, crowd: int = 0) -> None:
        self.step_s, self.crowd = step_s, crowd
        self.running = self.most_running = 0
        self.left_early: list[LoadRequest] = []

    async def stream(self, request: LoadRequest) -> AsyncGenerator[ReceivedChunk, None]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        ended = False
        try:
            while self.most_running < self.crowd:
                await asyncio.sleep(0.001)
            for index in range(0 if request.prompt == "silent" else request.max_tokens):
                await asyncio.sleep(self.step_s)
                yield ReceivedChunk(float(index), 1, "x")
                if request.prompt == "fail":
                    raise RequestFailed("INTERNAL", "it broke")
            ended = True
            yield ReceivedChunk(0.0, 0, "", StreamEnd("length", 7, request.max_tokens, 3, 1.0, 2.0, 3.0, 4.0))
        finally:
            self.running -= 1
            if not ended and request.prompt != "fail":
                self.left_early.append(request)

    async def close(self) -> None: ...


def request(
    prompt: str = "a", max_tokens: int = 3, cancel_after: int | None = None, pause_s: float = 0.0
) -> LoadRequest:
    return LoadRequest(prompt, 1, max_tokens, cancel_after, pause_s)


async def test_an_open_loop_sends_by_the_clock_whatever_the_server_does() -> None:
    backend, progress = Scripted(crowd=4), LoadProgress()
    sent = await send_open_loop(backend, [request()] * 4, [0.0, 0.01, 0.02, 0.03], progress)
    scheduled = [record.scheduled_s - sent.started_s for record in sent.records]
    assert scheduled == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert all(record.sent_s >= record.scheduled_s for record in sent.records)
    assert len(sent.generator_delays_s) == 4
    assert (progress.sent, progress.done, progress.running, progress.tokens) == (4, 4, 0, 12)


async def test_beyond_the_limit_requests_wait_and_that_is_on_record() -> None:
    backend = Scripted(step_s=0.01)
    sent = await send_open_loop(backend, [request()] * 4, [0.0] * 4, LoadProgress(), max_concurrency=2)
    assert backend.most_running == 2
    first, _, third, _ = sent.records
    assert third.sent_s - third.scheduled_s > first.sent_s - first.scheduled_s
    assert third.sent_s >= first.ended_s


async def test_a_closed_loop_is_so_many_users_and_nobody_is_late() -> None:
    backend = Scripted(step_s=0.001)
    sent = await send_closed_loop(backend, [request()] * 7, LoadProgress(), max_concurrency=3)
    assert backend.most_running == 3
    assert [record.index for record in sent.records] == list(range(7))
    assert all(record.sent_s >= record.scheduled_s for record in sent.records)
    assert sent.generator_delays_s == []


async def test_a_closed_loop_ends_with_its_time() -> None:
    def endless() -> object:
        while True:
            yield request()

    sent = await send_closed_loop(Scripted(0.001), endless(), LoadProgress(), max_concurrency=2, duration_s=0.05)  # type: ignore[arg-type]
    assert sent.records
    assert all(record.finish_reason == "length" for record in sent.records)


async def test_what_a_request_leaves_on_record() -> None:
    sent = await send_closed_loop(Scripted(), [request()], LoadProgress(), max_concurrency=1)
    (record,) = sent.records
    assert (record.token_times, record.token_counts, record.text) == ([0.0, 1.0, 2.0], [1, 1, 1], "xxx")
    assert (record.prompt_tokens, record.cached_tokens, record.finish_reason) == (7, 3, "length")
    assert (record.queue_ms, record.prefill_ms, record.decode_ms, record.stall_ms) == (1.0, 2.0, 3.0, 4.0)
    assert record.ended_s >= record.sent_s >= record.scheduled_s


async def test_who_cancels_leaves_after_so_many_tokens() -> None:
    backend, progress = Scripted(), LoadProgress()
    sent = await send_closed_loop(
        backend, [request(max_tokens=9, cancel_after=2), request()], progress, max_concurrency=1
    )
    left, stayed = sent.records
    assert (left.cancelled, left.output_tokens, left.finish_reason, left.error) == (True, 2, None, None)
    assert (stayed.cancelled, stayed.finish_reason) == (False, "length")
    assert [each.cancel_after for each in backend.left_early] == [2]
    assert (progress.cancelled, progress.failed, progress.done) == (1, 0, 2)


async def test_a_slow_reader_pauses_after_each_chunk() -> None:
    sent = await send_closed_loop(Scripted(), [request(pause_s=0.01), request()], LoadProgress(), max_concurrency=1)
    slow, swift = sent.records
    assert (slow.slow_reader, swift.slow_reader) == (True, False)
    assert slow.ended_s - slow.sent_s >= 0.03


async def test_failures_are_counted_by_their_code_and_stop_nobody() -> None:
    progress = LoadProgress()
    requests = [request("fail"), request("silent"), request()]
    sent = await send_open_loop(Scripted(), requests, [0.0] * 3, progress)
    assert [(each.error_code, each.error) for each in sent.records] == [
        ("INTERNAL", "it broke"),
        ("NO_TOKENS", "the stream ended without a token"),
        (None, None),
    ]
    assert [each.finish_reason for each in sent.records] == [None, None, "length"]
    assert (progress.failed, progress.done) == (2, 3)


async def test_a_bug_ends_the_run() -> None:
    class Broken(Scripted):
        async def stream(self, request: LoadRequest) -> AsyncGenerator[ReceivedChunk, None]:
            raise ZeroDivisionError
            yield

    with pytest.raises(ExceptionGroup):
        await send_open_loop(Broken(), [request()], [0.0], LoadProgress())
    assert gc.get_freeze_count() == 0


async def test_the_servers_count_is_spread_over_the_chunks_it_came_in() -> None:
    class Bundling(Scripted):
        async def stream(self, request: LoadRequest) -> AsyncGenerator[ReceivedChunk, None]:
            yield ReceivedChunk(1.0, 1, "ab")
            yield ReceivedChunk(2.0, 1, "cd")
            yield ReceivedChunk(3.0, 0, "", StreamEnd("stop", None, 5))

    sent = await send_closed_loop(Bundling(), [request()], LoadProgress(), max_concurrency=1)
    assert sent.records[0].token_counts == [3, 2]
    assert sent.records[0].prompt_tokens == 1  # as asked: the server did not say
