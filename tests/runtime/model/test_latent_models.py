"""Models with latent attention: the deciding keys of config.json and GGUF files, and the refused ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import ModelError, UnsupportedModel, WrongTensor
from quire.runtime.model import pack_model, read_spec
from quire.runtime.model.packed_model import kv_layout
from quire.runtime.model.weights.latent_weights import LatentWeights

from tests.support.gguf_files import Tensor, describe, stored_tensors, write


@pytest.fixture
def edited(goldens: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write a golden as a GGUF file with other metadata and tensors; None is absent."""

    def write_edited(family: str, metadata: dict[str, Any], tensors: dict[str, Tensor | None] | None = None) -> Path:
        keys = {**describe(goldens / family), **metadata}
        arrays = {**stored_tensors(goldens / family, "F32"), **(tensors or {})}
        return write(
            tmp_path / f"{family}.gguf",
            {key: value for key, value in keys.items() if value is not None},
            {name: tensor for name, tensor in arrays.items() if tensor is not None},
        )

    return write_edited


def test_the_cache_has_one_latent_and_one_rotated_key_per_token_and_layer(goldens: Path) -> None:
    spec = read_spec(goldens / "deepseek_v3")
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (5, 1, 64 + 16)
    layout = kv_layout(spec, "bf16", 32)
    assert (layout.values_in_keys, layout.token_bytes) == (64, 3 * (64 + 16) * 2)


def test_scores_have_the_square_of_yarns_factor(goldens: Path) -> None:
    """0.1 * 0.707 * ln(8) + 1 is 1.1470165; V2's cosines and sines have a factor of 1."""
    spec = read_spec(goldens / "deepseek_v2")
    assert spec.attention_scale == pytest.approx(40**-0.5 * 1.1470165**2, rel=1e-6)
    (rope,) = set(spec.ropes)
    assert rope is not None
    assert rope.dim == 16
    assert getattr(rope.scaling, "attention_factor", None) == 1.0


def test_pairs_of_rows_half_a_part_apart_are_read_where_config_json_says_so(
    goldens: Path, model_folder: Callable[..., Path]
) -> None:
    folder = model_folder("deepseek_v3", lambda config: config.update(rope_interleave=False))
    like = read_spec(goldens / "deepseek_v3")
    spec = read_spec(folder)
    assert spec.latent is not None
    assert like.latent is not None
    assert spec.latent == replace(like.latent, neighboring_pairs=False)
    plain, paired = (queries(each).reshape(5, 40, 40) for each in (folder, goldens / "deepseek_v3"))
    order = [*range(24), *range(24, 40, 2), *range(25, 40, 2)]
    np.testing.assert_array_equal(plain[:, order], paired)


def test_null_is_false_as_in_transformers(model_folder: Callable[..., Path]) -> None:
    keys = {"rope_interleave": None, "norm_topk_prob": None}
    spec = read_spec(model_folder("deepseek_v3", lambda config: config.update(keys)))
    assert spec.latent is not None
    assert spec.experts is not None
    assert not spec.latent.neighboring_pairs
    assert not spec.experts.rule.normalized


def queries(folder: Path) -> Any:
    """Return the projection of queries of the first layer."""
    mixer = pack_model(folder, "f32").weights.layers[0].mixer
    assert isinstance(mixer, LatentWeights)
    return mixer.queries.unpack()


@pytest.mark.parametrize(
    ("family", "changes", "culprit"),
    [
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, 'topk_method is .*; it must be "greedy"'),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid"; it must be "softmax"'),
        ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func is "softmax"; it must be "sigmoid"'),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is true"),
        ("deepseek_v3", {"n_group": 3}, "n_group is 3; it must be 1, or groups of 2 or more of the 8 experts"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group is 5; it must be an integer from 1 to 4"),
        ("deepseek_v3", {"kv_lora_rank": 48}, "kv_lora_rank is 48; it must be a multiple of 32"),
        ("deepseek_v3", {"kv_lora_rank": 1024}, "kv_lora_rank is 1024; it must be an integer from 32 to 992"),
        ("deepseek_v3", {"v_head_dim": 40}, "v_head_dim is 40; it must be a multiple of 32"),
        ("deepseek_v3", {"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15; it must be even"),
        ("deepseek_v3", {"qk_rope_head_dim": 600}, "qk_rope_head_dim is 600; it must be an integer from 2 to 512"),
        ("deepseek_v3", {"q_lora_rank": -1}, "q_lora_rank is -1"),
        ("deepseek_v2", {"q_lora_rank": 0}, "q_lora_rank is 0; it must be null or at least 1"),
        (
            "deepseek_v3",
            {"n_shared_experts": 1024, "moe_intermediate_size": 1 << 20},
            "n_shared_experts is 1024; it must be such that shared experts have at most 1048576 columns",
        ),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types is .* 3 times dense or sparse"),
        ("glm4_moe_lite", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7"),
    ],
)
def test_a_config_with_other_parts_is_refused_by_name(
    model_folder: Callable[..., Path], family: str, changes: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(UnsupportedModel, match=culprit):
        read_spec(model_folder(family, lambda config: config.update(changes)))


def test_a_tensor_of_latents_with_another_shape_is_refused(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("deepseek_v3", lambda config: config.update(v_head_dim=64))
    with pytest.raises(WrongTensor, match=r"kv_b_proj.weight .* is \[280, 64\]; config.json implies \[440, 64\]"):
        pack_model(folder, "f32")


@pytest.mark.parametrize(
    ("family", "metadata", "tensors", "culprit"),
    [
        (
            "deepseek_v2",
            {"deepseek2.attention.key_length_mla": None},
            {},
            "deepseek2.attention.key_length_mla is missing",
        ),
        ("deepseek_v2", {"deepseek2.attention.key_length_mla": 16}, {}, "deepseek2.attention.key_length_mla is 16"),
        ("deepseek_v2", {"deepseek2.expert_group_count": 4}, {}, "deepseek2.expert_group_count"),
        ("deepseek_v2", {"deepseek2.expert_gating_func": 3}, {}, "deepseek2.expert_gating_func is"),
        ("deepseek_v2", {"deepseek2.expert_gating_func": [2]}, {}, r"deepseek2.expert_gating_func is \[2\]"),
        (
            "deepseek_v2",
            {"deepseek2.rope.scaling.yarn_log_multiplier": "0.1"},
            {},
            'yarn_log_multiplier is "0.1"; it must be a number',
        ),
        ("deepseek_v3", {"deepseek2.expert_weights_norm": "yes"}, {}, "expert_weights_norm is .*; it must be true or"),
        ("deepseek_v3", {"deepseek2.expert_group_count": [4]}, {}, "expert_group_count is .*; it must be an integer"),
        ("deepseek_v2", {"deepseek2.attention.kv_lora_rank": 96}, {}, "attn_kv_a_mqa.weight"),
        ("deepseek_v3", {"deepseek2.expert_gating_func": None}, {}, "deepseek2.expert_(group_count|weights_norm)"),
        ("deepseek_v3", {"deepseek2.leading_dense_block_count": 3}, {}, "blk.1.ffn_gate.weight"),
        ("deepseek_v3", {}, {"blk.1.attn_k_b.weight": None}, "blk.1.attn_k_b.weight"),
        ("deepseek_v3", {}, {"blk.1.exp_probs_b.bias": None}, "blk.1.exp_probs_b.bias"),
    ],
)
def test_a_file_of_another_form_is_refused_by_name(
    edited: Callable[..., Path], family: str, metadata: dict[str, Any], tensors: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ModelError, match=culprit):
        pack_model(edited(family, metadata, tensors), "f32")


def test_layers_that_predict_further_tokens_are_not_read(goldens: Path, edited: Callable[..., Path]) -> None:
    extra = stored_tensors(goldens / "deepseek_v3", "F32")["blk.2.attn_norm.weight"]
    metadata = {"deepseek2.block_count": 4, "deepseek2.nextn_predict_layers": 1}
    spec = read_spec(edited("deepseek_v3", metadata, {"blk.3.attn_norm.weight": extra}))
    assert spec.num_layers == 3
