"""The classes of a decoder's packed weights: of a model, a layer, and its parts."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.pack import PackedMatrix
from .delta_weights import DeltaWeights
from .fusion_weights import FusionWeights
from .latent_weights import LatentWeights
from .mamba_weights import MambaWeights
from .packing import Vector


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The weights of an MLP."""

    gate_up: PackedMatrix  # [2 padded(intermediate), hidden], 16 columns of gate, 16 of up, …; or up alone, not padded
    gate_up_bias: Vector | None
    down: PackedMatrix  # [hidden, intermediate]
    down_bias: Vector | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a mixture of experts: the router's, and an MLP's for each expert."""

    # f32 [experts, hidden], with a row for the logit of the shared expert if it has one; columns multiplied by the
    # norm's weights: its input is not normed
    router: PackedMatrix
    router_bias: Vector | None
    choice_bias: Vector | None  # [experts], added to scores for the choice of experts
    scales: Vector | None  # [experts], factors of their results
    gate_up: tuple[PackedMatrix, ...]
    gate_up_biases: tuple[Vector, ...] | None
    down: tuple[PackedMatrix, ...]
    down_biases: tuple[Vector, ...] | None
    shared: MlpWeights | None  # expert that computes every token


@dataclass(frozen=True, slots=True)
class BesideWeights:
    """The weights of a mixture of experts beside an MLP, and the norms of the output of both."""

    mlp_post_norm: Vector  # [hidden]
    norm: Vector  # [hidden], of the experts' input; the router reads the residual stream times a scale of each column
    experts: ExpertWeights
    post_norm: Vector  # [hidden]


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """The weights that add a layer's own embedding of a token to the residual stream."""

    gate: PackedMatrix  # [layer_inputs, hidden]
    out: PackedMatrix  # [hidden, layer_inputs]
    post_norm: Vector  # [hidden]


@dataclass(frozen=True, slots=True)
class LayerTables:
    """The weights of the embeddings that all layers have of a token."""

    table: PackedMatrix  # [vocab, layers * layer_inputs]
    projection: PackedMatrix  # [layers * layer_inputs, hidden], of the token's embedding
    norm: Vector  # [layer_inputs], of each layer's part of the projection


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of attention. Biases and norms that the family does not have are None."""

    qkv: PackedMatrix  # [columns, hidden]: query heads with their gates, then key heads, then value heads
    qkv_bias: Vector | None
    q_norm: Vector | None  # [head_dim], or with qk_norm_rows [q_size]
    k_norm: Vector | None  # [head_dim], or with qk_norm_rows [kv_size]
    v_norm: Vector | None  # [head_dim], of ones
    sinks: Vector | None  # [num_heads]
    o: PackedMatrix  # [hidden, q_size]
    o_bias: Vector | None


@dataclass(frozen=True, slots=True)
class ConvolutionWeights:
    """The weights of a gated short convolution. Biases that the family does not have are None."""

    into: PackedMatrix  # [3 hidden, hidden]: the gate of the input, the gate of the output, the value
    into_bias: Vector | None
    taps: Vector  # [taps, hidden], the weights of the oldest token first
    taps_bias: Vector | None  # [hidden]
    out: PackedMatrix  # [hidden, hidden]
    out_bias: Vector | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer. Norms and parts that it does not have are None."""

    input_norm: Vector | None  # [hidden]
    input_norm_bias: Vector | None  # [hidden]
    mixer: AttentionWeights | LatentWeights | ConvolutionWeights | DeltaWeights | MambaWeights | None
    beside: MambaWeights | None  # a mixer beside attention, for the same rows
    attention_post_norm: Vector | None  # [hidden]
    mlp_norm: Vector | None  # [hidden]
    mlp_norm_bias: Vector | None  # [hidden]
    mlp: MlpWeights | ExpertWeights | None
    mixture_beside: BesideWeights | None  # a mixture of experts beside the MLP
    mlp_post_norm: Vector | None  # [hidden]
    layer_input: LayerInputWeights | None
    scale: Vector | None  # [1], factor of the residual stream after the layer


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of a model. With tied embeddings, `lm_head` is the same object as `embedding`."""

    embedding: PackedMatrix  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Vector  # [hidden]
    final_norm_bias: Vector | None  # [hidden]
    lm_head_bias: Vector | None  # [vocab]
    lm_head: PackedMatrix  # [vocab, hidden]
    layer_tables: LayerTables | None
    fusion: FusionWeights | None = None  # only a head has them
