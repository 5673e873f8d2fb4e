"""The engine: checks and queues requests on a core, and turns the core's updates into streams of text.

Everything here runs on the event loop's thread, so there are no locks. Only tokenizing runs in helper threads.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ...scheduler import AdmissionEstimate, Request, RequestUpdate, SchedulerError
from ..common.config import EngineConfig
from ..common.errors import GenerationFailed, InvalidRequest, Overloaded, QuireError, Unavailable
from ..common.prompts import PromptImage
from ..common.types import FinishReason, OutputChunk, Usage
from .build import load_texts
from .continuation import Continuation
from .core import Core, CoreListener, Prefilled
from .embedding.embedder import CHARACTERS_PER_TOKEN, Embedder, EmbeddingStream, EncoderTextProcessor
from .engine_core import EngineCore
from .error_mapping import failure_error, refusal_error
from .facade import (
    EmbedRequest,
    EncoderInfo,
    EngineInfo,
    EngineObserver,
    EngineStats,
    GenerateRequest,
    HostStatus,
    RequestStats,
    SilentObserver,
    StepStats,
)
from .input import (
    PreparedInput,
    conversation_of,
    fitted,
    num_sequences,
    placed_images,
    scheduled_requests,
)
from .output import SequenceOutput, Stream, StreamingOutput, output_class
from .preparing import PromptPreparer
from .text import Token
from .text_processor import TextProcessor
from .token_texts import TokenTexts
from .validator import Validator

CoreT = TypeVar("CoreT", bound=Core)


class Engine(Generic[CoreT]):
    """Implements `facade.EngineFacade` over a core, which it starts and owns. End both with `close`."""

    def __init__(
        self, core: CoreT, text_processor: TextProcessor, encoder_texts: EncoderTextProcessor | None = None
    ) -> None:
        self.core = core
        self.text_processor = text_processor
        info, reader = core.info, text_processor.image_reader
        self.info = EngineInfo(
            **msgspec.structs.asdict(info),
            has_tokenizer=text_processor.tokenizer is not None,
            has_chat_template=text_processor.chat_template is not None,
            chat_problem=text_processor.chat_problem,
            default_sampling=text_processor.default_sampling,
            max_images=0 if info.images is None or reader is None else reader.max_images,
        )
        self._validator = Validator(self.info, info.max_model_len * text_processor.longest_token)
        self._eos_token_ids = frozenset(
            token for token in info.eos_token_ids | text_processor.eos_token_ids if token < info.vocab_size
        )
        self._observer: EngineObserver = SilentObserver()
        self._sequences: dict[int, SequenceOutput] = {}  # request id of the core -> its output, until it ends
        self._prompts = PromptPreparer(text_processor, self._validator, self._eos_token_ids)
        self._texts = self._encoder_texts = TokenTexts(text_processor, self._validator, self._prompts.executor)
        self._image_bytes = 0  # pixels of live requests
        self._next_id = 0
        self._embedder: Embedder | None = None
        if info.encoder is not None and encoder_texts is not None:
            self._embedder = Embedder(core, info.encoder, encoder_texts, self._prompts.executor, self._new_id)
            self._encoder_texts = self._texts_of_encoder(info.encoder, encoder_texts)
        core.start(CoreListener(self._publish, self._fail_request, self._observe_step, self._fail_all))

    @classmethod
    async def start(cls, config: EngineConfig, *, populate: bool = True) -> Engine[EngineCore]:
        """Load the model into this process and allocate all memory. Raises ModelError or ConfigError.

        `populate` is that of `EngineCore.load`.
        """
        loading = asyncio.create_task(EngineCore.load(config, populate=populate))
        try:
            texts = await asyncio.to_thread(load_texts, config)
        except BaseException:
            loading.cancel()
            for core in await asyncio.gather(loading, return_exceptions=True):
                if isinstance(core, EngineCore):
                    await core.close()
            raise
        return Engine(await loading, *texts)

    def _texts_of_encoder(self, encoder: EncoderInfo, encoder_texts: EncoderTextProcessor) -> TokenTexts:
        """Return the texts of the encoder's tokens, which are not those of a model beside it."""
        info = msgspec.structs.replace(
            self.info, vocab_size=encoder.vocab_size, max_model_len=encoder.max_model_len, has_tokenizer=True
        )
        validator = Validator(info, encoder.max_model_len * CHARACTERS_PER_TOKEN)
        return TokenTexts(TextProcessor(encoder_texts.tokenizer, None), validator, self._prompts.executor)

    def submit(self, request: GenerateRequest) -> Coroutine[Any, Any, Stream]:
        """See `facade.EngineFacade.submit`."""
        submitted = time.monotonic()
        try:
            if not self.info.generates:
                raise InvalidRequest("this model is an encoder, which generates no text: it makes embeddings or scores")
            self._validator.check_options(request)
            # Count requests that are still being tokenized as queued; otherwise more are tokenized than can be queued.
            num_queued = num_sequences(request.sampling_params)
            self.core.check_room(request.tenant, num_queued + self._prompts.num_preparing(request.tenant))
            self._validator.check_prompt(request)  # after the queue: checking a long text takes its time
            prepared = self._prompts.prepare(request, num_queued)
        except SchedulerError as error:
            raise self._rejected(refusal_error(error)) from error
        except QuireError as error:
            self._rejected(error)
            raise
        return self._accept(request, prepared, submitted)

    def embed(self, request: EmbedRequest) -> Coroutine[Any, Any, EmbeddingStream]:
        """See `facade.EngineFacade.embed`."""
        if self._embedder is None:
            raise self._rejected(
                InvalidRequest("this server has no embedding model; `quire serve --embedding-model FOLDER` adds one")
            )
        try:
            self._embedder.check(request)
        except QuireError as error:
            raise self._rejected(error) from error
        return self._accept_texts(self._embedder, request)

    async def _accept_texts(self, embedder: Embedder, request: EmbedRequest) -> EmbeddingStream:
        try:
            return await embedder.accept(request)
        except QuireError as error:
            self._rejected(error)
            raise

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, *, tenant: str = "", of_encoder: bool = False
    ) -> tuple[int, ...]:
        """See `facade.EngineFacade.tokenize`."""
        texts = self._encoder_texts if of_encoder else self._texts
        return await texts.tokenize(text, add_special_tokens, tenant)

    async def tokenize_chat(self, request: GenerateRequest) -> tuple[int, ...]:
        """See `facade.EngineFacade.tokenize_chat`."""
        self._validator.check_prompt(request)
        return await self._prompts.token_ids(request)

    async def detokenize(
        self,
        token_ids: tuple[int, ...],
        *,
        skip_special_tokens: bool = True,
        tenant: str = "",
        of_encoder: bool = False,
    ) -> str:
        """See `facade.EngineFacade.detokenize`."""
        texts = self._encoder_texts if of_encoder else self._texts
        return await texts.detokenize(token_ids, skip_special_tokens, tenant)

    def token(self, token_id: int, *, of_encoder: bool = False) -> Token:
        """See `facade.EngineFacade.token`."""
        return (self._encoder_texts if of_encoder else self._texts).token(token_id)

    def stats(self) -> EngineStats:
        """See `facade.EngineFacade.stats`."""
        return self.core.stats()

    def host_statuses(self) -> Sequence[HostStatus] | None:
        """See `facade.EngineFacade.host_statuses`."""
        return self.core.host_statuses()

    def set_observer(self, observer: EngineObserver) -> None:
        """See `facade.EngineFacade.set_observer`."""
        self._observer = observer
        if self._embedder is not None:
            self._embedder.observer = observer

    async def drain(self) -> None:
        """See `facade.EngineFacade.drain`."""
        await self.core.drain()
        if self._embedder is not None:
            await self._embedder.drain()

    async def stop(self) -> None:
        """End all requests now and compute nothing more. Idempotent."""
        if self._embedder is not None:
            self._embedder.close()
        for sequence in self._sequences.values():
            sequence.output.error = Unavailable("the engine was closed before this request ended; try again")
        await self.core.stop()

    async def close(self) -> None:
        """See `facade.EngineFacade.close`."""
        try:
            await self.stop()
        finally:
            self.end_texts()
            await self.core.close()

    def end_texts(self) -> None:
        """End the threads and processes that prepare prompts, whose owner closes the core. Idempotent."""
        self._prompts.close()

    async def logits(
        self: Engine[EngineCore], token_ids: tuple[int, ...], images: Sequence[PromptImage] = ()
    ) -> npt.NDArray[np.float32]:
        """Return what `EngineCore.logits` does. Raises InvalidRequest or ContextLengthExceeded too."""
        self._validator.check_token_ids(token_ids)
        self._validator.check_images(token_ids, images)
        return await self.core.logits(token_ids, placed_images(images))

    # From a request to the core's queue

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _hold_images(self, images: Sequence[PromptImage]) -> int:
        """Count the pixels of a request that begins, and return their bytes. Raises Overloaded."""
        num_bytes = sum(image.pixels.nbytes for image in images)
        reader = self.text_processor.image_reader
        if reader is not None and self._image_bytes + num_bytes > reader.max_memory:
            raise Overloaded(
                f"the images of this request take {num_bytes} bytes, those of others {self._image_bytes}, and all may "
                f"take {reader.max_memory} (`max_image_memory`)"
            )
        self._image_bytes += num_bytes
        return num_bytes

    def _release_images(self, output: StreamingOutput) -> None:
        self._image_bytes -= output.image_bytes
        output.image_bytes = 0

    async def _accept(
        self, request: GenerateRequest, preparing: PreparedInput | asyncio.Future[PreparedInput], submitted: float
    ) -> Stream:
        """Queue the request on the core."""
        output: StreamingOutput | None = None
        try:
            prepared = preparing if isinstance(preparing, PreparedInput) else await preparing
            token_ids = prepared.token_ids
            request = msgspec.structs.replace(request, sampling_params=prepared.params, image_files=())
            if request.fit_max_tokens:
                request = fitted(request, self.info.max_model_len - len(token_ids))
            params = request.sampling_params
            self._validator.check_token_ids(token_ids, params.max_tokens)
            self._validator.check_images(token_ids, prepared.images)
            seed = secrets.randbits(64) if params.seed is None else int(params.seed)
            requests = scheduled_requests(
                request,
                token_ids,
                first_id=self._next_id,
                seed=seed,
                eos_token_ids=self._eos_token_ids,
                submitted=submitted,
                conversation=conversation_of(request, prepared),
                continuation=prepared.continuation,
                images=prepared.images,
                has_own_grammar=prepared.has_own_grammar,
            )
            self._next_id += len(requests)
            num_echoed = len(token_ids) - 1 if request.echo else 0
            stream = Stream(
                token_ids,
                seed,
                lambda: self._cancel(requests),
                prepared.new_parser,
                reads_output=request.reads_output,
            )
            new_detokenizer = self._prompts.new_detokenizer(prepared, num_echoed)
            output = output_class(params)(
                stream, request, seed, submitted, requests, new_detokenizer, prepared.continuation
            )
            output.image_bytes = self._hold_images(prepared.images)
            # Registered first: the core's updates may come before its answer.
            self._sequences.update((sequence.request.request_id, sequence) for sequence in output.sequences)
            self._end_former(output, prepared.continuation)
            stream.admission = await self.core.add(requests) if requests else AdmissionEstimate(0, 0, 0)
        except BaseException as error:
            if output is not None:
                self._forget(output, "it was refused")
                self._release_images(output)
                output.forget_sequences()
            if isinstance(error, SchedulerError):
                raise self._rejected(refusal_error(error)) from error
            if isinstance(error, QuireError):
                self._rejected(error)
            raise
        return stream

    def _end_former(self, output: StreamingOutput, continuation: Continuation | None) -> None:
        """Publish the ends of outputs whose tokens all come from another server, with the usage if none is open."""
        for index, end in enumerate(continuation.ends if continuation else ()):
            is_last = not output.sequences and continuation is not None and index == len(continuation.ends) - 1
            usage = output.usage() if is_last else None
            output.stream.put(msgspec.structs.replace(end, usage=usage), is_read=True)
            if usage is not None:
                self._report(output, end.finish_reason, None, usage, time.monotonic())

    def _rejected(self, error: QuireError) -> QuireError:
        """Report a refused request to the observer, and return its error."""
        self._observer.on_rejected(error)
        return error

    def _cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.core.cancel(request.request_id)

    def _forget(self, output: StreamingOutput, why: str) -> None:
        """End the request's sequences on the core without publishing anything; their pages are free immediately."""
        for sequence in output.sequences:
            if self._sequences.pop(sequence.request.request_id, None) is not None:
                self.core.drop(sequence.request.request_id, error=why)

    # From the core's updates to streams

    def _observe_step(self, stats: StepStats, prefilled: Sequence[Prefilled]) -> None:
        self._observer.on_step(stats)
        for request_id, num_tokens in prefilled:
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.is_first_to_prefill():
                sequence.output.stream.note_prefill(num_tokens)

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        now = time.monotonic()
        for update in updates:
            sequence = self._sequences.get(update.request_id)
            if sequence is None:  # texts, or its request has failed because of another sequence
                if self._embedder is not None:
                    self._embedder.take(update)
                continue
            output, num_before = sequence.output, sequence.num_tokens
            try:
                chunks = output.take(sequence, update)
            except Exception as error:  # the detokenizer failed: only this request ends
                text = f"the generated tokens could not be turned into text: {error}"
                self._fail(output, GenerationFailed(text), now)
                continue
            num_tokens = sequence.num_tokens - num_before
            if num_tokens:
                last_s, sequence.last_tokens_s = sequence.last_tokens_s, now
                self._observer.on_tokens(num_tokens, None if last_s is None else now - last_s)
            if sequence.finish_reason is not None:
                self._end(sequence, update, chunks, now)
                continue
            for chunk in chunks:
                output.stream.put(chunk)
            if update.error is not None and update.request_id in self._sequences:  # a reader may cancel its request
                self._fail(output, output.error or failure_error(update.error, output.request.deadline_ms), now)

    def _end(self, sequence: SequenceOutput, update: RequestUpdate, chunks: Sequence[OutputChunk], now: float) -> None:
        """Forget a sequence that has ended. The last chunk of its request's last sequence gets the usage."""
        output, request_id = sequence.output, update.request_id
        if not update.ended:  # it ended at a stop string, which the core cannot see
            self.core.drop(request_id, sequence.finish_reason)
        del self._sequences[request_id]
        if output.num_open:
            for chunk in chunks:
                output.stream.put(chunk)
            return
        usage = output.usage()
        *others, last = chunks
        for chunk in others:
            output.stream.put(chunk)
        output.stream.put(msgspec.structs.replace(last, usage=usage))
        self._report(output, last.finish_reason, None, usage, now)

    def _fail_request(self, request_id: int, error: QuireError) -> None:
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._fail(sequence.output, sequence.output.error or error, time.monotonic())
        elif self._embedder is not None:
            self._embedder.fail(request_id, error)

    def _fail(self, output: StreamingOutput, error: QuireError, now: float) -> None:
        """End a request and all its sequences with one error."""
        self._forget(output, str(error))
        output.stream.put(error)
        self._report(output, None, error, output.usage(), now)

    def _fail_all(self) -> None:
        """End the requests that are left when the core has ended: the step that broke it may have ended some."""
        now = time.monotonic()
        if self._embedder is not None:
            self._embedder.fail_all()
        for output in {id(sequence.output): sequence.output for sequence in self._sequences.values()}.values():
            error = output.error or GenerationFailed("the engine stopped unexpectedly")
            output.stream.put(error)
            self._report(output, None, error, output.usage(), now)
        self._sequences.clear()

    def _report(
        self,
        output: StreamingOutput,
        reason: FinishReason | None,
        error: QuireError | None,
        usage: Usage,
        now: float,
    ) -> None:
        """Report the end of a request to the observer, and forget its sequences."""
        first = output.first_token_time()
        self._observer.on_finished(
            RequestStats(
                tenant=output.request.tenant,
                finish_reason=reason,
                error=copy.copy(error),  # without its traceback
                prompt_tokens=usage.prompt_tokens,
                usage=usage,
                e2e_s=now - output.submitted,
                time_to_first_token_s=None if first is None else first - output.submitted,
                time_per_output_token_s=output.time_per_output_token_s(),
            )
        )
        self._release_images(output)
        output.forget_sequences()


LocalEngine = Engine[EngineCore]
