"""Write the golden checkpoints, logits and rotary frequencies that the tests compare Quire with.

Needs torch and transformers 5; the tests need neither, they read what this wrote. Everything is seeded: running it
again with the same versions gives the same files.

usage: make_goldens.py [OUT_DIR [CASE ...]]    OUT_DIR defaults to this file's folder, the cases to all

Per case a Hugging Face folder with random weights: config.json in one transformers style and other_config.json in the
other (both must mean the same), one or several safetensors files, and golden.npz with
    token_ids  int64 [tokens]
    logits     float32 [tokens, vocab], from transformers in f32 with eager attention
Some cases have long.npz too: the same for a long text, with the logits of its last tokens only.
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
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

TOKENS = 96
LONG_TOKENS = 2000
LONG_ROWS = 8
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

LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "vocab_size": 160,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4: dict[str, Any] = {
    "vocab_size": 160,
    "vocab_size_per_layer_input": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "head_dim": 32,
    "global_head_dim": 64,
    "max_position_embeddings": 2048,
    "sliding_window": 24,
    "final_logit_softcapping": 5.0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Case:
    config_class: str
    dtype: torch.dtype  # dtype on disk
    style: int  # the version of transformers whose config.json it has
    config: dict[str, Any]
    max_shard_size: str = "1GB"
    norm_mean: float = 1.0  # mean of the norms' weights
    four: dict[str, Any] | None = None  # keys that only transformers 4 writes
    seed: int | None = None  # seed after SEED; None: the number of the case
    long: bool = False  # the case has long.npz, too
    mxfp4: bool = False  # experts are in MXFP4, as in the checkpoints of gpt-oss


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

SMALL: dict[str, Any] = {"vocab_size": 160, "num_key_value_heads": 2, "max_position_embeddings": 128}
GEMMA: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 4,
    "hidden_size": 48,  # a size whose square root is no bf16
    "head_dim": 32,
    "intermediate_size": 80,
    "query_pre_attn_scalar": 20,
    "sliding_window": 24,
    "eos_token_id": 1,
}
CASES |= {
    "smollm3": Case(
        "SmolLM3Config",
        torch.bfloat16,
        5,
        {
            **SMALL,
            "num_hidden_layers": 4,
            "hidden_size": 48,
            "intermediate_size": 96,
            "no_rope_layer_interval": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2000000.0},
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "granite": Case(
        "GraniteConfig",
        torch.bfloat16,
        4,
        {
            **SMALL,
            "intermediate_size": 96,
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "eos_token_id": 1,
        },
    ),
    "olmo2": Case(
        "Olmo2Config",
        torch.float32,
        5,
        {
            **SMALL,
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "intermediate_size": 96,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "eos_token_id": 1,
        },
    ),
    "phi3": Case(
        "Phi3Config",
        torch.bfloat16,
        4,
        {
            **SMALL,
            "intermediate_size": 72,
            "sliding_window": 40,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
                "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 11.0],
            },
            "pad_token_id": 0,
            "eos_token_id": [1, 2],
        },
    ),
    "gemma2": Case(
        "Gemma2Config",
        torch.bfloat16,
        5,
        {
            **GEMMA,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        norm_mean=0.0,
    ),
    "gemma3": Case(
        "Gemma3TextConfig",
        torch.bfloat16,
        4,
        {
            **GEMMA,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        norm_mean=0.0,
        four={"sliding_window_pattern": 3},
    ),
    "qwen3_moe": Case(
        "Qwen3MoeConfig",
        torch.bfloat16,
        4,
        {
            "num_hidden_layers": 3,
            "vocab_size": 320,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "intermediate_size": 96,
            "moe_intermediate_size": 40,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
    ),
    "mixtral": Case(
        "MixtralConfig",
        torch.float16,
        5,
        {
            "vocab_size": 320,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_window": 40,
            "eos_token_id": 2,
        },
    ),
}

CASES |= {
    "olmo3": Case(
        "Olmo3Config",
        torch.bfloat16,
        4,
        {
            **SMALL,
            "num_hidden_layers": 5,
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "intermediate_size": 100,
            "attention_bias": True,
            "sliding_window": 20,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 500000.0, "attention_factor": 1.2},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
            "eos_token_id": 1,
        },
        seed=120,
    ),
    "exaone4": Case(
        "Exaone4Config",
        torch.bfloat16,
        5,
        {
            **SMALL,
            "num_hidden_layers": 4,
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 20,
            "intermediate_size": 100,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": LLAMA3,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        four={"sliding_window_pattern": "LLGL"},
        seed=121,
    ),
    "seed_oss": Case(
        "SeedOssConfig",
        torch.bfloat16,
        4,
        {
            **SMALL,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 20,
            "intermediate_size": 100,
            "attention_out_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 2.0},
            "eos_token_id": 1,
        },
        seed=122,
    ),
    "gemma4_images": Case(
        "Gemma4Config",
        torch.bfloat16,
        5,
        {
            "text_config": {
                **SHARED,
                **GEMMA4,
                "num_hidden_layers": 4,
                "layer_types": [SLIDING, FULL, SLIDING, FULL],
                "num_key_value_heads": 2,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 16,
            },
            "vision_config": None,
            "audio_config": None,
        },
        four={"layer_types": [SLIDING, FULL, SLIDING, FULL], "global_head_dim": 64},
        seed=124,
    ),
}

CASES |= {
    "ernie4_5": Case(
        "Ernie4_5Config",
        torch.bfloat16,
        5,
        {
            **SMALL,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 20,
            "intermediate_size": 100,
            "use_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "eos_token_id": 1,
        },
        seed=124,
    ),
    "glm": Case(
        "GlmConfig",
        torch.bfloat16,
        4,
        {
            **SMALL,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 20,
            "intermediate_size": 100,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4},
            "pad_token_id": 0,
            "eos_token_id": [1, 2],
        },
        seed=124,
    ),
    "glm4": Case(
        "Glm4Config",
        torch.bfloat16,
        5,
        {
            **SMALL,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 20,
            "intermediate_size": 100,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "pad_token_id": 0,
            "eos_token_id": [1, 2],
        },
        seed=125,
    ),
    "ministral3": Case(
        "Ministral3Config",
        torch.bfloat16,
        5,
        {
            **SMALL,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 20,
            "intermediate_size": 100,
            "max_position_embeddings": 512,
            "sliding_window": 40,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 28,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "llama_4_scaling_beta": 0.1,
            },
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
        seed=126,
    ),
}

ODD: dict[str, Any] = {  # sizes that fill no tile
    **SMALL,
    "hidden_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 100,
    "eos_token_id": 1,
}
CASES |= {
    "cohere2": Case(
        "Cohere2Config",
        torch.bfloat16,
        5,
        {
            **ODD,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "logit_scale": 0.25,
            "layer_norm_eps": 1e-4,
            "sliding_window": 20,
            "sliding_window_pattern": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
        four={"sliding_window_pattern": 3},
        seed=130,
    ),
    "starcoder2": Case(
        "Starcoder2Config",
        torch.bfloat16,
        4,
        {
            **ODD,
            "sliding_window": 40,
            "norm_epsilon": 1e-4,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
        seed=131,
    ),
}

CASES |= {
    "cohere": Case(
        "CohereConfig",
        torch.bfloat16,
        5,
        {
            **ODD,
            "use_qk_norm": True,
            "logit_scale": 0.3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
        seed=132,
    ),
    "stablelm": Case(
        "StableLmConfig",
        torch.bfloat16,
        4,
        {
            **ODD,
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        seed=133,
    ),
    "phi": Case(
        "PhiConfig",
        torch.bfloat16,
        5,
        {
            **ODD,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.7},
        },
        seed=134,
    ),
    "hunyuan_v1_dense": Case(
        "HunYuanDenseV1Config",
        torch.bfloat16,
        4,
        {
            **ODD,
            "head_dim": 20,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
        },
        seed=135,
    ),
}

CASES |= {
    "ernie4_5_moe": Case(
        "Ernie4_5_MoeConfig",
        torch.bfloat16,
        5,
        {
            **ODD,
            "num_hidden_layers": 4,
            "intermediate_size": 120,
            "use_bias": True,
            "moe_intermediate_size": 40,
            "moe_num_experts": 7,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        seed=136,
    ),
    "glm4_moe": Case(
        "Glm4MoeConfig",
        torch.bfloat16,
        4,
        {
            **ODD,
            "num_hidden_layers": 3,
            "head_dim": 20,
            "attention_bias": True,
            "use_qk_norm": True,
            "moe_intermediate_size": 40,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        seed=137,
    ),
}

CASES |= {
    "arcee": Case(
        "ArceeConfig",
        torch.bfloat16,
        4,
        {
            **ODD,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {**YARN, "rope_theta": 10000.0},
        },
        seed=138,
    ),
    "granite_swa": Case(
        "GraniteSWAConfig",
        torch.bfloat16,
        5,
        {
            **ODD,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 4.0,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "layer_rope_theta": [0, 10000.0, 50000.0, 10000.0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        four={"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        seed=139,
    ),
}

GPT_OSS: dict[str, Any] = {
    "vocab_size": 320,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 40,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
    "sliding_window": 20,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
CASES |= {
    "gpt_oss": Case("GptOssConfig", torch.bfloat16, 5, GPT_OSS),
    "gpt_oss_mxfp4": Case("GptOssConfig", torch.bfloat16, 4, {**GPT_OSS, "intermediate_size": 96}, mxfp4=True),
}

CASES |= {
    "lfm2": Case(
        "Lfm2Config",
        torch.bfloat16,
        5,
        {
            "num_hidden_layers": 5,
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "vocab_size": 160,
            "max_position_embeddings": 256,
            "conv_L_cache": 4,
            "conv_bias": True,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "intermediate_size": 100,
            "block_multiple_of": 24,
            "block_ffn_dim_multiplier": 1.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        four={
            "full_attn_idxs": [1, 4],
            "block_ff_dim": 100,
            "intermediate_size": 6656,
            "tie_embedding": True,
            "tie_word_embeddings": False,
        },
    ),
}

MAMBA: dict[str, Any] = {  # sizes that fill no segment, no block and no vector
    "mamba_n_heads": 6,
    "mamba_d_head": 24,
    "mamba_n_groups": 3,
    "mamba_d_state": 20,
    "mamba_d_conv": 3,
}
CASES |= {
    "granite_hybrid": Case(
        "GraniteMoeHybridConfig",
        torch.bfloat16,
        5,
        {
            **MAMBA,
            "num_hidden_layers": 4,
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "vocab_size": 160,
            "max_position_embeddings": 2048,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": True,
            "time_step_limit": [0.01, 2.5],
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "num_local_experts": 0,
            "intermediate_size": 40,
            "shared_intermediate_size": 100,
            "embedding_multiplier": 6.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        four={"layer_types": ["mamba", "attention", "mamba", "attention"]},
        seed=110,
        long=True,
    ),
}
CASES |= {
    "granite_hybrid_moe": Case(
        "GraniteMoeHybridConfig",
        torch.bfloat16,
        4,
        {
            **MAMBA,
            "mamba_n_groups": 1,
            "num_hidden_layers": 3,
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "vocab_size": 160,
            "max_position_embeddings": 256,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "shared_intermediate_size": 52,
            "embedding_multiplier": 6.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "eos_token_id": 2,
        },
        four={"layer_types": ["mamba", "mamba", "attention"]},
        seed=112,
    ),
    "falcon_h1": Case(
        "FalconH1Config",
        torch.bfloat16,
        5,
        {
            **MAMBA,
            "num_hidden_layers": 3,
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "vocab_size": 160,
            "max_position_embeddings": 2048,
            "intermediate_size": 100,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            "mamba_d_ssm": 144,
            "mamba_proj_bias": True,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 5.0,
            "lm_head_multiplier": 0.4,
            "mlp_multipliers": [0.7, 0.3],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.2,
            "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 0.8],
            "ssm_out_multiplier": 0.6,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        seed=111,
        long=True,
    ),
}

CASES |= {
    "lfm2_moe": Case(
        "Lfm2MoeConfig",
        torch.bfloat16,
        5,
        {
            "num_hidden_layers": 4,
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "vocab_size": 160,
            "max_position_embeddings": 2048,
            "conv_L_cache": 3,
            "conv_bias": False,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "intermediate_size": 100,
            "moe_intermediate_size": 40,
            "num_dense_layers": 1,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            "eos_token_id": 2,
        },
        four={
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "tie_embedding": True,
            "tie_word_embeddings": False,
        },
        seed=15,
        long=True,
    ),
}

DELTA: dict[str, Any] = {
    "hidden_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 160,
    "max_position_embeddings": 2048,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 36,
    "eos_token_id": 2,
}
QWEN_DELTA: dict[str, Any] = {
    **DELTA,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
}
DELTA_EXPERTS: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 52,
}
CASES |= {
    "qwen3_5": Case(
        "Qwen3_5TextConfig",
        torch.bfloat16,
        5,
        {**QWEN_DELTA, "intermediate_size": 100, "attention_bias": True, "tie_word_embeddings": True},
        norm_mean=0.0,
        four={"full_attention_interval": 2},
        seed=106,
        long=True,
    ),
    "qwen3_5_moe": Case(
        "Qwen3_5MoeTextConfig",
        torch.bfloat16,
        4,
        {**QWEN_DELTA, **DELTA_EXPERTS, "linear_conv_kernel_dim": 3},
        norm_mean=0.0,
        four={"full_attention_interval": 2},
        seed=101,
        long=True,
    ),
    "qwen3_next": Case(
        "Qwen3NextConfig",
        torch.bfloat16,
        5,
        {
            **QWEN_DELTA,
            **DELTA_EXPERTS,
            "intermediate_size": 90,
            "mlp_only_layers": [2],
            "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.25},
        },
        norm_mean=0.0,
        four={"full_attention_interval": 2},
        seed=102,
        long=True,
    ),
    "olmo_hybrid": Case(
        "OlmoHybridConfig",
        torch.bfloat16,
        5,
        {
            **DELTA,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "intermediate_size": 100,
            "pad_token_id": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
            "attention_bias": True,
        },
        four={"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        seed=103,
        long=True,
    ),
}
NEMOTRON: dict[str, Any] = {
    "hidden_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "vocab_size": 160,
    "max_position_embeddings": 2048,
    "intermediate_size": 100,
    "mamba_num_heads": 6,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 20,
    "conv_kernel": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},  # has no effect
    "time_step_min": 1e-9,  # transformers limits time steps in prompts to it, but not in decoding
    "mlp_bias": True,
    "eos_token_id": 2,
}
CASES |= {
    "nemotron_h": Case(
        "NemotronHConfig",
        torch.bfloat16,
        5,
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
            "use_bias": True,
        },
        four={"hybrid_override_pattern": "M-*M-", "layers_block_type": None},
        seed=113,
        long=True,
    ),
    "nemotron_h_moe": Case(
        "NemotronHConfig",
        torch.bfloat16,
        4,
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 52,
            "routed_scaling_factor": 2.5,
        },
        four={"hybrid_override_pattern": "ME*E", "layers_block_type": None},
        seed=114,
    ),
    "deepseek_v2": Case(
        "DeepseekV2Config",
        torch.bfloat16,
        4,
        {
            **LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "rope_parameters": DEEPSEEK_YARN,
        },
        seed=130,
    ),
    "deepseek_v3": Case(
        "DeepseekV3Config",
        torch.bfloat16,
        5,
        {
            **LATENT,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "q_lora_rank": 40,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        seed=131,
    ),
    "glm4_moe_lite": Case(
        "Glm4MoeLiteConfig",
        torch.bfloat16,
        5,
        {
            **LATENT,
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "v_head_dim": 64,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        seed=132,
    ),
    # seven layers of an E2B: the last three read the keys and values of earlier ones and have wide MLPs
    "gemma4": Case(
        "Gemma4TextConfig",
        torch.bfloat16,
        5,
        {
            **GEMMA4,
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 24,
        },
        four={"layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL], "global_head_dim": 64},
        seed=120,
        long=True,
    ),
    # the dense 31B: values of full layers are their keys
    "gemma4_dense": Case(
        "Gemma4TextConfig",
        torch.bfloat16,
        5,
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
        four={"global_head_dim": 64, "num_global_key_value_heads": 2},
        seed=121,
        long=True,
    ),
    # 26B-A4B: the same with a mixture of experts beside each MLP
    "gemma4_moe": Case(
        "Gemma4TextConfig",
        torch.bfloat16,
        5,
        {
            **GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, SLIDING, FULL],
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
        four={
            "layer_types": [SLIDING, SLIDING, FULL],
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
        },
        seed=122,
    ),
}

GRANITE_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 4.0,
}  # fmt: skip
CASES |= {
    "internlm3": Case(
        "InternLM3Config",
        torch.bfloat16,
        4,
        {
            **ODD,
            "head_dim": 20,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 6.0},
        },
        four={"qkv_bias": True, "bias": True},
        seed=201,
    ),
    "olmoe": Case(
        "OlmoeConfig",
        torch.bfloat16,
        5,
        {**ODD, "intermediate_size": 40, "num_experts": 7, "num_experts_per_tok": 3, "attention_bias": True},
        seed=202,
    ),
    "granite_moe": Case(
        "GraniteMoeSharedConfig",
        torch.bfloat16,
        5,
        {
            **ODD,
            **GRANITE_FACTORS,
            "intermediate_size": 40,
            "shared_intermediate_size": 56,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
        },
        seed=203,
    ),
    "minicpm3": Case(
        "MiniCPM3Config",
        torch.bfloat16,
        5,
        {
            **LATENT,
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "num_hidden_layers": 2,
            "q_lora_rank": 40,
            "v_head_dim": None,
            "scale_depth": 1.2,
            "scale_emb": 3,
            "dim_model_base": 32,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 128,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [1.0 + 0.3 * i for i in range(8)],
            },
        },
        seed=204,
    ),
    # transformers does not have this model: its logits are those of a Granite with the same factors
    "minicpm": Case(
        "GraniteConfig",
        torch.bfloat16,
        4,
        {
            **ODD,
            "head_dim": 12,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 12**-0.5,
            "num_hidden_layers": 4,
            "residual_multiplier": 0.75,
            "logits_scaling": 2.25,
        },
        seed=205,
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
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + 0.01 * i for i in range(64)],
        "long_factor": [1.0 + 0.5 * i for i in range(64)],
    },
}


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    out.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[2:] or [*CASES, "rope"]
    for index, (name, case) in enumerate(CASES.items()):
        if name in wanted:
            torch.manual_seed(SEED + (index if case.seed is None else case.seed))
            write_case(out / name, case)
    if "rope" in wanted:
        write_ropes(out / "rope.npz")


def write_case(folder: Path, case: Case) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shared = {} if "text_config" in case.config else SHARED
    config = getattr(transformers, case.config_class)(**{**shared, **case.config})
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, case.norm_mean)
    model.to(case.dtype).save_pretrained(folder, max_shard_size=case.max_shard_size)
    (folder / "generation_config.json").unlink()
    write_configs(folder, case)
    if case.mxfp4:
        write_mxfp4(folder)
    if case.config_class == "OlmoHybridConfig":
        write_olmo_hybrid(folder, case.config)
    write_golden(folder)
    if folder.name == "minicpm":
        write_minicpm(folder)
    if case.long:
        write_long_golden(folder)


def write_minicpm(folder: Path) -> None:
    """Replace Granite's keys in both configs by MiniCPM's."""
    for name in ("config.json", "other_config.json"):
        config = json.loads((folder / name).read_text())
        config = {key: value for key, value in config.items() if not key.endswith(("_multiplier", "logits_scaling"))}
        config |= {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm"}
        config |= {"scale_emb": 3, "scale_depth": 1.5, "dim_model_base": 32}
        (folder / name).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def randomize(model: torch.nn.Module, norm_mean: float, attention: float = 1.5) -> None:
    """Set weights larger than an initialization, so that attention is not uniform and every part changes the logits.

    Queries and keys have a scale of about `attention`: scores, which depend on its square, amplify rounding errors.
    """
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape))
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn(buffer.shape))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if "linear_attn.norm" in name or "linear_attn.o_norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif "q_norm" in name and model.config.get_text_config().model_type == "gemma4_text":
                parameter.copy_((norm_mean + 0.2 * noise) * parameter.shape[0] ** -0.5)  # its scores have no scale
            elif "norm" in name:
                parameter.copy_(norm_mean + 0.2 * noise)
            elif name.endswith(("router.scale", "per_expert_scale")):
                parameter.copy_(1 + 0.3 * noise)
            elif "A_log" in name:
                parameter.copy_(noise - 2)  # states decay over many tokens
            elif "sinks" in name:
                parameter.copy_(2 + noise)
            elif "experts.gate_up_proj" in name and parameter.ndim == 3:
                parameter.copy_(noise * 5 / parameter.shape[1] ** 0.5)  # some are clamped
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            elif "q_proj" in name or "k_proj" in name:
                parameter.copy_(noise * attention / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def write_configs(folder: Path, case: Case) -> None:
    """Write config.json as transformers of version `case.style` does, other_config.json as the other version does."""
    five = json.loads((folder / "config.json").read_text())
    for name, wanted in (("config.json", case.style), ("other_config.json", 9 - case.style)):
        config = five if wanted == 5 else as_transformers_4(five, case.four or {})
        if config["model_type"] == "internlm3":  # transformers writes the class that it computes with
            config["architectures"] = ["InternLM3ForCausalLM"]
        (folder / name).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def write_mxfp4(folder: Path) -> None:
    """Replace the experts by random ones in MXFP4, and say so in both configs."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, rows, columns // 32, 32), dtype=torch.uint8)
        tensors[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        scales = torch.randint(122, 125, codes.shape[:3], dtype=torch.uint8)
        tensors[f"{name}_scales"] = scales + (2 if "gate_up" in name else 0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "other_config.json"):
        config = json.loads((folder / name).read_text())
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        }
        (folder / name).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def write_olmo_hybrid(folder: Path, config: dict[str, Any]) -> None:
    """Name and divide tensors as the published checkpoint has them, which transformers reads but does not write.

    It divides convolutions into equal parts, and gives a norm of attention layers the name in layers without attention.
    """
    tensors = load_file(folder / "model.safetensors")
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{kind}_conv1d") for kind in "qkv"]
        parts = torch.cat([tensors[part] for part in names]).split([keys, keys, values])
        tensors |= {part: rows.contiguous() for part, rows in zip(names, parts, strict=True)}
    for layer, kind in enumerate(config["layer_types"]):
        if kind == "full_attention":
            prefix = f"model.layers.{layer}."
            norm = tensors.pop(f"{prefix}feedforward_layer_norm.weight")
            tensors[f"{prefix}post_attention_layernorm.weight"] = norm
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def as_transformers_4(five: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Convert a config to transformers 4: torch_dtype, rope_theta at the top level, the rest in rope_scaling.

    `changes` are for the decoder, which a model with images has under text_config.
    """
    if "text_config" in five and five["model_type"] == "gemma4":
        return {**five, "text_config": as_transformers_4(five["text_config"], changes)}
    four = {key: value for key, value in five.items() if key not in ("dtype", "rope_parameters", "layer_types")}
    rope = dict(five["rope_parameters"])
    if four["model_type"] == "gemma4_text":  # published files have other keys for the heads of full layers
        del four["per_layer_config"]
        return four | changes
    if "sliding_attention" in rope:
        if four["model_type"] != "olmo3":
            four["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    if "partial_rotary_factor" in rope:
        four["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    four["rope_theta"] = rope.pop("rope_theta")
    four["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if four["model_type"] == "qwen3_moe":
        four["num_experts"] = four.pop("num_local_experts")
    return {**four, "torch_dtype": five["dtype"], "transformers_version": "4.46.0", **changes}


def write_golden(folder: Path) -> None:
    """Write the logits of transformers, which loads the folder from disk, so that the configs are tested too."""
    load = load_mxfp4 if "quantization_config" in (folder / "config.json").read_text() else load_folder
    model = load(folder).eval()
    token_ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, TOKENS))
    with torch.no_grad():
        logits = model(input_ids=token_ids).logits[0]
    np.savez_compressed(folder / "golden.npz", token_ids=token_ids[0].numpy(), logits=logits.numpy())


def write_long_golden(folder: Path) -> None:
    """Write the logits of the last tokens of a long text, whose early tokens a state has almost forgotten."""
    model = load_folder(folder).eval()
    token_ids = torch.randint(0, model.config.vocab_size, (1, LONG_TOKENS))
    with torch.no_grad():
        logits = model(input_ids=token_ids).logits[0, -LONG_ROWS:]
    np.savez_compressed(folder / "long.npz", token_ids=token_ids[0].numpy(), logits=logits.numpy())


def load_folder(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def load_mxfp4(folder: Path) -> torch.nn.Module:
    """Load a folder whose experts are in MXFP4, which transformers itself reads with further packages only."""
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    tensors = load_file(folder / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks = tensors.pop(f"{name}_blocks")
        scales = tensors.pop(f"{name}_scales")
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.load_state_dict(tensors)
    return model


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
