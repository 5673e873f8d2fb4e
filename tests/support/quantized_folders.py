"""Folders whose matrices are quantized, in the layouts of the libraries that write them, and the weights they mean.

Numbers are packed one by one, as the formats are documented; nothing of the reader is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN = 128
INTERMEDIATE = 192
VOCAB = 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
LAYER = "model.layers.0."
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 128]}
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of 8 that each 4 bits of a word belong to
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Quantized:
    """The tensors of one module by the names that follow the module's, and the weights that they mean."""

    tensors: dict[str, Any]  # arrays, and FP8
    weights: Array  # float32 [out, in]


Make = Callable[[np.random.Generator, int, int], Quantized]


def folder_of(
    path: Path,
    config: Mapping[str, Any],
    make: Make,
    plain: Collection[str] = (),
    modules: Mapping[str, tuple[int, int]] = MATRICES,
    **changes: Any,
) -> dict[str, Array]:
    """Write a folder of one layer, with all matrices quantized except the ones in `plain`. Return their weights."""
    rng = np.random.default_rng(7)
    shape_of = {**CONFIG, **changes}
    hidden = shape_of["hidden_size"]
    tensors: dict[str, Array] = {"model.embed_tokens.weight": _normal(rng, shape_of["vocab_size"], hidden)}
    for norm in ("model.norm", f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm"):
        tensors[f"{norm}.weight"] = np.ones(hidden, np.float16)
    weights = {}
    for module, shape in modules.items():
        made = make(rng, *shape) if module not in plain else None
        parts = made.tensors if made else {"weight": _normal(rng, *shape)}
        weights[module] = made.weights if made else parts["weight"].astype(np.float32)
        tensors |= {f"{LAYER}{module}.{part}": value for part, value in parts.items()}
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**shape_of, "quantization_config": config}))
    save_tensors(tensors, path / "model.safetensors")
    return weights


def common_folders(path: Path, modules: Mapping[str, tuple[int, int]] = MATRICES, **changes: Any) -> dict[str, Path]:
    """Write a folder of each common method under `path`; return them by the method's name."""
    made: dict[str, tuple[dict[str, Any], Make]] = {
        "gptq": (GPTQ, gptq()),
        "gptq act-order": (GPTQ | {"desc_act": True}, gptq(act_order=True)),
        "awq": (AWQ, awq()),
        "fp8": (FP8_BLOCKS, fp8((64, 128), name="weight_scale_inv")),
    }
    for name, (config, make) in made.items():
        folder_of(path / name, config, make, (), modules, **changes)
    return {name: path / name for name in made}


def gptq(
    bits: int = 4,
    group: int = 32,
    sym: bool = True,
    version: int = 1,
    act_order: bool = False,
    g_idx: bool = True,
    same_order: bool = True,
) -> Make:
    """Return a maker of GPTQ's layout. With `same_order`, act-order is the same for matrices with as many inputs."""

    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Quantized:
        size = inputs if group == -1 else group
        groups = np.arange(inputs) // size
        if act_order:
            groups = (np.random.default_rng(inputs) if same_order else rng).permutation(groups)
        numbers = rng.integers(0, 1 << bits, (inputs, outputs))
        zeros = rng.integers(0, 1 << bits, (groups.max() + 1, outputs))  # the quantizer's zeros
        if sym:
            zeros[:] = 1 << bits - 1
        scales = _scales(rng, *zeros.shape)
        tensors = {
            "qweight": pack(numbers.T, bits).T,
            "qzeros": pack((zeros - (1 if version == 1 else 0)) % (1 << bits), bits),
            "scales": scales,
        }
        if g_idx:
            tensors["g_idx"] = groups.astype(np.int32)
        return Quantized(tensors, ((numbers - zeros[groups]) * scales[groups].astype(np.float64)).T.astype(np.float32))

    return make


def awq(group: int = 64) -> Make:
    """Return a maker of AWQ's layout."""

    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Quantized:
        groups = np.arange(inputs) // (inputs if group == -1 else group)
        numbers = rng.integers(0, 16, (inputs, outputs))
        zeros = rng.integers(0, 16, (groups.max() + 1, outputs))
        scales = _scales(rng, *zeros.shape)
        tensors = {"qweight": _pack_awq(numbers), "qzeros": _pack_awq(zeros), "scales": scales}
        return Quantized(tensors, ((numbers - zeros[groups]) * scales[groups].astype(np.float64)).T.astype(np.float32))

    return make


def words(bits: int = 4, group: int = 32, sym: bool = True, order: str = "", scale_dtype: Any = np.float16) -> Make:
    """Return a maker of compressed-tensors' pack-quantized layout; `order` is "", "group" or "unused"."""

    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Quantized:
        middle = 1 << bits - 1
        groups = np.arange(inputs) // (inputs if group == -1 else group)
        shuffled = np.random.default_rng(inputs).permutation(groups)
        stored = {"": None, "group": shuffled, "unused": np.full(inputs, -1)}[order]
        numbers = rng.integers(-middle, middle, (outputs, inputs))
        zeros = rng.integers(-middle, middle, (outputs, groups.max() + 1))
        if sym:
            zeros[:] = 0
        scales = _scales(rng, *zeros.shape).astype(scale_dtype)
        tensors = {
            "weight_packed": pack(numbers + middle, bits),
            "weight_scale": scales,
            "weight_shape": np.array([outputs, inputs]),
        }
        if not sym:
            tensors["weight_zero_point"] = pack((zeros + middle).T, bits).T
        if stored is not None:
            tensors["weight_g_idx"] = stored.astype(np.int32)
        of = stored if order == "group" and stored is not None else groups
        weights = (numbers - zeros[:, of]) * scales[:, of].astype(np.float64)
        return Quantized(tensors, weights.astype(np.float32))

    return make


def int8(group: int = -1, zero_point: bool = False) -> Make:
    """Return a maker of compressed-tensors' int-quantized layout."""

    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Quantized:
        groups = np.arange(inputs) // (inputs if group == -1 else group)
        numbers = rng.integers(-128, 128, (outputs, inputs))
        zeros = rng.integers(-128, 128, (outputs, groups.max() + 1)) * zero_point
        scales = _scales(rng, *zeros.shape)
        tensors = {
            "weight": numbers.astype(np.int8),
            "weight_scale": scales,
            "weight_zero_point": zeros.astype(np.int8),
        }
        weights = (numbers - zeros[:, groups]) * scales[:, groups].astype(np.float64)
        return Quantized(tensors, weights.astype(np.float32))

    return make


def fp8(block: tuple[int, int] | None = None, per_row: bool = False, name: str = "weight_scale") -> Make:
    """Return a maker of FP8 with scales of blocks, of rows, or of the matrix."""

    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Quantized:
        codes = rng.integers(0, 256, (outputs, inputs), np.uint8)
        codes[codes & 127 == 127] = 0  # NaN
        height, width = block or ((1, inputs) if per_row else (outputs, inputs))
        scales = rng.uniform(0.001, 0.01, (-(-outputs // height), -(-inputs // width))).astype(np.float32)
        each = scales[np.arange(outputs) // height][:, np.arange(inputs) // width]
        stored = scales if block or per_row else scales.reshape(())
        values = np.array([_e4m3(code) for code in range(256)])[codes]
        return Quantized({"weight": FP8(codes), name: stored}, (values * each.astype(np.float64)).astype(np.float32))

    return make


def pack(numbers: Array, bits: int) -> Array:
    """Return numbers of `bits` bits, [rows, n], as int32 words along a row, least significant first, padded with 0."""
    each = 32 // bits
    out = np.zeros((len(numbers), -(-numbers.shape[1] // each)), np.uint32)
    for index in range(numbers.shape[1]):
        out[:, index // each] |= (numbers[:, index].astype(np.uint32)) << np.uint32(bits * (index % each))
    return out.view(np.int32)


def _pack_awq(numbers: Array) -> Array:
    out = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
    for column in range(out.shape[1]):
        for place, output in enumerate(AWQ_PLACES):
            out[:, column] |= numbers[:, 8 * column + output].astype(np.uint32) << np.uint32(4 * place)
    return out.view(np.int32)


def _e4m3(code: int) -> float:
    sign = -1 if code & 128 else 1
    exponent = code >> 3 & 15
    mantissa = code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return (rng.standard_normal(shape) * 0.05).astype(np.float16)


def _scales(rng: np.random.Generator, *shape: int) -> Array:
    return rng.uniform(0.001, 0.01, shape).astype(np.float16)


class FP8:
    """The bits of FP8 numbers, for which numpy has no type."""

    def __init__(self, codes: Array) -> None:
        self.codes = codes


def save_tensors(tensors: Mapping[str, Any], path: Path) -> None:
    """Write a safetensors file, with tensors in FP8 too."""
    save_file({name: np.ascontiguousarray(getattr(value, "codes", value)) for name, value in tensors.items()}, path)
    names = [name for name, value in tensors.items() if isinstance(value, FP8)]
    if not names:
        return
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name in names:
        header[name]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
