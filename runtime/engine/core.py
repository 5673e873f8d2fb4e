"""The core protocol: what runs sequences of token ids for an `Engine`; and `EngineCore`, which does so in this process.

A core must not import text, frames or sockets. It reports every request it accepted to its end exactly once, unless
the `Engine` dropped it.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from ...pager import OutOfPages, SpillFile
from ...scheduler import (
    AdmissionEstimate,
    EngineLoop,
    FinishedStep,
    FinishReason,
    Request,
    RequestUpdate,
    StepPlan,
    StepResult,
)
from ..common.config import EngineConfig
from ..common.errors import ContextLengthExceeded, QuireError, Unavailable
from ..model.files import sampled_fingerprint
from ..model.runner import ModelRunner, load_model
from .build import build_pager, build_scheduler, build_spill_file
from .facade import CoreInfo, EngineStats, StepStats
from .grammars import Grammars
from .masks import StepMasks

_log = structlog.get_logger("quire.engine")


class Prefilled(NamedTuple):
    """A request whose prefill continues after a step."""

    request_id: int
    num_tokens: int  # of its prompt: computed by now, or found in the prefix cache


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class CoreListener:
    """What a core calls on the event loop. The callables must not raise."""

    publish: Callable[[Sequence[RequestUpdate]], None] = _ignore
    fail: Callable[[int, QuireError], None] = _ignore  # a request ended with an error that is not the scheduler's
    observe: Callable[[StepStats, Sequence[Prefilled]], None] = _ignore  # a step ended and its updates are published
    ended: Callable[[], None] = _ignore  # nothing will be published any more
    begin: Callable[[StepPlan], None] = _ignore  # a step is about to be computed in this process


class Core(Protocol):
    """Runs requests. The engine, its only user, calls it on the event loop."""

    @property
    def info(self) -> CoreInfo:
        """Model, limits and machine."""

    def start(self, listener: CoreListener) -> None:
        """Begin to run requests and report to `listener`."""

    def check_room(self, tenant: str, count: int) -> None:
        """Raise QueueFull or NotAccepting if `add` would: a cheap check before a prompt is prepared."""

    async def add(self, requests: Sequence[Request]) -> AdmissionEstimate:
        """Queue a request, or the samples of one prompt. Raises Refused or NotAccepting and then changes nothing."""

    def cancel(self, request_id: int) -> None:
        """End a request; its end is published. Allowed in every state, idempotent."""

    def drop(self, request_id: int, reason: FinishReason | None = None, error: str | None = None) -> None:
        """End a request without publishing anything more of it. Idempotent."""

    def stats(self) -> EngineStats:
        """Return the current statistics. Raises Unavailable while nothing can be computed."""

    async def drain(self) -> None:
        """Refuse new requests and wait until every accepted one has ended."""

    async def stop(self) -> None:
        """End all requests now and compute nothing more. Idempotent."""

    async def close(self) -> None:
        """Stop, and free memory and threads. Idempotent."""


class EngineCore:
    """Implements `Core` with one scheduler, one model runner and one step thread.

    Everything but the computation of a step runs on the event loop's thread, so there are no locks.
    """

    engine_loop: EngineLoop  # set by `start`
    _listener: CoreListener  # set by `start`

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        spill_file: SpillFile | None,
    ) -> None:
        self.runner = runner
        self.config = config
        self._spill_file = spill_file
        self.pager = build_pager(config, runner, spill_file)
        self.scheduler = build_scheduler(config, self.pager, runner.capacity.max_num_samples)
        self._worker = ThreadPoolExecutor(1, "quire-step")
        self.grammars = Grammars(runner.path)
        self._fingerprint = _fingerprint(runner, config)
        self._started = False
        self._scoring = asyncio.Lock()  # held while `logits` computes
        self._closed = False
        self._misses_itl_target = False  # and that is logged

    @classmethod
    async def load(cls, config: EngineConfig) -> EngineCore:
        """Load the model and allocate all memory. Raises ModelError or ConfigError. Cancelling it stops the load."""
        stop = threading.Event()
        try:
            runner = await asyncio.to_thread(load_model, config, stop)
        except asyncio.CancelledError:
            stop.set()
            raise
        with ExitStack() as undo:
            undo.callback(runner.close)
            spill_file = build_spill_file(config, runner)
            if spill_file is not None:
                undo.callback(spill_file.close)
            core = cls(runner, config, spill_file)
            undo.pop_all()
            return core

    @property
    def info(self) -> CoreInfo:
        """See `Core.info`."""
        runner, capacity = self.runner, self.runner.capacity
        return CoreInfo(
            vocab_size=runner.spec.vocab_size,
            max_model_len=capacity.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            num_pages=capacity.num_pages,
            page_size=capacity.layout.page_size,
            eos_token_ids=frozenset(runner.spec.eos_token_ids),
            isa=capacity.isa,
            threads=capacity.cpus.threads,
            threads_reason=capacity.cpus.reason,
            fingerprint=self._fingerprint,
        )

    @property
    def is_broken(self) -> bool:
        """Whether the engine loop ended because of an internal error."""
        return self._started and self.engine_loop.is_broken

    def start(self, listener: CoreListener) -> None:
        """See `Core.start`."""
        self._listener = listener
        self.engine_loop = EngineLoop(self.scheduler, self._execute, listener.publish, self._observe)
        self.engine_loop.start(listener.ended)
        self._started = True

    def check_room(self, tenant: str, count: int) -> None:
        """See `Core.check_room`."""
        self.engine_loop.check_room(tenant, count)

    async def add(self, requests: Sequence[Request]) -> AdmissionEstimate:
        """See `Core.add`. It does not suspend."""
        if self._scoring.locked():
            raise Unavailable("this engine is computing logits; try again")
        return self.engine_loop.add(*requests)

    def cancel(self, request_id: int) -> None:
        """See `Core.cancel`."""
        self.engine_loop.cancel(request_id)

    def drop(self, request_id: int, reason: FinishReason | None = None, error: str | None = None) -> None:
        """See `Core.drop`."""
        self.scheduler.finish(request_id, reason, error)

    def stats(self) -> EngineStats:
        """See `Core.stats`."""
        if self.is_broken:
            raise Unavailable("the engine has stopped after an internal error; restart it")
        return msgspec.convert(self.scheduler.stats(), EngineStats, from_attributes=True)

    async def drain(self) -> None:
        """See `Core.drain`."""
        await self.engine_loop.drain()

    async def stop(self) -> None:
        """See `Core.stop`. Pages keep their content until `close`."""
        if self._started:
            await self.engine_loop.close()

    async def close(self) -> None:
        """See `Core.close`. Raises what broke the engine loop, if anything did."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.stop()
            async with self._scoring:  # `logits` ends before its next chunk
                pass
        finally:  # also if the loop is broken or this call is cancelled
            self._worker.shutdown()
            self.grammars.close()
            if self._spill_file is not None:
                self._spill_file.close()
            self.runner.close()

    async def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the raw logits [len(token_ids), vocab] after each token, for evaluation.

        They bypass the scheduler and the prefix cache. Raises Unavailable while requests run; none is accepted in
        the meantime.
        """
        if self._closed or self.scheduler.has_work or self._scoring.locked():
            raise Unavailable("logits are computed between requests; wait until the running ones have ended")
        runner, loop = self.runner, asyncio.get_running_loop()
        out = np.empty((len(token_ids), self.runner.spec.vocab_size), np.float32)
        async with self._scoring:
            table = self.pager.open(())
            try:
                for first in range(0, len(token_ids), runner.capacity.max_num_samples):
                    if self._closed:
                        raise Unavailable("the engine was closed in the meantime")
                    chunk = token_ids[first : first + runner.capacity.max_num_samples]
                    table.append(len(chunk))
                    out[first : first + len(chunk)] = await loop.run_in_executor(
                        self._worker, runner.score, chunk, first, table.pages, len(chunk)
                    )
                    self.pager.commit(table, token_ids)
                return out
            except OutOfPages as error:
                raise ContextLengthExceeded(f"{len(token_ids)} tokens do not fit the KV cache: {error}") from error
            finally:
                table.release()

    # Called by the engine loop

    async def _execute(self, plan: StepPlan) -> StepResult:
        self._listener.begin(plan)
        try:
            masks = self.grammars.begin(plan.sequences)
            return await asyncio.get_running_loop().run_in_executor(self._worker, self._compute, plan, masks)
        except Exception:
            _log.exception("step failed", step=plan.step_id, sequences=len(plan.sequences))
            raise

    def _compute(self, plan: StepPlan, masks: StepMasks | None) -> StepResult:
        """Run a step, in the step's thread."""
        if masks is None:
            return self.runner.execute(plan)
        return masks.advance(self.runner.execute(plan, masks))

    def _observe(self, step: FinishedStep) -> None:
        sequences = step.plan.sequences
        if bool(self.scheduler.itl_overrun) != self._misses_itl_target:
            self._log_itl_target(step.plan.num_decode_rows)
        stats = StepStats(
            duration_s=step.result.duration_s,
            prefill_tokens=step.plan.num_prefill_tokens,
            decode_tokens=step.plan.num_decode_rows,
            context_tokens=tuple([s.first_position + len(s.token_ids) for s in sequences]),
            schedule_s=step.schedule_s,
            commit_s=step.commit_s,
            publish_s=step.publish_s,
        )
        prefilled = [
            Prefilled(s.request_id, s.first_position + len(s.token_ids)) for s in sequences if not s.num_samples
        ]
        self._listener.observe(stats, prefilled)

    def _log_itl_target(self, num_decode_rows: int) -> None:
        """Log once that decoding alone exceeds the latency target, and once that it no longer does."""
        overrun, target_ms = self.scheduler.itl_overrun, self.config.itl_target_ms
        self._misses_itl_target = bool(overrun)
        if overrun and target_ms is not None:
            _log.warning(
                "inter-token target cannot be met: decoding alone takes longer",
                target_ms=target_ms,
                decode_ms=round(overrun * target_ms, 1),
                sequences=num_decode_rows,
            )
        else:
            _log.info("inter-token target can be met again", target_ms=target_ms)


def _fingerprint(runner: ModelRunner, config: EngineConfig) -> str:
    """Return a short name of what the bits of outputs depend on: build, ISA level, dtypes and model."""
    parts = version("quire"), runner.capacity.isa, config.weights, config.kv_cache_dtype, config.page_size
    return hashlib.sha256(repr(parts).encode() + sampled_fingerprint(runner.path)).hexdigest()[:16]
