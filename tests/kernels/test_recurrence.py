"""Gated convolutions and the states of sequences: known values, the reference, the same bits in any chunks."""

from __future__ import annotations

import numpy as np
import pytest
from quire.kernels import Pool, Program, supported_levels
from quire.kernels.ops import Embed, Region, Ring, ShortConv, state_nbytes

from tests.kernels.conftest import Toy
from tests.kernels.table_program import LAYOUT, ROWS, TableProgram, following
from tests.kernels.test_linear import packed
from tests.kernels.test_program import tolerance

LEVELS = supported_levels()
RNG = np.random.default_rng(5)


class Convolution(TableProgram):
    """A program that is one gated convolution."""

    def __init__(self, table, weight, bias=None, *, ring=0, dtype="f32", **options) -> None:
        taps, columns = weight.shape
        out = following(Region(0, ROWS, 3 * columns, "f32"), columns, dtype)
        super().__init__(table, lambda x: [ShortConv(x, weight, bias, Ring(64, taps + ring), out)], out, **options)


def random_convolution(columns: int, taps: int, **options) -> Convolution:
    table = RNG.standard_normal((ROWS, 3 * columns)).astype(np.float32)
    bias = RNG.standard_normal(columns).astype(np.float32)
    return Convolution(table, RNG.standard_normal((taps, columns)).astype(np.float32), bias, **options)


@pytest.mark.parametrize("isa", LEVELS)
def test_a_row_is_the_weighted_sum_of_the_last_inputs_between_two_gates(isa):
    table = np.array([[2, 3, 10, 1, 5, 7], [1, 1, 1, 2, 4, 3], [3, 2, 1, 1, -1, -2]], np.float32)
    #          inputs: [10, 21], then [4, 3], then [-3, -4]
    weight = np.array([[1, 100], [10, 10], [100, 1]], np.float32)
    convolution = Convolution(table, weight, np.array([0.5, 0.25], np.float32), isa=isa)
    rows = convolution.run((0, [0, 1, 2]))
    assert rows.tolist() == [
        [10 * (0.5 + 1000), 1 * (0.25 + 21)],
        [1 * (0.5 + 100 + 400), 2 * (0.25 + 210 + 3)],
        [1 * (0.5 + 10 + 40 - 300), 1 * (0.25 + 2100 + 30 - 4)],
    ]
    assert convolution.run((0, [2])).tolist() == [[0.5 - 300, 0.25 - 4]]  # nothing is left of what was in the slot


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("columns", "taps"), [(1, 1), (16, 2), (45, 4), (128, 3), (300, 16)])
def test_rows_match_the_reference(columns, taps, dtype, isa):
    convolution = random_convolution(columns, taps, dtype=dtype, isa=isa, ring=3)
    reference = convolution.reference()
    for step in ([(0, range(9)), (0, range(20, 21))], [(9, range(40, 47)), (1, range(60, 90))], [(16, [3]), (31, [4])]):
        rows = convolution.run(*step)
        wanted = convolution.run(*step, program=reference)
        error = {"f32": 1e-5, "bf16": 1e-2}[dtype]
        np.testing.assert_allclose(rows, wanted, rtol=error, atol=error)


def test_rows_have_the_same_bits_in_any_chunks_batch_and_slot_at_every_level():
    table = RNG.standard_normal((ROWS, 3 * 70)).astype(np.float32)
    weight = RNG.standard_normal((4, 70)).astype(np.float32)
    tokens = RNG.integers(0, ROWS, 90)
    found = set()
    for isa in LEVELS:
        for chunk, threads, ring in ((1, 1, 0), (7, 2, 5), (33, 3, 1), (90, 2, 0)):
            convolution = Convolution(table, weight, isa=isa, threads=threads, ring=ring)
            rows = []
            for first in range(0, 90, chunk):
                part = first, tokens[first : first + chunk]
                if len(part[1]) < 50:  # another sequence in slot 0
                    rows.append(convolution.run((5, tokens[:9]), part, slots=(0, 3))[9:])
                else:
                    rows.append(convolution.run(part, slots=(3,)))
            found.add(np.concatenate(rows).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("rejected", [0, 1, 5])
def test_a_sequence_may_return_as_many_tokens_as_its_ring_has_rows_beyond_the_earlier_taps(rejected):
    convolution = random_convolution(40, 3, ring=rejected)
    tokens = RNG.integers(0, ROWS, 40)
    wanted = convolution.run((0, tokens), slots=(1,))[20:]
    convolution.run((0, tokens[:20]), slots=(2,))
    convolution.run((20, RNG.integers(0, ROWS, rejected + 1)), slots=(2,))  # all of them are rejected
    assert convolution.run((20, tokens[20:]), slots=(2,)).tobytes() == wanted.tobytes()


def test_a_copied_state_continues_as_the_original():
    convolution = random_convolution(40, 3)
    tokens = RNG.integers(0, ROWS, 40)
    wanted = convolution.run((0, tokens))[20:]
    convolution.run((0, tokens[:20]), slots=(1,))
    convolution.program.states[3] = convolution.program.states[1]
    convolution.run((20, tokens[::2]), slots=(1,))
    assert convolution.run((20, tokens[20:]), slots=(3,)).tobytes() == wanted.tobytes()


def test_a_number_that_is_not_finite_stays_in_its_sequence_and_leaves_with_it():
    convolution = random_convolution(70, 3)
    tokens = RNG.integers(1, ROWS, 8)
    wanted = convolution.run((0, tokens), (0, tokens))
    table = np.array(convolution.ops[0].weight.unpack())
    table[0] = np.nan
    other = Convolution(table, convolution.ops[1].weight, convolution.ops[1].bias)
    mixed = other.run((0, tokens), (0, [0, *tokens[1:]]))
    assert mixed[:8].tobytes() == wanted[:8].tobytes()
    assert np.isnan(mixed[8:11]).all()
    assert not np.isnan(mixed[11:]).any()
    assert other.run((0, tokens), slots=(1,)).tobytes() == wanted[:8].tobytes()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weights", ["f32", "q8", "bf16"])
def test_a_decoder_with_convolutions_matches_the_reference(weights, isa):
    toy = Toy(weights=weights, windows=(0, 0), taps=3, ring=2, bias=True, isa=isa)
    ids = np.random.default_rng(1).integers(0, 333, (2, 60)).astype(np.int32)
    tables = np.arange(2, dtype=np.int32), np.arange(2, 4, dtype=np.int32)
    for first, end in ((0, 40), (40, 41), (41, 60)):
        step = [(each[first:end], first, table) for each, table in zip(ids, tables, strict=True)]
        wanted = toy.run_reference(*step)
        assert np.abs(toy.run(*step) - wanted).max() <= tolerance(weights, "f32") * np.ptp(wanted)


def test_the_states_of_a_program_end_with_its_last_ring():
    convolution = random_convolution(45, 4, ring=2, slots=3)
    assert state_nbytes(convolution.ops) == 64 + 6 * 64 * 4
    assert convolution.program.states.shape == (3, 64 + 6 * 64 * 4)
    assert Toy().program.states.shape == (40, 0)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ((0,), "2 sequences need as many state slots, not 1"),
        ((0, 4), "state slot 4 is outside the 4"),
        ((-1, 0), "state slot -1 is outside the 4"),
        ((2, 2), "two sequences have the same state slot"),
    ],
)
def test_slots_outside_the_states_are_refused(slots, message):
    with pytest.raises(ValueError, match=message):
        random_convolution(40, 3).run((0, [1]), (0, [2]), slots=slots)


@pytest.mark.parametrize(
    ("shape", "ring", "message"),
    [
        ((17, 32), Ring(0, 20), r"weights \[1..16, 32\], not \[17, 32\]"),
        ((3, 31), Ring(0, 20), r"weights \[1..16, 32\], not \[3, 31\]"),
        ((3, 32), Ring(0, 2), "not aligned or has less than 3 rows"),
        ((3, 32), Ring(4, 3), "not aligned or has less than 3 rows"),
    ],
)
def test_a_convolution_of_other_sizes_is_refused(shape, ring, message):
    table = packed(np.zeros((8, 96), np.float32), "f32")
    x = Region(0, 8, 96, "f32")
    conv = ShortConv(x, np.zeros(shape, np.float32), None, ring, Region(x.nbytes, 8, 32, "f32"))
    limits = {"max_rows": 8, "max_samples": 1, "max_sequences": 1, "vocab_size": 8}
    with pytest.raises(ValueError, match=message):
        Program([Embed(table, x), conv], 1 << 14, np.zeros(LAYOUT.page_bytes, np.uint8), LAYOUT, 1, Pool(1), **limits)
