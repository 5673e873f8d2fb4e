"""The bundled embedding model: its size, its names, and its search of held-out sections, equal to torch's."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from quire import LLM
from quire.runtime.model import model_path
from quire.runtime.model.encoder import is_encoder, read_encoder
from quire.runtime.model.encoder.registry import open_encoder
from quire.runtime.model.encoder.weights import build_encoder_weights
from quire.runtime.model.files import BUNDLED_EMBEDDING_MODEL, BUNDLED_MODEL
from quire.runtime.model.weights.tensors import check_built

from tests.bench.embedding_recall import DATA, ranks_of, recall


def test_bundled_models_have_names_unless_a_folder_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_path("demo_embedding") == BUNDLED_EMBEDDING_MODEL
    assert model_path("demo_model") == model_path(None) == BUNDLED_MODEL
    (tmp_path / "demo_embedding").mkdir()
    assert model_path("demo_embedding") == Path("demo_embedding")


def test_it_is_small() -> None:
    assert is_encoder(BUNDLED_EMBEDDING_MODEL)
    spec = read_encoder(BUNDLED_EMBEDDING_MODEL)
    assert (spec.dimensions, spec.pooling, spec.normalize, spec.max_model_len) == (256, "mean", True, 512)
    _, tensors = open_encoder(BUNDLED_EMBEDDING_MODEL)
    names = check_built(lambda factory: build_encoder_weights(spec, "f32", factory), tensors)
    assert sum(prod(tensors.shape(name)) for name in names) <= 5_000_000
    assert sum(path.stat().st_size for path in BUNDLED_EMBEDDING_MODEL.iterdir() if path.is_file()) < 10_000_000


def test_in_f32_held_out_titles_are_as_near_to_their_sections_as_in_torch() -> None:
    with LLM("demo_embedding", weights="f32", threads=1) as llm:
        for (page, title), cosine in zip(DATA["held_out"], DATA["torch_cosines"], strict=True):
            texts = [text for *names, text in DATA["passages"] if names == [page, title]]
            query, *passages = llm.embed([title, *texts], truncate_prompt_tokens=512)
            assert max(query @ passage for passage in passages) == pytest.approx(cosine, abs=1e-4)


def test_in_q8_it_finds_as_many_held_out_sections_as_in_torch() -> None:
    found = ranks_of("q8", threads=1)
    for k in (1, 10):
        assert recall(found, k) >= recall(DATA["torch_ranks"], k) - 0.5
