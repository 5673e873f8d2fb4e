"""Folders that other libraries quantized: the value of the weights, their form in memory, and refusals."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.kernels.pack import PackedMatrix
from quire.runtime.cli.show import show
from quire.runtime.common.config import WeightDtype
from quire.runtime.common.errors import CorruptCheckpoint, MissingTensor, ModelError, UnsupportedModel, WrongTensor
from quire.runtime.model import PackedModel, pack_model, plan_memory, read_spec
from quire.runtime.model.families.registry import open_model
from quire.runtime.model.weights import quantized
from quire.runtime.model.weights.decoder_weights import plan_weights
from quire.runtime.model.weights.layer_weights import ExpertWeights, LayerWeights, MlpWeights
from safetensors.numpy import load_file

from tests.support.quantized_folders import (
    AWQ,
    COMPRESSED,
    GPTQ,
    HIDDEN,
    LAYER,
    MATRICES,
    Array,
    Make,
    awq,
    common_folders,
    folder_of,
    fp8,
    gptq,
    int8,
    save_tensors,
)
from tests.support.quantized_folders import FP8_BLOCKS as FP8
from tests.support.quantized_folders import words as words_of


def _fp8_blocks(*sizes: list[int] | str) -> dict[str, Any]:
    """Return the config of one group of modules per size of blocks."""
    weights = [{"num_bits": 8, "type": "float", "strategy": "block", "block_structure": size} for size in sizes]
    groups = {f"group_{index}": {"weights": each} for index, each in enumerate(weights)}
    return {**COMPRESSED, "format": "float-quantized", "config_groups": groups}


def _int8(config: dict[str, Any]) -> dict[str, Any]:
    return {
        **config,
        "format": "int-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
    }


# config, matrices, and the type in memory with `auto`: its numbers and scales are those of the file
IN_ANOTHER_ORDER: dict[str, tuple[dict[str, Any], Make, str]] = {
    "gptq, act-order": (GPTQ | {"desc_act": True}, gptq(act_order=True), "q4"),
    "gptq, act-order, 8 bits": (GPTQ | {"desc_act": True, "bits": 8}, gptq(bits=8, act_order=True), "q8"),
    "gptq, act-order and zero points": (GPTQ | {"desc_act": True}, gptq(act_order=True, sym=False), "q4_z"),
    "words, act-order": (COMPRESSED, words_of(order="group"), "q4"),
}
KEPT: dict[str, tuple[dict[str, Any], Make, str]] = {
    "gptq": (GPTQ, gptq(), "q4"),
    "gptq, groups of 64": (GPTQ | {"group_size": 64}, gptq(group=64), "q4"),
    "gptq, a last group of 64 in 192": (GPTQ | {"group_size": 128}, gptq(group=128), "q4"),
    "gptq, one group": (GPTQ | {"group_size": -1}, gptq(group=-1), "q4"),
    "gptq, one group, which config.json does not say": (GPTQ, gptq(group=-1), "q4"),
    "gptq, version 2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(version=2), "q4"),
    "gptq without g_idx": (GPTQ, gptq(g_idx=False), "q4"),
    "gptq without group_size": ({"quant_method": "gptq", "bits": 4}, gptq(group=128, g_idx=False), "q4"),
    "gptq without g_idx, 8 bits in some modules": (GPTQ, gptq(bits=8, g_idx=False), "q8"),
    "gptq without g_idx, other groups in some modules": (GPTQ, gptq(group=64, g_idx=False), "q4"),
    "gptq, zero points": (GPTQ | {"sym": False}, gptq(sym=False), "q4_z"),
    "gptq, zero points, version 2": (GPTQ | {"format": "gptq_v2"}, gptq(sym=False, version=2), "q4_z"),
    "gptq, 8 bits": (GPTQ | {"bits": 8}, gptq(bits=8), "q8"),
    "gptq, 8 bits in some modules": (GPTQ | {"dynamic": {}}, gptq(bits=8), "q8"),
    "auto-round": (
        {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"},
        gptq(),
        "q4",
    ),
    "auto-round in awq's layout": (
        {**AWQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
        awq(),
        "q4_z",
    ),
    "awq": (AWQ, awq(), "q4_z"),
    "awq, one group": (AWQ | {"group_size": -1}, awq(-1), "q4_z"),
    "words": (COMPRESSED, words_of(), "q4"),
    "words, bf16-like scales of rows": (COMPRESSED, words_of(group=-1), "q4"),
    "words, zero points": (COMPRESSED, words_of(sym=False), "q4_z"),
    "words, 8 bits": (COMPRESSED, words_of(bits=8, group=-1), "q8"),
    "words, an order that is not used": (COMPRESSED, words_of(order="unused"), "q4"),
    "int8": (_int8(COMPRESSED), int8(), "q8"),
    "int8 in groups": (_int8(COMPRESSED), int8(group=64), "q8"),
    **IN_ANOTHER_ORDER,
}
# the same for matrices that no type in memory holds exactly
ROUNDED: dict[str, tuple[dict[str, Any], Make, str]] = {
    "gptq, act-order and groups of 16": (GPTQ | {"desc_act": True}, gptq(group=16, act_order=True), "q8"),
    "gptq, groups of 16": (GPTQ | {"group_size": 16}, gptq(group=16), "q8"),
    "gptq, 8 bits, zero points": (GPTQ | {"bits": 8}, gptq(bits=8, sym=False), "q8"),
    "int8, zero points": (_int8(COMPRESSED), int8(zero_point=True), "q8"),
    "fp8 in blocks": (FP8, fp8((64, 128), name="weight_scale_inv"), "bf16"),
    "fp8": (FP8 | {"weight_block_size": None}, fp8(), "bf16"),
    "fp8 in blocks that are named by a text": (_fp8_blocks("64x128"), fp8((64, 128)), "bf16"),
    "fp8 in blocks of compressed-tensors": (_fp8_blocks([64, 128]), fp8((64, 128)), "bf16"),
    "fp8 of fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8(per_row=True), "bf16"),
}
ALL = {**KEPT, **ROUNDED}


def unpacked(layer: LayerWeights) -> dict[str, Array]:
    """Return the weights of a layer's modules as the kernels see them."""
    assert isinstance(layer.mlp, MlpWeights)
    qkv = in_order(layer.mixer.qkv)
    gate_up = in_order(layer.mlp.gate_up).reshape(-1, 2, 16, HIDDEN)
    return {
        "self_attn.q_proj": qkv[:HIDDEN],
        "self_attn.k_proj": qkv[HIDDEN : HIDDEN * 3 // 2],
        "self_attn.v_proj": qkv[HIDDEN * 3 // 2 :],
        "self_attn.o_proj": in_order(layer.mixer.o),
        "mlp.gate_proj": gate_up[:, 0].reshape(-1, HIDDEN),
        "mlp.up_proj": gate_up[:, 1].reshape(-1, HIDDEN),
        "mlp.down_proj": in_order(layer.mlp.down),
    }


def in_order(matrix: PackedMatrix) -> Array:
    """Return a matrix with its inputs in the order of the model."""
    weights = matrix.unpack()
    if matrix.input_order is None:
        return weights
    return weights[:, np.argsort(matrix.input_order)]


def types(model: PackedModel) -> set[str]:
    layer = model.weights.layers[0]
    assert isinstance(layer.mlp, MlpWeights)
    matrices = (layer.mixer.qkv, layer.mixer.o, layer.mlp.gate_up, layer.mlp.down)
    return {dtype for matrix in matrices for _, dtype in matrix.ranges}


@pytest.mark.parametrize("name", ALL)
def test_the_weights_are_those_that_the_format_means(tmp_path: Path, name: str) -> None:
    config, make, _ = ALL[name]
    expected = folder_of(tmp_path / "a", config, make)
    found = unpacked(pack_model(tmp_path / "a", "f32").weights.layers[0])
    for module, weights in expected.items():
        np.testing.assert_array_equal(found[module], weights, err_msg=module)


@pytest.mark.parametrize("weights", ["f32", "auto"])
@pytest.mark.parametrize("name", ["gptq", "gptq act-order", "awq", "fp8"])
def test_rotated_pairs_in_neighboring_rows(tmp_path: Path, name: str, weights: WeightDtype) -> None:
    """Rows of Q and K are half a head apart in memory; the other rows stay in their order."""
    plain, paired = tmp_path / "plain", tmp_path / "paired"
    plain.mkdir()
    paired.mkdir()
    ernie = {"architectures": ["Ernie4_5ForCausalLM"], "head_dim": HIDDEN // 4}
    folder, other = common_folders(plain)[name], common_folders(paired, **ernie)[name]
    expected, found = (unpacked(pack_model(path, weights).weights.layers[0]) for path in (folder, other))
    for module, rows in expected.items():
        if module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = rows.reshape(-1, HIDDEN // 8, 2, HIDDEN)
            rows = heads.swapaxes(1, 2).reshape(rows.shape)
        np.testing.assert_array_equal(found[module], rows, err_msg=module)


@pytest.mark.parametrize("name", ALL)
def test_the_type_in_memory(tmp_path: Path, name: str) -> None:
    """Numbers and scales are kept where a type holds them; others are off by half a step of 8 bits and fp16 at most."""
    config, make, dtype = ALL[name]
    expected = folder_of(tmp_path / "a", config, make)
    model = pack_model(tmp_path / "a", "auto")
    assert types(model) == {dtype}
    found = unpacked(model.weights.layers[0])
    for module, weights in expected.items():
        if name in KEPT:
            np.testing.assert_array_equal(found[module], weights, err_msg=module)
        else:
            largest = np.abs(weights.reshape(len(weights), -1, 32)).max(axis=2).repeat(32, axis=1)
            assert (np.abs(found[module] - weights) <= largest * (0.5 / 127 + 2**-11)).all(), module


def test_scales_in_float32_are_rounded_to_fp16(tmp_path: Path) -> None:
    """No number is rounded: the weights of a group have one relative error, at most 2 ** -11."""
    expected = folder_of(tmp_path / "a", COMPRESSED, words_of(scale_dtype=np.float32))
    model = pack_model(tmp_path / "a", "auto")
    assert types(model) == {"q4"}
    for module, weights in unpacked(model.weights.layers[0]).items():
        np.testing.assert_allclose(weights, expected[module], rtol=2**-11, err_msg=module)


def test_q4_keeps_the_numbers_of_a_symmetric_file(tmp_path: Path) -> None:
    expected = folder_of(tmp_path / "a", GPTQ, gptq())
    model = pack_model(tmp_path / "a", "q4")
    assert (model.weights.embedding.dtype, types(model)) == ("q8", {"q4"})
    for module, weights in unpacked(model.weights.layers[0]).items():
        np.testing.assert_array_equal(weights, expected[module])


def test_modules_that_are_not_quantized_stay_bf16(tmp_path: Path) -> None:
    """The tensors decide, not the list in config.json. Q, K and V are one matrix."""
    plain = ["self_attn.k_proj", "mlp.down_proj"]
    expected = folder_of(tmp_path / "a", GPTQ | {"modules_to_not_convert": ["mlp"]}, gptq(), plain)
    layer = pack_model(tmp_path / "a", "auto").weights.layers[0]
    assert isinstance(layer.mlp, MlpWeights)
    assert [matrix.dtype for matrix in (layer.mixer.qkv, layer.mixer.o, layer.mlp.gate_up, layer.mlp.down)] == [
        "bf16", "q4", "q4", "bf16",
    ]  # fmt: skip
    np.testing.assert_array_equal(unpacked(layer)["self_attn.o_proj"], expected["self_attn.o_proj"])


def test_q_k_and_v_of_different_types_keep_them(tmp_path: Path) -> None:
    def make(rng: np.random.Generator, outputs: int, inputs: int) -> Any:
        return (gptq() if outputs == inputs else gptq(sym=False))(rng, outputs, inputs)

    expected = folder_of(tmp_path / "a", GPTQ, make)
    layer = pack_model(tmp_path / "a", "auto").weights.layers[0]
    assert layer.mixer.qkv.ranges == ((HIDDEN, "q4"), (HIDDEN, "q4_z"))
    for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        np.testing.assert_array_equal(unpacked(layer)[module], expected[module])


@pytest.mark.parametrize(
    ("config", "make", "dtype"),
    [(GPTQ, gptq(), "auto"), (AWQ, awq(32), "auto"), (FP8 | {"weight_block_size": None}, fp8(per_row=True), "f32")],
    ids=["gptq", "awq", "fp8"],
)
def test_fused_tensors(tmp_path: Path, config: dict[str, Any], make: Make, dtype: WeightDtype) -> None:
    """Gate and up are parts of one tensor; the second part begins inside a word of AWQ's layout."""
    fused = {"self_attn.qkv_proj": (256, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
    mlp = {"mlp.gate_up_proj": (200, HIDDEN), "mlp.down_proj": (HIDDEN, 100)}
    changes: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"], "intermediate_size": 100}
    expected = folder_of(tmp_path / "a", config, make, ["mlp.down_proj"], fused | mlp, **changes)
    layer = pack_model(tmp_path / "a", dtype).weights.layers[0]
    assert isinstance(layer.mlp, MlpWeights)
    np.testing.assert_array_equal(layer.mixer.qkv.unpack(), expected["self_attn.qkv_proj"])
    pairs = layer.mlp.gate_up.unpack().reshape(-1, 2, 16, HIDDEN)
    for phase in (0, 1):
        part = expected["mlp.gate_up_proj"][phase * 100 : phase * 100 + 100]
        np.testing.assert_array_equal(pairs[:, phase].reshape(-1, HIDDEN)[:100], part)


@pytest.mark.parametrize(
    ("config", "make", "plain"),
    [
        (COMPRESSED, words_of(group=-1), ()),
        (COMPRESSED, words_of(group=-1, sym=False), ()),
        (COMPRESSED, words_of(bits=8, group=-1), ()),
        (_int8(COMPRESSED), int8(), ()),
        (_int8(COMPRESSED), int8(zero_point=True), ()),
        (GPTQ | {"sym": False}, gptq(sym=False), ["mlp.down_proj"]),
        (GPTQ | {"bits": 8}, gptq(g_idx=False), ["mlp.down_proj"]),
    ],
    ids=["words", "words, zero points", "words, 8 bits", "int8", "int8, zero points", "gptq", "gptq, other bits"],
)
def test_rows_and_columns_may_end_within_a_word(
    tmp_path: Path, config: dict[str, Any], make: Make, plain: list[str]
) -> None:
    """A word has 4 or 8 numbers. GPTQ has no words for a number of inputs that is not a multiple of this."""
    mlp = {"mlp.gate_proj": (99, HIDDEN), "mlp.up_proj": (99, HIDDEN), "mlp.down_proj": (HIDDEN, 99)}
    expected = folder_of(tmp_path / "a", config, make, plain, MATRICES | mlp, intermediate_size=99)
    found = unpacked(pack_model(tmp_path / "a", "f32").weights.layers[0])
    for module in set(mlp) - set(plain):
        rows, columns = mlp[module]
        np.testing.assert_array_equal(found[module][:rows, :columns], expected[module], err_msg=module)


def test_a_matrix_of_parts_in_different_orders_is_q8(tmp_path: Path) -> None:
    """Q and K are sorted in different ways, all parts of gate and up in one."""
    folder_of(tmp_path / "a", GPTQ, gptq(act_order=True, same_order=False))
    layer = pack_model(tmp_path / "a", "auto").weights.layers[0]
    assert isinstance(layer.mlp, MlpWeights)
    assert [matrix.dtype for matrix in (layer.mixer.qkv, layer.mixer.o, layer.mlp.gate_up, layer.mlp.down)] == [
        "q8", "q4", "q8", "q4",
    ]  # fmt: skip
    assert layer.mixer.qkv.input_order is None


@pytest.mark.parametrize("name", IN_ANOTHER_ORDER)
def test_activations_are_sorted_as_the_inputs_are(
    tmp_path: Path, name: str, compute_logits: Callable[..., Array]
) -> None:
    """The logits equal those of the same weights in their original order, except for the rounding of activations."""
    config, make, _ = IN_ANOTHER_ORDER[name]
    folder_of(tmp_path / "a", config, make)
    tokens = list(range(3, 40))
    exact = compute_logits(pack_model(tmp_path / "a", "f32"), tokens)
    found = compute_logits(pack_model(tmp_path / "a", "auto"), tokens, kv_dtype="int8")
    in_q8 = compute_logits(pack_model(tmp_path / "a", "q8"), tokens, kv_dtype="int8")
    assert np.abs(found - exact).mean() < 2 * np.abs(in_q8 - exact).mean()


def test_a_mixture_of_experts_with_a_quantized_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router is widened, in two parts."""
    monkeypatch.setattr(quantized, "ELEMENTS_IN_CACHE", 1)
    attention = {name: shape for name, shape in MATRICES.items() if name.startswith("self_attn")}
    shapes = {"w1": (32, HIDDEN), "w2": (HIDDEN, 32), "w3": (32, HIDDEN)}
    names = [f"block_sparse_moe.experts.{expert}.{name}" for expert in range(40) for name in shapes]
    modules = {**attention, "block_sparse_moe.gate": (40, HIDDEN), **{name: shapes[name[-2:]] for name in names}}
    changes: dict[str, Any] = {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 32,
        "num_local_experts": 40,
    }
    expected = folder_of(tmp_path / "a", GPTQ, gptq(), (), modules, **changes)
    mlp = pack_model(tmp_path / "a", "auto").weights.layers[0].mlp
    assert isinstance(mlp, ExpertWeights)
    np.testing.assert_array_equal(mlp.router.unpack(), expected["block_sparse_moe.gate"])
    np.testing.assert_array_equal(mlp.down[1].unpack(), expected["block_sparse_moe.experts.1.w2"])
    assert {matrix.dtype for matrix in (*mlp.gate_up, *mlp.down)} == {"q4"}


def test_the_plan_counts_the_types_in_memory(tmp_path: Path) -> None:
    folder_of(tmp_path / "a", GPTQ, gptq())
    assert set(plan_weights(read_spec(tmp_path / "a"), "auto")[1]) == {"bf16", "q4"}


def test_the_plan_has_the_sorted_activations(tmp_path: Path) -> None:
    folder_of(tmp_path / "a", GPTQ, gptq(act_order=True))
    sizes = {"max_positions": 64, "max_tokens": 8, "max_samples": 2}
    memory = {"weights": "auto", "kv_dtype": "bf16", "page_size": 32, "num_pages": 4, "workers": 1}
    planned = plan_memory(read_spec(tmp_path / "a"), **sizes, **memory)  # type: ignore[arg-type]
    model = pack_model(tmp_path / "a", "auto")
    assert planned.program.values == model.compile(**sizes).values
    assert sum(value.name == "sorted" for value in planned.program.values) == 4


def test_quire_show_names_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(tmp_path / "a", GPTQ, gptq())
    show(str(tmp_path / "a"))
    shown = capsys.readouterr().out
    numbers = sum(outputs * inputs for outputs, inputs in MATRICES.values())
    orders = sum(inputs for _, inputs in MATRICES.values())
    nbytes = numbers // 2 + numbers // 32 * 2 + numbers // 32 // 2 + 4 * orders
    assert f"GPTQ 4-bit: 7 tensors, {nbytes:,} B" in shown
    assert "F16: 4 tensors" in shown
    assert "bf16, q4 with --weights auto" in shown


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is \"bitsandbytes\"; it must be one of gptq, awq"),
        ({}, r"quantization_config\.quant_method is missing"),
        ({"quant_method": 4}, "quant_method"),
        (GPTQ | {"bits": 3}, r"quantization_config\.bits is 3; it must be 4 or 8"),
        (GPTQ | {"group_size": 0}, "group_size"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is \"marlin\"; it must be one of gptq, gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (AWQ | {"version": "gemv"}, "version is \"gemv\"; it must be gemm"),
        (AWQ | {"bits": 8}, "bits is 8; it must be 4"),
        (AWQ | {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, "packing_format"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "format"),
        (COMPRESSED | {"format": "marlin-24"}, "format"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format"),
        (COMPRESSED | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (COMPRESSED | {"config_groups": {"a": {"weights": {"num_bits": 3, "type": "int"}}}}, r"a\.weights\.num_bits"),
        (COMPRESSED | {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}}, "num_bits"),
        (COMPRESSED | {"config_groups": []}, "config_groups"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (_fp8_blocks([64, 128], [32, 32]), "of one block_structure"),
        (_fp8_blocks("64x0"), "block_structure"),
        (_fp8_blocks("64x"), "block_structure"),
    ],
)  # fmt: skip
def test_a_format_that_is_not_supported(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder_of(tmp_path / "a", config, gptq())
    for read in (read_spec, lambda path: pack_model(path, "auto")):
        with pytest.raises(UnsupportedModel, match=message):
            read(tmp_path / "a")


def _twice_the_groups(values: Array) -> Array:
    """Return an order of groups that stands for consecutive ones, or twice the scales or zero points."""
    return values * 0 if values.ndim == 1 else np.concatenate([values, values])


@pytest.mark.parametrize(
    ("name", "parts", "edit", "error", "message"),
    [
        ("gptq", "qzeros", None, MissingTensor, r"q_proj\.qzeros"),
        ("gptq", "scales", None, MissingTensor, r"q_proj\.scales"),
        ("gptq", "qweight", None, MissingTensor, r"q_proj\.weight"),
        ("gptq", "qweight", lambda words: words[:-1], WrongTensor, "15 words for 128 inputs"),
        ("gptq", "qweight", lambda words: words.view(np.float32), WrongTensor, "must be I32"),
        ("gptq", "qweight", lambda words: words[:, :0], WrongTensor, "any, any"),
        ("gptq", "qweight", lambda words: words[:, 0], WrongTensor, "any, any"),
        ("gptq", "scales", lambda scales: scales[:, 1:], WrongTensor, "any, 128"),
        ("gptq", "scales", lambda scales: scales.astype(np.float64), WrongTensor, "must be BF16 or F16 or F32"),
        ("gptq", "qzeros", lambda words: words[:1], WrongTensor, "4, 16"),
        ("gptq", "g_idx", lambda order: order * 0 + 4, CorruptCheckpoint, "groups 4 to 4; there are 4"),
        ("gptq", "g_idx", lambda order: order - 2, CorruptCheckpoint, "groups -2"),
        ("gptq without g_idx", "scales qzeros", lambda values: values[:3], WrongTensor, "3 groups"),
        ("gptq", "g_idx scales qzeros", _twice_the_groups, WrongTensor, "8 groups; 128 inputs in groups of 32, as"),
        ("awq", "qzeros", lambda words: words[:, :3], WrongTensor, "2, 16"),
        ("awq", "scales qzeros", lambda values: np.concatenate([values, values[:1]]), WrongTensor, "3 groups"),
        ("words", "weight_shape", None, MissingTensor, "weight_shape"),
        ("words", "weight_shape", lambda shape: shape * 0 - 1, WrongTensor, "-1, any"),
        ("words", "weight_shape", lambda shape: shape << [0, 40], WrongTensor, "16 words for 140737488355328 inputs"),
        ("words", "weight_scale", lambda scales: scales[:, :3], WrongTensor, "one scale for the matrix"),
        ("words, zero points", "weight_zero_point", lambda words: words[1:], WrongTensor, "16, 4"),
        ("int8", "weight_scale", None, MissingTensor, "weight_scale"),
        ("int8", "weight_zero_point", lambda zeros: zeros[:3], WrongTensor, "weight_zero_point"),
        ("int8", "weight", lambda numbers: numbers[:64], WrongTensor, "one scale for the matrix"),
    ],
)
def test_a_broken_folder(
    tmp_path: Path,
    name: str,
    parts: str,
    edit: Callable[[Array], Array] | None,
    error: type[ModelError],
    message: str,
) -> None:
    config, make, _ = KEPT[name]
    folder_of(tmp_path / "a", config, make)
    file = tmp_path / "a" / "model.safetensors"
    tensors = {tensor: value.copy() for tensor, value in load_file(file).items()}
    for part in parts.split():
        tensor = f"{LAYER}self_attn.q_proj.{part}"
        value = tensors.pop(tensor)
        if edit is not None:
            tensors[tensor] = edit(value)
    save_tensors(tensors, file)
    with pytest.raises(error, match=message):
        pack_model(tmp_path / "a", "auto")


@pytest.mark.parametrize("g_idx", [True, False])
def test_a_matrix_of_another_shape_takes_no_memory_for_its_groups(tmp_path: Path, g_idx: bool) -> None:
    """The shape is compared with the model's before an array of its inputs is made."""
    folder_of(tmp_path / "a", GPTQ, gptq())
    file = tmp_path / "a" / "model.safetensors"
    inputs = 1 << 20
    tensors = {name: value for name, value in load_file(file).items() if "q_proj" not in name}
    tall = {
        "qweight": np.zeros((inputs // 8, 1), np.int32),
        "qzeros": np.zeros((inputs // 32, 1), np.int32),
        "scales": np.zeros((inputs // 32, 1), np.float16),
        "g_idx": (np.arange(inputs) // 32).astype(np.int32),
    }
    tensors |= {f"{LAYER}self_attn.q_proj.{part}": value for part, value in tall.items() if g_idx or part != "g_idx"}
    save_tensors(tensors, file)
    tracemalloc.start()
    try:
        with pytest.raises(WrongTensor, match=r"is \[1, 1048576\]; config.json implies \[128, 128\]"):
            pack_model(tmp_path / "a", "auto")
        assert tracemalloc.get_traced_memory()[1] < file.stat().st_size // 2
    finally:
        tracemalloc.stop()


def test_the_groups_of_a_matrix_that_the_model_does_not_have_are_not_read(tmp_path: Path) -> None:
    folder_of(tmp_path / "a", GPTQ, gptq())
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file(file)
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        tensors[f"other.{part}"] = tensors[f"{LAYER}self_attn.q_proj.{part}"]
    tensors["other.g_idx"] = tensors["other.g_idx"] + 4
    save_tensors(tensors, file)
    assert types(pack_model(tmp_path / "a", "auto")) == {"q4"}


# Files beside config.json

OWN_FILES: dict[
    str, tuple[str, dict[str, Any], dict[str, Any], Make]
] = {  # the file, its content, the same in config.json
    "AutoGPTQ": ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}, GPTQ, gptq()),
    "GPTQModel": ("quantize_config.json", GPTQ | {"checkpoint_format": "gptq"}, GPTQ, gptq()),
    "AutoAWQ": (
        "quant_config.json",
        {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"},
        AWQ,
        awq(),
    ),
    "AutoRound": (
        "quantization_config.json",
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"},
        GPTQ,
        gptq(),
    ),
    "Model Optimizer": (
        "hf_quant_config.json",
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        fp8(),
    ),
}


def moved(folder: Path, name: str, content: object) -> Path:
    """Move the quantization settings of config.json to a separate file."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("tool", OWN_FILES)
def test_a_folder_may_say_how_it_is_quantized_in_a_file_of_its_own(tmp_path: Path, tool: str) -> None:
    name, content, inside, make = OWN_FILES[tool]
    for folder in ("own", "inside"):
        folder_of(tmp_path / folder, inside, make)
    own, tensors = open_model(moved(tmp_path / "own", name, content))
    expected, expected_tensors = open_model(tmp_path / "inside")
    assert own == expected
    for module in MATRICES:
        matrix = f"{LAYER}{module}.weight"
        assert tensors.dtype(matrix) == expected_tensors.dtype(matrix)
        np.testing.assert_array_equal(tensors.tensor(matrix), expected_tensors.tensor(matrix))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("quantize_config.json", {"bits": 3}, "quantize_config.json: bits is 3; it must be 4 or 8"),
        (
            "quantize_config.json",
            {"bits": 4, "is_marlin_format": True},
            "quantize_config.json: is_marlin_format is true",
        ),
        ("quant_config.json", {"w_bit": 4, "version": "GEMV"}, 'quant_config.json: version is "GEMV"; it must be gemm'),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "NVFP4"}},
            'hf_quant_config.json: quantization.quant_algo is "NVFP4"; it must be fp8',
        ),
        ("quanto_qmap.json", {"model.layers.0": {}}, "quanto_qmap.json: weights of quanto are not supported"),
        ("quantize_config.json", {"quant_method": "hqq"}, 'quantize_config.json: quant_method is "hqq"'),
    ],
)
def test_a_file_of_its_own_is_named_by_what_it_refuses(
    tmp_path: Path, name: str, content: dict[str, Any], complaint: str
) -> None:
    folder_of(tmp_path / "a", GPTQ, gptq())
    with pytest.raises(UnsupportedModel, match=re.escape(complaint)):
        read_spec(moved(tmp_path / "a", name, content))


@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_a_broken_file_of_its_own_is_named(tmp_path: Path, content: str) -> None:
    folder_of(tmp_path / "a", GPTQ, gptq())
    with pytest.raises(CorruptCheckpoint, match=r"quantize_config\.json"):
        read_spec(moved(tmp_path / "a", "quantize_config.json", content))


def test_weights_of_mlx_are_refused_by_the_key_of_config_json(tmp_path: Path) -> None:
    folder_of(tmp_path / "a", GPTQ, gptq(), quantization={"group_size": 64, "bits": 4})
    with pytest.raises(UnsupportedModel, match="absent: weights of MLX are not supported"):
        read_spec(moved(tmp_path / "a", "other.json", {}))


def test_config_json_comes_before_a_file_of_its_own(tmp_path: Path) -> None:
    folder_of(tmp_path / "a", GPTQ, gptq())
    (tmp_path / "a" / "quantize_config.json").write_text('{"bits": 3}')
    assert read_spec(tmp_path / "a").quantized
