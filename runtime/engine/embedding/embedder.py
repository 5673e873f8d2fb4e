"""Requests to embed, score or classify texts: from texts to the core's encode requests, and from values to vectors.

A request's texts pass in chunks. At most `CHUNKS_IN_CORE` of them are tokenized, computed or unread at once, so a
request of thousands of texts holds little memory besides its texts, and a reader that pauses pauses the work.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ....scheduler import AdmissionEstimate, EncodedText, EncodeRequest, EncodeSpec, RequestUpdate, SchedulerError
from ...common.errors import ContextLengthExceeded, GenerationFailed, InvalidRequest, QuireError, Unavailable
from ...common.fair_executor import FairExecutor
from ..core import Core
from ..error_mapping import failure_error, refusal_error
from ..facade import EmbeddedTexts, EmbedRequest, EmbedStats, EncoderInfo, EngineObserver, SilentObserver
from ..text import Tokenizer
from ..validator import check_embed_options
from .vectors import Floats, activated, cosines, probabilities, shortened

CHUNK_TEXTS = 64
CHUNK_CHARACTERS = 1 << 16  # characters or token ids in a chunk; a longer text is a chunk of its own
CHUNKS_IN_CORE = 2
CHARACTERS_PER_TOKEN = 128  # limit before tokenizing: a text with more characters per token of its limit is refused
QUERY_PROMPT = "query"
DOCUMENT_PROMPTS = ("document", "passage")  # names of prompts, where a vector model scores

Input = str | tuple[int, ...]


class EncoderTextProcessor(Protocol):
    """Texts of one encoder. Any thread may call its methods."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The encoder's tokenizer."""

    def encode(self, text: str, prompt: str = "") -> EncodedText:
        """Return a text, after a prompt, in the encoder's form."""

    def encode_pair(self, query: str, document: str) -> EncodedText:
        """Return a query and a document in the form of a model that scores."""

    def truncated(self, text: EncodedText, max_tokens: int) -> EncodedText:
        """Return the text with at most `max_tokens` tokens."""


class Embedder:
    """Embeds and scores texts on a core with an encoder. The engine's only thread calls it."""

    def __init__(
        self,
        core: Core,
        info: EncoderInfo,
        texts: EncoderTextProcessor,
        executor: FairExecutor,
        next_id: Callable[[], int],
    ) -> None:
        self.observer: EngineObserver = SilentObserver()
        self.info = info
        self._core = core
        self._texts = texts
        self._executor = executor
        self._next_id = next_id
        self._waiting: dict[int, asyncio.Future[tuple[bytes, ...]]] = {}  # id of the encode request -> its values
        self._deadlines_ms: dict[int, int | None] = {}  # id of the encode request -> its deadline
        self._live: set[EmbeddingStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed: QuireError | None = None  # error of requests after `close`

    def check(self, request: EmbedRequest) -> None:
        """Check everything except the lengths of texts, and that the queue has room.

        Raises InvalidRequest and others.
        """
        check_embed_options(request, self.info)
        try:
            self._core.check_room(request.tenant, 1)
        except SchedulerError as error:
            raise refusal_error(error) from error

    async def accept(self, request: EmbedRequest) -> EmbeddingStream:
        """Queue the first texts of a checked request, and return its stream. Raises the request's refusal."""
        stream = EmbeddingStream(self, request)
        self._live.add(stream)
        self._idle.clear()
        try:
            await stream.start()
        except BaseException:
            self._leave(stream)
            raise
        return stream

    def receive(self, update: RequestUpdate) -> None:
        """Pass on the update of an encode request, unless no stream waits for it."""
        future = self._waiting.pop(update.request_id, None)
        deadline_ms = self._deadlines_ms.pop(update.request_id, None)
        if future is None or future.done():
            return
        if update.error is not None:
            future.set_exception(self._closed or failure_error(update.error, deadline_ms))
        else:
            future.set_result(update.values)

    def fail(self, request_id: int, error: QuireError) -> None:
        """End an encode request with an error that is not the scheduler's."""
        future = self._waiting.pop(request_id, None)
        self._deadlines_ms.pop(request_id, None)
        if future is not None and not future.done():
            future.set_exception(self._closed or error)

    def fail_all(self) -> None:
        """End the remaining requests: the core has ended."""
        for request_id in list(self._waiting):
            self.fail(request_id, GenerationFailed("the engine stopped unexpectedly"))

    def close(self) -> None:
        """Let every stream end with Unavailable from now on."""
        self._closed = Unavailable("the engine was closed before this request ended; try again")

    async def drain(self) -> None:
        """Wait until every accepted request has ended."""
        await self._idle.wait()

    # Called by streams

    async def tokenize(self, request: EmbedRequest, inputs: Sequence[Input], first_index: int) -> list[EncodedText]:
        """Return inputs in the encoder's form. Raises ContextLengthExceeded and others.

        Texts are tokenized in a helper thread; token ids cost less than a thread's wake-up.
        """
        if request.query is None and all(isinstance(each, tuple) for each in inputs):
            return self._encode_all(request, inputs, first_index)
        return await self._executor.submit(request.tenant, self._encode_all, request, inputs, first_index)

    async def add(
        self, request: EmbedRequest, texts: Sequence[EncodedText], deadline: float | None, is_continuation: bool
    ) -> tuple[AdmissionEstimate, asyncio.Future[tuple[bytes, ...]], int]:
        """Queue one chunk on the core. Return its admission, its future values and its id."""
        if self._closed is not None:
            raise copy.copy(self._closed)
        request_id = self._next_id()
        future: asyncio.Future[tuple[bytes, ...]] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        self._deadlines_ms[request_id] = request.deadline_ms
        spec = EncodeSpec(
            request_id,
            tuple(texts),
            tenant=request.tenant,
            priority=request.priority,
            deadline=deadline,
            is_continuation=is_continuation,
        )
        try:
            return await self._core.add_encoding(EncodeRequest(spec)), future, request_id
        except BaseException as error:
            self.drop(request_id)
            if isinstance(error, SchedulerError):
                raise refusal_error(error) from error
            raise

    def drop(self, request_id: int) -> None:
        """End a chunk whose values are not wanted, unless it has ended."""
        self._deadlines_ms.pop(request_id, None)
        if (future := self._waiting.pop(request_id, None)) is not None:
            future.cancel()
            self._core.drop(request_id, error="the caller left")

    def note_end(self, stream: EmbeddingStream, error: QuireError | None) -> None:
        """Forget a stream that has ended, and report it."""
        if self._leave(stream):
            request = stream.request
            self.observer.on_embedded(
                EmbedStats(
                    tenant=request.tenant,
                    kind="classify" if request.classify else "embed" if request.query is None else "score",
                    error=copy.copy(error),
                    num_texts=stream.num_done,
                    prompt_tokens=stream.prompt_tokens,
                    e2e_s=time.monotonic() - stream.submitted,
                )
            )

    def _leave(self, stream: EmbeddingStream) -> bool:
        """Remove a stream from the live streams. Return whether it was live."""
        is_live = stream in self._live
        self._live.discard(stream)
        if not self._live:
            self._idle.set()
        return is_live

    # Functions that run in a helper thread, unless all inputs are token ids

    def _encode_all(self, request: EmbedRequest, inputs: Sequence[Input], first_index: int) -> list[EncodedText]:
        texts = []
        if request.query is not None and not self.info.num_labels and first_index == 0:
            query = self._encode(request, request.query_name, request.query, self._prompt(QUERY_PROMPT))
            texts.append(self._fitted(request, request.query_name, query))
        prompt = self._input_prompt(request)
        for index, each in enumerate(inputs, first_index):
            name = request.input_name.format(index)
            texts.append(self._fitted(request, name, self._encode(request, name, each, prompt)))
        return texts

    def _encode(self, request: EmbedRequest, name: str, text: Input, prompt: str) -> EncodedText:
        if isinstance(text, tuple):
            return EncodedText(text)
        text = self._beginning(request, name, text)
        if request.query is not None and self.info.num_labels:
            return self._texts.encode_pair(self._beginning(request, request.query_name, request.query), text)
        return self._texts.encode(text, prompt)

    def _beginning(self, request: EmbedRequest, name: str, text: str) -> str:
        """Return the part of `text` to tokenize. Raises if it is too long and truncation is off."""
        most = self.info.max_model_len * CHARACTERS_PER_TOKEN
        if len(text) > most and request.truncate_prompt_tokens is None:
            raise ContextLengthExceeded(
                f"{name} has {len(text)} characters; a text of {self.info.max_model_len} tokens, the limit of this "
                f"model, may have {most}; shorten it, or ask for truncation with truncate_prompt_tokens"
            )
        return text[:most]

    def _input_prompt(self, request: EmbedRequest) -> str:
        """Return the text before each input: the prompt of the request, or the model's own."""
        if request.query is not None:
            return next(filter(None, map(self._prompt, DOCUMENT_PROMPTS)), "")
        name = request.prompt_name if request.prompt_name is not None else self.info.default_prompt
        return "" if name is None else self.info.prompts[name]

    def _prompt(self, name: str) -> str:
        return self.info.prompts.get(name, "")

    def _fitted(self, request: EmbedRequest, name: str, text: EncodedText) -> EncodedText:
        limit = self.info.max_model_len
        truncation = request.truncate_prompt_tokens
        if truncation is not None:
            text = self._texts.truncated(text, limit if truncation < 0 else truncation)
        if len(text.token_ids) > limit:
            raise ContextLengthExceeded(
                f"{name} has {len(text.token_ids)} tokens, the limit of this model is {limit}; shorten it, or ask for "
                "truncation with truncate_prompt_tokens"
            )
        if not text.token_ids:
            raise InvalidRequest(f"{name} has no tokens; give at least one character or one token id")
        if (highest := max(text.token_ids)) >= self.info.vocab_size:
            raise InvalidRequest(
                f"{name}: the tokenizer makes token id {highest} of it, outside the model's vocabulary "
                f"0..{self.info.vocab_size - 1}"
            )
        return text


class EmbeddingStream:
    """The vectors or scores of one request. Implements `facade.Embeddings`. Iterate it once, or `cancel` it."""

    admission: AdmissionEstimate  # set by `start`

    def __init__(self, embedder: Embedder, request: EmbedRequest) -> None:
        self.request = request
        self.submitted = time.monotonic()
        self.num_done = 0  # texts
        self.prompt_tokens = 0  # tokens of texts that are done
        self._embedder = embedder
        self._deadline = None if request.deadline_ms is None else self.submitted + request.deadline_ms / 1000
        pair_characters = 0 if request.query is None or not embedder.info.num_labels else len(request.query)
        self._chunks = _chunks(request.inputs, pair_characters)
        self._query: Floats | None = None  # vector of the query, if scores are similarities
        self._running: deque[asyncio.Task[_Values]] = deque()

    async def start(self) -> None:
        """Queue the first chunk. Raises its refusal."""
        first, texts = await self._next_texts()
        self.admission, values, request_id = await self._embedder.add(self.request, texts, self._deadline, False)
        task = asyncio.create_task(_result(first, texts, values))
        task.add_done_callback(lambda _: self._embedder.drop(request_id))  # a task may be cancelled before it begins
        self._running.append(task)

    def cancel(self) -> None:
        """End the request; its texts leave the queue before the next step. Idempotent."""
        for task in self._running:
            task.cancel()
        self._running.clear()
        self._embedder.note_end(self, None)

    async def __aiter__(self) -> AsyncGenerator[EmbeddedTexts, None]:
        error: QuireError | None = None
        try:
            while self._running:
                while len(self._running) < CHUNKS_IN_CORE and (task := self._start_next()) is not None:
                    self._running.append(task)
                values = await self._running[0]
                self._running.popleft()
                yield self._embedded(values)
                if not self._running and (task := self._start_next()) is not None:
                    self._running.append(task)
        except QuireError as failure:
            error = failure
            raise
        finally:
            for task in self._running:
                task.cancel()  # even a failed task, so that asyncio does not log its exception
            self._running.clear()
            self._embedder.note_end(self, error)

    def _start_next(self) -> asyncio.Task[_Values] | None:
        chunk = next(self._chunks, None)
        return None if chunk is None else asyncio.create_task(self._compute(*chunk))

    async def _next_texts(self) -> tuple[int, list[EncodedText]]:
        first, inputs = next(self._chunks)
        return first, await self._embedder.tokenize(self.request, inputs, first)

    async def _compute(self, first: int, inputs: Sequence[Input]) -> _Values:
        """Tokenize a chunk after the first one, queue it and wait for its values."""
        texts = await self._embedder.tokenize(self.request, inputs, first)
        _, values, request_id = await self._embedder.add(self.request, texts, self._deadline, True)
        try:
            return await _result(first, texts, values)
        finally:
            self._embedder.drop(request_id)

    def _embedded(self, values: _Values) -> EmbeddedTexts:
        """Return the values of a chunk as vectors, scores or probabilities."""
        first, num_tokens, rows = values
        info = self._embedder.info
        request = self.request
        if request.classify:
            rows = probabilities(rows, info)
        elif request.query is None:
            rows = shortened(rows, request.dimensions, info.normalize)
        elif info.num_labels:
            rows = activated(rows, info.score_activation)
        else:
            if self._query is None:
                self._query = rows[0]
                rows = rows[1:]
            rows = cosines(self._query, rows)
        self.num_done += len(rows)
        self.prompt_tokens += num_tokens
        return EmbeddedTexts(first_index=first, values=rows, prompt_tokens=num_tokens)


class _Values(NamedTuple):
    """The results of the encoder for a chunk."""

    first_index: int
    num_tokens: int
    rows: Floats  # [texts, values]


async def _result(first: int, texts: Sequence[EncodedText], values: asyncio.Future[tuple[bytes, ...]]) -> _Values:
    """Wait for the values of a chunk."""
    rows = np.frombuffer(b"".join(await values), np.float32).reshape(len(texts), -1)
    return _Values(first, sum(len(text.token_ids) for text in texts), rows)


def _chunks(inputs: Sequence[Input], pair_characters: int) -> Iterator[tuple[int, Sequence[Input]]]:
    """Yield the inputs in chunks, each with the index of its first input.

    `pair_characters` is the length of the query, which is tokenized with each input if pairs are scored.
    """
    first = size = 0
    for index, each in enumerate(inputs):
        num_characters = len(each) + pair_characters
        if index > first and (index - first == CHUNK_TEXTS or size + num_characters > CHUNK_CHARACTERS):
            yield first, inputs[first:index]
            first = index
            size = 0
        size += num_characters
    yield first, inputs[first:]
