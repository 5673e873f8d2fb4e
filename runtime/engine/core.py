"""What runs sequences of token ids for an `Engine`: the border, and the core that runs them in this process.

A core knows tokens and pages; it must not know text, users' words or sockets. One invariant: every request it took is
reported to its end exactly once, unless its `Engine` dropped it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
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
from ..model.runner import ModelRunner, load_model
from .build import build_pager, build_scheduler, build_spill_file
from .facade import EngineStats, StepStats

_log = structlog.get_logger("quire.engine")


class CoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What never changes while a core runs."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_pages: int
    page_size: int  # tokens
    eos_token_ids: frozenset[int]  # that config.json and generation_config.json declare
    isa: str
    threads: int
    threads_reason: str
    num_processes: int = 0  # 0: it runs in this one


class Prefilled(NamedTuple):
    """A request whose prefill goes on after a step."""

    request_id: int
    num_tokens: int  # that are computed by now, or were found in the prefix cache


@dataclass(frozen=True, slots=True)
class CoreListener:
    """Whom a core tells what happens, from the event loop. None of these may raise."""

    publish: Callable[[Sequence[RequestUpdate]], None]
    fail: Callable[[int, QuireError], None]  # a request ended with an error that the scheduler knows nothing of
    observe: Callable[[StepStats, Sequence[Prefilled]], None]  # after what the step brought was published
    ended: Callable[[], None]  # nothing will be published any more
    begin: Callable[[StepPlan], None] = lambda plan: None  # a step is about to be computed, in this process


class Core(Protocol):
    @property
    def info(self) -> CoreInfo: ...
    def start(self, listener: CoreListener) -> None: ...
    def check_room(self, tenant: str, count: int) -> None:
        """Raises QueueFull or NotAccepting where `add` would: a cheap look before a prompt is prepared."""

    async def add(self, requests: Sequence[Request]) -> AdmissionEstimate:
        """Queue a request, or the samples of one prompt. Raises Refused or NotAccepting, nothing having changed."""

    def cancel(self, request_id: int) -> None:
        """Legal in every state, idempotent; the end is published."""

    def drop(self, request_id: int, reason: FinishReason | None = None, error: str | None = None) -> None:
        """End a request of which nothing is to be published any more. Idempotent."""

    def stats(self) -> EngineStats:
        """Raises Unavailable while nothing can be computed."""

    async def drain(self) -> None:
        """Accept nothing more and return once every request has ended."""

    async def stop(self) -> None:
        """End everything now and compute nothing more. Idempotent."""

    async def close(self) -> None:
        """`stop`, and give back memory and threads. Idempotent."""


class EngineCore:
    """One scheduler, one model runner and one step thread. Everything but the step itself happens on the event loop's
    thread, so nothing here locks.
    """

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
        self._engine_loop = EngineLoop(self.scheduler, self._execute, self._publish, self._observe)
        self._listener: CoreListener | None = None
        self._scoring = False
        self._closed = False

    @classmethod
    async def load(cls, config: EngineConfig) -> EngineCore:
        """Load the model, plan and take all memory. Raises ModelError or ConfigError."""
        runner = await asyncio.to_thread(load_model, config)
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
        )

    @property
    def is_broken(self) -> bool:
        """Nothing will be computed any more, though nobody asked for the end."""
        return self._engine_loop.is_broken

    def start(self, listener: CoreListener) -> None:
        self._listener = listener
        self._engine_loop.start(listener.ended)

    def check_room(self, tenant: str, count: int) -> None:
        self._engine_loop.check_room(tenant, count)

    async def add(self, requests: Sequence[Request]) -> AdmissionEstimate:
        return self.queue(requests)

    def queue(self, requests: Sequence[Request]) -> AdmissionEstimate:
        """`add`, for who cannot wait: there is nothing to wait for."""
        if self._scoring:
            raise Unavailable("this engine computes logits for somebody now; try again")
        return self._engine_loop.add(*requests)

    def readmit(self, request: Request) -> None:
        """Queue a request that another core had accepted; limits do not apply again."""
        self._engine_loop.readmit(request)

    def cancel(self, request_id: int) -> None:
        self._engine_loop.cancel(request_id)

    def drop(self, request_id: int, reason: FinishReason | None = None, error: str | None = None) -> None:
        self.scheduler.finish(request_id, reason, error)

    def stats(self) -> EngineStats:
        if self.is_broken:
            raise Unavailable("the engine has stopped after an internal error; restart it")
        return msgspec.convert(self.scheduler.stats(), EngineStats, from_attributes=True)

    async def drain(self) -> None:
        await self._engine_loop.drain()

    async def stop(self) -> None:
        """Pages stay as they are until `close`."""
        await self._engine_loop.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self.stop()
        finally:  # whatever broke the loop, and also when nobody waits for the end any more
            self._worker.shutdown()
            if self._spill_file is not None:
                self._spill_file.close()
            self.runner.close()

    async def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Raw logits [len(token_ids), vocab] after each token, all computed, past the scheduler. For evaluation, on a
        core that serves nobody: raises Unavailable while a request is alive, and none is accepted meanwhile.
        """
        if self._closed or self.scheduler.has_work or self._scoring:
            raise Unavailable("logits are computed between requests; wait until the running ones have ended")
        self._scoring = True
        runner, loop = self.runner, asyncio.get_running_loop()
        out = np.empty((len(token_ids), self.runner.spec.vocab_size), np.float32)
        table = self.pager.open(())
        try:
            for first in range(0, len(token_ids), runner.capacity.max_num_samples):
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
            self._scoring = False

    # Stepping.

    async def _execute(self, plan: StepPlan) -> StepResult:
        assert self._listener is not None, "steps come after `start`"
        self._listener.begin(plan)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, self.runner.execute, plan)
        except Exception:
            _log.exception("step failed", step=plan.step_id, sequences=len(plan.sequences))
            raise

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        if updates:  # the end of a core that was never started has none
            assert self._listener is not None, "requests come after `start`"
            self._listener.publish(updates)

    def _observe(self, step: FinishedStep) -> None:
        assert self._listener is not None, "steps come after `start`"
        sequences = step.plan.sequences
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
