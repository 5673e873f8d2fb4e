"""The matrices of an adapter in panels: A of all tensors of a layer together, B in the order of the layer's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...common.errors import UnsupportedModel, WrongTensor
from ..weights.packing import MatrixPlan, Vector, columns_of
from ..weights.paired_rows import Pairs
from .layout import LoraLayout, padded_rank, tensors_of
from .matrices import AdapterFiles, LowRank

if TYPE_CHECKING:
    from ....kernels.lora import LoraPairs, LoraPanels

LANES = 16


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """The panels of an adapter for each layer that it may change, and the bytes that they take."""

    pairs: LoraPairs
    digest: bytes
    nbytes: int


def pack_adapter(
    layout: LoraLayout, adapter: AdapterFiles, norms: Sequence[Vector | None], pairs: Mapping[str, Pairs]
) -> PackedAdapter:
    """Pack an adapter. `norms` has the weights of the norm before each layer, by which A's columns are multiplied.

    `pairs` has the rows of tensors, and so of their B, that are reordered.

    Raises UnsupportedModel if the adapter changes other tensors or has a larger rank, and WrongTensor for matrices of
    another shape.
    """
    _check(layout, adapter)
    packed = [_pair(plan, adapter, norm, pairs) for plan, norm in zip(layout.plans, norms, strict=True)]
    nbytes = sum(data.nbytes + places.nbytes for pair in packed if pair is not None for _, data, places in pair)
    return PackedAdapter(packed, adapter.digest, nbytes)


def _check(layout: LoraLayout, adapter: AdapterFiles) -> None:
    known = {tensor for plan in layout.plans for tensor in tensors_of(plan)}
    for tensor in adapter.matrices:
        if tensor not in known:
            endings = dict.fromkeys(name.removesuffix(".weight").rsplit(".", 1)[-1] for name in sorted(known))
            raise UnsupportedModel(
                f"{adapter.path} changes {tensor.removesuffix('.weight')}; for this model an adapter may change "
                f"{', '.join(endings)} of its layers, no embeddings, no experts and no other layers"
            )
    if adapter.max_rank > layout.max_rank:
        raise UnsupportedModel(f"{adapter.path} has rank {adapter.max_rank}; max_lora_rank is {layout.max_rank}")


def _pair(
    plan: MatrixPlan, adapter: AdapterFiles, norm: Vector | None, pairs: Mapping[str, Pairs]
) -> tuple[LoraPanels, LoraPanels] | None:
    """Return A and B of one layer; None if the adapter does not change it."""
    matrices = {name: adapter.matrices[name] for name in tensors_of(plan) if name in adapter.matrices}
    if not matrices:
        return None
    for name, each in matrices.items():
        rows = next(part.shape[0] for part in plan.parts if part.tensor == name)
        if each.a.shape[1] != plan.in_features or len(each.b) != rows:
            raise WrongTensor(
                f"{adapter.path}: lora_A and lora_B of {name.removesuffix('.weight')} are {list(each.a.shape)} and "
                f"{list(each.b.shape)}; the layer has {plan.in_features} inputs and {rows} outputs"
            )
    dtype = "f32" if plan.dtype == "f32" else "bf16"
    ordered = {name: _in_order(each, pairs.get(name)) for name, each in matrices.items()}
    return _pack_a(plan, matrices, norm, dtype), _pack_b(plan, ordered, dtype)


def _in_order(matrix: LowRank, pairs: Pairs | None) -> LowRank:
    """Return a matrix whose rows of B have the order of the packed rows."""
    if pairs is None:
        return matrix
    b = np.empty_like(matrix.b)
    b[pairs.places(len(b))] = matrix.b
    return replace(matrix, b=b)


def _pack_a(plan: MatrixPlan, matrices: dict[str, LowRank], norm: Vector | None, dtype: str) -> LoraPanels:
    """Return A's of all tensors, one above the other, each padded to whole panels."""
    rows = np.zeros((sum(padded_rank(each.rank) for each in matrices.values()), plan.in_features), np.float32)
    first = 0
    for each in matrices.values():
        rows[first : first + each.rank] = each.a if norm is None else each.a * norm
        first += padded_rank(each.rank)
    panels = len(rows) // LANES
    data = rows.reshape(panels, LANES, -1).swapaxes(1, 2).reshape(-1, LANES)
    places = np.zeros((panels, 3), np.int32)
    places[:, 1] = plan.in_features
    places[:, 2] = np.arange(panels) * plan.in_features
    return dtype, _as_dtype(data, dtype), places


def _pack_b(plan: MatrixPlan, matrices: dict[str, LowRank], dtype: str) -> LoraPanels:
    """Return the columns of a layer in panels; a panel has the rows of the ranks of its tensors alone."""
    panels = -(-plan.out_features // LANES)
    ranks = sum(padded_rank(each.rank) for each in matrices.values())
    columns = np.zeros((panels * LANES, ranks), np.float32)
    first_of: npt.NDArray[np.int64] = np.full(panels, ranks)
    end_of = np.zeros(panels, np.int64)
    first = 0
    for name, each in matrices.items():
        scaled = each.b * np.float32(each.scale)
        for part in plan.parts:
            if part.tensor == name:
                filled = np.arange(len(columns))[columns_of(part, part.count)]
                columns[filled, first : first + each.rank] = scaled[part.rows]
                touched = np.unique(filled // LANES)
                first_of[touched] = np.minimum(first_of[touched], first)
                end_of[touched] = np.maximum(end_of[touched], first + each.rank)
        first += padded_rank(each.rank)
    counts = np.maximum(end_of - first_of, 0)
    blocks = [
        columns[panel * LANES : (panel + 1) * LANES, start : start + count].T
        for panel, (start, count) in enumerate(zip(first_of.tolist(), counts.tolist(), strict=True))
    ]
    starts = np.cumsum([0, *counts[:-1]])
    places = np.stack([np.where(counts > 0, first_of, 0), counts, np.where(counts > 0, starts, 0)], axis=1)
    return dtype, _as_dtype(np.concatenate(blocks), dtype), np.ascontiguousarray(places, np.int32)


def _as_dtype(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Return finite numbers as f32, or as the bits of the nearest bf16, ties to even."""
    values = np.ascontiguousarray(values)
    if dtype == "f32":
        return values
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
