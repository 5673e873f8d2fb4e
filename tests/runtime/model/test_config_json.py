"""Reading of config.json: each family's rules, and every invalid value refused by the name of its key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quire.kernels.ops import RoutingRule
from quire.runtime.common.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from quire.runtime.model import DecoderSpec, read_spec
from quire.runtime.model.config_json import ConfigTable
from quire.runtime.model.config_rope import read_mrope
from quire.runtime.model.spec import (
    Convolutions,
    Experts,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Mamba,
    QueryScales,
    Rope,
    TensorNames,
    YarnScaling,
)

ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "arcee": "ArceeForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "phi": "PhiForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "granite_hybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "granite_moe": "GraniteMoeForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
MINIMAL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
NEEDED: dict[str, dict[str, Any]] = {
    "lfm2": {"num_key_value_heads": 2},  # the default has more than MINIMAL's heads
    "exaone4": {"num_key_value_heads": 2},
    "seed_oss": {"num_key_value_heads": 2},
    "stablelm": {"num_key_value_heads": 2},
    "glm4_moe": {"num_key_value_heads": 2},
    "ministral3": {"num_key_value_heads": 2},
    "internlm3": {"num_key_value_heads": 2},
    "minicpm3": {"v_head_dim": 32},
    "granite_hybrid": {
        "layer_types": ["mamba", "mamba", "attention"],
        "shared_intermediate_size": 96,
        "num_local_experts": 0,
        "mamba_n_heads": 4,
    },
    "nemotron_h": {
        "num_key_value_heads": 2,
        "hybrid_override_pattern": "M*-",
        "mamba_num_heads": 4,
        "n_groups": 2,
    },
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_ssm": 96, "num_key_value_heads": 2},
}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}

Read = Callable[..., DecoderSpec]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Read a minimal config of one family with the given keys; a key whose value is `...` is left out."""

    def read(family: str, **keys: Any) -> DecoderSpec:
        config = {"architectures": [ARCHITECTURE[family]], **MINIMAL, **NEEDED.get(family, {}), **keys}
        config = {key: value for key, value in config.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_spec(tmp_path)

    return read


def test_defaults(read: Read) -> None:
    assert read("llama") == DecoderSpec(
        family="llama",
        vocab_size=100,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=96,
        norm_eps=1e-6,
        attention_scale=0.25,
        ropes=(Rope(10000.0, None),) * 3,
        windows=(0, 0, 0),
        qk_norm=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tie_embeddings=False,
        max_position_embeddings=512,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    ("family", "keys", "qkv_bias", "o_bias", "mlp_bias"),
    [
        ("llama", {"attention_bias": True}, True, True, False),
        ("llama", {"mlp_bias": True}, False, False, True),
        ("qwen2", {}, True, False, False),
        ("qwen2", {"attention_bias": False, "mlp_bias": True}, True, False, False),
        ("qwen3", {}, False, False, False),
        ("qwen3", {"attention_bias": True}, True, True, False),
        ("mistral", {"attention_bias": True, "mlp_bias": True}, False, False, False),
        ("seed_oss", {}, True, False, False),
        ("ernie4_5", {}, False, False, False),
        ("ernie4_5", {"use_bias": True}, True, True, True),
        ("glm", {}, True, False, False),
        ("glm4", {"attention_bias": False}, False, False, False),
        ("cohere", {}, False, False, False),
        ("cohere2", {"attention_bias": True}, True, True, False),
        ("stablelm", {}, False, False, False),
        ("stablelm", {"use_qkv_bias": True}, True, False, False),
        ("phi", {}, True, True, True),
        ("arcee", {"attention_bias": True}, True, True, False),
        ("arcee", {"mlp_bias": True}, False, False, True),
        ("ernie4_5_moe", {"use_bias": True}, True, True, True),
        ("glm4_moe", {"attention_bias": True}, True, False, False),
        ("hunyuan_v1_dense", {}, False, False, False),
        ("hunyuan_v1_dense", {"attention_bias": True}, True, True, False),
        ("internlm3", {}, False, False, False),
        ("internlm3", {"qkv_bias": True}, True, False, False),
        ("internlm3", {"bias": True}, False, True, True),
        ("internlm3", {"attention_bias": True, "mlp_bias": True}, True, True, True),
        ("starcoder2", {}, True, True, True),
        ("starcoder2", {"use_bias": False}, False, False, False),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}, False, True, True),
    ],
)
def test_biases(read: Read, family: str, keys: Any, qkv_bias: bool, o_bias: bool, mlp_bias: bool) -> None:
    spec = read(family, **keys)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (qkv_bias, o_bias, mlp_bias)


@pytest.mark.parametrize(
    ("family", "keys", "head_dim"),
    [
        ("llama", {}, 16),
        ("llama", {"head_dim": None}, 16),
        ("mistral", {"head_dim": 32}, 32),
        ("qwen2", {"head_dim": 8}, 8),
        ("qwen3", {}, 128),
        ("qwen3", {"head_dim": None}, 16),
        ("llama", {"head_dim": 24, "hidden_size": 66}, 24),
    ],
)
def test_head_dim(read: Read, family: str, keys: Any, head_dim: int) -> None:
    assert read(family, **keys).head_dim == head_dim


def test_families_that_norm_queries_and_keys(read: Read) -> None:
    assert {family for family in ARCHITECTURE if read(family).qk_norm} == {
        "qwen3", "olmo2", "olmo3", "exaone4", "gemma3", "lfm2", "hunyuan_v1_dense", "olmoe",
    }  # fmt: skip
    assert {family for family in ARCHITECTURE if read(family).qk_norm_rows} == {"olmo2", "olmo3", "olmoe"}


@pytest.mark.parametrize(
    ("family", "keys", "windows"),
    [
        ("llama", {"sliding_window": 8}, (0, 0, 0)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("mistral", {"sliding_window": None}, (0, 0, 0)),
        ("mistral", {}, (4096, 4096, 4096)),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 8},
            (0, 8, 0),
        ),
        ("qwen2", {"sliding_window": 8}, (0, 0, 0)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (0, 8, 8)),
        ("qwen2", {"use_sliding_window": True}, (0, 0, 0)),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}, (0, 0, 4096)),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (0, 0, 0)),
        (
            "qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, 0, 8),
        ),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, (0, 0, 0)),
        ("smollm3", {"sliding_window": 8}, (0, 0, 0)),
        ("smollm3", {"sliding_window": 8, "use_sliding_window": True, "no_rope_layer_interval": 3}, (0, 0, 8)),
        ("phi3", {}, (0, 0, 0)),
        ("phi3", {"sliding_window": 8}, (8, 8, 8)),
        ("phi3", {"sliding_window": 512}, (0, 0, 0)),
        ("olmo3", {"num_hidden_layers": 4}, (4096, 4096, 4096, 0)),
        ("olmo3", {"sliding_window": 8, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, (0, 0, 8)),
        ("exaone4", {"num_hidden_layers": 4}, (4096, 4096, 4096, 0)),
        ("exaone4", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, 0, 8)),
        ("exaone4", {"sliding_window": 8, "sliding_window_pattern": "LG"}, (8, 0, 8)),
        ("exaone4", {"sliding_window": None, "sliding_window_pattern": None}, (0, 0, 0)),
        ("granite_swa", {}, (0, 128, 128)),
        ("granite_swa", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}, (8, 8, 8)),
        ("cohere2", {"num_hidden_layers": 4}, (4096, 4096, 4096, 0)),
        ("cohere2", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, 0, 8)),
        ("cohere2", {"sliding_window": 8, "layer_types": ["full_attention"] * 3}, (0, 0, 0)),
        ("starcoder2", {}, (0, 0, 0)),
        ("starcoder2", {"sliding_window": 8}, (8, 8, 8)),
        ("gemma2", {"sliding_window": 8}, (8, 0, 8)),
        ("gemma2", {}, (4096, 0, 4096)),
        ("gemma2", {"layer_types": ["full_attention"] * 3}, (0, 0, 0)),
        ("gemma3", {"sliding_window": 8}, (8, 8, 8)),
        ("gemma3", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, 0, 8)),
    ],
)
def test_windows(read: Read, family: str, keys: Any, windows: tuple[int, ...]) -> None:
    assert read(family, **keys).windows == windows


YARN = YarnScaling(4.0, 1.138629436111989, 32.0, 1.0, True, 128)


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_theta": 5e5}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope(1e6)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(1e4, LinearScaling(2.0))),
        (  # form of a converter to transformers 5
            {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}},
            Rope(5e5, LinearScaling(2.0)),
        ),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 512))),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 64}},
            Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            Rope(1e4, YARN),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": None}, "original_max_position_embeddings": 128},
            Rope(1e4, YARN),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 1.0, "beta_fast": 16, "truncate": False}},
            Rope(1e4, YarnScaling(1.0, 1.0, 16.0, 1.0, False, 512)),
        ),
        (  # the ratio of transformers, in tests/goldens/rope.npz
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 1.0}},
            Rope(1e4, YarnScaling(4.0, 0.964326914892074, 32.0, 1.0, True, 512)),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707}},
            Rope(1e4, YarnScaling(4.0, YARN.attention_factor, 32.0, 1.0, True, 512)),
        ),
    ],
)
def test_rope_in_both_styles(read: Read, keys: Any, rope: Rope) -> None:
    assert read("llama", **keys).ropes == (rope,) * 3


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("table", "scaling"),
    [
        ({"rope_type": "mrope", "factor": 4.0}, None),
        ({"type": "mrope"}, None),
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2}, LinearScaling(2.0)),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, YARN),
    ],
)
def test_positions_of_images_may_be_scaled_like_others(
    key: str, table: dict[str, Any], scaling: LinearScaling | YarnScaling | None
) -> None:
    table = {**table, "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    config = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 512, key: table}
    assert read_mrope(ConfigTable(config), interleaved=False) == Rope(1e6, scaling, axes=(0, 1, 2, 2))


LONG = {"short_factor": [1, 1.5, 2], "long_factor": [1, 4, 9], "original_max_position_embeddings": 128}
LONGROPE = LongRopeScaling((1.0, 1.5, 2.0), (1.0, 4.0, 9.0), (1 + 2 / 7) ** 0.5, 128)


@pytest.mark.parametrize(
    "keys",
    [{"rope_scaling": {"type": kind, **LONG}, "partial_rotary_factor": 0.375} for kind in ("longrope", "su", "yarn")]
    + [{"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.375, **LONG}}],
)
def test_longrope_of_a_part_of_each_head(read: Read, keys: Any) -> None:
    assert read("phi3", **keys, original_max_position_embeddings=128).ropes == (Rope(1e4, LONGROPE, 6),) * 3


def test_the_original_context_of_phi_3_has_a_default(read: Read) -> None:
    """As in transformers, the top-level context takes precedence over the one next to the factors."""
    rope = {"rope_scaling": {"type": "longrope", **LONG}, "partial_rotary_factor": 0.375}
    (rope,) = set(read("phi3", **rope).ropes)
    assert rope is not None
    assert rope.scaling == LongRopeScaling(LONGROPE.short_factors, LONGROPE.long_factors, 1.0, 4096)


def test_factors_without_a_type_are_not_used(read: Read) -> None:
    assert read("llama", rope_scaling={**LONG, "factor": 4.0}).ropes == (Rope(1e4),) * 3


@pytest.mark.parametrize(
    ("keys", "rotates"),
    [
        ({}, (True, True, True)),
        ({"no_rope_layer_interval": 2}, (True, False, True)),
        ({"no_rope_layers": [0, 1, 1]}, (False, True, True)),
    ],
)
def test_layers_that_do_not_rotate_heads(read: Read, keys: Any, rotates: tuple[bool, ...]) -> None:
    assert tuple(rope is not None for rope in read("smollm3", **keys).ropes) == rotates


LOCAL = Rope(1e4)
GLOBAL = Rope(1e6, LinearScaling(8.0))


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default"},
            }
        },
    ],
)
def test_sliding_layers_of_gemma3_have_their_own_rotary_embedding(read: Read, keys: Any) -> None:
    assert read("gemma3", sliding_window_pattern=2, **keys).ropes == (LOCAL, GLOBAL, LOCAL)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 5e5}}},
        {
            "rope_scaling": {"rope_type": "linear", "type": "default", "factor": 8},
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}},
        },
        {  # form of transformers 5 where all layers are of one kind
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": None,
                "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 5e5},
            }
        },
    ],
)
def test_full_layers_of_gemma3_in_any_form_of_config_json(read: Read, keys: Any) -> None:
    assert read("gemma3", sliding_window_pattern=2, **keys).ropes[1] == Rope(5e5, LinearScaling(8.0))


@pytest.mark.parametrize(
    ("keys", "dim"),
    [({}, 64), ({"head_dim": 20}, 10), ({"rope_parameters": {"partial_rotary_factor": 1.0}}, None)],
)
def test_glm_rotates_half_of_each_head_unless_config_json_says_otherwise(
    read: Read, keys: Any, dim: int | None
) -> None:
    assert read("glm4", **keys).ropes == (Rope(1e4, None, dim),) * 3


def test_ministral3_scales_queries_by_the_contexts_of_pre_training_before_them(read: Read) -> None:
    rope = {"rope_type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": 1, "original_max_position_embeddings": 128}
    assert read("ministral3", rope_parameters=rope).query_scales is None
    scaled = read("ministral3", rope_parameters={**rope, "llama_4_scaling_beta": 0.2})
    assert (scaled.query_scales, scaled.max_position_embeddings) == (QueryScales(0.2, 128), 512)
    assert scaled.ropes == (Rope(1e4, YarnScaling(4.0, 1.0, 32.0, 1.0, True, 128)),) * 3
    usual = read("ministral3", max_position_embeddings=1 << 18)
    assert (usual.query_scales, usual.max_position_embeddings) == (QueryScales(0.1, 16_384), 1 << 18)


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_the_text_part_of_a_mistral3(read: Read, kind: str) -> None:
    nothing = dict.fromkeys(MINIMAL, ...)
    text = {
        **MINIMAL,
        "model_type": kind,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 1e9},
        "head_dim": 24,
    }
    model = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "tie_word_embeddings": True}
    spec = read("mistral", **nothing, **model)
    assert (spec.family, spec.num_kv_heads, spec.head_dim, spec.tie_embeddings) == (kind, 2, 24, True)
    assert spec.ropes == (Rope(1e9),) * 3
    text["model_type"] = "mamba"
    with pytest.raises(UnsupportedModel, match=r"text_config.model_type is .mamba.; it must be mistral or ministral3"):
        read("mistral", **nothing, **model)


def test_full_layers_of_olmo3_alone_scale_their_rotary_embedding(read: Read) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    ropes = read("olmo3", num_hidden_layers=4, rope_theta=5e5, rope_scaling=scaling).ropes
    assert ropes == (*(Rope(5e5),) * 3, Rope(5e5, LinearScaling(8.0)))


def test_full_layers_of_exaone4_do_not_rotate_heads_beside_sliding_ones(read: Read) -> None:
    assert read("exaone4", sliding_window_pattern="LG").ropes == (Rope(1e4), None, Rope(1e4))
    assert read("exaone4", sliding_window=None).ropes == (Rope(1e4),) * 3


def test_full_layers_of_cohere2_do_not_rotate_heads(read: Read) -> None:
    assert read("cohere2", sliding_window_pattern=2).ropes == (Rope(1e4), None, Rope(1e4))


@pytest.mark.parametrize(
    ("family", "key", "has_bias", "parallel"),
    [
        ("cohere", "layer_norm_eps", False, True),
        ("cohere2", "layer_norm_eps", False, True),
        ("stablelm", "layer_norm_eps", True, False),
        ("phi", "layer_norm_eps", True, True),
        ("starcoder2", "norm_epsilon", True, False),
    ],
)
def test_families_with_layer_norm(read: Read, family: str, key: str, has_bias: bool, parallel: bool) -> None:
    spec = read(family, rms_norm_eps=1.0, **{key: 1e-3})
    assert (spec.norm_kind, spec.norm_eps, spec.norm_bias, spec.parallel) == ("layer", 1e-3, has_bias, parallel)
    assert read(family).norm_eps == 1e-5


def test_layer_norms_of_heads(read: Read) -> None:
    assert (read("cohere", use_qk_norm=True).qk_norm, read("stablelm", qk_layernorm=True).qk_norm) == (True, True)
    assert {read(family).qk_norm_kind for family in ("cohere", "stablelm")} == {"layer"}
    assert read("hunyuan_v1_dense").qk_norm_kind == "rotated"


def test_stablelm_and_phi_rotate_a_part_of_each_head(read: Read) -> None:
    assert read("stablelm").ropes == (Rope(1e4, None, 4),) * 3
    assert read("phi").ropes == (Rope(1e4, None, 8),) * 3
    assert read("stablelm", partial_rotary_factor=0.5, use_parallel_residual=True).parallel


def test_factors_of_minicpm(read: Read) -> None:
    """Null stands for a factor of branches and of logits that changes nothing."""
    factors = {"scale_emb": 12, "scale_depth": 1.5, "dim_model_base": 16, "num_hidden_layers": 4}
    for family in ("minicpm", "minicpm3"):
        spec = read(family, **factors)
        assert (spec.embedding_scale, spec.residual_scale, spec.logits_scale) == (12, 0.75, 0.25)
    spec = read("minicpm3", scale_depth=None, dim_model_base=None, q_lora_rank=None, v_head_dim=None, hidden_size=128)
    assert (spec.residual_scale, spec.logits_scale) == (1, 1)
    assert spec.latent is not None
    assert (spec.latent.query_rank, spec.latent.value_dim) == (0, 32)


def test_a_fixed_alpha_stretches_the_base_of_hunyuan(read: Read) -> None:
    """By alpha to the power of 16 / 14, for heads of 16 elements."""
    rope = {"type": "dynamic", "alpha": 128.0, "factor": 1.0}
    assert read("hunyuan_v1_dense", rope_scaling=rope).ropes == (Rope(1e4 * 2**8),) * 3


def test_layers_of_granite_swa_have_a_rotary_embedding_each_or_none(read: Read) -> None:
    spec = read("granite_swa", layer_rope_theta=[0, 1e4, 5e5])
    assert (spec.ropes, spec.sinks) == ((None, Rope(1e4), Rope(5e5)), True)
    assert read("granite_swa").ropes == (Rope(1e4),) * 3


def test_experts_of_ernie4_5(read: Read) -> None:
    spec = read("ernie4_5_moe")
    assert spec.experts == Experts(
        num_experts=64,
        top_k=6,
        intermediate_size=1536,
        rule=RoutingRule(normalized=True),
        layers=(False, True, True),
        choice_bias=True,
        shared_size=3072,
    )
    assert (spec.head_dim, spec.lm_head_bias, read("ernie4_5_moe", use_bias=True).lm_head_bias) == (16, False, True)


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"moe_layer_start_index": 0}, (True, True, True)),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": 1}, (True, True, False)),
        ({"moe_layer_interval": 2}, (False, True, False)),
    ],
)
def test_layers_of_ernie4_5_with_experts(read: Read, keys: Any, layers: tuple[bool, ...]) -> None:
    experts = read("ernie4_5_moe", **keys).experts
    assert experts is not None
    assert experts.layers == layers


def test_experts_of_glm4_5(read: Read) -> None:
    spec = read("glm4_moe", n_shared_experts=2, routed_scaling_factor=2.5, n_group=8, topk_group=4)
    assert spec.experts == Experts(
        num_experts=128,
        top_k=8,
        intermediate_size=1408,
        rule=RoutingRule(normalized=True, sigmoid=True, groups=8, kept_groups=4, eps=1e-20, scale=2.5),
        layers=(False, True, True),
        choice_bias=True,
        shared_size=2816,
    )
    assert spec.ropes == (Rope(1e4, None, 8),) * 3
    assert (spec.qk_norm, read("glm4_moe", use_qk_norm=True).qk_norm) == (False, True)
    assert read("glm4_moe", first_k_dense_replace=3).experts is None


def test_the_text_part_of_a_gemma3_with_images(read: Read) -> None:
    nothing = dict.fromkeys(MINIMAL, ...)
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240, "sliding_window": 1024}
    text["final_logit_softcapping"] = 30
    spec = read("gemma3", **nothing, architectures=["Gemma3ForConditionalGeneration"], text_config=text, eos_token_id=5)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (34, 8, 4, 256)
    assert (spec.vocab_size, spec.eos_token_ids, spec.tie_embeddings) == (262_208, (5,), True)
    assert spec.windows[:7] == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert spec.logits_softcap == 0


def test_multipliers_and_caps(read: Read) -> None:
    scales = {"embedding_multiplier": 12, "attention_multiplier": 0.5, "residual_multiplier": 0.25, "logits_scaling": 8}
    granite = read("granite", **scales)
    assert (granite.embedding_scale, granite.attention_scale, granite.residual_scale) == (12, 0.5, 0.25)
    assert granite.logits_scale == 0.125
    gemma = read("gemma2", query_pre_attn_scalar=64, final_logit_softcapping=None)
    assert (gemma.embedding_scale, gemma.attention_scale, gemma.norm_offset) == (8, 0.125, 1)
    assert (gemma.attention_softcap, gemma.logits_softcap, gemma.activation) == (50, 0, "gelu_tanh")
    assert read("gemma3", attn_logit_softcapping=50, final_logit_softcapping=30).attention_softcap == 0


def test_tensor_names_follow_the_family(read: Read) -> None:
    assert read("llama").names == TensorNames()
    assert read("phi3").names.qkv == ("self_attn.qkv_proj",)
    assert read("gemma2").names.mlp_norm == "pre_feedforward_layernorm"


@pytest.mark.parametrize(
    ("keys", "eos"),
    [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 5}, (5,)), ({"eos_token_id": None}, ()), ({}, (2,))],
)
def test_end_of_sequence_tokens(read: Read, keys: Any, eos: tuple[int, ...]) -> None:
    assert read("mistral", **keys).eos_token_ids == eos


def test_model_type_decides_where_there_are_no_architectures(read: Read) -> None:
    assert read("llama", architectures=..., model_type="qwen3").family == "qwen3"


@pytest.mark.parametrize(
    ("keys", "culprit"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel; it must be one of LlamaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": []}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": None, "model_type": "mamba"}, "mamba; it must be one of llama"),
        ({"architectures": None}, "model_type is missing"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"num_attention_heads": 128, "num_key_value_heads": 1}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": 1024}, "head_dim"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"hidden_size": 60}, "head_dim"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"is_causal": False}, "is_causal is false; it must be absent or true"),
        ({"mlp_bias": "no"}, "mlp_bias"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": [1, True]}, "eos_token_id"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 0.5}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope_scaling.type.*default, linear, llama3, yarn or longrope",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor is missing; .* 8 numbers"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1] * 7}}, "rope_parameters.short_factor"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": ["1"] * 8}}, r"short_factor\[0\]"),
        (
            {
                "rope_scaling": {
                    "type": "longrope",
                    **dict.fromkeys(("short_factor", "long_factor"), [1] * 8),
                    "original_max_position_embeddings": 1,
                }
            },
            "original_max_position_embeddings is 1; it must be at least 2",
        ),
        ({"rope_parameters": {"rope_type": 3}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1}}, "rope_scaling.high_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1.5}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 0.5}}, "rope_scaling.beta_fast"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "truncate": 0}}, "rope_scaling.truncate"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 0}}, "rope_scaling.attention_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5"),
    ],
)
def test_an_invalid_value_is_refused_by_name(read: Read, keys: Any, culprit: str) -> None:
    with pytest.raises(UnsupportedModel, match=culprit):
        read("llama", **keys)


@pytest.mark.parametrize("key", MINIMAL)
@pytest.mark.parametrize("value", [..., None, 0, -1, True, "64", 64.0, [64], 1 << 40])
def test_a_size_must_be_given_and_be_an_integer_in_range(read: Read, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"{key} is .*it must be an integer from 1 to"):
        read("llama", **{key: value})


@pytest.mark.parametrize(
    ("family", "keys", "culprit"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"sliding_window": True}, "sliding_window"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": -4}, "sliding_window"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ("qwen3", {"layer_types": [["full_attention"]] * 3}, "layer_types"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        ("gemma2", {"sliding_window": None}, "sliding_window"),
        ("cohere2", {"sliding_window": None}, "sliding_window is null; it must be an integer"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0; it must be"),
        ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ],
)
def test_an_invalid_window_is_refused_by_name(read: Read, family: str, keys: Any, culprit: str) -> None:
    with pytest.raises(UnsupportedModel, match=culprit):
        read(family, **keys)


@pytest.mark.parametrize(
    ("family", "keys", "culprit"),
    [
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 2, 1]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier"),
        ("granite", {"logits_scaling": "8"}, "logits_scaling"),
        ("phi3", {"partial_rotary_factor": 0.05}, "partial_rotary_factor"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "rope_parameters.partial_rotary_factor"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation.*gelu_pytorch_tanh"),
        ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.rope_type"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_theta": 1}}}, "full_attention.rope_theta"),
        ("olmo3", {"rope_theta": 1e4}, "rope_theta is 10000.0; it must be 500000"),
        ("olmo3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type"),
        ("olmo3", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ("exaone4", {"sliding_window_pattern": "LXG"}, "sliding_window_pattern is .LXG"),
        ("exaone4", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("seed_oss", {"attention_out_bias": 1}, "attention_out_bias"),
        ("ernie4_5", {"use_bias": 1}, "use_bias"),
        ("glm4", {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ("cohere2", {"logit_scale": 0}, "logit_scale is 0; it must be a number"),
        ("cohere2", {"layer_norm_eps": "1e-5"}, "layer_norm_eps"),
        ("cohere2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it must be absent or 1"),
        ("cohere", {"use_qk_norm": "yes"}, "use_qk_norm"),
        ("arcee", {"hidden_act": "silu"}, 'hidden_act is "silu"; it must be "relu2"'),
        ("granite_swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta is .*; it must be a list of 3 numbers"),
        ("granite_swa", {"layer_rope_theta": [0, 1e4, True]}, "a list of 3 numbers"),
        ("granite_swa", {"layer_rope_theta": [0, 1e4, 0.5]}, r"layer_rope_theta\[2\] is 0.5; it must be 0, or above 1"),
        ("granite_swa", {"layer_rope_theta": [0, 1e4, -1]}, r"layer_rope_theta\[2\] is -1; it must be a number"),
        ("granite_swa", {"sliding_window": None}, "sliding_window is null"),
        ("ernie4_5_moe", {"moe_k": 65}, "moe_k is 65; it must be an integer from 1 to 64"),
        ("ernie4_5_moe", {"moe_num_experts": [64, 64]}, "moe_num_experts is"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min is 0.5; it must be at most 1e-06"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval is 0"),
        (
            "ernie4_5_moe",
            {"moe_num_shared_experts": 1000},
            "moe_num_shared_experts is 1000; .* at most 1048576 columns",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; it must be null or absent"),
        ("minicpm", {"num_experts": 8}, "num_experts is 8; it must be an integer from 0 to 0"),
        ("minicpm", {"sparse_config": {"topk": 64}}, "sparse_config is .*; it must be absent or null"),
        ("minicpm", {"attention_bias": True}, "attention_bias is true; it must be absent or false"),
        ("minicpm3", {"mlp_bias": True}, "mlp_bias is true; it must be absent or false"),
        ("minicpm3", {"kv_lora_rank": 40}, "kv_lora_rank is 40; it must be a multiple of 32"),
        ("internlm3", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_scaling.type is .ntk"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts is 0; it must be an integer from 1"),
        ("glm4_moe", {"n_shared_experts": 1000}, "n_shared_experts is 1000; .* at most 1048576 columns"),
        ("glm4_moe", {"n_group": 3}, "n_group is 3"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("stablelm", {"qk_layernorm": 1}, "qk_layernorm"),
        ("stablelm", {"use_parallel_residual": 1}, "use_parallel_residual"),
        ("phi", {"hidden_act": "gelu"}, 'hidden_act is "gelu"; it must be "gelu_new" or "gelu_pytorch_tanh"'),
        ("phi", {"qk_layernorm": True}, "qk_layernorm is true; it must be absent or false"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings is true; it must be absent or false"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is .dynamic"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": -1}}, "rope_scaling.alpha is -1"),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": 1e-9}},
            "alpha is 1e-09; it must be at least 1",
        ),
        (
            "hunyuan_v1_dense",
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "alpha": 50}},
            "head_dim is 2; it must be at least 4",
        ),
        (
            "ministral3",
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 1},
            },
            "original_max_position_embeddings is 1; it must be an integer from 2 to",
        ),
        ("starcoder2", {"hidden_act": "silu"}, 'hidden_act is "silu"; it must be "gelu_pytorch_tanh"'),
        ("starcoder2", {"norm_epsilon": None}, "norm_epsilon is null"),
        ("starcoder2", {"use_bias": "yes"}, "use_bias"),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": -1}}, "rope_parameters.llama_4_scaling_beta"),
        (
            "ministral3",
            {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "original_max_position_embeddings is missing",
        ),
        ("gemma3", {"rope_local_base_freq": 0.5}, "rope_local_base_freq"),
        ("gemma3", {"rope_scaling": {"type": "linear", "factor": 8}}, "rope_scaling.type"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache is 0; it must be an integer from 1 to 16"),
        ("lfm2", {"conv_L_cache": 17}, "conv_L_cache is 17"),
        ("lfm2", {"conv_bias": 1}, "conv_bias"),
        ("lfm2", {"norm_eps": 0}, "norm_eps"),
        ("lfm2", {"layer_types": ["conv", "conv"]}, "layer_types is .*; it must be 3 times conv or full_attention"),
        ("lfm2", {"layer_types": ["conv", "mamba", ["conv"]]}, "3 times conv or full_attention"),
        ("lfm2", {"layer_types": ["conv"] * 3}, "full_attention for one layer or more"),
        ("lfm2", {"full_attn_idxs": []}, "full_attn_idxs is .*; it must be a list with a layer of 0 to 2"),
        ("lfm2", {"full_attn_idxs": [3, True, "1"]}, "full_attn_idxs"),
        ("lfm2", {"full_attn_idxs": 1}, "full_attn_idxs"),
        ("lfm2", {"block_ff_dim": "96"}, "intermediate_size"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of"),
        ("lfm2", {"block_ffn_dim_multiplier": -1}, "block_ffn_dim_multiplier"),
        ("lfm2", {"block_ffn_dim_multiplier": 1e6}, "block_ffn_dim_multiplier .*an MLP of 1 to 1048576 columns"),
        ("lfm2", {"intermediate_size": 1, "block_ffn_dim_multiplier": None}, "an MLP of 1 to"),
        ("granite_hybrid", {"mamba_n_heads": 5}, r"mamba_n_heads is 5; .* \(5\) divides the 128 columns of all heads"),
        ("granite_hybrid", {"mamba_d_head": 16}, "mamba_d_head is 16; it must be 32, the 128 columns of all heads"),
        ("granite_hybrid", {"mamba_n_groups": 3}, r"mamba_n_groups is 3; it must be a divisor of mamba_n_heads \(4\)"),
        ("granite_hybrid", {"mamba_n_groups": 8}, "mamba_n_groups is 8; it must be an integer from 1 to 4"),
        ("granite_hybrid", {"mamba_d_state": 257}, "mamba_d_state is 257; it must be an integer from 1 to 256"),
        ("granite_hybrid", {"mamba_d_conv": 0}, "mamba_d_conv is 0; it must be an integer from 1 to 16"),
        ("granite_hybrid", {"mamba_expand": 1 << 20}, "mamba_expand is 1048576; .* at most 262144 columns"),
        ("granite_hybrid", {"mamba_conv_bias": 1}, "mamba_conv_bias"),
        ("granite_hybrid", {"hidden_act": "gelu_pytorch_tanh"}, 'hidden_act is .*; it must be "silu"'),
        ("granite_hybrid", {"time_step_limit": [0.1]}, "time_step_limit is .*; it must be a list of two numbers"),
        ("granite_hybrid", {"time_step_limit": [0.2, 0.1]}, "the lower one first"),
        ("granite_hybrid", {"time_step_limit": [0.0, {"__float__": "NaN"}]}, "time_step_limit"),
        ("granite_hybrid", {"time_step_limit": [10**400, 10**500]}, "time_step_limit"),
        ("granite_hybrid", {"time_step_limit": [-1, 1]}, "that are not negative"),
        ("granite_hybrid", {"time_step_limit": [0.0, float("nan")]}, "time_step_limit"),
        ("granite_hybrid", {"layer_types": ["mamba"] * 3}, "attention for one layer or more"),
        ("granite_hybrid", {"layer_types": ["mamba", "conv", "attention"]}, "3 times mamba, linear_attention, "),
        ("granite_hybrid", {"layer_types": ["attention"]}, "3 times mamba"),
        ("granite_hybrid", {"layer_types": ...}, "layer_types is missing"),
        ("granite_hybrid", {"num_local_experts": -1}, "num_local_experts is -1; it must be an integer from 0 to 1024"),
        ("granite_hybrid", {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M-M"},
            "hybrid_override_pattern .* attention for one layer or more",
        ),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M*X"},
            "hybrid_override_pattern is .*; it must be 1 to 1024 times M",
        ),
        ("nemotron_h", {"hybrid_override_pattern": None}, "layers_block_type is missing"),
        ("nemotron_h", {"layers_block_type": ["mamba", 1]}, "layers_block_type is"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, 'mlp_hidden_act is "silu"; it must be "relu2"'),
        ("nemotron_h", {"mamba_hidden_act": "relu"}, "mamba_hidden_act"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias is true"),
        ("nemotron_h", {"n_groups": 3}, r"n_groups is 3; it must be a divisor of mamba_num_heads \(4\)"),
        ("nemotron_h", {"mamba_head_dim": 257}, "mamba_head_dim is 257; it must be an integer from 1 to 256"),
        ("nemotron_h", {"layer_norm_epsilon": 0}, "layer_norm_epsilon is 0"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "E*", "moe_latent_size": 8},
            "moe_latent_size is 8; .* absent or null",
        ),
        ("nemotron_h", {"hybrid_override_pattern": "E*", "n_group": 3}, "n_group is 3"),
        ("nemotron_h", {"hybrid_override_pattern": "E*", "n_group": 8}, "n_group is 8"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "E*", "n_group": 4, "num_experts_per_tok": 3},
            "topk_group is 1; .* 3 experts or more",
        ),
        ("falcon_h1", {"mamba_d_ssm": 97}, r"mamba_d_ssm is 97; .* \(4\) divides the 97 columns of all heads"),
        ("falcon_h1", {"mamba_d_ssm": None, "mamba_n_heads": 3}, "mamba_n_heads is 3; .* divides the 128 columns"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers is .*; it must be a list of 2 numbers"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 1.0, 0.0, 1.0, 1.0]}, r"ssm_multipliers\[2\] is 0.0"),
        ("falcon_h1", {"key_multiplier": -1}, "key_multiplier"),
        ("falcon_h1", {"ssm_out_multiplier": "1"}, "ssm_out_multiplier"),
        ("falcon_h1", {"mamba_rms_norm": 1}, "mamba_rms_norm"),
    ],
)
def test_an_invalid_value_of_one_family_is_refused_by_name(read: Read, family: str, keys: Any, culprit: str) -> None:
    with pytest.raises(UnsupportedModel, match=culprit):
        read(family, **keys)


@pytest.mark.parametrize(
    ("keys", "is_convolution"),
    [
        ({}, (False, False, False)),
        ({"full_attn_idxs": [1]}, (True, False, True)),
        ({"full_attn_idxs": [2, 7]}, (True, True, False)),
        ({"layer_types": ["conv", "full_attention", "conv"]}, (True, False, True)),
        ({"layer_types": ["full_attention", "conv", "conv"], "full_attn_idxs": [1]}, (False, True, True)),
    ],
)
def test_layers_with_convolutions(read: Read, keys: Any, is_convolution: tuple[bool, ...]) -> None:
    spec = read("lfm2", **keys)
    assert spec.convolutions is not None
    assert spec.convolutions.layers == is_convolution
    assert tuple(rope is None for rope in spec.ropes) == is_convolution
    assert spec.attention_kinds == ((0, (spec.num_kv_heads, spec.head_dim)),) * is_convolution.count(False)


@pytest.mark.parametrize(
    ("keys", "size"),
    [
        ({}, 256),
        ({"block_ff_dim": 12288, "intermediate_size": 10752}, 8192),
        ({"intermediate_size": 6656}, 4608),
        ({"intermediate_size": 100, "block_multiple_of": 24, "block_ffn_dim_multiplier": 1.1}, 72),
        ({"intermediate_size": 100, "block_ffn_dim_multiplier": None}, 66),
        ({"intermediate_size": 100, "block_auto_adjust_ff_dim": False}, 100),
    ],
)
def test_the_size_of_an_mlp_that_is_adjusted(read: Read, keys: Any, size: int) -> None:
    assert read("lfm2", **keys).intermediate_size == size


def test_keys_of_lfm2(read: Read) -> None:
    spec = read("lfm2", norm_eps=1e-4, rms_norm_eps=1e-3, hidden_act="gelu_pytorch_tanh", conv_L_cache=4)
    assert (spec.norm_eps, spec.activation, spec.tie_embeddings) == (1e-4, "silu", True)
    assert spec.convolutions is not None
    assert (spec.convolutions.taps, spec.convolutions.bias) == (4, False)
    assert not read("lfm2", tie_embedding=False).tie_embeddings
    assert not read("lfm2", tie_word_embeddings=False).tie_embeddings
    assert read("lfm2", conv_bias=True).convolutions == Convolutions(taps=3, bias=True, layers=(False,) * 3)


def test_keys_of_granite_hybrid(read: Read) -> None:
    spec = read("granite_hybrid", mamba_d_state=64, time_step_limit=[0.0, float("inf")], residual_multiplier=0.25)
    assert spec.mamba == Mamba(
        num_heads=4,
        head_dim=32,
        num_groups=1,
        state_size=64,
        taps=4,
        layers=(True, True, False),
        conv_bias=True,
    )
    assert (spec.mamba.inner_size, spec.mamba.conv_size) == (128, 256)
    assert (spec.attention_layers, spec.kv_layers) == ((False, False, True), (2,))
    assert (spec.ropes, spec.residual_scale) == ((None,) * 3, 0.25)
    assert read("granite_hybrid", layer_types=["attention"] * 3).mamba is None
    ropes = read("granite_hybrid", position_embedding_type="rope", rope_theta=500.0).ropes
    assert ropes == (None, None, Rope(500.0))
    unlimited = read("granite_hybrid", time_step_limit=[0.0, {"__float__": "Infinity"}]).mamba
    assert unlimited is not None
    assert unlimited.time_limits == (0.0, float("inf"))
    limited = read("granite_hybrid", time_step_limit=[0.5, 2]).mamba
    assert limited is not None
    assert limited.time_limits == (0.5, 2.0)


def test_experts_of_granite_hybrid(read: Read) -> None:
    assert read("granite_hybrid").experts is None
    spec = read("granite_hybrid", num_local_experts=6, intermediate_size=40, residual_multiplier=0.25)
    assert spec.experts == Experts(
        num_experts=6,
        top_k=2,
        intermediate_size=40,
        rule=RoutingRule(normalized=True, scale=0.25),
        layers=(True, True, True),
        shared_size=96,
    )


def test_keys_of_nemotron_h(read: Read) -> None:
    spec = read("nemotron_h", layer_norm_epsilon=1e-4, use_bias=True)
    assert (spec.family, spec.num_layers, spec.norm_eps, spec.activation) == ("nemotron_h", 3, 1e-4, "relu_squared")
    assert (spec.attention_layers, spec.mlp_layers) == ((False, True, False), (False, False, True))
    assert spec.mamba == Mamba(
        num_heads=4,
        head_dim=64,
        num_groups=2,
        state_size=128,
        taps=4,
        layers=(True, False, False),
        conv_bias=True,
        in_bias=True,
        out_bias=True,
    )
    types = ["linear_attention", "full_attention", "moe", "moe"]
    spec = read("nemotron_h", layers_block_type=types, n_group=2, topk_group=1, routed_scaling_factor=2.5)
    assert (spec.family, spec.num_layers) == ("nemotron_h_moe", 4)
    assert spec.experts == Experts(
        num_experts=8,
        top_k=2,
        intermediate_size=7688,
        rule=RoutingRule(normalized=True, sigmoid=True, groups=2, kept_groups=1, eps=1e-20, scale=2.5),
        layers=(False, False, True, True),
        choice_bias=True,
        shared_size=7688,
    )


def test_keys_of_falcon_h1(read: Read) -> None:
    spec = read(
        "falcon_h1",
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        projectors_bias=True,
        mlp_multipliers=[0.5, 0.25],
        key_multiplier=0.5,
        attention_in_multiplier=2,
        ssm_in_multiplier=1.5,
        ssm_multipliers=[1, 2, 3, 4, 5],
        lm_head_multiplier=0.125,
    )
    assert (spec.gate_scale, spec.mlp_out_scale, spec.logits_scale) == (0.5, 0.25, 0.125)
    assert (spec.attention_scale, spec.attention_in_scale, spec.attention_out_scale) == (0.125, 2.0, 1.0)
    assert spec.attention_layers == (True, True, True)
    assert spec.mamba == Mamba(
        num_heads=4,
        head_dim=24,
        num_groups=1,
        state_size=256,
        taps=4,
        layers=(True, True, True),
        beside_attention=True,
        conv_bias=True,
        out_bias=True,
        input_scale=1.5,
        scales=(1.0, 2.0, 3.0, 4.0, 5.0),
    )
    plain = read("falcon_h1", mamba_d_ssm=None).mamba
    assert plain is not None
    assert (plain.norm, plain.gate_first, plain.head_dim, plain.scales) == (False, False, 32, (1.0,) * 5)


def test_no_folder_and_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        read_spec(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize("text", ["", "{", '{"a": 1', "[1]", '"config"', "null", "\xff", "[" * 100_000])
def test_a_config_that_is_not_a_json_object_is_corrupt(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CorruptCheckpoint, match=r"config\.json"):
        read_spec(tmp_path)
