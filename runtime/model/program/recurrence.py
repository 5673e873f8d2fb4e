"""The shape of a recurrence, and the op that it becomes when its values have places in the arena."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.ops import LinearRecurrence, MatrixState, Region
from .values import Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The columns of queries, keys, values and gates, and the weights of heads: the fields of a `LinearRecurrence`."""

    state: MatrixState
    num_key_heads: int
    tiled: bool = False
    query: int  # first columns, of the convolved rows
    key: int
    value: int
    decay: int  # first columns, of the gates
    rate: int | None
    a: Vector  # [heads]
    bias: Vector  # [heads]
    skip: Vector | None = None  # [heads]
    scale: float = 1.0
    rate_scale: float = 1.0
    time_limits: tuple[float, float] = (0.0, float("inf"))


def recurrence(x: Region, gates: Region, out: Region, shape: Recurrence) -> LinearRecurrence:
    """Return the op of a recurrence over the rows of `x`."""
    return LinearRecurrence(
        x,
        shape.query,
        shape.key,
        shape.value,
        shape.num_key_heads,
        gates,
        shape.decay,
        shape.rate,
        shape.a,
        shape.bias,
        shape.state,
        out,
        scale=shape.scale,
        rate_scale=shape.rate_scale,
        skip=shape.skip,
        time_limits=shape.time_limits,
        tiled=shape.tiled,
    )
