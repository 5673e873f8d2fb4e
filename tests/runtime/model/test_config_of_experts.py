"""Reading of mixtures of experts from config.json: which layers have experts, how many, and values that are refused."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import pytest
from quire.kernels.ops import RoutingRule
from quire.runtime.common.errors import UnsupportedModel
from quire.runtime.model import DecoderSpec
from quire.runtime.model.spec import Experts, Rope, YarnScaling

Read = Callable[..., DecoderSpec]


def test_defaults_of_mixtral(read: Read) -> None:
    spec = read("mixtral")
    assert spec.experts == Experts(
        num_experts=8, top_k=2, intermediate_size=96, rule=RoutingRule(normalized=True), layers=(True, True, True, True)
    )
    assert (spec.norm_eps, spec.windows, spec.eos_token_ids) == (1e-5, (0, 0, 0, 0), (2,))


def test_defaults_of_qwen3_moe(read: Read) -> None:
    spec = read("qwen3_moe")
    assert spec.experts == Experts(
        num_experts=128,
        top_k=8,
        intermediate_size=768,
        rule=RoutingRule(normalized=False),
        layers=(True, True, True, True),
    )
    assert (spec.qk_norm, spec.head_dim, spec.windows) == (True, 16, (0, 0, 0, 0))


def test_defaults_of_gpt_oss(read: Read) -> None:
    spec = read("gpt_oss", num_key_value_heads=2)
    assert spec.experts == Experts(
        num_experts=128, top_k=4, intermediate_size=96, rule=RoutingRule(normalized=True), layers=(True,) * 4, bias=True
    )
    assert (spec.windows, spec.head_dim, spec.norm_eps) == ((128, 0, 128, 0), 64, 1e-5)
    assert (spec.qkv_bias, spec.o_bias, spec.sinks, spec.activation) == (True, True, True, "clamped_silu")
    scaling = YarnScaling(32.0, 0.1 * log(32) + 1, 32.0, 1.0, False, 4096)
    assert spec.ropes == (Rope(150_000.0, scaling),) * 4
    assert spec.quantized == {}
    for key in ("rope_scaling", "rope_parameters"):
        assert read("gpt_oss", num_key_value_heads=2, **{key: None}).ropes == spec.ropes


def test_layers_and_rope_of_gpt_oss(read: Read) -> None:
    types = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    spec = read("gpt_oss", num_key_value_heads=2, layer_types=types, sliding_window=7, rope_parameters=rope)
    assert (spec.windows, spec.ropes[0]) == ((0, 7, 0, 0), Rope(1000.0))


def test_quantized_experts_of_gpt_oss_are_in_mxfp4(read: Read) -> None:
    spec = read("gpt_oss", num_key_value_heads=2, quantization_config={"quant_method": "mxfp4"})
    assert set(spec.quantized.values()) == {"MXFP4"}
    assert len(spec.quantized) == 8
    assert "model.layers.3.mlp.experts.down_proj.weight" in spec.quantized


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"decoder_sparse_step": 5}, (False, False, False, False)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"mlp_only_layers": None}, (True, True, True, True)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (False, False, False, True)),
    ],
)
def test_some_layers_of_qwen3_moe_have_an_mlp(read: Read, keys: Any, layers: tuple[bool, ...]) -> None:
    experts = read("qwen3_moe", **keys).experts
    assert experts is not None
    assert experts.layers == layers


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_qwen3_moe_as_transformers_4_and_5_write_it(read: Read, key: str) -> None:
    keys = {key: 16, "num_experts_per_tok": 4, "moe_intermediate_size": 40, "norm_topk_prob": True}
    experts = read("qwen3_moe", **keys).experts
    assert experts is not None
    assert (experts.num_experts, experts.top_k, experts.intermediate_size, experts.rule.normalized) == (16, 4, 40, True)


def test_all_layers_of_qwen3_moe_slide_or_none(read: Read) -> None:
    assert read("qwen3_moe", sliding_window=8).windows == (0, 0, 0, 0)
    assert read("qwen3_moe", sliding_window=8, use_sliding_window=True).windows == (8, 8, 8, 8)
    assert read("mixtral", sliding_window=8).windows == (8, 8, 8, 8)


@pytest.mark.parametrize(
    ("family", "keys", "complaint"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0; it must be an integer from 1 to 1024"),
        ("mixtral", {"num_local_experts": 2000}, "num_local_experts is 2000"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be an integer from 1 to 8"),
        ("mixtral", {"num_experts_per_tok": True}, "num_experts_per_tok is true"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ("qwen3_moe", {"num_experts": "8"}, 'num_experts is "8"'),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list of layer numbers"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1; it must be true or false"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0; it must be absent or 7"),
        ("gpt_oss", {"hidden_act": "gelu_pytorch_tanh"}, 'hidden_act is "gelu_pytorch_tanh"; it must be "silu"'),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, 'quantization_config.quant_method is "gptq"'),
        ("gpt_oss", {"quantization_config": {"bits": 4}}, "quantization_config.quant_method is missing"),
    ],
)
def test_values_that_are_refused(read: Read, family: str, keys: Any, complaint: str) -> None:
    with pytest.raises(UnsupportedModel, match=complaint):
        read(family, **keys)


def test_keys_of_lfm2_moe(read: Read) -> None:
    types = ["conv", "full_attention", "conv", "conv"]
    spec = read("lfm2_moe", layer_types=types, num_key_value_heads=2, norm_eps=1e-4)
    assert spec.experts == Experts(
        num_experts=32,
        top_k=4,
        intermediate_size=1792,
        rule=RoutingRule(normalized=True, sigmoid=True, eps=1e-6),
        layers=(False, False, True, True),
        choice_bias=True,
    )
    assert (spec.intermediate_size, spec.norm_eps, spec.tie_embeddings, spec.qk_norm) == (96, 1e-4, True, True)
    assert spec.convolutions is not None
    assert (spec.convolutions.taps, spec.convolutions.layers) == (3, (True, False, True, True))
    keys = {"num_dense_layers": 0, "norm_topk_prob": False, "routed_scaling_factor": 2.5, "use_expert_bias": False}
    experts = read("lfm2_moe", layer_types=types, num_key_value_heads=2, **keys).experts
    assert experts is not None
    assert experts.rule == RoutingRule(normalized=False, sigmoid=True, eps=1e-6, scale=2.5)
    assert (experts.layers, experts.choice_bias) == ((True,) * 4, False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_dense_layers": -1}, "num_dense_layers is -1; it must be an integer from 0 to 1024"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok is 33; it must be an integer from 1 to 32"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"use_expert_bias": "yes"}, "use_expert_bias"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
        ({"num_experts": 1025}, "num_experts is 1025"),
        ({"layer_types": ["conv"] * 4}, "full_attention for one layer or more"),
    ],
)
def test_values_of_lfm2_moe_that_are_refused(read: Read, keys: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read("lfm2_moe", **{"num_key_value_heads": 2, **keys})
