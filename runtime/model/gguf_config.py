"""Hyper-parameters in the metadata of GGUF files, read into a `DecoderSpec` by the readers of config.json.

A family's `GGUFFormat` says which metadata key is which key of config.json, and how its tensors are named. Must not
import families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..common.errors import CorruptCheckpoint, UnsupportedModel
from .config_json import MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH, ConfigTable
from .spec import DecoderSpec, FrequencyDivisors, Rope, TensorNames
from .weights.gguf import GGUFFile, Metadata
from .weights.gguf_checkpoint import GGUFCheckpoint
from .weights.tensors import check_tensors, expected_tensors

# Keys of config.json, and the metadata keys with the same values, after "<architecture>.".
KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rope_scaling.rope_type": "rope.scaling.type",
    "rope_scaling.factor": "rope.scaling.factor",
    "rope_scaling.original_max_position_embeddings": "rope.scaling.original_context_length",
    "rope_scaling.attention_factor": "rope.scaling.yarn_attn_factor",
    "rope_scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope_scaling.beta_slow": "rope.scaling.yarn_beta_slow",
}

NAMES = TensorNames(
    embedding="token_embd",
    layer="blk.{}.",
    input_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    o="attn_output",
    mlp_norm="ffn_norm",
    gate_up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    final_norm="output_norm",
    lm_head="output",
)
ROPE_FREQS = "rope_freqs.weight"  # f32 [head_dim / 2]: divisors of the frequencies
QUANTISATION = 2  # the version of GGML's block formats
EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

NO_TOKEN = (-1, 0xFFFFFFFF)  # ids that converters write for a token that the model has not

# Keys that change what is computed, and their values without effect, for families without a use for the key.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}


@dataclass(frozen=True, slots=True)
class GGUFFormat:
    """The form of a family's GGUF files: metadata keys, and names of tensors."""

    architecture: str  # general.architecture
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    names: TensorNames = NAMES
    neighbouring_pairs: bool = False  # rows of q and k: a rotated pair is two neighbours, not half a head apart

    def open(self, file: GGUFFile, read: Callable[[ConfigTable], DecoderSpec]) -> tuple[DecoderSpec, GGUFCheckpoint]:
        """Return the spec and the tensors; `read` is the reader of config.json. Raises ModelError."""
        self._check_neutral(file.metadata)
        spec = replace(_with_divisors(read(self._config(file)), file), names=self.names)
        checkpoint = GGUFCheckpoint(file, self._pairs(spec))
        check_tensors(spec, checkpoint)
        if unused := file.tensors.keys() - {name for name, _ in expected_tensors(spec)} - {ROPE_FREQS}:
            raise UnsupportedModel(f"{file.path} has tensor {min(unused)}, which {self.architecture} does not use")
        if quantised := checkpoint.quantised():
            file.metadata.integer("general.quantization_version", QUANTISATION, QUANTISATION, QUANTISATION)
        return replace(spec, quantised=quantised), checkpoint

    def _check_neutral(self, metadata: Metadata) -> None:
        for suffix, allowed in NEUTRAL.items():
            key = f"{self.architecture}.{suffix}"
            if suffix not in self.keys.values() and key in metadata and metadata[key] not in allowed:
                raise metadata.refused(key, f"absent{''.join(f' or {value}' for value in allowed)}")

    def _config(self, file: GGUFFile) -> ConfigTable:
        """Return the metadata as an object like that in config.json."""
        metadata = file.metadata
        names = {key: f"{self.architecture}.{suffix}" for key, suffix in self.keys.items()}
        found = {key: _same_in_all_layers(metadata[name]) for key, name in names.items() if name in metadata}
        scaling = {key.partition(".")[2]: value for key, value in found.items() if key.startswith("rope_scaling.")}
        values: dict[str, Any] = {"head_dim": None, "rms_norm_eps": None, **found}
        first = self.names.layer.format(0)
        values["attention_bias"] = f"{first}{self.names.qkv[0]}.bias" in file.tensors
        values["mlp_bias"] = f"{first}{self.names.gate_up[0]}.bias" in file.tensors
        values["rope_scaling"] = _rope_scaling(metadata, self.architecture, scaling)
        values["tie_word_embeddings"] = f"{self.names.lm_head}.weight" not in file.tensors
        values["eos_token_id"] = [metadata[key] for key in EOS_KEYS if metadata.get(key, -1) not in NO_TOKEN]
        embedding = f"{self.names.embedding}.weight"
        values["vocab_size"] = file.tensors[embedding].shape[0] if embedding in file.tensors else None
        names |= {"vocab_size": f"the number of rows of {embedding}", "eos_token_id": "tokenizer.ggml.eos_token_id"}
        config = ConfigTable(values, source=str(file.path), names=names)
        self._check_heads(config, metadata)
        return config

    def _check_heads(self, config: ConfigTable, metadata: Metadata) -> None:
        """Refuse what the keys of config.json cannot express: heads that differ, or that are rotated in part."""
        if "rms_norm_eps" not in config:
            raise config.refused("rms_norm_eps", "a number from 1e-12 to 1e12")
        heads = config.integer("num_attention_heads", 1, MAX_HEADS)
        head_dim = config.integer("head_dim", 2, MAX_HEAD_DIM, config.integer("hidden_size", 1, MAX_WIDTH) // heads)
        for suffix in ("attention.value_length", "rope.dimension_count"):
            key = f"{self.architecture}.{suffix}"
            if metadata.get(key, head_dim) != head_dim:
                raise metadata.refused(key, f"{head_dim}, the size of a head")

    def _pairs(self, spec: DecoderSpec) -> dict[str, int]:
        """Return the size of a head for each tensor with rows in neighbouring pairs."""
        if not self.neighbouring_pairs:
            return {}
        layers = map(self.names.layer.format, range(spec.num_layers))
        tensors = [f"{layer}{name}" for layer in layers for name in self.names.qkv[:2]]
        return {f"{tensor}.{kind}": spec.head_dim for tensor in tensors for kind in ("weight", "bias")}


def _same_in_all_layers(value: Any) -> Any:
    """Return the element of a list of equal values: some keys have one value, or one for each layer."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def _rope_scaling(metadata: Metadata, architecture: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """Return the object under rope_scaling. A factor without a type is linear, and 0 or 1 is no factor."""
    factor = scaling.get("factor", metadata.get(f"{architecture}.rope.scale_linear", 1))
    kind = scaling.get("rope_type", "linear")
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return {}
    return {**scaling, "rope_type": kind, "factor": factor}


def _with_divisors(spec: DecoderSpec, file: GGUFFile) -> DecoderSpec:
    """Return `spec` with the divisors of frequencies that a file may have: the scaling of Llama 3.1, evaluated."""
    stored = file.tensors.get(ROPE_FREQS)
    if stored is None:
        return spec
    rope = spec.ropes[0]
    if rope is None or rope.scaling is not None or stored.type.name != "F32" or stored.shape != (spec.head_dim // 2,):
        raise UnsupportedModel(
            f"{file.path}: {ROPE_FREQS} is {stored.type.name} {list(stored.shape)} beside a RoPE scaling of "
            f"{rope and rope.scaling}; it must be F32 [{spec.head_dim // 2}], and no other scaling present"
        )
    divisors = np.frombuffer(stored.file.bytes[stored.begin : stored.end], "<f4")
    if not ((divisors >= 1e-6) & (divisors <= 1e6)).all():
        raise CorruptCheckpoint(f"{file.path}: {ROPE_FREQS} has a value that is not between 1e-6 and 1e6")
    scaled = Rope(rope.theta, FrequencyDivisors(tuple(map(float, divisors))))
    return replace(spec, ropes=(scaled,) * spec.num_layers)
