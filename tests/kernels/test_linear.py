"""Linear layers after an RMS norm, and the maxima of each block of columns that a linear layer stores."""

import numpy as np
import pytest
from quire.kernels import PackedMatrix, Pool, Program, packed_nbytes, supported_levels
from quire.kernels.ops import INPUT_DTYPES, Convert, Embed, Linear, Normed, Region, region_nbytes
from quire.pager.layout import KVLayout

from tests.support.reference import ReferenceProgram

LEVELS = supported_levels()
DTYPES = ["f32", "bf16", "q8", "q4"]
TOLERANCE = {"f32": 1e-6, "bf16": 2e-3, "q8": 5e-3, "q4": 5e-3}
COLUMNS = 80
OUT = 41
RNG = np.random.default_rng(5)
WEIGHT = RNG.normal(0, 1, (OUT, COLUMNS)).astype(np.float32)
NORM = RNG.uniform(0.5, 2, COLUMNS).astype(np.float32)
BIAS = RNG.normal(0, 1, OUT).astype(np.float32)


def packed(values, dtype):
    raw = np.zeros(packed_nbytes(*values.shape, dtype) + 64, np.uint8)
    matrix = PackedMatrix(*values.shape, dtype, raw[-raw.ctypes.data % 64 :])
    matrix.fill(values)
    return matrix


def norm_then_linear(x, dtype, isa=None, bias=None, threads=2, norm=True):
    """Norm and multiply the rows x: return y of the kernels, y of the reference, and the maxima of y.

    Without `norm`, only multiply them.

    The rows are an f32 embedding, one token each.
    """
    rows = len(x)
    offset = 0
    regions = []
    for columns, kind in [(COLUMNS, "f32"), (COLUMNS, INPUT_DTYPES[dtype]), (3, "f32"), (OUT, "f32"), (2, "f32")]:
        regions.append(Region(offset, rows, columns, kind))
        offset += region_nbytes(rows, columns, kind)
    residual, data, squares, y, maxima = regions
    normed = Normed(data, squares, NORM, 1e-6)
    first = [Embed(packed(x, "f32"), residual, normed if norm else None)]
    if not norm:
        first.append(Convert(residual, data))
    ops = [*first, Linear(normed if norm else data, packed(WEIGHT, dtype), bias, y, "store", maxima=maxima)]
    limits = {"max_rows": rows, "max_samples": 1, "max_sequences": 1, "vocab_size": rows}
    layout = KVLayout(1, 1, 16, "f32", 64)
    memory = np.zeros(16 * layout.page_bytes, np.uint8)
    program = Program(ops, offset, memory, layout, 16, Pool(threads), isa=isa, **limits)
    reference = ReferenceProgram(ops, "f32", 64, 16)
    ids = np.arange(rows, dtype=np.int32)
    pages = np.arange(16, dtype=np.int32)
    for run in (program, reference):
        starts = np.array([0, rows], np.int32), np.zeros(1, np.int32), pages, np.array([0, 16], np.int32)
        run.run(ids, *starts, np.zeros(0, np.int32))
    return program.view(y)[:, :OUT].copy(), reference.regions[y], program.view(maxima)[:, :2].copy()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_size_are_normed_to_the_same_accuracy(dtype, isa):
    x = RNG.normal(0, 1, (9, COLUMNS)) * 10.0 ** np.arange(-32, 22, 6)[:, None]
    got, want, _ = norm_then_linear(x.astype(np.float32), dtype, isa)
    for row in range(9):
        assert np.abs(got[row] - want[row]).max() <= TOLERANCE[dtype] * np.ptp(want[row]), f"1e{-32 + 6 * row}"


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bad", "norm"), [(np.nan, True), (np.inf, True), (-np.inf, True), (3e38, True), (np.nan, False)]
)
def test_a_row_that_is_not_finite_is_nan_and_changes_no_other(dtype, bad, norm, isa):
    x = RNG.normal(0, 1, (8, COLUMNS)).astype(np.float32)
    clean, *_ = norm_then_linear(x, dtype, isa, BIAS, norm=norm)
    poisoned = x.copy()
    poisoned[3, 77] = bad
    with np.errstate(all="ignore"):
        got, *_ = norm_then_linear(poisoned, dtype, isa, BIAS, norm=norm)
    assert np.isnan(got[3]).all()
    others = np.arange(8) != 3
    assert got[others].tobytes() == clean[others].tobytes()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch_and_on_every_number_of_threads(dtype, isa):
    x = RNG.normal(0, 1, (400, COLUMNS)).astype(np.float32)
    whole, *_ = norm_then_linear(x, dtype, isa, BIAS)
    for first, last, threads in [(0, 1, 1), (3, 9, 2), (20, 34, 1), (17, 210, 3), (399, 400, 2)]:
        part, *_ = norm_then_linear(x[first:last], dtype, isa, BIAS, threads)
        assert part.tobytes() == whole[first:last].tobytes(), (first, last)


@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
def test_every_level_computes_the_same_bits(dtype):
    x = RNG.normal(0, 1, (14, COLUMNS)).astype(np.float32)
    assert len({norm_then_linear(x, dtype, isa, BIAS)[0].tobytes() for isa in LEVELS}) == 1


def test_a_row_of_zeros_gives_the_bias():
    got, *_ = norm_then_linear(np.zeros((2, COLUMNS), np.float32), "q8", bias=BIAS)
    assert np.array_equal(got, np.stack([BIAS, BIAS]))


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_a_row_of_denormal_numbers_counts_as_zeros(dtype, isa):
    x = np.zeros((2, COLUMNS), np.float32)
    x[:, ::2] = 1e-40
    got, *_ = norm_then_linear(x, dtype, isa, norm=False)
    assert not got.any()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_is_left_out_of_maxima(dtype, isa):
    """41 columns are a block of 32 and one of 9; its zero padding would be the maximum of negative columns."""
    y, _, maxima = norm_then_linear(RNG.normal(0, 1, (7, COLUMNS)).astype(np.float32), dtype, isa, BIAS - 1000)
    assert np.array_equal(maxima, np.stack([y[:, :32].max(axis=1), y[:, 32:].max(axis=1)], axis=1))


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"normed": Normed(Region(0, 8, OUT, "q8"), Region(8192, 8, 2, "f32"), NORM[:OUT], 1e-6)}, "a norm needs f32"),
        ({"maxima": Region(8192, 8, 2, "f32")}, "maxima need f32"),
    ],
)
def test_norms_and_maxima_need_an_f32_result(extra, complaint):
    ops = [
        Linear(Region(0, 8, COLUMNS, "q8"), packed(WEIGHT, "q8"), None, Region(4096, 8, OUT, "q8"), "store", **extra)
    ]
    layout = KVLayout(1, 1, 16, "f32", 64)
    sizes = {"max_rows": 8, "max_samples": 1, "max_sequences": 1, "vocab_size": 8}
    with pytest.raises(ValueError, match=complaint):
        Program(ops, 1 << 16, np.zeros(layout.page_bytes, np.uint8), layout, 1, Pool(1), **sizes)
