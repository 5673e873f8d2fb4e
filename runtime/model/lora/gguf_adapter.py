"""Adapters in GGUF files, as llama.cpp's `convert_lora_to_gguf.py` writes them, for models in GGUF files."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...common.errors import CorruptCheckpoint, UnsupportedModel, WrongTensor
from ..weights import READABLE, as_f32
from ..weights.gguf import GGUFFile, Metadata
from ..weights.gguf_checkpoint import GGUFCheckpoint
from .matrices import MAX_RANK, AdapterFiles, LowRank, check_finite

SUFFIX = ".gguf"
ALPHA = "adapter.lora.alpha"
INVOCATION = "adapter.alora.invocation_tokens"
PAIR = (".lora_a", ".lora_b")


def read_gguf_adapter(path: Path) -> AdapterFiles:
    """Read an adapter. Raises as `open_adapter`."""
    if path.exists() and not path.is_file():
        raise CorruptCheckpoint(f"{path} is not a file")  # opening a pipe would wait for its writer
    file = GGUFFile(path)
    metadata = file.metadata
    for key, value in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.text(key) != value:
            raise metadata.refused(key, repr(value))
    if metadata.get(INVOCATION):
        raise metadata.refused(INVOCATION, "absent: activated adapters are not read")
    if len(file.paths) > 1:
        raise UnsupportedModel(f"{path} is split; an adapter must be one file")
    alpha = _alpha(metadata)
    stored = GGUFCheckpoint(file)
    names = dict.fromkeys(_target(path, name) for name in file.tensors)
    if not names:
        raise CorruptCheckpoint(f"{path} has no tensors")
    matrices = {}
    for name in names:
        a, b = (_matrix(stored, name + kind) for kind in PAIR)
        if len(a) != b.shape[1] or not 1 <= len(a) <= MAX_RANK:
            raise WrongTensor(
                f"{path}: lora_a and lora_b of {name} are {list(a.shape)} and {list(b.shape)}; both must have one rank "
                f"of 1 to {MAX_RANK}"
            )
        matrices[name] = LowRank(a, b, alpha / len(a) if alpha else 1.0)
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").digest()
    return AdapterFiles(path, matrices, digest)


def _alpha(metadata: Metadata) -> float:
    """Return the factor of A B times the rank; 0: the factor is 1."""
    alpha = metadata.get(ALPHA, 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha < math.inf:
        raise metadata.refused(ALPHA, "a number of at least 0")
    return float(alpha)


def _target(path: Path, name: str) -> str:
    """Return the tensor that a matrix changes."""
    for kind in PAIR:
        if name.endswith(kind):
            return name.removesuffix(kind)
    raise UnsupportedModel(f"{path}: tensor {name:.200} is neither lora_a nor lora_b of a linear layer")


def _matrix(stored: GGUFCheckpoint, name: str) -> npt.NDArray[np.float32]:
    shape, dtype = stored.shape(name), stored.dtype(name)
    if dtype not in READABLE or len(shape) != 2:
        raise WrongTensor(
            f"tensor {name} in {stored.path} is {dtype} {list(shape)}; it must be a matrix of {', '.join(READABLE)}"
        )
    return check_finite(as_f32(stored.tensor(name)), name, stored.path)
