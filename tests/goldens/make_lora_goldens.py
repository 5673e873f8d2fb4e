"""Write the adapters of `lora/` and the logits of PEFT with them, unmerged and merged into the weights.

    python tests/goldens/make_lora_goldens.py    # needs torch, transformers and peft

The adapters change the models of the folders beside this file. Their numbers are random and large, so that a wrong row,
scale or order changes the logits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

GOLDENS = Path(__file__).parent
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "llama": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "qwen3": {"r": 8, "lora_alpha": 4, "target_modules": ALL, "use_rslora": True},
    "gemma3": {"r": 4, "lora_alpha": 6, "target_modules": ALL, "rank_pattern": {"o_proj": 20}},
    "phi3": {"r": 5, "lora_alpha": 10, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "cohere": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "alpha_pattern": {"k_proj": 3}},
}
NUM_TOKENS = 12


def main() -> None:
    os.chdir(GOLDENS)  # the adapters name their models
    for family, options in ADAPTERS.items():
        torch.manual_seed(len(family))
        model = AutoModelForCausalLM.from_pretrained(family, dtype=torch.float32)
        adapted = get_peft_model(model, LoraConfig(bias="none", **options)).eval()
        for name, values in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(values, std=0.1 if "lora_A" in name else 0.05)
        folder = Path("lora") / family
        adapted.save_pretrained(folder)
        (folder / "README.md").unlink()
        token_ids = np.random.default_rng(5).integers(3, 60, NUM_TOKENS)
        with torch.no_grad():
            unmerged = adapted(torch.tensor(token_ids[None])).logits[0].numpy()
            merged = adapted.merge_and_unload()(torch.tensor(token_ids[None])).logits[0].numpy()
        np.savez_compressed(folder / "golden.npz", token_ids=token_ids, unmerged=unmerged, merged=merged)


if __name__ == "__main__":
    main()
