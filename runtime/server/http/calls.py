"""`Call`: the requests of one HTTP body and the form of the answer; and the messages of a chat."""

from __future__ import annotations

import hashlib
import secrets
import string
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ...common.errors import InvalidRequest
from ...common.images import extract_images
from ...common.prompts import PLACE, chat_messages, shown
from ...common.types import SamplingParams
from ...engine.facade import EngineInfo, GenerateRequest
from ...engine.validator import MAX_PRIORITY, check_num_images
from ..models.catalog import ModelName
from .errors import BadRequest

ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # the only length that Mistral's templates accept
MAX_MESSAGE_VALUES = 1 << 16  # values in all messages together


@dataclass(frozen=True, slots=True)
class Call:
    """The request of one HTTP body: one request to the engine per prompt, and the form of the answer."""

    requests: tuple[GenerateRequest, ...]
    stream: bool
    include_usage: bool = False
    echo: bool = False
    prompt_logprobs: int | None = None  # alternatives of each prompt token to show
    num_logprobs: int | None = None  # logprobs of each output token, if the prompt's are shown
    is_call_named: bool = False  # the request demands a call of one named tool
    repeated: Mapping[str, Any] = field(default_factory=dict)  # fields that the answer repeats
    store: bool = False
    background: bool = False  # the answer comes before the output
    fingerprint: str = ""  # fingerprint of the engine
    service_tier: str | None = None  # shown in the answer
    returns_token_ids: bool = False
    returns_timings: bool = False  # usage includes timings
    shows_tokens_as_ids: bool = False  # logprobs name tokens by their ids
    shows_stop_reason: bool = False
    cached_page_size: int = 0  # tokens of a page that stays in the cache, if the request asks for it
    model: str = ""  # name of the model, as the request gives it
    shows_usage_so_far: bool = False  # each event of a stream has the usage so far
    name: str = field(default_factory=lambda: secrets.token_hex(16))  # name in the ids of the answer
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def params(self) -> SamplingParams:
        return self.requests[0].sampling_params

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.params.n


def as_batch_line(call: Call, name: str) -> Call:
    """Return the call of a batch's line: in the lowest priority class, and with the line's `name` unless it is kept."""
    requests = tuple(msgspec.structs.replace(each, priority=MAX_PRIORITY) for each in call.requests)
    return replace(call, requests=requests, name=call.name if call.store else name)


def for_model(call: Call, model: ModelName) -> Call:
    """Return a call that the model computes, with the adapter that its name selects."""
    key, lora = model.model.key, model.lora
    if not key and not lora:
        return replace(call, model=model.name)
    requests = tuple(msgspec.structs.replace(request, model=key, lora=lora) for request in call.requests)
    fingerprint = call.fingerprint
    if lora:
        adapter = model.info.adapters.get(lora, "")  # empty: unloaded meanwhile, and the engine refuses the request
        fingerprint = hashlib.sha256(f"{fingerprint} {adapter}".encode()).hexdigest()[:16]
    return replace(call, requests=requests, model=model.name, fingerprint=fingerprint)


def call_id(answer_id: str, choice: int, index: int) -> str:
    """Return the id of a tool call, which follows from the answer's id."""
    digest = hashlib.sha256(f"{answer_id}/{choice}/{index}".encode()).digest()
    return "".join(ID_CHARACTERS[byte % len(ID_CHARACTERS)] for byte in digest[:ID_LENGTH])


def checked_messages(
    value: object, info: EngineInfo, field: str = "messages", place: Callable[[int], str] = PLACE
) -> dict[str, Any]:
    """Return the messages and images of a chat, as fields of its request.

    Raises BadRequest that names the field and, by its index, the `place` of a message in the body.
    """
    _check_size(value, field)
    if not isinstance(value, list):
        raise BadRequest(f"{field} must be a list, not {shown(value)}", field)
    try:
        bare, images = extract_images(value, place)
        messages = chat_messages(bare, place)
        check_num_images(len(images), info)
    except InvalidRequest as error:
        raise BadRequest(str(error), field) from None
    return {"messages": messages, "image_files": images}


def _check_size(value: object, field: str) -> None:
    """Raise BadRequest if the messages have more values than a chat template may receive."""
    num_values = 0
    unseen = [value]
    while unseen:
        each = unseen.pop()
        if isinstance(each, dict):
            unseen.extend(each.values())
        elif isinstance(each, list):
            unseen.extend(each)
        num_values += 1
        if num_values + len(unseen) > MAX_MESSAGE_VALUES:
            raise BadRequest(f"{field} holds more than {MAX_MESSAGE_VALUES} values", field)
