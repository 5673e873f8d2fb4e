"""Write a Hugging Face checkpoint with random weights in the shape of a real model: speed depends on the shape only.

usage: make_checkpoint.py SHAPE FOLDER        SHAPE: qwen3-0.6b | llama-3.2-1b | qwen2.5-0.5b | moe-1b
There is no tokenizer: `quire bench` sends token ids.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from quire.runtime.model import read_spec
from quire.runtime.model.weights.tensors import expected_tensors

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
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
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "eos_token_id": 0,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 0,
    },
    "moe-1b": {  # 1.0 B parameters, of which a token uses 0.3 B
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 3584,
        "moe_intermediate_size": 1792,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "eos_token_id": 0,
    },
}


def values(generator: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
    """Return bf16 bits: norms and biases near 1, matrices scaled by their inputs as at initialization."""
    drawn = generator.standard_normal(shape, np.float32)
    scaled = 1 + 0.1 * drawn if len(shape) == 1 else drawn / np.sqrt(shape[1])
    return (scaled.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def write_safetensors(file: BinaryIO, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> None:
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
        file.write(values(generator, shape).tobytes())


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        raise SystemExit(__doc__)
    config = SHAPES[sys.argv[1]]
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with (folder / "model.safetensors").open("wb") as file:
        write_safetensors(file, list(expected_tensors(read_spec(folder))))


if __name__ == "__main__":
    main()
