"""A writer of GGUF files for tests, the reverse of `runtime/model/weights/gguf.py`, and a converter of model folders.

`header` makes any header, valid or not: counts, lengths and offsets are arguments, so that a test can lie about them.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from quire.runtime.model import read_spec
from quire.runtime.model.families.lfm2 import LFM2_GGUF_NAMES
from quire.runtime.model.families.nemotron_h import NEMOTRON_GGUF_NAMES
from quire.runtime.model.families.qwen3_next import HYBRID_GGUF_NAMES, NEXT_GGUF_NAMES
from quire.runtime.model.gguf_config import GGUF_NAMES, KEYS, LAYER_NORM_KEYS
from quire.runtime.model.spec import (
    DecoderSpec,
    GatedDelta,
    Latent,
    Llama3Scaling,
    LongRopeScaling,
    Mamba,
    TensorNames,
)
from quire.runtime.model.weights import Checkpoint
from quire.runtime.model.weights.ggml import TYPES
from quire.runtime.model.weights.safetensors import SafetensorsCheckpoint
from quire.runtime.model.weights.split_latents import SplitLatents
from quire.runtime.model.weights.tensors import expected_tensors

NUMBERS = {kind.name: number for number, kind in TYPES.items()}
KINDS = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "u64": 10, "f64": 12}
FORMATS = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "u64": "Q", "f64": "d"}


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: its shape as in torch, its type, and its bytes."""

    shape: Sequence[int]
    kind: str
    data: bytes


def write(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int = 3, alignment: int = 32
) -> Path:
    """Write a valid file. A metadata value is a str, bool, int (u32), float (f32), a list, or (type, value)."""
    infos = []
    data = b""
    for name, tensor in tensors.items():
        infos.append(info(name, tensor.shape, NUMBERS[tensor.kind], len(data)))
        data += tensor.data + b"\0" * (-len(tensor.data) % alignment)
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    head = header([pair(key, value) for key, value in metadata.items()], infos, version=version)
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path


def header(
    pairs: Sequence[bytes],
    infos: Sequence[bytes],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    counts = len(infos) if num_tensors is None else num_tensors, len(pairs) if num_keys is None else num_keys
    return magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(infos)


def pair(key: str | bytes, value: Any) -> bytes:
    kind, value = value if isinstance(value, tuple) else (_kind(value), value)
    if kind == "raw":
        return text(key) + bytes(value)
    if isinstance(value, list):
        body = b"".join(_encode(kind, element) for element in value)
        return text(key) + struct.pack("<IIQ", 9, KINDS[kind], len(value)) + body
    return text(key) + struct.pack("<I", KINDS[kind]) + _encode(kind, value)


def info(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return _kind(value[0]) if value else "u32"
    return {bool: "bool", int: "u32", float: "f32", str: "str"}[type(value)]


def _encode(kind: str, value: Any) -> bytes:
    if kind == "str":
        return text(value)
    return bytes([int(value)]) if kind == "bool" else struct.pack(f"<{FORMATS[kind]}", value)


def encode(values: npt.NDArray[np.float32], kind: str) -> Tensor:
    """Round a tensor to a type. Vectors stay f32, as llama.cpp's converter leaves them."""
    if values.ndim == 1 or kind == "F32":
        return Tensor(values.shape, "F32", values.astype("<f4").tobytes())
    if kind == "F16":
        return Tensor(values.shape, kind, values.astype("<f2").tobytes())
    if kind == "BF16":
        return Tensor(values.shape, kind, (values.view(np.uint32) >> 16).astype("<u2").tobytes())  # exact or truncated
    return Tensor(values.shape, kind, {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_K": q4_k, "Q6_K": q6_k}[kind](values).tobytes())


def q8_0(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Quantize as GGML's reference does; the result is uint8 [rows, row bytes]."""
    blocks = values.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, where=scale > 0, out=np.zeros_like(scale))
    rounded = np.trunc(blocks * inverse + np.copysign(np.float32(0.5), blocks)).astype(np.int8)
    return np.concatenate([scale.astype("<f2").view(np.uint8), rounded.view(np.uint8)], axis=1).reshape(len(values), -1)


def q4_0(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Quantize as GGML's reference does; the result is uint8 [rows, row bytes]."""
    blocks = values.reshape(-1, 32)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = extreme / np.float32(-8)
    inverse = np.divide(np.float32(1), scale, where=scale != 0, out=np.zeros_like(scale))
    rounded = np.minimum(15, blocks * inverse + np.float32(8.5)).astype(np.uint8)
    packed = rounded[:, :16] | rounded[:, 16:] << 4
    return np.concatenate([scale.astype("<f2").view(np.uint8), packed], axis=1).reshape(len(values), -1)


def q4_k(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Quantize between the minimum and the maximum of each 32 weights, without GGML's search for the best scale."""
    parts = values.reshape(-1, 8, 32)  # blocks of super-blocks
    low = np.minimum(parts.min(axis=2), 0)
    scale, scales = _shared_scale((parts.max(axis=2) - low) / np.float32(15), 63)
    offset, offsets = _shared_scale(-low, 63)
    steps = (scale * scales)[:, :, None]
    shifted = np.divide(parts + (offset * offsets)[:, :, None], steps, where=steps > 0, out=np.zeros_like(parts))
    numbers = np.clip(np.rint(shifted), 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    low_bits = scales[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4
    high_bits = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, offsets)]
    packed = (numbers[:, :, 0] | numbers[:, :, 1] << 4).reshape(-1, 128)
    halves = [each.astype("<f2").view(np.uint8) for each in (scale, offset)]
    return np.concatenate([*halves, *high_bits, low_bits, packed], axis=1).reshape(len(values), -1)


def q6_k(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Quantize with the largest of each 16 weights, without GGML's search for the best scale."""
    parts = values.reshape(-1, 16, 16)  # blocks of super-blocks
    scale, scales = _shared_scale(np.abs(parts).max(axis=2) / np.float32(31), 127)
    steps = (scale * scales)[:, :, None]
    scaled = np.divide(parts, steps, where=steps > 0, out=np.zeros_like(parts))
    numbers = (np.clip(np.rint(scaled), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = numbers[:, :, :2] & 15 | (numbers[:, :, 2:] & 15) << 4
    high = sum((numbers[:, :, quarter] >> 4 << 2 * quarter for quarter in range(1, 4)), start=numbers[:, :, 0] >> 4)
    packed = [low.reshape(-1, 128), high.reshape(-1, 64), scales, scale.astype("<f2").view(np.uint8)]
    return np.concatenate(packed, axis=1).reshape(len(values), -1)


def _shared_scale(scales: npt.NDArray[np.float32], most: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Return the scale of each super-block, rounded to fp16, [blocks, 1], and the scales of its parts in its steps."""
    shared = (scales.max(axis=1, keepdims=True) / np.float32(most)).astype("<f2").astype(np.float32)
    steps = np.divide(scales, shared, where=shared > 0, out=np.zeros_like(scales))
    return shared, np.clip(np.rint(steps), 0, most).astype(np.uint8)


def convert(
    folder: Path,
    path: Path,
    kind: str = "F32",
    metadata: Mapping[str, Any] = {},
    more: Mapping[str, Tensor] = {},
) -> Path:
    """Write a model folder as a GGUF file, as llama.cpp's converter does; `metadata` adds and replaces keys.

    `more` has tensors that the folder does not have.
    """
    tensors = {**stored_tensors(folder, kind), **rope_factors(folder), **more}
    return write(path, {**describe(folder), **metadata}, tensors)


LAYERS = ["linear_attention", "full_attention"]
FULL: dict[str, Any] = {"sliding_window": None, "use_sliding_window": False}
CHANGED: dict[str, dict[str, Any]] = {  # values of the goldens in place of some that GGUF files of a family cannot have
    "qwen2": FULL,
    "mistral": FULL,
    "mixtral": FULL,
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "lfm2": {"conv_bias": False},
    "granite_hybrid": {"mamba_proj_bias": False, "time_step_limit": None},
    "lfm2_moe": {},
    "granite_hybrid_moe": {},
    "nemotron_h": {"use_bias": False},
    "nemotron_h_moe": {"mlp_bias": False, "n_group": 1},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": LAYERS, "mlp_only_layers": [], "norm_topk_prob": True},
    "falcon_h1": {
        **dict.fromkeys(("mamba_rms_norm", "mamba_norm_before_gate", "mamba_proj_bias", "projectors_bias"), False),
        **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "mlp_multipliers")),
        **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier")),
        **dict.fromkeys(("ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier")),
    },
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "ernie4_5": {"use_bias": False},
    "cohere2": {"attention_bias": False},
    "starcoder2": {"sliding_window": None},
    "hunyuan_v1_dense": {"attention_bias": False},
    "ernie4_5_moe": {"use_bias": False},
    "glm4_moe": {"n_group": 1},
    "ministral3": {"sliding_window": None},
    "seed_oss": {"attention_out_bias": False, "mlp_bias": False},
    "qwen3_moe": {"num_hidden_layers": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
}
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "lfm2_moe": "lfm2moe",
    "gpt_oss": "gpt-oss",
    "granite_hybrid": "granitehybrid",
    "granite_hybrid_moe": "granitehybrid",
    "granite_moe": "granitemoe",
    "falcon_h1": "falcon-h1",
    "olmo3": "olmo2",
    "glm": "chatglm",
    "ministral3": "mistral3",
    "cohere": "command-r",
    "phi": "phi2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    **dict.fromkeys(("gemma4_dense", "gemma4_moe"), "gemma4"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
}  # families with another name
NAMES = {  # families with names of their own
    "lfm2": LFM2_GGUF_NAMES,
    "lfm2_moe": LFM2_GGUF_NAMES,
    "nemotron_h": NEMOTRON_GGUF_NAMES,
    "nemotron_h_moe": NEMOTRON_GGUF_NAMES,
    "phi3": replace(GGUF_NAMES, qkv=("attn_qkv",), gate_up=("ffn_up",)),
    "qwen3_5": HYBRID_GGUF_NAMES,
    "qwen3_5_moe": HYBRID_GGUF_NAMES,
    "qwen3_next": NEXT_GGUF_NAMES,
    "glm": replace(GGUF_NAMES, gate_up=("ffn_up",)),
    "glm4": replace(GGUF_NAMES, gate_up=("ffn_up",)),
    "arcee": replace(GGUF_NAMES, gate_up=("ffn_up",)),
    "phi": replace(GGUF_NAMES, gate_up=("ffn_up",)),
    "starcoder2": replace(GGUF_NAMES, gate_up=("ffn_up",)),
    "seed_oss": replace(GGUF_NAMES, mlp_norm="post_attention_norm"),
    "glm4_moe": replace(GGUF_NAMES, mlp_norm="post_attention_norm"),
    "gemma4_moe": replace(GGUF_NAMES, expert_gate_up=("ffn_gate_up_exps",)),
}
IN_F32 = r"_inp|shortconv\.conv|ssm_conv1d|ssm_dt|ssm_a$|ssm_d$|norm"  # tensors that are never quantized
PERMUTED = (
    "arcee",
    "llama",
    "mistral",
    "mixtral",
    "granite",
    "granite_hybrid",
    "granite_moe",
    "minicpm",
    "nemotron_h",
    "nemotron_h_moe",
    "smollm3",
    "ministral3",
)
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
SMALL_EXPERTS = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "lfm2_moe", "nemotron_h_moe", "glm4_moe", *LATENT)
SLIDING = ("phi3", "gemma2", "gemma3", "gpt_oss", "olmo3", "exaone4", "cohere2", "gemma4")
OF_FAMILIES = {  # keys of config.json that the converter writes for some families: their metadata key, the families
    "attention_multiplier": ("attention.scale", "granite", "granite_hybrid", "granite_moe"),
    "embedding_multiplier": ("embedding_scale", "granite", "granite_hybrid", "granite_moe"),
    "residual_multiplier": ("residual_scale", "granite", "granite_hybrid", "granite_moe"),
    "logits_scaling": ("logit_scale", "granite", "granite_hybrid", "granite_moe"),
    "logit_scale": ("logit_scale", "cohere", "cohere2"),
    "sliding_window": ("attention.sliding_window", *SLIDING),
    "attn_logit_softcapping": ("attn_logit_softcapping", "gemma2"),
    "final_logit_softcapping": ("final_logit_softcapping", "gemma2", "gemma4"),
    "num_kv_shared_layers": ("attention.shared_kv_layers", "gemma4"),
    "hidden_size_per_layer_input": ("embedding_length_per_layer_input", "gemma4"),
    "top_k_experts": ("expert_used_count", "gemma4"),
    "num_experts_per_tok": (
        "expert_used_count",
        "granite_hybrid",
        "granite_moe",
        "olmoe",
        "mixtral",
        *SMALL_EXPERTS,
        "gpt_oss",
    ),
    "moe_intermediate_size": ("expert_feed_forward_length", *SMALL_EXPERTS, "ernie4_5_moe", "gemma4"),
    "moe_k": ("expert_used_count", "ernie4_5_moe"),
    "moe_layer_interval": ("interleave_moe_layer_step", "ernie4_5_moe"),
    "moe_layer_start_index": ("leading_dense_block_count", "ernie4_5_moe"),
    "first_k_dense_replace": ("leading_dense_block_count", "glm4_moe"),
    "n_shared_experts": ("expert_shared_count", "glm4_moe"),
    "shared_intermediate_size": ("expert_shared_feed_forward_length", "granite_hybrid", "granite_moe"),
    "scale_emb": ("embedding_scale", "minicpm"),
    "norm_topk_prob": ("expert_weights_norm", "nemotron_h_moe", "glm4_moe", *LATENT),
    "n_group": ("expert_group_count", *LATENT),
    "topk_group": ("expert_group_used_count", *LATENT),
    "num_dense_layers": ("leading_dense_block_count", "lfm2_moe"),
    "routed_scaling_factor": ("expert_weights_scale", "lfm2_moe", "nemotron_h_moe", "glm4_moe", *LATENT),
}


def describe(folder: Path) -> dict[str, Any]:
    """Return the metadata of a folder's config.json, without a tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    spec = read_spec(folder)
    family = ARCHITECTURES.get(spec.family, spec.family)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = scaling.get("full_attention", scaling)
    values: dict[str, Any] = {"general.architecture": family}
    written = scaling if scaling.get("rope_type") in ("linear", "yarn") else {}
    keys = KEYS if spec.norm_kind == "rms" else LAYER_NORM_KEYS | {"norm_epsilon": LAYER_NORM_KEYS["layer_norm_eps"]}
    for key, name in keys.items():
        value = written.get(key.removeprefix("rope_scaling.")) if "." in key else config.get(key, scaling.get(key))
        if value is not None:
            values[f"{family}.{name}"] = float(value) if name in FLOATS else value
    for key, (name, *families) in OF_FAMILIES.items():
        if spec.family in families and config.get(key) is not None:
            values[f"{family}.{name}"] = config[key]
    rope = next((rope for rope in spec.ropes if rope is not None), None)
    values[f"{family}.attention.key_length"] = values[f"{family}.attention.value_length"] = spec.head_dim
    values[f"{family}.rope.dimension_count"] = (rope and rope.dim) or spec.head_dim
    if spec.family == "minicpm":
        values["minicpm.residual_scale"] = spec.residual_scale
        values["minicpm.logit_scale"] = 1 / spec.logits_scale
    if rope and spec.family == "hunyuan_v1_dense":
        values[f"{family}.rope.freq_base"] = rope.theta
    if not all(spec.attention_layers):
        values[f"{family}.attention.head_count_kv"] = [
            spec.num_kv_heads if has_attention else 0 for has_attention in spec.attention_layers
        ]
    if spec.mamba:
        values |= _describe_mamba(family, spec.mamba)
        values[f"{family}.rope.scaling.finetuned"] = rope is not None
    if spec.mlp_layers:
        values |= _describe_mlp_layers(family, spec)
    if spec.delta:
        values[f"{family}.attention.head_count_kv"] = spec.num_kv_heads
        values |= _describe_delta(family, spec.delta)
    if spec.convolutions:
        values[f"{family}.attention.layer_norm_rms_epsilon"] = spec.norm_eps
        values[f"{family}.feed_forward_length"] = spec.intermediate_size
        values[f"{family}.shortconv.l_cache"] = spec.convolutions.taps
        values[f"{family}.vocab_size"] = spec.vocab_size
    if spec.latent:
        values |= _describe_latent(family, spec.latent, config, scaling)
    if spec.experts:
        values[f"{family}.expert_count"] = spec.experts.num_experts
        if spec.experts.shared_gate or spec.family == "ernie4_5_moe":
            values[f"{family}.expert_shared_feed_forward_length"] = spec.experts.shared_size
        if spec.experts.rule.sigmoid:
            values[f"{family}.expert_gating_func"] = 2
    if spec.family == "gemma4":
        values |= _describe_gemma4(spec, config["rope_parameters"])
    if rope and isinstance(rope.scaling, LongRopeScaling):
        values[f"{family}.rope.scaling.original_context_length"] = rope.scaling.original_max_position_embeddings
        values[f"{family}.rope.scaling.attn_factor"] = rope.scaling.attention_factor
    if spec.eos_token_ids:
        values["tokenizer.ggml.eos_token_id"] = spec.eos_token_ids[0]
    return values


def _describe_latent(
    family: str, latent: Latent, config: Mapping[str, Any], scaling: Mapping[str, Any]
) -> dict[str, Any]:
    values = {
        f"{family}.attention.head_count_kv": 1,
        f"{family}.attention.key_length": latent.key_dim,
        f"{family}.attention.value_length": latent.rank,
        f"{family}.attention.key_length_mla": latent.query_dim,
        f"{family}.attention.value_length_mla": latent.value_dim,
        f"{family}.attention.kv_lora_rank": latent.rank,
        f"{family}.leading_dense_block_count": config.get("first_k_dense_replace", 1),
        f"{family}.expert_shared_count": config["n_shared_experts"],
    }
    if latent.query_rank:
        values[f"{family}.attention.q_lora_rank"] = latent.query_rank
    if scaling.get("mscale_all_dim"):
        values[f"{family}.rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    return values


def _describe_gemma4(spec: DecoderSpec, ropes: Mapping[str, Any]) -> dict[str, Any]:
    _, full_size = spec.kv_heads[spec.windows.index(0)]
    values: dict[str, Any] = {
        "attention.sliding_window_pattern": [window > 0 for window in spec.windows],
        "attention.head_count_kv": [count for count, _ in spec.kv_heads],
        "feed_forward_length": [*spec.intermediate_sizes],
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), full_size),
        **dict.fromkeys(
            ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), spec.head_dim
        ),
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }
    return {f"gemma4.{key}": value for key, value in values.items()}


def _describe_mamba(family: str, mamba: Mamba) -> dict[str, Any]:
    return {
        f"{family}.ssm.conv_kernel": mamba.taps,
        f"{family}.ssm.inner_size": mamba.inner_size,
        f"{family}.ssm.state_size": mamba.state_size,
        f"{family}.ssm.time_step_rank": mamba.num_heads,
        f"{family}.ssm.group_count": mamba.num_groups,
    }


def _describe_mlp_layers(family: str, spec: DecoderSpec) -> dict[str, Any]:
    size = spec.intermediate_size if spec.experts is None else spec.experts.intermediate_size
    values = {
        f"{family}.attention.layer_norm_rms_epsilon": spec.norm_eps,
        f"{family}.block_count": spec.num_layers,
        f"{family}.rope.dimension_count": spec.hidden_size // spec.num_heads,
        f"{family}.feed_forward_length": [size if is_mlp else 0 for is_mlp in spec.mlp_layers],
    }
    if spec.experts:
        values[f"{family}.expert_shared_feed_forward_length"] = spec.experts.shared_size
    return values


def _describe_delta(family: str, delta: GatedDelta) -> dict[str, Any]:
    return {
        f"{family}.ssm.conv_kernel": delta.taps,
        f"{family}.ssm.inner_size": delta.value_size,
        f"{family}.ssm.state_size": delta.key_dim,
        f"{family}.ssm.time_step_rank": delta.num_value_heads,
        f"{family}.ssm.group_count": delta.num_key_heads,
        f"{family}.full_attention_interval": delta.layers.index(False) + 1,
        f"{family}.rope.dimension_sections": [1, 1, 1, 0],
    }


FLOATS = (
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)


def stored_tensors(folder: Path, kind: str) -> dict[str, Tensor]:
    """Return a folder's tensors under the names and in the order of rows of llama.cpp's converter."""
    spec = read_spec(folder)
    checkpoint: Checkpoint = SafetensorsCheckpoint(folder)
    checkpoint = checkpoint if spec.latent is None else SplitLatents(checkpoint, spec)
    arrays: dict[str, list[npt.NDArray[np.float32]]] = {}  # experts have several of one name, in order
    for name, _ in expected_tensors(spec):
        values = widened(checkpoint.tensor(name))
        if spec.family in PERMUTED and re.search(r"\.[qk]_proj\.", name):
            halves = values.reshape(-1, 2, spec.head_dim // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if name.endswith(("conv.conv.weight", "conv1d.weight")):
            values = values[:, 0]
        if name.endswith("A_log"):
            values = -np.exp(values)
        if name.endswith(("mamba.A_log", "mixer.A_log", "mamba.D", "mixer.D")):
            values = values[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")) and spec.mamba:
            values = values.reshape(spec.mamba.num_groups, -1)
        if spec.norm_offset and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + 1
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        if spec.family.startswith("qwen3_5") and spec.delta and "linear_attn." in name:
            values = tiled_value_heads(name, values, spec.delta)
        stored = stored_name(name, spec)
        if name.endswith("in_proj_qkvz.weight") and spec.delta:
            values, gate = sorted_by_kind(values, spec.delta)
            arrays[stored.replace("attn_qkv", "attn_gate")] = [gate]
        if spec.family == "falcon_h1" and stored.endswith("ffn_norm.weight"):
            stored = stored.removesuffix(".weight")
        if "input_linear" in name:  # gate, and up
            gate, values = np.split(values, 2, axis=-2)
            arrays[stored.replace("ffn_up", "ffn_gate")] = [gate]
        arrays.setdefault(stored, []).append(values)
    return {
        name: encode(each[0] if len(each) == 1 else np.stack(each), "F32" if re.search(IN_F32, name) else kind)
        for name, each in arrays.items()
    }


def tiled_value_heads(name: str, values: npt.NDArray[np.float32], delta: GatedDelta) -> npt.NDArray[np.float32]:
    """Sort value heads by their number within a key head, in the rows of a tensor, or the columns of the output."""
    if name.endswith("linear_attn.norm.weight"):
        return values
    if name.endswith("out_proj.weight"):
        return np.ascontiguousarray(_tiled(values.T, delta).T)
    if "in_proj_qkv." in name or "conv1d" in name:
        keys = 2 * delta.key_size
        return np.concatenate([values[:keys], _tiled(values[keys:], delta)])
    return _tiled(values, delta)


def _tiled(rows: npt.NDArray[np.float32], delta: GatedDelta) -> npt.NDArray[np.float32]:
    per_key = delta.num_value_heads // delta.num_key_heads
    heads = rows.reshape(delta.num_key_heads, per_key, -1, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(rows.shape)


def sorted_by_kind(
    values: npt.NDArray[np.float32], delta: GatedDelta
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the rows of queries, keys and values, and the rows of gates, of a tensor with the rows by key head."""
    each = delta.value_size // delta.num_key_heads
    heads = values.reshape(delta.num_key_heads, -1, values.shape[1])
    kinds = np.split(heads, np.cumsum([delta.key_dim, delta.key_dim, each]).tolist(), axis=1)
    *qkv, gate = (kind.reshape(-1, values.shape[1]) for kind in kinds)
    return np.concatenate(qkv), gate


def rope_factors(folder: Path) -> dict[str, Tensor]:
    """Return the factors of LongRoPE, and the divisors of Llama 3.1's frequencies as the converter computes them."""
    rope = next((rope for rope in read_spec(folder).ropes if rope is not None), None)
    head_dim = read_spec(folder).head_dim
    scaling = rope and rope.scaling
    spans = {(rope.dim // 2, rope.span // 2) for rope in read_spec(folder).ropes if rope and rope.dim and rope.span}
    for pairs, span in spans:  # Gemma 4: pairs that are not rotated
        turned = np.repeat(np.array([1, 1e30], np.float32), [pairs, span - pairs])
        return {"rope_freqs.weight": encode(turned, "F32")}
    if isinstance(scaling, LongRopeScaling):
        factors = {"short": scaling.short_factors, "long": scaling.long_factors}
        return {f"rope_factors_{name}.weight": encode(np.array(f, np.float32), "F32") for name, f in factors.items()}
    if rope is None or not isinstance(scaling, Llama3Scaling):
        return {}
    divisors = []
    for pair in range(head_dim // 2):
        turns = scaling.original_max_position_embeddings * rope.theta ** (-2 * pair / head_dim) / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(max(kept, 0), 1)
        divisors.append(1 / ((1 - kept) / scaling.factor + kept))
    return {"rope_freqs.weight": encode(np.array(divisors, np.float32), "F32")}


def stored_name(name: str, spec: DecoderSpec) -> str:
    """Return the name in GGUF files of a tensor on Hugging Face; experts, and norms of heads, have one in a layer."""
    named = re.fullmatch(r"(?:(?:model|backbone)\.layers\.(\d+)\.)?(.+?)(\.weight|\.bias)?", name)
    assert named is not None
    prefix = "" if named[1] is None else GGUF_NAMES.layer.format(named[1])
    without_number = re.sub(r"(experts|norms)\.\d+", r"\1.{}", named[2])
    return f"{prefix}{_stored_names(spec)[without_number]}{named[3] or ''}"


def _stored_names(spec: DecoderSpec) -> dict[str, str]:
    """Return the name in GGUF files for each name on Hugging Face."""
    fused = {  # the names of tensors that the converter divides
        "gate_up": ("ffn_up",),
        "expert_gate_up": ("ffn_up_exps",),
        "shared_gate_up": ("ffn_up_shexp",),
    }
    family = f"{spec.family}_moe" if spec.experts is not None and spec.experts.beside_mlp else spec.family
    stored: dict[str, str] = {}
    for field in fields(TensorNames):
        if field.name == "mlp_norm" and not spec.pre_norms:
            continue  # OLMo 2's norm with this name follows attention
        names = getattr(spec.names, field.name)
        others = getattr(NAMES.get(family, GGUF_NAMES), field.name)
        if isinstance(names, str):
            names = (names,)
            others = (others,)
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            continue  # no names, but how the tensors are stored
        stored |= dict(zip(names, others if len(names) == len(others) else fused[field.name], strict=True))
    return stored


def widened(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return bf16 bits, f16 or f32 as f32."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
