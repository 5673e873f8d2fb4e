"""Pure functions from frames to the engine's structs and back.

A request's tenant comes from its connection, never from a frame.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from ....scheduler import AdmissionEstimate
from ...common.errors import InvalidRequest, ProtocolError
from ...common.prompts import chat_tools
from ...common.types import OutputChunk
from ...engine.facade import EmbedRequest, EngineStats, GenerateRequest
from ...protocol.codec import Malformed
from ...protocol.frames import (
    ALREADY_EXISTS,
    PROTOCOL_VERSION,
    Accepted,
    AskScores,
    AskVectors,
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
from ..models.catalog import ModelCatalog, ModelName, Task
from ..tenancy.tenants import TenantTotals

MAX_TOOLS_CHARACTERS = 256 << 10  # characters of one request's tools, whose JSON is parsed on the event loop


def check_hello(frame: Frame | Malformed) -> Hello:
    """Return `frame` if it is a HELLO of this server's protocol version. Raises ProtocolError otherwise."""
    if not isinstance(frame, Hello):
        raise ProtocolError("the first frame must be HELLO")
    if PROTOCOL_VERSION not in frame.versions:
        raise ProtocolError(f"this server speaks protocol version {PROTOCOL_VERSION}, not {list(frame.versions)[:8]}")
    return frame


def find_model(models: ModelCatalog, name: str, task: Task) -> ModelName:
    """Return the model that a frame names. Raises InvalidRequest for an unknown name."""
    found = models.find(name) if name else models.default(task)
    if found is None:
        raise InvalidRequest(models.unknown(name))
    return found


def engine_request(frame: Generate, tenant: str, model: ModelName) -> GenerateRequest:
    """Return the request of a frame. Raises InvalidRequest for options that do not fit each other."""
    if frame.generated is not None and frame.idempotency_key is not None:
        raise InvalidRequest("generated cannot be used with idempotency_key, which stands for a whole output")
    if frame.ended and frame.generated is None:
        raise InvalidRequest("ended needs generated, with the ids of each output")
    chat: dict[str, Any] = {}
    if frame.chat is not None:
        if frame.messages is None:
            raise InvalidRequest("chat needs messages; leave it out with a prompt")
        chat = {
            "tools": _tools(frame.chat.tools),
            "tool_choice": frame.chat.tool_choice,
            "template_variables": frame.chat.template_variables,
            "reads_output": True,
        }
    return GenerateRequest(
        prompt=frame.prompt,
        messages=frame.messages,
        image_files=frame.images,
        sampling_params=frame.params,
        tenant=tenant,
        priority=frame.priority,
        deadline_ms=frame.deadline_ms,
        pin_ms=frame.pin_ms,
        generated=frame.generated,
        ended=frame.ended,
        prompt_cache_key=frame.prompt_cache_key,
        lora=model.lora,
        model=model.model.key,
        **chat,
    )


def _tools(texts: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    if (num_characters := sum(map(len, texts))) > MAX_TOOLS_CHARACTERS:
        raise InvalidRequest(f"tools have {num_characters} characters; at most {MAX_TOOLS_CHARACTERS} are allowed")
    try:
        return chat_tools([msgspec.json.decode(text) for text in texts])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"tools: each must be the JSON text of a tool: {error}") from None


def embed_request(frame: AskVectors | AskScores, tenant: str, model: ModelName) -> EmbedRequest:
    request = EmbedRequest(
        inputs=(),
        truncate_prompt_tokens=frame.truncate_prompt_tokens,
        tenant=tenant,
        priority=frame.priority,
        deadline_ms=frame.deadline_ms,
        model=model.model.key,
    )
    if isinstance(frame, AskScores):
        return msgspec.structs.replace(request, inputs=frame.documents, query=frame.query, input_name="documents[{}]")
    return msgspec.structs.replace(
        request, inputs=frame.inputs, dimensions=frame.dimensions, prompt_name=frame.prompt_name
    )


def accepted_frame(
    request_id: int, admission: AdmissionEstimate, features: Collection[str] = (), seed: int | None = None
) -> Accepted:
    wait_s = admission.predicted_wait_s
    return Accepted(
        request_id,
        admission.position,
        admission.pages_needed,
        admission.pages_free,
        None if wait_s is None else wait_s * 1000,
        admission.pin_refused and "pins" in features,
        seed if "continue" in features else None,
    )


def tokens_frame(request_id: int, chunk: OutputChunk) -> Tokens | None:
    """Return the chunk as TOKENS; None if it only ends the stream."""
    ends_choice = None if chunk.usage is not None else chunk.finish_reason  # DONE has the last choice's end
    if not chunk.token_ids and not chunk.text and not chunk.deltas and ends_choice is None:
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
        chunk.deltas,
    )


def done_frame(request_id: int, chunk: OutputChunk) -> Done | None:
    """Return the stream's last frame; None if the stream continues."""
    if chunk.finish_reason is None or chunk.usage is None:
        return None
    return Done(request_id, chunk.finish_reason, chunk.usage)


def duplicate_frame(request_id: int) -> Error:
    """Return the refusal of a second request with a live id. Because of its code, it does not end the live request."""
    return Error(request_id, ALREADY_EXISTS, f"request id {request_id} is live on this connection; use a fresh one")


def models_frame(request_id: int, models: ModelCatalog, features: Collection[str]) -> Models:
    """Return the first model and its encoder, or every name if the peer negotiated `models`."""
    names = models.names if "models" in features else dict.fromkeys((models.main.name, models.main.encoder))
    found = [each for each in map(models.find, names) if each is not None]
    return Models(request_id, tuple(served for each in found for served in _served(each, features)))


def _served(model: ModelName, features: Collection[str]) -> Iterator[ServedModel]:
    """Yield the model of a name, and an encoder with the same name."""
    info = model.info
    encoder = info.encoder
    if info.generates and not model.is_encoder:
        yield ServedModel(
            name=model.name,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            has_tokenizer=info.has_tokenizer,
            has_chat_template=info.has_chat_template,
            max_images=info.max_images if "images" in features else 0,
        )
    if encoder is not None and model.target == model.model.encoder:
        yield ServedModel(
            name=model.name,
            max_model_len=encoder.max_model_len,
            vocab_size=encoder.vocab_size,
            has_tokenizer=True,
            has_chat_template=False,
            task="score" if encoder.num_labels else "embed",
        )


def stats_frame(request_id: int, stats: EngineStats | TenantTotals) -> Stats:
    """Return the numeric statistics."""
    values: dict[str, object] = msgspec.to_builtins(stats)
    return Stats(request_id, {name: value for name, value in values.items() if type(value) is int})
