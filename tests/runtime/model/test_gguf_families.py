"""The special parts of the GGUF files of each family: keys and tensors beyond Llama's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.kernels.pack import widen_blocks
from quire.runtime.common.errors import CorruptCheckpoint, ModelError, UnsupportedModel, WrongTensor
from quire.runtime.model import pack_model, read_spec
from quire.runtime.model.spec import FrequencyDivisors, LongRopeScaling, Rope, YarnScaling
from quire.runtime.model.weights.layer_weights import ExpertWeights
from quire.runtime.model.weights.tensors import expected_tensors
from safetensors.numpy import save_file

from tests.support.ggml import random_blocks
from tests.support.gguf_files import Tensor, convert, describe, encode, rope_factors, stored_tensors, write
from tests.support.matrices import packed_matrices

CHANGED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 1, "mlp_only_layers": []},
    "lfm2": {"conv_bias": False},
    "ernie4_5_moe": {"use_bias": False},
    "glm4_moe": {"n_group": 1},
    "nemotron_h_moe": {"mlp_bias": False, "n_group": 1},
}


@pytest.fixture
def edited(model_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Write a golden as a GGUF file with other metadata and tensors; None is absent: `edited(family, {}, {})`."""

    def write_edited(
        family: str, metadata: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None
    ) -> Path:
        folder = tmp_path / family
        if not folder.exists():
            model_folder(family, lambda config: config.update(CHANGED.get(family, {})))
        keys = {**describe(folder), **(metadata or {})}
        arrays = {**stored_tensors(folder, "F32"), **rope_factors(folder), **(tensors or {})}
        return write(
            tmp_path / f"{family}.gguf",
            {key: value for key, value in keys.items() if value is not None},
            {name: tensor for name, tensor in arrays.items() if tensor is not None},
        )

    return write_edited


def blocks(kind: str, *shape: int) -> Tensor:
    """Return random blocks of small weights."""
    rows = random_blocks(np.random.default_rng(len(kind)), kind, int(np.prod(shape[:-1])), shape[-1], size=0.03)
    return Tensor(shape, kind, rows.tobytes())


def widened(tensor: Tensor) -> Any:
    """Return the numbers of a tensor in blocks."""
    rows = np.frombuffer(tensor.data, np.uint8).reshape(int(np.prod(tensor.shape[:-1])), -1)
    return widen_blocks(rows, tensor.kind).reshape(tensor.shape)


def joined(tensors: dict[str, Tensor], names: list[str]) -> Tensor:
    """Return several tensors in one, one above the other."""
    shapes = [tensors[name].shape for name in names]
    return Tensor((sum(shape[0] for shape in shapes), *shapes[0][1:]), "F32", b"".join(tensors[n].data for n in names))


def test_q_k_and_v_in_one_tensor(goldens: Path, edited: Callable[..., Path]) -> None:
    """Any family may have such a tensor: the rows of Q and K are in neighboring pairs, the rows of V are not."""
    tensors = stored_tensors(goldens / "llama", "F32")
    fused: dict[str, Tensor | None] = {}
    for layer in ("blk.0.", "blk.1."):
        for kind in ("weight", "bias"):
            parts = [f"{layer}attn_{name}.{kind}" for name in "qkv"]
            fused |= {**dict.fromkeys(parts), f"{layer}attn_qkv.{kind}": joined(tensors, parts)}
    packed, like = (pack_model(path, "f32").weights for path in (edited("llama", {}, fused), goldens / "llama"))
    for layer, expected in zip(packed.layers, like.layers, strict=True):
        np.testing.assert_array_equal(layer.mixer.qkv.unpack(), expected.mixer.qkv.unpack())
        np.testing.assert_array_equal(layer.mixer.qkv_bias, expected.mixer.qkv_bias)


def experts(path: Path, weights: Any = "auto") -> ExpertWeights:
    mlp = pack_model(path, weights).weights.layers[0].mlp
    assert isinstance(mlp, ExpertWeights)
    return mlp


def test_experts_keep_the_type_of_their_tensor(edited: Callable[..., Path]) -> None:
    """One tensor has the matrices of all experts, one after the other."""
    down = blocks("Q4_0", 5, 64, 64)
    gate = blocks("Q8_0", 5, 64, 64)
    up = blocks("Q8_0", 5, 64, 64)
    tensors = {
        "blk.0.ffn_down_exps.weight": down,
        "blk.0.ffn_gate_exps.weight": gate,
        "blk.0.ffn_up_exps.weight": up,
    }
    mlp = experts(edited("mixtral", {"general.quantization_version": 2}, tensors))
    for expert, (gate_up, matrix) in enumerate(zip(mlp.gate_up, mlp.down, strict=True)):
        assert (gate_up.dtype, matrix.dtype) == ("q8", "q4")
        np.testing.assert_array_equal(matrix.unpack(), widened(down)[expert])
        columns = gate_up.unpack().reshape(-1, 2, 16, 64)
        np.testing.assert_array_equal(columns[:, 0].reshape(64, 64), widened(gate)[expert])
        np.testing.assert_array_equal(columns[:, 1].reshape(64, 64), widened(up)[expert])


@pytest.mark.parametrize(("gate", "dtype"), [("Q4_0", "q8"), ("Q5_0", "q8"), ("F32", "bf16")])
def test_gate_and_up_of_experts_have_one_dtype(edited: Callable[..., Path], gate: str, dtype: str) -> None:
    kinds = {"Q5_0": Tensor((5, 64, 64), "Q5_0", b"\1" * 5 * 64 * 2 * 22), "F32": encode(np.ones((5, 64, 64)), "F32")}
    tensors = {
        "blk.0.ffn_gate_exps.weight": kinds.get(gate) or blocks(gate, 5, 64, 64),
        "blk.0.ffn_up_exps.weight": blocks("Q8_0", 5, 64, 64),
    }
    mlp = experts(edited("mixtral", {"general.quantization_version": 2}, tensors))
    assert {matrix.dtype for matrix in mlp.gate_up} == {dtype}


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "F16"])
def test_the_router_is_f32_from_any_type(edited: Callable[..., Path], kind: str) -> None:
    """The columns of the router are multiplied by the norm."""
    router = {"F16": encode(np.full((5, 64), 0.5), "F16"), "Q5_0": Tensor((5, 64), kind, b"\1" * 5 * 2 * 22)}.get(kind)
    router = router or blocks(kind, 5, 64)
    norm = encode(np.full(64, 2.0), "F32")
    path = edited(
        "mixtral",
        {"general.quantization_version": 2},
        {"blk.0.ffn_gate_inp.weight": router, "blk.0.ffn_norm.weight": norm},
    )
    expected = 2 * (np.full((5, 64), 0.5) if kind == "F16" else widened(router))
    np.testing.assert_array_equal(experts(path).router.unpack(), expected)


@pytest.mark.parametrize(
    "router",
    [encode(np.full((5, 64), np.inf, np.float32), "F32"), Tensor((5, 64), "Q8_0", b"\0\x7e" + bytes(5 * 2 * 34 - 2))],
)
def test_a_router_without_finite_weights_is_refused(edited: Callable[..., Path], router: Tensor) -> None:
    path = edited("mixtral", {"general.quantization_version": 2}, {"blk.0.ffn_gate_inp.weight": router})
    with pytest.raises(CorruptCheckpoint, match=r"blk\.0\.ffn_gate_inp\.weight in .* has (an infinity|NaN)"):
        experts(path)


@pytest.mark.parametrize(
    ("pattern", "slides"),
    [
        (None, [1, 1, 1, 1]),
        (2, [1, 0, 1, 0]),
        (0, [1, 1, 1, 1]),
        (1, [0, 0, 0, 0]),
        ([True, False, False, True], [1, 0, 0, 1]),
    ],
)
def test_the_layers_of_gemma_3_that_slide(edited: Callable[..., Path], pattern: Any, slides: list[int]) -> None:
    """Every sixth sees all tokens unless the file says otherwise; sliding layers have another rotary embedding."""
    spec = read_spec(
        edited("gemma3", {"gemma3.attention.sliding_window_pattern": pattern, "gemma3.rope.freq_base_swa": 5e3})
    )
    assert spec.windows == tuple(24 * each for each in slides)
    assert [rope.theta for rope in spec.ropes if rope] == [5e3 if each else 1e6 for each in slides]


def test_divisors_beside_two_rotary_embeddings_are_refused(edited: Callable[..., Path]) -> None:
    path = edited(
        "gemma3",
        {"gemma3.attention.sliding_window_pattern": 2},
        {"rope_freqs.weight": encode(np.ones(16, np.float32), "F32")},
    )
    with pytest.raises(UnsupportedModel, match="has 16 values beside 2 rotary embeddings"):
        read_spec(path)


def test_gemma_3_without_a_window(edited: Callable[..., Path]) -> None:
    spec = read_spec(edited("gemma3", {"gemma3.attention.sliding_window": None}))
    assert spec.windows == (0, 0, 0, 0)
    assert {rope.theta for rope in spec.ropes if rope} == {1e6}


def test_a_gemma_3_without_freq_base_has_that_of_llama_cpp(edited: Callable[..., Path]) -> None:
    """The base is not 1,000,000, the default of Gemma's config.json."""
    spec = read_spec(edited("gemma3", {"gemma3.rope.freq_base": None, "gemma3.attention.sliding_window_pattern": 1}))
    assert {rope.theta for rope in spec.ropes if rope} == {1e4}


def test_gemma_2_of_old_files(edited: Callable[..., Path]) -> None:
    """Files without these keys are of the first models, whose values are known."""
    absent = dict.fromkeys(
        ("gemma2.attention.sliding_window", "gemma2.attn_logit_softcapping", "gemma2.final_logit_softcapping")
    )
    spec = read_spec(edited("gemma2", absent))
    assert (spec.windows, spec.attention_softcap, spec.logits_softcap) == ((4096, 0, 4096, 0), 50, 30)
    assert (spec.norm_offset, spec.attention_scale) == (0, 32**-0.5)


@pytest.mark.parametrize(
    ("family", "layers", "scaled_by"), [("gemma2", 46, 12), ("gemma2", 47, 32), ("gemma3", 62, 12)]
)
def test_the_scores_of_gemma_27b_alone_are_scaled_by_hidden_size_and_heads(
    edited: Callable[..., Path], goldens: Path, family: str, layers: int, scaled_by: int
) -> None:
    """By 48 / 4, where the size of a head is 32."""
    tensors = stored_tensors(goldens / family, "F32")
    more = {
        name.replace("blk.0.", f"blk.{layer}."): tensor
        for layer in range(4, layers)
        for name, tensor in tensors.items()
        if name.startswith("blk.0.")
    }
    spec = read_spec(edited(family, {f"{family}.block_count": layers}, more))
    assert spec.attention_scale == scaled_by**-0.5


def test_divisors_of_gemma_4_are_those_of_full_layers(edited: Callable[..., Path]) -> None:
    """Pairs with a divisor of 1e30 are not rotated; the divisors of others may scale."""
    divisors = np.array([1, 2, 4] + [1e30] * 29, np.float32)
    spec = read_spec(edited("gemma4", {}, {"rope_freqs.weight": encode(divisors, "F32")}))
    sliding, full = Rope(1e4, dim=32), Rope(1e6, FrequencyDivisors((1.0, 2.0, 4.0)), 6, 64)
    assert spec.ropes == (sliding, sliding, full, sliding, sliding, sliding, full)


@pytest.mark.parametrize("divisors", [[1e30] * 32, [1.0, 1e30] + [1.0] * 30, [0.0] * 32])
def test_divisors_that_rotate_no_pair_or_others_than_the_first_are_refused(
    edited: Callable[..., Path], divisors: list[float]
) -> None:
    path = edited("gemma4", {}, {"rope_freqs.weight": encode(np.array(divisors, np.float32), "F32")})
    with pytest.raises(CorruptCheckpoint, match=r"rope_freqs\.weight has a value that is not between"):
        read_spec(path)


def test_a_gemma_4_may_have_keys_and_values_that_no_layer_reads(edited: Callable[..., Path], goldens: Path) -> None:
    """Published folders have them for the last layers, which read earlier ones, and the converter copies them."""
    tensors = stored_tensors(goldens / "gemma4", "F32")
    unread = {f"blk.5.{name}": tensors[f"blk.3.{name}"] for name in ("attn_k.weight", "attn_v.weight")}
    unread["blk.5.attn_k_norm.weight"] = tensors["blk.3.attn_k_norm.weight"]
    assert read_spec(edited("gemma4", {}, unread)) == read_spec(edited("gemma4"))
    with pytest.raises(UnsupportedModel, match=r"has tensor blk\.5\.attn_v\.bias"):
        read_spec(edited("gemma4", {}, {"blk.5.attn_v.bias": tensors["blk.3.attn_k_norm.weight"]}))


def test_gate_and_up_of_the_experts_of_a_gemma_4_may_be_two_tensors(edited: Callable[..., Path], goldens: Path) -> None:
    tensors = stored_tensors(goldens / "gemma4_moe", "F32")
    divided: dict[str, Tensor | None] = {}
    for layer in range(3):
        both = tensors[f"blk.{layer}.ffn_gate_up_exps.weight"]
        gate, up = np.split(np.frombuffer(both.data, np.float32).reshape(both.shape), 2, axis=1)
        divided |= {f"blk.{layer}.ffn_gate_up_exps.weight": None}
        divided |= {
            f"blk.{layer}.ffn_{name}_exps.weight": encode(each, "F32") for name, each in (("gate", gate), ("up", up))
        }
    packed, like = (pack_model(path, "f32") for path in (edited("gemma4_moe", {}, divided), goldens / "gemma4_moe"))
    for matrix, other in zip(packed_matrices(packed.weights), packed_matrices(like.weights), strict=True):
        np.testing.assert_array_equal(matrix.unpack(), other.unpack())


def test_granite_without_multipliers(edited: Callable[..., Path]) -> None:
    keys = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    spec = read_spec(edited("granite", {**{f"granite.{key}": None for key in keys}, "granite.residual_scale": 0.0}))
    assert spec.attention_scale == spec.head_dim**-0.5
    assert (spec.embedding_scale, spec.residual_scale, spec.logits_scale) == (1, 1, 1)


def test_matrices_of_a_mixer_that_would_grow_are_refused(edited: Callable[..., Path]) -> None:
    a = np.array([[-1], [-2], [0], [0.5], [-4], [-5]], np.float32)
    with pytest.raises(CorruptCheckpoint, match=r"tensor blk\.0\.ssm_a has 0\.5; its numbers must not be positive"):
        pack_model(edited("granite_hybrid_moe", {}, {"blk.0.ssm_a": encode(a, "F32")}), "f32")


def test_a_granite_4_whose_file_does_not_say_so_rotates_heads(edited: Callable[..., Path]) -> None:
    keys = [{"granitehybrid.rope.scaling.finetuned": value} for value in (None, True, False)]
    ropes = [read_spec(edited("granite_hybrid_moe", each)).ropes for each in keys]
    assert [rope is not None for *_, rope in ropes] == [True, True, False]


@pytest.mark.parametrize(("pattern", "full"), [(None, [3]), (2, [1, 3]), ([True, True, False, True, True], [2])])
def test_the_layers_of_olmo_3_that_slide(edited: Callable[..., Path], pattern: Any, full: list[int]) -> None:
    """Sliding layers have a rotary embedding without the scaling of the others, and may have another base."""
    spec = read_spec(
        edited("olmo3", {"olmo2.attention.sliding_window_pattern": pattern, "olmo2.rope.freq_base_swa": 5e3})
    )
    assert [layer for layer, window in enumerate(spec.windows) if not window] == full
    for window, rope in zip(spec.windows, spec.ropes, strict=True):
        assert rope is not None
        assert (rope.theta, rope.scaling is None) == ((5e3, True) if window else (5e5, False))


def test_an_olmo_2_has_no_window(edited: Callable[..., Path]) -> None:
    """Both versions have one architecture: files of OLMo 3 have a window."""
    assert read_spec(edited("olmo2", {"olmo2.attention.sliding_window": 0})).family == "olmo2"
    assert read_spec(edited("olmo3")).family == "olmo3"


def test_an_exaone_4_without_a_window_rotates_all_heads(edited: Callable[..., Path]) -> None:
    spec = read_spec(edited("exaone4", {"exaone4.attention.sliding_window": None}))
    assert (spec.windows, None in spec.ropes) == ((0,) * 4, False)
    spec = read_spec(edited("exaone4", {"exaone4.attention.sliding_window": 24}))
    assert (spec.windows, [rope is None for rope in spec.ropes]) == ((24, 24, 24, 0), [False, False, False, True])


def test_the_first_files_of_exaone_4_32b_have_no_window(edited: Callable[..., Path], goldens: Path) -> None:
    tensors = stored_tensors(goldens / "exaone4", "F32")
    more = {
        name.replace("blk.0.", f"blk.{layer}."): tensor
        for layer in range(4, 64)
        for name, tensor in tensors.items()
        if name.startswith("blk.0.")
    }
    spec = read_spec(edited("exaone4", {"exaone4.block_count": 64, "exaone4.attention.sliding_window": None}, more))
    assert spec.windows == (4096, 4096, 4096, 0) * 16


@pytest.mark.parametrize(("pattern", "full"), [(None, [3]), (2, [1, 3]), ([True, False, True, True], [1])])
def test_full_layers_of_cohere2_do_not_rotate_heads(edited: Callable[..., Path], pattern: Any, full: list[int]) -> None:
    spec = read_spec(edited("cohere2", {"cohere2.attention.sliding_window_pattern": pattern}))
    assert [layer for layer, window in enumerate(spec.windows) if not window] == full
    assert [layer for layer, rope in enumerate(spec.ropes) if rope is None] == full


def test_layers_of_glm_4_5_that_predict_further_tokens_are_not_read(edited: Callable[..., Path], goldens: Path) -> None:
    tensors = stored_tensors(goldens / "glm4_moe", "F32")
    last = {name.replace("blk.2.", "blk.3."): each for name, each in tensors.items() if name.startswith("blk.2.")}
    spec = read_spec(edited("glm4_moe", {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}, last))
    assert spec.num_layers == 3


def test_layers_of_nemotron_3_that_predict_further_tokens_are_not_read(edited: Callable[..., Path]) -> None:
    heads, sizes = [0, 0, 2, 0], [0, 40, 0, 40]
    keys = {"attention.head_count_kv": [*heads, 2], "feed_forward_length": [*sizes, 40]}
    keys |= {"block_count": 5, "nextn_predict_layers": 1}
    spec = read_spec(edited("nemotron_h_moe", {f"nemotron_h_moe.{key}": value for key, value in keys.items()}))
    assert (spec.num_layers, spec.num_kv_heads) == (4, 2)


def test_a_stablelm_without_a_norm_before_its_mlp_is_parallel(edited: Callable[..., Path]) -> None:
    """Old converters write use_parallel_residual for all models."""
    norms = {
        f"blk.{layer}.ffn_norm.{kind}": encode(np.ones(72, np.float32), "F32")
        for layer in (0, 1)
        for kind in ("weight", "bias")
    }
    spec = read_spec(edited("stablelm", {"stablelm.use_parallel_residual": True}, norms))
    assert not spec.parallel
    assert read_spec(edited("stablelm")).parallel


def test_layers_without_rotary_embedding_have_no_divisors(edited: Callable[..., Path]) -> None:
    divisors = np.linspace(1, 2, 6, dtype=np.float32)
    spec = read_spec(edited("smollm3", {}, {"rope_freqs.weight": encode(divisors, "F32")}))
    assert spec.ropes[3] is None
    assert {rope.scaling for rope in spec.ropes if rope} == {FrequencyDivisors(tuple(map(float, divisors)))}


def test_yarn_has_the_range_and_the_factor_of_the_file(edited: Callable[..., Path]) -> None:
    keys = {"type": "yarn", "factor": 2.0, "original_context_length": 32}
    scaled = {f"qwen2.rope.scaling.{key}": value for key, value in keys.items()}
    (rope,) = set(read_spec(edited("qwen2", scaled)).ropes)
    assert rope is not None
    assert rope.scaling == YarnScaling(2.0, 1.0693147180559945, 32.0, 1.0, True, 32)
    own = {"yarn_beta_fast": 24.0, "yarn_beta_slow": 2.0, "yarn_attn_factor": 1.25}
    (rope,) = set(read_spec(edited("qwen2", scaled | {f"qwen2.rope.scaling.{k}": v for k, v in own.items()})).ropes)
    assert rope is not None
    assert rope.scaling == YarnScaling(2.0, 1.25, 24.0, 2.0, True, 32)


def test_phi_3_with_and_without_longrope(edited: Callable[..., Path]) -> None:
    """Phi-4 has no window, which its files say with 0; files of short contexts have no factors."""
    spec = read_spec(edited("phi3", {"phi3.attention.sliding_window": 0}))
    (rope,) = set(spec.ropes)
    assert rope is not None
    assert isinstance(rope.scaling, LongRopeScaling)
    assert (rope.dim, len(rope.scaling.long_factors), spec.windows) == (12, 6, (0, 0))
    absent = {"rope_factors_long.weight": None, "rope_factors_short.weight": None}
    (rope,) = set(read_spec(edited("phi3", {"phi3.rope.scaling.attn_factor": None}, absent)).ropes)
    assert rope is not None
    assert rope.scaling is None


def test_the_rotated_part_of_a_head_is_not_rounded(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """30 / 44 x 44 is less than 30 in float64."""
    factors = {name: [1.0] * 15 for name in ("short_factor", "long_factor")}
    folder = model_folder("phi3", lambda config: config.update(partial_rotary_factor=0.7, hidden_size=176))
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] |= factors
    (folder / "config.json").write_text(json.dumps(config))
    zeros = {name: np.zeros(shape, np.float32) for name, shape in expected_tensors(read_spec(folder))}
    save_file(zeros, folder / "model.safetensors")
    (rope,) = set(read_spec(convert(folder, tmp_path / "a.gguf", metadata={"phi3.rope.dimension_count": 30})).ropes)
    assert rope is not None
    assert rope.dim == 30


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("granite", {"granite.rope.scaling.finetuned": False}, "rope.scaling.finetuned is false; it must be absent or"),
        ("granite", {"granite.logit_scale": "6"}, 'granite.logit_scale is "6"; it must be a number'),
        ("olmo2", {"olmo2.attention.sliding_window": ("i32", -1)}, "sliding_window is -1; it must be an integer"),
        (
            "olmo3",
            {"olmo2.attention.sliding_window_pattern": [True]},
            r"\[true\]; it must be an integer, or a list of 5",
        ),
        ("exaone4", {"exaone4.attention.sliding_window_pattern": "LLLG"}, '"LLLG"; it must be an integer'),
        (
            "ernie4_5_moe",
            {"ernie4_5-moe.expert_shared_feed_forward_length": 60},
            "expert_shared_feed_forward_length is 60; it must be a multiple of 40",
        ),
        ("nemotron_h_moe", {"nemotron_h_moe.expert_gating_func": 1}, "expert_gating_func is 1; it must be absent or 2"),
        ("glm4_moe", {"glm4moe.expert_gating_func": 1}, "expert_gating_func is 1; it must be absent, 0 or 2"),
        ("cohere2", {"cohere2.attention.sliding_window": None}, "sliding_window is missing; it must be an integer"),
        ("cohere2", {"cohere2.attention.layer_norm_epsilon": None}, "layer_norm_epsilon is missing; it must be"),
        ("starcoder2", {"starcoder2.attention.sliding_window": 8}, "sliding_window is 8; it must be absent or 0"),
        ("gemma2", {"gemma2.rope.freq_base_swa": 1e4}, "freq_base_swa is 10000.0; it must be absent"),
        ("gemma2", {"gemma2.attention.sliding_window": ("i32", -1)}, "sliding_window is -1; it must be an integer"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; it must be absent"),
        (
            "gemma3",
            {"gemma3.attention.sliding_window_pattern": [True]},
            r"\[true\]; it must be an integer, or a list of 4",
        ),
        ("gemma3", {"gemma3.attention.sliding_window_pattern": True}, "sliding_window_pattern is true; it must be"),
        ("gemma4", {"gemma4.attention.sliding_window_pattern": 6}, "pattern is 6; it must be a list of 7 flags"),
        (
            "gemma4",
            {"gemma4.attention.sliding_window_pattern": [True]},
            r"\[true\]; it must be an integer, or a list",
        ),
        ("gemma4", {"gemma4.attention.key_length_swa": None}, "key_length_swa is missing; it must be an integer"),
        ("gemma4", {"gemma4.attention.value_length_swa": 16}, "value_length_swa is 16; it must be an integer from 32"),
        ("gemma4", {"gemma4.attention.value_length": 32}, "value_length is 32; it must be 64, the size of a head"),
        ("gemma4", {"gemma4.rope.dimension_count_swa": 16}, "dimension_count_swa is 16; it must be an integer from 32"),
        ("gemma4", {"gemma4.rope.scaling.factor": 2.0}, "rope.scaling.factor is 2.0; it must be absent"),
        ("gemma4", {"gemma4.rope.freq_base_swa": 0.5}, "rope.freq_base_swa is 0.5; it must be above 1"),
        ("gemma4", {"gemma4.attention.head_count_kv": [1] * 5 + [2]}, r"\[1, .* a divisor of 4, .* or 7 of them"),
        (
            "gemma4",
            {"gemma4.attention.head_count_kv": [1] * 6 + [3]},
            r"head_count_kv is \[1, .*; it must be a",
        ),
        ("gemma4", {"gemma4.feed_forward_length": [80] * 6 + [90]}, r"feed_forward_length is \[80, .* in the last 3"),
        (
            "gemma4",
            {"gemma4.attention.shared_kv_layers": 7},
            "shared_kv_layers is 7; it must be an integer from 0",
        ),
        (
            "gemma4",
            {"gemma4.embedding_length_per_layer_input": ("i32", -1)},
            "per_layer_input is -1; it must be an integer",
        ),
        ("gemma4_moe", {"gemma4.expert_used_count": 9}, "expert_used_count is 9; it must be an integer from 1 to 8"),
        ("gemma3", {"gemma3.block_count": 1 << 30}, "block_count is 1073741824; it must be"),
        ("phi3", {"phi3.rope.dimension_count": 11}, "rope.dimension_count is 11; it must be even"),
        ("phi3", {"phi3.rope.dimension_count": 18}, "dimension_count is 18; it must be an integer from 2 to 16"),
        ("phi3", {"phi3.rope.dimension_count": 14}, "rope_scaling.short_factor is .* it must be a list of 7"),
        ("phi3", {"phi3.rope.scaling.attn_factor": "a"}, 'phi3.rope.scaling.attn_factor is "a"; it must be'),
        ("mixtral", {"llama.expert_used_count": 6}, "llama.expert_used_count is 6; it must be an integer from 1 to 5"),
        ("mixtral", {"llama.expert_used_count": None}, "llama.expert_used_count is missing; it must be an integer"),
        ("mixtral", {"llama.expert_count": 1 << 20}, "llama.expert_count is 1048576; it must be"),
        ("qwen3_moe", {"qwen3moe.expert_count": 0}, "qwen3moe.expert_count is 0; it must be"),
        ("qwen3_moe", {"qwen3moe.expert_gating_func": 2}, "expert_gating_func is 2; it must be absent or 0 or 1"),
        ("qwen3_moe", {"qwen3moe.expert_weights_scale": 2.5}, "expert_weights_scale is 2.5; it must be absent"),
    ],
)
def test_metadata_that_cannot_be_run_are_refused(
    edited: Callable[..., Path], family: str, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_spec(edited(family, changed))


@pytest.mark.parametrize(
    ("family", "changed", "error", "message"),
    [
        ("phi3", {"rope_factors_long.weight": None}, UnsupportedModel, "it must be absent or 1"),
        (
            "phi3",
            {"rope_factors_long.weight": encode(np.zeros(6, np.float32), "F32")},
            CorruptCheckpoint,
            "rope_factors_long.weight has a value that is not between",
        ),
        (
            "phi3",
            {"rope_factors_long.weight": Tensor((6,), "F16", bytes(12))},
            UnsupportedModel,
            "rope_factors_long.weight is F16",
        ),
        (
            "mixtral",
            {"blk.1.ffn_down_exps.weight": encode(np.zeros((4, 64, 64), np.float32), "F32")},
            WrongTensor,
            r"ffn_down_exps.weight in .* is \[4, 64, 64\]; the metadata implies \[5, 64, 64\]",
        ),
        (
            "mixtral",
            {"blk.1.ffn_down_exps.weight": encode(np.zeros((5 * 64, 64), np.float32), "F32")},
            WrongTensor,
            r"is \[320, 64\]; the metadata implies \[5, 64, 64\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    edited: Callable[..., Path], family: str, changed: dict[str, Any], error: type[ModelError], message: str
) -> None:
    with pytest.raises(error, match=message):
        pack_model(edited(family, {}, changed), "f32")


@pytest.mark.parametrize(
    ("metadata", "culprit"),
    [
        (
            {"lfm2.attention.head_count_kv": [0, 3, 0, 0, 2]},
            "head_count_kv .* same number in all layers with attention",
        ),
        ({"lfm2.attention.head_count_kv": [0, 0, 0, 0, 0]}, "lfm2.attention.head_count_kv"),
        ({"lfm2.attention.head_count_kv": [0, 3, 0]}, "a number, or one for each of 5 layers"),
        ({"lfm2.attention.head_count_kv": [0, 3, 0, 0, 1025]}, "a number, or one for each of 5 layers"),
        ({"lfm2.attention.head_count_kv": None}, "lfm2.attention.head_count_kv"),
        ({"lfm2.shortconv.l_cache": 0}, "lfm2.shortconv.l_cache is 0"),
        ({"lfm2.shortconv.l_cache": 3}, "shortconv.conv.weight"),
        ({"lfm2.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon"),
    ],
)
def test_an_lfm2_of_other_layers_is_refused_by_name(
    edited: Callable[..., Path], metadata: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ModelError, match=culprit):
        pack_model(edited("lfm2", metadata), "f32")


@pytest.mark.parametrize(
    ("metadata", "tensors", "culprit"),
    [
        ({"lfm2moe.expert_gating_func": 1}, {}, "lfm2moe.expert_gating_func is .*; it must be 2, the sigmoid"),
        ({"lfm2moe.expert_gating_func": None}, {}, "lfm2moe.expert_gating_func"),
        ({"lfm2moe.expert_used_count": 10}, {}, "lfm2moe.expert_used_count is 10; it must be an integer from 1 to 9"),
        ({"lfm2moe.expert_group_count": 2}, {}, "lfm2moe.expert_group_count"),
        ({"lfm2moe.expert_weights_scale": -1.0}, {}, "lfm2moe.expert_weights_scale"),
        ({"lfm2moe.leading_dense_block_count": 3}, {}, "blk.1.ffn_gate.weight"),
        ({}, {"blk.3.exp_probs_b.bias": None}, "blk.3.exp_probs_b.bias"),
    ],
)
def test_an_lfm2_moe_of_another_form_is_refused_by_name(
    edited: Callable[..., Path], metadata: dict[str, Any], tensors: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ModelError, match=culprit):
        pack_model(edited("lfm2_moe", metadata, tensors), "f32")
