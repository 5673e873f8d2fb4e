"""Numbers in the layouts of other tools: blocks and float32 with exactly these numbers, from words in any order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.kernels.pack import widen_blocks
from quire.kernels.words import inputs_in_words, join_blocks, join_mxfp4, reorder_words, widen_codes, widen_words

from tests.support.quantized_folders import AWQ_PLACES, pack

BITS = {"Q4_0": 4, "Q4_Z": 4, "Q8_0": 8}
MIDDLE = {"Q4_0": 8, "Q8_0": 128}
MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def as_stored(words, outputs_are_columns):
    """Return the same words as a tensor [outputs, words], or as a view of one [words, outputs]."""
    return np.ascontiguousarray(words.T).T if outputs_are_columns else words


@given(
    ggml_type=st.sampled_from(list(BITS)),
    rows=st.integers(0, 35),
    blocks=st.integers(0, 3),
    num_groups=st.integers(1, 4),
    outputs_are_columns=st.booleans(),
    seed=st.integers(0, 99),
)
def test_blocks_have_the_numbers_scales_and_zero_points(ggml_type, rows, blocks, num_groups, outputs_are_columns, seed):
    rng = np.random.default_rng(seed)
    bits = BITS[ggml_type]
    numbers = rng.integers(0, 1 << bits, (rows, blocks * 32))
    groups = rng.integers(0, num_groups, blocks).astype(np.int32)
    scales = rng.standard_normal((rows, num_groups)).astype(np.float16)
    zeros = rng.integers(0, 16, (rows, num_groups)).astype(np.uint8)
    zeros[:] = MIDDLE.get(ggml_type, zeros)
    words = as_stored(pack(numbers, bits), outputs_are_columns)
    found = join_blocks(words, as_stored(scales.view(np.uint16), outputs_are_columns), zeros, groups, ggml_type)
    of = groups.repeat(32)
    expected = (numbers.astype(np.float32) - zeros[:, of]) * scales[:, of].astype(np.float32)
    np.testing.assert_array_equal(widen_blocks(found, ggml_type), expected)


@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(0, 20),
    inputs=st.integers(1, 70),
    outputs_are_columns=st.booleans(),
    seed=st.integers(0, 99),
)
def test_numbers_of_any_groups_are_widened(bits, rows, inputs, outputs_are_columns, seed):
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 1 << bits, (rows, inputs))
    groups = rng.integers(0, 3, inputs).astype(np.int32)
    scales = rng.standard_normal((rows, 3)).astype(np.float32)
    zeros = rng.integers(0, 1 << bits, (rows, 3)).astype(np.uint8)
    found = widen_words(as_stored(pack(numbers, bits), outputs_are_columns), bits, scales, zeros, groups)
    expected = (numbers.astype(np.float32) - zeros[:, groups]) * scales[:, groups]
    np.testing.assert_array_equal(found, expected)


@given(
    bits=st.sampled_from([4, 8]),
    rows=st.integers(0, 35),
    words=st.integers(0, 5),
    outputs_are_columns=st.booleans(),
    seed=st.integers(0, 99),
)
def test_numbers_change_places(bits, rows, words, outputs_are_columns, seed):
    rng = np.random.default_rng(seed)
    inputs = words * 32 // bits
    numbers = rng.integers(0, 1 << bits, (rows, inputs))
    order = rng.permutation(inputs).astype(np.int32)
    found = reorder_words(as_stored(pack(numbers, bits), outputs_are_columns), bits, order)
    np.testing.assert_array_equal(found, pack(numbers[:, order], bits))


@given(rows=st.integers(0, 5), blocks=st.integers(0, 3), seed=st.integers(0, 99))
def test_mxfp4_blocks_have_the_codes_in_the_order_of_ggml(rows, blocks, seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, blocks * 32))
    exponents = rng.integers(1, 250, (rows, blocks)).astype(np.uint8)
    found = join_mxfp4(pack(codes, 4), exponents)
    expected = np.ldexp(MXFP4[codes], exponents.repeat(32, axis=1).astype(np.int32) - 127)
    np.testing.assert_array_equal(widen_blocks(found, "MXFP4"), expected)


@given(inputs=st.integers(1, 40), columns=st.integers(1, 20), seed=st.integers(0, 99))
def test_words_of_outputs_become_words_of_inputs(inputs, columns, seed):
    numbers = np.random.default_rng(seed).integers(0, 16, (inputs, columns * 8))
    shuffled = numbers.reshape(inputs, columns, 8)[:, :, list(AWQ_PLACES)].reshape(inputs, -1)
    np.testing.assert_array_equal(inputs_in_words(pack(shuffled, 4)), pack(numbers.T, 4).T)


@pytest.mark.parametrize("size", [1, 7, 32, 100])
def test_each_code_has_a_value_and_the_scale_of_its_group(size):
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (5, 70), np.uint8)
    values = rng.standard_normal(256).astype(np.float32)
    scales = rng.standard_normal((5, -(-70 // size))).astype(np.float32)
    expected = values[codes] * scales.repeat(size, axis=1)[:, :70]
    np.testing.assert_array_equal(widen_codes(codes, values, scales, size), expected)


def _joined(words=(4, 8), scales=(4, 2), zeros=(4, 2), groups=(0, 1), ggml_type="Q4_0"):
    return join_blocks(
        np.zeros(words, np.int32),
        np.zeros(scales, np.uint16),
        np.zeros(zeros, np.uint8),
        np.array(groups, np.int32),
        ggml_type,
    )


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: _joined(ggml_type="Q5_0"), "one of Q4_0, Q4_Z, Q8_0, not 'Q5_0'"),
        (lambda: _joined(words=(4, 7)), "7 words do not have 64 numbers"),
        (lambda: _joined(ggml_type="Q8_0"), "8 words do not have 64 numbers"),
        (lambda: _joined(scales=(3, 2)), "4 rows need as many of scales and zero points, not 3 and 4"),
        (lambda: _joined(zeros=(5, 2)), "not 4 and 5"),
        (lambda: _joined(zeros=(4, 1)), "groups must be 0 to 0, not 0 to 1"),
        (lambda: _joined(groups=(0, 2)), "groups must be 0 to 1, not 0 to 2"),
        (lambda: _joined(groups=(-1, 0)), "groups must be 0 to 1, not -1 to 0"),
        (lambda: reorder_words(np.zeros((2, 1), np.int32), 4, np.arange(7, dtype=np.int32)), "do not have 7 numbers"),
        (lambda: reorder_words(np.zeros((2, 1), np.int32), 4, np.full(8, 8, np.int32)), "must not have 8 to 8"),
        (lambda: reorder_words(np.zeros((2, 1), np.int32), 3, np.zeros(8, np.int32)), "here 3"),
        (lambda: join_mxfp4(np.zeros((2, 7), np.int32), np.zeros((2, 2), np.uint8)), "2 x 7 words do not fit 2 x 2"),
        (lambda: join_mxfp4(np.zeros((3, 8), np.int32), np.zeros((2, 2), np.uint8)), "3 x 8 words do not fit 2 x 2"),
        (
            lambda: widen_codes(np.zeros((2, 9), np.uint8), np.zeros(256, np.float32), np.zeros((2, 2), np.float32), 4),
            "2 x 9 codes need 256 values and a scale for each 4 of a row",
        ),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()
