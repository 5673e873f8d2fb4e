"""A strict check of the answers that clients' libraries read."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from pydantic import BaseModel


def check_types(model: BaseModel, extra: Mapping[type[BaseModel], Set[str]] | None = None) -> None:
    """Check that an answer has no field that its type does not have, and that its type accepts every value.

    `extra` has additional fields by type.
    """
    type(model).model_validate(model.model_dump(by_alias=True))
    unseen: list[Any] = [model]
    while unseen:
        each = unseen.pop()
        if isinstance(each, BaseModel):
            assert (each.model_extra or {}).keys() <= (extra or {}).get(type(each), set()), each
            unseen.extend(value for _, value in each)
        elif isinstance(each, list):
            unseen.extend(each)
