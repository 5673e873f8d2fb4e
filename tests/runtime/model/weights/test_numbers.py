"""Numbers that no trained model has are refused during packing, for every type of packed weights."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import CorruptCheckpoint
from quire.runtime.model import pack_model
from quire.runtime.model.encoder import pack_encoder
from quire.runtime.model.weights.numbers import LARGEST, check_numbers

GOLDENS = Path(__file__).parents[3] / "goldens"
SCALES = [  # type, bytes of a block, and where an f16 scale begins
    ("Q8_0", 34, 0), ("Q4_0", 18, 0), ("Q4_Z", 19, 0), ("Q4_1", 20, 0), ("Q4_1", 20, 2), ("Q5_0", 22, 0),
    ("Q5_1", 24, 0), ("Q5_1", 24, 2), ("Q4_K", 144, 0), ("Q4_K", 144, 2), ("Q5_K", 176, 0), ("Q5_K", 176, 2),
    ("Q6_K", 210, 208), ("Q2_K", 84, 80), ("Q2_K", 84, 82), ("IQ4_NL", 18, 0), ("TQ1_0", 54, 52), ("TQ2_0", 66, 64),
]  # fmt: skip
BOUNDS = [  # type, bytes of a block, the place of its scale, and the largest one whose weights are at most LARGEST
    ("Q3_K", 110, 108, 2048), ("IQ2_XXS", 66, 0, 1569), ("IQ2_XS", 74, 0, 1569), ("IQ2_S", 82, 0, 1569),
    ("IQ3_XXS", 98, 0, 544.5), ("IQ3_S", 110, 0, 563.5), ("IQ4_XS", 136, 0, 64.5),
]  # fmt: skip
BAD_BF16 = {0x7FC0: "NaN", 0xFFFF: "NaN", 0x7F80: "an infinity", 0xFF80: "an infinity", 0xCB00: "8.39e"}


def stored(values: Any, kind: str) -> Any:
    rows = np.array(values, np.float32)
    if kind == "BF16":
        return (rows.view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return rows.astype({"F16": np.float16, "F32": np.float32}[kind])


def check(rows: Any, kind: str) -> None:
    check_numbers(rows, kind, "a.weight", Path("model"))


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.nan, "NaN"),
        (-np.nan, "NaN"),
        (np.inf, "an infinity"),
        (-np.inf, "an infinity"),
        (-(1 << 19), "(5.24e|an inf)"),
    ],
)
def test_one_bad_element_is_found(kind: str, value: float, shown: str) -> None:
    rows = np.full((3, 40), -1.0, np.float32)
    check(stored(rows, kind), kind)
    rows[2, 39] = value
    with pytest.raises(
        CorruptCheckpoint, match=f"tensor a.weight in model has {shown}.*; numbers must be from -262144"
    ):
        check(stored(rows, kind), kind)


def test_the_largest_numbers_and_no_numbers_are_allowed() -> None:
    for kind, largest in (("BF16", LARGEST), ("F16", 65504), ("F32", LARGEST)):
        check(stored([[largest, -largest, 0.0, 1e-7]], kind), kind)
        check(stored(np.zeros((0, 4)), kind), kind)
    check(np.zeros((0, 34), np.uint8), "Q8_0")


@pytest.mark.parametrize(("kind", "size", "at"), SCALES)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_one_bad_scale_of_a_block_is_found(kind: str, size: int, at: int, scale: float) -> None:
    rows = np.full((2, 3 * size), 0xFF, np.uint8)  # NaN wherever there is no scale
    blocks = rows.reshape(6, size)
    for one_kind, _, place in SCALES:
        if one_kind == kind:
            blocks[:, place : place + 2] = np.array([65504], np.float16).view(np.uint8)
    check(rows, kind)
    blocks[5, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(CorruptCheckpoint, match=r"a\.weight"):
        check(rows, kind)


@pytest.mark.parametrize(("kind", "size", "at", "largest"), BOUNDS)
def test_a_scale_that_could_make_a_weight_too_large_is_found(kind: str, size: int, at: int, largest: float) -> None:
    rows = np.full((2, 3 * size), 0xFF, np.uint8)
    for scale, is_bad in ((-largest, False), (largest * 1.01, True), (np.nan, True), (-np.inf, True)):
        rows.reshape(6, size)[:, at : at + 2] = np.array([1], np.float16).view(np.uint8)
        rows.reshape(6, size)[5, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        if is_bad:
            with pytest.raises(CorruptCheckpoint, match=r"a\.weight"):
                check(rows, kind)
        else:
            check(rows, kind)


def test_exponents_of_mxfp4() -> None:
    rows = np.full((2, 34), 0xFF, np.uint8)
    rows[:, ::17] = 127 + 18
    check(rows, "MXFP4")
    for exponent in (255, 254, 127 + 19):
        rows[1, 17] = exponent
        with pytest.raises(CorruptCheckpoint, match=r"a\.weight"):
            check(rows, "MXFP4")


def damaged(name: str, tensor: str, bits: int, tmp_path: Path) -> Path:
    """Return a copy of a golden folder in which the first number of a tensor has other bits."""
    folder = Path(shutil.copytree(GOLDENS / name, tmp_path / "model"))
    data = bytearray((folder / "model.safetensors").read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    about = json.loads(data[8 : 8 + length])[tensor]
    assert about["dtype"] == "BF16"
    struct.pack_into("<H", data, 8 + length + about["data_offsets"][0], bits)
    (folder / "model.safetensors").write_bytes(data)
    return folder


@pytest.mark.parametrize("weights", ["f32", "bf16", "q8", "q4"])
@pytest.mark.parametrize("bits", BAD_BF16)
@pytest.mark.parametrize("tensor", ["encoder.layer.1.output.dense.weight", "encoder.layer.1.output.dense.bias"])
def test_an_encoder_with_such_a_number_is_refused(tensor: str, weights: Any, bits: int, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=f"{tensor} .* has {BAD_BF16[bits]}"):
        pack_encoder(damaged("encoders/bert", tensor, bits, tmp_path), weights)


@pytest.mark.parametrize(
    "tensor", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_a_decoder_with_such_a_number_is_refused(tensor: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=f"{tensor} .* has NaN"):
        pack_model(damaged("qwen3", tensor, 0x7FC0, tmp_path), "q8")
