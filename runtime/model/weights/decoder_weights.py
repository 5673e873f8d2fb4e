"""The weights of a decoder: which tensors form which matrix.

`build_weights` is the only description of a model's weights: the check of a checkpoint, the memory plan and the packing
all run it, so they cannot disagree. Must not import config.json's reader or the program.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ....kernels.ops import WeightDtype as PackedDtype
from ....kernels.ops import padded
from ....kernels.pack import PackedMatrix
from ...common.config import WeightDtype
from ...common.errors import MissingTensor, WrongTensor
from ..spec import UNGATED, DecoderSpec, Experts, Mamba
from . import READABLE, Checkpoint, as_f32
from .delta_weights import DeltaWeights, build_delta
from .fusion_weights import build_fusion
from .latent_weights import LatentWeights, build_latent
from .layer_weights import (
    AttentionWeights,
    BesideWeights,
    ConvolutionWeights,
    DecoderWeights,
    ExpertWeights,
    LayerInputWeights,
    LayerTables,
    LayerWeights,
    MlpWeights,
)
from .mamba_weights import MambaWeights, build_mamba
from .packing import (
    ELEMENTS_PER_CHECK,
    GROUP,
    InputOrder,
    MatrixPlan,
    Part,
    Vector,
    WeightFactory,
    WeightPlanner,
    attention_group,
    interleaved,
    named,
    pack_built,
    packed_dtypes,
    scaled,
    stacked,
)
from .quantization import SORTED


def pack_weights(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    dtype: WeightDtype,
    stop: threading.Event | None = None,
    shared: DecoderWeights | None = None,
) -> DecoderWeights:
    """Pack every matrix as `dtype`. The checkpoint must have passed `check_tensors`. See `pack_built`.

    `shared` are the weights of the model that a head belongs to.

    Raises WrongTensor where embeddings are tied and the checkpoint has a head that is no copy of the embedding.
    """
    if spec.tie_embeddings and shared is None:
        _check_tied(checkpoint, f"{spec.names.embedding}.weight", f"{spec.names.lm_head}.weight")
    return pack_built(lambda factory, packed: build_weights(spec, packed, factory, shared), checkpoint, dtype, stop)


def _check_tied(checkpoint: Checkpoint, embedding: str, head: str) -> None:
    try:
        same = checkpoint.shape(head) == checkpoint.shape(embedding) and checkpoint.dtype(head) in READABLE
    except MissingTensor:
        return
    if same:
        num_rows = max(ELEMENTS_PER_CHECK // checkpoint.shape(head)[1], 1)
        pairs = zip(*(checkpoint.chunks(name, slice(None), num_rows) for name in (embedding, head)), strict=True)
        same = all(np.array_equal(as_f32(rows), as_f32(others)) for (_, rows), (_, others) in pairs)
    if not same:
        raise WrongTensor(
            f"tensor {head} in {checkpoint.path} is no copy of {embedding}, although {checkpoint.config_name} ties "
            "them; tie_word_embeddings must be false, or the tensor must go"
        )


def plan_weights(spec: DecoderSpec, dtype: WeightDtype) -> tuple[DecoderWeights, Counter[PackedDtype]]:
    """Return weights of the right shapes without memory, to plan a program that is never run; and bytes by dtype."""
    planner = WeightPlanner()
    weights = build_weights(spec, dtype, planner)
    return weights, planner.nbytes


def weights_text(spec: DecoderSpec, dtype: WeightDtype) -> str:
    """Return the dtype of the weights for people; for `auto` the dtypes of the matrices, such as "q4, q8"."""
    return ", ".join(sorted(plan_weights(spec, dtype)[1])) if dtype == "auto" else dtype


def build_weights(
    spec: DecoderSpec, dtype: WeightDtype, factory: WeightFactory, shared: DecoderWeights | None = None
) -> DecoderWeights:
    """Make all weights of a model with `factory`. With q4 the embedding and the LM head are q8.

    An embedding that is only read by column is the more exact in blocks, without a rotation. A head has the embedding
    and the LM head of `shared`, or without it their shapes.
    """
    names = spec.names
    hidden = spec.hidden_size

    def vocabulary(name: str, group: int) -> PackedMatrix:
        of, maker = (spec, factory) if spec.head_of is None else (spec.head_of, WeightPlanner())
        return _build_vocabulary(of, name, dtype, group, maker)

    if shared is not None:
        embedding = shared.embedding
    else:
        embedding = vocabulary(names.embedding, GROUP if spec.tie_embeddings else 0)
    layers = tuple(_build_layer(spec, layer, dtype, factory) for layer in range(spec.num_layers))
    final_norm = factory.vector(hidden, [Part(f"{names.final_norm}.weight", (hidden,))], spec.norm_offset)
    norm_bias = [Part(f"{names.final_norm}.bias", (hidden,))]
    final_norm_bias = factory.vector(hidden, norm_bias) if spec.norm_bias else None
    head_bias = [Part(f"{names.lm_head}.bias", (spec.vocab_size,))]
    lm_head_bias = factory.vector(spec.vocab_size, head_bias) if spec.lm_head_bias else None
    if shared is not None:
        lm_head = shared.lm_head
    else:
        lm_head = embedding if spec.tie_embeddings else vocabulary(names.lm_head, GROUP)
    tables = _build_layer_tables(spec, dtype, factory)
    fusion = None if spec.head_of is None else build_fusion(spec, dtype, factory)
    return DecoderWeights(embedding, layers, final_norm, final_norm_bias, lm_head_bias, lm_head, tables, fusion)


def _build_vocabulary(
    spec: DecoderSpec, name: str, dtype: WeightDtype, group: int, factory: WeightFactory
) -> PackedMatrix:
    """Make the embedding or the LM head."""
    dtype = "q8" if dtype == "q4" else dtype
    shape = spec.vocab_size, spec.hidden_size
    parts = [Part(f"{name}.weight", shape)]
    packed = packed_dtypes(spec.quantized, dtype, parts)
    return factory.matrix(MatrixPlan(*shape, packed, parts, group=_group(dtype, group)))


def _build_layer_tables(spec: DecoderSpec, dtype: WeightDtype, factory: WeightFactory) -> LayerTables | None:
    """Make the embeddings that layers have of a token. Rows of their table are only read, so it may be q4."""
    if not spec.layer_inputs:
        return None
    columns = spec.num_layers * spec.layer_inputs
    names = spec.names

    def matrix(name: str, out_features: int, in_features: int, group: int) -> PackedMatrix:
        parts = [Part(f"{name}.weight", (out_features, in_features))]
        packed = packed_dtypes(spec.quantized, dtype, parts)
        return factory.matrix(MatrixPlan(out_features, in_features, packed, parts, group=_group(dtype, group)))

    return LayerTables(
        table=matrix(names.layer_table, spec.vocab_size, columns, 0),
        projection=matrix(names.layer_projection, columns, spec.hidden_size, GROUP),
        norm=factory.vector(spec.layer_inputs, [Part(f"{names.layer_norm}.weight", (spec.layer_inputs,))]),
    )


def _build_layer(spec: DecoderSpec, layer: int, dtype: WeightDtype, factory: WeightFactory) -> LayerWeights:
    names = spec.names
    hidden = spec.hidden_size
    prefix = names.layer.format(layer)

    def vector(name: str, size: int = hidden) -> Vector:
        return factory.vector(size, [Part(f"{prefix}{name}.weight", (size,))], spec.norm_offset)

    def norm(present: bool, name: str, size: int) -> Vector | None:
        return vector(name, size) if present else None

    def matrix(out_features: int, in_features: int, parts: Sequence[Part], group: int = GROUP) -> PackedMatrix:
        parts = named(parts, prefix, "weight", in_features)
        order = _input_order(spec, dtype, parts)
        if order is not None:
            parts = [replace(part, tensor=part.tensor + SORTED) for part in parts]
        packed = packed_dtypes(spec.quantized, dtype, parts)
        return factory.matrix(
            MatrixPlan(out_features, in_features, packed, parts, input_order=order, group=_group(dtype, group))
        )

    def bias(present: bool, size: int, parts: Sequence[Part]) -> Vector | None:
        return factory.vector(size, named(parts, prefix, "bias")) if present else None

    def norm_bias(norm: Vector | None, name: str) -> Vector | None:
        return bias(spec.norm_bias and norm is not None, hidden, stacked((name,), (hidden,)))

    def mlp(gate_up_names: tuple[str, ...], down_name: str, size: int) -> MlpWeights:
        columns, gate_up = _gate_up(spec, gate_up_names, size)
        down = stacked((down_name,), (hidden,))
        return MlpWeights(
            gate_up=matrix(columns, hidden, gate_up),
            gate_up_bias=bias(spec.mlp_bias, columns, gate_up),
            down=matrix(hidden, size, down),
            down_bias=scaled(bias(spec.mlp_bias, hidden, down), spec.gate_scale),
        )

    def mixture(experts: Experts, norm: Vector | None) -> ExpertWeights:
        routed = _build_experts(spec, prefix, dtype, factory, norm)
        if not experts.shared_size:
            return routed
        return replace(routed, shared=mlp(names.shared_gate_up, names.shared_down, experts.shared_size))

    def head_norm(name: str, heads: int, head_dim: int) -> Vector | None:
        if spec.qk_norm_kind != "layer":
            return norm(spec.qk_norm, name, heads * head_dim if spec.qk_norm_rows else head_dim)
        parts = _norms_of_heads(f"{prefix}{name}.weight", heads, head_dim)
        return factory.vector(heads * head_dim, parts) if spec.qk_norm else None

    def attention() -> AttentionWeights:
        num_kv_heads, head_dim = spec.kv_heads_of(layer)
        q_size, kv_size = spec.num_heads * head_dim, num_kv_heads * head_dim
        kv_matrices = spec.kv_matrices(layer)
        sizes = (q_size * (2 if spec.gated_heads else 1), *[kv_size] * kv_matrices)
        qkv = stacked(names.qkv[: len(sizes)], sizes)
        o = stacked((names.o,), (hidden,))
        sinks = [Part(f"{prefix}{names.sinks}", (spec.num_heads,))]
        return AttentionWeights(
            qkv=matrix(sum(sizes), hidden, qkv),
            qkv_bias=scaled(bias(spec.qkv_bias, sum(sizes), qkv), 1 / spec.attention_in_scale),
            q_norm=head_norm(names.q_norm, spec.num_heads, head_dim),
            k_norm=head_norm(names.k_norm, num_kv_heads, head_dim) if kv_matrices else None,
            v_norm=np.ones(head_dim, np.float32) if spec.v_norm and kv_matrices else None,
            sinks=factory.vector(spec.num_heads, sinks) if spec.sinks else None,
            o=matrix(hidden, q_size, o, attention_group(spec.num_heads, num_kv_heads, head_dim)),
            o_bias=bias(spec.o_bias, hidden, o),
        )

    def convolution(taps: int, has_bias: bool) -> ConvolutionWeights:
        into = stacked((names.conv_in,), (3 * hidden,))
        conv = stacked((names.conv,), (hidden,))
        out = stacked((names.conv_out,), (hidden,))
        weights = factory.vector(hidden * taps, named(conv, prefix, "weight", *spec.names.conv_shape, taps))
        return ConvolutionWeights(
            into=matrix(3 * hidden, hidden, into),
            into_bias=bias(has_bias, 3 * hidden, into),
            taps=weights.reshape(hidden, taps).T,
            taps_bias=bias(has_bias, hidden, conv),
            out=matrix(hidden, hidden, out),
            out_bias=bias(has_bias, hidden, out),
        )

    def mamba(mixer: Mamba) -> MambaWeights:
        return build_mamba(mixer, names, prefix, hidden, factory, matrix, input_norm)

    def mixer() -> AttentionWeights | LatentWeights | ConvolutionWeights | DeltaWeights | MambaWeights | None:
        if not has_mixer:
            return None
        if spec.convolutions is not None and spec.convolutions.layers[layer]:
            return convolution(spec.convolutions.taps, spec.convolutions.bias)
        if spec.delta is not None and spec.delta.layers[layer]:
            return build_delta(spec.delta, names, prefix, hidden, factory, matrix, input_norm)
        if spec.latent is not None:
            return build_latent(spec.latent, spec.num_heads, names, prefix, hidden, factory, matrix)
        if spec.mamba is None or spec.attention_layers[layer]:
            return attention()
        return mamba(spec.mamba)

    def feed_forward() -> MlpWeights | ExpertWeights | None:
        if not has_mlp:
            return None
        if experts is None or experts.beside_mlp:
            return mlp(names.gate_up, names.down, spec.mlp_size(layer))
        return mixture(experts, mlp_norm)

    def mixture_beside() -> BesideWeights | None:
        if experts is None or not experts.beside_mlp:
            return None
        router_scale = factory.vector(hidden, [Part(f"{prefix}{names.router_scale}", (hidden,))])
        return BesideWeights(
            mlp_post_norm=vector(names.beside_mlp_post_norm),
            norm=vector(names.beside_norm),
            experts=mixture(experts, router_scale * np.float32(hidden**-0.5)),
            post_norm=vector(names.beside_post_norm),
        )

    def layer_input() -> LayerInputWeights | None:
        size = spec.layer_inputs
        if not size:
            return None
        return LayerInputWeights(
            gate=matrix(size, hidden, stacked((names.layer_gate,), (size,))),
            out=matrix(hidden, size, stacked((names.layer_out,), (hidden,))),
            post_norm=vector(names.layer_post_norm),
        )

    has_mixer = not spec.mlp_layers or not spec.mlp_layers[layer]
    has_mlp = not spec.mlp_layers or spec.mlp_layers[layer]
    input_norm = norm(spec.norms_input(layer) and has_mixer, names.input_norm, hidden)
    mlp_norm = norm(spec.norms_input(layer) and has_mlp and not spec.parallel, names.mlp_norm, hidden)
    experts = spec.experts if spec.experts is not None and spec.experts.layers[layer] else None
    return LayerWeights(
        input_norm=input_norm,
        input_norm_bias=norm_bias(input_norm, names.input_norm),
        mixer=mixer(),
        beside=mamba(spec.mamba) if spec.mamba is not None and spec.mamba.beside_attention else None,
        attention_post_norm=norm(spec.norms_output(layer), names.attention_post_norm, hidden),
        mlp_norm=mlp_norm,
        mlp_norm_bias=norm_bias(mlp_norm, names.mlp_norm),
        mlp=feed_forward(),
        mixture_beside=mixture_beside(),
        mlp_post_norm=norm(spec.norms_output(layer), names.mlp_post_norm, hidden),
        layer_input=layer_input(),
        scale=factory.vector(1, [Part(f"{prefix}{names.layer_scale}", (1,))]) if spec.layer_scales else None,
    )


def _build_experts(
    spec: DecoderSpec, prefix: str, dtype: WeightDtype, factory: WeightFactory, norm: Vector | None
) -> ExpertWeights:
    """Make the weights of a layer's experts; all matrices of one kind have the same dtype."""
    assert spec.experts is not None, "only a spec with experts has layers with experts"
    names = spec.names
    hidden = spec.hidden_size
    size = spec.experts.intermediate_size
    num_experts = spec.experts.num_experts
    has_bias = spec.experts.bias
    router = named(stacked((names.router,), (num_experts,)), prefix, "weight", hidden)
    if spec.experts.shared_gate:
        gate = Part(names.shared_gate, names.shared_gate_shape, start=num_experts)
        router += named([gate], prefix, "weight", hidden)
    num_logits = num_experts + spec.experts.shared_gate
    choice_bias = [Part(f"{prefix}{names.choice_bias}", (num_experts,))]
    scales = [Part(f"{prefix}{names.expert_scales}", (num_experts,))]
    columns, gate_up = _gate_up(spec, names.expert_gate_up, size)
    down = stacked((names.expert_down,), (hidden,))
    router_bias = named(stacked((names.router,), (num_experts,)), prefix, "bias")

    def of_experts(parts: Sequence[Part], suffix: str, *in_features: int) -> list[list[Part]]:
        each = ([_of_expert(part, expert, num_experts) for part in parts] for expert in range(num_experts))
        return [named(parts, prefix, suffix, *in_features) for parts in each]

    def matrices(out_features: int, in_features: int, parts: Sequence[Part]) -> tuple[PackedMatrix, ...]:
        experts = of_experts(parts, "weight", in_features)
        packed = packed_dtypes(spec.quantized, dtype, [part for parts in experts for part in parts])
        one = packed if isinstance(packed, str) else "q8"
        group = _group(dtype, GROUP)
        return tuple(
            factory.matrix(MatrixPlan(out_features, in_features, one, parts, group=group)) for parts in experts
        )

    def biases(size: int, parts: Sequence[Part]) -> tuple[Vector, ...] | None:
        return tuple(factory.vector(size, parts) for parts in of_experts(parts, "bias")) if has_bias else None

    return ExpertWeights(
        router=factory.matrix(MatrixPlan(num_logits, hidden, "f32", router, factors=norm)),
        router_bias=factory.vector(num_logits, router_bias) if has_bias else None,
        choice_bias=factory.vector(num_experts, choice_bias) if spec.experts.choice_bias else None,
        scales=factory.vector(num_experts, scales) if spec.experts.scales else None,
        gate_up=matrices(columns, hidden, gate_up),
        gate_up_biases=biases(columns, gate_up),
        down=matrices(hidden, size, down),
        down_biases=biases(hidden, down),
        shared=None,
    )


def _norms_of_heads(tensor: str, heads: int, head_dim: int) -> list[Part]:
    """Return the parts of a norm with weights for each head, from one tensor, or from one for each head."""
    if "{}" not in tensor:
        return [Part(tensor, (heads, head_dim))]
    return [Part(tensor.format(head), (head_dim,), start=head * head_dim) for head in range(heads)]


def _gate_up(spec: DecoderSpec, names: tuple[str, ...], size: int) -> tuple[int, list[Part]]:
    """Return the columns and the parts of the matrix of gate and up, or of up alone."""
    if spec.activation in UNGATED:
        return size, stacked(names, (size,))
    return 2 * padded(size), interleaved(names, size)


def _of_expert(part: Part, expert: int, num_experts: int) -> Part:
    """Return a part of one expert's matrix, from its own tensor or from one tensor with all experts."""
    if "{}" in part.tensor:
        return replace(part, tensor=part.tensor.format(expert))
    (rows,) = part.shape
    first_row = expert * rows + part.first_row
    num_rows = rows if part.num_rows is None else part.num_rows
    return replace(part, shape=(num_experts, rows), first_row=first_row, num_rows=num_rows)


def _group(dtype: WeightDtype, group: int) -> int:
    """Return the group of a matrix: 0 unless it is quantized to q8 while it is packed."""
    return group if dtype == "q8" else 0


def _input_order(spec: DecoderSpec, dtype: WeightDtype, parts: Sequence[Part]) -> InputOrder | None:
    """Return the order of inputs in which all tensors of a matrix are in blocks; only with `auto`."""
    order = spec.input_orders.get(parts[0].tensor)
    if dtype != "auto" or order is None:
        return None
    return order if all(np.array_equal(order, spec.input_orders.get(part.tensor, ())) for part in parts) else None
