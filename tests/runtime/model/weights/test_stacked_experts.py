"""The experts of gpt-oss folders, which have them in one tensor per layer: in MXFP4, or transposed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import MissingTensor, WrongTensor
from quire.runtime.model import pack_model, plan_memory, read_spec
from quire.runtime.model.weights.layer_weights import ExpertWeights, MlpWeights
from quire.runtime.model.weights.safetensors import SafetensorsCheckpoint
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parents[3] / "goldens"
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
EXPERTS = "model.layers.1.mlp.experts"
Tensors = dict[str, np.ndarray[Any, Any]]


def stored(folder: Path) -> Tensors:
    """Return the tensors of a folder; bf16 as float32."""
    checkpoint = SafetensorsCheckpoint(folder)
    tensors = {}
    for name in checkpoint.names():
        array = checkpoint.tensor(name)
        tensors[name] = (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array.copy()
    return tensors


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Copy a golden folder, change its tensors, and change its config.json."""

    def edit(name: str, change: Callable[[Tensors], object], **keys: Any) -> Path:
        folder = tmp_path / "edited"
        shutil.copytree(GOLDENS / name, folder)
        tensors = stored(folder)
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        return folder

    return edit


def dequantize(tensors: Tensors) -> None:
    """Replace MXFP4 by the same weights, transposed."""
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks = tensors.pop(f"{name}_blocks")
        scales = tensors.pop(f"{name}_scales")
        weights = np.stack([NUMBERS[blocks & 15], NUMBERS[blocks >> 4]], axis=-1).reshape(*scales.shape, 32)
        scaled = np.ldexp(weights, scales.astype(np.int32)[..., None] - 127)
        tensors[name] = np.ascontiguousarray(scaled.reshape(*scales.shape[:2], -1).swapaxes(1, 2))


def expert_weights(mlp: MlpWeights | ExpertWeights) -> ExpertWeights:
    assert isinstance(mlp, ExpertWeights)
    return mlp


def test_mxfp4_and_transposed_tensors_of_the_same_weights_are_packed_alike(edited: Callable[..., Path]) -> None:
    folder = edited("gpt_oss_mxfp4", dequantize, quantization_config=None)
    plain = pack_model(folder, "f32")
    in_blocks = pack_model(GOLDENS / "gpt_oss_mxfp4", "f32")
    kept = pack_model(GOLDENS / "gpt_oss_mxfp4", "auto")
    for layers in zip(plain.weights.layers, in_blocks.weights.layers, kept.weights.layers, strict=True):
        one, two, three = (expert_weights(layer.mlp) for layer in layers)
        for a, b, c in zip(one.gate_up + one.down, two.gate_up + two.down, three.gate_up + three.down, strict=True):
            assert c.dtype == "mxfp4"
            assert np.array_equal(a.unpack(), b.unpack())
            assert np.array_equal(a.unpack(), c.unpack())


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_mxfp4"])
def test_each_row_is_a_column_of_the_file(name: str) -> None:
    tensors = stored(GOLDENS / name)
    if name == "gpt_oss_mxfp4":
        dequantize(tensors)
    mlp = expert_weights(pack_model(GOLDENS / name, "f32").weights.layers[1].mlp)
    assert mlp.gate_up_biases is not None
    assert mlp.down_biases is not None
    size = tensors[f"{EXPERTS}.down_proj"].shape[1]
    for expert in range(5):
        gate_up = tensors[f"{EXPERTS}.gate_up_proj"][expert]
        bias = tensors[f"{EXPERTS}.gate_up_proj_bias"][expert]
        rows = mlp.gate_up[expert].unpack().reshape(-1, 2, 16, 64)
        biases = mlp.gate_up_biases[expert].reshape(-1, 2, 16)
        for phase in (0, 1):
            assert np.array_equal(rows[:, phase].reshape(-1, 64)[:size], gate_up[:, phase::2].T)
            assert np.array_equal(biases[:, phase].reshape(-1)[:size], bias[phase::2])
        assert np.array_equal(mlp.down[expert].unpack(), tensors[f"{EXPERTS}.down_proj"][expert].T)
        assert np.array_equal(mlp.down_biases[expert], tensors[f"{EXPERTS}.down_proj_bias"][expert])


def test_the_plan_knows_the_types_from_the_config() -> None:
    path = GOLDENS / "gpt_oss_mxfp4"
    sizes = {"page_size": 32, "num_pages": 4, "max_positions": 64, "max_tokens": 8, "max_samples": 2, "workers": 1}
    planned = plan_memory(read_spec(path), weights="auto", kv_dtype="bf16", **sizes).weights  # type: ignore[arg-type]
    assert set(planned) == {"bf16", "f32", "mxfp4"}


def cut(name: str, *index: Any) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{EXPERTS}.{name}"] = np.ascontiguousarray(tensors[f"{EXPERTS}.{name}"][index])

    return change


@pytest.mark.parametrize(
    ("golden", "change", "error", "complaint"),
    [
        ("gpt_oss", cut("gate_up_proj", slice(4)), WrongTensor, r"is \[4, 80, 64\]; config.json implies \[5, 80, 64\]"),
        ("gpt_oss", cut("down_proj", 0), WrongTensor, r"is \[40, 64\]; it must have 3 dimensions"),
        ("gpt_oss", cut("gate_up_proj_bias", 0), WrongTensor, r"is \[80\]; config.json implies \[5, 80\]"),
        ("gpt_oss", lambda t: t.pop(f"{EXPERTS}.down_proj_bias"), MissingTensor, "experts.down_proj_bias is not in"),
        ("gpt_oss", lambda t: t.pop("model.layers.0.self_attn.sinks"), MissingTensor, "self_attn.sinks is not in"),
        ("gpt_oss", lambda t: t.pop(f"{EXPERTS}.down_proj"), MissingTensor, "experts.down_proj is not in"),
        ("gpt_oss_mxfp4", dequantize, MissingTensor, "gate_up_proj_blocks is not in"),
        ("gpt_oss_mxfp4", cut("down_proj_scales", slice(4)), WrongTensor, r"\[5, 64, 3, 16\] and \[4, 64, 3\]"),
        ("gpt_oss_mxfp4", cut("down_proj_scales", ..., slice(2)), WrongTensor, r"\[5, 64, 3, 16\] and \[5, 64, 2\]"),
        ("gpt_oss_mxfp4", cut("down_proj_blocks", ..., slice(8)), WrongTensor, r"\[5, 64, 3, 8\] and"),
        ("gpt_oss_mxfp4", cut("down_proj_blocks", 0), WrongTensor, "must have 4 dimensions"),
        (
            "gpt_oss_mxfp4",
            lambda t: t.update({f"{EXPERTS}.down_proj_scales": t[f"{EXPERTS}.down_proj_scales"].astype(np.float32)}),
            WrongTensor,
            "down_proj_scales .* is F32; it must be U8",
        ),
    ],
)
def test_folders_of_another_form_are_refused(
    edited: Callable[..., Path], golden: str, change: Callable[[Tensors], object], error: type, complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        pack_model(edited(golden, change), "auto")
