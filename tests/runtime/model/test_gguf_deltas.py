"""GGUF files of families with gated delta nets: value heads in llama.cpp's order, and layers that are not read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import ModelError
from quire.runtime.model import pack_model, read_spec

from tests.support.families import GOLDENS
from tests.support.gguf_files import NAMES, convert, describe, encode, stored_tensors, write

FAMILIES = ("qwen3_5", "qwen3_5_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spec_is_that_of_the_folder_with_tiled_value_heads(family: str, tmp_path: Path) -> None:
    expected = read_spec(GOLDENS / family)
    assert expected.delta is not None
    spec = read_spec(convert(GOLDENS / family, tmp_path / "a.gguf"))
    sizes = {"intermediate_size": expected.intermediate_size}  # size of no layer of a mixture
    like = replace(expected, names=NAMES[family], norm_offset=0.0, delta=replace(expected.delta, tiled=True), **sizes)
    assert replace(spec, **sizes) == like


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(
    family: str, tmp_path: Path, compute_logits: Callable[..., Any], golden_logits: Callable[[str], Any]
) -> None:
    token_ids, wanted = golden_logits(family)
    logits = compute_logits(pack_model(convert(GOLDENS / family, tmp_path / "a.gguf"), "f32"), token_ids)
    assert np.abs(logits - wanted).max() / (wanted.max() - wanted.min()) < 2e-4


@pytest.fixture
def golden_logits() -> Callable[[str], Any]:
    def load(family: str) -> Any:
        with np.load(GOLDENS / family / "golden.npz") as data:
            return data["token_ids"].tolist(), data["logits"]

    return load


def changed(path: Path, family: str, metadata: dict[str, Any], *tensors: str) -> Path:
    """Write the file of a golden with other metadata, and with further tensors."""
    more = {name: encode(np.ones((8, 8), np.float32), "F32") for name in tensors}
    keys = {key: value for key, value in {**describe(GOLDENS / family), **metadata}.items() if value is not None}
    return write(path, keys, {**stored_tensors(GOLDENS / family, "F32"), **more})


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    keys = {"qwen35.block_count": 4, "qwen35.nextn_predict_layers": 1}
    tensors = "blk.3.attn_q.weight", "blk.3.nextn.eh_proj.weight"
    spec = read_spec(changed(tmp_path / "a.gguf", "qwen3_5", keys, *tensors))
    assert spec == read_spec(convert(GOLDENS / "qwen3_5", tmp_path / "b.gguf"))
    with pytest.raises(ModelError, match=r"tensor blk\.3\.attn_q\.weight, which qwen35 does not use"):
        read_spec(changed(tmp_path / "a.gguf", "qwen3_5", {}, *tensors))


def test_layers_with_linear_attention_may_be_listed(tmp_path: Path) -> None:
    keys = {"qwen35.attention.recurrent_layers": [True, False, True], "qwen35.full_attention_interval": None}
    spec = read_spec(changed(tmp_path / "a.gguf", "qwen3_5", keys))
    assert spec.delta is not None
    assert spec.delta.layers == (True, False, True)


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"qwen35.ssm.inner_size": 217}, "qwen35.ssm.inner_size is 217; it must be a multiple of the 6 value heads"),
        ({"qwen35.ssm.time_step_rank": 0}, "qwen35.ssm.time_step_rank is 0"),
        ({"qwen35.ssm.state_size": None}, "qwen35.ssm.state_size is missing"),
        ({"qwen35.nextn_predict_layers": 3}, "qwen35.nextn_predict_layers is 3; it must be an integer from 0 to 2"),
        ({"qwen35.attention.recurrent_layers": [True]}, "recurrent_layers is .*; it must be true or false for each"),
        ({"qwen35.attention.recurrent_layers": [1, 0, 1]}, "recurrent_layers is .*; it must be true or false for each"),
        ({"qwen35.full_attention_interval": 7}, "it must be such that one layer or more has full_attention"),
        ({"qwen35.rope.dimension_count": 40}, "qwen35.rope.dimension_count is 40"),
    ],
)
def test_metadata_that_is_refused(tmp_path: Path, metadata: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        read_spec(changed(tmp_path / "a.gguf", "qwen3_5", metadata))
