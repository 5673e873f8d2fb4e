"""The parts of a layer after its mixer: the MLP, the mixture of experts, and the layer's own embeddings.

Must not import families or attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...kernels.ops import Epilogue
from ...kernels.pack import PackedMatrix
from .program import NormedValue, ProgramBuilder, Value, input_form
from .program.values import F32, RoutingValue
from .residual import add_branch, normed_rows, rows_form
from .spec import DecoderSpec
from .weights.layer_weights import (
    BesideWeights,
    ExpertWeights,
    LayerInputWeights,
    LayerTables,
    LayerWeights,
    MlpWeights,
)
from .weights.packing import Vector

EPILOGUES: dict[str, Epilogue] = {
    "silu": "swiglu",
    "gelu_tanh": "geglu",
    "clamped_silu": "swiglu_clamped",
    "relu_squared": "relu_squared",
    "ungated_gelu_tanh": "gelu_tanh",
}


def mlp_block(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    layer: LayerWeights,
    mlp: MlpWeights | ExpertWeights,
    x: Value,
    shared: Value | None,
) -> None:
    """Emit x += down(activation(gate(norm(x))) * up(norm(x))), or the same for the experts of each row.

    In a parallel layer, norm(x) is `shared`: the rows before attention was added.
    """
    if isinstance(mlp, ExpertWeights):
        assert layer.mlp_norm is not None, "families with experts norm what the router reads"
        normed = builder.norm(x, layer.mlp_norm, spec.norm_eps, input_form(mlp.gate_up[0]))
        _expert_block(builder, spec, mlp, x, normed)
        return
    if layer.mixture_beside is None:
        form = rows_form(builder, spec, layer.mlp_norm, mlp.gate_up)
        rows = shared or normed_rows(builder, spec, layer.mlp_norm, layer.mlp_norm_bias, x, form)
    else:  # the op that wrote x writes the norm that the experts read
        rows = builder.norm_rows(x, "rms", layer.mlp_norm, None, spec.norm_eps, builder.form_of(mlp.gate_up))
    activated = builder.activated(
        rows,
        mlp.gate_up,
        mlp.gate_up_bias,
        mlp.down.in_features,
        EPILOGUES[spec.activation],
        builder.form_of(mlp.down),
        spec.gate_scale,
    )
    # The scale of a gated layer multiplies up, too.
    scale = spec.mlp_out_scale / spec.gate_scale
    if layer.mixture_beside is not None:
        _add_beside(builder, spec, layer, layer.mixture_beside, builder.linear(activated, mlp.down, None, "mlp"), x)
        return
    after = 1.0 if layer.layer_input is not None else _scale_after(layer)
    add_branch(builder, spec, activated, mlp.down, mlp.down_bias, layer.mlp_post_norm, x, scale, after)


def _expert_block(
    builder: ProgramBuilder, spec: DecoderSpec, weights: ExpertWeights, x: Value, normed: NormedValue
) -> None:
    """Emit x += the weighted sum of each row's experts, each an MLP: down(activation(gate(normed)) * up(normed)).

    An expert that computes every row is added too, by its own weight if it has one.
    """
    logits, routing = _route(builder, spec, weights, x, normed)
    shared = None if weights.shared is None else _shared_expert(builder, spec, weights.shared, x, normed)
    outputs = _expert_outputs(builder, spec, weights, normed, routing)
    builder.combine_add(outputs, routing, x, shared, logits)


def _add_beside(
    builder: ProgramBuilder, spec: DecoderSpec, layer: LayerWeights, beside: BesideWeights, mlp: Value, x: Value
) -> None:
    """Emit x += norm(norm(mlp) + norm(the weighted sum of each row's experts, whose input has a norm of its own))."""
    assert layer.mlp_post_norm is not None, "layers with a mixture beside the MLP norm the sum of both"
    normed = builder.norm(x, beside.norm, spec.norm_eps, input_form(beside.experts.gate_up[0]))
    _, routing = _route(builder, spec, beside.experts, x, normed)
    mixture = builder.combine(_expert_outputs(builder, spec, beside.experts, normed, routing), routing)
    builder.norm_in_place(mlp, "rms", beside.mlp_post_norm, None, spec.norm_eps, F32)
    builder.add_norm(mixture, beside.post_norm, spec.norm_eps, mlp)
    after = 1.0 if layer.layer_input is not None else _scale_after(layer)
    builder.add_norm(mlp, layer.mlp_post_norm, spec.norm_eps, x, after)


def _route(
    builder: ProgramBuilder, spec: DecoderSpec, weights: ExpertWeights, x: Value, normed: NormedValue
) -> tuple[Value, RoutingValue]:
    """Return the logits of the experts of each row, and the experts that compute it."""
    experts = spec.experts
    assert experts is not None, "only a spec with experts has a router"
    logits = builder.linear_f32(x, normed, weights.router, weights.router_bias, "router logits")
    choice = weights.choice_bias
    return logits, builder.route(logits, experts.num_experts, experts.top_k, experts.rule, choice, weights.scales)


def _expert_outputs(
    builder: ProgramBuilder, spec: DecoderSpec, weights: ExpertWeights, normed: NormedValue, routing: RoutingValue
) -> Value:
    """Return the results of each row's experts: down(activation(gate(normed)) * up(normed))."""
    experts = spec.experts
    assert experts is not None, "only a spec with experts has layers with experts"
    activated = builder.expert_gated(
        builder.dispatch(normed, routing),
        weights.gate_up,
        weights.gate_up_biases,
        routing,
        experts.intermediate_size,
        EPILOGUES[spec.activation],
        input_form(weights.down[0]),
    )
    return builder.expert_linear(activated, weights.down, weights.down_biases, routing)


def _shared_expert(
    builder: ProgramBuilder, spec: DecoderSpec, weights: MlpWeights, x: Value, normed: NormedValue
) -> Value | None:
    """Return the rows of the expert that computes every row; None if they have no weight: they are in `x` already."""
    experts = spec.experts
    assert experts is not None, "only a spec with experts has a shared one"
    form = input_form(weights.gate_up)
    activated = builder.activated(
        normed if normed.data.form == form else builder.norm_rows(x, "rms", normed.weight, None, normed.eps, form),
        weights.gate_up,
        weights.gate_up_bias,
        experts.shared_size,
        EPILOGUES[spec.activation],
        input_form(weights.down),
    )
    if experts.shared_gate:
        return builder.linear(activated, weights.down, weights.down_bias, "shared expert")
    builder.linear_add(activated, weights.down, weights.down_bias, x, spec.residual_scale)
    return None


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The embeddings that all layers have of the step's tokens, side by side."""

    projected: Value  # f32 [tokens, layers * layer_inputs], projections of the tokens' embeddings
    embedded: Value  # f32, as `projected`: rows of the table
    norm: Vector  # [layer_inputs]


def layer_inputs(builder: ProgramBuilder, spec: DecoderSpec, tables: LayerTables, x: Value) -> LayerInputs:
    """Emit the embeddings of all layers, from the tokens and from their embedding `x`."""
    rows = builder.convert(x, input_form(tables.projection))
    scale = spec.hidden_size**-0.5
    projected = builder.linear(rows, tables.projection, None, "layer projections", scale)
    embedded = builder.embed(tables.table, embedding_scale(tables.table, spec.layer_inputs**0.5, spec))
    return LayerInputs(projected, embedded, tables.norm)


def layer_input_block(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    layer: LayerWeights,
    weights: LayerInputWeights,
    index: int,
    inputs: LayerInputs,
    x: Value,
) -> None:
    """Emit x = (x + norm(out(GELU(gate(x)) * (norm(projected) + embedded) / sqrt(2)))) * the scale of the layer."""
    gates = builder.linear(builder.convert(x, input_form(weights.gate)), weights.gate, None, "layer gates")
    form = input_form(weights.out)
    column = index * spec.layer_inputs
    gated = builder.gate_rows(
        gates, inputs.projected, inputs.embedded, column, inputs.norm, spec.norm_eps, 2**-0.5, form
    )
    add_branch(builder, spec, gated, weights.out, None, weights.post_norm, x, after=_scale_after(layer))


def _scale_after(layer: LayerWeights) -> float:
    """Return the factor of the residual stream after a layer."""
    return 1.0 if layer.scale is None else float(layer.scale[0])


def embedding_scale(table: PackedMatrix, scale: float, spec: DecoderSpec) -> float:
    """Return the scale of a table's embeddings, rounded to the nearest bf16, ties to even, where the family does so."""
    if not spec.round_embedding_scale or table.dtype == "f32":
        return scale
    bits = int(np.float32(scale).view(np.uint32))
    rounded = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return float(np.uint32(rounded).view(np.float32))
