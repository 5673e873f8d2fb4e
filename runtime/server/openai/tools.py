"""The fields of a chat about tools and reasoning, and tool calls as answers show them."""

from __future__ import annotations

import hashlib
import string
from typing import Any

import msgspec

from ...common.errors import InvalidRequest
from ...common.prompts import chat_tools, shown
from ...common.types import ToolChoice
from .errors import BadRequest

TOOL_FIELDS = frozenset(
    {"tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "enable_thinking", "reasoning_effort"}
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # all that Mistral's templates accept
CHOICE_FORMS = (
    'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": "…"}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": …}]}}'
)

_encode = msgspec.json.encode


def request_tools(values: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the tools that a body offers. An empty list, which some clients send, offers none. Raises BadRequest."""
    try:
        return chat_tools(values.get("tools", []))
    except InvalidRequest as error:
        raise BadRequest(str(error), "tools") from None


def tool_choice(values: dict[str, Any], tools: tuple[dict[str, Any], ...]) -> ToolChoice:
    """Return which of `tools` the answer may or must call. Raises BadRequest."""
    parallel = values.get("parallel_tool_calls", True)
    if type(parallel) is not bool:
        raise BadRequest(f"parallel_tool_calls must be true or false, not {shown(parallel)}", "parallel_tool_calls")
    needed, names = _choice(values.get("tool_choice", "auto"))
    offered = {tool["function"]["name"] for tool in tools}
    if (names is not None or needed == "required") and not offered:
        raise BadRequest("tool_choice needs tools", "tool_choice")
    if unknown := [name for name in names or () if name not in offered]:
        raise BadRequest(f"tool_choice: there is no tool {unknown[0]!r} in tools", "tool_choice")
    return msgspec.convert({"needed": needed, "names": names, "parallel": parallel}, ToolChoice)


def is_named(values: dict[str, Any]) -> bool:
    """Return whether a body asks for a call of one certain tool, after which the finish reason is `stop`."""
    choice = values.get("tool_choice")
    return isinstance(choice, dict) and choice.get("type") == "function"


def template_variables(values: dict[str, Any]) -> dict[str, Any]:
    """Return the variables that a body has for the chat template. Raises BadRequest."""
    variables: dict[str, Any] = {}
    if "reasoning_effort" in values:
        effort = values["reasoning_effort"]
        if effort not in EFFORTS:
            raise BadRequest(
                f"reasoning_effort must be one of {', '.join(EFFORTS)}, not {shown(effort)}", "reasoning_effort"
            )
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if "enable_thinking" in values:
        if type(values["enable_thinking"]) is not bool:
            raise BadRequest(
                f"enable_thinking must be true or false, not {shown(values['enable_thinking'])}", "enable_thinking"
            )
        variables["enable_thinking"] = values["enable_thinking"]
    given = values.get("chat_template_kwargs", {})
    if not isinstance(given, dict):
        raise BadRequest(f"chat_template_kwargs must be an object, not {shown(given)}", "chat_template_kwargs")
    return variables | given


def call_id(answer_id: str, choice: int, index: int) -> str:
    """Return the id of a tool call, which follows from the answer's id."""
    digest = hashlib.sha256(f"{answer_id}/{choice}/{index}".encode()).digest()
    return "".join(ID_CHARACTERS[byte % len(ID_CHARACTERS)] for byte in digest[:ID_LENGTH])


def _choice(value: object) -> tuple[str, list[str] | None]:
    match value:
        case "none" | "auto" | "required":
            return str(value), None
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            names = [_name(each) for each in tools]
            if names and None not in names:
                return mode, [str(name) for name in names]
    raise BadRequest(f"{CHOICE_FORMS}, not {shown(value)}", "tool_choice")


def _name(tool: object) -> str | None:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    return None
