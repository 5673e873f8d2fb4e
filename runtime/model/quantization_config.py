"""Reading of quantization_config in config.json, or of a file of its own: which quantized folders are supported.

Lists of excluded modules are not read: the tensors of a folder show which of its matrices are quantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from os.path import isfile
from pathlib import Path

from ..common.errors import UnsupportedModel
from .config_json import MAX_WIDTH, ConfigTable, read_object
from .weights.quantization import Quantization

QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # the latter in early folders of compressed-tensors
# Files of folders whose config.json says nothing, and the method of a file that names none.
OWN_FILES = {
    "quantize_config.json": "gptq",  # AutoGPTQ
    "quant_config.json": "awq",  # AutoAWQ
    "quantization_config.json": "auto-round",  # AutoRound
    "hf_quant_config.json": "modelopt",  # Model Optimizer
    "quanto_qmap.json": "quanto",  # Optimum Quanto
}
COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)


def read_quantization(config: ConfigTable, folder: str | Path) -> Quantization | None:
    """Read the quantization of a folder with this config.json; None without one.

    Raises UnsupportedModel naming the key, and the file if it is not config.json. Raises CorruptCheckpoint for a file
    that is not a JSON object.
    """
    key = next((key for key in QUANTIZATION_KEYS if key in config), None)
    if key is not None:
        return _read(config.table(key), "compressed-tensors" if key == "compression_config" else None)
    if "quantization" in config:  # MLX's key
        raise config.refused("quantization", "absent: weights of MLX are not supported")
    name = next((name for name in OWN_FILES if isfile(Path(folder) / name)), None)
    if name is None:
        return None
    table = ConfigTable(read_object(Path(folder) / name), source=name)
    return _read(table.table("quantization") if name == "hf_quant_config.json" else table, OWN_FILES[name])


def _read(table: ConfigTable, default_method: str | None) -> Quantization:
    method = table.text("quant_method", default_method)
    if method not in METHODS:
        allowed = f"one of {', '.join(METHODS)}"
        if "quant_method" not in table and default_method is not None:
            raise UnsupportedModel(f"{table.source}: weights of {default_method} are not supported, only {allowed}")
        raise table.refused("quant_method", allowed)
    return METHODS[method](table)


def _gptq(table: ConfigTable) -> Quantization:
    version = _one_of(table, "checkpoint_format" if "checkpoint_format" in table else "format", "gptq", "gptq_v2")
    _refuse_other(table, "is_marlin_format", False)
    return Quantization(
        layout="gptq",
        bits=_bits(table, "bits", 4, 8),
        group_size=_group_size(table, "group_size"),
        zero_offset=1 if version == "gptq" else 0,
    )


def _awq(table: ConfigTable) -> Quantization:
    _one_of(table, "version" if "version" in table else "format", "gemm")
    _bits(table, "w_bit" if "w_bit" in table else "bits", 4)
    return Quantization(layout="awq")


def _auto_round(table: ConfigTable) -> Quantization:
    packing = _one_of(table, "packing_format", "auto_round:auto_gptq", "auto_round:auto_awq")
    _refuse_other(table, "data_type", "int")
    return Quantization(layout="awq") if packing.endswith("awq") else _gptq(table)


def _compressed(table: ConfigTable) -> Quantization:
    _one_of(table, "format", *COMPRESSED_FORMATS)
    _refuse_other(table.table("sparsity_config"), "format", "dense")
    if table.table("transform_config").table("config_groups").values:
        raise table.refused("transform_config", "absent")
    groups = table.table("config_groups")
    blocks = {_compressed_group(groups.table(name)) for name in groups.values} - {None}
    if len(blocks) > 1:
        raise table.refused("config_groups", "of one block_structure")
    return Quantization(layout="compressed-tensors", block=blocks.pop() if blocks else None)


def _compressed_group(group: ConfigTable) -> tuple[int, int] | None:
    """Check the weights of a group of modules; return the size of the blocks that share a scale, if blocks do."""
    if "format" in group:
        _one_of(group, "format", *COMPRESSED_FORMATS)
    if "weights" not in group:
        return None
    weights = group.table("weights")
    kind = _one_of(weights, "type", "int", "float")
    _bits(weights, "num_bits", *((4, 8) if kind == "int" else (8,)))
    return _block(weights, "block_structure") if weights.values.get("strategy") == "block" else None


def _fp8(table: ConfigTable) -> Quantization:
    return Quantization(layout="compressed-tensors", block=_block(table, "weight_block_size"))


def _modelopt(table: ConfigTable) -> Quantization:
    _one_of(table, "quant_algo", "fp8")
    return Quantization(layout="compressed-tensors")


METHODS: dict[str, Callable[[ConfigTable], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
}


def _one_of(table: ConfigTable, key: str, *allowed: str) -> str:
    """Return the text of `key` in lower case; the first allowed one if it is absent or null."""
    text = table.text(key, allowed[0]).lower()
    if text not in allowed:
        raise table.refused(key, f"one of {', '.join(allowed)}" if len(allowed) > 1 else allowed[0])
    return text


def _refuse_other(table: ConfigTable, key: str, neutral: object) -> None:
    if key in table and table.values[key] != neutral:
        raise table.refused(key, f"absent or {neutral}")


def _bits(table: ConfigTable, key: str, *allowed: int) -> int:
    bits = table.integer(key, 1, 64)
    if bits not in allowed:
        raise table.refused(key, " or ".join(map(str, allowed)))
    return bits


def _group_size(table: ConfigTable, key: str) -> int:
    """Return the inputs of a group; 0 if the value is -1, for all."""
    size = table.integer(key, -1, MAX_WIDTH, 128)
    if size == 0:
        raise table.refused(key, "-1 or a positive integer")
    return max(size, 0)


def _block(table: ConfigTable, key: str) -> tuple[int, int] | None:
    """Return rows and columns of a block, from a list or a text such as "128x128"; None if the key is absent."""
    if key not in table:
        return None
    if isinstance(text := table.values[key], str):
        sizes = re.fullmatch(r"([0-9]{1,7})x([0-9]{1,7})", text)
        if sizes is None:
            raise table.refused(key, 'a list of 2 integers, or a text such as "128x128"')
        rows, columns = int(sizes[1]), int(sizes[2])
    else:
        rows, columns = (int(size) for size in table.numbers(key, 2))
    if not 1 <= rows <= MAX_WIDTH or not 1 <= columns <= MAX_WIDTH:
        raise table.refused(key, f"two integers from 1 to {MAX_WIDTH}")
    return rows, columns
