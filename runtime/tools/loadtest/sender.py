"""Send the requests of a load test when they are due, and record the arrival times of the answers.

In an open loop each request is due at a fixed time, independent of earlier requests; its delay is recorded. In a closed
loop a request is due as soon as one of the simulated users is free.
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

from .records import Backend, LoadRequest, ReceivedChunk, RequestFailed, RequestRecord


@dataclass
class LoadProgress:
    """Counters of a run that is under way, for the progress line."""

    total: int | None = None  # requests; None: not known in advance
    sent: int = 0
    done: int = 0  # finished, failed or cancelled
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0  # generated tokens received

    @property
    def running(self) -> int:
        return self.sent - self.done


@dataclass(frozen=True, slots=True)
class SendResult:
    """One record per request of a run, and the time of the run."""

    records: list[RequestRecord]
    started_s: float  # time.perf_counter
    duration_s: float  # time to the end of the last request
    generator_delays_s: list[float] = field(default_factory=list)  # open loop: delay of the generator, per request


async def send_open_loop(
    backend: Backend,
    requests: Sequence[LoadRequest],
    times: Sequence[float],
    progress: LoadProgress,
    *,
    max_concurrency: int | None = None,
) -> SendResult:
    """Send each of `requests` at its time of `times`, in seconds from the start.

    At most `max_concurrency` requests run at once; the others wait on the client, which counts as schedule delay.
    """
    slots = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    delays: list[float] = []

    async def send_when_slot_free(request: LoadRequest, record: RequestRecord) -> None:
        async with slots:
            await _send(backend, request, record, progress)

    async with _paused_garbage_collection():
        start = time.perf_counter()
        records = [
            _new_record(index, request, start + at)
            for index, (request, at) in enumerate(zip(requests, times, strict=True))
        ]
        async with asyncio.TaskGroup() as tasks:
            for request, record in zip(requests, records, strict=True):
                delays.append(await _sleep_until(record.scheduled_s))
                tasks.create_task(send_when_slot_free(request, record))
        return SendResult(records, start, time.perf_counter() - start, delays)


async def send_closed_loop(
    backend: Backend,
    requests: Iterable[LoadRequest],
    progress: LoadProgress,
    *,
    max_concurrency: int,
    duration_s: float | None = None,
) -> SendResult:
    """Let `max_concurrency` users send `requests`, each user the next request when the user's last request has ended.

    Stop when `requests` is exhausted, or start no request after `duration_s`.
    """
    records: list[RequestRecord] = []
    remaining = iter(requests)

    async def user(until_s: float) -> None:
        while (now := time.perf_counter()) < until_s and (request := next(remaining, None)) is not None:
            record = _new_record(len(records), request, now)
            records.append(record)
            await _send(backend, request, record, progress)

    async with _paused_garbage_collection():
        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(max_concurrency):
                tasks.create_task(user(math.inf if duration_s is None else start + duration_s))
        return SendResult(records, start, time.perf_counter() - start)


def _new_record(index: int, request: LoadRequest, scheduled_s: float) -> RequestRecord:
    slow = request.pause_s > 0
    return RequestRecord(index, request.prompt_tokens, request.max_tokens, scheduled_s, slow_reader=slow)


async def _sleep_until(due_s: float) -> float:
    """Sleep until `due_s` and return the delay in seconds.

    The timers of the event loop have a resolution of a millisecond, so this function may sleep several times.
    """
    left_s = due_s - time.perf_counter()
    while left_s > 0:
        await asyncio.sleep(left_s)
        left_s = due_s - time.perf_counter()
    return -left_s


async def _send(backend: Backend, request: LoadRequest, record: RequestRecord, progress: LoadProgress) -> None:
    """Send one request and read its stream to the end, to its cancellation or to its failure."""
    progress.sent += 1
    texts: list[str] = []
    left = math.inf if request.cancel_after is None else request.cancel_after
    record.sent_s = time.perf_counter()
    try:
        async with contextlib.aclosing(backend.stream(request)) as chunks:
            async for chunk in chunks:
                _record_chunk(chunk, record, progress)
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
        record.error = str(failure)
        record.error_code = failure.code
        record.finish_reason = None
    finally:
        record.ended_s = time.perf_counter()
        record.text = "".join(texts)
        progress.done += 1
        progress.failed += record.error is not None
        progress.cancelled += record.cancelled


def _record_chunk(chunk: ReceivedChunk, record: RequestRecord, progress: LoadProgress) -> None:
    if chunk.num_tokens:
        record.token_times.append(chunk.arrived_s)
        record.token_counts.append(chunk.num_tokens)
        progress.tokens += chunk.num_tokens
    if chunk.end is None:
        return
    end = chunk.end
    record.finish_reason = end.finish_reason
    record.prompt_tokens = record.prompt_tokens if end.prompt_tokens is None else end.prompt_tokens
    record.cached_tokens = end.cached_tokens
    record.queue_ms = end.queue_ms
    record.prefill_ms = end.prefill_ms
    record.decode_ms = end.decode_ms
    record.stall_ms = end.stall_ms
    if end.output_tokens is not None and record.token_counts:
        record.token_counts = _corrected_counts(record.token_counts, end.output_tokens)


def _corrected_counts(counts: list[int], total: int) -> list[int]:
    """Return `counts` if they add up to the server's `total`, else `total` spread evenly over the chunks."""
    if sum(counts) == total:
        return counts
    each, left = divmod(total, len(counts))
    return [each + (index < left) for index in range(len(counts))]


@asynccontextmanager
async def _paused_garbage_collection() -> AsyncIterator[None]:
    """Disable garbage collection of the prepared requests while latencies are measured."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
