"""The description of a decoder that every family's config.json is read into, and of its tensors' names.

Every `DecoderSpec` can be run: `config_json.py` refuses all other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from ...kernels.ops import HeadNorm, NormKind, RoutingRule
from ...pager.layout import KVHeads

Activation = Literal["silu", "gelu_tanh", "clamped_silu", "relu_squared", "ungated_gelu_tanh"]
UNGATED: tuple[Activation, ...] = ("relu_squared", "ungated_gelu_tanh")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor` (kaiokendev, 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, interpolated in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023); `attention_factor` multiplies cos and sin."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """A divisor for each frequency, highest frequency first, as GGUF files have them."""

    divisors: tuple[float, ...]  # head_dim / 2


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., 2024): each frequency divided by a factor of its own; `attention_factor` as in YaRN.

    `long_factors` apply where the context that is served is longer than the original one, `short_factors` elsewhere.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: the base, the scaling for positions beyond the training, and the rotated part of a head."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | FrequencyDivisors | None = None
    dim: int | None = None  # elements of a head that are rotated, from the first one on; None: all
    # elements whose first pairs are rotated, by the frequencies of a head of this size; 0: `dim`
    span: int = 0
    # M-RoPE: the position that rotates each pair: 0 time, 1 height, 2 width; (): a token has one position
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QueryScales:
    """The factor of a query at `position`: 1 + beta * ln(1 + position // period)."""

    beta: float
    period: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP: the experts with the largest scores compute a token."""

    num_experts: int
    top_k: int  # experts per token
    intermediate_size: int  # size of each expert
    rule: RoutingRule
    layers: tuple[bool, ...]  # one per layer: whether it has experts or an MLP
    bias: bool = False  # bias of the router and of each expert
    choice_bias: bool = False  # bias of the scores for the choice of experts
    shared_size: int = 0  # size of an expert that computes every token; 0: none
    shared_gate: bool = False  # the result of that expert is multiplied by the sigmoid of a logit
    # the layer has an MLP, too: both results are normed before they are added up, and the router reads the norm of the
    # residual stream times a scale of each column and hidden_size ** -0.5
    beside_mlp: bool = False
    scales: bool = False  # a factor of each expert's results


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolutions:
    """Layers with a gated short convolution in place of attention."""

    taps: int  # tokens that a row sees, itself included
    bias: bool  # bias of the convolution and of the projections before and after it
    layers: tuple[bool, ...]  # one per layer: whether it has a convolution or attention


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """Layers with a gated delta net, linear attention with a matrix per head as its state, in place of attention."""

    num_key_heads: int  # heads of queries, and of keys
    num_value_heads: int  # a multiple of num_key_heads
    key_dim: int  # columns of a head
    value_dim: int
    taps: int  # tokens that a row of the convolution sees, itself included
    norm_eps: float  # epsilon of the gated norm after the recurrence
    layers: tuple[bool, ...]  # one per layer: whether it has a gated delta net or attention
    rate_scale: float = 1.0  # factor of beta: 2 where eigenvalues may be negative
    pre_norms: bool = False  # layers with a net norm the input of net and MLP, in families whose others norm the output
    tiled: bool = False  # value head i has the key head i % num_key_heads; else neighbors share a key head

    @property
    def key_size(self) -> int:
        """Columns of all key heads; query heads have as many."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Columns of all value heads; their gates have as many."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Columns of the convolution: queries, then keys, then values."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """Layers with a Mamba-2 mixer: a recurrence with a matrix per head, whose keys and queries are called B and C.

    Its projection has the gates, then the values x, then B, C, and an input of the time step for each head.
    """

    num_heads: int
    head_dim: int  # columns of x in a head
    num_groups: int  # groups of heads that share B and C
    state_size: int  # columns of B, and of C, in a group
    taps: int  # tokens that a row of the convolution sees, itself included
    layers: tuple[bool, ...]  # one per layer: whether it has such a mixer
    beside_attention: bool = False  # whether these layers have attention, too
    conv_bias: bool = False
    in_bias: bool = False  # bias of the projection before
    out_bias: bool = False  # bias of the projection after
    norm: bool = True  # RMS norm of each group of heads before the last projection
    gate_first: bool = True  # the gate multiplies the input of this norm, not its output
    time_limits: tuple[float, float] = (0.0, float("inf"))  # lowest and highest time step
    input_scale: float = 1.0  # factor of the input
    scales: tuple[float, ...] = (1.0,) * 5  # factors of the projection's five parts, bias included
    output_scale: float = 1.0  # factor of the output

    @property
    def inner_size(self) -> int:
        """Columns of x; the gates have as many."""
        return self.num_heads * self.head_dim

    @property
    def conv_sizes(self) -> tuple[int, int, int]:
        """Columns of x, B and C, which the convolution covers."""
        return self.inner_size, self.num_groups * self.state_size, self.num_groups * self.state_size

    @property
    def conv_size(self) -> int:
        """Columns of the convolution."""
        return sum(self.conv_sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: keys and values of all heads are products of one latent per token (DeepSeek-V2).

    The cache has the latent and a rotated key that all heads share: one KV head of `rank` + `rope_dim` elements.
    """

    rank: int  # elements of a latent
    query_rank: int  # elements of a latent of the queries; 0: queries are products of the layer's input
    nope_dim: int  # elements of a query head that are not rotated; the rotated elements follow
    rope_dim: int  # elements of a query head, and of the shared key, that are rotated
    value_dim: int  # elements of a value
    norm_eps: float  # epsilon of the norms of latents
    neighboring_pairs: bool  # a rotated pair is two neighboring rows of the projections

    @property
    def query_dim(self) -> int:
        """Elements of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Elements of a token in the cache."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The names of a checkpoint's tensors, without `.weight` and `.bias`; a layer's names follow `layer`.

    The defaults fit most families on Hugging Face. `qkv` and `gate_up` have one name where the checkpoint has these
    matrices in one tensor, one above the other. Names of experts without {} are of tensors with the matrices of all
    experts: [experts, rows, columns].
    """

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."  # {}: the number of the layer
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"  # full name, with any suffix
    conv_in: str = "conv.in_proj"
    conv: str = "conv.conv"
    conv_shape: tuple[int, ...] = (1,)  # dimensions of its weight between the columns and the taps
    conv_out: str = "conv.out_proj"
    delta_qkv: tuple[str, ...] = ("linear_attn.in_proj_qkv",)  # one name, or those of queries, keys and values
    delta_gate: str = "linear_attn.in_proj_z"
    delta_rates: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")  # rates, decays
    delta_by_key_head: bool = False  # delta_qkv and delta_rates are one tensor each, with the rows of each key head
    delta_conv: tuple[str, ...] = ("linear_attn.conv1d",)  # one name, or those of queries, keys and values
    delta_conv_shape: tuple[int, ...] = (1,)  # dimensions of its weight between the columns and the taps
    delta_a: str = "linear_attn.A_log"  # full name
    delta_a_is_log: bool = True  # the tensor has log(-a)
    delta_bias: str = "linear_attn.dt_bias"  # full name
    delta_norm: str = "linear_attn.norm"
    delta_out: str = "linear_attn.out_proj"
    latent_q: str = "self_attn.q_proj"
    latent_q_a: str = "self_attn.q_a_proj"
    latent_q_norm: str = "self_attn.q_a_layernorm"
    latent_q_b: str = "self_attn.q_b_proj"
    latent_kv_a: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_kv_b: str = "self_attn.kv_b_proj"  # rows of each head: those of its keys, then those of its values
    latent_k_b: str = "self_attn.k_b_proj"  # the same rows as [heads, rank, nope_dim]
    latent_v_b: str = "self_attn.v_b_proj"  # [heads, value_dim, rank]
    mamba_in: str = "mamba.in_proj"
    mamba_conv: str = "mamba.conv1d"
    mamba_a: str = "mamba.A_log"  # full name, as the next two
    mamba_time_bias: str = "mamba.dt_bias"
    mamba_skip: str = "mamba.D"
    mamba_norm: str = "mamba.norm"
    mamba_out: str = "mamba.out_proj"
    of_llama_cpp: bool = False  # A is no logarithm, A and D have a second dimension, and the norm has one of groups
    attention_post_norm: str = "post_attention_layernorm"
    layer_scale: str = "layer_scalar"  # full name
    layer_table: str = "model.embed_tokens_per_layer"
    layer_projection: str = "model.per_layer_model_projection"
    layer_norm: str = "model.per_layer_projection_norm"
    layer_gate: str = "per_layer_input_gate"
    layer_out: str = "per_layer_projection"
    layer_post_norm: str = "post_per_layer_input_norm"
    beside_norm: str = "pre_feedforward_layernorm_2"  # norm of the input of experts beside an MLP
    beside_post_norm: str = "post_feedforward_layernorm_2"  # norm of their output
    beside_mlp_post_norm: str = "post_feedforward_layernorm_1"  # norm of the MLP's output
    router_scale: str = "router.scale"  # full name
    expert_scales: str = "router.per_expert_scale"  # full name
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = "post_feedforward_layernorm"
    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"  # full name, with any suffix
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")  # {}: its number
    expert_down: str = "mlp.experts.{}.down_proj"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    shared_gate_shape: tuple[int, ...] = (1,)  # dimensions of its weight before the columns
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    fusion: str = "mtp.fc"  # columns for an embedding, then columns for a hidden state
    fusion_embedding_norm: str = "mtp.pre_fc_norm_embedding"
    fusion_hidden_norm: str = "mtp.pre_fc_norm_hidden"


SHARED_EXPERTS = TensorNames(  # names where several shared experts are stored as one
    shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder with grouped-query attention and a gated MLP. Few families change a field with a default.

    With `latent` attention, `num_kv_heads` and `head_dim` are the shape of the cache.
    """

    family: str  # model_type: "llama", …
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    attention_scale: float  # factor of queries, usually head_dim ** -0.5
    ropes: tuple[Rope | None, ...]  # one per layer; None: heads are not rotated
    windows: tuple[int, ...]  # one per layer: the number of tokens in its window; 0: all
    tie_embeddings: bool  # the embedding is also the lm_head
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    qk_norm: bool = False  # RMS norm of each query and key head before rotation
    qk_norm_kind: HeadNorm = "rms"  # "layer": a LayerNorm, each head has its own weights; "rotated": after rotation
    qk_norm_rows: bool = False  # qk_norm covers all query heads together, and all key heads, instead of each head
    gated_heads: bool = False  # a gate follows each query head in its projection; its sigmoid multiplies the output
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    # activation of the gate of MLPs and experts; those in UNGATED are activations of up, without a gate
    activation: Activation = "silu"
    query_scales: QueryScales | None = None  # factor of queries by their position
    sinks: bool = False  # each query head has a score in its softmax that belongs to no token
    norm_kind: NormKind = "rms"  # kind of all norms; "layer" only without post_norms and experts
    norm_bias: bool = False  # bias of the norms of the residual stream; of LayerNorm only
    parallel: bool = False  # attention and MLP read the same rows, after one norm; only with norm_kind "layer"
    pre_norms: bool = True  # norms of the input of attention and MLP
    post_norms: bool = False  # norms of their output, before it is added to the residual stream
    norm_offset: float = 0.0  # offset added to the weights of all norms
    embedding_scale: float = 1.0
    round_embedding_scale: bool = False  # round to bf16 unless weights are f32: the scale has the weights' dtype
    residual_scale: float = 1.0  # factor of the output of attention and MLP; only without post_norms
    attention_in_scale: float = 1.0  # factor of the input of attention
    attention_out_scale: float = 1.0  # a further factor of its output
    gate_scale: float = 1.0  # factor of the MLP's gate, before its activation
    mlp_out_scale: float = 1.0  # a further factor of the MLP's output
    logits_scale: float = 1.0
    attention_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: none
    logits_softcap: float = 0.0  # the same for logits
    experts: Experts | None = None
    latent: Latent | None = None
    convolutions: Convolutions | None = None
    delta: GatedDelta | None = None
    mamba: Mamba | None = None
    # one per layer: whether it is an MLP or experts alone, and the others are a mixer alone; (): all layers are both
    mlp_layers: tuple[bool, ...] = ()
    kv_heads: tuple[KVHeads, ...] = ()  # one per layer: number and size of its KV heads; (): all layers have the same
    kv_sources: tuple[int, ...] = ()  # one per layer: the layer whose keys and values it reads; (): its own
    intermediate_sizes: tuple[int, ...] = ()  # one per layer: the size of its MLP; (): intermediate_size
    v_norm: bool = False  # RMS norm of value heads, without weights
    values_are_keys: tuple[bool, ...] = ()  # one per layer: values are the keys before norm and rotation; (): none
    layer_scales: bool = False  # a factor of the residual stream after each layer
    layer_inputs: int = 0  # size of each layer's own embedding of a token, which a gate adds after the MLP; 0: none
    deepstack: int = 0  # leading layers after which rows of images are added
    names: TensorNames = TensorNames()
    # the model of a head that predicts further tokens (MTP): the rows of the head are made of the model's normed rows
    # and of embeddings of the next tokens, and both have the same embedding and LM head; None: no head
    head_of: DecoderSpec | None = None
    # tensor -> type, for tensors in blocks of integers; the type does not affect shapes
    quantized: Mapping[str, str] = field(default_factory=dict, compare=False)
    # tensor -> the input of each column, for tensors that are in blocks only in this order
    input_orders: Mapping[str, npt.NDArray[np.int32]] = field(default_factory=dict, compare=False)

    def mlp_size(self, layer: int) -> int:
        """Return the size of a layer's MLP."""
        return self.intermediate_sizes[layer] if self.intermediate_sizes else self.intermediate_size

    def kv_matrices(self, layer: int) -> int:
        """Return how many of keys and values a layer projects: none if another layer's are read."""
        if not self.stores_kv(layer):
            return 0
        return 1 if self.values_are_keys and self.values_are_keys[layer] else 2

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that store keys and values, ascending."""
        return tuple(
            layer for layer, is_attention in enumerate(self.attention_layers) if is_attention and self.stores_kv(layer)
        )

    def stores_kv(self, layer: int) -> bool:
        """Return whether a layer with attention stores keys and values, and does not read another layer's."""
        return not self.kv_sources or self.kv_sources[layer] == layer

    def kv_heads_of(self, layer: int) -> KVHeads:
        """Return the number and the size of a layer's KV heads; query heads have the same size."""
        return self.kv_heads[layer] if self.kv_heads else (self.num_kv_heads, self.head_dim)

    @property
    def attention_kinds(self) -> tuple[tuple[int, KVHeads], ...]:
        """The window and the KV heads of each layer with attention, in order."""
        return tuple(
            (self.windows[layer], self.kv_heads_of(layer)) for layer, each in enumerate(self.attention_layers) if each
        )

    @property
    def attention_layers(self) -> tuple[bool, ...]:
        """Whether each layer has attention."""
        others = [each.layers for each in (self.convolutions, self.delta) if each is not None]
        if self.mamba is not None and not self.mamba.beside_attention:
            others.append(self.mamba.layers)
        if self.mlp_layers:
            others.append(self.mlp_layers)
        return tuple(not any(layers[layer] for layers in others) for layer in range(self.num_layers))

    def norms_input(self, layer: int) -> bool:
        """Return whether a layer norms the input of attention and MLP."""
        return self.pre_norms or self._has_delta_with_norms(layer)

    def norms_output(self, layer: int) -> bool:
        """Return whether a layer norms the output of attention and MLP."""
        return self.post_norms and not self._has_delta_with_norms(layer)

    def _has_delta_with_norms(self, layer: int) -> bool:
        return self.delta is not None and self.delta.pre_norms and self.delta.layers[layer]

    @property
    def has_matrices(self) -> bool:
        """Whether layers keep matrices of a sequence, in addition to the last inputs of convolutions."""
        return self.delta is not None or self.mamba is not None

    def pair_ops(self, head_dim: int) -> int:
        """Return the operations of attention for a query and a visible key, in all heads of a layer with such keys."""
        value_dim = head_dim if self.latent is None else self.latent.rank
        return 2 * self.num_heads * (head_dim + value_dim)

    @property
    def q_size(self) -> int:
        """Columns of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads; value heads have as many."""
        return self.num_kv_heads * self.head_dim
