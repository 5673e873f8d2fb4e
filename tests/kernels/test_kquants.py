"""Linear layers in GGML's types: their results, the same bits in every batch and at every level, and mixed matrices."""

import numpy as np
import pytest
from quire.kernels import PackedMatrix, Pool, Program, packed_nbytes, supported_levels
from quire.kernels.ops import Convert, Embed, Linear, Region, region_nbytes
from quire.kernels.pack import BLOCK_DTYPES
from quire.pager.layout import KVLayout

from tests.kernels.conftest import aligned_bytes
from tests.support.ggml import BLOCKS, FORMULAS, SCALES, dequantize, random_blocks
from tests.support.reference import ReferenceProgram

LEVELS = supported_levels()
TYPES = [kind for kind in BLOCK_DTYPES if kind in FORMULAS]
NATIVE = ["Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q4_Z"]  # types with kernels of their own
RNG = np.random.default_rng(6)
ROWS = RNG.normal(0, 1, (23, 512)).astype(np.float32)


def blocks_matrix(parts: list[tuple[str, np.ndarray]], columns: int) -> PackedMatrix:
    """Return a matrix of GGML blocks, one range of output columns after another."""
    dtypes = [(len(blocks), BLOCK_DTYPES[ggml_type]) for ggml_type, blocks in parts]
    rows = sum(count for count, _ in dtypes)
    packed = PackedMatrix(rows, columns, dtypes, aligned_bytes(packed_nbytes(rows, columns, dtypes)))
    start = 0
    for ggml_type, blocks in parts:
        packed.fill_blocks(blocks, ggml_type, start)
        start += len(blocks)
    return packed


def multiply(x: np.ndarray, weight: PackedMatrix, isa: str | None = None, threads: int = 2, epilogue: str = "store"):
    """Return the rows x, rounded to q8, times the weight: by the kernels and by the reference."""
    columns = weight.out_features // 2 if epilogue == "swiglu" else weight.out_features
    rows = len(x)
    offset = 0
    regions = []
    for width, dtype in [(weight.in_features, "f32"), (weight.in_features, "q8"), (columns, "f32")]:
        regions.append(Region(offset, rows, width, dtype))
        offset += region_nbytes(rows, width, dtype)
    embedding = PackedMatrix(*x.shape, "f32", aligned_bytes(packed_nbytes(*x.shape, "f32")))
    embedding.fill(x)
    ops = [
        Embed(embedding, regions[0]),
        Convert(regions[0], regions[1]),
        Linear(regions[1], weight, None, regions[2], epilogue),
    ]
    layout = KVLayout(1, 1, 16, "f32", 64)
    sizes = {"max_rows": rows, "max_samples": 1, "max_sequences": 1, "vocab_size": rows}
    program = Program(ops, offset, aligned_bytes(4 * layout.page_bytes), layout, 4, Pool(threads), isa=isa, **sizes)
    reference = ReferenceProgram(ops, "f32", 64, 4)
    ids = np.arange(rows, dtype=np.int32)
    ends = np.array([0, 1], np.int32)
    pages = np.arange(4, dtype=np.int32)
    for run in (program, reference):
        run.run(ids, ends * rows, np.zeros(1, np.int32), pages, ends * 4, np.zeros(0, np.int32))
    return program.view(regions[2])[:, :columns].copy(), reference.regions[regions[2]]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("columns", [256, 512])
@pytest.mark.parametrize("ggml_type", TYPES)
def test_a_layer_multiplies_the_dequantized_weights(ggml_type, columns, isa):
    blocks = random_blocks(RNG, ggml_type, 41, columns)
    got, want = multiply(ROWS[:, :columns], blocks_matrix([(ggml_type, blocks)], columns), isa)
    assert np.abs(got - want).max() <= 1e-5 * np.ptp(want)
    exact = ROWS[:, :columns].astype(np.float64) @ dequantize(blocks, ggml_type).astype(np.float64).T
    assert np.abs(got - exact).max() <= 1e-2 * np.ptp(exact), "activations are rounded to int8"


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("ggml_type", NATIVE)
def test_a_row_has_the_same_bits_in_every_batch_and_on_every_number_of_threads(ggml_type, isa):
    weight = blocks_matrix([(ggml_type, random_blocks(np.random.default_rng(1), ggml_type, 75, 512))], 512)
    x = np.tile(ROWS, (10, 1)) * RNG.uniform(0.5, 2, (230, 1)).astype(np.float32)
    whole, _ = multiply(x, weight, isa)
    for first, last, threads in [(0, 1, 1), (3, 5, 2), (4, 7, 1), (8, 12, 3), (9, 14, 1), (20, 34, 1), (17, 210, 3)]:
        part, _ = multiply(x[first:last], weight, isa, threads)
        assert part.tobytes() == whole[first:last].tobytes(), (first, last)


@pytest.mark.parametrize("epilogue", ["store", "swiglu"])
@pytest.mark.parametrize("ggml_type", TYPES)
def test_every_level_computes_the_same_bits(ggml_type, epilogue):
    weight = blocks_matrix([(ggml_type, random_blocks(np.random.default_rng(2), ggml_type, 64, 512))], 512)
    assert len({multiply(ROWS, weight, isa, epilogue=epilogue)[0].tobytes() for isa in LEVELS}) == 1


@pytest.mark.parametrize("ggml_type", ["Q4_K", "Q5_K"])
def test_minimums_are_multiplied_by_sums_of_very_different_sizes(ggml_type):
    """The sums of a super-block share a power of two, so the sums of small blocks are rounded next to a large one."""
    blocks = random_blocks(np.random.default_rng(7), ggml_type, 64, 512)
    sizes = np.exp2(-np.random.default_rng(8).integers(0, 18, (len(ROWS), 16))).repeat(32, axis=1)
    x = (np.abs(ROWS) * sizes).astype(np.float32)
    results = [multiply(x, blocks_matrix([(ggml_type, blocks)], 512), isa) for isa in LEVELS]
    got, want = results[0]
    assert len({result.tobytes() for result, _ in results}) == 1
    largest = x.sum(axis=1, keepdims=True) * np.abs(dequantize(blocks, ggml_type)).max()
    assert (np.abs(got - want) <= 5e-5 * largest).all()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("columns", [32, 96, 512])
def test_zero_points_have_the_bits_of_q8_with_the_same_weights(columns, isa):
    """dot - zero * sum(a) is exact in f32, as the integers of q8 are; a panel of 96 columns has lines of padding."""
    blocks = random_blocks(np.random.default_rng(5), "Q4_Z", 41, columns).reshape(-1, 19)
    numbers = np.concatenate([blocks[:, 3:] & 15, blocks[:, 3:] >> 4], axis=1) - blocks[:, 2:3]
    same = np.concatenate([blocks[:, :2], numbers], axis=1).reshape(41, -1)
    got, _ = multiply(ROWS[:, :columns], blocks_matrix([("Q4_Z", blocks.reshape(41, -1))], columns), isa)
    want, _ = multiply(ROWS[:, :columns], blocks_matrix([("Q8_0", same)], columns), isa)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("ggml_type", TYPES)
def test_the_largest_weights_and_activations_do_not_overflow(ggml_type, isa):
    """All bits of all weights and scales are set, and each block's activations are all 127 or all -127."""
    blocks = random_blocks(np.random.default_rng(3), ggml_type, 32, 256)
    split = blocks.reshape(-1, BLOCKS[ggml_type][1])
    scales = [at + byte for at in SCALES[ggml_type] for byte in (0, 1)] or [0]
    split[:, ~np.isin(np.arange(split.shape[1]), scales)] = 0xFF
    if ggml_type == "Q4_Z":
        split[:, 2] = 0  # the zero point
    weight = blocks_matrix([(ggml_type, blocks)], 256)
    x = np.where(np.arange(256) % 96 < 32, 1, -1).astype(np.float32)[None].repeat(7, axis=0)
    got, want = multiply(x, weight, isa)
    assert np.abs(got - want).max() <= 1e-6 * np.abs(dequantize(blocks, ggml_type)).sum(axis=1).max()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weights", NATIVE)
def test_the_logits_of_a_decoder_match_the_reference(toy, weights, isa):
    model = toy(weights=weights.lower(), heads=8, head_dim=32, hidden=256, intermediate=512, isa=isa)
    ids = np.random.default_rng(4).integers(0, 333, 70).astype(np.int32)
    sequences = (ids, 0, np.array([2, 1, 0])), (ids[:3], 0, np.array([7]))
    got, want = model.run(*sequences), model.run_reference(*sequences)
    assert np.abs(got - want).max() <= 1e-2 * np.ptp(want)


@pytest.mark.parametrize("isa", LEVELS)
def test_a_matrix_of_several_dtypes_has_the_bits_of_its_ranges(isa):
    types = [("Q4_K", 64), ("Q6_K", 32), ("Q8_0", 96), ("Q5_K", 41)]
    parts = [(name, random_blocks(RNG, name, rows, 512)) for name, rows in types]
    mixed = blocks_matrix(parts, 512)
    assert mixed.ranges == ((64, "q4_k"), (32, "q6_k"), (96, "q8"), (41, "q5_k"))
    assert np.array_equal(mixed.unpack(), np.concatenate([dequantize(blocks, name) for name, blocks in parts]))
    got, _ = multiply(ROWS, mixed, isa, threads=3)
    alone = [multiply(ROWS, blocks_matrix([part], 512), isa)[0] for part in parts]
    assert got.tobytes() == np.concatenate(alone, axis=1).tobytes()


def test_neighbors_of_one_dtype_are_one_range():
    parts = [(name, random_blocks(RNG, name, 32, 256)) for name in ("Q4_K", "Q4_K", "Q6_K")]
    mixed = blocks_matrix(parts, 256)
    assert mixed.ranges == ((64, "q4_k"), (32, "q6_k"))
    assert mixed.nbytes == packed_nbytes(64, 256, "q4_k") + packed_nbytes(32, 256, "q6_k")


@pytest.mark.parametrize(
    ("dtype", "bits"), [("q4_k", 4.5), ("q5_k", 5.5), ("q6_k", 6.625), ("mxfp4", 4.25), ("q4_z", 4.75)]
)
def test_bits_per_weight(dtype, bits):
    assert packed_nbytes(64, 512, dtype) == 64 * 512 * bits / 8


def new_matrix(rows: int, columns: int, dtype: object) -> PackedMatrix:
    return PackedMatrix(rows, columns, dtype, aligned_bytes(1 << 20))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: new_matrix(32, 80, "q4_k"), "q4_k needs in_features in multiples of 256, not 80"),
        (lambda: packed_nbytes(32, 128, "q6_k"), "multiples of 256, not 128"),
        (lambda: packed_nbytes(32, 48, "q4_z"), "multiples of 32, not 48"),
        (lambda: new_matrix(32, 256, "q5_k").fill(np.zeros((1, 256), np.float32)), "GGML blocks of the same type"),
        (
            lambda: new_matrix(32, 256, "q5_k").fill_blocks(random_blocks(RNG, "Q4_K", 1, 256), "Q4_K"),
            "GGML blocks of the same type",
        ),
        (lambda: new_matrix(64, 256, [(32, "q4_k"), (16, "q8")]), "add up to 64"),
        (lambda: new_matrix(64, 256, [(16, "q4_k"), (48, "q8")]), "multiples of 32"),
        (lambda: new_matrix(64, 256, [(32, "q4_k"), (32, "bf16")]), "one dtype, or up to 4 ranges in"),
        (lambda: new_matrix(160, 256, [(32, "q8" if i % 2 else "q4") for i in range(5)]), "up to 4 ranges"),
        (lambda: new_matrix(64, 256, []), "add up to 64"),
        (lambda: new_matrix(64, 256, [(64, "q8"), (0, "q4")]), "positive sizes"),
    ],
)
def test_matrices_that_cannot_be_are_refused(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()


def test_an_embedding_has_one_dtype():
    mixed = blocks_matrix([(name, random_blocks(RNG, name, 32, 256)) for name in ("Q4_K", "Q6_K")], 256)
    layout = KVLayout(1, 1, 16, "f32", 64)
    sizes = {"max_rows": 1, "max_samples": 1, "max_sequences": 1, "vocab_size": 64}
    with pytest.raises(ValueError, match="an embedding has one dtype"):
        Program([Embed(mixed, Region(0, 1, 256, "f32"))], 1024, aligned_bytes(1 << 16), layout, 1, Pool(1), **sizes)
