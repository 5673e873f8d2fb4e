"""The program of an encoder, from token ids to one vector, or the values of its labels, per text."""

from __future__ import annotations

from collections.abc import Sequence

from ....kernels.ops import Epilogue, NormKind
from ....kernels.pack import PackedMatrix
from ..decoder import emit_layers
from ..program import F32, Heads, HeadWeights, ProgramBuilder, RowForm, Value, input_form
from ..rope import Table
from ..spec import DecoderSpec
from ..states import lay_out_states
from ..weights.layer_weights import DecoderWeights
from .mpnet import distance_bias
from .spec import BertSpec, EncoderSpec, Projection
from .weights import BertLayerWeights, BertWeights, EncoderWeights, NormWeights, ProjectionWeights

GATED_EPILOGUES: dict[str, Epilogue] = {"silu": "swiglu", "gelu": "geglu_exact", "gelu_tanh": "geglu"}
PLAIN_EPILOGUES: dict[str, Epilogue] = {
    "none": "store", "tanh": "tanh", "relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_tanh",
}  # fmt: skip
LEAST_LENGTH = 1e-12  # vectors are divided by their length, at least this, as torch does


def emit_encoder(
    builder: ProgramBuilder, spec: EncoderSpec, weights: EncoderWeights, rotary: Sequence[Table | None]
) -> Value:
    """Emit all ops; return the result, f32 [texts, dimensions]. `rotary` has one table per layer."""
    if isinstance(spec.body, DecoderSpec):
        assert isinstance(weights.body, DecoderWeights), "a spec and its weights are of one kind"
        x = emit_layers(builder, spec.body, weights.body, rotary, lay_out_states(spec.body), causal=spec.causal)
        final_norm, bias = weights.body.final_norm, weights.body.final_norm_bias
        x = builder.norm_rows(x, spec.body.norm_kind, final_norm, bias, spec.body.norm_eps, F32)
    else:
        assert isinstance(weights.body, BertWeights), "a spec and its weights are of one kind"
        x = _emit_bert(builder, spec.body, weights.body, rotary, spec.max_model_len)
    x = builder.pool(x, spec.pooling)
    for projection, projection_weights in zip(spec.projections, weights.projections, strict=True):
        x = _project(builder, projection, projection_weights, x)
    return builder.norm_rows(x, "l2", None, None, LEAST_LENGTH, F32) if spec.normalize else x


def _emit_bert(
    builder: ProgramBuilder,
    spec: BertSpec,
    weights: BertWeights,
    rotary: Sequence[Table | None],
    max_positions: int,
) -> Value:
    """Emit the layers; return the rows of the last one, normed, f32."""
    bias = None if weights.distances is None else distance_bias(weights.distances, spec.num_heads, max_positions)
    x = builder.embed(weights.words, types=weights.types, positions=weights.positions)
    normed = _norm_in_place(builder, spec, weights.embedding_norm, x, weights.layers[0].qkv)
    return emit_blocks(builder, spec, weights.layers, x, normed, rotary, bias)


def emit_blocks(
    builder: ProgramBuilder,
    spec: BertSpec,
    layers: Sequence[BertLayerWeights],
    x: Value,
    normed: Value,
    rotary: Sequence[Table | None],
    bias: Table | None = None,
    rotary_dim: int = 0,
) -> Value:
    """Emit the layers after `normed`, the norm of the residual stream `x`; return the normed rows of the last one.

    With a `rotary_dim`, every step gives the cosines and sines of its rows, and `rotary` has no tables.
    """
    readers = [*(layer.qkv for layer in layers[1:]), None]
    for index, layer in enumerate(layers):
        attended = _attend(builder, spec, layer, index, normed, rotary[index], bias, rotary_dim)
        builder.linear_add(attended, layer.o, layer.o_bias, x)
        normed = _norm(builder, spec, layer.attention_norm, x, layer.up)
        activated = builder.activated(
            normed,
            layer.up,
            layer.up_bias,
            spec.intermediate_size,
            GATED_EPILOGUES[spec.activation] if spec.gated else PLAIN_EPILOGUES[spec.activation],
            input_form(layer.down),
        )
        builder.linear_add(activated, layer.down, layer.down_bias, x)
        normed = _norm(builder, spec, layer.mlp_norm, x, readers[index])
    return normed


def _attend(
    builder: ProgramBuilder,
    spec: BertSpec,
    layer: BertLayerWeights,
    index: int,
    x: Value,
    rotary: Table | None,
    bias: Table | None,
    rotary_dim: int,
) -> Value:
    num_heads = spec.num_heads
    scale = spec.head_dim**-0.5
    window = spec.windows[index]
    heads = Heads(num_heads, num_heads, spec.head_dim, scale, window, causal=False, bias=bias, rotary_dim=rotary_dim)
    qkv = builder.linear(x, layer.qkv, layer.qkv_bias, "qkv")
    weights = HeadWeights(spec.norm_eps, rotary=rotary)
    return builder.attention(qkv, heads, weights, input_form(layer.o))


def _norm(builder: ProgramBuilder, spec: BertSpec, norm: NormWeights, x: Value, reader: PackedMatrix | None) -> Value:
    """Norm the residual stream in the dtype of `reader` (None: f32); in place if the family norms after additions."""
    if not spec.pre_norms:
        return _norm_in_place(builder, spec, norm, x, reader)
    return norm_for(builder, x, spec.norm_kind, norm, spec.norm_eps, reader)


def norm_for(
    builder: ProgramBuilder, x: Value, kind: NormKind, norm: NormWeights, eps: float, reader: PackedMatrix | None
) -> Value:
    """Norm each row of `x` as the layer that reads it takes its input."""
    return builder.norm_rows(x, kind, norm.weight, norm.bias, eps, _form(reader))


def _norm_in_place(
    builder: ProgramBuilder, spec: BertSpec, norm: NormWeights, x: Value, reader: PackedMatrix | None
) -> Value:
    return builder.norm_in_place(x, "layer", norm.weight, norm.bias, spec.norm_eps, _form(reader))


def _form(reader: PackedMatrix | None) -> RowForm:
    return F32 if reader is None else input_form(reader)


def _project(builder: ProgramBuilder, spec: Projection, weights: ProjectionWeights, x: Value) -> Value:
    """Emit norm(activation(linear(x)))."""
    epilogue = PLAIN_EPILOGUES[spec.activation]
    x = builder.activated(x, weights.weight, weights.bias, spec.out_features, epilogue, F32)
    if weights.norm is None:
        return x
    return builder.norm_rows(x, "layer", weights.norm.weight, weights.norm.bias, spec.norm_eps, F32)
