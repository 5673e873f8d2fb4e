"""Packed weights: every tensor in its columns, in one block of exactly the planned size."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.kernels.pack import PackedMatrix
from quire.pager import OutOfMemory, map_memory
from quire.pager.arena import HUGE_PAGE_BYTES
from quire.runtime.common.errors import CorruptCheckpoint, ModelError, Unavailable
from quire.runtime.model import BUNDLED_MODEL, DecoderSpec, pack_model, read_spec
from quire.runtime.model.families.registry import open_model
from quire.runtime.model.weights import Checkpoint, packing
from quire.runtime.model.weights.decoder_weights import pack_weights, plan_weights
from quire.runtime.model.weights.gguf import GGUFFile
from quire.runtime.model.weights.gguf_checkpoint import GGUFCheckpoint
from quire.runtime.model.weights.layer_weights import ExpertWeights, MlpWeights
from quire.runtime.model.weights.mapped_file import MappedFile
from quire.runtime.model.weights.paired_rows import PairedRows, Pairs
from quire.runtime.model.weights.safetensors import SafetensorsCheckpoint
from quire.runtime.model.weights.tensors import expected_tensors
from safetensors.numpy import load_file, save_file

from tests.support.families import FAMILIES
from tests.support.gguf_files import convert, encode, write
from tests.support.matrices import packed_matrices


def widened(checkpoint: Checkpoint, name: str) -> Any:
    values = checkpoint.tensor(name)
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values.astype(np.float32)


def mlp_matrices(mlp: MlpWeights | ExpertWeights) -> tuple[PackedMatrix, ...]:
    if isinstance(mlp, MlpWeights):
        return mlp.gate_up, mlp.down
    shared = () if mlp.shared is None else mlp_matrices(mlp.shared)
    return mlp.router, *mlp.gate_up, *mlp.down, *shared


def test_a_copy_of_tied_embeddings_is_allowed(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("qwen2")
    tensors: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    weights = pack_model(folder, "f32").weights
    assert weights.lm_head is weights.embedding


def test_q_k_and_v_are_one_matrix_in_that_order(goldens: Path) -> None:
    checkpoint = SafetensorsCheckpoint(goldens / "qwen3")
    layer = pack_model(goldens / "qwen3", "f32").weights.layers[1]
    parts = [widened(checkpoint, f"model.layers.1.self_attn.{name}_proj.weight") for name in "qkv"]
    np.testing.assert_array_equal(layer.mixer.qkv.unpack(), np.concatenate(parts))


def test_rows_of_a_gated_delta_net_that_are_stored_by_key_head(goldens: Path) -> None:
    """2 key heads of 20 have 3 value heads of 36 each: query, key, 3 values and 3 gates, then the second key head."""
    checkpoint = SafetensorsCheckpoint(goldens / "qwen3_next")
    weights = pack_model(goldens / "qwen3_next", "f32").weights.layers[0]
    prefix = "model.layers.0.linear_attn."
    first, second = np.split(widened(checkpoint, f"{prefix}in_proj_qkvz.weight"), 2)
    wanted = [
        part[rows] for rows in (slice(20), slice(20, 40), slice(40, 148), slice(148, 256)) for part in (first, second)
    ]
    np.testing.assert_array_equal(weights.mixer.into.unpack(), np.concatenate(wanted))
    rates = widened(checkpoint, f"{prefix}in_proj_ba.weight")[[0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]]
    np.testing.assert_array_equal(weights.mixer.rates.unpack(), rates * weights.input_norm)
    np.testing.assert_array_equal(weights.input_norm, widened(checkpoint, "model.layers.0.input_layernorm.weight") + 1)
    np.testing.assert_array_equal(weights.mixer.norm, np.tile(widened(checkpoint, f"{prefix}norm.weight"), 6))
    np.testing.assert_allclose(weights.mixer.a, -np.exp(widened(checkpoint, f"{prefix}A_log")), rtol=1e-7)


def test_the_logit_of_a_shared_expert_is_a_row_of_the_router(goldens: Path) -> None:
    checkpoint = SafetensorsCheckpoint(goldens / "qwen3_next")
    layer = pack_model(goldens / "qwen3_next", "q8").weights.layers[1]
    rows = [widened(checkpoint, f"model.layers.1.mlp.{name}.weight") for name in ("gate", "shared_expert_gate")]
    assert isinstance(layer.mlp, ExpertWeights)
    assert layer.mlp.shared is not None
    np.testing.assert_array_equal(layer.mlp.router.unpack(), np.concatenate(rows) * layer.mlp_norm)
    assert (layer.mlp.router.dtype, layer.mlp.shared.down.dtype) == ("f32", "q8")


def test_gate_and_up_alternate_by_16_and_are_padded_with_zeros(goldens: Path) -> None:
    checkpoint = SafetensorsCheckpoint(goldens / "qwen3")
    layer = pack_model(goldens / "qwen3", "f32").weights.layers[0]
    gate, up = (widened(checkpoint, f"model.layers.0.mlp.{name}_proj.weight") for name in ("gate", "up"))
    pairs = mlp_matrices(layer.mlp)[0].unpack().reshape(-1, 2, 16, 64)  # 176 columns of each, padded to 192
    np.testing.assert_array_equal(pairs[:, 0].reshape(192, 64)[:176], gate)
    np.testing.assert_array_equal(pairs[:, 1].reshape(192, 64)[:176], up)
    assert not pairs[11:].any()


def test_fused_tensors_are_split_as_separate_ones_are(goldens: Path) -> None:
    checkpoint = SafetensorsCheckpoint(goldens / "phi3")
    layer = pack_model(goldens / "phi3", "f32").weights.layers[1]
    prefix = "model.layers.1."
    fused = widened(checkpoint, f"{prefix}mlp.gate_up_proj.weight")
    pairs = mlp_matrices(layer.mlp)[0].unpack().reshape(-1, 2, 16, 64)  # 72 columns of each, padded to 96
    np.testing.assert_array_equal(pairs[:, 0].reshape(96, 64)[:72], fused[:72])
    np.testing.assert_array_equal(pairs[:, 1].reshape(96, 64)[:72], fused[72:])
    np.testing.assert_array_equal(layer.mixer.qkv.unpack(), widened(checkpoint, f"{prefix}self_attn.qkv_proj.weight"))


def test_norms_that_are_stored_less_1(goldens: Path) -> None:
    checkpoint = SafetensorsCheckpoint(goldens / "gemma3")
    weights = pack_model(goldens / "gemma3", "q8").weights
    layer = weights.layers[2]
    prefix = "model.layers.2."
    for packed, name in [
        (weights.final_norm, "model.norm"),
        (layer.mixer.k_norm, f"{prefix}self_attn.k_norm"),
        (layer.mlp_norm, f"{prefix}pre_feedforward_layernorm"),
        (layer.mlp_post_norm, f"{prefix}post_feedforward_layernorm"),
    ]:
        np.testing.assert_array_equal(packed, 1 + widened(checkpoint, f"{name}.weight"))


def test_biases_have_the_order_of_their_columns(goldens: Path) -> None:
    checkpoint = SafetensorsCheckpoint(goldens / "llama")
    layer = pack_model(goldens / "llama", "bf16").weights.layers[0]
    prefix = "model.layers.0."
    qkv = [widened(checkpoint, f"{prefix}self_attn.{name}_proj.bias") for name in "qkv"]
    gate, up = (widened(checkpoint, f"{prefix}mlp.{name}_proj.bias").reshape(-1, 16) for name in ("gate", "up"))
    assert layer.mixer.qkv_bias is not None
    assert isinstance(layer.mlp, MlpWeights)
    assert layer.mlp.gate_up_bias is not None
    np.testing.assert_array_equal(layer.mixer.qkv_bias, np.concatenate(qkv))
    np.testing.assert_array_equal(layer.mlp.gate_up_bias, np.stack([gate, up], axis=1).reshape(-1))


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", True), ("llama", False), ("mistral", False)])
def test_tied_embeddings_are_packed_once(goldens: Path, family: str, tied: bool) -> None:
    weights = pack_model(goldens / family, "bf16").weights
    assert (weights.lm_head is weights.embedding) == tied


@pytest.mark.parametrize("weights", ["bf16", "q8", "q4", "f32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_planned_bytes_are_the_packed_bytes(goldens: Path, family: str, weights: Any) -> None:
    model = pack_model(goldens / family, weights)
    assert plan_weights(model.spec, weights)[1].total() == sum(
        matrix.nbytes for matrix in packed_matrices(model.weights)
    )


def test_each_expert_has_its_own_matrices_and_some_layers_may_have_none(goldens: Path) -> None:
    folder = goldens / "qwen3_moe"
    checkpoint = SafetensorsCheckpoint(folder)
    layers = pack_model(folder, "f32").weights.layers
    assert [type(layer.mlp) for layer in layers] == [ExpertWeights, MlpWeights, ExpertWeights]
    experts = layers[2].mlp
    prefix = "model.layers.2.mlp."
    assert isinstance(experts, ExpertWeights)
    for number in range(6):
        gate, up, down = (
            widened(checkpoint, f"{prefix}experts.{number}.{name}_proj.weight") for name in ("gate", "up", "down")
        )
        pairs = experts.gate_up[number].unpack().reshape(-1, 2, 16, 64)  # 40 columns of each, padded to 64
        np.testing.assert_array_equal(pairs[:, 0].reshape(64, 64)[:40], gate)
        np.testing.assert_array_equal(pairs[:, 1].reshape(64, 64)[:40], up)
        np.testing.assert_array_equal(experts.down[number].unpack(), down)


@pytest.mark.parametrize("weights", ["q4", "q8", "bf16"])
def test_the_router_is_f32_and_takes_the_norm_into_its_columns(goldens: Path, weights: Any) -> None:
    folder = goldens / "mixtral"
    checkpoint = SafetensorsCheckpoint(folder)
    layer = pack_model(folder, weights).weights.layers[1]
    router = widened(checkpoint, "model.layers.1.block_sparse_moe.gate.weight")
    norm = widened(checkpoint, "model.layers.1.post_attention_layernorm.weight")
    assert isinstance(layer.mlp, ExpertWeights)
    assert layer.mlp.router.dtype == "f32"
    assert {matrix.dtype for matrix in (*layer.mlp.gate_up, *layer.mlp.down)} == {weights}
    np.testing.assert_array_equal(layer.mlp.router.unpack(), router * norm)


def test_q4_leaves_the_embedding_and_the_head_in_q8(goldens: Path) -> None:
    weights = pack_model(goldens / "llama", "q4").weights
    layer = weights.layers[0]
    assert {matrix.dtype for matrix in (layer.mixer.qkv, layer.mixer.o, *mlp_matrices(layer.mlp))} == {"q4"}
    assert (weights.embedding.dtype, weights.lm_head.dtype) == ("q8", "q8")
    in_q8 = pack_model(goldens / "llama", "q8").weights
    np.testing.assert_array_equal(weights.lm_head.unpack(), in_q8.lm_head.unpack())


def test_other_tensors_are_ignored(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("mistral")
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(16, np.int64)
    save_file(tensors, folder / "model.safetensors")
    assert pack_model(folder, "f32").spec.family == "mistral"


def test_a_matrix_that_cannot_be_filled_fails_the_load(goldens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are filled on other threads; their errors are raised on this one."""
    read = SafetensorsCheckpoint.chunks

    def fail_once(checkpoint: SafetensorsCheckpoint, name: str, *rows: Any) -> Any:
        if name == "model.layers.1.mlp.down_proj.weight":
            raise MemoryError(name)
        return read(checkpoint, name, *rows)

    monkeypatch.setattr(SafetensorsCheckpoint, "chunks", fail_once)
    with pytest.raises(MemoryError, match="down_proj"):
        pack_model(goldens / "llama", "bf16")


def test_the_block_is_zeroed_and_starts_on_a_huge_page() -> None:
    block = map_memory(3 * HUGE_PAGE_BYTES + 64)
    assert block.ctypes.data % HUGE_PAGE_BYTES == 0
    assert block.shape == (3 * HUGE_PAGE_BYTES + 64,)
    assert not block[::4096].any()
    block[-1] = 1


@pytest.mark.parametrize(
    ("weights", "advice"), [("f32", r"weights q4 need [\d,]+ bytes"), ("q4", "use a smaller model or more memory")]
)
def test_weights_that_do_not_fit_name_a_setting_that_is_not_in_use(
    weights: Any, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> None:
        raise OutOfMemory(f"cannot map {nbytes:,} bytes")

    monkeypatch.setattr(packing, "map_memory", refuse)
    with pytest.raises(ModelError, match=rf"^the weights do not fit as {weights}: cannot map [\d,]+ bytes; {advice}$"):
        pack_model(None, weights)


def test_a_file_that_is_truncated_while_it_is_packed_is_a_typed_error(tmp_path: Path) -> None:
    """It does not end the process, as an access to a mapped page beyond the end would."""
    path = convert(BUNDLED_MODEL, tmp_path / "a.gguf", "Q8_0")
    spec, checkpoint = open_model(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CorruptCheckpoint, match=r"a\.gguf was truncated while it was read: it ends at byte \d+"):
        pack_weights(spec, checkpoint, "auto")


def in_blocks(spec: DecoderSpec, **others: str) -> DecoderSpec:
    """Return a spec with all matrices in Q8_0, except matrices of layer 0 whose names end in a name of `others`."""
    types = {name: "Q8_0" for name, shape in expected_tensors(spec) if len(shape) > 1}
    for end, kind in others.items():
        types |= {name: kind for name in types if name.endswith(f"layers.0.{end.replace('__', '.')}.weight")}
    return replace(spec, quantized=types)


def test_ranges_of_columns_that_do_not_begin_with_a_block_are_q8(goldens: Path) -> None:
    """K has 48 columns, so V would begin in the middle of 32."""
    spec = in_blocks(read_spec(goldens / "qwen3_moe"), self_attn__v_proj="Q4_0")
    assert plan_weights(spec, "auto")[0].layers[0].mixer.qkv.ranges == ((192, "q8"),)


def test_experts_of_different_types_are_q8(goldens: Path) -> None:
    spec = in_blocks(read_spec(goldens / "qwen3_moe"), mlp__experts__1__down_proj="Q4_0")
    mlp = plan_weights(spec, "auto")[0].layers[0].mlp
    assert isinstance(mlp, ExpertWeights)
    assert {matrix.dtype for matrix in mlp.down} == {"q8"}


class SmallReads(GGUFCheckpoint):
    """A checkpoint that yields fewer rows than wanted, as quantized folders do."""

    def chunks(self, name: str, rows: slice, num_rows: int) -> Iterator[tuple[int, Any]]:
        return super().chunks(name, rows, min(num_rows, 32))


@pytest.mark.parametrize("rows", [slice(None), slice(48, 96), slice(96, 144)])
def test_pairs_of_a_part_of_each_head_in_small_reads(tmp_path: Path, rows: slice) -> None:
    """In each of two heads of 48 rows, 20 are in pairs."""
    values = np.arange(144 * 4, dtype=np.float32).reshape(144, 4)
    path = write(tmp_path / "a.gguf", {"general.architecture": "llama"}, {"a": encode(values, "F32")})
    checkpoint = PairedRows(SmallReads(GGUFFile(path)), {"a": Pairs(48, 20, 96)})
    pieces = [piece.copy() for _, piece in checkpoint.chunks("a", rows, 48)]
    head = [*range(0, 20, 2), *range(1, 20, 2), *range(20, 48)]
    expected = values[[*head, *(48 + row for row in head), *range(96, 144)]]
    np.testing.assert_array_equal(np.concatenate(pieces), expected[rows])
    np.testing.assert_array_equal(checkpoint.tensor("a"), expected)


@pytest.mark.parametrize("rows", [slice(None), slice(48, 96), slice(96, 144)])
def test_rows_of_a_gguf_file_in_pieces_have_the_order_of_the_whole(tmp_path: Path, rows: slice) -> None:
    """Two heads of 48 rows have their pairs side by side; the rows after them do not."""
    values = np.arange(144 * 4, dtype=np.float32).reshape(144, 4)
    path = write(tmp_path / "a.gguf", {"general.architecture": "llama"}, {"a": encode(values, "F32")})
    checkpoint = PairedRows(GGUFCheckpoint(GGUFFile(path)), {"a": Pairs(48, 48, 96)})
    pieces = [piece.copy() for _, piece in checkpoint.chunks("a", rows, 32)]
    whole = checkpoint.tensor("a")
    np.testing.assert_array_equal(np.concatenate(pieces), whole[rows])
    np.testing.assert_array_equal(whole[[0, 1, 24, 96]], values[[0, 2, 1, 96]])


def test_a_file_that_the_system_reads_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call reads at most 2 GiB."""
    content = os.urandom(5000)
    read = os.preadv
    (tmp_path / "a").write_bytes(content)
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read(file, [buffers[0][:999]], at))
    assert MappedFile(tmp_path / "a").read(3, 4998).tobytes() == content[3:4998]


def test_a_load_that_is_cancelled_ends() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Unavailable, match="loading the model was cancelled"):
        pack_model(None, "bf16", stop)


@pytest.mark.parametrize("in_gguf", [False, True])
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_tensors_that_are_read_in_pieces_are_packed_alike(
    goldens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, in_gguf: bool
) -> None:
    path = convert(goldens / family, tmp_path / "a.gguf") if in_gguf else goldens / family
    whole = pack_model(path, "f32")
    monkeypatch.setattr(packing, "ELEMENTS_PER_CHECK", 1)
    for matrix, expected in zip(
        *(packed_matrices(model.weights) for model in (pack_model(path, "f32"), whole)), strict=True
    ):
        assert np.array_equal(matrix.unpack(), expected.unpack())


def test_no_file_stays_open_or_mapped(tmp_path: Path) -> None:
    path = convert(BUNDLED_MODEL, tmp_path / "a.gguf", "Q8_0")
    model = pack_model(path, "auto")
    assert str(path) not in Path("/proc/self/maps").read_text()
    open_files = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert str(path) not in open_files
    assert model.path == path
