"""The dependencies of the bits id."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from quire.pager import KVLayout
from quire.runtime.common.config import EngineConfig
from quire.runtime.engine import bits
from quire.runtime.engine.bits import bits_id, encoder_bits_id, models_digest
from quire.runtime.model import BUNDLED_MODEL, DecoderSpec, read_spec

from tests.support.families import GOLDENS

SPEC = read_spec(BUNDLED_MODEL)
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, dtype="int8")


def id_of(isa: str = "scalar", model: bytes = b"model", spec: DecoderSpec = SPEC, **settings: Any) -> bytes:
    config = EngineConfig(**{"weights": "q8", "kv_cache_dtype": "int8", **settings})
    layout = replace(LAYOUT, dtype=config.kv_cache_dtype, page_size=config.page_size)
    capacity = SimpleNamespace(isa=isa, layout=layout, max_model_len=config.max_model_len or 2048)
    return bits_id(SimpleNamespace(spec=spec, capacity=capacity), config, model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [{"max_num_seqs": 3}, {"threads": 1}, {"isa": "avx2"}, {"max_model_len": 100}, {"num_speculative_tokens": 2}],
)
def test_sizes_threads_and_levels_with_the_same_bits_do_not_change_it(other: dict[str, Any]) -> None:
    assert id_of(**other) == id_of()


@pytest.mark.parametrize(
    "other",
    [{"weights": "q4"}, {"kv_cache_dtype": "f32"}, {"kv_cache_dtype": "f16"}, {"page_size": 16}, {"model": b"another"}],
)
def test_dtypes_pages_and_models_change_it(other: dict[str, Any]) -> None:
    assert id_of(**other) != id_of()


def test_the_dtype_of_states_changes_it_for_models_with_matrices() -> None:
    for family, has_matrices in (("granite_hybrid", True), ("qwen3_next", True), ("lfm2", False), ("llama", False)):
        spec = read_spec(GOLDENS / family)
        assert (id_of(spec=spec, state_dtype="bf16") != id_of(spec=spec)) == has_matrices


def test_with_f16_in_the_cache_it_is_the_same_at_every_level() -> None:
    assert id_of(isa="avx2", kv_cache_dtype="f16") == id_of(kv_cache_dtype="f16")


@pytest.mark.parametrize("bf16", [{"weights": "bf16"}, {"weights": "auto"}, {"kv_cache_dtype": "bf16"}])
def test_in_bf16_it_depends_on_the_level(bf16: dict[str, Any]) -> None:
    assert id_of(isa="avx2", **bf16) != id_of(**bf16)
    assert id_of(weights="bf16") == id_of(weights="auto"), "which is bf16 for this model"


@pytest.mark.parametrize("weights", ["q8", "f32", "bf16", "auto"])
def test_an_encoder_depends_on_the_level_in_bf16_alone(weights: str) -> None:
    same = encoder_bits_id("avx2", weights, b"model") == encoder_bits_id("scalar", weights, b"model")
    assert same == (weights in ("q8", "f32"))
    assert encoder_bits_id("avx2", weights, b"another") != encoder_bits_id("avx2", weights, b"model")
    assert encoder_bits_id("avx2", weights, b"model") != encoder_bits_id("avx2", "q4", b"model")


def test_another_form_of_q8_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = id_of(), encoder_bits_id("avx2", "q8", b"model")
    monkeypatch.setattr(bits, "Q8_FORM", 1)
    assert id_of() != before[0]
    assert encoder_bits_id("avx2", "q8", b"model") != before[1]


def test_a_build_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = id_of()
    monkeypatch.setattr(bits, "_version", lambda: "9.9")
    assert id_of() != before


def test_a_digest_of_the_configurations_ignores_the_weights_files(monkeypatch: pytest.MonkeyPatch) -> None:
    before = models_digest(EngineConfig())
    monkeypatch.setattr(bits, "read_spec", lambda _: replace(SPEC, quantized={"a": "gptq"}))
    assert models_digest(EngineConfig()) == before
    monkeypatch.setattr(bits, "read_spec", lambda _: replace(SPEC, num_layers=5))
    assert models_digest(EngineConfig()) != before
