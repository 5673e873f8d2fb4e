"""Every frame of the protocol as a struct: `[TYPE, field, …]` on the wire, the upper-case name in element 0.

No bytes and no sockets here. One invariant: an accepted id ends in exactly one DONE or one ERROR. Fields are only ever
added at the end, with a default, and only sent to a peer that negotiated them.

The rules that the types alone do not say:

* A connection opens with HELLO, answered by WELCOME or ERROR. Ids are the client's, unique among its live requests on
  that connection; an id may be used again after its DONE or ERROR.
* ERROR with a request id ends that request, with one exception: code `ALREADY_EXISTS` refuses a GENERATE whose id is
  live and says nothing about the request that owns the id.
* ERROR without a request id is the last frame of its connection. A frame type that was not negotiated is such a
  breach: a peer can know from WELCOME what is understood.
* A request has as many choices as its `n` says, each ends once: in TOKENS with a finish reason, the last one in DONE.
* CANCEL of an id that is not live is ignored: it may have crossed that request's DONE.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..generation import FinishReason, SamplingParams, TokenLogprobs, Usage

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 4 << 20  # default of what each side offers; the smaller offer holds
MIN_FRAME_BYTES = 64 << 10  # holds until WELCOME, and the least a peer may offer
ALREADY_EXISTS = "ALREADY_EXISTS"

RequestId = Annotated[int, msgspec.Meta(ge=0)]  # u64; msgpack knows no larger integer


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


# Client to server


class Hello(_Frame, tag="HELLO", frozen=True):
    versions: tuple[int, ...]  # the client speaks, any order
    token: str | None = None
    features: tuple[str, ...] = ()  # wanted
    max_frame_bytes: Annotated[int, msgspec.Meta(ge=MIN_FRAME_BYTES)] = MAX_FRAME_BYTES


class Generate(_Frame, tag="GENERATE", frozen=True):
    request_id: RequestId
    prompt: str | tuple[int, ...]
    params: SamplingParams = SamplingParams()
    deadline_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None  # from arrival
    priority: int = 0  # lower runs earlier
    pin_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None  # keep the prompt's pages cached so long after the end


class Cancel(_Frame, tag="CANCEL", frozen=True):
    request_id: RequestId


class Ping(_Frame, tag="PING", frozen=True):
    nonce: Annotated[int, msgspec.Meta(ge=0)] = 0


# Server to client


class Welcome(_Frame, tag="WELCOME", frozen=True):
    version: int
    features: tuple[str, ...]  # granted
    max_frame_bytes: int
    model: str  # served name


class Accepted(_Frame, tag="ACCEPTED", frozen=True):
    request_id: RequestId
    position: int  # requests ahead of it
    pages_needed: int
    pages_free: int
    predicted_wait_ms: float | None = None


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


class Pong(_Frame, tag="PONG", frozen=True):
    nonce: Annotated[int, msgspec.Meta(ge=0)] = 0


ClientFrame = Hello | Generate | Cancel | Ping
ServerFrame = Welcome | Accepted | Tokens | Done | Error | Pong
Frame = ClientFrame | ServerFrame

CLIENT_FRAMES: dict[str, type[Frame]] = {"HELLO": Hello, "GENERATE": Generate, "CANCEL": Cancel, "PING": Ping}
SERVER_FRAMES: dict[str, type[Frame]] = {
    "WELCOME": Welcome,
    "ACCEPTED": Accepted,
    "TOKENS": Tokens,
    "DONE": Done,
    "ERROR": Error,
    "PONG": Pong,
}
