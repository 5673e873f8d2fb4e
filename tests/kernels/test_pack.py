"""Packing: unpacked weights equal the source, rounded as the dtype rounds and no more."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.kernels import PackedMatrix, packed_nbytes

from tests.kernels.reference import round_bf16


def memory(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def matrix(n: int, k: int, dtype: str) -> PackedMatrix:
    return PackedMatrix(n, k, dtype, memory(packed_nbytes(n, k, dtype)))


def q8_by_numpy(w: np.ndarray) -> np.ndarray:
    """Quantise and widen as Q8_0 does: blocks of 32 along K, scale max|w| / 127 in fp16."""
    n, k = w.shape
    blocks = np.zeros((n, -(-k // 32) * 32), np.float32)
    blocks[:, :k] = w
    blocks = blocks.reshape(n, -1, 32)
    scale = (np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(scale > 0, np.clip(np.rint(blocks / scale), -127, 127), 0)
    return (q * scale).reshape(n, -1)[:, :k]


@given(n=st.integers(1, 70), k=st.integers(1, 100), seed=st.integers(0, 99), exponent=st.integers(-9, 4))
def test_every_shape_unpacks_to_its_rounded_values(n, k, seed, exponent):
    w = (np.random.default_rng(seed).standard_normal((n, k)) * 10.0**exponent).astype(np.float32)
    expected = {"f32": w, "bf16": round_bf16(w).astype(np.float32), "q8": q8_by_numpy(w)}
    for dtype, want in expected.items():
        packed = matrix(n, k, dtype)
        packed.fill(w)
        assert np.array_equal(packed.unpack(), want), dtype


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
def test_bf16_bits_and_fp16_are_accepted_as_they_come_from_files(dtype):
    w = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float16)
    bits = (round_bf16(w.astype(np.float32)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for source, value in ((w, w.astype(np.float32)), (bits, round_bf16(w.astype(np.float32)).astype(np.float32))):
        a, b = matrix(40, 64, dtype), matrix(40, 64, dtype)
        a.fill(source)
        b.fill(np.ascontiguousarray(value))
        assert np.array_equal(a.unpack(), b.unpack())


def test_two_sources_interleave_by_sixteen():
    gate = np.arange(32 * 4, dtype=np.float32).reshape(32, 4)
    packed = matrix(64, 4, "f32")
    packed.fill(gate, interleave=0)
    packed.fill(-gate, interleave=1)
    rows = packed.unpack()
    assert np.array_equal(rows[:16], gate[:16])
    assert np.array_equal(rows[16:32], -gate[:16])
    assert np.array_equal(rows[32:48], gate[16:])


def test_sources_follow_one_another():
    packed = matrix(10, 3, "f32")
    packed.fill(np.ones((4, 3), np.float32))
    packed.fill(np.full((6, 3), 2, np.float32), start=4)
    assert packed.unpack()[:, 0].tolist() == [1] * 4 + [2] * 6


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: PackedMatrix(4, 4, "int3", memory(4096)), "one of f32, bf16, q8"),
        (lambda: PackedMatrix(0, 4, "f32", memory(4096)), "positive sizes"),
        (lambda: PackedMatrix(400, 400, "f32", memory(4096)), "bytes are needed"),
        (lambda: PackedMatrix(4, 4, "f32", memory(4097)[1:]), "aligned to 64"),
        (lambda: matrix(4, 4, "f32").fill(np.zeros((4, 5), np.float32)), r"\[n, 4\]"),
        (lambda: matrix(4, 4, "f32").fill(np.zeros((40, 4), np.float32)), "do not fit"),
        (lambda: matrix(4, 4, "f32").fill(np.zeros((4, 4), np.float32), start=-1), "do not fit"),
        (lambda: matrix(4, 4, "f32").fill(np.zeros((4, 4), np.int32)), "float32, float16 or bf16"),
        (lambda: matrix(4, 4, "f32").fill(np.zeros((4, 4), np.float32), interleave=2), "interleave"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()
