"""The files of an adapter: a folder as PEFT writes it, with `adapter_config.json` and `adapter_model.safetensors`, or a
GGUF file.

An adapter that is more than low-rank matrices of linear layers is refused, with the key that says so.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...common.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel, WrongTensor
from ..weights import READABLE, as_f32
from ..weights.safetensors import SafetensorsCheckpoint, text_name
from .gguf_adapter import SUFFIX, read_gguf_adapter
from .matrices import MAX_RANK, AdapterFiles, LowRank, check_finite

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20

# Keys of adapter_config.json that an adapter may have only with these values.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "megatron_config": (None,),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
}
# Initializations that change the weights of the model, too: the adapter's matrices alone are not the difference.
_CHANGE_WEIGHTS = ("pissa", "olora", "corda", "loftq")
_PATTERN = re.compile(r"\^?[\w.]+")
_MODULE = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.(?P<kind>lora_[AB])(?:\.[^.]+)?\.weight")


def open_adapter(path: str | Path) -> AdapterFiles:
    """Read an adapter. Raises ModelNotFound, UnsupportedModel, CorruptCheckpoint or WrongTensor with the key."""
    try:
        return read_gguf_adapter(Path(path)) if Path(path).suffix == SUFFIX else _read_folder(Path(path))
    except OSError as error:  # a folder without permission to enter it, a name that is too long
        raise CorruptCheckpoint(f"{path!s:.200} cannot be read: {error.strerror or error}") from error


def _read_folder(folder: Path) -> AdapterFiles:
    config = _read_config(folder)
    if not (folder / ADAPTER_TENSORS).is_file():
        raise ModelNotFound(f"{folder} has no {ADAPTER_TENSORS}; other formats of adapters, such as .bin, are not read")
    stored = SafetensorsCheckpoint(folder, ADAPTER_TENSORS)
    pairs: dict[str, dict[str, npt.NDArray[np.float32]]] = {}
    for name in stored.names():
        found = _MODULE.fullmatch(name)
        if found is None:
            raise UnsupportedModel(
                f"{stored.path}: tensor {name:.200} is not lora_A or lora_B of a linear layer; adapters of embeddings, "
                "biases, magnitudes (DoRA) and whole modules are not read"
            )
        pairs.setdefault(found["module"], {})[found["kind"]] = _matrix(stored, name)
    if not pairs:
        raise CorruptCheckpoint(f"{stored.path} has no tensors")
    matrices = {
        text_name(f"{module}.weight"): _low_rank(config, stored.path, module, pair) for module, pair in pairs.items()
    }
    return AdapterFiles(folder, matrices, _digest(folder))


def adapter_key(name: str, digest: bytes) -> str:
    """Return the text that requests carry for an adapter: two adapters with one name have different keys."""
    return f"{name}@{digest.hex()[:32]}"


def _low_rank(config: _AdapterConfig, path: Path, module: str, pair: Mapping[str, npt.NDArray[np.float32]]) -> LowRank:
    if len(pair) != 2:
        raise CorruptCheckpoint(f"{path} has only {next(iter(pair))} of {module}; a module has lora_A and lora_B")
    a, b = pair["lora_A"], pair["lora_B"]
    rank = config.rank_of(module)
    if len(a) != rank or b.shape[1] != rank:
        raise WrongTensor(
            f"{path}: lora_A and lora_B of {module} are {list(a.shape)} and {list(b.shape)}, which is not the rank "
            f"{rank} in {ADAPTER_CONFIG}"
        )
    return LowRank(a, b, config.scale_of(module))


def _matrix(stored: SafetensorsCheckpoint, name: str) -> npt.NDArray[np.float32]:
    if stored.dtype(name) not in READABLE or len(stored.shape(name)) != 2:
        raise WrongTensor(
            f"tensor {name} in {stored.path} is {stored.dtype(name)} {list(stored.shape(name))}; it must be a matrix "
            f"of {', '.join(READABLE)}"
        )
    return check_finite(as_f32(stored.tensor(name)), name, stored.path)


@dataclass(frozen=True, slots=True)
class _AdapterConfig:
    """The keys of adapter_config.json that decide ranks and scales."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]  # pattern of a module's name -> its rank
    alphas: Mapping[str, float]
    by_root: bool  # rank-stabilized: the scale is alpha / sqrt(rank)

    def rank_of(self, module: str) -> int:
        return int(_of_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of B A."""
        rank = self.rank_of(module)
        return float(_of_pattern(self.alphas, module, self.alpha)) / (math.sqrt(rank) if self.by_root else rank)


def _of_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that is a module's name, or its last parts if no ^ comes first."""
    for pattern, value in patterns.items():
        name = pattern.removeprefix("^")
        if module == name or (name == pattern and module.endswith(f".{name}")):
            return value
    return default


def _read_config(folder: Path) -> _AdapterConfig:
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise ModelNotFound(f"{folder} is no folder with an {ADAPTER_CONFIG}, as PEFT writes adapters")
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CorruptCheckpoint(f"{path} is larger than {MAX_CONFIG_BYTES:,} bytes")
        values = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CorruptCheckpoint(f"{path} must be a JSON object")
    if values.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{path}: peft_type is {values.get('peft_type')!r:.80}; it must be 'LORA'")
    for key, allowed in _NEUTRAL.items():
        if key in values and values[key] not in allowed:
            raise UnsupportedModel(
                f"{path}: {key} is {values[key]!r:.200}; it must be {' or '.join(map(repr, allowed))}"
            )
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_WEIGHTS):
        raise UnsupportedModel(
            f"{path}: init_lora_weights is {start!r:.80}, which changes the weights of the model, too; save the "
            "adapter with path_initial_model_for_weight_conversion"
        )
    return _AdapterConfig(
        rank=_number(path, values, "r", 8, int),
        alpha=_number(path, values, "lora_alpha", 8, float),
        ranks=_patterns(path, values, "rank_pattern", int),
        alphas=_patterns(path, values, "alpha_pattern", float),
        by_root=values.get("use_rslora") is True,
    )


def _patterns(path: Path, values: Mapping[str, Any], key: str, kind: type[int] | type[float]) -> dict[str, Any]:
    patterns = values.get(key) or {}
    if not isinstance(patterns, dict):
        raise UnsupportedModel(f"{path}: {key} is {patterns!r:.80}; it must be an object")
    for pattern in patterns:
        if _PATTERN.fullmatch(pattern) is None:
            raise UnsupportedModel(f"{path}: {key} has the pattern {pattern!r:.80}; a pattern must be a module's name")
    return {name: _number(path, patterns, name, 0, kind) for name in patterns}


def _number(path: Path, values: Mapping[str, Any], key: str, default: int, kind: type[int] | type[float]) -> Any:
    """Return a rank, an int from 1 to MAX_RANK, or an alpha, a positive number."""
    value = values.get(key, default)
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    if kind is int and not (is_number and 1 <= value <= MAX_RANK):
        raise UnsupportedModel(f"{path}: {key} is {value!r:.80}; a rank must be 1 to {MAX_RANK}")
    if not (is_number and 0 < value < math.inf):
        raise UnsupportedModel(f"{path}: {key} is {value!r:.80}; an alpha must be a positive number")
    return value


def _digest(folder: Path) -> bytes:
    digest = hashlib.sha256((folder / ADAPTER_CONFIG).read_bytes())
    with (folder / ADAPTER_TENSORS).open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.digest()
