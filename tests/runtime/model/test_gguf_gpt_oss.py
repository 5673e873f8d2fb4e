"""GGUF files of gpt-oss: the weights and the logits of the folder, with experts in MXFP4 or in another type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import MissingTensor, UnsupportedModel
from quire.runtime.model import pack_model, read_spec
from quire.runtime.model.weights.layer_weights import ExpertWeights
from quire.runtime.model.weights.safetensors import SafetensorsCheckpoint

from tests.support.families import GOLDENS
from tests.support.gguf_files import Tensor, describe, encode, widened, write

FOLDER = GOLDENS / "gpt_oss_mxfp4"
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.router": "ffn_gate_inp",
}


def as_ggml(blocks: Any, scales: Any) -> Tensor:
    """Return a tensor of experts [experts, rows, columns]: a byte of scale, then codes of i and 16 + i in each byte."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    data = np.concatenate([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], axis=-1)
    return Tensor((*scales.shape[:2], scales.shape[2] * 32), "MXFP4", np.ascontiguousarray(data).tobytes())


def stored_tensors() -> dict[str, Tensor]:
    """Return the tensors as the converter of llama.cpp writes them."""
    checkpoint = SafetensorsCheckpoint(FOLDER)
    tensors = {}
    for name, new in TOP.items():
        tensors[f"{new}.weight"] = encode(widened(checkpoint.tensor(f"{name}.weight")), "F32")
    for layer in range(2):
        old = f"model.layers.{layer}."
        prefix = f"blk.{layer}."
        for name, new in IN_LAYER.items():
            for suffix in ("weight", "bias"):
                if f"{old}{name}.{suffix}" in checkpoint:
                    values = widened(checkpoint.tensor(f"{old}{name}.{suffix}"))
                    tensors[f"{prefix}{new}.{suffix}"] = encode(values, "F32")
        tensors[f"{prefix}attn_sinks.weight"] = encode(widened(checkpoint.tensor(f"{old}self_attn.sinks")), "F32")
        for name, rows, new in (
            ("gate_up_proj", slice(0, None, 2), "ffn_gate_exps"),
            ("gate_up_proj", slice(1, None, 2), "ffn_up_exps"),
            ("down_proj", slice(None), "ffn_down_exps"),
        ):
            parts = (checkpoint.tensor(f"{old}mlp.experts.{name}_{part}")[:, rows] for part in ("blocks", "scales"))
            biases = widened(checkpoint.tensor(f"{old}mlp.experts.{name}_bias"))[:, rows]
            tensors[f"{prefix}{new}.weight"] = as_ggml(*parts)
            tensors[f"{prefix}{new}.bias"] = encode(np.ascontiguousarray(biases), "F32")
    return tensors


def metadata(**changed: Any) -> dict[str, Any]:
    keys = {**describe(FOLDER), "gpt-oss.expert_feed_forward_length": 96, **changed}
    return {key: value for key, value in keys.items() if value is not None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "a.gguf", metadata(), stored_tensors())


def test_the_spec_is_that_of_the_folder(path: Path) -> None:
    spec = read_spec(path)
    expected = read_spec(FOLDER)
    for name in ("ropes", "windows", "experts", "head_dim", "activation", "sinks", "qkv_bias", "o_bias", "norm_eps"):
        assert getattr(spec, name) == getattr(expected, name), name
    assert set(spec.quantized.values()) == {"MXFP4"}


@pytest.mark.parametrize("weights", ["auto", "q8"])
def test_the_logits_are_those_of_the_folder(path: Path, weights: Any, compute_logits: Callable[..., Any]) -> None:
    """Logits are equal bit for bit; with `auto`, both models have bf16 and MXFP4 weights."""
    ids = np.random.default_rng(1).integers(0, 320, 50).tolist()
    models = pack_model(path, weights), pack_model(FOLDER, weights)
    for layer in models[0].weights.layers:
        assert isinstance(layer.mlp, ExpertWeights)
        assert layer.mlp.down[0].dtype == ("mxfp4" if weights == "auto" else "q8")
    logits = [compute_logits(model, ids, kv_dtype="int8") for model in models]
    assert np.array_equal(*logits)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("attention.sliding_window", None, "gpt-oss.attention.sliding_window is missing; it must be an integer"),
        ("attention.sliding_window_pattern", 3, "sliding_window_pattern is 3; it must be absent or 2"),
        ("attention.sliding_window_pattern", 1, "sliding_window_pattern is 1; it must be absent or 2"),
        ("rope.freq_base_swa", 1e4, "rope.freq_base_swa is 10000.0; it must be absent"),
        ("expert_used_count", 9, "expert_used_count is 9"),
    ],
)
def test_values_that_are_refused(tmp_path: Path, key: str, value: Any, complaint: str) -> None:
    path = write(tmp_path / "a.gguf", metadata(**{f"gpt-oss.{key}": value}), stored_tensors())
    with pytest.raises(UnsupportedModel, match=complaint):
        read_spec(path)


@pytest.mark.parametrize("name", ["attn_sinks.weight", "ffn_up_exps.bias", "ffn_gate_inp.bias"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = stored_tensors()
    del tensors[f"blk.1.{name}"]
    with pytest.raises(MissingTensor, match=name):
        read_spec(write(tmp_path / "a.gguf", metadata(), tensors))
