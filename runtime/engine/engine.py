"""The engine: one scheduler, one executor and one worker thread behind the facade, in this process.

It turns requests into scheduled ones, and what the scheduler reports into chunks of text. It must not know sockets or
metrics libraries. One invariant: everything but the step itself happens on the event loop's thread, so nothing here
locks.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from ...pager import OutOfPages, Pager
from ...scheduler import (
    Batcher,
    FinishedStep,
    NotAccepting,
    QueueFull,
    Request,
    RequestUpdate,
    SampledToken,
    Scheduler,
    StepPlan,
    StepResult,
    TokenBudget,
    TooLong,
)
from ...scheduler import Limits as SchedulerLimits
from ..config import EngineConfig
from ..errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    QuireError,
    Unavailable,
)
from ..execution import Machine, SamplingSpec, assemble
from ..generation import FinishReason, OutputChunk, SamplingParams, TokenLogprobs, Usage
from ..text import IncrementalDetokenizer, Tokenizer
from .facade import Admission, EngineObserver, EngineStats, GenerateRequest, RequestStats, StepStats
from .observer import SilentObserver
from .stream import Stream
from .validator import Limits, Validator

_log = structlog.get_logger("quire.engine")


@dataclass(slots=True)
class Live:
    """A request between acceptance and its end."""

    stream: Stream
    request: Request
    params: SamplingParams
    seed: int
    detokenizer: IncrementalDetokenizer | None  # None: the model has no tokenizer
    submitted: float
    published: int = 0  # tokens
    last_publish: float | None = None
    deadline: asyncio.TimerHandle | None = None
    error: QuireError | None = None  # what a failure of ours should be called


class Engine:
    """Implements `facade.EngineFacade`. Make one with `await Engine.start(config)`, end it with `close`."""

    def __init__(self, machine: Machine, config: EngineConfig, max_prefill_chunk: int | None = None) -> None:
        self.machine = machine
        self.config = config
        longest_token = machine.tokenizer.longest_token if machine.tokenizer else 0
        self._validator = Validator(
            Limits(machine.spec.vocab_size, machine.max_model_len, machine.max_model_len * longest_token)
        )
        self._pager = Pager(
            machine.layout.page_size,
            machine.num_pages,
            windows=machine.layout.group_windows,
            copy_page=machine.arena.copy_page,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            self._pager,
            budget=TokenBudget(config.max_num_batched_tokens),
            max_num_seqs=config.max_num_seqs,
            limits=SchedulerLimits(max_num_waiting=config.max_num_waiting),
            max_prefill_chunk=max_prefill_chunk,
        )
        self._batcher = Batcher(self.scheduler, self._execute, self._publish, self._observe_step)
        self._worker = ThreadPoolExecutor(1, "quire-step")
        self._observer: EngineObserver = SilentObserver()
        self._live: dict[int, Live] = {}
        self._next_id = 0
        self._scoring = False
        self._closed = False
        self._batcher.start()

    @classmethod
    async def start(cls, config: EngineConfig) -> Engine:
        """Load the model, plan and take all memory, and be ready for requests. Raises ModelError or ConfigError."""
        machine = await asyncio.to_thread(assemble, config)
        try:
            return cls(machine, config)
        except BaseException:
            machine.close()
            raise

    async def submit(self, request: GenerateRequest) -> Stream:
        """See `facade.EngineFacade.submit`."""
        submitted = time.monotonic()
        try:
            prompt = await self._check(request)
            return self._accept(request, prompt, submitted)
        except QuireError as error:
            self._observer.on_rejected(error)
            raise

    def stats(self) -> EngineStats:
        """Raises Unavailable when the engine's loop has broken, so that readiness and metrics do not look idle."""
        if self._batcher.is_broken:
            raise Unavailable("the engine has stopped after an internal error; restart it")
        return msgspec.convert(self.scheduler.stats(), EngineStats, from_attributes=True)

    def set_observer(self, observer: EngineObserver) -> None:
        self._observer = observer

    async def drain(self) -> None:
        await self._batcher.drain()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for live in self._live.values():
            live.error = live.error or Unavailable("the engine was closed before this request ended; try again")
        try:
            await self._batcher.close()
        finally:  # whatever broke the loop, and also when nobody waits for the end any more
            self._worker.shutdown()
            self.machine.close()

    # Accepting.

    async def _check(self, request: GenerateRequest) -> tuple[int, ...]:
        """Validate, tokenize where needed (in a thread, a long text takes its time), and give the prompt's ids."""
        self._validator.check_params(request.params)
        self._validator.check_schedule(request.priority, request.deadline_ms)
        prompt = request.prompt
        if isinstance(prompt, str):
            self._validator.check_text(prompt)
            if self.machine.tokenizer is None:
                raise InvalidRequest("this model has no tokenizer.json; give the prompt as token ids")
            prompt = await _encode(self.machine.tokenizer, prompt)
        elif request.params.stop and self.machine.tokenizer is None:
            raise InvalidRequest("stop strings cannot be found without a tokenizer.json; use stop_token_ids")
        self._validator.check_prompt(prompt, request.params)
        return prompt

    def _accept(self, request: GenerateRequest, prompt: tuple[int, ...], submitted: float) -> Stream:
        if self._scoring:
            raise Unavailable("this engine computes logits for somebody now; try again")
        params = request.params
        seed = secrets.randbits(64) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.machine.eos_token_ids)
        request_id = self._next_id
        scheduled = Request(
            request_id,
            prompt,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=stop_ids,
            sampling=SamplingSpec(params, seed, stop_ids),
            tenant=request.tenant,
            priority=request.priority,
        )
        detokenizer = self._detokenizer(params)
        try:
            admission = self._batcher.add(scheduled)
        except QueueFull as error:
            raise Overloaded(str(error)) from error
        except TooLong as error:
            raise ContextLengthExceeded(str(error)) from error
        except NotAccepting as error:
            raise Unavailable(str(error)) from error
        self._next_id += 1
        told = Admission(
            position=admission.position, pages_needed=admission.pages_needed, pages_free=admission.pages_free
        )
        stream = Stream(told, prompt, lambda: self._batcher.cancel(request_id))
        live = Live(stream, scheduled, params, seed, detokenizer, submitted)
        if request.deadline_ms is not None:
            left_s = submitted + request.deadline_ms / 1000 - time.monotonic()
            live.deadline = asyncio.get_running_loop().call_later(left_s, self._expire, request_id, request.deadline_ms)
        self._live[request_id] = live
        return stream

    def _detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer | None:
        if self.machine.tokenizer is None:
            return None
        return IncrementalDetokenizer(
            self.machine.tokenizer, params.stop, params.include_stop_str_in_output, params.min_tokens
        )

    def _expire(self, request_id: int, deadline_ms: int) -> None:
        live = self._live.get(request_id)
        if live is not None:
            live.error = DeadlineExceeded(f"the request's deadline of {deadline_ms} ms passed")
            self._batcher.finish(request_id, error=str(live.error))

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
        """Raw logits [len(token_ids), vocab] after each token, past the prefix cache and the scheduler. For evaluation,
        on an engine that serves nobody: raises Unavailable while a request is alive, and no request is accepted
        meanwhile.
        """
        self._validator.check_token_ids(token_ids)
        if self._closed or self._live or self._scoring:
            raise Unavailable("logits are computed between requests; wait until the running ones have ended")
        self._scoring = True
        table, _ = self._pager.open(())
        try:
            self._pager.grow(table, len(token_ids))
            return await asyncio.get_running_loop().run_in_executor(
                self._worker, self.machine.executor.score, token_ids, table.pages
            )
        except OutOfPages as error:
            raise ContextLengthExceeded(f"{len(token_ids)} tokens do not fit the KV cache: {error}") from error
        finally:
            self._pager.release(table)
            self._scoring = False

    # Publishing.

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        now = time.monotonic()
        for update in updates:
            self._publish_one(self._live[update.request.request_id], update, now)

    def _publish_one(self, live: Live, update: RequestUpdate, now: float) -> None:
        try:
            text, stopped = self._decode(live, update)
        except Exception as error:  # a detokenizer's failure is this request's alone
            live.error = GenerationFailed(f"the generated tokens could not be turned into text: {error}")
            self._end(live, None, None, "", now)
            return
        reason = "stop" if stopped and update.error is None else update.finish_reason
        if update.tokens:
            self._observer.on_tokens(len(update.tokens), now - live.last_publish if live.last_publish else None)
            live.last_publish = now
        if reason is not None or update.error is not None:
            self._end(live, reason, update, text, now)
        else:
            live.stream.put(_chunk(live, update.tokens, text))
        live.published += len(update.tokens)

    def _decode(self, live: Live, update: RequestUpdate) -> tuple[str, bool]:
        """Text that this update finished, and whether it completed a stop string."""
        if live.detokenizer is None:
            return "", False
        text = live.detokenizer.push(token.token_id for token in update.tokens)
        if update.finish_reason is not None and not live.detokenizer.stopped:
            text += live.detokenizer.finish()
        return text, live.detokenizer.stopped

    def _end(
        self, live: Live, reason: FinishReason | None, update: RequestUpdate | None, text: str, now: float
    ) -> None:
        """The request's last word: a chunk with its usage, or one typed error. Its pages are back when this returns."""
        request = live.request
        self.scheduler.finish(request.request_id, reason, None if reason else "ended")  # no effect if it has ended
        del self._live[request.request_id]
        if live.deadline is not None:
            live.deadline.cancel()
        usage = _usage(live)
        error = None
        if reason is not None and update is not None:
            live.stream.put(_chunk(live, update.tokens, text, reason, usage))
        else:
            error = live.error or GenerationFailed(update.error if update and update.error else "the request failed")
            live.stream.put(error)
        first = request.first_token_time
        self._observer.on_finished(
            RequestStats(
                finish_reason=reason,
                error=error,
                prompt_tokens=request.num_prompt_tokens,
                usage=usage,
                e2e_s=now - live.submitted,
                time_to_first_token_s=None if first is None else first - live.submitted,
            )
        )


async def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    try:
        return tuple(await asyncio.to_thread(tokenizer.encode, text))
    except Exception as error:  # the library raises bare Exception
        raise GenerationFailed(f"the prompt could not be tokenized: {error}") from error


def _chunk(
    live: Live,
    tokens: Sequence[SampledToken],
    text: str,
    reason: FinishReason | None = None,
    usage: Usage | None = None,
) -> OutputChunk:
    logprobs = None
    if live.params.logprobs is not None:
        logprobs = tuple(TokenLogprobs(t.token_id, t.logprob or 0.0, t.top_logprobs) for t in tokens)
    return OutputChunk(
        first_index=live.published,
        token_ids=tuple(token.token_id for token in tokens),
        text=text,
        logprobs=logprobs,
        finish_reason=reason,
        usage=usage,
    )


def _usage(live: Live) -> Usage:
    request = live.request
    return Usage(
        prompt_tokens=request.num_prompt_tokens,
        completion_tokens=request.num_output_tokens,
        cached_tokens=request.cached_tokens,
        recomputed_tokens=request.recomputed_tokens,
        seed=live.seed,
        queue_ms=request.queue_s * 1000,
        prefill_ms=request.prefill_s * 1000,
        decode_ms=request.decode_s * 1000,
        stall_ms=request.stall_s * 1000,
    )
