"""The config.json of well-known models, with the keys that public documentation shows: each is read, or refused with
the name of a key and the missing part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.errors import UnsupportedModel
from quire.runtime.model import kv_layout, read_spec
from quire.runtime.model.families.registry import FAMILIES
from quire.runtime.model.families.unsupported import MISSING_PARTS
from quire.runtime.model.states import lay_out_states

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
)


def model(architecture: str, *sizes: int, **keys: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **dict(zip(SIZES, sizes, strict=True)), **keys}


def text_of(architecture: str, *sizes: int, **keys: Any) -> dict[str, Any]:
    """Return the config.json of a model with images, whose text part has these keys."""
    return {"architectures": [architecture], "text_config": {**dict(zip(SIZES, sizes, strict=True)), **keys}}


def both_ropes(**full: Any) -> dict[str, Any]:
    """Return Gemma 4's `rope_parameters` with these keys for full layers."""
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    return {"rope_parameters": {"sliding_attention": sliding, "full_attention": {"rope_theta": 1e6, **full}}}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MINICPM = {"dim_model_base": 256, "rms_norm_eps": 1e-5, "scale_depth": 1.4, "scale_emb": 12}
MINICPM_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.1] * 32,
    "long_factor": [1.1] * 32,
    "original_max_position_embeddings": 32768,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2079441541}
MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22}
GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

# name -> config.json; family, size of a head, sliding layers, layers without RoPE, longest context
READ: dict[str, tuple[dict[str, Any], tuple[str, int, int, int, int]]] = {
    "Llama 3.1 8B": (
        model("LlamaForCausalLM", 128256, 4096, 32, 32, 8, 14336, 131072, rope_theta=5e5, rope_scaling=LLAMA3),
        ("llama", 128, 0, 0, 131072),
    ),
    "Llama 3.2 1B": (
        model("LlamaForCausalLM", 128256, 2048, 16, 32, 8, 8192, 131072, head_dim=64, rope_scaling=LLAMA3),
        ("llama", 64, 0, 0, 131072),
    ),
    "SmolLM2 135M": (
        model("LlamaForCausalLM", 49152, 576, 30, 9, 3, 1536, 8192, tie_word_embeddings=True),
        ("llama", 64, 0, 0, 8192),
    ),
    "Mistral 7B v0.1": (
        model("MistralForCausalLM", 32000, 4096, 32, 32, 8, 14336, 32768, sliding_window=4096),
        ("mistral", 128, 32, 0, 32768),
    ),
    "Mistral NeMo": (
        model("MistralForCausalLM", 131072, 5120, 40, 32, 8, 14336, 131072, head_dim=128, sliding_window=None),
        ("mistral", 128, 0, 0, 131072),
    ),
    "Mixtral 8x7B": (
        model(
            "MixtralForCausalLM", 32000, 4096, 32, 32, 8, 14336, 32768, num_local_experts=8, num_experts_per_tok=2
        ),
        ("mixtral", 128, 0, 0, 32768),
    ),
    "Mistral Small 3.1": (
        text_of(
            "Mistral3ForConditionalGeneration", 131072, 5120, 40, 32, 8, 32768, 131072,
            model_type="mistral", head_dim=128, rope_theta=1e9, sliding_window=None,
        ),
        ("mistral", 128, 0, 0, 131072),
    ),
    "Ministral 3 8B": (
        text_of(
            "Mistral3ForConditionalGeneration", 131072, 4096, 34, 32, 8, 14336, 262144,
            model_type="ministral3", head_dim=128, rope_parameters=MINISTRAL,
        ),
        ("ministral3", 128, 0, 0, 262144),
    ),
    "Qwen2.5 7B": (
        model(
            "Qwen2ForCausalLM", 152064, 3584, 28, 28, 4, 18944, 32768,
            sliding_window=131072, use_sliding_window=False, max_window_layers=28,
        ),
        ("qwen2", 128, 0, 0, 32768),
    ),
    "Qwen3 0.6B": (
        model("Qwen3ForCausalLM", 151936, 1024, 28, 16, 8, 3072, 40960, head_dim=128, tie_word_embeddings=True),
        ("qwen3", 128, 0, 0, 40960),
    ),
    "Qwen3 30B A3B": (
        model("Qwen3MoeForCausalLM", 151936, 2048, 48, 32, 4, 6144, 40960, head_dim=128, **EXPERTS),
        ("qwen3_moe", 128, 0, 0, 40960),
    ),
    "gpt-oss 20B": (
        model(
            "GptOssForCausalLM", 201088, 2880, 24, 64, 8, 2880, 131072,
            head_dim=64, sliding_window=128, num_local_experts=32, num_experts_per_tok=4,
            quantization_config={"quant_method": "mxfp4"},
        ),
        ("gpt_oss", 64, 12, 0, 131072),
    ),
    "SmolLM3 3B": (
        model("SmolLM3ForCausalLM", 128256, 2048, 36, 16, 4, 11008, 65536, rope_theta=5e6),
        ("smollm3", 128, 0, 9, 65536),
    ),
    "AFM 4.5B": (
        model(
            "ArceeForCausalLM", 128004, 2560, 36, 20, 4, 18432, 65536,
            hidden_act="relu2", head_dim=128, rope_theta=1e4,
            rope_scaling={**YARN, "factor": 20.0, "original_max_position_embeddings": 4096},
        ),
        ("arcee", 128, 0, 0, 65536),
    ),
    "Granite 4.0 1B": (
        model(
            "GraniteForCausalLM", 100352, 2048, 40, 16, 4, 4096, 131072,
            logits_scaling=8.0, rope_theta=1e7, tie_word_embeddings=True, **GRANITE,
        ),
        ("granite", 128, 0, 0, 131072),
    ),
    "Granite 4.0 H 1B": (
        model(
            "GraniteMoeHybridForCausalLM", 100352, 1536, 40, 12, 4, 4096, 131072,
            layer_types=(["mamba"] * 9 + ["attention"]) * 4, position_embedding_type="nope", num_local_experts=0,
            shared_intermediate_size=4096, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, **GRANITE,
        ),
        ("granite_hybrid", 128, 0, 40, 131072),
    ),
    "Granite 4.0 H Tiny": (
        model(
            "GraniteMoeHybridForCausalLM", 100352, 1536, 40, 12, 4, 512, 131072,
            layer_types=[*["mamba"] * 5, "attention", *(["mamba"] * 9 + ["attention"]) * 3, *["mamba"] * 4],
            position_embedding_type="nope", num_local_experts=64, num_experts_per_tok=6, shared_intermediate_size=1024,
            mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, tie_word_embeddings=True, **GRANITE,
        ),
        ("granite_hybrid", 128, 0, 40, 131072),
    ),
    "Granite SWA 2B": (
        model("GraniteSWAForCausalLM", 100352, 2560, 24, 20, 4, 8192, 8192, sliding_window=128, **GRANITE),
        ("granite_swa", 128, 18, 0, 8192),
    ),
    "Falcon-H1 0.5B": (
        model(
            "FalconH1ForCausalLM", 32784, 1024, 36, 8, 2, 2048, 16384,
            head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64, mamba_d_state=128, rope_theta=1e11,
        ),
        ("falcon_h1", 64, 0, 0, 16384),
    ),
    "Nemotron Nano 9B v2": (
        model(
            "NemotronHForCausalLM", 131072, 4480, 56, 40, 8, 15680, 131072,
            hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", head_dim=128,
            mamba_num_heads=128, mamba_head_dim=80, n_groups=8, ssm_state_size=128,
        ),
        ("nemotron_h", 128, 0, 56, 131072),
    ),
    "LFM2 8B A1B": (
        model(
            "Lfm2MoeForCausalLM", 65536, 2048, 24, 32, 8, 7168, 128000,
            conv_L_cache=3, num_dense_layers=2, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792,
            layer_types=["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
        ),
        ("lfm2_moe", 64, 0, 18, 128000),
    ),
    "Granite 3.3 2B": (
        model("GraniteForCausalLM", 49159, 2048, 40, 32, 8, 8192, 131072, logits_scaling=8.0, **GRANITE),
        ("granite", 64, 0, 0, 131072),
    ),
    "Granite 3.1 1B A400M": (
        model(
            "GraniteMoeForCausalLM", 49155, 1024, 24, 16, 8, 512, 131072, logits_scaling=6.0, num_local_experts=32,
            num_experts_per_tok=8, tie_word_embeddings=True, **GRANITE,
        ),
        ("granite_moe", 64, 0, 0, 131072),
    ),
    "InternLM3 8B": (
        model(
            "InternLM3ForCausalLM", 128512, 4096, 48, 32, 2, 10240, 32768, bias=False, head_dim=128, qkv_bias=False,
            rms_norm_eps=1e-5, rope_scaling={"factor": 6.0, "rope_type": "dynamic"}, rope_theta=50000000,
        ),
        ("internlm3", 128, 0, 0, 32768),
    ),
    "MiniCPM 2B": (
        model("MiniCPMForCausalLM", 122753, 2304, 40, 36, 36, 5760, 4096, **MINICPM),
        ("minicpm", 64, 0, 0, 4096),
    ),
    "MiniCPM4 0.5B": (
        model(
            "MiniCPMForCausalLM", 73448, 1024, 24, 16, 2, 4096, 32768, rope_scaling=MINICPM_ROPE, **MINICPM,
        ),
        ("minicpm", 64, 0, 0, 32768),
    ),
    "MiniCPM3 4B": (
        model(
            "MiniCPM3ForCausalLM", 73448, 2560, 62, 40, 40, 6400, 32768, kv_lora_rank=256, q_lora_rank=768,
            qk_nope_head_dim=64, qk_rope_head_dim=32,
            rope_scaling={**MINICPM_ROPE, "short_factor": [1.1] * 16, "long_factor": [1.1] * 16}, **MINICPM,
        ),
        ("minicpm3", 288, 0, 0, 32768),
    ),
    "OLMoE 1B 7B": (
        model(
            "OlmoeForCausalLM", 50304, 2048, 16, 16, 16, 1024, 4096, clip_qkv=None, norm_topk_prob=False,
            num_experts=64, num_experts_per_tok=8, rms_norm_eps=1e-5, rope_theta=10000.0,
        ),
        ("olmoe", 128, 0, 0, 4096),
    ),
    "OLMo 2 7B": (
        model("Olmo2ForCausalLM", 100352, 4096, 32, 32, 32, 11008, 4096, rope_theta=5e5),
        ("olmo2", 128, 0, 0, 4096),
    ),
    "OLMo 3 7B": (
        model(
            "Olmo3ForCausalLM", 100278, 4096, 32, 32, 32, 11008, 65536,
            rope_theta=500000, rope_scaling=YARN, sliding_window=4096,
        ),
        ("olmo3", 128, 24, 0, 65536),
    ),
    "EXAONE 4.0 32B": (
        model(
            "Exaone4ForCausalLM", 102400, 5120, 64, 40, 8, 27392, 131072,
            head_dim=128, sliding_window=4096, sliding_window_pattern="LLLG", rope_theta=1e6,
        ),
        ("exaone4", 128, 48, 16, 131072),
    ),
    "EXAONE 4.0 1.2B": (
        model(
            "Exaone4ForCausalLM", 102400, 2048, 30, 32, 8, 4096, 65536,
            head_dim=64, sliding_window=None, sliding_window_pattern=None, tie_word_embeddings=True,
        ),
        ("exaone4", 64, 0, 0, 65536),
    ),
    "Seed-OSS 36B": (
        model("SeedOssForCausalLM", 155136, 5120, 64, 80, 8, 27648, 524288, head_dim=128, rope_theta=1e7),
        ("seed_oss", 128, 0, 0, 524288),
    ),
    "ERNIE 4.5 0.3B": (
        model("Ernie4_5ForCausalLM", 103424, 1024, 18, 16, 2, 3072, 131072, head_dim=128, use_bias=False),
        ("ernie4_5", 128, 0, 0, 131072),
    ),
    "ERNIE 4.5 21B A3B": (
        model(
            "Ernie4_5_MoeForCausalLM", 103424, 2560, 28, 20, 4, 12288, 131072,
            moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, moe_num_shared_experts=2, use_bias=False,
        ),
        ("ernie4_5_moe", 128, 0, 0, 131072),
    ),
    "GLM-4.5 Air": (
        model(
            "Glm4MoeForCausalLM", 151552, 4096, 46, 96, 8, 10944, 131072,
            head_dim=128, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1408,
            first_k_dense_replace=1, partial_rotary_factor=0.5, attention_bias=True, num_nextn_predict_layers=1,
        ),
        ("glm4_moe", 128, 0, 0, 131072),
    ),
    "GLM-4.6": (
        model(
            "Glm4MoeForCausalLM", 151552, 5120, 92, 96, 8, 12288, 202752,
            head_dim=128, n_routed_experts=160, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=1536,
            first_k_dense_replace=3, use_qk_norm=True, routed_scaling_factor=2.5, attention_bias=True,
        ),
        ("glm4_moe", 128, 0, 0, 202752),
    ),
    "GLM-4 9B chat": (
        model("GlmForCausalLM", 151552, 4096, 40, 32, 2, 13696, 131072, head_dim=128, attention_bias=True),
        ("glm", 128, 0, 0, 131072),
    ),
    "GLM-4 9B 0414": (
        model("Glm4ForCausalLM", 151552, 4096, 40, 32, 2, 13696, 32768, partial_rotary_factor=0.5),
        ("glm4", 128, 0, 0, 32768),
    ),
    "Command R 35B": (
        model(
            "CohereForCausalLM", 256000, 8192, 40, 64, 64, 22528, 8192,
            rope_theta=8e6, logit_scale=0.0625, model_max_length=131072, use_qk_norm=False,
        ),
        ("cohere", 128, 0, 0, 8192),
    ),
    "StableLM 2 1.6B": (
        model(
            "StableLmForCausalLM", 100352, 2048, 24, 32, 32, 5632, 4096,
            partial_rotary_factor=0.25, use_qkv_bias=True, layer_norm_eps=1e-5, tie_word_embeddings=False,
        ),
        ("stablelm", 64, 0, 0, 4096),
    ),
    "Phi-2": (
        model(
            "PhiForCausalLM", 51200, 2560, 32, 32, 32, 10240, 2048,
            hidden_act="gelu_new", partial_rotary_factor=0.4, qk_layernorm=False, layer_norm_eps=1e-5,
        ),
        ("phi", 80, 0, 0, 2048),
    ),
    "Hunyuan 7B": (
        model(
            "HunYuanDenseV1ForCausalLM", 128256, 4096, 32, 32, 8, 14336, 32768,
            head_dim=128, use_qk_norm=True, use_cla=False, rms_norm_eps=1e-5,
            rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
        ),
        ("hunyuan_v1_dense", 128, 0, 0, 32768),
    ),
    "Command R7B": (
        model(
            "Cohere2ForCausalLM", 256000, 4096, 32, 32, 8, 14336, 8192,
            head_dim=128, rope_theta=50000, rotary_pct=1.0, sliding_window=4096, logit_scale=0.25, layer_switch=4,
            order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj",
        ),
        ("cohere2", 128, 24, 8, 8192),
    ),
    "Command A": (
        model(
            "Cohere2ForCausalLM", 256000, 12288, 64, 96, 8, 36864, 131072,
            rope_theta=50000, sliding_window=4096, sliding_window_pattern=4, logit_scale=0.25, tie_word_embeddings=True,
        ),
        ("cohere2", 128, 48, 16, 131072),
    ),
    "StarCoder 2 3B": (
        model(
            "Starcoder2ForCausalLM", 49152, 3072, 30, 24, 2, 12288, 16384,
            hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5, rope_theta=999999.4, sliding_window=4096, use_bias=True,
        ),
        ("starcoder2", 128, 30, 0, 16384),
    ),
    "Phi-3.5 mini": (
        model(
            "Phi3ForCausalLM", 32064, 3072, 32, 32, 32, 8192, 131072,
            rope_scaling=LONGROPE, original_max_position_embeddings=4096, sliding_window=262144,
        ),
        ("phi3", 96, 0, 0, 131072),
    ),
    "Phi-4": (
        model("Phi3ForCausalLM", 100352, 5120, 40, 40, 10, 17920, 16384, sliding_window=None),
        ("phi3", 128, 0, 0, 16384),
    ),
    "Phi-4 mini": (
        model(
            "Phi3ForCausalLM", 200064, 3072, 32, 24, 8, 8192, 131072, rope_scaling=LONGROPE,
            original_max_position_embeddings=4096, sliding_window=262144, partial_rotary_factor=0.75,
        ),
        ("phi3", 128, 0, 0, 131072),
    ),
    "Gemma 2 2B": (
        model("Gemma2ForCausalLM", 256000, 2304, 26, 8, 4, 9216, 8192, sliding_window=4096, **GEMMA),
        ("gemma2", 256, 13, 0, 8192),
    ),
    "Gemma 3 1B": (
        model(
            "Gemma3ForCausalLM", 262144, 1152, 26, 4, 1, 6912, 32768,
            sliding_window=512, sliding_window_pattern=6, **GEMMA,
        ),
        ("gemma3", 256, 22, 0, 32768),
    ),
    "DeepSeek-V2-Lite": (
        model(
            "DeepseekV2ForCausalLM", 102400, 2048, 27, 16, 16, 10944, 163840, first_k_dense_replace=1,
            moe_intermediate_size=1408, moe_layer_freq=1, n_group=1, n_routed_experts=64, n_shared_experts=2,
            norm_topk_prob=False, num_experts_per_tok=6, q_lora_rank=None, rope_scaling=DEEPSEEK_YARN,
            scoring_func="softmax", topk_group=1, topk_method="greedy", **LATENT,
        ),
        ("deepseek_v2", 576, 0, 0, 163840),
    ),
    "DeepSeek-V3": (
        model(
            "DeepseekV3ForCausalLM", 129280, 7168, 61, 128, 128, 18432, 163840, first_k_dense_replace=3,
            moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1,
            norm_topk_prob=True, num_experts_per_tok=8, num_nextn_predict_layers=1, q_lora_rank=1536,
            rope_scaling={**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, routed_scaling_factor=2.5,
            scoring_func="sigmoid", topk_group=4, topk_method="noaux_tc", **LATENT,
        ),
        ("deepseek_v3", 576, 0, 0, 163840),
    ),
    "Moonlight 16B A3B": (
        model(
            "DeepseekV3ForCausalLM", 163840, 2048, 27, 16, 16, 11264, 8192, first_k_dense_replace=1,
            moe_intermediate_size=1408, n_group=1, n_routed_experts=64, n_shared_experts=2, norm_topk_prob=True,
            num_experts_per_tok=6, q_lora_rank=None, rope_theta=50000.0, routed_scaling_factor=2.446,
            scoring_func="sigmoid", topk_group=1, topk_method="noaux_tc", **LATENT,
        ),
        ("deepseek_v3", 576, 0, 0, 8192),
    ),
    "GLM-4.7-Flash": (
        model(
            "Glm4MoeLiteForCausalLM", 154880, 2048, 47, 20, 20, 10240, 202752, first_k_dense_replace=1,
            moe_intermediate_size=1536, n_group=1, n_routed_experts=64, n_shared_experts=1, norm_topk_prob=True,
            num_experts_per_tok=4, num_nextn_predict_layers=1, q_lora_rank=768, rope_theta=1000000,
            routed_scaling_factor=1.8, topk_group=1, topk_method="noaux_tc",
            **{**LATENT, "qk_nope_head_dim": 192, "v_head_dim": 256},
        ),
        ("glm4_moe_lite", 576, 0, 0, 202752),
    ),
    "Gemma 4 E2B": (
        text_of(
            "Gemma4ForConditionalGeneration", 262144, 1536, 35, 8, 1, 6144, 131072, head_dim=256, global_head_dim=512,
            layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7, sliding_window=512, num_kv_shared_layers=20,
            use_double_wide_mlp=True, hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144,
            final_logit_softcapping=30.0,
        ),
        ("gemma4", 256, 28, 0, 131072),
    ),
    "Gemma 4 31B": (
        text_of(
            "Gemma4ForConditionalGeneration", 262144, 5376, 60, 32, 16, 21504, 262144, head_dim=256,
            global_head_dim=512, num_global_key_value_heads=4, attention_k_eq_v=True, sliding_window=1024,
            hidden_size_per_layer_input=0,
            use_bidirectional_attention="vision", final_logit_softcapping=30.0,
        ),
        ("gemma4", 256, 50, 0, 262144),
    ),
    "Gemma 4 26B A4B": (
        text_of(
            "Gemma4ForConditionalGeneration", 262144, 2816, 30, 16, 8, 2112, 262144, head_dim=256, global_head_dim=512,
            num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=1024, hidden_size_per_layer_input=0,
            enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
            use_bidirectional_attention="vision", final_logit_softcapping=30.0,
        ),
        ("gemma4", 256, 25, 0, 262144),
    ),
    "LFM2 1.2B": (
        model(
            "Lfm2ForCausalLM", 65536, 2048, 16, 32, 8, 12288, 128000,
            conv_L_cache=3, full_attn_idxs=[2, 5, 8, 10, 12, 14], block_auto_adjust_ff_dim=True,
        ),
        ("lfm2", 64, 0, 10, 128000),
    ),
}  # fmt: skip

# name -> config.json, as far as it decides; the error
REFUSED = {
    "Falcon 7B": ("FalconForCausalLM", "queries, keys and values of all heads in one tensor, and ALiBi"),
    "Gemma 3n E2B": ("Gemma3nForConditionalGeneration", "alternating updates"),
    "GPT-NeoX 20B": ("GPTNeoXForCausalLM", "queries, keys and values of each head in one tensor"),
    "Hunyuan A13B": ("HunYuanMoEV1ForCausalLM", "norms of heads after their rotation beside experts"),
    "Kimi Linear 48B": ("KimiLinearForCausalLM", "delta attention with a decay for each channel"),
    "MiniMax M2": ("MiniMaxM2ForCausalLM", "experts chosen by sigmoids beside norms over all heads"),
    "Qwen3-VL 30B A3B": ("Qwen3VLMoeForConditionalGeneration", "DeepStack beside experts"),
    "Llama 4 Scout": ("Llama4ForConditionalGeneration", "attention in chunks"),
}


@pytest.mark.parametrize("name", READ)
def test_a_known_model_is_read(tmp_path: Path, name: str) -> None:
    config, expected = READ[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    sliding = sum(window > 0 for window in spec.windows)
    found = (spec.family, spec.head_dim, sliding, spec.ropes.count(None), spec.max_position_embeddings)
    assert found == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_known_model_is_refused_with_the_missing_part(tmp_path: Path, name: str) -> None:
    architecture, part = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(model(architecture, 32000, 4096, 32, 32, 8, 11008, 4096)))
    with pytest.raises(UnsupportedModel, match=rf"architectures\[0\] is {architecture}; Quire lacks {part}"):
        read_spec(tmp_path)


def test_the_page_of_models_lists_what_is_read_and_what_is_refused() -> None:
    page = PAGE.read_text()
    families = {name for family in FAMILIES for name in family.architectures}
    assert not families & MISSING_PARTS.keys()
    assert {name for name, _ in REFUSED.values()} == MISSING_PARTS.keys()
    assert [name for name in (*families, *MISSING_PARTS) if f"`{name}`" not in page] == []
    assert [part for part in MISSING_PARTS.values() if part not in page] == []


def test_the_states_and_pages_of_granite_4_h_tiny(tmp_path: Path) -> None:
    """36 layers have 48 matrices of 128 x 64, each with a line of 64 bytes and the inputs of 2 tokens, and 5 rows of
    inputs of the convolution; 4 layers store keys and values.
    """
    (tmp_path / "config.json").write_text(json.dumps(READ["Granite 4.0 H Tiny"][0]))
    spec = read_spec(tmp_path)
    matrix = 64 + 4 * 128 * 64 + 4 * 2 * (128 + 64 + 16)
    ring = 4 * 5 * (48 * 64 + 2 * 128)
    assert lay_out_states(spec).nbytes == 36 * (48 * matrix + ring) == 62_005_248
    assert kv_layout(spec, "bf16", 32).token_bytes == 4 * 4 * 128 * 2 * 2
    assert spec.experts is not None
    assert (spec.experts.num_experts, spec.experts.top_k, spec.experts.shared_size) == (64, 6, 1024)


def test_layers_of_gemma_4_e2b_read_the_last_layer_of_their_kind_that_stores(tmp_path: Path) -> None:
    """15 layers store keys and values: 12 sliding ones of 256 columns, 3 full ones of 512; others have wide MLPs."""
    (tmp_path / "config.json").write_text(json.dumps(READ["Gemma 4 E2B"][0]))
    spec = read_spec(tmp_path)
    assert spec.kv_layers == tuple(range(15))
    assert spec.kv_sources[15:] == (13, 13, 13, 13, 14) * 4
    assert spec.intermediate_sizes == (6144,) * 15 + (12288,) * 20
    assert kv_layout(spec, "bf16", 32).token_bytes == (12 * 256 + 3 * 512) * 2 * 2
    assert [(rope.theta, rope.dim, rope.span) for rope in spec.ropes[3:5] if rope is not None] == [
        (10_000.0, 256, 0),
        (1_000_000.0, 128, 512),
    ]


def test_layers_of_gemma_4_have_the_heads_that_transformers_5_writes(tmp_path: Path) -> None:
    """Numbers of layers have leading zeros there; a table of RoPE that is given has no defaults of Gemma's."""
    config = READ["Gemma 4 E2B"][0]
    keys = {
        "per_layer_config": {f"{layer:02}": {"head_dim": 512} for layer in range(4, 35, 5)},
        **both_ropes(rope_type="proportional"),
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "text_config": {**config["text_config"], "tie_word_embeddings": False, **keys}})
    )
    spec = read_spec(tmp_path)
    assert [size for _, size in spec.kv_heads] == [256, 256, 256, 256, 512] * 7
    assert spec.ropes[4] is not None
    assert (spec.ropes[4].theta, spec.ropes[4].dim) == (1_000_000.0, 512)
    assert spec.tie_embeddings, "as the whole model has it"


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"use_bidirectional_attention": "all"}, 'text_config.use_bidirectional_attention .*null or "vision"'),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers .*so low that an earlier layer of each kind"),
        ({"global_head_dim": 511}, "global_head_dim .*even"),
        ({"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input .*262144, the vocab_size"),
        ({"hidden_activation": "silu"}, "hidden_activation .*gelu_pytorch_tanh"),
        ({"per_layer_config": {"04": {"sliding_window": 3}}}, "sliding_window .*absent: layers differ in head_dim"),
        ({"per_layer_config": {"35": {}}}, "per_layer_config.35 .*a key is the number of one of 35 layers, once"),
        ({"per_layer_config": {"4": {}, "04": {}}}, "per_layer_config.04 .*a key is the number of one of 35 layers"),
        ({"per_layer_config": {"9" * 5000: {}}}, "a key is the number of one of 35 layers"),
        ({"per_layer_config": {"14": {"head_dim": 512}}}, "num_kv_shared_layers .*with as many KV heads of their size"),
        ({"rope_parameters": {}}, "rope_parameters.sliding_attention.rope_theta is missing"),
        (both_ropes(rope_type="yarn"), "rope_type .*default or proportional"),
        (both_ropes(rope_type="proportional", partial_rotary_factor=1.5), "partial_rotary_factor .*at most 1"),
        ({"intermediate_size": 1 << 20}, "intermediate_size .*at most 524288 with use_double_wide_mlp"),
        ({"hidden_size_per_layer_input": 1 << 15}, "hidden_size_per_layer_input .*such that all layers have at most"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "num_global_key_value_heads .*a divisor of"),
    ],
)
def test_keys_of_gemma_4_are_refused_by_name(tmp_path: Path, keys: dict[str, Any], complaint: str) -> None:
    config = READ["Gemma 4 E2B"][0]
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": {**config["text_config"], **keys}}))
    with pytest.raises(UnsupportedModel, match=complaint):
        read_spec(tmp_path)
