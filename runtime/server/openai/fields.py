"""The fields that chats, completions and responses share.

A field that is known and not supported is refused by its name, unless its value is neutral. An unknown field is ignored
and counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from ...common.default_sampling import http_sampling
from ...common.prompts import shown
from ...engine.facade import EngineInfo
from ..http.errors import BadRequest
from ..http.fields import Fields
from .other_fields import HINTS, INSTEAD, UNSUPPORTED
from .structure import STRUCTURE_FIELDS, structure_of
from .tools import TOOL_FIELDS

STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
SEEDS = 1 << 64  # a negative seed counts from the end

# Fields of `SamplingParams` with the same name and meaning.
SAMPLING = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "n",
        "thinking_token_budget",
    }
)  # fmt: skip
NUMBERS = frozenset({"priority", "deadline_ms", "pin_ms"})  # fields of `GenerateRequest`
REQUEST = NUMBERS | {"cache_salt", "prompt_cache_key"}
# Names of `service_tier`, the priority of each, and the name in the answer.
TIERS = {"auto": (0, "default"), "default": (0, "default"), "flex": (1, "flex"), "priority": (-1, "priority")}
# vLLM's fields of an answer, and fields that OpenAI lacks and whose clients read `stop_reason`.
TOKEN_IDS = frozenset({"return_token_ids", "return_tokens_as_token_ids"})
SHOWING_STOP_REASON = frozenset({"stop_token_ids", "include_stop_str_in_output", "return_token_ids"})
COMMON = (
    SAMPLING
    | REQUEST
    | HINTS
    | STRUCTURE_FIELDS
    | {"model", "max_tokens", "seed", "logit_bias", "logprobs", "stream", "stream_options"}
)
CHAT = COMMON | TOKEN_IDS | TOOL_FIELDS | {"messages", "max_completion_tokens", "top_logprobs", "store", "service_tier"}
CHAT |= {"return_timings", "verbosity"}
COMPLETION = COMMON | TOKEN_IDS | {"prompt", "best_of", "echo", "return_timings", "prompt_logprobs"}
TOKENIZE = TOOL_FIELDS | {"model", "prompt", "messages", "add_special_tokens", "return_token_strs"}
DETOKENIZE = frozenset({"model", "tokens", "skip_special_tokens"})

KNOWN = CHAT | COMPLETION | TOKENIZE | DETOKENIZE | UNSUPPORTED.keys()


def check_supported(
    fields: Fields,
    supported: Set[str],
    unsupported: Mapping[str, tuple[object, ...]] = UNSUPPORTED,
    instead: Mapping[str, str] = INSTEAD,
) -> None:
    """Raise BadRequest for a field that is known, not `supported`, and not neutral by `unsupported`.

    The error has the advice of `instead` for the field, or else to leave it out.
    """
    for name, value in fields.values.items():
        if name in supported or any(_is_same(value, each) for each in unsupported.get(name, ())):
            continue
        if name in KNOWN or name in unsupported:
            text = f"{name} is not supported here; {instead.get(name, 'leave it out')}"
            raise BadRequest(text, name, error_code="unsupported_parameter")


def sampling_fields(fields: Fields, info: EngineInfo) -> dict[str, Any]:
    """Return the common sampling parameters, which override the model's recommendations."""
    values = fields.values
    sampling: dict[str, Any] = {**http_sampling(info.default_sampling)}
    sampling |= {name: value for name, value in values.items() if name in SAMPLING}
    if "seed" in values:
        sampling["seed"] = fields.get("seed", int, 0) % SEEDS
    if "logit_bias" in values:
        sampling["logit_bias"] = _logit_bias(fields.get("logit_bias", dict, {}))
    sampling["structured_outputs"] = structure_of(values)
    return sampling


def _logit_bias(given: dict[str, Any]) -> dict[int, Any]:
    if not all(re.fullmatch("-?(0|[1-9][0-9]{0,18})", token) for token in given):
        raise BadRequest(f"logit_bias maps token ids to numbers, not {shown(given)}", "logit_bias")
    return {int(token): value for token, value in given.items()}


def request_fields(fields: Fields) -> dict[str, Any]:
    """Return the fields of the request to the engine besides prompt and sampling. Raises BadRequest."""
    values: dict[str, Any] = {
        name: fields.get(name, int, 0) if name in NUMBERS else fields.get(name, str, "")
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
    """Return the form of the answer of a chat or a completion."""
    tier = service_tier(fields)
    returns_token_ids = fields.get("return_token_ids", bool, False)
    if returns_token_ids and fields.values.get("echo"):
        raise BadRequest("return_token_ids cannot be used with echo", "return_token_ids")
    returns_timings = fields.get("return_timings", bool, False)
    if returns_timings and fields.values.get("stream") and not streaming(fields)[1]:
        text = "return_timings needs stream_options.include_usage: true in a stream, whose usage has the times"
        raise BadRequest(text, "return_timings")
    return {
        "fingerprint": info.fingerprint,
        "service_tier": None if tier is None else TIERS[tier][1],
        "returns_token_ids": returns_token_ids,
        "returns_timings": returns_timings,
        "shows_tokens_as_ids": fields.get("return_tokens_as_token_ids", bool, False),
        "shows_usage_so_far": streaming(fields)[1] and stream_option(fields, "continuous_usage_stats"),
        "shows_stop_reason": any(fields.values.get(name) for name in SHOWING_STOP_REASON),
    }


def _is_same(value: object, neutral: object) -> bool:
    """Return whether a value is a neutral one; 0 and 0.0 are equal here, 0 and false are not."""
    numbers = (int, float)
    return value == neutral and (type(value) is type(neutral) or (type(value) in numbers and type(neutral) in numbers))


def streaming(fields: Fields) -> tuple[bool, bool]:
    """Return whether to stream, and whether with usage."""
    stream = fields.get("stream", bool, False)
    if "stream_options" not in fields.values:
        return stream, False
    if not stream:
        raise BadRequest("stream_options needs stream: true", "stream_options")
    return stream, stream_option(fields, "include_usage")


def stream_option(fields: Fields, name: str) -> bool:
    """Return an option of the stream, false without it. Raises BadRequest for a wrong or unsupported option."""
    options = Fields(fields.get("stream_options", dict, {}))
    for each in STREAM_OPTIONS:
        if type(options.values.get(each, False)) is not bool:
            raise BadRequest(f"stream_options.{each} must be true or false", f"stream_options.{each}")
    if options.values.get("include_obfuscation"):
        text = "stream_options.include_obfuscation is not supported; leave it out"
        raise BadRequest(text, "stream_options.include_obfuscation")
    return options.get(name, bool, False)
