"""Packing: unpacked weights equal the source, rounded as the dtype rounds and no more."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.kernels import PackedMatrix, packed_nbytes
from quire.kernels.pack import widen_blocks

from tests.support.reference import rotated, rotated_back, round_bf16


def memory(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def matrix(n: int, k: int, dtype: str, group: int = 0) -> PackedMatrix:
    return PackedMatrix(n, k, dtype, memory(packed_nbytes(n, k, dtype, group)), group=group)


def q8_by_numpy(w: np.ndarray, size: int = 32) -> np.ndarray:
    """Quantize and widen as Q8_0 does: blocks of 32 along K, numbers of scale max|w| / 127, which is stored in fp16."""
    n, k = w.shape
    blocks = np.zeros((n, -(-k // size) * size), np.float32)
    blocks[:, :k] = w
    blocks = blocks.reshape(n, -1, size)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, where=scale > 0, out=np.zeros_like(scale))
    steps = np.abs(blocks * inverse)
    q = np.copysign(np.floor(steps) + np.floor(2 * (steps - np.floor(steps))), blocks)
    return (q * scale.astype(np.float16).astype(np.float32)).reshape(n, -1)[:, :k]


def q4_by_numpy(w: np.ndarray) -> np.ndarray:
    """Quantize and widen with the best of 32 scales per block of 32, or the plain scale if it is no worse."""
    n, k = w.shape
    blocks = np.zeros((n, -(-k // 32) * 32), np.float32)
    blocks[:, :k] = w
    blocks = blocks.reshape(-1, 32)
    most, least = np.maximum(blocks.max(axis=1), 0), np.minimum(blocks.min(axis=1), 0)
    top = np.maximum(most, -least)
    plain = np.where(-least < most, most, least) / np.float32(-8)
    gain = np.full(len(blocks), -1, np.float32)
    scale = plain.copy()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for size in np.arange(5, 9, 0.25, dtype=np.float32):
            for inverse in (size / top, -(size / top)):
                q = nearest_q4(blocks, inverse)
                product = ordered_sum(blocks * q)
                square = ordered_sum(q * q)
                better = product / square * product > gain
                gain = np.where(better, product / square * product, gain)
                scale = np.where(better, product / square, scale)
    (searched, off) = rounded_q4(blocks, scale)
    (absmax, absmax_off) = rounded_q4(blocks, plain)
    return np.where((off < absmax_off)[:, None], searched, absmax).reshape(n, -1)[:, :k]


def rounded_q4(blocks: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values that blocks have with these scales rounded to fp16, and each block's squared error."""
    scale = np.clip(scale, -65504, 65504).astype(np.float16).astype(np.float32)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    values = nearest_q4(blocks, inverse) * scale[:, None]
    order = [4 * line + byte % 4 + byte // 4 * 16 for line in range(4) for byte in range(8)]
    return values, ordered_sum(((blocks - values) ** 2)[:, order])


def nearest_q4(blocks: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    return np.rint(np.clip(np.nan_to_num(blocks * inverse[:, None], nan=-8), -8, 7))


def ordered_sum(x: np.ndarray) -> np.ndarray:
    """Add up the columns in float32, from left to right."""
    return np.add.accumulate(x, axis=1, dtype=np.float32)[:, -1]


@given(n=st.integers(1, 70), k=st.integers(1, 100), seed=st.integers(0, 99), exponent=st.integers(-9, 4))
def test_every_shape_unpacks_to_its_rounded_values(n, k, seed, exponent):
    w = (np.random.default_rng(seed).standard_normal((n, k)) * 10.0**exponent).astype(np.float32)
    expected = {"f32": w, "bf16": round_bf16(w).astype(np.float32), "q8": q8_by_numpy(w), "q4": q4_by_numpy(w)}
    for dtype, want in expected.items():
        packed = matrix(n, k, dtype)
        packed.fill(w)
        assert np.array_equal(packed.unpack(), want), dtype


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8", "q4"])
def test_bf16_bits_and_fp16_are_accepted_as_they_come_from_files(dtype):
    w = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float16)
    bits = (round_bf16(w.astype(np.float32)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for source, value in ((w, w.astype(np.float32)), (bits, round_bf16(w.astype(np.float32)).astype(np.float32))):
        a, b = matrix(40, 64, dtype), matrix(40, 64, dtype)
        a.fill(source)
        b.fill(np.ascontiguousarray(value))
        assert np.array_equal(a.unpack(), b.unpack())


def test_every_number_of_fp16_is_widened_exactly():
    source = np.resize(np.arange(1 << 16, dtype=np.uint16), (1986, 33)).view(np.float16)
    packed = matrix(1986, 33, "f32")
    packed.fill(source)
    assert np.array_equal(packed.unpack(), source.astype(np.float32), equal_nan=True)


def test_inputs_beyond_the_last_one_are_zero_in_bf16():
    raw = memory(packed_nbytes(16, 33, "bf16"))
    PackedMatrix(16, 33, "bf16", raw).fill(np.ones((16, 33), np.float32))
    tiles = raw.view(np.uint16).reshape(2, 32, 16, 2)[0].swapaxes(1, 2).reshape(64, 16)
    assert tiles[:33].all()
    assert not tiles[33:].any()


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


def absmax_q4(w: np.ndarray) -> np.ndarray:
    """Quantize as Q4_0 does: the weight of largest magnitude of a block becomes -8."""
    blocks = w.reshape(-1, 32)
    top = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)[:, 0]
    return rounded_q4(blocks, top / np.float32(-8))[0].reshape(w.shape)


@pytest.mark.parametrize("shape", ["normal", "uniform", "one sign", "outlier", "zeros"])
def test_the_scale_of_q4_is_never_worse_than_the_plain_one(shape):
    rng = np.random.default_rng(3)
    w = {
        "normal": rng.normal(0, 1, (96, 256)),
        "uniform": rng.uniform(-1, 1, (96, 256)),
        "one sign": rng.uniform(0.5, 1, (96, 256)),
        "outlier": np.where(rng.random((96, 256)) < 0.03, 40, rng.normal(0, 1, (96, 256))),
        "zeros": np.zeros((96, 256)),
    }[shape].astype(np.float32)
    packed = matrix(96, 256, "q4")
    packed.fill(w)
    off, plain_off = (
        ((w - values) ** 2).reshape(-1, 32).sum(axis=1, dtype=np.float64) for values in (packed.unpack(), absmax_q4(w))
    )
    assert (off <= plain_off * (1 + 1e-6)).all()
    if shape in ("normal", "uniform"):
        assert off.sum() < 0.9 * plain_off.sum()


def test_q4_fills_columns_of_any_start_and_from_two_sources():
    w = np.random.default_rng(0).standard_normal((75, 70)).astype(np.float32)
    together = matrix(80, 70, "q4")
    apart = matrix(80, 70, "q4")
    pair = matrix(160, 70, "q4")
    together.fill(w, start=5)
    for row in range(0, 75, 7):
        apart.fill(w[row : row + 7], start=5 + row)
    assert np.array_equal(apart.unpack(), together.unpack())
    pair.fill(w, interleave=0)
    pair.fill(-w, interleave=1)
    blocks = pair.unpack().reshape(5, 2, 16, 70)
    assert np.array_equal(blocks[:, 0].reshape(80, 70)[:75], together.unpack()[5:])
    assert np.array_equal(blocks[:, 1].reshape(80, 70)[:75], q4_by_numpy(-w))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: PackedMatrix(4, 4, "int3", memory(4096)), "one of f32, bf16, q8, q4"),
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


@pytest.mark.parametrize("k", [32, 40, 64, 96, 128, 160, 320, 576, 896, 1024])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_blocks_of_a_group_are_rotated_and_share_a_scale(k, group):
    """The weights are integers, so that the sums of a rotation are exact."""
    weights = np.random.default_rng(k).integers(-50, 50, (20, k)).astype(np.float32)
    weights[:, k // 3] *= 30
    packed = matrix(20, k, "q8", group)
    packed.fill(weights)
    inputs = rotated(weights.astype(np.float64), group)
    stored = np.zeros_like(inputs)
    for first in range(0, inputs.shape[1], 32 * group):
        part = inputs[:, first : first + 32 * group]
        unit = weight_unit(part.shape[1])
        stored[:, first : first + 32 * group] = q8_by_numpy((part * unit).astype(np.float32), part.shape[1]) / unit
    np.testing.assert_allclose(packed.unpack(), rotated_back(stored, group)[:, :k], rtol=0, atol=2e-3)


def weight_unit(columns: int) -> float:
    """Return the size of stored weights relative to orthonormally rotated ones: nearly 1, from a power of two."""
    block = columns & -columns
    return float(block**0.5 / 2 ** np.ceil(np.log2(block) / 2))


def test_rows_of_ggml_blocks_are_quantized_again_in_groups():
    blocks = np.random.default_rng(3).integers(0, 40, (50, 8 * 34), np.uint8)
    packed, widened = matrix(50, 256, "q8", 4), matrix(50, 256, "q8", 4)
    packed.fill_blocks(blocks, "Q8_0")
    widened.fill(widen_blocks(blocks, "Q8_0"))
    np.testing.assert_array_equal(packed.unpack(), widened.unpack())


def test_scales_of_groups_take_less_memory():
    assert [packed_nbytes(64, 320, "q8", group) for group in (0, 1, 2, 4)] == [21760, 21760, 21120, 20864]


def test_only_q8_has_groups():
    for dtype, group in (("q4", 4), ("f32", 2), ("q8", 3), ("q8", 8), ("q8", -1)):
        with pytest.raises(ValueError, match=f"only a matrix in q8 has groups, of 1, 2 or 4 blocks, not {group}"):
            matrix(32, 64, dtype, group)


def test_scales_of_q8_between_two_fp16_numbers_are_rounded_to_the_even_one():
    lower = np.arange(0, 0x7BFE, 13, np.uint16)
    middle = (lower.view(np.float16).astype(np.float32) + (lower + 1).view(np.float16).astype(np.float32)) / 2
    weights = np.zeros((len(middle), 32), np.float32)
    weights[:, 5] = 127 * middle
    expected = np.where(lower % 2 == 0, lower, lower + 1).view(np.float16).astype(np.float32)
    packed = matrix(*weights.shape, "q8")
    packed.fill(weights)
    assert np.array_equal(packed.unpack()[:, 5], 127 * expected)
