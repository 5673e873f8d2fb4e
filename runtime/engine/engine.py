"""The engine: one scheduler, one executor and one worker thread behind the facade, in this process.

It turns requests into scheduled ones, and what the scheduler reports into chunks of text. It must not know sockets or
metrics libraries. One invariant: everything but the step itself happens on the event loop's thread, so nothing here
locks.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from ...pager import OutOfPages
from ...scheduler import (
    DEADLINE_PASSED,
    Batcher,
    FinishedStep,
    RequestUpdate,
    SchedulerError,
    StepPlan,
    StepResult,
)
from ..config import EngineConfig
from ..errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    QuireError,
    Unavailable,
)
from ..execution import Machine, assemble
from ..generation import FinishReason, OutputChunk, SamplingParams
from ..text import IncrementalDetokenizer
from .build import build_pager, build_scheduler, build_spill_file
from .choices import Branch, Live, delivery
from .facade import EngineObserver, EngineStats, GenerateRequest, RequestStats, StepStats
from .intake import num_sequences, scheduled_requests
from .observer import SilentObserver
from .refusals import admission, translate
from .stream import Stream
from .validator import Limits, Validator

_log = structlog.get_logger("quire.engine")


class Engine:
    """Implements `facade.EngineFacade`. Make one with `await Engine.start(config)`, end it with `close`."""

    def __init__(self, machine: Machine, config: EngineConfig, max_prefill_chunk: int | None = None) -> None:
        self.machine = machine
        self.config = config
        longest_token = machine.tokenizer.longest_token if machine.tokenizer else 0
        self._validator = Validator(
            Limits(
                machine.spec.vocab_size,
                machine.max_model_len,
                machine.max_model_len * longest_token,
                config.max_num_seqs,
            )
        )
        self._spill_file = build_spill_file(config, machine)
        self.pager = build_pager(config, machine, self._spill_file)
        self.scheduler = build_scheduler(
            config, self.pager, machine.executor.max_samples, max_prefill_chunk=max_prefill_chunk
        )
        self._batcher = Batcher(self.scheduler, self._execute, self._publish, self._observe_step)
        self._worker = ThreadPoolExecutor(1, "quire-step")
        self._observer: EngineObserver = SilentObserver()
        self._branches: dict[int, Branch] = {}  # of live requests, by the scheduler's id
        self._tokenizing: Counter[str] = Counter()  # sequences whose text is being tokenized, by tenant
        self._next_id = 0
        self._scoring = False
        self._closed = False
        self._batcher.start(self._end_leftovers)

    @classmethod
    async def start(cls, config: EngineConfig) -> Engine:
        """Load the model, plan and take all memory, and be ready for requests. Raises ModelError or ConfigError."""
        machine = await asyncio.to_thread(assemble, config)
        try:
            return cls(machine, config)
        except BaseException:
            machine.close()
            raise

    def submit(self, request: GenerateRequest) -> Coroutine[Any, Any, Stream]:
        """See `facade.EngineFacade.submit`."""
        submitted = time.monotonic()
        with self._refusing():
            self._check(request)
        return self._take(request, submitted)

    def stats(self) -> EngineStats:
        """Raises Unavailable when the engine's loop has broken, so that readiness and metrics do not look idle."""
        if self._batcher.is_broken:
            raise Unavailable("the engine has stopped after an internal error; restart it")
        return msgspec.convert(self.scheduler.stats(), EngineStats, from_attributes=True)

    def set_observer(self, observer: EngineObserver) -> None:
        self._observer = observer

    async def drain(self) -> None:
        await self._batcher.drain()

    async def stop(self) -> None:
        """End everything now and compute nothing more; pages stay as they are until `close`. Idempotent."""
        for branch in self._branches.values():
            closed = Unavailable("the engine was closed before this request ended; try again")
            branch.live.error = branch.live.error or closed
        await self._batcher.close()

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
            self.machine.close()

    # Accepting.

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """What is raised inside leaves in our words, and counts as a rejection."""
        try:
            yield
        except SchedulerError as refusal:
            error = translate(refusal)
            self._observer.on_rejected(error)
            raise error from refusal
        except QuireError as error:
            self._observer.on_rejected(error)
            raise

    def _check(self, request: GenerateRequest) -> None:
        """All that can be told without the prompt's ids; a full queue costs no more than finding out."""
        params, prompt = request.params, request.prompt
        self._validator.check_params(params)
        self._validator.check_schedule(request.priority, request.deadline_ms, request.pin_ms)
        self._check_room(request)
        if isinstance(prompt, str):
            self._validator.check_text(prompt)
            if self.machine.tokenizer is None:
                raise InvalidRequest("this model has no tokenizer.json; give the prompt as token ids")
        elif params.stop and self.machine.tokenizer is None:
            raise InvalidRequest("stop strings cannot be found without a tokenizer.json; use stop_token_ids")

    def _check_room(self, request: GenerateRequest) -> None:
        """Those whose text is being tokenized count as waiting, else more would be tokenized than can be taken."""
        count = num_sequences(request.params) + self._tokenizing[request.tenant]
        self._batcher.check_room(request.tenant, count)

    async def _take(self, request: GenerateRequest, submitted: float) -> Stream:
        with self._refusing():
            prompt = request.prompt
            if isinstance(prompt, str):
                self._check_room(request)  # again: others were let in since the request was submitted
                prompt = await self._encode(prompt, request.tenant, num_sequences(request.params))
            self._validator.check_prompt(prompt, request.params)
            return self._accept(request, prompt, submitted)

    async def _encode(self, text: str, tenant: str, count: int) -> tuple[int, ...]:
        """In a thread: a long text takes its time. Meanwhile the request holds its places in the queue."""
        assert self.machine.tokenizer is not None
        self._tokenizing[tenant] += count
        try:
            return tuple(await asyncio.to_thread(self.machine.tokenizer.encode, text))
        except Exception as error:  # the library raises bare Exception
            raise GenerationFailed(f"the prompt could not be tokenized: {error}") from error
        finally:
            self._tokenizing[tenant] -= count
            if not self._tokenizing[tenant]:
                del self._tokenizing[tenant]

    def _accept(self, request: GenerateRequest, prompt: tuple[int, ...], submitted: float) -> Stream:
        if self._scoring:
            raise Unavailable("this engine computes logits for somebody now; try again")
        params = request.params
        seed = secrets.randbits(64) if params.seed is None else int(params.seed)
        requests = scheduled_requests(
            request,
            prompt,
            first_id=self._next_id,
            seed=seed,
            eos_token_ids=self.machine.eos_token_ids,
            submitted=submitted,
        )
        outlook = self._batcher.add(*requests)
        self._next_id += len(requests)
        stream = Stream(admission(outlook), prompt, lambda: self._cancel(live))
        live = delivery(params)(stream, params, seed, submitted, requests, lambda: self._detokenizer(params))
        live.deadline_ms = request.deadline_ms
        self._branches.update((branch.request.request_id, branch) for branch in live.branches)
        return stream

    def _detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer | None:
        if self.machine.tokenizer is None:
            return None
        return IncrementalDetokenizer(
            self.machine.tokenizer, params.stop, params.include_stop_str_in_output, params.min_tokens
        )

    def _cancel(self, live: Live) -> None:
        for branch in live.branches:
            self._batcher.cancel(branch.request.request_id)

    # Stepping.

    async def _execute(self, plan: StepPlan) -> StepResult:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, self.machine.executor.execute, plan)
        except Exception:
            _log.exception("step failed", step=plan.step_id, sequences=len(plan.sequences))
            raise

    def _observe_step(self, step: FinishedStep) -> None:
        self._observer.on_step(
            StepStats(
                duration_s=step.result.duration_s,
                prefill_tokens=step.plan.num_prefill_tokens,
                decode_tokens=step.plan.num_decode_rows,
                context_tokens=tuple([s.first_position + len(s.token_ids) for s in step.plan.sequences]),
                schedule_s=step.schedule_s,
                commit_s=step.commit_s,
                publish_s=step.publish_s,
            )
        )

    async def logits(self, token_ids: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Raw logits [len(token_ids), vocab] after each token, all computed, past the scheduler. For evaluation,
        on an engine that serves nobody: raises Unavailable while a request is alive, and no request is accepted
        meanwhile.
        """
        self._validator.check_token_ids(token_ids)
        if self._closed or self._branches or self._scoring:
            raise Unavailable("logits are computed between requests; wait until the running ones have ended")
        self._scoring = True
        executor, loop = self.machine.executor, asyncio.get_running_loop()
        out = np.empty((len(token_ids), self.machine.spec.vocab_size), np.float32)
        table, _ = self.pager.open(())
        try:
            for first in range(0, len(token_ids), executor.max_samples):
                chunk = token_ids[first : first + executor.max_samples]
                self.pager.grow(table, len(chunk))
                out[first : first + len(chunk)] = await loop.run_in_executor(
                    self._worker, executor.score, chunk, first, table.pages
                )
                self.pager.settle(table, token_ids)
            return out
        except OutOfPages as error:
            raise ContextLengthExceeded(f"{len(token_ids)} tokens do not fit the KV cache: {error}") from error
        finally:
            self.pager.release(table)
            self._scoring = False

    # Publishing.

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        now = time.monotonic()
        for update in updates:
            branch = self._branches.get(update.request.request_id)
            if branch is not None:  # else its request has failed with another branch
                self._publish_one(branch, update, now)

    def _publish_one(self, branch: Branch, update: RequestUpdate, now: float) -> None:
        live, num_tokens = branch.live, branch.num_tokens
        try:
            chunks = live.take(branch, update)
        except Exception as error:  # a detokenizer's failure is this request's alone
            self._fail(live, GenerationFailed(f"the generated tokens could not be turned into text: {error}"), now)
            return
        num_tokens = branch.num_tokens - num_tokens
        if num_tokens:
            last_s, branch.last_tokens_s = branch.last_tokens_s, now
            self._observer.on_tokens(num_tokens, None if last_s is None else now - last_s)
        if branch.finish_reason is not None:
            chunks = self._ended(branch, chunks)
        for chunk in chunks:
            live.stream.put(chunk)
        if not live.num_open:
            self._report(live, chunks[-1].finish_reason, None, now)
        elif branch.finish_reason is None and update.error is not None:
            self._fail(live, live.error or _failure(live, update.error), now)

    def _ended(self, branch: Branch, chunks: Sequence[OutputChunk]) -> Sequence[OutputChunk]:
        """The branch is the scheduler's no more; with the last one, the chunks tell the usage."""
        request_id = branch.request.request_id
        self.scheduler.finish(request_id, branch.finish_reason)  # no effect if it ended there
        del self._branches[request_id]
        if branch.live.num_open:
            return chunks
        return [*chunks[:-1], msgspec.structs.replace(chunks[-1], usage=branch.live.usage())]

    def _fail(self, live: Live, error: QuireError, now: float) -> None:
        """One typed error ends the request and all its branches. Their pages are back when this returns."""
        for branch in live.branches:
            self.scheduler.finish(branch.request.request_id, error=str(error))
            self._branches.pop(branch.request.request_id, None)
        live.stream.put(error)
        self._report(live, None, error, now)

    def _end_leftovers(self) -> None:
        """A step that broke the loop may have taken endings with it: nobody waits for them for ever."""
        now = time.monotonic()
        for live in {id(branch.live): branch.live for branch in self._branches.values()}.values():
            error = live.error or GenerationFailed("the engine stopped unexpectedly")
            live.stream.put(error)
            self._report(live, None, error, now)
        self._branches.clear()

    def _report(self, live: Live, reason: FinishReason | None, error: QuireError | None, now: float) -> None:
        first = live.first_token_time()
        usage = live.usage()
        self._observer.on_finished(
            RequestStats(
                tenant=live.tenant,
                finish_reason=reason,
                error=error,
                prompt_tokens=usage.prompt_tokens,
                usage=usage,
                e2e_s=now - live.submitted,
                time_to_first_token_s=None if first is None else first - live.submitted,
                time_per_output_token_s=live.time_per_output_token_s(),
            )
        )


def _failure(live: Live, error: str) -> QuireError:
    """What the scheduler ended a request with, as its user should see it."""
    if error == DEADLINE_PASSED:
        return DeadlineExceeded(f"the request's deadline of {live.deadline_ms} ms passed")
    return GenerationFailed(error)
