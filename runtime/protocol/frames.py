"""Every frame of the protocol as a struct: `[TYPE, field, …]` on the wire, the upper-case name in element 0.

No bytes and no sockets here. One invariant: an accepted id ends in exactly one DONE or one ERROR. Fields are only ever
added at the end, with a default, and only sent to a peer that negotiated them.

The rules that the types alone do not say:

* A connection opens with HELLO, answered by WELCOME or ERROR. Ids are the client's, unique among its live requests on
  that connection; an id may be used again after its DONE or ERROR.
* GENERATE gives exactly one of a prompt and messages. One answer each comes to TOKENIZE, MODELS and STATS, under an id
  of the same kind.
* ERROR with a request id ends that request, with one exception: code `ALREADY_EXISTS` refuses a GENERATE whose id is
  live and says nothing about the request that owns the id.
* ERROR without a request id is the last frame of its connection. A frame type that was not negotiated is such a
  breach: a peer can know from WELCOME what is understood.
* A request has as many choices as its `n` says, each ends once: in TOKENS with a finish reason, the last one in DONE.
* CANCEL and CREDIT of an id that is not live are ignored: they may have crossed that request's DONE.
* A request with `credit` is sent TOKENS while that is above zero. They are not divided, so the last may overdraw it, by
  less than its own tokens; CREDIT adds to it. What has no tokens needs none.
* A resumable request outlives its connection for a while. RESUME under its id, on a connection whose HELLO named the
  session that its WELCOME had told, is answered as GENERATE is, with what followed the `next_index` tokens received, of
  all its choices. TOKENS without tokens only ever end a choice; they may come again then, and are to be ignored.
* WELCOME tells the session that HELLO named while that has something to resume, else a new one.
* GENERATE with the idempotency key of a request that this tenant sent before is answered with that one's stream, if its
  prompt, messages and params are the same. Only what finished stays known; after an error, a retry is a new attempt.
* After GOAWAY no GENERATE is accepted; what was accepted goes on until the deadline, and may be resumed.
* PROGRESS is sent to whoever negotiated `progress`. Who negotiated `heartbeat` is sent PING after `heartbeat_ms` of
  silence, and closed when nothing came from it for three times as long. PING is answered by PONG, both ways.

`PROTOCOL.md` says all this for whoever writes a client in another language.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ..common.types import FinishReason, SamplingParams, TokenLogprobs, Usage

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 4 << 20  # default of what each side offers; the smaller offer holds
MIN_FRAME_BYTES = 64 << 10  # holds until WELCOME, and the least a peer may offer
HEARTBEATS_MISSED = 3  # then the other side counts as gone
FEATURES = ("heartbeat", "progress")  # that HELLO may want and WELCOME grant
ALREADY_EXISTS = "ALREADY_EXISTS"

RequestId = Annotated[int, msgspec.Meta(ge=0)]  # u64; msgpack knows no larger integer
NumTokens = Annotated[int, msgspec.Meta(ge=0)]
Message = dict[str, Any]  # of a chat: `role`, `content`, and whatever the model's template knows besides
IdempotencyKey = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


# Client to server


class Hello(_Frame, tag="HELLO", frozen=True):
    versions: tuple[int, ...]  # the client speaks, any order
    token: str | None = None
    features: tuple[str, ...] = ()  # wanted
    max_frame_bytes: Annotated[int, msgspec.Meta(ge=MIN_FRAME_BYTES)] = MAX_FRAME_BYTES
    session: str | None = None  # of an earlier WELCOME, whose requests are to be resumed


class Generate(_Frame, tag="GENERATE", frozen=True):
    request_id: RequestId
    prompt: str | tuple[int, ...] | None
    params: SamplingParams = SamplingParams()
    deadline_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None  # from arrival
    priority: int = 0  # lower runs earlier
    pin_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None  # keep the prompt's pages cached so long after the end
    messages: tuple[Message, ...] | None = None  # instead of a prompt; rendered by the model's chat template
    credit: NumTokens | None = None  # generated tokens that may be sent before CREDIT; None: all
    idempotency_key: IdempotencyKey | None = None  # unique for this tenant
    resumable: bool = False  # goes on for a while when its connection is lost


class Cancel(_Frame, tag="CANCEL", frozen=True):
    request_id: RequestId


class Credit(_Frame, tag="CREDIT", frozen=True):
    request_id: RequestId
    tokens: Annotated[int, msgspec.Meta(ge=1)]  # more that may be sent


class Resume(_Frame, tag="RESUME", frozen=True):
    request_id: RequestId  # as in its GENERATE
    next_index: NumTokens  # generated tokens received so far, of all choices
    credit: NumTokens | None = None  # from here on


class Tokenize(_Frame, tag="TOKENIZE", frozen=True):
    request_id: RequestId
    text: str
    add_special_tokens: bool = True


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
    session: str = ""  # names this connection's resumable requests; keep it secret
    heartbeat_ms: int | None = None  # if `heartbeat` was granted


class Accepted(_Frame, tag="ACCEPTED", frozen=True):
    """The request was accepted: its place in the queue, and how many pages it needs and how many are free."""

    request_id: RequestId
    position: int  # requests ahead of it
    pages_needed: int
    pages_free: int
    predicted_wait_ms: float | None = None


class Progress(_Frame, tag="PROGRESS", frozen=True):
    """Progress of prefill, sent before the first TOKENS."""

    request_id: RequestId
    computed_tokens: int  # of the prompt, those found in the prefix cache included
    prompt_tokens: int


class Tokens(_Frame, tag="TOKENS", frozen=True):
    request_id: RequestId
    first_index: int  # of token_ids[0] among its choice's generated tokens
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    choice: int = 0
    finish_reason: FinishReason | None = None  # where this choice ends and others go on
    cumulative_logprob: float | None = None  # of the whole choice; where choices were ranked by it


class Done(_Frame, tag="DONE", frozen=True):
    """`finish_reason` is that of the one choice that had not ended."""

    request_id: RequestId
    finish_reason: FinishReason
    usage: Usage


class Error(_Frame, tag="ERROR", frozen=True):
    request_id: RequestId | None  # None: of the connection, which closes
    code: str  # gRPC code name
    message: str
    retryable: bool = False
    retry_after_ms: int | None = None


class Goaway(_Frame, tag="GOAWAY", frozen=True):
    """The server is about to leave: send new requests elsewhere."""

    last_accepted_id: int | None  # the latest on this connection that will be served
    deadline_ms: int  # from now; what has not ended then ends in a retryable ERROR
    message: str = ""


class Tokenized(_Frame, tag="TOKENIZED", frozen=True):
    request_id: RequestId
    token_ids: tuple[int, ...]


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model that the server serves; a map on the wire."""

    name: str
    max_model_len: int
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool


class Models(_Frame, tag="MODELS", frozen=True):
    request_id: RequestId
    models: tuple[ServedModel, ...]


class Stats(_Frame, tag="STATS", frozen=True):
    request_id: RequestId
    stats: dict[str, int]  # encoded names of the fields of `EngineStats`


ClientFrame = Hello | Generate | Cancel | Credit | Resume | Tokenize | ListModels | AskStats | Ping | Pong
ServerFrame = Welcome | Accepted | Progress | Tokens | Done | Error | Goaway | Tokenized | Models | Stats | Ping | Pong
Frame = ClientFrame | ServerFrame


def _by_tag(*frames: type[Frame]) -> dict[str, type[Frame]]:
    return {str(frame.__struct_config__.tag): frame for frame in frames}


CLIENT_FRAMES = _by_tag(Hello, Generate, Cancel, Credit, Resume, Tokenize, ListModels, AskStats, Ping, Pong)
SERVER_FRAMES = _by_tag(Welcome, Accepted, Progress, Tokens, Done, Error, Goaway, Tokenized, Models, Stats, Ping, Pong)
