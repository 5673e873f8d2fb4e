"""Well-known architectures that are refused, and the parts that they need and Quire does not have."""

from __future__ import annotations

LATENT = "multi-head latent attention (MLA), whose cache holds a latent vector"
PARALLEL = "LayerNorm, and attention and MLP beside each other (parallel residuals)"

MISSING_PARTS: dict[str, str] = {  # config.json's `architectures[0]` -> the parts
    "CohereForCausalLM": PARALLEL,
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "Ernie4_5_MoeForCausalLM": "experts chosen with a correction bias beside shared experts, by ERNIE's names",
    "FalconForCausalLM": PARALLEL,
    "Gemma3nForConditionalGeneration": "alternating updates (AltUp), LAuReL and per-layer embeddings",
    "Gemma4ForConditionalGeneration": "layers that read the keys and values of other layers, per-layer embeddings",
    "Glm4MoeForCausalLM": "shared experts without a gate beside experts chosen by sigmoids",
    "HunYuanDenseV1ForCausalLM": "norms of queries and keys after their rotation",
    "InternLM3ForCausalLM": "code in the model's folder, which is not run",
    "Llama4ForConditionalGeneration": "attention in chunks, and a mixture of experts that scales its input",
    "MiniCPMForCausalLM": "code in the model's folder, which is not run",
    "PhiForCausalLM": PARALLEL,
    "StableLmForCausalLM": "LayerNorm in place of RMSNorm",
}
