"""The description of a decoder that every family's config.json is read into.

Every `DecoderSpec` can be run: `config_json.py` refuses all other values.
"""

from __future__ import annotations

from dataclasses import dataclass


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
class Rope:
    """Rotary embedding over the whole head: the base, and the scaling for positions beyond those of training."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A pre-norm decoder with grouped-query attention and a SwiGLU MLP: Llama, Qwen2, Qwen3, Mistral."""

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
    qk_norm: bool  # RMS norm of each query and key head before rotation
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_embeddings: bool  # the embedding is also the lm_head
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

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
