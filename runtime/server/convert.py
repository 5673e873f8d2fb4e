"""Pure functions from frames to the engine's structs and back.

A request's tenant comes from its connection, never from a frame.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ...scheduler import AdmissionEstimate
from ..common.errors import ProtocolError
from ..common.types import OutputChunk
from ..engine.facade import EngineInfo, EngineStats, GenerateRequest
from ..protocol.codec import Malformed
from ..protocol.frames import (
    ALREADY_EXISTS,
    PROTOCOL_VERSION,
    Accepted,
    Done,
    Error,
    Frame,
    Generate,
    Hello,
    Models,
    ServedModel,
    Stats,
    Tokens,
)
from .tenants import TenantTotals


def check_hello(frame: Frame | Malformed) -> Hello:
    """Return `frame` if it is a HELLO of this server's protocol version. Raises ProtocolError otherwise."""
    if not isinstance(frame, Hello):
        raise ProtocolError("the first frame must be HELLO")
    if PROTOCOL_VERSION not in frame.versions:
        raise ProtocolError(f"this server speaks protocol version {PROTOCOL_VERSION}, not {list(frame.versions)[:8]}")
    return frame


def engine_request(frame: Generate, tenant: str) -> GenerateRequest:
    return GenerateRequest(
        prompt=frame.prompt,
        messages=frame.messages,
        sampling_params=frame.params,
        tenant=tenant,
        priority=frame.priority,
        deadline_ms=frame.deadline_ms,
        pin_ms=frame.pin_ms,
    )


def accepted_frame(request_id: int, admission: AdmissionEstimate, features: Collection[str] = ()) -> Accepted:
    wait_s = admission.predicted_wait_s
    return Accepted(
        request_id,
        admission.position,
        admission.pages_needed,
        admission.pages_free,
        None if wait_s is None else wait_s * 1000,
        admission.pin_refused and "pins" in features,
    )


def tokens_frame(request_id: int, chunk: OutputChunk) -> Tokens | None:
    """Return the chunk as TOKENS; None if it only ends the stream."""
    ends_choice = None if chunk.usage is not None else chunk.finish_reason  # DONE has the last choice's end
    if not chunk.token_ids and not chunk.text and ends_choice is None:
        return None
    return Tokens(
        request_id,
        chunk.first_index,
        chunk.token_ids,
        chunk.text,
        chunk.logprobs,
        chunk.choice,
        ends_choice,
        chunk.cumulative_logprob,
    )


def done_frame(request_id: int, chunk: OutputChunk) -> Done | None:
    """Return the stream's last frame; None if the stream goes on."""
    if chunk.finish_reason is None or chunk.usage is None:
        return None
    return Done(request_id, chunk.finish_reason, chunk.usage)


def duplicate_frame(request_id: int) -> Error:
    """Refuse a second request with a live id. By its code, this ERROR does not end the live request."""
    return Error(request_id, ALREADY_EXISTS, f"request id {request_id} is live on this connection; use a fresh one")


def models_frame(request_id: int, name: str, info: EngineInfo) -> Models:
    model = ServedModel(
        name=name,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        has_tokenizer=info.has_tokenizer,
        has_chat_template=info.has_chat_template,
    )
    return Models(request_id, (model,))


def stats_frame(request_id: int, stats: EngineStats | TenantTotals) -> Stats:
    """Return the statistics that are numbers."""
    values: dict[str, object] = msgspec.to_builtins(stats)
    return Stats(request_id, {name: value for name, value in values.items() if type(value) is int})
