"""Encoders in GGUF files: the vectors and scores of the folders that they were made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire import LLM
from quire.runtime.common.errors import UnsupportedModel, WrongTensor
from quire.runtime.engine.embedding.encoder_text import EncoderText
from quire.runtime.model import BUNDLED_MODEL
from quire.runtime.model.encoder import is_encoder, pack_encoder, read_encoder
from quire.runtime.model.encoder.weights import BertWeights
from quire.runtime.model.weights.safetensors import SafetensorsCheckpoint
from quire.scheduler import EncodedText

from tests.support.families import GOLDENS
from tests.support.gguf_encoders import convert_encoder
from tests.support.gguf_files import Tensor, convert, encode, q8_0, widened, write

from .conftest import FOLDER, load, read_golden, run

TEXTS = ["This module provides a queue", "b", "The parser reads " * 20]
LAST, RANK = 3, 4  # pooling_type of llama.cpp
ANSWERS = ["yes", "no"]


def folder_of(path: Path, pooling: str) -> Path:
    """Write the bundled model as a folder of sentence-transformers."""
    shutil.copytree(BUNDLED_MODEL, path)
    (path / "chat_template.jinja").unlink()
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"idx": i, "path": each, "type": f"sentence_transformers.models.{name}"}
               for i, (each, name) in enumerate(names.items())]  # fmt: skip
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": 256, "pooling_mode": pooling}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return path


def file_of(path: Path, pooling_type: int, kind: str = "F32", **metadata: Any) -> Path:
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", path.parent)
    return convert(BUNDLED_MODEL, path, kind, {"qwen3.pooling_type": pooling_type, **metadata})


def vectors(model: Path, weights: Any) -> Any:
    with LLM(model, weights=weights) as llm:
        return np.array(llm.embed(TEXTS))


@pytest.mark.parametrize(("pooling", "number"), [("lasttoken", LAST), ("mean", 1), ("cls", 2)])
def test_a_file_has_the_vectors_of_its_folder(pooling: str, number: int, tmp_path: Path) -> None:
    like = vectors(folder_of(tmp_path / "folder", pooling), "f32")
    np.testing.assert_array_equal(vectors(file_of(tmp_path / "a.gguf", number), "f32"), like)
    np.testing.assert_allclose(np.linalg.norm(like, axis=1), 1, rtol=1e-6)


def test_blocks_of_a_file_keep_their_type(tmp_path: Path) -> None:
    like = vectors(file_of(tmp_path / "a.gguf", LAST), "f32")
    quantized = vectors(file_of(tmp_path / "b.gguf", LAST, "Q8_0"), "auto")
    assert (quantized * like).sum(axis=1).min() > 0.999


@pytest.mark.parametrize("number", [0, None])
def test_a_file_without_pooling_is_a_decoder(number: int | None, tmp_path: Path) -> None:
    metadata = {} if number is None else {"qwen3.pooling_type": number}
    assert not is_encoder(convert(BUNDLED_MODEL, tmp_path / "a.gguf", metadata=metadata))


@pytest.mark.parametrize("number", [9, "mean"])
def test_other_kinds_of_pooling_are_refused(number: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.gguf", number)
    with pytest.raises(UnsupportedModel, match=r"pooling_type is .*; it must be 1, 2 or 3 \(mean, first or last row\)"):
        read_encoder(path)


@pytest.mark.parametrize(("family", "architecture"), [("gemma4", "gemma4"), ("deepseek_v3", "deepseek2")])
def test_a_decoder_whose_attention_needs_pages_makes_no_vectors(family: str, architecture: str, tmp_path: Path) -> None:
    path = convert(GOLDENS / family, tmp_path / "a.gguf", metadata={f"{architecture}.pooling_type": LAST})
    with pytest.raises(UnsupportedModel, match="no latent attention, no layers that differ in their heads"):
        read_encoder(path)


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm_roberta", "nomic_bert", "modernbert"])
def test_a_file_of_a_bert_has_the_vectors_of_its_folder(name: str, tmp_path: Path) -> None:
    golden = read_golden(name)
    path = convert_encoder(golden.folder, tmp_path / "a.gguf")
    found, like = (run(load(each), golden.encoded) for each in (path, golden.folder))
    np.testing.assert_allclose(found, like / np.linalg.norm(like, axis=1, keepdims=True), rtol=1e-6)
    if name not in ("roberta", "modernbert"):  # folders whose vectors keep their length
        np.testing.assert_array_equal(found, like)


def test_a_file_of_a_bert_has_the_tokens_of_its_folder(tmp_path: Path) -> None:
    golden = read_golden("bert")
    path = convert_encoder(golden.folder, tmp_path / "a.gguf")
    texts = EncoderText(path, read_encoder(path))
    assert [texts.encode(text) for text in golden.texts] == golden.encoded


def test_a_file_of_a_classifier_has_the_scores_of_its_folder(tmp_path: Path) -> None:
    golden = read_golden("xlm_roberta_scores")
    path = convert_encoder(golden.folder, tmp_path / "a.gguf", {"bert.pooling_type": RANK})
    np.testing.assert_array_equal(run(load(path), golden.encoded), run(load(golden.folder), golden.encoded))
    spec = read_encoder(path)
    assert (spec.num_labels, spec.labels, spec.score_activation) == (1, ("LABEL_0",), "sigmoid")
    pair = EncoderText(path, spec).encode_pair("a", "b").token_ids
    assert (pair[0], pair[-1], pair.count(2)) == (0, 2, 3)  # <s> a </s></s> b </s>


def test_a_file_of_a_modernbert_has_the_scores_of_its_folder(tmp_path: Path) -> None:
    """Without `classifier.pooling_type`, a classifier reads the mean, as in llama.cpp."""
    golden = read_golden("modernbert_scores")
    metadata = {"modern-bert.classifier.output_labels": ["a", "b", "c"]}
    mean, first = (
        convert_encoder(golden.folder, tmp_path / f"{kind}.gguf", {**metadata, **pooling})
        for kind, pooling in (("mean", {}), ("first", {"modern-bert.classifier.pooling_type": 2}))
    )
    like = run(load(golden.folder), golden.encoded)
    np.testing.assert_array_equal(run(load(mean), golden.encoded), like)
    assert np.abs(run(load(first), golden.encoded) - like).max() > 0.01
    assert (read_encoder(mean).labels, read_encoder(mean).score_activation) == (("a", "b", "c"), "identity")


def test_a_reranker_of_qwen3_scores_by_the_difference_of_two_rows(tmp_path: Path) -> None:
    golden = read_golden("qwen3_answer")
    head = widened(SafetensorsCheckpoint(golden.folder).tensor("model.embed_tokens.weight"))[[60, 61]]
    metadata = {"qwen3.pooling_type": RANK, "qwen3.classifier.output_labels": ANSWERS}
    path = convert(
        golden.folder, tmp_path / "a.gguf", metadata=metadata, more={"cls.output.weight": encode(head, "F32")}
    )
    np.testing.assert_array_equal(run(load(path), golden.encoded), run(load(golden.folder), golden.encoded))
    assert is_encoder(path)


BERT_KEYS: dict[str, Any] = {
    "general.architecture": "bert", "bert.embedding_length": 64, "bert.block_count": 1, "bert.attention.head_count": 2,
    "bert.feed_forward_length": 96, "bert.context_length": 40, "bert.attention.layer_norm_epsilon": 1e-12,
    "bert.pooling_type": 1, "general.quantization_version": 2,
}  # fmt: skip


def random_bert(path: Path, kind: str, labels: int = 0, **metadata: Any) -> Path:
    """Write a BERT of one layer; in F32, its matrices have the numbers of its blocks of Q8_0."""
    generator = np.random.default_rng(5)
    tensors = {}
    for name, shape in {
        "token_embd": (96, 64), "position_embd": (40, 64), "token_types": (2, 64), "token_embd_norm": (64,),
        **{f"blk.0.attn_{name}": (64, 64) for name in ("q", "k", "v", "output")}, "blk.0.attn_output_norm": (64,),
        "blk.0.ffn_up": (96, 64), "blk.0.ffn_down": (64, 96), "blk.0.layer_output_norm": (64,),
    }.items():  # fmt: skip
        values = generator.normal(0, 0.3, shape).astype(np.float32)
        in_blocks = len(shape) == 2 and name not in ("position_embd", "token_types")
        blocks = q8_0(values) if in_blocks else None
        if blocks is not None and kind == "Q8_0":
            tensors[f"{name}.weight"] = Tensor(shape, kind, blocks.tobytes())
        else:
            tensors[f"{name}.weight"] = encode(values if blocks is None else from_q8_0(blocks, shape), "F32")
        if name.startswith("blk") or name.endswith("norm"):
            tensors[f"{name}.bias"] = encode(generator.normal(0, 0.3, shape[:1]).astype(np.float32), "F32")
    if labels:
        tensors["cls.output.weight"] = encode(generator.normal(0, 0.3, (labels, 64)).astype(np.float32), "F32")
    return write(path, BERT_KEYS | metadata, tensors)


def from_q8_0(blocks: Any, shape: tuple[int, ...]) -> Any:
    parts = blocks.reshape(-1, 34)
    return (parts[:, 2:].view(np.int8) * parts[:, :2].copy().view("<f2").astype(np.float32)).reshape(shape)


def test_blocks_of_a_bert_keep_their_type_and_widen_exactly(tmp_path: Path) -> None:
    path, whole = (random_bert(tmp_path / f"{kind}.gguf", kind) for kind in ("Q8_0", "F32"))
    encoded = [EncodedText(tuple(range(start, 96, 3))) for start in (0, 20, 90)]
    like = run(load(whole), encoded)
    np.testing.assert_array_equal(run(load(path), encoded), like)
    assert (run(load(path, weights="auto"), encoded) * like).sum(axis=1).min() > 0.999
    body = pack_encoder(path, "auto").weights.body
    assert isinstance(body, BertWeights)
    assert {body.words.dtype, body.layers[0].qkv.dtype, body.layers[0].down.dtype} == {"q8"}


@pytest.mark.parametrize("count", [10, 11])
def test_more_than_ten_labels_have_numbers_because_the_converter_changes_their_order(
    count: int, tmp_path: Path
) -> None:
    names = list("abcdefghijk"[:count])
    path = random_bert(
        tmp_path / "a.gguf",
        "F32",
        count,
        **{"bert.pooling_type": RANK, "bert.classifier.output_labels": names},
    )
    labels = read_encoder(path).labels
    assert labels == (tuple(names) if count == 10 else tuple(f"LABEL_{index}" for index in range(count)))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"bert.pooling_type": RANK}, "0 to 3 .none, mean, first or last row., or 4 with cls.output"),
        ({"bert.pooling_type": "mean"}, "0 to 3"),
        ({"bert.attention.causal": True}, "bert.attention.causal is True; it must be absent or False"),
        ({"bert.attention.head_count": 3}, "bert.embedding_length is 64; it must be a multiple of"),
        ({"bert.block_count": 0}, "bert.block_count is 0"),
        ({"bert.rope.scaling.type": "yarn"}, "bert.rope.scaling.type is 'yarn'; it must be absent or none"),
        ({"general.quantization_version": 1}, "general.quantization_version is 1"),
        ({"general.architecture": "jina-bert-v2"}, "general.architecture is 'jina-bert-v2'; it must be one of"),
    ],
)
def test_metadata_of_another_bert_are_refused_by_the_key(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = random_bert(tmp_path / "a.gguf", "Q8_0", **metadata)
    with pytest.raises(UnsupportedModel, match=message):
        read_encoder(path)


def test_a_tensor_that_bert_does_not_use_is_refused(tmp_path: Path) -> None:
    folder = FOLDER / "bert"
    path = convert_encoder(folder, tmp_path / "a.gguf", {"bert.block_count": 1})
    with pytest.raises(UnsupportedModel, match=r"has tensor blk.1.attn_k.bias, which bert does not use"):
        load(path)
    path = convert_encoder(folder, tmp_path / "b.gguf", {"bert.context_length": 199})
    with pytest.raises(WrongTensor, match=r"position_embd.weight .* is \[200, 40\]; the metadata implies \[199, 40\]"):
        load(path)
