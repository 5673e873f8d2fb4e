"""The decoder, the same for all families: emits the program of a model, from the embedding to the logits.

The program depends on the spec and the packed weights alone; differences between families are fields of the spec. Must
not import families.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...kernels.ops import MatrixState, Ring
from ...pager.layout import place_layers
from .feed_forward import embedding_scale, layer_input_block, layer_inputs, mlp_block
from .latent_attention import emit_latent_attention
from .program import Heads, HeadWeights, Logits, NormedValue, ProgramBuilder, Recurrence, Value, input_form
from .program.values import F32
from .residual import add_branch, normed_input, normed_rows, rows_form
from .rope import Table, query_scales
from .spec import DecoderSpec
from .states import StateLayout
from .weights.delta_weights import DeltaWeights
from .weights.fusion_weights import FusionWeights
from .weights.latent_weights import LatentWeights
from .weights.layer_weights import (
    AttentionWeights,
    ConvolutionWeights,
    DecoderWeights,
    LayerWeights,
    MlpWeights,
)
from .weights.mamba_weights import MambaWeights
from .weights.packing import Vector

L2_EPS = 1e-6  # epsilon of the lengths of queries and keys, as in transformers


def emit_decoder(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    weights: DecoderWeights,
    rotary: Sequence[Table | None],
    states: StateLayout,
    *,
    shows_hidden: bool = False,
) -> Logits:
    """Emit the ops from token ids to the logits of the rows that sample. `rotary` has one table per layer.

    With `shows_hidden`, the normed rows that a head reads are a result, too: of a head itself, the rows that sample.
    """
    x = emit_layers(builder, spec, weights, rotary, states)
    sampled = builder.gather(x)
    hidden = None
    if shows_hidden:
        rows = x if spec.head_of is None else sampled
        bias = weights.final_norm_bias
        hidden = builder.norm_rows(rows, spec.norm_kind, weights.final_norm, bias, spec.norm_eps, F32)
    normed = normed_rows(
        builder, spec, weights.final_norm, weights.final_norm_bias, sampled, input_form(weights.lm_head)
    )
    logits = builder.logits(normed, weights.lm_head, weights.lm_head_bias, spec.logits_scale, spec.logits_softcap)
    return replace(logits, hidden=hidden)


def emit_layers(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    weights: DecoderWeights,
    rotary: Sequence[Table | None],
    states: StateLayout,
    *,
    causal: bool = True,
) -> Value:
    """Emit the ops from token ids to the output of the last layer, before the final norm.

    Only attention without KV pages may be non-`causal`.
    """
    x = builder.embed(weights.embedding, embedding_scale(weights.embedding, spec.embedding_scale, spec))
    if weights.fusion is not None:
        x = _fused_rows(builder, spec, weights.fusion, x)
    tables = weights.layer_tables
    inputs = None if tables is None else layer_inputs(builder, spec, tables, x)
    scales = None if spec.query_scales is None else query_scales(spec.query_scales, _num_positions(rotary))
    for layer, layer_weights in enumerate(weights.layers):
        shared = _shared_input(builder, spec, layer_weights, x) if spec.parallel else None
        if isinstance(layer_weights.mixer, ConvolutionWeights):
            _convolution_block(builder, spec, layer_weights, layer_weights.mixer, states.rings[layer], x)
        elif isinstance(layer_weights.mixer, DeltaWeights):
            _delta_block(
                builder, spec, layer_weights, layer_weights.mixer, states.rings[layer], states.matrices[layer], x
            )
        elif isinstance(layer_weights.mixer, LatentWeights):
            _latent_block(builder, spec, layer_weights, layer_weights.mixer, layer, x, rotary[layer])
        elif isinstance(layer_weights.mixer, MambaWeights):
            _mamba_block(builder, spec, layer_weights, layer_weights.mixer, layer, x, states)
        elif layer_weights.mixer is not None:
            _attention_block(
                builder,
                spec,
                layer_weights,
                layer_weights.mixer,
                layer,
                x,
                rotary[layer],
                states,
                causal,
                shared,
                scales,
            )
        if layer_weights.mlp is not None:
            mlp_block(builder, spec, layer_weights, layer_weights.mlp, x, shared)
        if layer_weights.layer_input is not None and inputs is not None:
            layer_input_block(builder, spec, layer_weights, layer_weights.layer_input, layer, inputs, x)
        if layer < spec.deepstack:
            builder.add_given(x, layer + 1)
    return x


def _fused_rows(builder: ProgramBuilder, spec: DecoderSpec, weights: FusionWeights, embedded: Value) -> Value:
    """Emit the rows of a head: fc(norm(embedding) | norm(hidden state)), of hidden states that the caller writes."""
    hidden = builder.input("hidden states", spec.hidden_size)
    normed = builder.norm(embedded, weights.embedding_norm, spec.norm_eps, input_form(weights.of_embedding))
    x = builder.linear(normed, weights.of_embedding, None, "residual")
    form = input_form(weights.of_hidden)
    rows = builder.norm_rows(hidden, "rms", weights.hidden_norm, None, spec.norm_eps, form)
    builder.linear_add(rows, weights.of_hidden, None, x)
    return x


def _num_positions(rotary: Sequence[Table | None]) -> int:
    return min(len(table) for table in rotary if table is not None)


def _attention_block(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    layer: LayerWeights,
    weights: AttentionWeights,
    index: int,
    x: Value,
    rotary: Table | None,
    states: StateLayout,
    causal: bool,
    shared: Value | None,
    scales: Vector | None,
) -> None:
    """Emit x += o(attention(qkv(norm(x)))), and x += the output of a mixer beside attention.

    The norm may be there already: `shared` is what the MLP of a parallel layer reads.
    """
    group, slot = _place(spec, spec.kv_sources[index] if spec.kv_sources else index)
    num_kv_heads, head_dim = spec.kv_heads_of(index)
    heads = Heads(
        spec.num_heads,
        num_kv_heads,
        head_dim,
        spec.attention_scale,
        spec.windows[index],
        group=group,
        layer=slot,
        softcap=spec.attention_softcap,
        norms_rows=spec.qk_norm_rows,
        head_norm=spec.qk_norm_kind,
        gated=spec.gated_heads,
        causal=causal,
        rotary_span=0 if (rope := spec.ropes[index]) is None else rope.span,
        stores=spec.stores_kv(index),
        values_are_keys=spec.kv_matrices(index) == 1,
    )
    form = rows_form(builder, spec, layer.input_norm, weights.qkv)
    normed = shared if shared is not None and shared.form == form else normed_input(builder, spec, layer, x, form)
    beside = layer.beside
    mixed = None if beside is None else _mix(builder, spec, beside, index, x, normed, states)
    qkv = builder.linear(normed, weights.qkv, weights.qkv_bias, "qkv", spec.attention_in_scale)
    head_weights = HeadWeights(
        spec.norm_eps,
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        v_norm=weights.v_norm,
        rotary=rotary,
        sinks=weights.sinks,
        query_scales=scales,
    )
    attended = builder.attention(qkv, heads, head_weights, builder.form_of(weights.o))
    scale = spec.attention_out_scale
    add_branch(builder, spec, attended, weights.o, weights.o_bias, layer.attention_post_norm, x, scale)
    if beside is not None and mixed is not None:
        _add_mixed(builder, spec, beside, mixed, x)


def _latent_block(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    layer: LayerWeights,
    weights: LatentWeights,
    index: int,
    x: Value,
    rotary: Table | None,
) -> None:
    """Emit x += o(latent attention(norm(x)))."""
    assert rotary is not None, "latent attention rotates a part of each head"
    first = weights.queries if weights.query_latent is None else weights.query_latent
    normed = normed_input(builder, spec, layer, x, input_form(first))
    attended = emit_latent_attention(builder, spec, weights, normed, rotary, _place(spec, index))
    add_branch(builder, spec, attended, weights.o, None, layer.attention_post_norm, x)


def _place(spec: DecoderSpec, layer: int) -> tuple[int, int]:
    """Return the layer group of a layer that stores keys and values, and its slot in the group's pages."""
    stored = spec.kv_layers
    windows = tuple(spec.windows[each] for each in stored)
    return place_layers(windows, tuple(map(spec.kv_heads_of, stored)))[stored.index(layer)]


def _convolution_block(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    layer: LayerWeights,
    weights: ConvolutionWeights,
    ring: Ring,
    x: Value,
) -> None:
    """Emit x += out(convolution(in(norm(x))))."""
    normed = normed_input(builder, spec, layer, x, input_form(weights.into))
    gated = builder.linear(normed, weights.into, weights.into_bias, "gates, value")
    convolved = builder.short_conv(gated, weights.taps, weights.taps_bias, ring, input_form(weights.out))
    add_branch(builder, spec, convolved, weights.out, weights.out_bias, layer.attention_post_norm, x)


def _delta_block(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    layer: LayerWeights,
    weights: DeltaWeights,
    ring: Ring,
    state: MatrixState,
    x: Value,
) -> None:
    """Emit x += out(norm(recurrence(convolution(in(norm(x))))) * silu(gate))."""
    delta = spec.delta
    assert delta is not None, "only a spec with gated delta nets has layers with them"
    normed = normed_input(builder, spec, layer, x, input_form(weights.into))
    mixed = builder.linear(normed, weights.into, None, "queries, keys, values, gates")
    if isinstance(normed, NormedValue):
        rates = builder.linear_f32(x, normed, weights.rates, None, "rates, decays")
    else:
        rates = builder.linear(x, weights.rates, None, "rates, decays")
    convolved = builder.causal_conv(
        mixed, 0, weights.taps, None, ring, num_normed=2 * delta.num_key_heads, head_dim=delta.key_dim, eps=L2_EPS
    )
    shape = Recurrence(
        state=state,
        num_key_heads=delta.num_key_heads,
        tiled=delta.tiled,
        query=0,
        key=delta.key_size,
        value=2 * delta.key_size,
        decay=delta.num_value_heads,
        rate=0,
        a=weights.a,
        bias=weights.bias,
        scale=delta.key_dim**-0.5,
        rate_scale=delta.rate_scale,
    )
    gated = builder.gated_norm(
        builder.recurrence(convolved, rates, shape),
        mixed,
        delta.conv_size,
        weights.norm,
        delta.norm_eps,
        input_form(weights.out),
        group=delta.value_dim,
    )
    add_branch(builder, spec, gated, weights.out, None, layer.attention_post_norm, x)


def _mamba_block(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    layer: LayerWeights,
    weights: MambaWeights,
    index: int,
    x: Value,
    states: StateLayout,
) -> None:
    """Emit x += out(mixed rows of norm(x))."""
    normed = normed_input(builder, spec, layer, x, input_form(weights.into))
    _add_mixed(builder, spec, weights, _mix(builder, spec, weights, index, x, normed, states), x)


def _mix(
    builder: ProgramBuilder,
    spec: DecoderSpec,
    weights: MambaWeights,
    index: int,
    x: Value,
    normed: Value | NormedValue,
    states: StateLayout,
) -> Value:
    """Return norm(recurrence(convolution(x, B, C)) * silu(gates)), all of in(normed)."""
    mamba = spec.mamba
    assert mamba is not None, "only a spec with Mamba-2 has layers with it"
    assert isinstance(normed, NormedValue), "layers with a Mamba-2 mixer norm their input"
    gate_scale, *_, time_scale = (mamba.input_scale * scale for scale in mamba.scales)
    times = builder.linear(replace(normed, data=x), weights.times, weights.times_bias, "time steps", time_scale)
    form = input_form(weights.into)
    same = normed.data.form == form
    rows = normed if same else builder.norm_rows(x, "rms", normed.weight, None, normed.eps, form)
    into = builder.linear(rows, weights.into, weights.into_bias, "gates, x, B, C", gate_scale)
    heads = builder.causal_conv(into, mamba.inner_size, weights.taps, weights.taps_bias, states.rings[index])
    _, key, query = np.cumsum([0, *mamba.conv_sizes[:2]]).tolist()
    shape = Recurrence(
        state=states.matrices[index],
        num_key_heads=mamba.num_groups,
        query=query,
        key=key,
        value=0,
        decay=0,
        rate=None,
        a=weights.a,
        bias=weights.bias,
        skip=weights.skip,
        time_limits=mamba.time_limits,
    )
    return builder.gated_norm(
        builder.recurrence(heads, times, shape),
        into,
        0,
        weights.norm,
        spec.norm_eps,
        input_form(weights.out),
        group=mamba.inner_size // mamba.num_groups,
        gate_first=mamba.gate_first,
    )


def _add_mixed(builder: ProgramBuilder, spec: DecoderSpec, weights: MambaWeights, mixed: Value, x: Value) -> None:
    """Emit x += out(mixed)."""
    assert spec.mamba is not None, "only a spec with Mamba-2 has layers with it"
    builder.linear_add(mixed, weights.out, weights.out_bias, x, spec.residual_scale * spec.mamba.output_scale)


def _shared_input(builder: ProgramBuilder, spec: DecoderSpec, layer: LayerWeights, x: Value) -> Value:
    """Return norm(x) in the form that the MLP of a parallel layer reads."""
    assert isinstance(layer.mlp, MlpWeights), "parallel layers have MLPs, not experts"
    form = rows_form(builder, spec, layer.input_norm, layer.mlp.gate_up)
    rows = normed_input(builder, spec, layer, x, form)
    assert isinstance(rows, Value), "parallel layers have LayerNorm, an op of its own"
    return rows
