"""The linear layers that adapters may change: those of attention and of MLPs, and the tensors that each is made of.

They come from `build_weights`, the description of all weights, so the rows of an adapter's B are packed in the order of
the rows of the weight that they are added to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....kernels.pack import PackedMatrix
from ...common.config import WeightDtype
from ..program import LoraTarget, LoraTargets
from ..spec import DecoderSpec
from ..weights.decoder_weights import build_weights
from ..weights.layer_weights import AttentionWeights, DecoderWeights, MlpWeights
from ..weights.packing import MatrixPlan, Part, Vector, WeightPlanner

RANK_UNIT = 16  # ranks fill whole panels


def padded_rank(rank: int) -> int:
    """Return the rows of A, and the columns of B, that a part of this rank takes."""
    return -(-rank // RANK_UNIT) * RANK_UNIT


@dataclass(frozen=True, slots=True)
class LoraLayout:
    """The linear layers that the adapters of a program may change, in order, and the largest rank of a part."""

    plans: tuple[MatrixPlan, ...]
    max_rank: int
    slots: int

    def widths(self) -> list[tuple[int, int, int]]:
        """Return the inputs, the ranks of all parts, and the columns of each layer, for a `LoraTable`."""
        return [(plan.in_features, self._ranks(plan), plan.out_features) for plan in self.plans]

    def adapter_nbytes(self) -> int:
        """Return the most bytes that an adapter takes: with the largest rank in all parts."""
        return sum(map(self._plan_nbytes, self.plans))

    def _plan_nbytes(self, plan: MatrixPlan) -> int:
        """Return the bytes of A and B of one layer; a panel with columns of two tensors has the ranks of both."""
        ranks = self._ranks(plan)
        panels = -(-plan.out_features // RANK_UNIT)
        shared = (len(plan.parts) - 1) * ranks
        rows = ranks // RANK_UNIT * plan.in_features + panels * padded_rank(self.max_rank) + shared
        return rows * RANK_UNIT * (4 if plan.dtype == "f32" else 2) + 12 * (ranks // RANK_UNIT + panels)

    def targets(self, weights: DecoderWeights) -> LoraTargets:
        """Return the layers in packed or planned `weights`."""
        matrices = _adaptable(weights)
        return LoraTargets(
            [LoraTarget(matrix, self._ranks(plan)) for matrix, plan in zip(matrices, self.plans, strict=True)]
        )

    def _ranks(self, plan: MatrixPlan) -> int:
        return len(tensors_of(plan)) * padded_rank(self.max_rank)


def plan_lora(spec: DecoderSpec, dtype: WeightDtype, max_rank: int, slots: int) -> LoraLayout:
    """Return the layout of a model's adapters; `dtype` is that of the weights."""
    recorder = _PlanRecorder()
    weights = build_weights(spec, dtype, recorder)
    return LoraLayout(tuple(recorder.plans[id(matrix)] for matrix in _adaptable(weights)), max_rank, slots)


def tensors_of(plan: MatrixPlan) -> list[str]:
    """Return the names of the tensors of a matrix, each once."""
    return list(dict.fromkeys(part.tensor for part in plan.parts))


def _adaptable(weights: DecoderWeights) -> list[PackedMatrix]:
    """Return the matrices that adapters may change; a model may have neither attention nor an MLP in a layer."""
    matrices = []
    for layer in weights.layers:
        if isinstance(layer.mixer, AttentionWeights):
            matrices += [layer.mixer.qkv, layer.mixer.o]
        if isinstance(layer.mlp, MlpWeights):
            matrices += [layer.mlp.gate_up, layer.mlp.down]
    return matrices


class _PlanRecorder:
    """A factory that remembers the plan of each matrix."""

    def __init__(self) -> None:
        self._planner = WeightPlanner()
        self._matrices: list[PackedMatrix] = []  # keeps them alive, as their ids are keys
        self.plans: dict[int, MatrixPlan] = {}

    def matrix(self, plan: MatrixPlan) -> PackedMatrix:
        matrix = self._planner.matrix(plan)
        self._matrices.append(matrix)
        self.plans[id(matrix)] = plan
        return matrix

    def vector(self, size: int, parts: Sequence[Part], offset: float = 0.0) -> Vector:
        return self._planner.vector(size, parts, offset)
