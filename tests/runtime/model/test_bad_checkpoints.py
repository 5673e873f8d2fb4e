"""An invalid folder is refused by the right error, which names the file or key, before memory is allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import (
    ConfigError,
    CorruptCheckpoint,
    MissingTensor,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
    WrongTensor,
)
from quire.runtime.model import pack_model, read_spec
from quire.runtime.model.weights import packing
from quire.runtime.model.weights.tensors import expected_tensors
from safetensors.numpy import save_file

LAYER = "model.layers.1."
Tensors = dict[str, Any]
Edit = Callable[[Tensors], object]


@pytest.fixture(autouse=True)
def no_large_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        pytest.fail("weights were allocated before the checkpoint was checked")

    monkeypatch.setattr(packing, "map_memory", refuse)


@pytest.fixture
def rewritten(model_folder: Callable[..., Path]) -> Callable[[str, Edit], Path]:
    """Copy a golden folder with other tensors: f16 zeros of the same shapes, edited."""

    def rewrite(name: str, edit: Edit) -> Path:
        folder = model_folder(name)
        expected = expected_tensors(read_spec(folder))
        tensors: Tensors = {tensor: np.zeros(shape, np.float16) for tensor, shape in expected}
        edit(tensors)
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        save_file(tensors, folder / "model.safetensors")
        return folder

    return rewrite


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 4000, -1])
def test_a_truncated_file(model_folder: Callable[..., Path], keep: int) -> None:
    file = model_folder("llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptCheckpoint, match=r"llama/model\.safetensors"):
        pack_model(file.parent, "f32")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.embed_tokens.weight"),
        ("llama", "model.norm.weight"),
        ("llama", "lm_head.weight"),
        ("llama", f"{LAYER}input_layernorm.weight"),
        ("llama", f"{LAYER}self_attn.o_proj.bias"),
        ("llama", f"{LAYER}mlp.down_proj.bias"),
        ("qwen2", f"{LAYER}self_attn.k_proj.bias"),
        ("qwen3", f"{LAYER}self_attn.q_norm.weight"),
        ("mistral", f"{LAYER}mlp.gate_proj.weight"),
    ],
)
def test_a_missing_tensor(rewritten: Callable[[str, Edit], Path], family: str, name: str) -> None:
    folder = rewritten(family, lambda tensors: tensors.pop(name))
    with pytest.raises(MissingTensor, match=name):
        pack_model(folder, "f32")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (319, 64)),
        ("model.norm.weight", (64, 1)),
        (f"{LAYER}self_attn.q_proj.weight", (96 + 24, 64)),
        (f"{LAYER}self_attn.k_norm.weight", (16,)),
        (f"{LAYER}self_attn.o_proj.weight", (96, 64)),
        (f"{LAYER}mlp.up_proj.weight", (0, 64)),
    ],
)
def test_a_wrong_shape(rewritten: Callable[[str, Edit], Path], name: str, shape: tuple[int, ...]) -> None:
    folder = rewritten("qwen3", lambda tensors: tensors.update({name: np.zeros(shape, np.float32)}))
    with pytest.raises(WrongTensor, match=rf"{name}.*is \{list(shape)}; config\.json implies \["):
        pack_model(folder, "q8")


@pytest.mark.parametrize(
    "head",
    [np.eye(320, 64, 3, np.float16), np.zeros((319, 64), np.float16), np.zeros((320, 64), np.int8)],
    ids=["another number", "another shape", "another dtype"],
)
def test_a_head_that_is_no_copy_of_tied_embeddings(rewritten: Callable[[str, Edit], Path], head: Any) -> None:
    folder = rewritten("qwen3", lambda tensors: tensors.update({"lm_head.weight": head}))
    with pytest.raises(WrongTensor, match=r"lm_head\.weight .* no copy of model\.embed_tokens\.weight.* must be false"):
        pack_model(folder, "bf16")


@pytest.mark.parametrize(("dtype", "spelt"), [(np.int8, "I8"), (np.uint16, "U16"), (np.float64, "F64")])
def test_a_wrong_dtype(rewritten: Callable[[str, Edit], Path], dtype: Any, spelt: str) -> None:
    name = f"{LAYER}mlp.down_proj.weight"
    folder = rewritten("qwen3", lambda tensors: tensors.update({name: tensors[name].astype(dtype)}))
    with pytest.raises(WrongTensor, match=f"{name}.* is {spelt}; it must be one of BF16, F16, F32"):
        pack_model(folder, "bf16")


def test_a_missing_shard(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("qwen2")
    (folder / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match="model-00003-of-00004"):
        pack_model(folder, "f32")


def test_no_weights_at_all(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"neither model\.safetensors nor"):
        pack_model(folder, "f32")


def test_an_unsupported_architecture(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama", lambda config: config.update(architectures=["FalconForCausalLM"]))
    with pytest.raises(UnsupportedModel, match="FalconForCausalLM"):
        pack_model(folder, "f32")


def test_a_config_that_belongs_to_another_checkpoint(model_folder: Callable[..., Path]) -> None:
    with pytest.raises(MissingTensor, match=r"model\.layers\.2\."):
        pack_model(model_folder("llama", lambda config: config.update(num_hidden_layers=3)), "f32")


def test_an_unknown_weight_dtype(goldens: Path) -> None:
    with pytest.raises(ConfigError, match="'fp8'; it must be one of auto, bf16, q8, q4, f32"):
        pack_model(goldens / "llama", "fp8")  # type: ignore[arg-type]


def test_all_are_model_errors() -> None:
    for error in (CorruptCheckpoint, MissingTensor, ModelNotFound, UnsupportedModel, WrongTensor):
        assert issubclass(error, ModelError)
