"""`Fields`: the fields of a body, each taken with its type. `null` means that a field is absent."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, TypeVar

from ...common.prompts import shown
from .errors import BadRequest

T = TypeVar("T")


class Fields:
    """The fields of one body, each taken with its type."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.values = {name: value for name, value in body.items() if value is not None}
        self.num_previous_items = 0  # items of `input` from the previous response

    def get(self, name: str, kind: type[T], default: T) -> T:
        """Return the field, or `default` without it. Raises BadRequest for another type."""
        value = self.values.get(name, default)
        if type(value) is not kind:
            raise BadRequest(f"{name} must be {_NAMES[kind]}, not {shown(value)}", name)
        return value

    def required(self, name: str) -> Any:
        """Return the field. Raises BadRequest without it."""
        if name not in self.values:
            raise BadRequest(f"{name} is missing", name, error_code="missing_required_parameter")
        return self.values[name]

    def get_between(self, name: str, least: int, most: int, default: int) -> int:
        """Return the field, an integer between `least` and `most`, or `default` without it. Raises BadRequest."""
        value = self.get(name, int, default)
        if not least <= value <= most:
            raise BadRequest(f"{name} must be between {least} and {most}, not {value}", name)
        return value

    def get_num_tokens(self, name: str, limit: int) -> int:
        """Return the field, a number of tokens to generate, or `limit` without it. Raises BadRequest."""
        value = self.get(name, int, limit)
        if not 1 <= value <= limit:
            code = "context_length_exceeded" if value > limit else None
            raise BadRequest(f"{name} must be between 1 and {limit}, not {value}", name, error_code=code)
        return value

    def num_unknown(self, known: Set[str]) -> int:
        return len(self.values.keys() - known)


_NAMES: dict[type, str] = {str: "text", int: "an integer", bool: "true or false", dict: "an object", list: "a list"}
