"""Golden models with the heads of `goldens/heads/`, which predict further tokens (MTP)."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

from tests.support.families import GOLDENS

HEADS = GOLDENS / "heads"
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


def with_head(family: str, folder: Path) -> Path:
    """Write a folder with a golden model and its head, and return it."""
    shutil.copytree(GOLDENS / family, folder)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    shutil.copy(HEADS / family / "head.safetensors", folder / "model-2.safetensors")
    files = ("model-1.safetensors", "model-2.safetensors")
    weight_map = {name: file for file in files for name in tensor_names(folder / file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def tensor_names(file: Path) -> list[str]:
    """Return the names of the tensors in a file."""
    with file.open("rb") as data:
        (length,) = struct.unpack("<Q", data.read(8))
        return [name for name in json.loads(data.read(length)) if name != "__metadata__"]
