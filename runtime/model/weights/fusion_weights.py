"""The weights that make the rows of a head: which tensors form which matrix. See `decoder_weights.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....kernels.pack import PackedMatrix
from ...common.config import WeightDtype
from ..spec import DecoderSpec
from .fused_columns import fusion_names
from .packing import GROUP, MatrixPlan, Part, Vector, WeightFactory, packed_dtypes


@dataclass(frozen=True, slots=True)
class FusionWeights:
    """The weights that make the rows of a head: fc(norm(embedding) | norm(hidden state)), without a bias."""

    embedding_norm: Vector  # [hidden]
    hidden_norm: Vector  # [hidden]
    of_embedding: PackedMatrix  # [hidden, hidden], the first columns of fc
    of_hidden: PackedMatrix  # [hidden, hidden], the other columns


def build_fusion(spec: DecoderSpec, dtype: WeightDtype, factory: WeightFactory) -> FusionWeights:
    """Make the weights of a head's rows. `FusedColumns` divides the stored matrix."""
    hidden = spec.hidden_size
    group = GROUP if dtype == "q8" else 0

    def norm(name: str) -> Vector:
        return factory.vector(hidden, [Part(f"{name}.weight", (hidden,))], spec.norm_offset)

    def matrix(name: str) -> PackedMatrix:
        parts: Sequence[Part] = [Part(name, (hidden, hidden))]
        packed = packed_dtypes(spec.quantized, dtype, parts)
        return factory.matrix(MatrixPlan(hidden, hidden, packed, parts, group=group))

    of_embedding, of_hidden = fusion_names(spec.names)
    return FusionWeights(
        embedding_norm=norm(spec.names.fusion_embedding_norm),
        hidden_norm=norm(spec.names.fusion_hidden_norm),
        of_embedding=matrix(of_embedding),
        of_hidden=matrix(of_hidden),
    )
