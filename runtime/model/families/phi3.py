"""Phi-3, 3.5 and 4: q, k and v are one tensor, gate and up another; long contexts by LongRoPE; a part of each head may
be rotated, as in Phi-4-mini.
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigTable, build_spec, sliding_window
from ..config_rope import read_rope
from ..gguf_config import GGUF_NAMES, KEYS, GGUFFormat
from ..spec import DecoderSpec, TensorNames
from .family import Family

NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
GGUF_KEYS = {"sliding_window": "attention.sliding_window", "partial_rotary_factor": "rope.dimension_count"}


def read_phi3(config: ConfigTable) -> DecoderSpec:
    """Read a `Phi3ForCausalLM`."""
    config = config.with_defaults(
        {"eos_token_id": 32000, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
    )
    spec = build_spec(config, "phi3", read_rope(config, partial=True))
    window = sliding_window(config)
    visible = window if window < spec.max_position_embeddings else 0
    return replace(spec, windows=(visible,) * spec.num_layers, names=NAMES)


PHI3 = Family(
    ("Phi3ForCausalLM",),
    ("phi3",),
    read_phi3,
    GGUFFormat(
        "phi3",
        KEYS | GGUF_KEYS,
        replace(GGUF_NAMES, gate_up=("ffn_up",)),
        derive=lambda config: {"original_max_position_embeddings": None},  # the number in the scaling applies
    ),
)
