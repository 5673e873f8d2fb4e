"""Folders that have the experts of a layer in two tensors, as transformers 5 has them in memory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import MissingTensor, WrongTensor
from quire.runtime.model import pack_model
from quire.runtime.model.weights.layer_weights import ExpertWeights
from quire.runtime.model.weights.safetensors import SafetensorsCheckpoint
from safetensors.numpy import save_file

from tests.support.gguf_files import widened

GOLDENS = Path(__file__).parents[3] / "goldens"
EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate_proj|w1|up_proj|w3|down_proj|w2)\.weight")
PLACES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
Tensors = dict[str, np.ndarray[Any, Any]]


def fuse(tensors: Tensors) -> Tensors:
    """Return the tensors with gate and up of all experts of a layer in one, and down in another."""
    fused: Tensors = {}
    apart: dict[str, dict[tuple[int, int], Any]] = {}
    for name, values in tensors.items():
        found = EXPERT.fullmatch(name)
        if found is None:
            fused[name.replace("block_sparse_moe", "mlp")] = values
        else:
            module = found[1].replace("block_sparse_moe", "mlp")
            apart.setdefault(module, {})[PLACES[found[3]], int(found[2])] = values
    for module, each in apart.items():
        gate, up, down = (np.stack([each[place, expert] for expert in range(len(each) // 3)]) for place in range(3))
        fused |= {f"{module}gate_up_proj": np.concatenate([gate, up], axis=1), f"{module}down_proj": down}
    return fused


@pytest.fixture
def fused_folder(tmp_path: Path) -> Callable[..., Path]:
    """Copy a golden folder with fused experts, and change its tensors."""

    def make(name: str, change: Callable[[Tensors], object] = lambda tensors: None) -> Path:
        folder = tmp_path / "fused"
        shutil.copytree(GOLDENS / name, folder)
        checkpoint = SafetensorsCheckpoint(folder)
        tensors = fuse({tensor: widened(checkpoint.tensor(tensor)) for tensor in checkpoint.names()})
        change(tensors)
        save_file(
            {tensor: np.ascontiguousarray(values) for tensor, values in tensors.items()}, folder / "model.safetensors"
        )
        return folder

    return make


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_fused_experts_are_packed_as_separate_ones_are(fused_folder: Callable[..., Path], name: str) -> None:
    fused, apart = (pack_model(folder, "q8").weights.layers for folder in (fused_folder(name), GOLDENS / name))
    for one, other in zip(fused, apart, strict=True):
        if not isinstance(one.mlp, ExpertWeights):
            assert not isinstance(other.mlp, ExpertWeights)
            continue
        assert isinstance(other.mlp, ExpertWeights)
        pairs = zip((one.mlp.router, *one.mlp.gate_up, *one.mlp.down),
                    (other.mlp.router, *other.mlp.gate_up, *other.mlp.down), strict=True)  # fmt: skip
        assert all(np.array_equal(a.unpack(), b.unpack()) for a, b in pairs)


PREFIX = "model.layers.1.mlp."


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop(f"{PREFIX}experts.down_proj"), MissingTensor, "experts.down_proj"),
        (lambda t: t.pop(f"{PREFIX}gate.weight"), MissingTensor, "mlp.gate.weight is not in"),
        (
            lambda t: t.update({f"{PREFIX}experts.gate_up_proj": t[f"{PREFIX}experts.gate_up_proj"][:4]}),
            WrongTensor,
            r"is \[4, 128, 64\]; config.json implies \[5, 128, 64\]",
        ),
        (
            lambda t: t.update({f"{PREFIX}experts.down_proj": t[f"{PREFIX}experts.down_proj"][:, :, :63]}),
            WrongTensor,
            r"is \[5, 64, 63\]; config.json implies \[5, 64, 64\]",
        ),
    ],
)
def test_fused_experts_of_another_shape_are_refused(
    fused_folder: Callable[..., Path], change: Callable[[Tensors], object], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        pack_model(fused_folder("mixtral", change), "auto")
