"""The packed matrices of a model's weights, for every kind of layer."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from quire.kernels.pack import PackedMatrix


def packed_matrices(weights: Any) -> list[PackedMatrix]:
    """Return each matrix once, in the order of the weights' fields."""
    found: dict[int, PackedMatrix] = {}
    _collect(weights, found)
    return list(found.values())


def _collect(part: Any, found: dict[int, PackedMatrix]) -> None:
    if isinstance(part, PackedMatrix):
        found[id(part)] = part
    elif is_dataclass(part):
        for field in fields(part):
            _collect(getattr(part, field.name), found)
    elif isinstance(part, tuple):
        for each in part:
            _collect(each, found)
