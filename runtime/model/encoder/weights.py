"""The weights of an encoder: which tensors form which matrix. See `weights/packing.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ....kernels.ops import WeightDtype as PackedDtype
from ....kernels.ops import padded
from ....kernels.pack import PackedMatrix
from ...common.config import WeightDtype
from ..spec import DecoderSpec
from ..weights.decoder_weights import build_weights
from ..weights.layer_weights import DecoderWeights
from ..weights.packing import (
    GROUP,
    MatrixPlan,
    Part,
    Vector,
    WeightFactory,
    WeightPlanner,
    attention_group,
    interleaved,
    named,
    packed_dtypes,
    stacked,
)
from .spec import BertSpec, EncoderSpec, Projection


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The weights of a layer norm."""

    weight: Vector
    bias: Vector | None


@dataclass(frozen=True, slots=True)
class BertLayerWeights:
    """The weights of one layer. Biases that the family does not have are None."""

    qkv: PackedMatrix  # [3 hidden, hidden]
    qkv_bias: Vector | None
    o: PackedMatrix
    o_bias: Vector | None
    attention_norm: NormWeights  # norm of the residual stream after attention
    up: PackedMatrix  # [intermediate, hidden]; with a gate as in `MlpWeights`
    up_bias: Vector | None
    down: PackedMatrix  # [hidden, intermediate]
    down_bias: Vector | None
    mlp_norm: NormWeights  # norm of the residual stream after the MLP


@dataclass(frozen=True, slots=True)
class BertWeights:
    """The weights of a bidirectional transformer."""

    words: PackedMatrix  # [vocab, hidden]
    positions: PackedMatrix | None  # [max_position_embeddings, hidden]; its first row is that of the first token
    types: PackedMatrix | None  # [types, hidden]
    distances: Vector | None  # [distances * heads], of biases of scores in all layers
    embedding_norm: NormWeights
    layers: tuple[BertLayerWeights, ...]


@dataclass(frozen=True, slots=True)
class ProjectionWeights:
    """The weights of a layer after pooling, in f32: it computes one row per text."""

    weight: PackedMatrix
    bias: Vector | None
    norm: NormWeights | None


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """The weights of an encoder."""

    body: BertWeights | DecoderWeights
    projections: tuple[ProjectionWeights, ...]


def plan_encoder_weights(spec: EncoderSpec, dtype: WeightDtype) -> tuple[EncoderWeights, Counter[PackedDtype]]:
    """Return weights of the right shapes without memory, and the bytes of matrices by dtype."""
    planner = WeightPlanner()
    weights = build_encoder_weights(spec, dtype, planner)
    return weights, planner.nbytes


def build_encoder_weights(spec: EncoderSpec, dtype: WeightDtype, factory: WeightFactory) -> EncoderWeights:
    """Make all weights of an encoder with `factory`."""
    body: BertWeights | DecoderWeights
    if isinstance(spec.body, DecoderSpec):
        body = build_weights(spec.body, dtype, factory)
    else:
        body = _build_bert(spec.body, dtype, spec.max_model_len, factory)
    return EncoderWeights(body, tuple(_build_projection(each, factory) for each in spec.projections))


def _build_bert(spec: BertSpec, dtype: WeightDtype, max_positions: int, factory: WeightFactory) -> BertWeights:
    """Make the weights of a bidirectional transformer. With q4 the embedding is q8."""
    names = spec.names
    hidden = spec.hidden_size
    table_dtype: PackedDtype = "f32" if dtype == "f32" else "bf16"
    words_dtype: WeightDtype = "q8" if dtype == "q4" else dtype

    def table(name: str, rows: int, first_row: int, num_rows: int) -> PackedMatrix | None:
        part = Part(f"{name}.weight", (rows, hidden), first_row, num_rows)
        return factory.matrix(MatrixPlan(num_rows, hidden, table_dtype, [part])) if rows else None

    words = [Part(f"{names.words}.weight", (spec.vocab_size, hidden))]
    distances = Part(f"{names.distances}.weight", (spec.num_distances, spec.num_heads))
    return BertWeights(
        words=factory.matrix(
            MatrixPlan(spec.vocab_size, hidden, packed_dtypes(spec.quantized, words_dtype, words), words)
        ),
        positions=table(names.positions, spec.num_positions, spec.first_position, max_positions),
        types=table(names.types, spec.num_types, 0, spec.num_types),
        distances=factory.vector(spec.num_distances * spec.num_heads, [distances]) if spec.num_distances else None,
        embedding_norm=build_norm(names.embedding_norm, hidden, spec.norm_bias, factory),
        layers=tuple(build_layer(spec, layer, dtype, factory) for layer in range(spec.num_layers)),
    )


def build_layer(
    spec: BertSpec, layer: int, dtype: WeightDtype | PackedDtype, factory: WeightFactory
) -> BertLayerWeights:
    """Make the weights of one layer."""
    names = spec.names
    hidden = spec.hidden_size
    intermediate = spec.intermediate_size
    prefix = names.layer.format(layer)
    heads = spec.num_heads * spec.head_dim

    def matrix(out_features: int, in_features: int, parts: Sequence[Part], group: int = GROUP) -> PackedMatrix:
        tensors = named(parts, prefix, "weight", in_features)
        packed = packed_dtypes(spec.quantized, dtype, tensors)
        return factory.matrix(
            MatrixPlan(out_features, in_features, packed, tensors, group=group if dtype == "q8" else 0)
        )

    def bias(present: bool, size: int, parts: Sequence[Part]) -> Vector | None:
        return factory.vector(size, named(parts, prefix, "bias")) if present else None

    def norm(name: str) -> NormWeights:
        return build_norm(name, hidden, spec.norm_bias, factory)

    after_attention = f"{prefix}{names.attention_norm}"
    after_mlp = f"{prefix}{names.mlp_norm}"
    if spec.pre_norms:  # each norm precedes the next block; the first layer reads the norm of the embedding
        is_last = layer + 1 == spec.num_layers
        next_norm = f"{names.layer.format(layer + 1)}{names.attention_norm}"
        after_attention = after_mlp
        after_mlp = names.final_norm if is_last else next_norm
    qkv = stacked(names.qkv, (heads,) * 3)
    o = stacked((names.o,), (hidden,))
    down = stacked((names.down,), (hidden,))
    up = interleaved(names.up, intermediate, spec.up_first) if spec.gated else stacked(names.up, (intermediate,))
    up_size = 2 * padded(intermediate) if spec.gated else intermediate
    return BertLayerWeights(
        qkv=matrix(3 * heads, hidden, qkv),
        qkv_bias=bias(spec.qkv_bias, 3 * heads, qkv),
        o=matrix(hidden, heads, o, attention_group(spec.num_heads, spec.num_heads, spec.head_dim)),
        o_bias=bias(spec.o_bias, hidden, o),
        attention_norm=norm(after_attention),
        up=matrix(up_size, hidden, up),
        up_bias=bias(spec.up_bias, up_size, up),
        down=matrix(hidden, intermediate, down),
        down_bias=bias(spec.down_bias, hidden, down),
        mlp_norm=norm(after_mlp),
    )


def _build_projection(spec: Projection, factory: WeightFactory) -> ProjectionWeights:
    part = Part(f"{spec.tensor}.weight", (spec.out_features, spec.in_features))
    bias = Part(f"{spec.tensor}.bias", (spec.out_features,))
    return ProjectionWeights(
        weight=factory.matrix(MatrixPlan(spec.out_features, spec.in_features, "f32", [part])),
        bias=factory.vector(spec.out_features, [bias]) if spec.bias else None,
        norm=build_norm(spec.norm, spec.out_features, spec.norm_bias, factory) if spec.norm else None,
    )


def build_norm(name: str, size: int, has_bias: bool, factory: WeightFactory) -> NormWeights:
    """Make the weights of a layer norm of rows with `size` columns."""
    return NormWeights(
        factory.vector(size, [Part(f"{name}.weight", (size,))]),
        factory.vector(size, [Part(f"{name}.bias", (size,))]) if has_bias else None,
    )
