"""The fields of a chat or a completion as requests to the engine.

A field that is known and not supported is refused by its name, unless its value asks for nothing. An unknown one is
ignored and counted. `null` is the same as leaving a field out.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from ...common.errors import InvalidRequest
from ...common.images import take_images
from ...common.prompts import chat_messages, shown
from ...common.types import SamplingParams
from ...engine.facade import EngineInfo, GenerateRequest
from ...engine.validator import check_num_images
from .errors import BadRequest
from .structure import FIELDS as STRUCTURE
from .structure import structure_of
from .tools import FIELDS as TOOLS
from .tools import is_named, request_tools, template_variables, tool_choice

T = TypeVar("T")

MAX_PROMPTS = 256  # of one completion request
MAX_VALUES = 1 << 16  # in all messages together
MAX_ALTERNATIVES = 20  # of one token, with their logprobs
COMPLETION_MAX_TOKENS = 16
SEEDS = 1 << 64  # a negative seed counts from the end

# Fields of `SamplingParams` with the same name and meaning.
SAMPLING = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "n",
    }
)  # fmt: skip
NUMBERS = frozenset({"priority", "deadline_ms", "pin_ms"})  # fields of `GenerateRequest`
REQUEST = NUMBERS | {"cache_salt", "prompt_cache_key"}
# Names of `service_tier`, the priority of each, and the name that the answer has.
TIERS = {"auto": (0, "default"), "default": (0, "default"), "flex": (1, "flex"), "priority": (-1, "priority")}
# vLLM's fields of an answer, and fields that OpenAI does not have and whose clients read `stop_reason`.
TOKEN_IDS = frozenset({"return_token_ids", "return_tokens_as_token_ids"})
SHOWING_STOP_REASON = frozenset({"stop_token_ids", "include_stop_str_in_output", "return_token_ids"})
# Labels and hints, which change no answer.
HINTS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_retention"})
COMMON = (
    SAMPLING
    | REQUEST
    | HINTS
    | STRUCTURE
    | {"model", "max_tokens", "seed", "logit_bias", "logprobs", "stream", "stream_options"}
)
CHAT = COMMON | TOKEN_IDS | TOOLS | {"messages", "max_completion_tokens", "top_logprobs", "store", "service_tier"}
CHAT |= {"return_timings"}
COMPLETION = COMMON | TOKEN_IDS | {"prompt", "best_of", "echo", "return_timings", "prompt_logprobs"}
TOKENIZE = TOOLS | {"model", "prompt", "messages", "add_special_tokens", "return_token_strs"}

# Fields that are known and not supported, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "tools": (),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": (),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": (),
    "enable_thinking": (),
    "verbosity": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "prompt_logprobs": (),
    "return_timings": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "documents": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
}
KNOWN = CHAT | COMPLETION | TOKENIZE | {"tokens"} | UNSUPPORTED.keys()


@dataclass(frozen=True, slots=True)
class Call:
    """What one HTTP request asks for: one request to the engine per prompt, and the form of the answer."""

    requests: tuple[GenerateRequest, ...]
    stream: bool
    include_usage: bool = False
    echo: bool = False
    prompt_logprobs: int | None = None  # alternatives of each prompt token to show
    num_logprobs: int | None = None  # of each output token, if the prompt's are shown
    is_call_named: bool = False  # it asks for a call of one certain tool
    repeated: Mapping[str, Any] = field(default_factory=dict)  # fields that the answer repeats
    store: bool = False
    background: bool = False  # the answer comes before the output
    fingerprint: str = ""  # of the engine
    service_tier: str | None = None  # shown in the answer
    returns_token_ids: bool = False
    returns_timings: bool = False  # in the usage
    shows_tokens_as_ids: bool = False  # in logprobs
    shows_stop_reason: bool = False
    name: str = field(default_factory=lambda: secrets.token_hex(16))  # in the ids of the answer
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def params(self) -> SamplingParams:
        return self.requests[0].sampling_params

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.params.n


class Fields:
    """The fields of one body, each taken with its type."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.values = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, kind: type[T], default: T) -> T:
        """Return the field, or `default` without it. Raises BadRequest for another type."""
        value = self.values.get(name, default)
        if type(value) is not kind:
            raise BadRequest(f"{name} must be {_NAMES[kind]}, not {shown(value)}", name)
        return value

    def take_between(self, name: str, least: int, most: int, default: int) -> int:
        """Return the field, an integer between `least` and `most`, or `default` without it. Raises BadRequest."""
        value = self.take(name, int, default)
        if not least <= value <= most:
            raise BadRequest(f"{name} must be between {least} and {most}, not {value}", name)
        return value

    def num_unknown(self, known: Set[str]) -> int:
        return len(self.values.keys() - known)

    def check_supported(self, supported: Set[str], unsupported: Mapping[str, tuple[object, ...]] = UNSUPPORTED) -> None:
        """Raise BadRequest for a field that is known, not `supported`, and not neutral by `unsupported`."""
        for name, value in self.values.items():
            if name in supported or value in unsupported.get(name, ()):
                continue
            if name in KNOWN or name in unsupported:
                text = f"{name} is not supported here; leave it out"
                raise BadRequest(text, name, error_code="unsupported_parameter")


def check_model(fields: Fields, models: Sequence[str]) -> None:
    """Raise BadRequest unless the body names one of the served models or none."""
    name = fields.take("model", str, models[0])
    if name not in models:
        raise BadRequest(
            f"the model {name[:80]!r} does not exist here; this server has {' and '.join(map(repr, models))}",
            "model",
            error_code="model_not_found",
            status=404,
        )


def chat_prompt(values: dict[str, Any], messages: dict[str, Any], tenant: str) -> GenerateRequest:
    """Return the request of a chat whose prompt is wanted, and no answer. Raises BadRequest.

    `values` are the fields about tools and reasoning, in the form that they have in chats; `messages` is what
    `checked_messages` returns.
    """
    return GenerateRequest(
        prompt=None,
        **messages,
        tools=request_tools(values),
        template_variables=template_variables(values),
        tenant=tenant,
    )


def with_answer(prompt: GenerateRequest, values: dict[str, Any], fields: Fields, **options: Any) -> GenerateRequest:
    """Return a chat's request with `options`, whose answer may call tools as `values` say. Raises BadRequest."""
    choice = tool_choice(values, prompt.tools)
    return msgspec.structs.replace(prompt, tool_choice=choice, **options, **request_fields(fields))


def chat_call(fields: Fields, info: EngineInfo, tenant: str) -> Call:
    """Return the call of a chat completion. Raises InvalidRequest."""
    fields.check_supported(CHAT)
    values = fields.values
    if "messages" not in values:
        raise BadRequest("messages is missing", "messages", error_code="missing_required_parameter")
    messages = checked_messages(values["messages"], info)
    sampling = sampling_fields(fields, info)
    with_logprobs = fields.take("logprobs", bool, False)
    top_logprobs = fields.take_between("top_logprobs", 0, MAX_ALTERNATIVES, 0)
    if with_logprobs:
        sampling["logprobs"] = top_logprobs
    elif "top_logprobs" in values:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    name = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    sampling["max_tokens"] = fields.take_between(name, 1, info.max_model_len, info.max_model_len)
    request = with_answer(
        chat_prompt(values, messages, tenant),
        values,
        fields,
        sampling_params=SamplingParams(**sampling),
        fit_max_tokens=name not in values,
    )
    return Call(
        (request,),
        *_streaming(fields),
        is_call_named=is_named(values),
        store=fields.take("store", bool, False),
        **answer_fields(fields, info),
    )


def completion_call(fields: Fields, info: EngineInfo, tenant: str) -> Call:
    """Return the call of a completion: one request per prompt. Raises InvalidRequest."""
    fields.check_supported(COMPLETION)
    values = fields.values
    if "prompt" not in values:
        raise BadRequest("prompt is missing", "prompt", error_code="missing_required_parameter")
    sampling = sampling_fields(fields, info)
    if "logprobs" in values:
        sampling["logprobs"] = fields.take("logprobs", int, 0)
    if "best_of" in values:
        sampling["best_of"] = fields.take("best_of", int, 1)
    sampling["max_tokens"] = fields.take("max_tokens", int, COMPLETION_MAX_TOKENS)
    echo = fields.take("echo", bool, False)
    num_logprobs, prompt_logprobs = sampling.get("logprobs"), _prompt_logprobs(fields)
    if prompt_logprobs is not None:
        sampling["logprobs"] = max(prompt_logprobs, num_logprobs or 0)
    stream, include_usage = _streaming(fields)
    params, request = SamplingParams(**sampling), request_fields(fields)
    if stream and params.best_of not in (None, params.n):
        raise BadRequest("best_of cannot be streamed: leave out stream", "best_of")
    if params.best_of == params.n:
        params = SamplingParams(**{**sampling, "best_of": None})
    # The engine echoes what it must compute logprobs of, or has nothing else to do.
    request["echo"] = prompt_logprobs is not None or (echo and (params.logprobs is not None or not params.max_tokens))
    requests = [
        GenerateRequest(prompt=prompt, sampling_params=params, tenant=tenant, **request)
        for prompt in _prompts(values["prompt"])
    ]
    return Call(
        tuple(requests), stream, include_usage, echo, prompt_logprobs, num_logprobs, **answer_fields(fields, info)
    )


def _prompt_logprobs(fields: Fields) -> int | None:
    """Return how many alternatives of each prompt token to show, None for no logprobs of them. Raises BadRequest."""
    if "prompt_logprobs" not in fields.values:
        return None
    num_shown = fields.take_between("prompt_logprobs", 0, MAX_ALTERNATIVES, 0)
    for name in ("stream", "echo", "best_of"):
        if fields.values.get(name):
            raise BadRequest(f"prompt_logprobs cannot be used with {name}", "prompt_logprobs")
    return num_shown


def checked_messages(value: object, info: EngineInfo, field: str = "messages") -> dict[str, Any]:
    """Return the messages and images of a chat, as fields of its request. Raises BadRequest that names the field."""
    _check_size(value, field)
    if not isinstance(value, list):
        raise BadRequest(f"{field} must be a list, not {shown(value)}", field)
    try:
        bare, images = take_images(value)
        messages = chat_messages(bare)
        check_num_images(len(images), info)
    except InvalidRequest as error:
        raise BadRequest(str(error), field) from None
    renamed = tuple({**each, "role": "system"} if each["role"] == "developer" else each for each in messages)
    return {"messages": renamed, "image_files": images}


def _check_size(value: object, field: str) -> None:
    """Raise BadRequest if the messages have more values than a chat template may get."""
    num_values, unseen = 0, [value]
    while unseen:
        each = unseen.pop()
        if isinstance(each, dict):
            unseen.extend(each.values())
        elif isinstance(each, list):
            unseen.extend(each)
        num_values += 1
        if num_values + len(unseen) > MAX_VALUES:
            raise BadRequest(f"{field} holds more than {MAX_VALUES} values", field)


def _prompts(value: object) -> list[str | tuple[int, ...]]:
    """Return the prompts: one text, several, the token ids of one, or of several. Raises BadRequest."""
    if isinstance(value, str):
        return [value]
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if isinstance(value, list) and kinds == {int}:
        return [tuple(value)]
    if isinstance(value, list) and kinds in ({str}, {list}):
        if len(value) > MAX_PROMPTS:
            raise BadRequest(f"{len(value)} prompts; at most {MAX_PROMPTS} in one request", "prompt")
        if kinds == {str}:
            return value
        if all(set(map(type, ids)) == {int} for ids in value):
            return [tuple(ids) for ids in value]
    raise BadRequest(
        f"prompt must be text, a list of texts, a list of token ids, or a list of such lists, and not empty, not "
        f"{shown(value)}",
        "prompt",
    )


def sampling_fields(fields: Fields, info: EngineInfo) -> dict[str, Any]:
    """Return the sampling parameters that both kinds of requests have, over the model's recommendations."""
    values = fields.values
    sampling: dict[str, Any] = {"temperature": 1.0, **info.default_sampling}
    sampling |= {name: value for name, value in values.items() if name in SAMPLING}
    if "seed" in values:
        sampling["seed"] = fields.take("seed", int, 0) % SEEDS
    if "logit_bias" in values:
        sampling["logit_bias"] = _logit_bias(fields.take("logit_bias", dict, {}))
    sampling["structured_outputs"] = structure_of(values)
    return sampling


def _logit_bias(given: dict[str, Any]) -> dict[int, Any]:
    try:
        return {int(token): value for token, value in given.items()}
    except ValueError:
        raise BadRequest(f"logit_bias maps token ids to numbers, not {shown(given)}", "logit_bias") from None


def request_fields(fields: Fields) -> dict[str, Any]:
    """Return the fields of the request to the engine besides prompt and sampling. Raises BadRequest."""
    values: dict[str, Any] = {
        name: fields.take(name, int, 0) if name in NUMBERS else fields.take(name, str, "")
        for name in REQUEST & fields.values.keys()
    }
    if values.get("cache_salt") == "":
        raise BadRequest("cache_salt must not be empty; leave it out", "cache_salt")
    return {"priority": TIERS[service_tier(fields) or "auto"][0], **values}


def service_tier(fields: Fields) -> str | None:
    """Return the tier that the request names. Raises BadRequest."""
    tier = fields.values.get("service_tier")
    if tier is not None and (not isinstance(tier, str) or tier not in TIERS):
        raise BadRequest(f"service_tier must be one of {', '.join(TIERS)}, not {shown(tier)}", "service_tier")
    return tier


def answer_fields(fields: Fields, info: EngineInfo) -> dict[str, Any]:
    """Return what the fields say about the form of the answer of a chat or a completion."""
    tier = service_tier(fields)
    returns_token_ids = fields.take("return_token_ids", bool, False)
    if returns_token_ids and fields.values.get("echo"):
        raise BadRequest("return_token_ids cannot be used with echo", "return_token_ids")
    returns_timings = fields.take("return_timings", bool, False)
    if returns_timings and fields.values.get("stream") and not _streaming(fields)[1]:
        text = "return_timings needs stream_options.include_usage: true in a stream, whose usage has the times"
        raise BadRequest(text, "return_timings")
    return {
        "fingerprint": info.fingerprint,
        "service_tier": None if tier is None else TIERS[tier][1],
        "returns_token_ids": returns_token_ids,
        "returns_timings": returns_timings,
        "shows_tokens_as_ids": fields.take("return_tokens_as_token_ids", bool, False),
        "shows_stop_reason": any(fields.values.get(name) for name in SHOWING_STOP_REASON),
    }


def _streaming(fields: Fields) -> tuple[bool, bool]:
    """Return whether to stream, and whether with usage."""
    stream = fields.take("stream", bool, False)
    if "stream_options" not in fields.values:
        return stream, False
    if not stream:
        raise BadRequest("stream_options needs stream: true", "stream_options")
    options = Fields(fields.take("stream_options", dict, {}))
    for name in ("include_obfuscation", "continuous_usage_stats"):
        if options.take(name, bool, False):
            raise BadRequest(f"stream_options.{name} is not supported; leave it out", f"stream_options.{name}")
    return stream, options.take("include_usage", bool, False)


_NAMES: dict[type, str] = {str: "text", int: "an integer", bool: "true or false", dict: "an object", list: "a list"}
