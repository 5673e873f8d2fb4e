"""Write the golden checkpoints, logits and rotary frequencies that the tests compare Quire with.

Needs torch and transformers 5; the tests need neither, they read what this wrote. Everything is seeded: running it
again with the same versions gives the same files.

usage: make_goldens.py [OUT_DIR]        OUT_DIR defaults to this file's folder

Per case a Hugging Face folder with random weights: config.json in one transformers style and other_config.json in the
other (both must mean the same), one or several safetensors files, and golden.npz with
    token_ids  int64 [tokens]
    logits     float32 [tokens, vocab], from transformers in f32 with eager attention
rope.npz has per kind of scaling the frequencies and factor transformers computes, and cos and sin at some positions.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

TOKENS = 96
SEED = 20261120
POSITIONS = (0, 1, 31, 1023, 40_000)

SHARED: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "bos_token_id": 0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True)
class Case:
    config_class: str
    dtype: torch.dtype  # on disk
    style: int  # the version of transformers whose config.json it has
    config: dict[str, Any]
    max_shard_size: str = "1GB"


CASES = {
    "llama": Case(
        "LlamaConfig",
        torch.bfloat16,
        5,
        {
            "vocab_size": 320,
            "num_key_value_heads": 2,
            "intermediate_size": 160,
            "max_position_embeddings": 512,
            "rope_parameters": LLAMA3,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-5,
            "eos_token_id": [1, 2],
        },
    ),
    "qwen2": Case(
        "Qwen2Config",
        torch.float32,
        4,
        {
            "vocab_size": 307,
            "num_key_value_heads": 1,
            "intermediate_size": 128,
            "max_position_embeddings": 128,
            "rope_parameters": YARN,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
            "eos_token_id": 1,
        },
        max_shard_size="100KB",
    ),
    "qwen3": Case(
        "Qwen3Config",
        torch.bfloat16,
        5,
        {
            "vocab_size": 320,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "intermediate_size": 176,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
    ),
    "mistral": Case(
        "MistralConfig",
        torch.float16,
        4,
        {
            "vocab_size": 320,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 160,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            "sliding_window": 24,
            "eos_token_id": 2,
        },
    ),
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "yarn": {**YARN, "original_max_position_embeddings": 32768},
    "yarn_exact_range": {**YARN, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 24},
    "yarn_mscale": {**YARN, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn_given_factor": {**YARN, "original_max_position_embeddings": 4096, "attention_factor": 1.25},
}


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    out.mkdir(parents=True, exist_ok=True)
    for index, (name, case) in enumerate(CASES.items()):
        torch.manual_seed(SEED + index)
        write_case(out / name, case)
    write_ropes(out / "rope.npz")


def write_case(folder: Path, case: Case) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    config = getattr(transformers, case.config_class)(**{**SHARED, **case.config})
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.to(case.dtype).save_pretrained(folder, max_shard_size=case.max_shard_size)
    (folder / "generation_config.json").unlink()
    write_configs(folder, case.style)
    write_golden(folder)


def randomise(model: torch.nn.Module) -> None:
    """Set weights larger than an initialisation, so that attention is not uniform and every part changes the logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            elif "q_proj" in name or "k_proj" in name:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)


def write_configs(folder: Path, style: int) -> None:
    """Write config.json as transformers of version `style` does, and other_config.json as the other version does."""
    five = json.loads((folder / "config.json").read_text())
    for name, wanted in (("config.json", style), ("other_config.json", 9 - style)):
        config = five if wanted == 5 else as_transformers_4(five)
        (folder / name).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def as_transformers_4(five: dict[str, Any]) -> dict[str, Any]:
    """Convert a config to transformers 4: torch_dtype, rope_theta at the top level, the rest in rope_scaling."""
    four = {key: value for key, value in five.items() if key not in ("dtype", "rope_parameters", "layer_types")}
    rope = dict(five["rope_parameters"])
    four["rope_theta"] = rope.pop("rope_theta")
    four["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return {**four, "torch_dtype": five["dtype"], "transformers_version": "4.46.0"}


def write_golden(folder: Path) -> None:
    """Write the logits of transformers, which loads the folder from disk, so that the configs are tested too."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    token_ids = torch.randint(0, model.config.vocab_size, (1, TOKENS))
    with torch.no_grad():
        logits = model(input_ids=token_ids).logits[0]
    np.savez_compressed(folder / "golden.npz", token_ids=token_ids[0].numpy(), logits=logits.numpy())


def write_ropes(path: Path) -> None:
    arrays = {}
    for name, parameters in ROPES.items():
        config = transformers.LlamaConfig(
            hidden_size=512, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=dict(parameters)
        )
        embedding = LlamaRotaryEmbedding(config)
        cosine, sine = embedding(torch.zeros(1), torch.tensor([POSITIONS]))
        half = config.head_dim // 2
        arrays[f"{name}.inv_freq"] = embedding.inv_freq.numpy()
        arrays[f"{name}.factor"] = np.float64(embedding.attention_scaling)
        arrays[f"{name}.table"] = torch.cat([cosine[0, :, :half], sine[0, :, :half]], dim=-1).numpy()
    np.savez_compressed(path, positions=np.array(POSITIONS), **arrays)
    path.with_suffix(".json").write_text(json.dumps(ROPES, indent=1) + "\n")


if __name__ == "__main__":
    main()
