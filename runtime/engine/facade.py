"""The engine's interface, for the server, `LLM`, the tools and the tests.

A submitted request ends in exactly one way: with a last chunk that has `usage`, or with a `QuireError` raised by its
iterator.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ...scheduler import AdmissionEstimate
from ..common.errors import QuireError
from ..common.prompts import PromptImage
from ..common.types import FinishReason, OutputChunk, SamplingParams, ToolChoice, Usage
from .text import OutputParser, Token

NewParser = Callable[[], OutputParser]
# restarting: connected, without an engine process; failing: its engines do not start
HostState = Literal["up", "down", "restarting", "failing", "leaving", "removed"]

INT_BYTES = 36  # bytes of a token id in a tuple
MAX_COUNTED = 1000  # values of one request; counting takes time on the event loop


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: a prompt (text, token ids or chat messages) and how to sample."""

    prompt: str | tuple[int, ...] | None
    sampling_params: SamplingParams = SamplingParams()
    images: tuple[PromptImage, ...] = ()  # images of a prompt of token ids, in order
    messages: tuple[dict[str, Any], ...] | None = None  # instead of a prompt; rendered by the model's chat template
    image_files: tuple[bytes, ...] = ()  # one for each image part of the messages, in order
    tools: tuple[dict[str, Any], ...] = ()  # tools that the chat template shows to the model, in OpenAI's form
    template_variables: dict[str, Any] = {}  # variables of the chat template, such as `enable_thinking`
    # Read the output as reasoning, answer and tool calls. Its text then has the markup's special tokens, and its
    # grammar follows the tools. None: the output is plain text.
    tool_choice: ToolChoice | None = None
    reads_output: bool = False  # chunks have `deltas` instead of text with markup; needs `tool_choice`
    tenant: str = ""  # tenant by authentication, never by the request's body
    priority: int = 0  # lower runs earlier
    deadline_ms: int | None = None  # milliseconds from submission
    pin_ms: int | None = None  # how long the prompt's pages stay in the prefix cache after the request ends
    echo: bool = False  # each output begins with the prompt from its second token on, with logprobs if wanted
    # Per output, the token ids that another server has generated: it continues after these. `ended`: finished outputs.
    generated: tuple[tuple[int, ...], ...] | None = None
    ended: tuple[int, ...] = ()
    fit_max_tokens: bool = False  # lower max_tokens to the rest of the context instead of refusing
    lora: str = ""  # name of the adapter that changes the model; empty: none
    cache_salt: str = ""  # only requests of the tenant with the same salt share cached pages
    prompt_cache_key: str = ""  # requests of the tenant with the same key go to the same engine process if it has room
    model: str = ""  # the server's model whose engine computes the request; empty: its first model
    trace_id: str = ""  # id of the request's trace for `RequestStats`; empty: it is not recorded

    def text_bytes(self) -> int:
        """Estimate the memory in bytes of the text to tokenize, counting at most `MAX_COUNTED` values.

        Image files count as text.
        """
        if isinstance(self.prompt, tuple):
            return 0
        num_bytes = sum(map(sys.getsizeof, self.image_files))
        unseen = [self.prompt, self.messages, self.tools, self.template_variables]
        for _ in range(MAX_COUNTED):
            if not unseen:
                break
            value: object = unseen.pop()
            num_bytes += sys.getsizeof(value)
            if isinstance(value, Mapping):
                unseen.extend(islice(value.values(), MAX_COUNTED))
            elif isinstance(value, list | tuple):
                unseen.extend(value[:MAX_COUNTED])
        return num_bytes


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Texts to embed or to classify, or documents to score against a query."""

    inputs: tuple[str | tuple[int, ...], ...]  # texts, or token ids with the model's special tokens
    query: str | None = None  # score each of `inputs` for this query, instead of embedding it
    classify: bool = False  # return the probability of each label of each of `inputs`
    dimensions: int | None = None  # leading elements of each vector; None: all
    prompt_name: str | None = None  # name of the model's prompt that goes before each text; None: the model's default
    truncate_prompt_tokens: int | None = None  # keep this many tokens of a text, -1: as many as the model takes
    tenant: str = ""  # tenant by authentication, never by the request's body
    priority: int = 0  # lower runs earlier
    deadline_ms: int | None = None  # milliseconds from submission
    input_name: str = "inputs[{}]"  # name of an input in messages; {} stands for its index
    query_name: str = "query"  # name of `query` in messages
    model: str = ""  # the server's model whose engine computes the request; empty: its first model

    def text_bytes(self) -> int:
        """Estimate the memory in bytes of the texts."""
        num_bytes = sys.getsizeof(self.inputs) + sys.getsizeof(self.query)
        for each in self.inputs:
            num_bytes += sys.getsizeof(each) + (INT_BYTES * len(each) if isinstance(each, tuple) else 0)
        return num_bytes


class EmbeddedTexts(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors, or the scores, of consecutive inputs of a request."""

    first_index: int  # index of the first one among the request's inputs
    values: npt.NDArray[np.float32]  # [texts, dimensions], [texts, labels], or [texts, 1] of scores
    prompt_tokens: int  # tokens of these texts


class Embeddings(Protocol):
    """The stream of an accepted `EmbedRequest`. Iterate it once: work pauses while it is not read.

    Closing the iterator early cancels the request.
    """

    @property
    def admission(self) -> AdmissionEstimate:
        """The estimate with which the request was accepted."""

    def __aiter__(self) -> AsyncGenerator[EmbeddedTexts, None]: ...

    def cancel(self) -> None:
        """End the request without reading it. Idempotent."""


class Generation(Protocol):
    """The stream of an accepted request. Read it once: call `deliver`, or iterate it.

    Closing the iterator early cancels the request.
    """

    @property
    def admission(self) -> AdmissionEstimate:
        """The estimate with which the request was accepted."""

    @property
    def seed(self) -> int:
        """The seed of the first output: the request's own, or the one that was drawn for it."""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""

    @property
    def prompt_has_text(self) -> bool:
        """Whether any token of the prompt adds text: special tokens do not."""

    @property
    def new_parser(self) -> NewParser | None:
        """A function that makes a parser for an output; None for a request without `tool_choice`."""

    def __aiter__(self) -> AsyncIterator[OutputChunk]: ...

    def deliver(self, receive: Callable[[OutputChunk | QuireError], object]) -> None:
        """Call `receive` with every chunk as it arrives, including the last chunk or the error.

        `receive` is called on the event loop, outside any task, and must not raise. A call costs less than an
        iteration.
        """

    def cancel(self) -> None:
        """End the request; its pages are free before the next step. Allowed in every state, idempotent."""

    def watch_prefill(self, callback: Callable[[int], None]) -> None:
        """Call `callback` after every step that leaves prefill unfinished, with the number of computed prompt tokens.

        `callback` is called on the event loop and must not raise.
        """


class EncoderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a core's encoder; constant while it runs."""

    vocab_size: int
    max_model_len: int  # tokens of a text
    dimensions: int  # length of a vector
    num_labels: int = 0  # labels of a model that scores pairs of texts; 0: it makes vectors
    score_activation: str = "identity"  # function from a label's value to a score: "sigmoid" or "identity"
    normalize: bool = False  # vectors have length 1
    matryoshka: tuple[int, ...] = ()  # smaller numbers of dimensions that the model was trained for; (): not known
    prompts: dict[str, str] = {}  # name -> text that goes before an input
    default_prompt: str | None = None  # name of the prompt of inputs without one
    name: str = ""  # name of the model
    labels: tuple[str, ...] = ()  # names of a classifier's labels; (): it has none
    is_multi_label: bool = False  # any number of labels may be right for a text


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a core's vision tower; constant while it runs."""

    token_id: int  # id of the placeholder for a row of an image
    size: int = 0  # pixels of each side of an image; 0: images have any size
    num_tokens: int  # rows of an image; of images of any size, at most
    block: int = 0  # pixels of each side of the square that a row stands for, in images of any size


class CoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a core; constant while it runs."""

    vocab_size: int
    max_model_len: int  # prompt and generated tokens of one request
    max_num_seqs: int
    num_pages: int  # pages of all engine processes together
    page_size: int  # tokens
    isa: str
    threads: int
    threads_reason: str
    eos_token_ids: frozenset[int] = frozenset()  # ids from config.json; the text processor has others
    num_processes: int = 0  # engine processes; 0: the core runs in this process
    fingerprint: str = ""  # the bits id
    encoder: EncoderInfo | None = None
    generates: bool = True  # False: the model is an encoder, which generates no text
    images: ImageInfo | None = None  # None: the model takes no images
    adapters: dict[str, str] = {}  # name -> key of each adapter; an engine's changes while it runs
    adapter_paths: dict[str, str] = {}  # name -> folder of each adapter that was loaded at the start
    max_adapters: int = 0  # adapters in memory, if they are loaded and unloaded while the core runs; 0: they are not


NO_TEMPLATE = "this model has no chat template; send a prompt instead of messages"


class EngineInfo(CoreInfo, frozen=True, kw_only=True):
    """The description of an engine; constant while it runs."""

    has_tokenizer: bool
    has_chat_template: bool
    chat_problem: str = NO_TEMPLATE  # why chats are refused without a template
    default_sampling: dict[str, float] = {}  # sampling parameters that generation_config.json recommends
    max_images: int = 0  # images of one request; 0: the model takes no images
    has_tool_calls: bool = False  # the model is offered tools, and its calls are read
    has_reasoning: bool = False  # the vocabulary has tokens that begin and end reasoning


class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an adapter that requests may name."""

    is_loaded: bool  # False: the next request for it loads it
    is_pinned: bool
    num_requests: int  # live requests


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for metrics, health checks and tests. Counters count from the start."""

    step: int  # finished steps; an engine with work is ready as long as this advances
    running: int
    waiting: int
    pages_total: int  # = owned + cached + free
    pages_owned: int  # referenced by running requests
    pages_cached: int  # unreferenced, found by prefix; evicted when pages are needed
    pages_free: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int
    waiting_by_reason: dict[str, int] = {}
    pages_reserved: int = 0  # cached or free, kept for certain running requests
    pages_pinned: int = 0  # cached, evicted last
    pages_spilled: int = 0  # pages in the spill file
    preemptions_spilled: int = 0  # preemptions that moved pages and states to the spill file
    recomputed_tokens: int = 0  # tokens computed again after a preemption
    draft_tokens: int = 0  # verified draft tokens
    accepted_draft_tokens: int = 0
    drafted_by_source: dict[str, int] = {}  # verified draft tokens; keys: prompt, suffix, model, head, forced
    accepted_by_source: dict[str, int] = {}
    accepted_by_position: dict[str, int] = {}  # accepted tokens of drafters by their position in the draft, from 0
    restarts: int = 0  # restarts of engine processes
    replayed_requests: int = 0  # requests that continued in a new engine process
    quarantined_requests: int = 0
    encoder_waiting: int = 0  # requests with texts to encode that are in no batch yet
    encoder_running: int = 0  # requests whose texts are all in a batch, or encoded
    encoded_texts: int = 0
    encoded_tokens: int = 0
    encoded_images: int = 0
    image_cache_hits: int = 0  # parts of a prompt whose image was in the cache
    states_total: int = 0  # slots for the states of sequences; 0: the model has none
    states_cached: int = 0  # kept by the prefix cache
    states_free: int = 0
    states_kept: int = 0  # states that the prefix cache has kept so far
    state_hits: int = 0  # prompts that continued from a kept state
    state_copies: int = 0  # states that were copied because two owners shared a slot
    steps_over_itl_target: int = 0  # steps after decoding alone exceeded the latency target, until it fell to 90 %
    states_spilled: int = 0  # states in the spill file
    states_cached_bytes: int = 0
    stateless_tokens: int = 0  # prompt tokens computed again where the prefix cache had pages, but no state


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine host, as observed by one API server."""

    address: str
    state: HostState
    problem: str | None  # error of the last attempt to connect
    bits: str  # the bits id; empty until the first connection
    isa: str
    requests: int  # running requests of this API server
    moved_requests: int  # requests of this API server that continued at another host
    predicted_wait_s: float  # wait of a new request
    engine: EngineStats | None  # counts of all requests of the host since the first connection; None while it is down


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One finished step. The step took `duration_s`; the other times were spent before and after it."""

    duration_s: float
    prefill_tokens: int  # computed tokens, without tokens found in the prefix cache
    decode_tokens: int
    context_tokens: tuple[int, ...]  # tokens in the KV cache after the step, per sequence
    schedule_s: float
    commit_s: float
    publish_s: float  # including detokenizing
    encoder_s: float = 0.0  # part of `duration_s` for texts to embed or score, and images


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """One ended request. Times are in seconds, None for a phase that it did not reach."""

    tenant: str
    finish_reason: FinishReason | None  # None: it ended with `error`
    error: QuireError | None  # an error without its traceback, which would keep the request
    prompt_tokens: int
    usage: Usage | None
    e2e_s: float
    time_to_first_token_s: float | None
    time_per_output_token_s: float | None = None  # mean after the first token, of the sequence that decoded longest
    trace_id: str = ""


class EmbedStats(msgspec.Struct, frozen=True, kw_only=True):
    """One ended `EmbedRequest`."""

    tenant: str
    kind: Literal["embed", "score", "classify"]
    error: QuireError | None  # None also if it was cancelled
    num_texts: int  # texts whose values were read
    prompt_tokens: int  # tokens of these texts
    e2e_s: float


class EngineObserver(Protocol):
    """Receives an engine's events on the event loop. Its methods must be cheap and must not raise."""

    def on_step(self, stats: StepStats) -> None: ...

    def on_tokens(self, count: int, since_last_s: float | None) -> None:
        """Note `count` new tokens of one request, `since_last_s` after its previous ones (None: they are the first)."""

    def on_rejected(self, error: QuireError) -> None: ...

    def on_finished(self, stats: RequestStats) -> None: ...

    def on_embedded(self, stats: EmbedStats) -> None: ...


class SilentObserver:
    """An `EngineObserver` that ignores everything; a base for observers of some events."""

    def on_step(self, stats: StepStats) -> None:
        """Ignore the step."""

    def on_tokens(self, count: int, since_last_s: float | None) -> None:
        """Ignore the tokens."""

    def on_rejected(self, error: QuireError) -> None:
        """Ignore the refusal."""

    def on_finished(self, stats: RequestStats) -> None:
        """Ignore the end."""

    def on_embedded(self, stats: EmbedStats) -> None:
        """Ignore the end."""


class EngineFacade(Protocol):
    """The interface of an engine."""

    def submit(self, request: GenerateRequest) -> Awaitable[Generation]:
        """Check a request and prepare its prompt; when awaited, queue it and return its stream.

        Checks that need no token ids are made by the call itself, so a full queue costs the server no task. Raises
        InvalidRequest, ContextLengthExceeded, Overloaded, QuotaExceeded, DeadlineExceeded or Unavailable, before any
        computation; a refused request changes nothing.
        """

    def embed(self, request: EmbedRequest) -> Awaitable[Embeddings]:
        """Check a request; when awaited, tokenize and queue its first texts and return its stream.

        Raises as `submit`. The stream may also raise ContextLengthExceeded, for a text that is too long.
        """

    @property
    def info(self) -> EngineInfo:
        """Model, limits and machine."""

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, *, tenant: str = "", of_encoder: bool = False
    ) -> tuple[int, ...]:
        """Return the token ids of `text`, by the encoder's tokenizer if `of_encoder`; tenants take turns.

        Raises InvalidRequest without a tokenizer, and as `submit` for the text.
        """

    async def tokenize_chat(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the prompt of a chat as `submit` renders it; tenants take turns. Raises as `submit`."""

    async def detokenize(
        self,
        token_ids: tuple[int, ...],
        *,
        skip_special_tokens: bool = True,
        tenant: str = "",
        of_encoder: bool = False,
    ) -> str:
        """Return the text of `token_ids`, with the names of special tokens unless they are skipped. Tenants take turns.

        Raises InvalidRequest without a tokenizer and for ids outside the vocabulary.
        """

    def token(self, token_id: int, *, of_encoder: bool = False) -> Token:
        """Return one entry of the vocabulary. Raises InvalidRequest without a tokenizer."""

    def stats(self) -> EngineStats:
        """Return the current statistics. Raises Unavailable while nothing can be computed."""

    def host_statuses(self) -> Sequence[HostStatus] | None:
        """Return the state of each engine host; None if the engine computes on this machine."""

    def adapter_status(self, name: str) -> AdapterStatus:
        """Return the state of an adapter that requests may name. Raises InvalidRequest for another name."""

    async def load_adapter(self, name: str, path: str, *, is_pinned: bool = False, in_place: bool = False) -> None:
        """Serve the adapter in a folder of the engine's machine under a name. Raises as `AdapterRegistry.load`."""

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; live requests keep it. Raises InvalidRequest for an unknown name."""

    def set_observer(self, observer: EngineObserver) -> None:
        """Replace the observer."""

    async def drain(self) -> None:
        """Refuse new requests (Unavailable) and wait until every accepted one has ended."""

    async def close(self) -> None:
        """End all requests now, open streams with Unavailable, and free everything. Idempotent."""
