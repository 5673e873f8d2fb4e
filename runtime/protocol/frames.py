"""Every frame of the protocol as a struct, sent as the array `[TYPE, field, …]`.

A request id that was accepted ends in exactly one DONE or ERROR. Fields are added at the end only, with a default. The
default is not sent; another value is sent only to a peer that negotiated the field. PROTOCOL.md is the full description
for authors of clients. The rules that the types do not show:

* A connection begins with HELLO, which is answered with WELCOME or ERROR. The client chooses request ids; an id must be
  unique among the connection's live requests and may be used again after DONE or ERROR.
* GENERATE has either a prompt or messages. TOKENIZE, MODELS and STATS get one answer each, under their id.
* ERROR with a request id ends that request. One exception: ALREADY_EXISTS refuses a GENERATE whose id is live and does
  not affect the request that owns the id.
* ERROR without a request id is the last frame of its connection. Sending a frame type that was not negotiated is a
  breach of the protocol.
* A request has `n` outputs. Each ends once: in TOKENS with a finish reason, the last one in DONE.
* CANCEL and CREDIT for an id that is not live are ignored, because they may have crossed the request's DONE.
* The server sends the TOKENS of a request with `credit` while its credit is above zero. TOKENS frames are not split, so
  the last one may overdraw the credit. CREDIT adds to it. Frames without tokens need no credit.
* GENERATE has `images` in msgpack's binary type, only to peers that negotiated `images`.
* EMBED and SCORE are for peers that negotiated `embeddings`. Their answers are ACCEPTED, VECTORS or SCORES in the order
  of the texts, and DONE. Their credit counts texts; without credit the server stops computing. They are not resumed.
* A resumable request outlives its connection for a while. RESUME continues it on a connection whose HELLO named the
  session of the request's WELCOME. The answer is GENERATE's, from the token at `next_index`, which counts the
  tokens of all outputs. TOKENS without ids end an output; they may be repeated after RESUME and are then ignored.
* WELCOME repeats the session of HELLO while that session has something to resume; otherwise it names a new one.
* GENERATE with an idempotency key that this tenant has used before is answered with the stream of the first request, if
  prompt, messages and parameters are the same. Only completed outputs are kept: after an error, a retry runs again.
* GENERATE with `generated` continues the tokens that another server with the same fingerprint has generated. The answer
  is what that server would have sent next. It needs the seed that ACCEPTED named, and has no idempotency key.
* After GOAWAY no GENERATE is accepted. Accepted requests continue until the deadline and may be resumed.
* PROGRESS is sent to a peer that negotiated `progress`. A peer that negotiated `heartbeat` is sent PING after
  `heartbeat_ms` of silence, and its connection is closed after three times that. PING is answered with PONG, both ways.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ..common.images import MAX_IMAGES
from ..common.types import ChatOptions, Delta, FinishReason, SamplingParams, TokenLogprobs, Usage

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 4 << 20  # default offer of each side; the smaller offer applies
MIN_FRAME_BYTES = 64 << 10  # limit before WELCOME, and the least that a peer may offer
HEARTBEAT_NONCE = 1  # PING that only breaks silence; a default would not be sent, and earlier peers expect a nonce
HEARTBEATS_MISSED = 3  # intervals of silence after which a connection is closed
FEATURES = (
    "cache_key",
    "continue",
    "embeddings",
    "heartbeat",
    "images",
    "models",
    "pins",
    "progress",
    "tools",
    "trace",
)  # HELLO requests them, WELCOME grants them
ALREADY_EXISTS = "ALREADY_EXISTS"
MAX_CACHE_KEY = 256  # characters
MAX_MODEL_NAME = 1024  # characters
MAX_TRACEPARENT = 128  # characters; today's version has 55

RequestId = Annotated[int, msgspec.Meta(ge=0)]  # u64, msgpack's largest integer type
NumTokens = Annotated[int, msgspec.Meta(ge=0)]
# Name of a served model, sent if `models` was negotiated; empty: the first model that can do the task.
ModelName = Annotated[str, msgspec.Meta(max_length=MAX_MODEL_NAME)]
Message = dict[str, Any]  # message of a chat: `role`, `content` and other keys that the model's template uses
Traceparent = Annotated[str, msgspec.Meta(max_length=MAX_TRACEPARENT)]  # W3C's header of that name; empty: none
IdempotencyKey = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


# Client to server


class Hello(_Frame, tag="HELLO", frozen=True):
    versions: tuple[int, ...]  # versions that the client supports, in any order
    token: str | None = None
    features: tuple[str, ...] = ()  # requested
    max_frame_bytes: Annotated[int, msgspec.Meta(ge=MIN_FRAME_BYTES)] = MAX_FRAME_BYTES
    session: str | None = None  # session of an earlier WELCOME, to resume its requests


class Generate(_Frame, tag="GENERATE", frozen=True):
    request_id: RequestId
    prompt: str | tuple[int, ...] | None
    params: SamplingParams = SamplingParams()
    deadline_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None  # milliseconds from arrival
    priority: int = 0  # requests with a lower number run earlier
    pin_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None  # how long the prompt stays cached after the end
    messages: tuple[Message, ...] | None = None  # instead of a prompt; rendered by the model's chat template
    credit: NumTokens | None = None  # tokens that may be sent before CREDIT; None: no limit
    idempotency_key: IdempotencyKey | None = None  # unique for this tenant
    resumable: bool = False  # continue for a while after the connection is lost
    chat: ChatOptions | None = None  # sent if `tools` was negotiated; only with messages
    # Sent if `continue` was negotiated: the ids of each output that were received from another server.
    generated: tuple[tuple[int, ...], ...] | None = None
    ended: tuple[NumTokens, ...] = ()  # outputs whose end was also received
    # Sent if `cache_key` was negotiated: the tenant's requests with the same key go to the same engine.
    prompt_cache_key: Annotated[str, msgspec.Meta(max_length=MAX_CACHE_KEY)] = ""
    # Sent if `images` was negotiated: image files, one for each part `{"type": "image"}` of the messages, in order.
    images: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_IMAGES)] = ()
    model: ModelName = ""
    traceparent: Traceparent = ""  # sent if `trace` was negotiated: the trace to which the request belongs


class Cancel(_Frame, tag="CANCEL", frozen=True):
    request_id: RequestId


class Credit(_Frame, tag="CREDIT", frozen=True):
    request_id: RequestId
    tokens: Annotated[int, msgspec.Meta(ge=1)]  # added to the credit


class Resume(_Frame, tag="RESUME", frozen=True):
    request_id: RequestId  # id in its GENERATE
    next_index: NumTokens  # tokens received so far, of all outputs
    credit: NumTokens | None = None  # replaces the credit of the request


class AskVectors(_Frame, tag="EMBED", frozen=True):
    request_id: RequestId
    inputs: tuple[str | tuple[int, ...], ...]  # texts, or token ids with the model's special tokens
    dimensions: int | None = None  # leading elements of each vector; None: all
    prompt_name: str | None = None  # name of one of the model's prompts; None: the model's default
    truncate_prompt_tokens: int | None = None  # keep this many tokens of a text, -1: as many as the model takes
    deadline_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None  # milliseconds from arrival
    priority: int = 0  # requests with a lower number run earlier
    credit: NumTokens | None = None  # texts whose values may be sent before CREDIT; None: no limit
    model: ModelName = ""
    traceparent: Traceparent = ""  # the trace to which the request belongs


class AskScores(_Frame, tag="SCORE", frozen=True):
    request_id: RequestId
    query: str
    documents: tuple[str, ...]
    truncate_prompt_tokens: int | None = None  # limit for query and document together; as in EMBED
    deadline_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None  # milliseconds from arrival
    priority: int = 0  # requests with a lower number run earlier
    credit: NumTokens | None = None  # scores that may be sent before CREDIT; None: no limit
    model: ModelName = ""
    traceparent: Traceparent = ""  # the trace to which the request belongs


class Tokenize(_Frame, tag="TOKENIZE", frozen=True):
    request_id: RequestId
    text: str
    add_special_tokens: bool = True
    model: ModelName = ""


class ListModels(_Frame, tag="MODELS", frozen=True):
    request_id: RequestId


class AskStats(_Frame, tag="STATS", frozen=True):
    request_id: RequestId


# Either way


class Ping(_Frame, tag="PING", frozen=True):
    nonce: Annotated[int, msgspec.Meta(ge=0)] = 0


class Pong(_Frame, tag="PONG", frozen=True):
    nonce: Annotated[int, msgspec.Meta(ge=0)] = 0


# Server to client


class Welcome(_Frame, tag="WELCOME", frozen=True):
    version: int
    features: tuple[str, ...]  # granted
    max_frame_bytes: int
    model: str  # served name
    session: str = ""  # secret name of this connection, needed to resume its requests
    heartbeat_ms: int | None = None  # set if `heartbeat` was granted
    fingerprint: str = ""  # identity of model and build, which decide bits; sent if `continue` was granted


class Accepted(_Frame, tag="ACCEPTED", frozen=True):
    """The request was accepted: its place in the queue, and how many pages it needs and how many are free."""

    request_id: RequestId
    position: int  # requests ahead in the queue
    pages_needed: int
    pages_free: int
    predicted_wait_ms: float | None = None
    pin_refused: bool = False  # sent if `pins` was negotiated: the prompt is not pinned, see PROTOCOL.md
    seed: int | None = None  # seed of output 0; sent if `continue` was negotiated


class Progress(_Frame, tag="PROGRESS", frozen=True):
    """Progress of prefill, sent before the first TOKENS."""

    request_id: RequestId
    computed_tokens: int  # prompt tokens computed or found in the prefix cache
    prompt_tokens: int


class Tokens(_Frame, tag="TOKENS", frozen=True):
    request_id: RequestId
    first_index: int  # index of token_ids[0] among the output's tokens
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    choice: int = 0  # index of the output
    finish_reason: FinishReason | None = None  # set if this output ends and others continue
    cumulative_logprob: float | None = None  # logprob of the whole output, if outputs were ranked by it
    deltas: tuple[Delta, ...] | None = None  # reasoning and calls of a request with `chat`, which `text` lacks


class Done(_Frame, tag="DONE", frozen=True):
    """The end of a request; `finish_reason` belongs to the one output that had not ended."""

    request_id: RequestId
    finish_reason: FinishReason
    usage: Usage


class Error(_Frame, tag="ERROR", frozen=True):
    request_id: RequestId | None  # None: the error ends the connection
    code: str  # gRPC code name
    message: str
    retryable: bool = False
    retry_after_ms: int | None = None


class Goaway(_Frame, tag="GOAWAY", frozen=True):
    """The server is shutting down; clients send new requests to another server."""

    last_accepted_id: int | None  # newest request on this connection that will be served
    deadline_ms: int  # milliseconds from now; requests that are still running then end in a retryable ERROR
    message: str = ""


class Vectors(_Frame, tag="VECTORS", frozen=True):
    """The vectors of consecutive inputs of EMBED."""

    request_id: RequestId
    first_index: int  # index of the first one among the inputs
    dimensions: Annotated[int, msgspec.Meta(ge=1)]
    values: bytes  # f32, little-endian, one vector after another; msgpack's binary type


class Scores(_Frame, tag="SCORES", frozen=True):
    """The scores of consecutive documents of SCORE."""

    request_id: RequestId
    first_index: int  # index of the first one among the documents
    scores: tuple[float, ...]


class Tokenized(_Frame, tag="TOKENIZED", frozen=True):
    request_id: RequestId
    token_ids: tuple[int, ...]


class ServedModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model that the server serves; a map on the wire."""

    name: str
    max_model_len: int
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool
    max_images: int = 0  # images of one request; 0: the model takes no images. Sent if `images` was negotiated
    task: str = "generate"  # task of the model: "generate", "embed", or "score" pairs of texts


class Models(_Frame, tag="MODELS", frozen=True):
    request_id: RequestId
    models: tuple[ServedModel, ...]


class Stats(_Frame, tag="STATS", frozen=True):
    request_id: RequestId
    stats: dict[str, int]  # encoded names of the fields of `EngineStats`


ClientFrame = (
    Hello
    | Generate
    | Cancel
    | Credit
    | Resume
    | AskVectors
    | AskScores
    | Tokenize
    | ListModels
    | AskStats
    | Ping
    | Pong
)
ServerFrame = (
    Welcome
    | Accepted
    | Progress
    | Tokens
    | Vectors
    | Scores
    | Done
    | Error
    | Goaway
    | Tokenized
    | Models
    | Stats
    | Ping
    | Pong
)
Frame = ClientFrame | ServerFrame


def _by_tag(*frames: type[Frame]) -> dict[str, type[Frame]]:
    return {str(frame.__struct_config__.tag): frame for frame in frames}


CLIENT_FRAMES = _by_tag(
    Hello, Generate, Cancel, Credit, Resume, AskVectors, AskScores, Tokenize, ListModels, AskStats, Ping, Pong
)
SERVER_FRAMES = _by_tag(
    Welcome, Accepted, Progress, Tokens, Vectors, Scores, Done, Error, Goaway, Tokenized, Models, Stats, Ping, Pong
)
