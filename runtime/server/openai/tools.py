"""The fields of a chat about tools and reasoning, and the form of tool calls in answers.

Tools that a local server does not have, such as a web search, are left out unless `tool_choice` names them. The
functions of a namespace are offered under qualified names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ...common.errors import InvalidRequest
from ...common.prompts import OTHER_SCHEMA, TOOL_PLACE, chat_tools, shown
from ...common.types import ToolChoice
from ..http.errors import BadRequest

TOOL_FIELDS = frozenset(
    {"tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "enable_thinking", "reasoning_effort"}
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
JOINT = "__"  # joint between the names of a namespace and of a function
VERBOSITIES = ("low", "medium", "high")
CHOICE_FORMS = (
    'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": "…"}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": …}]}}'
)

_encode = msgspec.json.encode
_OF_FUNCTIONS = frozenset({"function", "parameters", OTHER_SCHEMA})  # keys that only functions have


def request_tools(values: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the functions that a body offers. Raises BadRequest."""
    given = values.get("tools", [])
    try:
        if not isinstance(given, list):
            return chat_tools(given)
        placed = [each for index, tool in enumerate(given) for each in _functions(tool, TOOL_PLACE(index))]
        return chat_tools([tool for _, tool in placed], lambda index: placed[index][0])
    except InvalidRequest as error:
        raise BadRequest(str(error), "tools") from None


def _functions(tool: Any, where: str, namespace: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the functions of a tool, each after its place in the body."""
    match tool:
        case {"type": "namespace", "name": str(name), "tools": list(tools)} if not namespace:
            for index, each in enumerate(tools):
                yield from _functions(each, f"{where}.tools[{index}]", name)
        case {"function": {"name": str(name)} as function} if namespace:
            yield where, {**tool, "function": {**function, "name": qualified_name(name, namespace)}}
        case {"name": str(name)} if namespace and not _is_elsewhere(tool):
            yield where, {**tool, "name": qualified_name(name, namespace)}
        case _ if not _is_elsewhere(tool):
            yield where, tool


def qualified_name(name: str, namespace: Any) -> str:
    """Return the name of a function that the model reads and writes; a function may have no namespace."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace.removesuffix(JOINT)}{JOINT}{name}"


def namespaces(tools: Any) -> dict[str, tuple[str, str]]:
    """Return the namespace and the name of each function in a namespace, by its name for the model."""
    found: dict[str, tuple[str, str]] = {}
    for tool in tools if isinstance(tools, list) else ():
        match tool:
            case {"type": "namespace", "name": str(namespace), "tools": list(functions)}:
                names = [_name(each) for each in functions]
                found |= {qualified_name(name, namespace): (namespace, name) for name in names if name is not None}
    return found


def tool_choice(values: dict[str, Any]) -> ToolChoice:
    """Return the choice of tools that the answer may or must call; the engine checks the names. Raises BadRequest."""
    parallel = values.get("parallel_tool_calls", True)
    if type(parallel) is not bool:
        raise BadRequest(f"parallel_tool_calls must be true or false, not {shown(parallel)}", "parallel_tool_calls")
    needed, names = _choice(values.get("tool_choice", "auto"))
    several = parallel and not is_named(values)
    return msgspec.convert({"needed": needed, "names": names, "parallel": several}, ToolChoice)


def is_named(values: dict[str, Any]) -> bool:
    """Return whether a body demands a call of one named tool, after which the finish reason is `stop`."""
    choice = values.get("tool_choice")
    return isinstance(choice, dict) and choice.get("type") == "function"


def template_variables(values: dict[str, Any]) -> dict[str, Any]:
    """Return a body's variables for the chat template. Raises BadRequest."""
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


def check_verbosity(value: object, name: str = "verbosity") -> None:
    """Raise BadRequest for an invalid hint about the length of answers; the hint has no effect here."""
    if value not in VERBOSITIES:
        raise BadRequest(f"{name} must be one of {', '.join(VERBOSITIES)}, not {shown(value)}", name)


def _choice(value: object) -> tuple[str, list[str] | None]:
    """Return whether calls are needed, and the names of the functions that may be called; None for all."""
    match value:
        case ("none" | "auto" | "required" as mode) | {"type": "none" | "auto" | "required" as mode}:
            return mode, None
        case {"type": "function"} if (name := _name(value)) is not None:
            return "required", [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}} | {
            "type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*tools],
        } if tools:  # fmt: skip
            functions = [each for each in tools if not _is_elsewhere(each)]
            names = [_name(each) for each in functions]
            if not functions and mode == "auto":
                return "none", None
            if names and None not in names:
                return mode, [str(name) for name in names]
    raise BadRequest(f"{CHOICE_FORMS}, not {shown(value)}", "tool_choice")


def _is_elsewhere(tool: object) -> bool:
    """Return whether a tool is one that only other servers have."""
    return (
        isinstance(tool, Mapping)
        and isinstance(kind := tool.get("type"), str)
        and kind not in ("function", "namespace", "")
        and not tool.keys() & _OF_FUNCTIONS
    )


def _name(tool: object) -> str | None:
    """Return the name for the model of a function, nested or flat; None for other tools."""
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "function"):
        return None
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    return qualified_name(name, tool.get("namespace")) if isinstance(name, str) else None
