"""Driving a backend of scripts: who is sent when, how many at once, and what is on record of each end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator

import pytest
from quire.runtime.tools.loadtest.driver import Tally, drive_closed, drive_open
from quire.runtime.tools.loadtest.request import Chunk, End, Request, RequestFailed


class Scripted:
    """Answers token by token, each after `step_s`, not before `crowd` have asked at once; a prompt `fail` breaks after
    one, `silent` ends without any.
    """

    def __init__(self, step_s: float = 0.0, crowd: int = 0) -> None:
        self.step_s, self.crowd = step_s, crowd
        self.running = self.most_running = 0
        self.left_early: list[Request] = []

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        ended = False
        try:
            while self.most_running < self.crowd:
                await asyncio.sleep(0.001)
            for index in range(0 if request.prompt == "silent" else request.max_tokens):
                await asyncio.sleep(self.step_s)
                yield Chunk(float(index), 1, "x")
                if request.prompt == "fail":
                    raise RequestFailed("INTERNAL", "it broke")
            ended = True
            yield Chunk(0.0, 0, "", End("length", 7, request.max_tokens, 3, 1.0, 2.0, 3.0, 4.0))
        finally:
            self.running -= 1
            if not ended and request.prompt != "fail":
                self.left_early.append(request)

    async def close(self) -> None: ...


def request(prompt: str = "a", max_tokens: int = 3, cancel_after: int | None = None, pause_s: float = 0.0) -> Request:
    return Request(prompt, 1, max_tokens, cancel_after, pause_s)


async def test_an_open_loop_sends_by_the_clock_whatever_the_server_does() -> None:
    backend, tally = Scripted(crowd=4), Tally()
    driven = await drive_open(backend, [request()] * 4, [0.0, 0.01, 0.02, 0.03], tally)
    scheduled = [record.scheduled_s - driven.started_s for record in driven.records]
    assert scheduled == pytest.approx([0.0, 0.01, 0.02, 0.03])
    assert all(record.sent_s >= record.scheduled_s for record in driven.records)
    assert len(driven.generator_delays_s) == 4
    assert (tally.sent, tally.done, tally.running, tally.tokens) == (4, 4, 0, 12)


async def test_beyond_the_limit_requests_wait_and_that_is_on_record() -> None:
    backend = Scripted(step_s=0.01)
    driven = await drive_open(backend, [request()] * 4, [0.0] * 4, Tally(), max_concurrency=2)
    assert backend.most_running == 2
    first, _, third, _ = driven.records
    assert third.sent_s - third.scheduled_s > first.sent_s - first.scheduled_s
    assert third.sent_s >= first.ended_s


async def test_a_closed_loop_is_so_many_users_and_nobody_is_late() -> None:
    backend = Scripted(step_s=0.001)
    driven = await drive_closed(backend, [request()] * 7, Tally(), max_concurrency=3)
    assert backend.most_running == 3
    assert [record.index for record in driven.records] == list(range(7))
    assert all(record.sent_s >= record.scheduled_s for record in driven.records)
    assert driven.generator_delays_s == []


async def test_a_closed_loop_ends_with_its_time() -> None:
    def endless() -> object:
        while True:
            yield request()

    driven = await drive_closed(Scripted(0.001), endless(), Tally(), max_concurrency=2, duration_s=0.05)  # type: ignore[arg-type]
    assert driven.records
    assert all(record.finish_reason == "length" for record in driven.records)


async def test_what_a_request_leaves_on_record() -> None:
    driven = await drive_closed(Scripted(), [request()], Tally(), max_concurrency=1)
    (record,) = driven.records
    assert (record.token_times, record.token_counts, record.text) == ([0.0, 1.0, 2.0], [1, 1, 1], "xxx")
    assert (record.prompt_tokens, record.cached_tokens, record.finish_reason) == (7, 3, "length")
    assert (record.queue_ms, record.prefill_ms, record.decode_ms, record.stall_ms) == (1.0, 2.0, 3.0, 4.0)
    assert record.ended_s >= record.sent_s >= record.scheduled_s


async def test_who_cancels_leaves_after_so_many_tokens() -> None:
    backend, tally = Scripted(), Tally()
    driven = await drive_closed(backend, [request(max_tokens=9, cancel_after=2), request()], tally, max_concurrency=1)
    left, stayed = driven.records
    assert (left.cancelled, left.output_tokens, left.finish_reason, left.error) == (True, 2, None, None)
    assert (stayed.cancelled, stayed.finish_reason) == (False, "length")
    assert [each.cancel_after for each in backend.left_early] == [2]
    assert (tally.cancelled, tally.failed, tally.done) == (1, 0, 2)


async def test_a_slow_reader_pauses_after_each_chunk() -> None:
    driven = await drive_closed(Scripted(), [request(pause_s=0.01), request()], Tally(), max_concurrency=1)
    slow, swift = driven.records
    assert (slow.slow_reader, swift.slow_reader) == (True, False)
    assert slow.ended_s - slow.sent_s >= 0.03


async def test_failures_are_counted_by_their_code_and_stop_nobody() -> None:
    tally = Tally()
    requests = [request("fail"), request("silent"), request()]
    driven = await drive_open(Scripted(), requests, [0.0] * 3, tally)
    assert [(each.error_code, each.error) for each in driven.records] == [
        ("INTERNAL", "it broke"),
        ("NO_TOKENS", "the stream ended without a token"),
        (None, None),
    ]
    assert [each.finish_reason for each in driven.records] == [None, None, "length"]
    assert (tally.failed, tally.done) == (2, 3)


async def test_a_bug_ends_the_run() -> None:
    class Broken(Scripted):
        async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
            raise ZeroDivisionError
            yield

    with pytest.raises(ExceptionGroup):
        await drive_open(Broken(), [request()], [0.0], Tally())
    assert gc.get_freeze_count() == 0


async def test_the_servers_count_is_spread_over_the_chunks_it_came_in() -> None:
    class Bundling(Scripted):
        async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
            yield Chunk(1.0, 1, "ab")
            yield Chunk(2.0, 1, "cd")
            yield Chunk(3.0, 0, "", End("stop", None, 5))

    driven = await drive_closed(Bundling(), [request()], Tally(), max_concurrency=1)
    assert driven.records[0].token_counts == [3, 2]
    assert driven.records[0].prompt_tokens == 1  # as asked: the server did not say
