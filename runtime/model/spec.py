"""What a decoder is, as numbers: the one description every family's config.json is turned into.

It must not know files, tensors or arithmetic. The one invariant: a `DecoderSpec` that exists can be run; whoever builds
one (`config.py`) has refused everything else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by `factor` (kaiokendev, 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth passage between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023), with the factor on cos and sin already decided."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding over the whole head: base and how positions beyond training are reached (None: not)."""

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
    windows: tuple[int, ...]  # one per layer: attend to the last so many tokens; 0: to all
    qk_norm: bool  # RMS norm of each query and key head before rotation
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_embeddings: bool  # the embedding is the lm_head too
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Columns of the fused projection: all query heads, then key heads, then value heads."""
        return self.q_size + 2 * self.kv_size
