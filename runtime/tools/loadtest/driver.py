"""Sends requests when they are due and writes down when what came back.

It must not know a protocol, a dataset or a metric. One invariant: every request given has one record at the end, and
nothing but its own driver has written to it.

In an open loop a request is due at its second, whatever became of those before it: latencies may be counted from there,
and how late it was really sent is on record. In a closed loop it is due when its user is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from .record import RequestRecord
from .request import Backend, Chunk, Request, RequestFailed


@dataclass
class Tally:
    """How far a run is, for whoever watches it."""

    total: int | None = None  # requests; None: as many as come
    sent: int = 0
    done: int = 0  # finished, failed or cancelled
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0  # generated, received so far

    @property
    def running(self) -> int:
        return self.sent - self.done


@dataclass(frozen=True, slots=True)
class Driven:
    """What a run left."""

    records: list[RequestRecord]
    started_s: float  # time.perf_counter
    duration_s: float  # to the end of the last request
    generator_delays_s: list[float] = field(default_factory=list)  # open loop: how late each was let go


async def drive_open(
    backend: Backend,
    requests: Sequence[Request],
    times: Sequence[float],
    tally: Tally,
    *,
    max_concurrency: int | None = None,
) -> Driven:
    """Send each of `requests` at its second of `times`. Beyond `max_concurrency` they wait, counted as delay."""
    places = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    delays: list[float] = []

    async def one(request: Request, record: RequestRecord) -> None:
        async with places:
            await _converse(backend, request, record, tally)

    async with _quiet_heap():
        start = time.perf_counter()
        records = [
            _record(index, request, start + at) for index, (request, at) in enumerate(zip(requests, times, strict=True))
        ]
        async with asyncio.TaskGroup() as tasks:
            for request, record in zip(requests, records, strict=True):
                delays.append(await _until(record.scheduled_s))
                tasks.create_task(one(request, record))
        return Driven(records, start, time.perf_counter() - start, delays)


async def drive_closed(
    backend: Backend,
    requests: Iterable[Request],
    tally: Tally,
    *,
    max_concurrency: int,
    duration_s: float | None = None,
) -> Driven:
    """So many users, each sending the next of `requests` when answered, until they are used up or the time is over."""
    records: list[RequestRecord] = []
    rest = iter(requests)

    async def user(until_s: float) -> None:
        while (now := time.perf_counter()) < until_s and (request := next(rest, None)) is not None:
            record = _record(len(records), request, now)
            records.append(record)
            await _converse(backend, request, record, tally)

    async with _quiet_heap():
        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(max_concurrency):
                tasks.create_task(user(math.inf if duration_s is None else start + duration_s))
        return Driven(records, start, time.perf_counter() - start)


def _record(index: int, request: Request, scheduled_s: float) -> RequestRecord:
    slow = request.pause_s > 0
    return RequestRecord(index, request.prompt_tokens, request.max_tokens, scheduled_s, slow_reader=slow)


async def _until(due_s: float) -> float:
    """Seconds it is late. The loop's timers know whole milliseconds: what is left of one is yielded away."""
    left_s = due_s - time.perf_counter()
    while left_s > 0:
        await asyncio.sleep(left_s)
        left_s = due_s - time.perf_counter()
    return -left_s


async def _converse(backend: Backend, request: Request, record: RequestRecord, tally: Tally) -> None:
    """One request from its sending to its end, whatever the end is."""
    tally.sent += 1
    texts: list[str] = []
    left = math.inf if request.cancel_after is None else request.cancel_after
    record.sent_s = time.perf_counter()
    try:
        async with contextlib.aclosing(backend.stream(request)) as chunks:
            async for chunk in chunks:
                _take(chunk, record, tally)
                texts.append(chunk.text)
                if chunk.end is not None:
                    continue
                left -= chunk.num_tokens
                if left <= 0:
                    record.cancelled = True
                    break
                if request.pause_s:
                    await asyncio.sleep(request.pause_s)
        if not record.cancelled and not record.token_times:
            raise RequestFailed("NO_TOKENS", "the stream ended without a token")
    except RequestFailed as failure:
        record.error, record.error_code, record.finish_reason = str(failure), failure.code, None
    finally:
        record.ended_s = time.perf_counter()
        record.text = "".join(texts)
        tally.done += 1
        tally.failed += record.error is not None
        tally.cancelled += record.cancelled


def _take(chunk: Chunk, record: RequestRecord, tally: Tally) -> None:
    if chunk.num_tokens:
        record.token_times.append(chunk.arrived_s)
        record.token_counts.append(chunk.num_tokens)
        tally.tokens += chunk.num_tokens
    if chunk.end is None:
        return
    end = chunk.end
    record.finish_reason = end.finish_reason
    record.prompt_tokens = record.prompt_tokens if end.prompt_tokens is None else end.prompt_tokens
    record.cached_tokens = end.cached_tokens
    record.queue_ms, record.prefill_ms = end.queue_ms, end.prefill_ms
    record.decode_ms, record.stall_ms = end.decode_ms, end.stall_ms
    if end.output_tokens is not None and record.token_counts:
        record.token_counts = _spread(end.output_tokens, record.token_counts)


def _spread(total: int, counts: list[int]) -> list[int]:
    """The counts, or as even ones of `total` where the server counted otherwise than its chunks looked."""
    if sum(counts) == total:
        return counts
    each, left = divmod(total, len(counts))
    return [each + (index < left) for index in range(len(counts))]


@asynccontextmanager
async def _quiet_heap() -> AsyncIterator[None]:
    """What was prepared is not looked through by the collector while latencies are measured."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
