"""Well-known architectures that are refused, and the parts that they need and Quire does not have."""

from __future__ import annotations

MISSING_PARTS: dict[str, str] = {  # config.json's `architectures[0]` -> the parts
    "FalconForCausalLM": "queries, keys and values of all heads in one tensor, and ALiBi",
    "Gemma3nForConditionalGeneration": "alternating updates (AltUp), LAuReL and per-layer embeddings",
    "GPTNeoXForCausalLM": "queries, keys and values of each head in one tensor",
    "HunYuanMoEV1ForCausalLM": "norms of heads after their rotation beside experts",
    "KimiLinearForCausalLM": "delta attention with a decay for each channel (KDA) beside latent attention",
    "Llama4ForConditionalGeneration": "attention in chunks, and a mixture of experts that scales its input",
    "MiniMaxM2ForCausalLM": "experts chosen by sigmoids beside norms over all heads",
    "Qwen3VLMoeForConditionalGeneration": "DeepStack beside experts",
}
