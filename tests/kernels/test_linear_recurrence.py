"""Recurrences with a matrix per head, after a convolution and before a gated norm: the reference, and equal bits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from quire.kernels import supported_levels
from quire.kernels.ops import CausalConv, GatedNorm, LinearRecurrence, MatrixState, Region, Ring, state_nbytes

from tests.kernels.conftest import Toy
from tests.kernels.table_program import ROWS, TableProgram, following
from tests.kernels.test_program import tolerance

LEVELS = supported_levels()
RNG = np.random.default_rng(6)


class Mixer(TableProgram):
    """Convolution, recurrence and gated norm of rows q | k | v | z | rate | decay."""

    def __init__(
        self,
        *,
        heads=2,
        keys=1,
        key_dim=16,
        value_dim=16,
        taps=4,
        rollback=2,
        dtype="f32",
        delta=True,
        tiled=False,
        form="f32",
        scale=1.0,
        gate_first=False,
        group=None,
        isa=None,
        threads=2,
        slots=4,
        seed=0,
    ) -> None:
        rng = np.random.default_rng((seed, heads, keys, key_dim, value_dim))
        inner, columns = heads * value_dim, 2 * keys * key_dim + heads * value_dim
        table = rng.standard_normal((ROWS, columns + inner + 2 * heads)).astype(np.float32)
        x = Region(0, ROWS, table.shape[1], "f32")
        convolved = following(x, columns)
        recurrent = following(convolved, inner)
        weight = rng.standard_normal((taps, columns)).astype(np.float32)
        bias = rng.standard_normal(columns).astype(np.float32)
        ring = Ring(64, taps - 1 + rollback)
        of_heads = {name: rng.standard_normal(heads).astype(np.float32) for name in ("bias", "skip")}
        a = -np.exp(rng.normal(-1, 1, heads)).astype(np.float32)
        self.state = MatrixState(64 + ring.nbytes(columns), heads, key_dim, value_dim, rollback, dtype)
        variant = {"rate": columns + inner, "rate_scale": scale} if delta else {"rate": None, "skip": of_heads["skip"]}
        self.recurrence = LinearRecurrence(
            convolved,
            0,
            keys * key_dim,
            2 * keys * key_dim,
            keys,
            x,
            columns + inner + heads,
            a=a,
            bias=of_heads["bias"],
            state=self.state,
            out=recurrent,
            scale=key_dim**-0.5,
            tiled=tiled,
            **variant,
        )
        norm = rng.standard_normal(inner).astype(np.float32)
        out = following(recurrent, inner, form)
        heads_normed = 2 * keys if delta else 0
        super().__init__(
            table,
            lambda x: [
                CausalConv(x, 0, weight, bias, ring, convolved, heads_normed, key_dim, 1e-6),
                self.recurrence,
                GatedNorm(recurrent, x, columns, norm, 1e-6, group or value_dim, gate_first, out),
            ],
            out,
            isa=isa,
            threads=threads,
            slots=slots,
        )


SHAPES = [
    {"heads": 1, "keys": 1, "key_dim": 1, "value_dim": 1, "taps": 1},
    {"heads": 4, "keys": 2, "key_dim": 24, "value_dim": 40, "taps": 3, "scale": 2.0},
    {"heads": 6, "keys": 2, "key_dim": 16, "value_dim": 24, "tiled": True},
    {"heads": 1, "keys": 1, "key_dim": 128, "value_dim": 128, "taps": 4, "form": "bf16"},
    {"heads": 3, "keys": 1, "key_dim": 20, "value_dim": 80, "delta": False, "gate_first": True, "group": 120},
    {"heads": 1, "keys": 1, "key_dim": 40, "value_dim": 144, "dtype": "bf16"},
    {"heads": 2, "keys": 1, "key_dim": 7, "value_dim": 33, "delta": False, "dtype": "bf16"},
]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_match_the_reference_token_by_token(shape, isa):
    mixer = Mixer(**shape, isa=isa, rollback=3)
    reference = mixer.reference()
    for step in ([(0, range(9)), (0, range(20, 21))], [(9, range(40, 47)), (1, range(60, 90))], [(16, [3]), (31, [4])]):
        rows, wanted = mixer.run(*step), mixer.run(*step, program=reference)
        error = 5e-2 if "bf16" in (shape.get("form"), shape.get("dtype")) else 2e-5
        np.testing.assert_allclose(rows, wanted, rtol=error, atol=error * np.abs(wanted).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_same_bits_in_any_chunks_batch_and_slot_at_every_level(shape):
    tokens = RNG.integers(0, ROWS, 50)
    found = set()
    for isa in LEVELS:
        for chunk, threads, rollback in ((1, 1, 1), (1, 2, 7), (7, 2, 6), (33, 3, 2), (50, 2, 3)):
            mixer = Mixer(**shape, isa=isa, threads=threads, rollback=rollback)
            rows = []
            for first in range(0, 50, chunk):
                part = first, tokens[first : first + chunk]
                if len(part[1]) < 50:  # another sequence in slot 0
                    rows.append(mixer.run((5, tokens[:9]), part, slots=(0, 3))[9:])
                else:
                    rows.append(mixer.run(part, slots=(3,)))
            found.add(np.concatenate(rows).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("rejected", [1, 2, 5])
@pytest.mark.parametrize("before", [1, 4, 20])
def test_a_sequence_may_return_to_each_of_its_last_positions(before, rejected, shape):
    mixer = Mixer(**shape, rollback=rejected)
    tokens = RNG.integers(0, ROWS, 40)
    wanted = mixer.run((0, tokens), slots=(1,))[before:]
    mixer.run((0, tokens[:before]), slots=(2,))
    for _ in range(2):  # all of these are rejected, once and again
        mixer.run((before, RNG.integers(0, ROWS, rejected)), slots=(2,))
    rows = [mixer.run((before + i, tokens[before + i : before + i + 1]), slots=(2,)) for i in range(3)]
    rows.append(mixer.run((before + 3, tokens[before + 3 :]), slots=(2,)))
    assert np.concatenate(rows).tobytes() == wanted.tobytes()


def test_a_copied_state_continues_as_the_original():
    mixer = Mixer(heads=4, keys=2, key_dim=24, value_dim=40)
    tokens = RNG.integers(0, ROWS, 40)
    wanted = mixer.run((0, tokens))[20:]
    mixer.run((0, tokens[:20]), slots=(1,))
    mixer.program.states[3] = mixer.program.states[1]
    mixer.run((20, tokens[::2]), slots=(1,))
    assert mixer.run((20, tokens[20:]), slots=(3,)).tobytes() == wanted.tobytes()


def test_a_known_state_after_two_tokens():
    """With a decay of 1/2 and a rate of 1, the second token halves what the first one left, and adds its error."""
    state = MatrixState(0, 1, 2, 1, rollback=1)
    table = np.zeros((ROWS, 8), np.float32)  # q | k | v | rate | decay | padding
    table[:, 5:7] = 100.0, 0.0  # a rate of 1; softplus(0) = log 2, which `a` makes a decay of 1 / 2
    table[0, :5] = 1, 1, 1, 0, 8
    table[1, :5] = 1, 0, 1, 2, 6
    out = following(Region(0, ROWS, 8, "f32"), 1)
    zero, minus_one = np.zeros(1, np.float32), np.full(1, -1, np.float32)
    program = TableProgram(
        table, lambda x: [LinearRecurrence(x, 0, 2, 4, 1, x, 6, 5, a=minus_one, bias=zero, state=state, out=out)], out
    )
    rows = program.run((0, [0, 1]))
    # S = (8, 0); then (4, 0) + (1, 2) * (6 - 4) = (6, 4)
    np.testing.assert_allclose(rows[:, 0], [8, 6], rtol=1e-6)


@pytest.mark.parametrize("isa", LEVELS)
def test_time_steps_and_decays_of_all_sizes_are_exact_in_f32(isa):
    """The first token leaves its time step in the matrix of each head, the second one multiplies it with its decay."""
    heads = 96
    inputs = np.linspace(-40, 60, heads, dtype=np.float32)
    table = np.zeros((ROWS, 2 + 2 * heads), np.float32)  # query | key | values | decays
    table[:2, 2 + heads :] = inputs
    table[0, : 2 + heads] = 1
    table[1, 0] = 1
    x = Region(0, ROWS, table.shape[1], "f32")
    out = following(x, heads)
    zeros, minus_one = np.zeros(heads, np.float32), np.full(heads, -1, np.float32)
    state = MatrixState(0, heads, 1, 1, rollback=1)
    mamba = LinearRecurrence(x, 0, 1, 2, 1, x, 2 + heads, None, a=minus_one, bias=zeros, state=state, out=out)
    times, decayed = TableProgram(table, lambda _: [mamba], out, isa=isa).run((0, [0, 1])).astype(np.float64)
    np.testing.assert_allclose(times, np.log1p(np.exp(inputs.astype(np.float64))), rtol=5e-7)
    np.testing.assert_allclose(decayed / times, np.exp(-times), rtol=5e-7)


def test_a_number_that_is_not_finite_stays_in_its_sequence_and_leaves_with_it():
    mixer = Mixer(heads=4, keys=2, key_dim=24, value_dim=40)
    tokens = RNG.integers(1, ROWS, 8)
    wanted = mixer.run((0, tokens), (0, tokens))
    table = np.array(mixer.ops[0].weight.unpack())
    table[0] = np.nan
    other = Mixer(heads=4, keys=2, key_dim=24, value_dim=40)
    other = TableProgram(table, lambda x: other_ops(mixer, x), mixer.out)
    mixed = other.run((0, tokens), (0, [0, *tokens[1:]]))
    assert mixed[:8].tobytes() == wanted[:8].tobytes()
    assert np.isnan(mixed[8:]).all()
    assert other.run((0, tokens), slots=(1,)).tobytes() == wanted[:8].tobytes()


def other_ops(mixer: Mixer, _: Region) -> list:
    return mixer.ops[1:]


@pytest.mark.parametrize("isa", LEVELS)
def test_a_row_whose_squares_overflow_is_not_finite_after_a_norm(isa):
    """Its inverse length would be 0, and the row 0, as if nothing had happened."""
    table = np.ones((ROWS, 32), np.float32)
    table[0] = 1e20
    x = Region(0, ROWS, 32, "f32")
    out = following(x, 32)
    ones = np.ones(32, np.float32)
    norm = GatedNorm(x, x, 0, ones, 1e-6, 32, False, out)
    convolution = CausalConv(x, 0, ones[None], None, Ring(64, 2), out, 1, 32, 1e-6)
    for op in (norm, convolution):
        rows = TableProgram(table, lambda _, op=op: [op], out, isa=isa).run((0, [0, 1]))
        assert np.isnan(rows[0]).all()
        assert np.isfinite(rows[1]).all()


def test_a_state_has_a_part_for_each_segment_of_a_head():
    state = MatrixState(128, 3, 24, 80, rollback=5)
    assert (state.segments, state.width, state.matrix_bytes, state.input_columns) == (2, 64, 24 * 64 * 4, 32 + 64 + 16)
    assert state.nbytes == 3 * 2 * (64 + 24 * 64 * 4 + 5 * 112 * 4)
    assert dataclasses.replace(state, dtype="bf16").matrix_bytes == 24 * 64 * 2
    mixer = Mixer(heads=3, keys=1, key_dim=24, value_dim=80, rollback=5)
    assert state_nbytes(mixer.ops) == mixer.state.offset + state.nbytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_heads": 3}, "3 key heads do not divide its heads"),
        ({"value": 49}, "has no 32 columns from 49 on"),
        ({"decay": 200}, "has no 2 columns from 200 on"),
        ({"state": MatrixState(32, 2, 16, 16, 2)}, "is not aligned"),
        ({"state": MatrixState(0, 2, 257, 16, 2)}, "needs keys of 1 to 256 columns"),
        ({"state": MatrixState(0, 2, 16, 16, 0)}, "values and a rollback"),
        ({"a": np.zeros(3, np.float32)}, "expected a vector of 2"),
    ],
)
def test_a_recurrence_of_other_sizes_is_refused(changes, message):
    mixer = Mixer()
    broken = dataclasses.replace(mixer.recurrence, **changes)
    with pytest.raises(ValueError, match=message):
        TableProgram(np.zeros((ROWS, 100), np.float32), lambda x: [mixer.ops[1], broken], mixer.out)


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        (1, {"column": 37}, "64 columns of f32 from column 37 on are not in"),
        (1, {"num_normed": 3, "head_dim": 32}, "64 columns do not have 3 heads of 32"),
        (3, {"group": 24}, "groups of 24 do not divide 32 columns"),
        (3, {"column": 69}, "has fewer than these from 69 on"),
    ],
)
def test_other_sizes_around_a_recurrence_are_refused(op, changes, message):
    mixer = Mixer()
    broken = dataclasses.replace(mixer.ops[op], **changes)
    with pytest.raises(ValueError, match=message):
        TableProgram(np.zeros((ROWS, 100), np.float32), lambda x: [broken], mixer.out)


SHAPE = {"heads": 4, "keys": 2, "key_dim": 24, "value_dim": 20, "taps": 3, "rollback": 2, "dtype": "f32"}


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weights", ["f32", "q8", "bf16"])
@pytest.mark.parametrize("delta", [True, False], ids=["gated delta rule", "Mamba-2"])
def test_a_decoder_with_recurrences_matches_the_reference(delta, weights, isa):
    toy = Toy(weights=weights, windows=(0, 0), recurrence=SHAPE | {"delta": delta}, bias=True, isa=isa)
    ids = np.random.default_rng(1).integers(0, 333, (2, 60)).astype(np.int32)
    tables = np.arange(2, dtype=np.int32), np.arange(2, 4, dtype=np.int32)
    for first, end in ((0, 40), (40, 41), (41, 60)):
        step = [(each[first:end], first, table) for each, table in zip(ids, tables, strict=True)]
        wanted = toy.run_reference(*step)
        assert np.abs(toy.run(*step) - wanted).max() <= tolerance(weights, "f32") * np.ptp(wanted)
