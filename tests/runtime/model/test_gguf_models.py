"""GGUF files of models: the same spec, weights and logits as the folders that they were made from."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from os import fsdecode, mkfifo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import CorruptCheckpoint, MissingTensor, ModelNotFound, UnsupportedModel, WrongTensor
from quire.runtime.model import (
    BUNDLED_MODEL,
    PackedModel,
    fingerprint,
    model_name,
    model_path,
    pack_model,
    projectors,
    read_spec,
)
from quire.runtime.model.families.registry import FAMILIES as REGISTERED
from quire.runtime.model.gguf_config import GGUF_NAMES
from quire.runtime.model.rope import inverse_frequencies, rotary_dim
from quire.runtime.model.spec import FrequencyDivisors, LinearScaling
from quire.runtime.model.weights.decoder_weights import plan_weights
from quire.runtime.model.weights.layer_weights import MlpWeights

from tests.support.ggml import random_blocks
from tests.support.gguf_files import (
    ARCHITECTURES,
    CHANGED,
    NAMES,
    Tensor,
    convert,
    describe,
    encode,
    stored_tensors,
    write,
)
from tests.support.matrices import packed_matrices

METADATA: dict[str, dict[str, Any]] = {
    "gemma3": {"gemma3.attention.sliding_window_pattern": 3},  # the converter leaves out 6, the usual one
    "olmo3": {"olmo2.attention.sliding_window_pattern": [True, True, True, False, True]},
    "ministral3": {"mistral3.rope.scaling.yarn_log_multiplier": 0.7, "mistral3.attention.temperature_scale": 0.1},
    "exaone4": {"exaone4.attention.sliding_window_pattern": [True, True, False, True]},
    "cohere2": {"cohere2.attention.sliding_window_pattern": 3},  # the converter leaves out 4, the usual one
}
UNCHANGED = (
    "llama", "arcee", "qwen3", "granite", "olmo2", "olmo3", "exaone4", "glm", "glm4", "cohere", "stablelm",
    "phi", "phi3", "gemma4", "gemma4_dense", "gemma4_moe", "olmoe",
    "granite_moe", "minicpm",
)  # fmt: skip
FAMILIES = (*UNCHANGED, *CHANGED)
LAYER = "blk.1."
VECTORS = (
    "input_norm",
    "input_norm_bias",
    "attention_post_norm",
    "mlp_norm",
    "mlp_norm_bias",
    "mlp_post_norm",
)
MIXER_VECTORS = ("qkv_bias", "q_norm", "k_norm", "o_bias", "taps", "taps_bias", "bias", "skip", "norm", "query_norm")


@pytest.fixture
def folder(model_folder: Callable[..., Path]) -> Callable[[str], Path]:
    """Copy a golden folder, with values that GGUF files can have."""
    return lambda family: model_folder(family, lambda config: config.update(CHANGED.get(family, {})))


def convert_golden(source: Path, path: Path, kind: str = "F32") -> Path:
    return convert(source, path, kind, METADATA.get(source.name, {}))


def matrices(model: PackedModel) -> list[Any]:
    return [matrix.unpack() for matrix in packed_matrices(model.weights)]


def test_no_family_with_gguf_files_is_left_out() -> None:
    """gpt-oss and Qwen3.5 have test files of their own."""
    architectures = {family.gguf.architecture for family in REGISTERED if family.gguf is not None}
    assert architectures == {
        "gpt-oss",
        "qwen35",
        "qwen35moe",
        *(ARCHITECTURES.get(family, family) for family in FAMILIES),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spec_is_that_of_the_folder(folder: Callable[[str], Path], family: str, tmp_path: Path) -> None:
    source = folder(family)
    expected = read_spec(source)
    spec = read_spec(convert_golden(source, tmp_path / "a.gguf"))
    others = {"mistral": "llama", "granite_hybrid_moe": "granite_hybrid", "glm4_moe_lite": "deepseek_v3"}
    others |= dict.fromkeys(("gemma4_dense", "gemma4_moe"), "gemma4")
    named = others.get(family, family)
    names = NAMES.get(family, GGUF_NAMES)
    wanted = replace(expected, family=named, names=names, eos_token_ids=expected.eos_token_ids[:1], norm_offset=0.0)
    assert replace(spec, ropes=expected.ropes) == wanted
    for rope, like in zip(spec.ropes, expected.ropes, strict=True):
        assert (rope is None) == (like is None)
        if rope is None or like is None:
            continue
        dim = rotary_dim(like, spec.head_dim)
        assert rotary_dim(rope, spec.head_dim) == dim
        for positions in (64, 65):  # the golden of Phi-3 has factors for long contexts from 65 on
            found = inverse_frequencies(rope, dim, positions)
            frequencies = inverse_frequencies(like, dim, positions)
            np.testing.assert_allclose(found[0], frequencies[0], rtol=2e-7)
            assert found[1] == pytest.approx(frequencies[1], rel=1e-7)


@pytest.mark.parametrize(
    ("family", "kind"), [*((family, "F32") for family in FAMILIES), ("llama", "BF16"), ("qwen3_moe", "BF16")]
)
def test_the_weights_are_those_of_the_folder(
    folder: Callable[[str], Path], family: str, kind: str, tmp_path: Path
) -> None:
    """Rows of q and k that the converter has moved are back in their place; bf16 is exact where the folder is bf16."""
    source = folder(family)
    path = convert_golden(source, tmp_path / "a.gguf", kind)
    weights = "f32" if kind == "F32" else "bf16"
    packed = pack_model(path, weights)
    expected = pack_model(source, weights)
    for matrix, other in zip(matrices(packed), matrices(expected), strict=True):
        np.testing.assert_array_equal(matrix, other)
    for layer, like in zip(packed.weights.layers, expected.weights.layers, strict=True):
        for name in VECTORS:
            np.testing.assert_array_equal(getattr(layer, name), getattr(like, name))
        for name in MIXER_VECTORS:
            np.testing.assert_array_equal(getattr(layer.mixer, name, None), getattr(like.mixer, name, None))
        for name in ("gate_up_bias", "down_bias") if isinstance(layer.mlp, MlpWeights) else ():
            np.testing.assert_array_equal(getattr(layer.mlp, name), getattr(like.mlp, name))


def test_a_dense_nemotron_has_mlps_although_its_file_counts_experts(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """The converter copies `n_routed_experts` from configs of transformers 5, which have it for dense models, too."""
    source = folder("nemotron_h")
    plain = read_spec(convert(source, tmp_path / "a.gguf"))
    assert read_spec(convert(source, tmp_path / "b.gguf", metadata={"nemotron_h.expert_count": 8})) == plain


def test_leading_dimensions_of_one_do_not_count(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """`llama-quantize` drops them, as that of a mixer's norm with one group."""
    source = folder("qwen3")
    stored = stored_tensors(source, "F32")
    name = "blk.0.attn_norm.weight"
    (size,) = stored[name].shape

    def norm_of(*shape: int) -> Any:
        tensors = {**stored, name: replace(stored[name], shape=shape)}
        model = pack_model(write(tmp_path / "a.gguf", describe(source), tensors), "f32")
        return model.weights.layers[0].input_norm

    np.testing.assert_array_equal([norm_of(1, size), norm_of(1, 1, size)], [norm_of(size)] * 2)
    with pytest.raises(WrongTensor, match=rf"is \[{size}, 1\]; the metadata implies \[{size}\]"):
        norm_of(size, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_tokens_of_the_folder(
    folder: Callable[[str], Path], family: str, compute_logits: Callable[..., Any], tmp_path: Path
) -> None:
    source = folder(family)
    token_ids = [7 * position % 150 for position in range(70)]
    logits = compute_logits(pack_model(convert_golden(source, tmp_path / "a.gguf"), "f32"), token_ids)
    like = compute_logits(pack_model(source, "f32"), token_ids)
    np.testing.assert_array_equal(logits.argmax(axis=1), like.argmax(axis=1))
    assert np.abs(logits - like).max() / (like.max() - like.min()) < 2e-6


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "granite", "olmo2", "phi3"])
def test_the_logits_are_those_of_transformers(
    goldens: Path,
    folder: Callable[[str], Path],
    family: str,
    compute_logits: Callable[..., Any],
    tmp_path: Path,
) -> None:
    with np.load(goldens / family / "golden.npz") as data:
        token_ids = data["token_ids"].tolist()
        golden = data["logits"]
    if family in ("mistral", "qwen2"):  # the golden has windows, from its 20th token on
        token_ids = token_ids[:20]
        golden = golden[:20]
    logits = compute_logits(pack_model(convert_golden(folder(family), tmp_path / "a.gguf"), "f32"), token_ids)
    assert np.abs(logits - golden).max() / (golden.max() - golden.min()) < 2e-4


def test_q8_0_keeps_the_numbers_of_its_blocks(tmp_path: Path) -> None:
    """Quantized at load they would be rotated, and be other numbers."""
    path = convert(BUNDLED_MODEL, tmp_path / "a.gguf", "Q8_0")
    kept, widened, quantized = (matrices(pack_model(path, weights)) for weights in ("auto", "f32", "q8"))
    for matrix, like in zip(kept, widened, strict=True):
        np.testing.assert_array_equal(matrix, like)
    assert not any(np.array_equal(matrix, like) for matrix, like in zip(quantized, widened, strict=True))


@pytest.mark.parametrize(("kind", "dtypes"), [("F16", {"bf16"}), ("Q8_0", {"q8"}), ("Q4_0", {"q4"})])
def test_auto_takes_the_types_of_the_file(tmp_path: Path, kind: str, dtypes: set[str]) -> None:
    weights = pack_model(convert(BUNDLED_MODEL, tmp_path / "a.gguf", kind), "auto").weights
    layers = [
        matrix
        for layer in weights.layers
        for matrix in (layer.mixer.qkv, layer.mixer.o, layer.mlp.gate_up, layer.mlp.down)
    ]
    assert {matrix.dtype for matrix in (weights.embedding, *layers)} == dtypes
    assert weights.lm_head is weights.embedding


def blocks(kind: str, *shape: int) -> Tensor:
    """Return random blocks of small weights."""
    return Tensor(shape, kind, random_blocks(np.random.default_rng(len(kind)), kind, *shape, size=0.03).tobytes())


def test_a_mixed_file_keeps_the_type_of_every_tensor(edited: Callable[..., Path], compute_logits: Any) -> None:
    """Q and K in Q4_K and V in Q6_K are one matrix; 704 columns are not a multiple of 256, so FFN down is in Q8_0."""
    changed = {"token_embd.weight": blocks("Q6_K", 4096, 256)}
    for layer in range(4):
        prefix = f"blk.{layer}."
        changed |= {
            f"{prefix}attn_q.weight": blocks("Q4_K", 256, 256),
            f"{prefix}attn_k.weight": blocks("Q4_K", 128, 256),
            f"{prefix}attn_v.weight": blocks("Q6_K", 128, 256),
            f"{prefix}attn_output.weight": blocks("Q5_K", 256, 256),
            f"{prefix}ffn_gate.weight": blocks("Q4_K", 704, 256),
            f"{prefix}ffn_up.weight": blocks("Q4_K", 704, 256),
            f"{prefix}ffn_down.weight": blocks("Q8_0", 256, 704),
        }
    path = edited(changed)
    model = pack_model(path, "auto")
    in_f32 = pack_model(path, "f32")
    layer = model.weights.layers[1]
    assert layer.mixer.qkv.ranges == ((384, "q4_k"), (128, "q6_k"))
    assert (layer.mixer.o.dtype, layer.mlp.gate_up.dtype, layer.mlp.down.dtype) == ("q5_k", "q4_k", "q8")
    assert model.weights.embedding.dtype == "q6_k"
    for matrix, like in zip(matrices(model), matrices(in_f32), strict=True):
        np.testing.assert_array_equal(matrix, like)
    token_ids = list(range(100, 140))
    logits, like = (compute_logits(packed, token_ids) for packed in (model, in_f32))
    assert np.abs(logits - like).max() / (like.max() - like.min()) < 0.03  # activations are q8
    planned = plan_weights(model.spec, "auto")[1]
    assert planned.total() == sum(matrix.nbytes for matrix in packed_matrices(model.weights))
    assert set(planned) == {"q4_k", "q5_k", "q6_k", "q8"}


@pytest.mark.parametrize(("kind", "dtype"), [("Q3_K", "q6_k"), ("IQ3_S", "q5_k"), ("IQ4_NL", "q8"), ("TQ2_0", "q4")])
def test_small_types_take_the_form_that_has_their_weights(edited: Callable[..., Path], kind: str, dtype: str) -> None:
    names = [f"{LAYER}attn_{name}.weight" for name in ("q", "k", "v")]
    path = edited({name: blocks(kind, rows, 256) for name, rows in zip(names, (256, 128, 128), strict=True)})
    qkv, in_f32 = (pack_model(path, weights).weights.layers[1].mixer.qkv for weights in ("auto", "f32"))
    assert (qkv.dtype, in_f32.dtype) == (dtype, "f32")
    np.testing.assert_array_equal(qkv.unpack(), in_f32.unpack())


def stored(kind: str) -> Tensor:
    """Return a matrix of gate or up of any type."""
    if kind == "F16":
        return zeros(704, 256, kind=kind)
    if kind in ("Q5_0", "Q5_1"):
        return Tensor((704, 256), kind, b"\1" * 704 * 8 * (22 if kind == "Q5_0" else 24))
    return blocks(kind, 704, 256)


@pytest.mark.parametrize(
    ("gate", "up", "dtype"),
    [
        ("Q4_K", "Q6_K", "q8"),
        ("Q4_K", "F16", "bf16"),
        ("Q5_0", "Q5_0", "q8"),
        ("Q5_1", "Q8_0", "q8"),
        ("IQ4_XS", "IQ4_XS", "q8"),
        ("Q2_K", "Q3_K", "q8"),
    ],
)
def test_types_that_cannot_be_kept(edited: Callable[..., Path], gate: str, up: str, dtype: str) -> None:
    """Gate and up are interleaved, so they have one dtype; types without a packed form become q8."""
    path = edited({f"{LAYER}ffn_gate.weight": stored(gate), f"{LAYER}ffn_up.weight": stored(up)})
    assert pack_model(path, "auto").weights.layers[1].mlp.gate_up.dtype == dtype


def test_blocks_are_widened_exactly_for_another_dtype(tmp_path: Path) -> None:
    path = convert(BUNDLED_MODEL, tmp_path / "a.gguf", "Q8_0")
    stored = stored_tensors(BUNDLED_MODEL, "Q8_0")["blk.2.ffn_down.weight"]
    np.testing.assert_array_equal(pack_model(path, "f32").weights.layers[2].mlp.down.unpack(), widen_q8_0(stored))


def widen_q8_0(tensor: Tensor) -> Any:
    blocks = np.frombuffer(tensor.data, np.uint8).reshape(-1, 34)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (scales * blocks[:, 2:].view(np.int8)).reshape(tensor.shape)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"general.architecture": "gpt2"}, "general.architecture is 'gpt2'; it must be one of llama, arcee, qwen2, "),
        ({"general.architecture": 3}, "general.architecture is 3; it must be a string"),
        ({"qwen3.block_count": 0}, "qwen3.block_count is 0; it must be an integer from 1 to 1024"),
        ({"qwen3.block_count": "4"}, 'qwen3.block_count is "4"; it must be an integer'),
        ({"qwen3.embedding_length": 1 << 30}, "qwen3.embedding_length is 1073741824; it must be"),
        ({"qwen3.attention.head_count": [4, 4, 4, 2]}, r"head_count is \[4, 4, 4, 2\]; it must be an integer"),
        ({"qwen3.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon is 0.0; it must be a number"),
        ({"qwen3.attention.value_length": 32}, "qwen3.attention.value_length is 32; it must be 64, the size of a head"),
        ({"qwen3.rope.dimension_count": 32}, "qwen3.rope.dimension_count is 32; it must be 64"),
        ({"qwen3.rope.scaling.type": "longrope"}, "rope_scaling.short_factor is missing"),
        ({"qwen3.expert_count": 8}, "qwen3.expert_count is 8; it must be absent or 0"),
        ({"qwen3.attention.sliding_window": 64}, "sliding_window is 64; it must be absent or 0"),
        ({"tokenizer.ggml.eos_token_id": "a"}, "tokenizer.ggml.eos_token_id is .* it must be a token id"),
    ],
)
def test_metadata_that_cannot_be_run_is_refused_by_its_key(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = convert(BUNDLED_MODEL, tmp_path / "a.gguf", metadata=changed)
    with pytest.raises(UnsupportedModel, match=message):
        read_spec(path)


def test_one_value_for_all_layers_may_be_a_list(tmp_path: Path) -> None:
    path = convert(BUNDLED_MODEL, tmp_path / "a.gguf", metadata={"qwen3.attention.head_count_kv": [2, 2, 2, 2]})
    assert read_spec(path) == replace(read_spec(BUNDLED_MODEL), names=GGUF_NAMES)


def test_tokens_that_end_a_text(tmp_path: Path) -> None:
    """Converters write -1, or 4294967295, for a token that the model has not."""
    ids = {"eos": 7, "eot": 0xFFFFFFFF, "eom": 9}
    metadata = {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ids.items()}
    assert read_spec(convert(BUNDLED_MODEL, tmp_path / "a.gguf", metadata=metadata)).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        ({"rope.scale_linear": 4.0}, LinearScaling(4.0)),
        ({"rope.scale_linear": 1.0}, None),
    ],
)
def test_linear_scaling_with_and_without_a_type(tmp_path: Path, keys: dict[str, Any], scaling: Any) -> None:
    metadata = {f"qwen3.{key}": value for key, value in keys.items()}
    (rope,) = set(read_spec(convert(BUNDLED_MODEL, tmp_path / "a.gguf", metadata=metadata)).ropes)
    assert rope is not None
    assert rope.scaling == scaling


def test_another_version_of_the_block_formats_is_refused(tmp_path: Path) -> None:
    path = convert(BUNDLED_MODEL, tmp_path / "a.gguf", "Q8_0", {"general.quantization_version": 3})
    with pytest.raises(UnsupportedModel, match=r"quantization_version is 3; it must be an integer from 2 to 2"):
        read_spec(path)


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Write the bundled model with other tensors: `edited({"name": Tensor or None})`."""

    def write_edited(changed: dict[str, Tensor | None]) -> Path:
        tensors = {**stored_tensors(BUNDLED_MODEL, "F16"), **changed}
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return write(tmp_path / "a.gguf", describe(BUNDLED_MODEL), present)

    return write_edited


def zeros(*shape: int, kind: str = "F32") -> Tensor:
    return encode(np.zeros(shape, np.float32), kind)


def ones(*shape: int) -> Tensor:
    return encode(np.ones(shape, np.float32), "F32")


def test_an_output_matrix_of_its_own(edited: Callable[..., Path]) -> None:
    path = edited({"output.weight": zeros(4096, 256)})
    assert not read_spec(path).tie_embeddings
    assert not pack_model(path, "bf16").weights.lm_head.unpack().any()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({f"{LAYER}ffn_up.weight": None}, MissingTensor, r"tensor blk\.1\.ffn_up\.weight is not in .*a\.gguf"),
        ({"token_embd.weight": None}, UnsupportedModel, "the number of rows of token_embd.weight is missing"),
        (
            {f"{LAYER}ffn_up.weight": zeros(704, 128)},
            WrongTensor,
            r"blk\.1\.ffn_up\.weight in .* is \[704, 128\]; the metadata implies \[704, 256\]",
        ),
        (
            {f"{LAYER}ffn_up.weight": Tensor((704, 256), "IQ1_S", b"\0" * (704 * 50))},
            WrongTensor,
            "ffn_up.weight in .* is IQ1_S; it must be one of BF16, F16, F32, Q8_0, Q4_0",
        ),
        (
            {f"{LAYER}ffn_up.weight": Tensor((704, 256), "Q4_0_4_4", b"\0" * (704 * 8 * 18))},
            WrongTensor,
            "ffn_up.weight in .* is Q4_0_4_4; it must be one of",
        ),
        (
            {f"{LAYER}attn_norm.weight": Tensor((256,), "Q8_0", b"\0" * (8 * 34))},
            WrongTensor,
            "attn_norm.weight in .* is Q8_0; it must be one of BF16, F16, F32$",
        ),
        ({"blk.0.attn_sinks.weight": zeros(4)}, UnsupportedModel, "has tensor blk.0.attn_sinks.weight, which qwen3"),
        ({"rope_freqs.weight": zeros(2, 16)}, UnsupportedModel, r"rope_freqs\.weight is F32 \[2, 16\]; it must be F32"),
        ({"rope_freqs.weight": zeros(32)}, CorruptCheckpoint, r"rope_freqs\.weight has a value that is not between"),
        ({"rope_freqs.weight": ones(16)}, UnsupportedModel, r"rope_freqs\.weight has 16 values .* it must have 32"),
    ],
)
def test_tensors_that_do_not_fit_the_metadata_are_refused(
    edited: Callable[..., Path], changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pack_model(edited(changed), "auto")


def test_frequency_divisors(edited: Callable[..., Path]) -> None:
    divisors = np.linspace(1, 8, 32, dtype=np.float32)
    spec = read_spec(edited({"rope_freqs.weight": encode(divisors, "F32")}))
    (rope,) = set(spec.ropes)
    assert rope.scaling == FrequencyDivisors(tuple(map(float, divisors)))
    plain, _ = inverse_frequencies(replace(rope, scaling=None), 64, 100)
    np.testing.assert_array_equal(inverse_frequencies(rope, 64, 100)[0], plain / divisors)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = convert(BUNDLED_MODEL, tmp_path / "one.gguf")
    assert (model_path(tmp_path), model_path(path), model_name(path)) == (path, path, "one")
    other = convert(BUNDLED_MODEL, tmp_path / "two.gguf")
    with pytest.raises(ModelNotFound, match=r"has 2 GGUF models; give one of them: one\.gguf, two\.gguf"):
        model_path(tmp_path)
    assert fingerprint(path) != fingerprint(other)
    (tmp_path / "model.safetensors").touch()
    assert model_path(tmp_path) == tmp_path


def test_files_for_images_beside_a_gguf_file_are_not_read(tmp_path: Path) -> None:
    path = convert(BUNDLED_MODEL, tmp_path / "b.gguf")
    for name in ("mmproj-model-f16.gguf", "a-mmproj-BF16.gguf", "c.mmproj-Q8_0.gguf", "MMPROJ.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert model_path(tmp_path) == path
    assert projectors(path) == ["MMPROJ.gguf", "a-mmproj-BF16.gguf", "c.mmproj-Q8_0.gguf", "mmproj-model-f16.gguf"]
    path.unlink()
    with pytest.raises(ModelNotFound, match="has 4 GGUF models"):
        model_path(tmp_path)


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(ModelNotFound, match=r"cannot be read: .*Permission denied"):
        model_path(tmp_path)


def test_a_fingerprint_leaves_out_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    before = fingerprint(tmp_path)
    mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "old.safetensors.parts").mkdir()
    assert fingerprint(tmp_path) == before


def test_a_fingerprint_has_what_normalizes_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert fingerprint(tmp_path) != before


def test_the_name_of_a_split_file() -> None:
    assert model_name(Path("a/Qwen3-8B-Q4_K_M-00001-of-00003.gguf")) == "Qwen3-8B-Q4_K_M"


def test_the_name_of_a_link_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1f2e3d").mkdir()
    (tmp_path / "Qwen3-8B").symlink_to(tmp_path / "1f2e3d")
    assert model_name(tmp_path / "Qwen3-8B") == "Qwen3-8B"
    monkeypatch.chdir(tmp_path / "1f2e3d")
    assert model_name(Path()) == "1f2e3d"


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    path = convert(BUNDLED_MODEL, tmp_path / fsdecode(b"caf\xe9.gguf"))
    assert model_name(path) == "caf\N{REPLACEMENT CHARACTER}"
    assert fingerprint(path) != fingerprint(path.rename(tmp_path / fsdecode(b"caf\xe8.gguf")))


@pytest.mark.parametrize(
    ("name", "found"), [("a.gguf", "does not exist"), ("a.bin", "is neither a folder nor a .gguf")]
)
def test_what_is_no_model(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / "a.bin").touch()
    with pytest.raises(ModelNotFound, match=f"{name} {found}"):
        model_path(tmp_path / name)
