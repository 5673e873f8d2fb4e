"""Bodies of `/v1/messages` as calls. A field that the API does not have is refused, as Anthropic does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...common.default_sampling import http_sampling
from ...common.errors import InvalidRequest
from ...common.prompts import chat_tools, shown
from ...common.types import SamplingParams, StructuredOutputs, ToolChoice
from ...engine.facade import EngineInfo, GenerateRequest
from ..http.calls import Call, checked_messages
from ..http.errors import BadRequest
from ..http.fields import Fields
from .chat import Breakpoints, chat_messages, refuse_extra

# Fields without effect: they concern other servers' accounts, machines and contexts.
IGNORED_FIELDS = frozenset(
    {"service_tier", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id", "context_management"}
)
PROMPT_FIELDS = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control"}
)
MESSAGE_FIELDS = (
    PROMPT_FIELDS
    | IGNORED_FIELDS
    | {"max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream", "metadata"}
)
REFUSED_FIELDS: dict[str, object] = {"container": None, "mcp_servers": []}  # fields with their neutral values
FIELDS_OF_TOOL = frozenset(
    {
        "name", "description", "input_schema", "type", "cache_control", "strict", "defer_loading", "allowed_callers",
        "input_examples", "eager_input_streaming",
    }
)  # fmt: skip
SAMPLING_NAMES = ("temperature", "top_p", "top_k")
EFFORT_LEVELS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
MIN_BUDGET = 1024  # tokens of thinking
# Names of the engine's fields in a body.
FIELD_NAMES = {"prompt": "messages", "stop": "stop_sequences", "structured_outputs": "output_config.format"}


def message_call(fields: Fields, info: EngineInfo, tenant: str) -> Call:
    """Return the call of a message, whose `messages` are `chat_messages`. Raises InvalidRequest."""
    fields.required("max_tokens")
    max_tokens = fields.get("max_tokens", int, 1)
    if max_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, not {max_tokens}", "max_tokens")
    sampling: dict[str, Any] = {**http_sampling(info.default_sampling)}
    sampling |= {name: fields.values[name] for name in SAMPLING_NAMES if name in fields.values}
    stops = fields.get("stop_sequences", list, [])
    if not all(isinstance(each, str) for each in stops):
        raise BadRequest(f"stop_sequences must be a list of texts, not {shown(stops)}", "stop_sequences")
    sampling["stop"] = tuple(stops)
    sampling["max_tokens"] = min(max_tokens, info.max_model_len)
    sampling["structured_outputs"] = _structure(fields)
    chat, breakpoints = _chat(fields, info, tenant)
    budget = _thinking_budget(fields)
    if info.has_reasoning:
        sampling["thinking_token_budget"] = budget
    request = msgspec.structs.replace(
        chat,
        sampling_params=SamplingParams(**sampling),
        tool_choice=_tool_choice(fields),
        fit_max_tokens=True,
        pin_ms=breakpoints.pin_ms,
        prompt_cache_key=_user(fields),
    )
    return Call(
        (request,),
        fields.get("stream", bool, False),
        cached_page_size=0 if breakpoints.pin_ms is None else info.page_size,
    )


def count_request(fields: Fields, info: EngineInfo, tenant: str) -> GenerateRequest:
    """Return a request whose prompt is to be counted. Raises InvalidRequest."""
    return _chat(fields, info, tenant)[0]


def check_fields(fields: Fields) -> None:
    """Raise BadRequest for a field that the API does not have, or that this server does not support."""
    for name, neutral in REFUSED_FIELDS.items():
        if fields.values.pop(name, neutral) != neutral:
            raise BadRequest(f"{name} is not supported here; leave it out", name)
    refuse_extra(fields.values, MESSAGE_FIELDS, "")
    fields.required("model")


def _chat(fields: Fields, info: EngineInfo, tenant: str) -> tuple[GenerateRequest, Breakpoints]:
    breakpoints = Breakpoints()
    breakpoints.note(fields.values, "")
    tools = _tools(fields.get("tools", list, []), breakpoints)
    placed = chat_messages(fields.values.get("system"), fields.required("messages"), breakpoints)
    messages = checked_messages([each for _, each in placed], info, "messages", lambda index: placed[index][0])
    request = GenerateRequest(
        prompt=None, **messages, tools=tools, template_variables=_template_variables(fields), tenant=tenant
    )
    return request, breakpoints


def _tools(given: list[Any], breakpoints: Breakpoints) -> tuple[dict[str, Any], ...]:
    """Return the functions that a body offers. Tools that only Anthropic's servers define are left out."""
    offered = []
    places = []
    for index, tool in enumerate(given):
        where = f"tools.{index}"
        if not isinstance(tool, Mapping):
            raise BadRequest(f"{where} must be an object, not {shown(tool)}", where)
        breakpoints.note(tool, where)
        if tool.get("type") not in (None, "custom"):
            if not isinstance(tool["type"], str):
                raise BadRequest(f"{where}.type must be text, not {shown(tool['type'])}", where)
            continue
        refuse_extra(tool, FIELDS_OF_TOOL, where)
        if not isinstance(tool.get("input_schema"), dict):
            raise BadRequest(
                f"{where}.input_schema must be a JSON schema, not {shown(tool.get('input_schema'))}", where
            )
        names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
        function = {new: tool[name] for name, new in names.items() if tool.get(name) is not None}
        offered.append({"type": "function", "function": function})
        places.append(where)
    try:
        return chat_tools(offered, places.__getitem__)
    except InvalidRequest as error:
        raise BadRequest(str(error), "tools") from None


def _tool_choice(fields: Fields) -> ToolChoice:
    choice = fields.get("tool_choice", dict, {"type": "auto"})
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in CHOICES:
        raise BadRequest(f"tool_choice.type must be one of {', '.join(CHOICES)}, not {shown(kind)}", "tool_choice")
    refuse_extra(
        choice, frozenset({"type", "disable_parallel_tool_use", *(["name"] if kind == "tool" else [])}), "tool_choice"
    )
    is_single = choice.get("disable_parallel_tool_use") or False
    if type(is_single) is not bool:
        name = "tool_choice.disable_parallel_tool_use"
        raise BadRequest(f"{name} must be true or false, not {shown(is_single)}", name)
    names = None
    if kind == "tool":
        if not isinstance(choice.get("name"), str):
            raise BadRequest(f"tool_choice.name must be text, not {shown(choice.get('name'))}", "tool_choice.name")
        names = (choice["name"],)
    return msgspec.convert(
        {"needed": CHOICES[kind], "names": names, "parallel": not is_single and names is None}, ToolChoice
    )


def _template_variables(fields: Fields) -> dict[str, Any]:
    """Return the variables of the template for thinking and effort; the model decides about what is left out."""
    variables: dict[str, Any] = {}
    if "thinking" in fields.values:
        thinking = fields.get("thinking", dict, {})
        kind = thinking.get("type")
        if not isinstance(kind, str) or kind not in THINKING:
            raise BadRequest(f"thinking.type must be one of {', '.join(THINKING)}, not {shown(kind)}", "thinking")
        refuse_extra(
            thinking, frozenset({"type", "display", *(["budget_tokens"] if kind == "enabled" else [])}), "thinking"
        )
        variables["enable_thinking"] = THINKING[kind]
    config = fields.get("output_config", dict, {})
    refuse_extra(config, frozenset({"effort", "format"}), "output_config")
    if (effort := config.get("effort")) is not None:
        if not isinstance(effort, str) or effort not in EFFORT_LEVELS:
            name = "output_config.effort"
            raise BadRequest(f"{name} must be one of {', '.join(EFFORT_LEVELS)}, not {shown(effort)}", name)
        variables["reasoning_effort"] = EFFORT_LEVELS[effort]
    return variables


def _thinking_budget(fields: Fields) -> int | None:
    """Return the most tokens of thinking, None without a limit. Raises BadRequest."""
    thinking = fields.get("thinking", dict, {})
    if thinking.get("type") != "enabled":
        return 0 if thinking.get("type") == "disabled" else None
    name = "thinking.budget_tokens"
    budget = thinking.get("budget_tokens")
    if type(budget) is not int or budget < MIN_BUDGET:
        raise BadRequest(f"{name} must be an integer of at least {MIN_BUDGET}, not {shown(budget)}", name)
    if "max_tokens" in fields.values and budget >= fields.get("max_tokens", int, 0):
        raise BadRequest(f"max_tokens must be greater than {name}", "max_tokens")
    return budget


def _structure(fields: Fields) -> StructuredOutputs | None:
    match fields.get("output_config", dict, {}).get("format"):
        case None:
            return None
        case {"type": "json_schema", "schema": dict(schema), **rest} if not rest:
            return StructuredOutputs(json=schema)
        case other:
            name = "output_config.format"
            raise BadRequest(f'{name} must be {{"type": "json_schema", "schema": {{…}}}}, not {shown(other)}', name)


def _user(fields: Fields) -> str:
    """Return the user's id, by which requests of one conversation find the engine process with their prefix."""
    metadata = fields.get("metadata", dict, {})
    refuse_extra(metadata, frozenset({"user_id"}), "metadata")
    user = metadata.get("user_id") or ""
    if not isinstance(user, str):
        raise BadRequest(f"metadata.user_id must be text, not {shown(user)}", "metadata.user_id")
    return user
