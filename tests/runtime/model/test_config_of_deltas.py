"""Reading of families with gated delta nets from config.json: Qwen3-Next and Qwen3.5, and values that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.kernels.ops import RoutingRule
from quire.runtime.common.errors import UnsupportedModel
from quire.runtime.model import DecoderSpec
from quire.runtime.model.spec import Experts, GatedDelta, Rope

from tests.runtime.model.conftest import MINIMAL

Read = Callable[..., DecoderSpec]


DELTA = GatedDelta(
    num_key_heads=16,
    num_value_heads=32,
    key_dim=128,
    value_dim=128,
    taps=4,
    norm_eps=1e-6,
    layers=(True, True, True, False),
)


@pytest.mark.parametrize(("model_type", "kv_heads"), [("qwen3_5", 4), ("qwen3_5_text", 4), ("qwen3_next", 2)])
def test_defaults(read: Read, model_type: str, kv_heads: int) -> None:
    spec = read(model_type)
    assert spec.delta == DELTA
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_offset) == (kv_heads, 256, 1.0)
    assert (spec.qk_norm, spec.gated_heads, spec.qkv_bias, spec.tie_embeddings) == (True, True, False, False)
    assert spec.ropes == (None, None, None, Rope(10_000.0, dim=64))
    assert [window for window, _ in spec.attention_kinds] == [0]


def test_defaults_of_qwen3_5_moe(read: Read) -> None:
    spec = read("qwen3_5_moe")
    assert spec.delta == DELTA
    assert spec.experts == Experts(
        num_experts=256,
        top_k=8,
        intermediate_size=512,
        rule=RoutingRule(normalized=True),
        layers=(True,) * 4,
        shared_size=512,
        shared_gate=True,
    )


def test_layers_of_qwen3_next_with_experts(read: Read) -> None:
    keys = {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False, "moe_intermediate_size": 24}
    spec = read("qwen3_next", **keys, shared_expert_intermediate_size=40, mlp_only_layers=[0], decoder_sparse_step=2)
    assert spec.experts == Experts(
        num_experts=6,
        top_k=2,
        intermediate_size=24,
        rule=RoutingRule(normalized=False),
        layers=(False, True, False, True),
        shared_size=40,
        shared_gate=True,
    )
    assert read("qwen3_next", mlp_only_layers=[0, 1, 2, 3]).experts is None


def test_the_text_part_of_a_model_with_a_vision_tower(read: Read) -> None:
    text = {**MINIMAL, "hidden_size": 32, "head_dim": 32, "linear_value_head_dim": 64, "eos_token_id": None}
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
    text |= {"rope_parameters": rope, "tie_word_embeddings": True}
    spec = read("qwen3_5", text_config=text, vision_config={}, eos_token_id=7, num_hidden_layers=9)
    assert (spec.hidden_size, spec.num_layers, spec.eos_token_ids, spec.tie_embeddings) == (32, 4, (), True)
    assert spec.ropes[3] == Rope(1e6, dim=16, axes=(0, 1, 2, 0, 1, 2, 0, 1))
    assert spec.delta is not None
    assert spec.delta.value_dim == 64
    del text["eos_token_id"]
    assert read("qwen3_5", text_config=text, eos_token_id=7, tie_word_embeddings=False).eos_token_ids == (7,)
    assert not read("qwen3_5", text_config=text, tie_word_embeddings=False).tie_embeddings
    assert read("qwen3_5", text_config=text).ropes[3] == Rope(1e6, dim=16)


def test_defaults_of_olmo_hybrid(read: Read) -> None:
    spec = read("olmo_hybrid", num_hidden_layers=6)
    assert spec.delta == GatedDelta(
        num_key_heads=4,
        num_value_heads=4,
        key_dim=12,
        value_dim=24,
        taps=4,
        norm_eps=1e-5,
        layers=(True, True, True, False, True, True),
        rate_scale=2.0,
        pre_norms=True,
    )
    assert (spec.ropes[2:4], spec.qk_norm_rows, spec.eos_token_ids) == ((None, Rope(10_000.0)), True, (100_257,))
    assert [spec.norms_input(layer) for layer in range(6)] == [True, True, True, False, True, True]
    assert [spec.norms_output(layer) for layer in range(6)] == [False, False, False, True, False, False]


def test_keys_of_olmo_hybrid(read: Read) -> None:
    spec = read("olmo_hybrid", num_hidden_layers=2, linear_key_head_dim=20, linear_allow_neg_eigval=False)
    assert spec.delta is not None
    assert (spec.delta.layers, spec.delta.key_dim, spec.delta.value_dim) == ((True, False), 20, 40)
    assert spec.delta.rate_scale == 1.0
    assert read("olmo_hybrid", rope_theta=5e5).ropes == (None, None, None, Rope(5e5))
    assert read("olmo_hybrid", rope_parameters={"rope_theta": 1e6}).ropes[3] == Rope(1e6)
    assert read("olmo_hybrid", rope_parameters={"rope_theta": None, "rope_type": "default"}).ropes[3] is None


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"linear_key_head_dim": 300}, "linear_key_head_dim is 300; it must be an integer from 1 to 256"),
        ({"linear_key_head_dim": "20"}, 'linear_key_head_dim is "20"'),
        ({"linear_value_head_dim": 0}, "linear_value_head_dim is 0"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads is 4; it must be a multiple of linear_num_key_heads"),
        ({"linear_num_key_heads": 4.5}, "linear_num_key_heads is 4.5"),
        ({"linear_allow_neg_eigval": 1}, "linear_allow_neg_eigval is 1"),
        ({"hidden_size": "64"}, 'hidden_size is "64"'),
        ({"hidden_size": 10**400}, "hidden_size is 10"),
        ({"num_hidden_layers": 1}, None),
    ],
)
def test_values_of_olmo_hybrid_that_are_refused(read: Read, keys: Any, complaint: str | None) -> None:
    if complaint is None:
        assert read("olmo_hybrid", **keys).delta is None
        return
    with pytest.raises(UnsupportedModel, match=complaint):
        read("olmo_hybrid", **keys)


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"full_attention_interval": 2}, (True, False, True, False)),
        ({"full_attention_interval": 1}, None),
        ({"layer_types": ["full_attention"] * 4}, None),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"], "full_attention_interval": 2}, DELTA.layers),
    ],
)
def test_layers_with_linear_attention(read: Read, keys: Any, layers: tuple[bool, ...] | None) -> None:
    delta = read("qwen3_5", **keys).delta
    assert (None if delta is None else delta.layers) == layers


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, '"silu", which follows the convolution'),
        ({"layer_types": ["linear_attention"] * 3}, "4 times linear_attention or full_attention"),
        ({"layer_types": ["conv"] * 4}, "4 times linear_attention or full_attention"),
        ({"layer_types": [["linear_attention"]] * 4}, "4 times linear_attention or full_attention"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types .* such that one layer or more has full_attention"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3; it must be such that one layer or more has full_attention"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads is 24; it must be a multiple of linear_num_key_heads"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads is 0"),
        ({"linear_key_head_dim": 257}, "linear_key_head_dim is 257; it must be an integer from 1 to 256"),
        ({"linear_value_head_dim": 0}, "linear_value_head_dim is 0"),
        ({"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim is 17; it must be an integer from 1 to 16"),
        ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is null"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_values_that_are_refused(read: Read, keys: Any, complaint: str) -> None:
    with pytest.raises(UnsupportedModel, match=complaint):
        read("qwen3_5", **keys)


def test_sections_of_mrope_that_are_not_the_rotated_pairs(read: Read) -> None:
    with pytest.raises(UnsupportedModel, match="three integers whose sum is 32, the rotated pairs of a head"):
        read("qwen3_5", vision_config={}, rope_parameters={"rope_theta": 1e4, "mrope_section": [64, 32, 32]})


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"num_experts": 2000}, "num_experts is 2000"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok is 257; it must be an integer from 1 to 256"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    ],
)
def test_experts_that_are_refused(read: Read, keys: Any, complaint: str) -> None:
    with pytest.raises(UnsupportedModel, match=complaint):
        read("qwen3_5_moe", **keys)
