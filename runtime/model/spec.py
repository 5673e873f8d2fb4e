"""The description of a decoder that every family's config.json is read into, and of its tensors' names.

Every `DecoderSpec` can be run: `config_json.py` refuses all other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
class Rope:
    """Rotary embedding over the whole head: the base, and the scaling for positions beyond those of training."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | FrequencyDivisors | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The names of a checkpoint's tensors, without `.weight` and `.bias`; those of a layer follow `layer`.

    The defaults are those of most families on Hugging Face. `qkv` and `gate_up` have one name where the checkpoint has
    these matrices in one tensor, one above the other.
    """

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."  # {}: the number of the layer
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A pre-norm decoder with grouped-query attention and a SwiGLU MLP. Few families change a field with a default."""

    family: str  # model_type: "llama", …
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: Rope
    windows: tuple[int, ...]  # one per layer: the number of tokens it sees; 0: all
    tie_embeddings: bool  # the embedding is also the lm_head
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    qk_norm: bool = False  # RMS norm of each query and key head before rotation
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    names: TensorNames = TensorNames()
    # tensor -> type, of the tensors that the checkpoint has in blocks of integers; a change of it changes no shape
    quantised: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def q_size(self) -> int:
        """Columns of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads; value heads have as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Columns of the fused projection: all query heads, then key heads, then value heads."""
        return self.q_size + 2 * self.kv_size
