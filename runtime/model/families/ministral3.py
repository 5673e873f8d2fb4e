"""Ministral 3, and the text part of Mistral Small 3.x: Mistral with queries scaled by position.

The scale is 1 within the context of pre-training, `original_max_position_embeddings`, and grows in each further one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_json import MAX_POSITIONS, ConfigTable
from ..config_rope import shared_rope_table
from ..gguf_config import KEYS, GGUFFormat
from ..spec import DecoderSpec, QueryScales
from .family import Family
from .mistral import read_mistral

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
MAX_PERIODS = 4096  # contexts of pre-training within the longest context
WHOLE_MODEL = ("eos_token_id", "tie_word_embeddings")  # keys outside text_config that also apply to the text part
GGUF_KEYS = {
    "rope_scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    "rope_scaling.llama_4_scaling_beta": "attention.temperature_scale",
}


def read_mistral3(config: ConfigTable) -> DecoderSpec:
    """Read a `Ministral3ForCausalLM`, or the Ministral 3 or Mistral in a `Mistral3ForConditionalGeneration`."""
    if "text_config" not in config:
        return _read_ministral3(config)
    text = config.table("text_config")
    readers = {"mistral": read_mistral, "ministral3": _read_ministral3}
    kind = text.text("model_type", "mistral")
    if kind not in readers:
        raise text.refused("model_type", " or ".join(readers))
    shared = {key: config.values[key] for key in WHOLE_MODEL if key in config}
    return readers[kind](ConfigTable({**text.values, **shared}, text.where, text.source, text.names))


def _read_ministral3(config: ConfigTable) -> DecoderSpec:
    """Read a `Ministral3ForCausalLM`."""
    config = config.with_defaults(DEFAULTS)
    if "rope_parameters" not in config and not config.values.get("rope_scaling"):
        config = ConfigTable({**config.values, "rope_parameters": YARN}, config.where, config.source, config.names)
    spec = replace(read_mistral(config), family="ministral3")
    scaling = shared_rope_table(config)
    if scaling.values.get("llama_4_scaling_beta") in (None, 0):
        return spec
    beta = scaling.positive("llama_4_scaling_beta")
    least = -(-spec.max_position_embeddings // MAX_PERIODS)
    period = scaling.integer("original_max_position_embeddings", least, MAX_POSITIONS)
    return replace(spec, query_scales=QueryScales(beta, period))


def _derive(config: ConfigTable) -> Mapping[str, Any]:
    """Return the keys that files lack: no window, and the numerator of YaRN's factor."""
    scaling = config.table("rope_scaling").values
    if not scaling:
        return {"sliding_window": None, "rope_parameters": {"rope_type": "default"}}
    return {"sliding_window": None, "rope_scaling": {**scaling, "mscale": 1.0}}


MINISTRAL3 = Family(
    ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    ("ministral3", "mistral3"),
    read_mistral3,
    GGUFFormat("mistral3", KEYS | GGUF_KEYS, neighboring_pairs=True, derive=_derive),
)
