"""Checkpoints with random weights in the shape of a real model: speed depends on the shape only.

There is no tokenizer: measurements send token ids.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ...model import read_spec
from ...model.weights.tensors import expected_tensors

QWEN3_SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": 0,
}


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the files of a model with this `config.json`. Raises ModelError or OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with (folder / "model.safetensors").open("wb") as file:
        write_safetensors(file, list(expected_tensors(read_spec(folder))))


def write_safetensors(file: BinaryIO, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Write random tensors in bf16, given by name and shape."""
    header = {}
    offset = 0
    for name, shape in tensors:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    generator = np.random.default_rng(1234)
    for _, shape in tensors:
        file.write(_values(generator, shape).tobytes())


def _values(generator: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
    """Return bf16 bits: norms and biases near 1, matrices scaled by their inputs as at initialization."""
    drawn = generator.standard_normal(shape, np.float32)
    scaled = 1 + 0.1 * drawn if len(shape) == 1 else drawn / np.sqrt(shape[1])
    return (scaled.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
