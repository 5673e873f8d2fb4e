"""Embedding models in GGUF files: the vectors of the folders that they were made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire import LLM
from quire.runtime.common.errors import UnsupportedModel
from quire.runtime.model import BUNDLED_MODEL
from quire.runtime.model.encoder import is_encoder, read_encoder

from tests.support.families import GOLDENS
from tests.support.gguf_files import convert

TEXTS = ["This module provides a queue", "b", "The parser reads " * 20]
LAST = 3  # pooling_type of llama.cpp


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


@pytest.mark.parametrize("number", [4, 9, "mean"])
def test_other_kinds_of_pooling_are_refused(number: Any, tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.gguf", number)
    with pytest.raises(UnsupportedModel, match=r"pooling_type is .*; it must be 1, 2 or 3 \(mean, first or last row\)"):
        read_encoder(path)


@pytest.mark.parametrize(("family", "architecture"), [("gemma4", "gemma4"), ("deepseek_v3", "deepseek2")])
def test_a_decoder_whose_attention_needs_pages_makes_no_vectors(family: str, architecture: str, tmp_path: Path) -> None:
    path = convert(GOLDENS / family, tmp_path / "a.gguf", metadata={f"{architecture}.pooling_type": LAST})
    with pytest.raises(UnsupportedModel, match="no latent attention, no layers that differ in their heads"):
        read_encoder(path)
