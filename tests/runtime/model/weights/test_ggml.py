"""The older types of blocks, compared with GGML's formulas, one element at a time."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from quire.kernels.pack import widen_blocks

BYTES = {"Q4_1": 20, "Q5_0": 22, "Q5_1": 24}


def random_rows(kind: str, rows: int, blocks: int) -> Any:
    """Return random blocks with finite scales, uint8 [rows, row bytes]."""
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (rows, blocks, BYTES[kind]), np.uint8)
    for at in (0,) if kind == "Q5_0" else (0, 2):
        scales = rng.standard_normal((rows, blocks, 1)).astype(np.float16)
        data[:, :, at : at + 2] = scales.view(np.uint8)
    return data.reshape(rows, -1)


def elements(kind: str, block: bytes) -> list[np.float32]:
    """Return the 32 elements of a block, as GGML's dequantize_row_… computes them."""
    (scale,) = np.frombuffer(block[:2], np.float16)
    at = 2
    minimum = np.float32(0)
    if kind != "Q5_0":
        minimum = np.float32(np.frombuffer(block[2:4], np.float16)[0])
        at = 4
    bits = 0
    if kind != "Q4_1":
        (bits,) = struct.unpack("<I", block[at : at + 4])
        at += 4
    out = []
    for i in range(32):
        number = block[at + i % 16] >> 4 * (i // 16) & 15 | (bits >> i & 1) << 4
        out.append(np.float32(scale) * np.float32(number - 16 * (kind == "Q5_0")) + minimum)
    return out


@pytest.mark.parametrize("kind", BYTES)
def test_values_are_those_of_the_formula(kind: str) -> None:
    rows = random_rows(kind, 3, 2)
    found = widen_blocks(rows, kind)
    blocks = rows.reshape(-1, BYTES[kind])
    expected = np.array([elements(kind, block.tobytes()) for block in blocks], np.float32).reshape(3, 64)
    np.testing.assert_array_equal(found, expected)


def test_any_bytes_are_widened_without_a_warning() -> None:
    rows = np.random.default_rng(4).integers(0, 256, (500, 20 * 24), np.uint8)
    assert widen_blocks(rows, "Q4_1").shape == (500, 24 * 32)
    assert widen_blocks(rows, "Q5_1").shape == (500, 20 * 32)
