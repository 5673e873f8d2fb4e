"""Shapes that fill no tile: the kernels against the numpy reference, on checkpoints with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.model import pack_model, read_spec
from quire.runtime.model.weights.tensors import expected_tensors
from safetensors.numpy import save_file

SHAPES: dict[str, dict[str, Any]] = {
    "tiny sizes": {
        "vocab_size": 3,
        "hidden_size": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 1,
    },
    "nothing a multiple of 16": {
        "vocab_size": 77,
        "hidden_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "intermediate_size": 33,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "sliding and full layers": {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "intermediate_size": 40,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full", "sliding")],
    },
    "many queries on one KV head": {
        "vocab_size": 64,
        "hidden_size": 34,
        "num_hidden_layers": 1,
        "num_attention_heads": 20,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "intermediate_size": 100,
        "tie_word_embeddings": True,
    },
}


def write_random_model(folder: Path, config: dict[str, Any]) -> None:
    whole = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    rng = np.random.default_rng(7)
    tensors = {
        name: rng.standard_normal(shape, np.float32) / np.float32(shape[-1]) ** 0.5
        for name, shape in expected_tensors(read_spec(folder))
    }
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_match_the_reference(
    tmp_path: Path, shape: str, compute_logits: Callable[..., Any], reference_logits: Callable[..., Any]
) -> None:
    write_random_model(tmp_path, SHAPES[shape])
    model = pack_model(tmp_path, "f32")
    token_ids = np.random.default_rng(8).integers(0, model.spec.vocab_size, 40).tolist()
    expected = reference_logits(model, token_ids)
    np.testing.assert_allclose(compute_logits(model, token_ids, chunk=9), expected, atol=1e-5 * np.ptp(expected))
