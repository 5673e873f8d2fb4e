"""Chats and completions as requests to the engine: one per prompt."""

from __future__ import annotations

from typing import Any

import msgspec

from ...common.prompts import shown
from ...common.types import SamplingParams
from ...engine.facade import EngineInfo, GenerateRequest
from ..http.calls import Call, checked_messages
from ..http.errors import BadRequest
from ..http.fields import Fields
from ..http.logprobs import MAX_ALTERNATIVES
from .fields import (
    CHAT,
    COMPLETION,
    answer_fields,
    check_supported,
    request_fields,
    sampling_fields,
    streaming,
)
from .tools import check_verbosity, is_named, request_tools, template_variables, tool_choice

MAX_PROMPTS = 256  # prompts of one completion request
COMPLETION_MAX_TOKENS = 16


def chat_prompt(values: dict[str, Any], messages: dict[str, Any], tenant: str) -> GenerateRequest:
    """Return the request of a chat without options of an answer. Raises BadRequest.

    `values` are the fields about tools and reasoning, in the form of chats; `messages` is the result of
    `checked_messages`.
    """
    return GenerateRequest(
        prompt=None,
        **messages,
        tools=request_tools(values),
        template_variables=template_variables(values),
        tenant=tenant,
    )


def with_answer(prompt: GenerateRequest, values: dict[str, Any], fields: Fields, **options: Any) -> GenerateRequest:
    """Return a chat's request with `options`, and with the tools of `values` for its answer. Raises BadRequest."""
    return msgspec.structs.replace(prompt, tool_choice=tool_choice(values), **options, **request_fields(fields))


def without_reasoning(values: dict[str, Any], info: EngineInfo) -> dict[str, Any]:
    """Return the sampling parameters of a chat whose fields switch reasoning off, for templates that ignore the switch.

    `values` are the fields about tools and reasoning, in the form of chats. Raises BadRequest.
    """
    is_off = info.has_reasoning and template_variables(values).get("enable_thinking") is False
    return {"thinking_token_budget": 0} if is_off else {}


def chat_call(fields: Fields, info: EngineInfo, tenant: str) -> Call:
    """Return the call of a chat completion. Raises InvalidRequest."""
    check_supported(fields, CHAT)
    values = fields.values
    messages = checked_messages(fields.required("messages"), info)
    check_verbosity(values.get("verbosity", "medium"))
    sampling = without_reasoning(values, info) | sampling_fields(fields, info)
    with_logprobs = fields.get("logprobs", bool, False)
    top_logprobs = fields.get_between("top_logprobs", 0, MAX_ALTERNATIVES, 0)
    if with_logprobs:
        sampling["logprobs"] = top_logprobs
    elif top_logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    sampling["max_tokens"], fit_max_tokens = _max_tokens_of_chat(fields, info.max_model_len)
    request = with_answer(
        chat_prompt(values, messages, tenant),
        values,
        fields,
        sampling_params=SamplingParams(**sampling),
        fit_max_tokens=fit_max_tokens,
    )
    return Call(
        (request,),
        *streaming(fields),
        is_call_named=is_named(values),
        store=fields.get("store", bool, False),
        **answer_fields(fields, info),
    )


def _max_tokens_of_chat(fields: Fields, limit: int) -> tuple[int, bool]:
    """Return the number of tokens to generate, and whether it may be lowered to fit. Raises BadRequest."""
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in fields.values]  # new name first
    given = [fields.get_num_tokens(name, limit) for name in names]
    return (given[0], False) if given else (limit, True)


def completion_call(fields: Fields, info: EngineInfo, tenant: str) -> Call:
    """Return the call of a completion: one request per prompt. Raises InvalidRequest."""
    check_supported(fields, COMPLETION)
    prompts = _prompts(fields.required("prompt"))
    sampling = sampling_fields(fields, info)
    if "logprobs" in fields.values:
        sampling["logprobs"] = fields.get("logprobs", int, 0)
    if "best_of" in fields.values:
        sampling["best_of"] = fields.get("best_of", int, 1)
    sampling["max_tokens"] = fields.get("max_tokens", int, COMPLETION_MAX_TOKENS)
    echo = fields.get("echo", bool, False)
    num_logprobs = sampling.get("logprobs")
    prompt_logprobs = _prompt_logprobs(fields)
    if prompt_logprobs is not None:
        sampling["logprobs"] = max(prompt_logprobs, num_logprobs or 0)
    stream, include_usage = streaming(fields)
    params = SamplingParams(**sampling)
    request = request_fields(fields)
    if stream and params.best_of not in (None, params.n):
        raise BadRequest("best_of cannot be streamed: leave out stream", "best_of")
    if params.best_of == params.n:
        params = SamplingParams(**{**sampling, "best_of": None})
    # The engine echoes the prompt if its logprobs are needed, or if there is nothing else to compute.
    request["echo"] = prompt_logprobs is not None or (echo and (params.logprobs is not None or not params.max_tokens))
    requests = tuple(
        GenerateRequest(prompt=prompt, sampling_params=params, tenant=tenant, **request) for prompt in prompts
    )
    return Call(requests, stream, include_usage, echo, prompt_logprobs, num_logprobs, **answer_fields(fields, info))


def _prompt_logprobs(fields: Fields) -> int | None:
    """Return the number of alternatives to show for each prompt token, None for no logprobs. Raises BadRequest."""
    if "prompt_logprobs" not in fields.values:
        return None
    num_shown = fields.get_between("prompt_logprobs", 0, MAX_ALTERNATIVES, 0)
    values = fields.values
    for name, neutral in (("stream", False), ("echo", False), ("best_of", values.get("n", 1))):
        if values.get(name, neutral) != neutral:
            raise BadRequest(f"prompt_logprobs cannot be used with {name}", "prompt_logprobs")
    return num_shown


def _prompts(value: object) -> list[str | tuple[int, ...]]:
    """Return the prompts: one or several texts or lists of token ids. Raises BadRequest."""
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
