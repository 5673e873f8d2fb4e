"""The engine: from a user's request to sequences on a core, and from what the core reports to chunks of text.

It must not know what runs the core, sockets or metrics libraries. One invariant: everything here happens on the event
loop's thread, so nothing locks.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ...scheduler import DEADLINE_PASSED, RequestUpdate, SchedulerError
from ..common.config import EngineConfig
from ..common.errors import DeadlineExceeded, GenerationFailed, InvalidRequest, QuireError, Unavailable
from ..common.types import FinishReason, OutputChunk
from ..model import model_folder
from .core import Core, CoreListener, EngineCore, Prefilled
from .error_mapping import translate
from .facade import EngineInfo, EngineObserver, EngineStats, GenerateRequest, RequestStats, StepStats
from .input import num_sequences, scheduled_requests
from .observer import SilentObserver
from .output import SequenceOutput, StreamingOutput, output_class
from .stream import Stream
from .text_processor import TextProcessor
from .validator import RequestLimits, Validator

CoreT = TypeVar("CoreT", bound=Core)


class Engine(Generic[CoreT]):
    """Implements `facade.EngineFacade`. It starts `core`, and owns it from then on; end both with `close`."""

    def __init__(self, core: CoreT, text_processor: TextProcessor) -> None:
        self.core = core
        self.text_processor = text_processor
        info = core.info
        self._validator = Validator(
            RequestLimits(
                info.vocab_size,
                info.max_model_len,
                info.max_model_len * text_processor.longest_token,
                info.max_num_seqs,
            )
        )
        self._eos_token_ids = frozenset(
            token for token in info.eos_token_ids | text_processor.eos_token_ids if token < info.vocab_size
        )
        self._observer: EngineObserver = SilentObserver()
        self._sequences: dict[int, SequenceOutput] = {}  # of live requests, by the core's id
        self._preparing: Counter[str] = Counter()  # sequences whose prompt is being made, by tenant
        self._next_id = 0
        core.start(CoreListener(self._publish, self._fail_request, self._observe_step, self._end_leftovers))

    @classmethod
    async def start(cls, config: EngineConfig) -> Engine[EngineCore]:
        """In this process: load the model, plan and take all memory, and be ready. Raises ModelError or ConfigError."""
        text_processor = await asyncio.to_thread(TextProcessor.load, model_folder(config.model))
        return Engine(await EngineCore.load(config), text_processor)

    @property
    def info(self) -> EngineInfo:
        core = self.core.info
        return EngineInfo(
            vocab_size=core.vocab_size,
            max_model_len=core.max_model_len,
            max_num_seqs=core.max_num_seqs,
            num_pages=core.num_pages,
            page_size=core.page_size,
            isa=core.isa,
            threads=core.threads,
            threads_reason=core.threads_reason,
            has_tokenizer=self.text_processor.tokenizer is not None,
            has_chat_template=self.text_processor.chat_template is not None,
            num_processes=core.num_processes,
        )

    def submit(self, request: GenerateRequest) -> Coroutine[Any, Any, Stream]:
        """See `facade.EngineFacade.submit`."""
        submitted = time.monotonic()
        with self._refusing():
            self._check(request)
        return self._take(request, submitted)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """See `facade.EngineFacade.tokenize`."""
        self.text_processor.require_tokenizer()
        self._validator.check_text(text)
        return await self.text_processor.encode(text, add_special_tokens)

    def stats(self) -> EngineStats:
        """Raises Unavailable while nothing can be computed, so that readiness and metrics do not look idle."""
        return self.core.stats()

    def set_observer(self, observer: EngineObserver) -> None:
        self._observer = observer

    async def drain(self) -> None:
        await self.core.drain()

    async def stop(self) -> None:
        """End everything now and compute nothing more. Idempotent."""
        for sequence in self._sequences.values():
            closed = Unavailable("the engine was closed before this request ended; try again")
            sequence.output.error = sequence.output.error or closed
        await self.core.stop()

    async def close(self) -> None:
        try:
            await self.stop()
        finally:
            await self.core.close()

    async def logits(self: Engine[EngineCore], token_ids: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """See `EngineCore.logits`. Raises InvalidRequest or ContextLengthExceeded besides."""
        self._validator.check_token_ids(token_ids)
        return await self.core.logits(token_ids)

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
        params, prompt = request.sampling_params, request.prompt
        self._validator.check_params(params)
        self._validator.check_schedule(request.priority, request.deadline_ms, request.pin_ms)
        self._check_room(request)
        if (prompt is None) == (request.messages is None):
            raise InvalidRequest("give a prompt or messages, and not both")
        if request.messages is not None:
            self.text_processor.require_chat_template()
        if not isinstance(prompt, tuple):
            self.text_processor.require_tokenizer()
        elif params.stop and self.text_processor.tokenizer is None:
            raise InvalidRequest("stop strings cannot be found without a tokenizer.json; use stop_token_ids")
        if isinstance(prompt, str):
            self._validator.check_text(prompt)

    def _check_room(self, request: GenerateRequest) -> None:
        """Those whose prompt is being made count as waiting, else more would be tokenized than can be taken."""
        count = num_sequences(request.sampling_params) + self._preparing[request.tenant]
        self.core.check_room(request.tenant, count)

    async def _take(self, request: GenerateRequest, submitted: float) -> Stream:
        with self._refusing():
            prompt = request.prompt
            if not isinstance(prompt, tuple):
                self._check_room(request)  # again: others were let in since the request was submitted
                with self._holding_places(request.tenant, num_sequences(request.sampling_params)):
                    prompt = await self._prompt_token_ids(request)
            self._validator.check_prompt(prompt, request.sampling_params)
            return await self._accept(request, prompt, submitted)

    @contextmanager
    def _holding_places(self, tenant: str, count: int) -> Iterator[None]:
        """In the queue, for a request whose prompt is being made."""
        self._preparing[tenant] += count
        try:
            yield
        finally:
            self._preparing[tenant] -= count
            if not self._preparing[tenant]:
                del self._preparing[tenant]

    async def _prompt_token_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        if isinstance(request.prompt, str):
            return await self.text_processor.encode(request.prompt)
        text = await self.text_processor.render(request.messages or ())
        self._validator.check_text(text)
        return await self.text_processor.encode(text, add_special_tokens=False)

    async def _accept(self, request: GenerateRequest, prompt: tuple[int, ...], submitted: float) -> Stream:
        params = request.sampling_params
        seed = secrets.randbits(64) if params.seed is None else int(params.seed)
        requests = scheduled_requests(
            request,
            prompt,
            first_id=self._next_id,
            seed=seed,
            eos_token_ids=self._eos_token_ids,
            submitted=submitted,
        )
        self._next_id += len(requests)
        stream = Stream(prompt, lambda: self._cancel(output))
        output = output_class(params)(
            stream, request, seed, submitted, requests, lambda: self.text_processor.detokenizer(params)
        )
        # Before the core knows them: what it reports may come sooner than its answer.
        self._sequences.update((sequence.request.request_id, sequence) for sequence in output.sequences)
        try:
            stream.admission = await self.core.add(requests)
        except BaseException:
            self._forget(output, "it was refused")
            raise
        return stream

    def _cancel(self, output: StreamingOutput) -> None:
        for sequence in output.sequences:
            self.core.cancel(sequence.request.request_id)

    def _forget(self, output: StreamingOutput, why: str) -> None:
        """Nothing more comes of it. Its pages are back before the next step."""
        for sequence in output.sequences:
            if self._sequences.pop(sequence.request.request_id, None) is not None:
                self.core.drop(sequence.request.request_id, error=why)

    # Publishing.

    def _observe_step(self, stats: StepStats, prefilled: Sequence[Prefilled]) -> None:
        self._observer.on_step(stats)
        for request_id, num_tokens in prefilled:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                sequence.output.note_prefill(sequence, num_tokens)

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        now = time.monotonic()
        for update in updates:
            sequence = self._sequences.get(update.request_id)
            if sequence is not None:  # else its request has failed with another sequence
                self._publish_one(sequence, update, now)

    def _publish_one(self, sequence: SequenceOutput, update: RequestUpdate, now: float) -> None:
        output, num_tokens = sequence.output, sequence.num_tokens
        try:
            chunks = output.take(sequence, update)
        except Exception as error:  # a detokenizer's failure is this request's alone
            self._fail(output, GenerationFailed(f"the generated tokens could not be turned into text: {error}"), now)
            return
        num_tokens = sequence.num_tokens - num_tokens
        if num_tokens:
            last_s, sequence.last_tokens_s = sequence.last_tokens_s, now
            self._observer.on_tokens(num_tokens, None if last_s is None else now - last_s)
        if sequence.finish_reason is not None:
            if not update.ended:  # a stop string that only we could see
                self.core.drop(sequence.request.request_id, sequence.finish_reason)
            chunks = self._ended(sequence, chunks)
        for chunk in chunks:
            output.stream.put(chunk)
        if not output.num_open:
            self._report(output, chunks[-1].finish_reason, None, now)
        elif sequence.finish_reason is None and update.error is not None:
            self._fail(output, output.error or _failure(output, update.error), now)

    def _ended(self, sequence: SequenceOutput, chunks: Sequence[OutputChunk]) -> Sequence[OutputChunk]:
        """The sequence is the core's no more; with the last one, the chunks tell the usage."""
        del self._sequences[sequence.request.request_id]
        if sequence.output.num_open:
            return chunks
        return [*chunks[:-1], msgspec.structs.replace(chunks[-1], usage=sequence.output.usage())]

    def _fail_request(self, request_id: int, error: QuireError) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._fail(sequence.output, sequence.output.error or error, time.monotonic())

    def _fail(self, output: StreamingOutput, error: QuireError, now: float) -> None:
        """One typed error ends the request and all its sequences."""
        self._forget(output, str(error))
        output.stream.put(error)
        self._report(output, None, error, now)

    def _end_leftovers(self) -> None:
        """A step that broke the loop may have taken endings with it: nobody waits for them for ever."""
        now = time.monotonic()
        for output in {id(sequence.output): sequence.output for sequence in self._sequences.values()}.values():
            error = output.error or GenerationFailed("the engine stopped unexpectedly")
            output.stream.put(error)
            self._report(output, None, error, now)
        self._sequences.clear()

    def _report(
        self, output: StreamingOutput, reason: FinishReason | None, error: QuireError | None, now: float
    ) -> None:
        first = output.first_token_time()
        usage = output.usage()
        self._observer.on_finished(
            RequestStats(
                tenant=output.request.tenant,
                finish_reason=reason,
                error=copy.copy(error),  # without its traceback, whose frames keep the request
                prompt_tokens=usage.prompt_tokens,
                usage=usage,
                e2e_s=now - output.submitted,
                time_to_first_token_s=None if first is None else first - output.submitted,
                time_per_output_token_s=output.time_per_output_token_s(),
            )
        )


LocalEngine = Engine[EngineCore]


def _failure(output: StreamingOutput, error: str) -> QuireError:
    """What the scheduler ended a request with, as its user should see it."""
    if error == DEADLINE_PASSED:
        return DeadlineExceeded(f"the request's deadline of {output.request.deadline_ms} ms passed")
    return GenerationFailed(error)
