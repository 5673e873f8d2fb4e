"""The engine: checks and queues requests on a core. `LiveOutputs` turns their updates into streams.

Everything here runs on the event loop's thread, so there are no locks. Only tokenizing runs in helper threads.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ...scheduler import AdmissionEstimate, Request, SchedulerError
from ..common.config import EngineConfig
from ..common.errors import InvalidRequest, QuireError
from ..common.prompts import PromptImage
from .adapters import Adapter, AdapterRegistry
from .build import load_texts
from .continuation import Continuation
from .core import Core
from .embedding.embedder import CHARACTERS_PER_TOKEN, Embedder, EncoderTextProcessor
from .embedding.no_embedder import NoEmbedder
from .engine_core import EngineCore
from .error_mapping import refusal_error
from .facade import (
    AdapterStatus,
    Embeddings,
    EmbedRequest,
    EncoderInfo,
    EngineInfo,
    EngineObserver,
    EngineStats,
    GenerateRequest,
    HostStatus,
)
from .input import (
    PreparedInput,
    conversation_of,
    fitted,
    num_sequences,
    placed_images,
    scheduled_requests,
)
from .live_outputs import LiveOutputs
from .output import StreamingOutput, output_class
from .preparing import PromptPreparer
from .stream import Stream
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
        info = core.info
        reader = text_processor.image_reader
        self._reasoning = text_processor.reasoning_markers(info.vocab_size)
        self.info = EngineInfo(
            **{**msgspec.structs.asdict(info), "adapters": dict(info.adapters)},
            has_tokenizer=text_processor.tokenizer is not None,
            has_chat_template=text_processor.chat_template is not None,
            chat_problem=text_processor.chat_problem,
            default_sampling=text_processor.default_sampling,
            max_images=0 if info.images is None or reader is None else reader.max_images,
            has_tool_calls=text_processor.markup.calls is not None or text_processor.markup.channels,
            has_reasoning=self._reasoning is not None,
        )
        self._adapters = AdapterRegistry(core, self.info)
        self._validator = Validator(self.info, info.max_model_len * text_processor.longest_token)
        self._eos_token_ids = frozenset(
            token for token in info.eos_token_ids | text_processor.eos_token_ids if token < info.vocab_size
        )
        self._prompts = PromptPreparer(text_processor, self._validator, self._eos_token_ids)
        self._texts = self._encoder_texts = TokenTexts(text_processor, self._validator, self._prompts.executor)
        self._next_id = 0
        self._embedder: Embedder | NoEmbedder = NoEmbedder()
        if info.encoder is not None and encoder_texts is not None:
            self._embedder = Embedder(core, info.encoder, encoder_texts, self._prompts.executor, self._new_id)
            self._encoder_texts = self._texts_of_encoder(info.encoder, encoder_texts)
        self._outputs = LiveOutputs(core, self._embedder, self._adapters.release)
        core.start(self._outputs.listener)

    @classmethod
    async def start(cls, config: EngineConfig, *, populate: bool = True) -> Engine[EngineCore]:
        """Load the model into this process and allocate all memory. Raises ModelError or ConfigError.

        `populate` is passed to `EngineCore.load`.
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
        """Return the texts of the encoder's tokens, which differ from the tokens of the model that generates."""
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
            # Count requests that are still being tokenized as queued, or more would be tokenized than can be queued.
            num_queued = num_sequences(request.sampling_params)
            self.core.check_room(request.tenant, num_queued + self._prompts.num_preparing(request.tenant))
            self._validator.check_prompt(request)  # last, because checking a long text takes time
            prepared = self._prompts.prepare(request, num_queued)
        except SchedulerError as error:
            raise self._rejected(refusal_error(error)) from error
        except QuireError as error:
            self._rejected(error)
            raise
        return self._accept(request, prepared, submitted)

    def embed(self, request: EmbedRequest) -> Coroutine[Any, Any, Embeddings]:
        """See `facade.EngineFacade.embed`."""
        try:
            self._embedder.check(request)
        except QuireError as error:
            self._rejected(error)
            raise
        return self._accept_texts(request)

    async def _accept_texts(self, request: EmbedRequest) -> Embeddings:
        try:
            return await self._embedder.accept(request)
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

    def adapter_status(self, name: str) -> AdapterStatus:
        """See `facade.EngineFacade.adapter_status`."""
        return self._adapters.status(name)

    async def load_adapter(self, name: str, path: str, *, is_pinned: bool = False, in_place: bool = False) -> None:
        """See `facade.EngineFacade.load_adapter`."""
        await self._adapters.load(name, path, is_pinned=is_pinned, in_place=in_place)

    def unload_adapter(self, name: str) -> None:
        """See `facade.EngineFacade.unload_adapter`."""
        self._adapters.unload(name)

    def set_observer(self, observer: EngineObserver) -> None:
        """See `facade.EngineFacade.set_observer`."""
        self._outputs.observer = self._embedder.observer = observer

    async def drain(self) -> None:
        """See `facade.EngineFacade.drain`."""
        await self.core.drain()
        await self._embedder.drain()

    async def stop(self) -> None:
        """End all requests now and compute nothing more. Idempotent."""
        self._embedder.close()
        self._outputs.stop()
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
        self: Engine[EngineCore], token_ids: tuple[int, ...], images: Sequence[PromptImage] = (), lora: str = ""
    ) -> npt.NDArray[np.float32]:
        """Return the logits of `EngineCore.logits`. Also raises InvalidRequest or ContextLengthExceeded."""
        self._validator.check_token_ids(token_ids)
        self._validator.check_images(token_ids, images)
        adapter = await self._adapters.acquire(lora)
        try:
            return await self.core.logits(token_ids, placed_images(images), adapter.key)
        finally:
            self._adapters.release(adapter)

    # From a request to the core's queue

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    async def _accept(
        self, request: GenerateRequest, preparing: PreparedInput | asyncio.Future[PreparedInput], submitted: float
    ) -> Stream:
        """Queue a request on the core when its prompt is prepared, and return its stream.

        Raises the request's refusal.
        """
        try:
            prepared = preparing if isinstance(preparing, PreparedInput) else await preparing
            adapter = await self._adapters.acquire(request.lora)
            try:
                output = self._output_of(request, prepared, submitted, adapter)
                reader = self.text_processor.image_reader
                # The output is registered first, because the core's updates may come before its answer.
                self._outputs.add(output, None if reader is None else reader.max_memory)
            except BaseException:
                self._adapters.release(adapter)
                raise
            await self._queue(output, prepared.continuation)
        except SchedulerError as error:
            raise self._rejected(refusal_error(error)) from error
        except QuireError as error:
            self._rejected(error)
            raise
        return output.stream

    def _output_of(
        self, request: GenerateRequest, prepared: PreparedInput, submitted: float, adapter: Adapter
    ) -> StreamingOutput:
        """Return the output of a prepared request, and its stream. Raises InvalidRequest or ContextLengthExceeded."""
        token_ids = prepared.token_ids
        images = prepared.images
        request = msgspec.structs.replace(request, sampling_params=prepared.params, image_files=())
        if request.fit_max_tokens:
            request = fitted(request, self.info.max_model_len - len(token_ids))
        params = request.sampling_params
        self._validator.check_token_ids(token_ids, params.max_tokens)
        self._validator.check_images(token_ids, images)
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
            images=images,
            has_own_grammar=prepared.has_own_grammar,
            reasoning=self._reasoning,
            adapter=adapter.key,
        )
        self._next_id += len(requests)
        stream = Stream(
            token_ids,
            seed,
            lambda: self._cancel(requests),
            prepared.new_parser,
            reads_output=request.reads_output,
            has_text=self.text_processor.has_text,
        )
        return output_class(params)(
            stream,
            request,
            requests,
            self._prompts.new_detokenizer(prepared, len(token_ids) - 1 if request.echo else 0),
            seed=seed,
            submitted=submitted,
            continuation=prepared.continuation,
            reasoning=self._reasoning,
            image_bytes=sum(image.pixels.nbytes for image in images),
            adapter=adapter,
        )

    async def _queue(self, output: StreamingOutput, continuation: Continuation | None) -> None:
        """Queue a registered output's sequences on the core. Raises its refusal, leaving nothing behind."""
        requests = [sequence.request for sequence in output.sequences]
        try:
            if continuation is not None:
                self._outputs.end_former(output, continuation.ends)
            output.stream.admission = await self.core.add(requests) if requests else AdmissionEstimate(0, 0, 0)
        except BaseException:
            self._outputs.discard(output, "it was refused")
            raise

    def _rejected(self, error: QuireError) -> QuireError:
        """Report a refused request to the observer, and return its error."""
        self._outputs.observer.on_rejected(error)
        return error

    def _cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.core.cancel(request.request_id)


LocalEngine = Engine[EngineCore]
