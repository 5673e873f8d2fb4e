"""Random adapters for the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from quire.runtime.model import BUNDLED_MODEL
from safetensors.numpy import save_file

RANK = 4


def write_adapter(folder: Path, seed: int) -> str:
    """Write an adapter of queries and of MLPs, which changes the model's tokens; return the folder."""
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, inputs, outputs in (("self_attn.q_proj", hidden, hidden), ("mlp.down_proj", inner, hidden)):
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = random.normal(0, 0.2, (RANK, inputs)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = random.normal(0, 0.2, (outputs, RANK)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8}))
    return str(folder)
