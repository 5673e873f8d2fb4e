"""Models with random weights in the form of a golden: of other sizes, or with the bundled model's vocabulary."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.runtime.model import BUNDLED_MODEL, read_spec
from quire.runtime.model.states import lay_out_states
from quire.runtime.model.weights.tensors import expected_tensors
from quire.runtime.tools.bench.checkpoint import write_safetensors

from tests.support.families import FAMILIES, GOLDENS

WITH_STATES = tuple(name for name in FAMILIES if lay_out_states(read_spec(GOLDENS / name)).nbytes)
BUNDLED = "bundled"
MODELS = (BUNDLED, *FAMILIES)  # names for `named_model`
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_random_model(golden: str, folder: Path, **changes: Any) -> Path:
    """Write a folder with a golden's config.json, some of its keys replaced, and random weights. Raises ModelError."""
    folder.mkdir()
    config = json.loads((GOLDENS / golden / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    write_random_tensors(folder, list(expected_tensors(read_spec(folder))))
    return folder


def write_random_tensors(folder: Path, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Write a folder's random weights, in the form that checkpoints have."""
    with (folder / "model.safetensors").open("wb") as file:
        write_safetensors(file, [_as_stored(*tensor) for tensor in tensors])


def write_speaking_model(golden: str, folder: Path) -> Path:
    """Write a model of a golden's form with the bundled model's vocabulary, chat template and context length."""
    bundled = json.loads((BUNDLED_MODEL / "config.json").read_text())
    shared = {key: bundled[key] for key in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")}
    write_random_model(golden, folder, **shared)
    for name in TEXT_FILES:
        shutil.copy(BUNDLED_MODEL / name, folder)
    return folder


def named_model(name: str, folder: Path) -> Path:
    """Return the bundled model, or write a model of a golden's form that has the bundled vocabulary into `folder`."""
    return BUNDLED_MODEL if name == BUNDLED else write_speaking_model(name, folder / name)


def _as_stored(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's name and shape in a folder: one tensor with all experts has no suffix and is transposed."""
    stacked = re.fullmatch(r"(.*\.experts\.(?:gate_up|down)_proj)\.(weight|bias)", name)
    if stacked is None:
        return name, shape
    return (f"{stacked[1]}_bias", shape) if stacked[2] == "bias" else (stacked[1], (shape[0], shape[2], shape[1]))
