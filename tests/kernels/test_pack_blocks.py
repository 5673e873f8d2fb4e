"""Packing of GGML blocks: each number is exact where the dtype can hold it, else GGML's formula, rounded."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.kernels.pack import BLOCK_DTYPES, BLOCK_TYPES, widen_blocks

from tests.kernels.test_pack import matrix
from tests.support.ggml import BLOCKS, FORMULAS, SCALES, dequantize, random_blocks

WIDENED = {  # type -> SHA-256 of the f32 values that the Python package gguf 0.19 gives `blocks_of(type)`
    "Q2_K": "00d19edbce67e9345bcb740893ef922e33ac51a345e074bf84f091efb2fda21f",
    "Q3_K": "a7e8d33f8d554d5d7d0a08fa61e789df34fbf9e2c8b0108f52ee5cd91e246aa4",
    "IQ2_XXS": "7007411a5198810d9c9bcf692e4222b96cf00a00c2efc288418edc96221d6858",
    "IQ2_XS": "d3adf211a64beb6c031604d82165d47b358336f7502bfbf5230e3751ca8a4648",
    "IQ2_S": "2b544f75e20dccd93fecfb544e2690b4d980f9978a3cf5a6e00950d53a2374ba",
    "IQ3_XXS": "c6d2d4673de09ce95782c522c4b167a420d5c19e66b137eec3f35da0afd3e9e4",
    "IQ3_S": "9761391a1b28b3acd03dc090e80cad76be38bfbe26f550a0c5510715c5236021",
    "IQ4_NL": "662dc9dfec43e6ca926f262404ab98730de230b1b7b7223780747bf5350f1e19",
    "IQ4_XS": "e9377056a22569df11d0f78744379f83455b13f5990c8b7c7f9e817fc52cefb0",
    "TQ1_0": "c46d4101c6edfa1da7afcad1d6bc4a85f75d6d149e4175cb21c6dd8fff2dfa75",
    "TQ2_0": "0c78a1862c9bacfab99a0f925133eb862bbdaef8b049f81b71d5f88f92f7fd15",
}
TYPES = list(FORMULAS)
KEPT = [kind for kind in BLOCK_DTYPES if kind in FORMULAS]  # types whose blocks a dtype has bit for bit


@given(ggml_type=st.sampled_from(TYPES), rows=st.integers(0, 5), count=st.integers(0, 3), seed=st.integers(0, 99))
def test_blocks_are_widened_with_the_formula_of_their_type(ggml_type, rows, count, seed):
    weights, nbytes = BLOCKS[ggml_type]
    blocks = random_blocks(np.random.default_rng(seed), ggml_type, rows, count * weights)
    assert blocks.shape == (rows, count * nbytes)
    assert widen_blocks(blocks, ggml_type).tobytes() == dequantize(blocks, ggml_type).tobytes()


@pytest.mark.parametrize("scale", [0, -0.0, 6e-8, -1.5, 65504, np.inf, np.nan])
@pytest.mark.parametrize("ggml_type", TYPES)
def test_any_scale_is_widened(ggml_type, scale):
    blocks = np.random.default_rng(1).integers(0, 256, (1, BLOCKS[ggml_type][1]), np.uint8)
    for offset in SCALES[ggml_type]:
        blocks[0, offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    with np.errstate(invalid="ignore"):
        assert np.array_equal(widen_blocks(blocks, ggml_type), dequantize(blocks, ggml_type), equal_nan=True)


def test_every_scale_of_mxfp4_is_kept():
    blocks = np.random.default_rng(1).integers(0, 256, (255, 17), np.uint8)
    blocks[:, 0] = np.arange(255)
    packed = matrix(255, 32, "mxfp4")
    packed.fill_blocks(blocks, "MXFP4")
    assert np.array_equal(packed.unpack(), dequantize(blocks, "MXFP4"))
    assert np.array_equal(widen_blocks(blocks, "MXFP4"), dequantize(blocks, "MXFP4"))


@given(ggml_type=st.sampled_from(KEPT), rows=st.integers(1, 70), count=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_dtype_with_the_same_numbers_keeps_every_bit(ggml_type, rows, count, seed):
    columns = count * BLOCKS[ggml_type][0]
    blocks = random_blocks(np.random.default_rng(seed), ggml_type, rows, columns)
    packed = matrix(rows, columns, BLOCK_DTYPES[ggml_type])
    packed.fill_blocks(blocks, ggml_type)
    assert packed.unpack().tobytes() == dequantize(blocks, ggml_type).tobytes()


@pytest.mark.parametrize("ggml_type", KEPT)
def test_blocks_fill_columns_of_any_start_and_from_two_sources(ggml_type):
    columns = 2 * BLOCKS[ggml_type][0]
    dtype = BLOCK_DTYPES[ggml_type]
    rng = np.random.default_rng(2)
    first, second = (random_blocks(rng, ggml_type, 75, columns) for _ in range(2))
    apart = matrix(80, columns, dtype)
    pair = matrix(160, columns, dtype)
    for row in range(0, 75, 7):
        apart.fill_blocks(first[row : row + 7], ggml_type, start=5 + row)
    assert np.array_equal(apart.unpack()[5:], dequantize(first, ggml_type))
    pair.fill_blocks(first, ggml_type, interleave=0)
    pair.fill_blocks(second, ggml_type, interleave=1)
    halves = pair.unpack().reshape(5, 2, 16, columns)
    for half, blocks in enumerate((first, second)):
        assert np.array_equal(halves[:, half].reshape(80, columns)[:75], dequantize(blocks, ggml_type))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8", "q4"])
@pytest.mark.parametrize("ggml_type", TYPES)
def test_another_dtype_has_the_widened_values_rounded(ggml_type, dtype):
    if BLOCK_DTYPES.get(ggml_type) == dtype:
        return
    blocks = random_blocks(np.random.default_rng(3), ggml_type, 150, 256)
    packed = matrix(150, 256, dtype)
    rounded = matrix(150, 256, dtype)
    packed.fill_blocks(blocks, ggml_type)
    rounded.fill(dequantize(blocks, ggml_type))
    assert packed.unpack().tobytes() == rounded.unpack().tobytes()


@pytest.mark.parametrize("ggml_type", ["Q4_1", "Q5_1", "Q6_K"])
def test_blocks_that_are_quantized_again_fill_columns_of_any_start(ggml_type):
    blocks = random_blocks(np.random.default_rng(5), ggml_type, 75, 512)
    packed = matrix(80, 512, "q8")
    rounded = matrix(75, 512, "q8")
    for row in range(0, 75, 7):
        packed.fill_blocks(blocks[row : row + 7], ggml_type, start=5 + row)
    rounded.fill(dequantize(blocks, ggml_type))
    assert np.array_equal(packed.unpack()[5:], rounded.unpack())


@pytest.mark.parametrize("scale", [0, 6e-8, 65504, np.inf, np.nan])
@pytest.mark.parametrize("ggml_type", ["Q4_1", "Q5_1"])
def test_blocks_with_any_scale_are_quantized_as_their_numbers_are(ggml_type, scale):
    blocks = random_blocks(np.random.default_rng(6), ggml_type, 3, 96).reshape(-1, BLOCKS[ggml_type][1])
    blocks[4, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    blocks[5, 2:4] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    packed = matrix(3, 96, "q8")
    rounded = matrix(3, 96, "q8")
    packed.fill_blocks(blocks.reshape(3, -1), ggml_type)
    with np.errstate(invalid="ignore"):
        rounded.fill(dequantize(blocks.reshape(3, -1), ggml_type))
    assert packed.unpack().tobytes() == rounded.unpack().tobytes()


def blocks_of(ggml_type, rows=8):
    """Return random blocks in which nearly every point of the type's grid occurs."""
    return random_blocks(np.random.default_rng(1), ggml_type, rows, 8192)


@pytest.mark.parametrize("ggml_type", WIDENED)
def test_small_types_have_the_values_of_the_package_gguf(ggml_type):
    assert hashlib.sha256(widen_blocks(blocks_of(ggml_type), ggml_type).tobytes()).hexdigest() == WIDENED[ggml_type]


def test_every_type_has_a_formula_or_a_digest():
    assert set(BLOCK_TYPES) == FORMULAS.keys() | WIDENED.keys()


@pytest.mark.parametrize("scale", [1, -1, 2.0**-12])
@pytest.mark.parametrize("ggml_type", ["Q3_K", "IQ3_XXS", "IQ3_S", "IQ4_NL", "TQ1_0", "TQ2_0"])
def test_small_types_have_the_same_weights_in_another_form(ggml_type, scale):
    blocks = blocks_of(ggml_type, 21).reshape(-1, BLOCKS[ggml_type][1])
    scales = np.ascontiguousarray(blocks[:, SCALES[ggml_type][0] :][:, :2]).view(np.float16) * np.float16(scale)
    blocks[:, SCALES[ggml_type][0] :][:, :2] = scales.view(np.uint8)
    rows = blocks.reshape(21, -1)
    packed = matrix(26, 8192, BLOCK_DTYPES[ggml_type])
    for row in range(0, 21, 9):
        packed.fill_blocks(rows[row : row + 9], ggml_type, start=5 + row)
    off = np.abs(packed.unpack()[5:] - widen_blocks(rows, ggml_type)).max()
    assert off <= (2**-25 * 31 * 31 if ggml_type == "IQ3_XXS" and abs(scale) < 1 else 0), (
        "half a scale may have no fp16 number"
    )


@pytest.mark.parametrize("ggml_type", ["IQ4_XS", "IQ2_XXS"])
def test_scales_of_blocks_of_32_are_rounded_to_fp16_and_numbers_are_kept(ggml_type):
    rows = blocks_of(ggml_type)
    packed = matrix(8, 8192, "q8")
    packed.fill_blocks(rows, ggml_type)
    found, exact = packed.unpack(), widen_blocks(rows, ggml_type)
    scales = np.abs(found - exact) / np.where(exact == 0, 1, np.abs(exact))
    assert 0 < scales.max() <= 2**-11
    assert np.array_equal(found == 0, exact == 0)


@pytest.mark.parametrize("ggml_type", ["Q2_K", "IQ2_XS", "IQ2_S"])
def test_scales_of_blocks_of_16_are_quantized_again(ggml_type):
    rows = blocks_of(ggml_type)
    packed = matrix(8, 8192, "q8")
    rounded = matrix(8, 8192, "q8")
    packed.fill_blocks(rows, ggml_type)
    rounded.fill(widen_blocks(rows, ggml_type))
    assert packed.unpack().tobytes() == rounded.unpack().tobytes()


def test_blocks_may_be_read_only():
    blocks = random_blocks(np.random.default_rng(4), "Q8_0", 3, 64)
    blocks.flags.writeable = False
    packed = matrix(3, 64, "q8")
    packed.fill_blocks(blocks, "Q8_0")
    assert np.array_equal(packed.unpack(), dequantize(blocks, "Q8_0"))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (
            lambda: widen_blocks(np.zeros((1, 34), np.uint8), "IQ1_S"),
            "one of Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, MXFP4, Q4_Z, Q4_1, Q5_0, Q5_1",
        ),
        (lambda: widen_blocks(np.zeros((1, 35), np.uint8), "Q8_0"), "whole blocks of 34 bytes, not 35"),
        (lambda: matrix(4, 64, "q8").fill_blocks(np.zeros((4, 34), np.uint8), "Q8_0"), "not 64 weights in Q8_0"),
        (lambda: matrix(4, 80, "q8").fill_blocks(np.zeros((4, 68), np.uint8), "Q8_0"), "not 80 weights in Q8_0"),
        (lambda: matrix(4, 64, "q8").fill_blocks(np.zeros((4, 64), np.uint8), "IQ2"), "one of Q8_0"),
        (lambda: matrix(4, 32, "q8").fill_blocks(np.zeros((40, 34), np.uint8), "Q8_0"), "do not fit"),
        (lambda: matrix(4, 32, "q8").fill_blocks(np.zeros((4, 34), np.uint8), "Q8_0", interleave=2), "interleave"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()
