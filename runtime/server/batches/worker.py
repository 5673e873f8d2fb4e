"""`BatchWorker`: runs the stored batches of all tenants, with the sequences that other requests leave.

A batch's state is in the store: its answers so far, and its status. So a server that restarts continues every batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from ...common.errors import ConfigError, QuotaExceeded, RequestNotFound, Unavailable
from .line_files import AnswerFile, count_lines, read_lines
from .lines import BatchLine, LineAnswer, read_line
from .run import AnsweredLine, OrderedRun
from .store import Batch, BatchStore

MAX_BATCH_LINES = 50_000
BATCH_POLL_S = 1.0  # pause between two looks for new batches, and between two looks at a running batch
PLACE_POLL_S = 0.01
BATCH_RETRY_S = 30.0  # pause after a full disk, or without an engine
SWEEP_S = 600.0
NO_ERROR = b',"error":null}\n'  # end of an answer line without an error

_log = structlog.get_logger("quire.server")


class SparePlaces:
    """Places for the requests of batches: one in eight sequences, and every sequence of other requests, stay free.

    Implements `Slots`.
    """

    def __init__(self, num_sequences: int, num_live: Callable[[], int]) -> None:
        """`num_live` returns the number of all live requests, including those of batches."""
        self._most = max(1, num_sequences - -(-num_sequences // 8))
        self._num_live = num_live
        self._num_own = 0

    async def enter(self) -> None:
        """See `Slots.enter`."""
        while max(self._num_own, self._num_live()) >= self._most:  # noqa: ASYNC110 - other requests end anywhere
            await asyncio.sleep(PLACE_POLL_S)
        self._num_own += 1

    def leave(self) -> None:
        """See `Slots.leave`."""
        self._num_own -= 1


class BatchWorker:
    """Runs batches until `close`. `send` answers one line of a tenant."""

    def __init__(
        self,
        store: BatchStore,
        send: Callable[[str, BatchLine], Awaitable[LineAnswer]],
        places: SparePlaces,
    ) -> None:
        self.store = store
        self._send = send
        self._places = places
        self._changed = asyncio.Event()
        self._running: dict[str, str] = {}  # tenant -> id of its running batch
        self._task = asyncio.create_task(self._run())
        self._batches: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Look for new or cancelled batches now."""
        self._changed.set()

    async def close(self) -> None:
        """Stop. Batches continue when the next server opens the store."""
        tasks = [self._task, *self._batches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        """Start the oldest batch of each tenant that has none running."""
        swept_s = 0.0
        while True:
            try:
                for tenant in await asyncio.to_thread(self.store.tenants):
                    if time.monotonic() - swept_s > SWEEP_S:
                        await asyncio.to_thread(self.store.remove_expired, tenant)
                    await self._start_next(tenant)
                if time.monotonic() - swept_s > SWEEP_S:
                    swept_s = time.monotonic()
            except Exception:
                _log.exception("looking for batches failed")
            self._changed.clear()
            try:
                async with asyncio.timeout(BATCH_POLL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _start_next(self, tenant: str) -> None:
        if tenant in self._running:
            return
        waiting = [each for each in await asyncio.to_thread(self.store.batches, tenant) if not each.has_ended]
        if waiting:
            batch = waiting[-1]
            self._running[tenant] = batch.id
            task = asyncio.create_task(self._run_batch(tenant, batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _run_batch(self, tenant: str, batch: Batch) -> None:
        try:
            await self._answer(tenant, batch)
        except (QuotaExceeded, RequestNotFound, ConfigError) as error:
            await asyncio.to_thread(self._end, tenant, batch.id, "failed", (error.code.lower(), str(error)))
        except Unavailable as error:
            _log.warning("a batch is interrupted", batch=batch.id, tenant=tenant, reason=str(error))
            await asyncio.sleep(BATCH_RETRY_S)
        except Exception:
            _log.exception("a batch failed", batch=batch.id, tenant=tenant)
            await asyncio.sleep(BATCH_RETRY_S)
        finally:
            self._running.pop(tenant, None)
            self.wake()

    async def _answer(self, tenant: str, batch: Batch) -> None:
        """Answer the lines of a batch, and end it. Raises what interrupts it."""
        store = self.store
        if batch.status == "cancelling":
            await asyncio.to_thread(self._end, tenant, batch.id, "cancelled")
            return
        source = await asyncio.to_thread(store.content, tenant, batch.input_file_id)
        total = await asyncio.to_thread(count_lines, source)
        if not 1 <= total <= MAX_BATCH_LINES:
            raise ConfigError(f"the input file has {total} lines; 1 to {MAX_BATCH_LINES} are allowed")
        answers = await asyncio.to_thread(AnswerFile, store.answers(tenant, batch.id))
        try:
            lines = read_lines(source)
            await asyncio.to_thread(answers.resume, lines)
            if batch.in_progress_at is None:
                batch = await asyncio.to_thread(store.change, tenant, batch.id, partial(_in_progress, total=total))
            status = await self._answer_rest(tenant, batch, lines, answers, total)
            await asyncio.to_thread(answers.sync)
        finally:
            answers.close()
        await asyncio.to_thread(self._end, tenant, batch.id, status, None, total)

    async def _answer_rest(
        self, tenant: str, batch: Batch, lines: Iterator[tuple[int, bytes]], answers: AnswerFile, total: int
    ) -> str:
        """Answer the lines that have no answer. Return the status with which the batch ends."""

        def write(answered: AnsweredLine) -> None:
            answers.write(answered.data, is_error=answered.is_error)

        async def send(line: BatchLine) -> LineAnswer:
            return await self._send(tenant, line)

        run = OrderedRun(send, write, self._places, lambda number, line: read_line(number, line, (batch.endpoint,)))
        running = asyncio.create_task(run.run(lines))
        try:
            while True:
                done, _ = await asyncio.wait({running}, timeout=BATCH_POLL_S)
                counts = {"total": total, "completed": answers.num_lines - answers.num_errors}
                now = await asyncio.to_thread(
                    self._changed_batch, tenant, batch.id, failed=answers.num_errors, **counts
                )
                if done:
                    running.result()
                    return "completed"
                if now.status == "cancelling":
                    return "cancelled"
                if time.time() > batch.expires_at:
                    return "expired"
                await asyncio.to_thread(self.store.check_quota, tenant, 0)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _changed_batch(self, tenant: str, batch_id: str, **changes: Any) -> Batch:
        return self.store.change(tenant, batch_id, lambda batch: msgspec.structs.replace(batch, **changes))

    def _end(
        self, tenant: str, batch_id: str, status: str, error: tuple[str, str] | None = None, total: int = 0
    ) -> None:
        """Make files of the answers so far, and end the batch. Blocks."""
        store = self.store
        path = store.answers(tenant, batch_id)
        now = int(time.time())
        batch = store.batch(tenant, batch_id)
        changes: dict[str, Any] = {"status": status, f"{status}_at": now, "error": error}
        if path.exists():
            changes |= {"finalizing_at": now, "total": total or batch.total}
            changes |= self._output_files(tenant, batch, path)
        self._changed_batch(tenant, batch_id, **changes)
        path.unlink(missing_ok=True)

    def _output_files(self, tenant: str, batch: Batch, path: Path) -> dict[str, Any]:
        """Divide the answers into a file of answers and a file of errors. Return the fields of the batch about them."""
        changes: dict[str, Any] = {}
        for kind, count in (("output", "completed"), ("error", "failed")):
            changes[count] = sum(1 for _ in _lines_of(path, kind))
            if changes[count]:
                name = f"{batch.id}_{kind}.jsonl"
                made = self.store.add_parts(tenant, _lines_of(path, kind), name, "batch_output")
                changes[f"{kind}_file_id"] = made.id
        return changes


def _lines_of(path: Path, kind: str) -> Iterator[bytes]:
    """Yield the answers of one kind, `output` or `error`."""
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(NO_ERROR) == (kind == "output"))


def _in_progress(batch: Batch, total: int) -> Batch:
    """Return a batch that begins, unless it was cancelled before."""
    changes: dict[str, Any] = {"total": total, "in_progress_at": int(time.time())}
    return msgspec.structs.replace(
        batch, **changes, **({"status": "in_progress"} if batch.status == "validating" else {})
    )
