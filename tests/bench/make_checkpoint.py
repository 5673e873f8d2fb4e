"""Write a Hugging Face checkpoint with random weights in the shape of a real model: speed depends on the shape only.

usage: make_checkpoint.py SHAPE FOLDER        SHAPE: qwen3-0.6b | llama-3.2-1b | qwen2.5-0.5b | moe-1b
There is no tokenizer: `quire bench` sends token ids.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from quire.runtime.tools.bench.checkpoint import QWEN3_SHAPE, write_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3_SHAPE,
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


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        raise SystemExit(__doc__)
    write_checkpoint(Path(sys.argv[2]), SHAPES[sys.argv[1]])


if __name__ == "__main__":
    main()
