"""Rotary tables against those transformers computed, for every kind of scaling we accept."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from quire.runtime.model.rope import (
    _cos_sin,
    inverse_frequencies,
    query_scales,
    rotary_nbytes,
    rotary_table,
    rotary_tables,
)
from quire.runtime.model.spec import LinearScaling, Llama3Scaling, LongRopeScaling, QueryScales, Rope, YarnScaling

GOLDENS = Path(__file__).parents[2] / "goldens"
HEAD_DIM = 128
LN4 = math.log(4)
LONGROPE_FACTOR = math.sqrt(1 + math.log(32) / math.log(4096))

# The kinds of rope.json as specs; test_config_json.py tests the reading of config.json.
ROPES = {
    "default": Rope(10000.0),
    "linear": Rope(10000.0, LinearScaling(3.0)),
    "llama3": Rope(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    "yarn": Rope(1e6, YarnScaling(4.0, 0.1 * LN4 + 1, 32.0, 1.0, True, 32768)),
    "yarn_exact_range": Rope(1e6, YarnScaling(4.0, 0.1 * LN4 + 1, 24.0, 1.0, False, 4096)),
    "yarn_mscale": Rope(1e6, YarnScaling(4.0, (0.0707 * LN4 + 1) / (0.1 * LN4 + 1), 32.0, 1.0, True, 4096)),
    "yarn_given_factor": Rope(1e6, YarnScaling(4.0, 1.25, 32.0, 1.0, True, 4096)),
    "longrope": Rope(
        1e4,
        LongRopeScaling(
            tuple(1.0 + 0.01 * i for i in range(64)), tuple(1.0 + 0.5 * i for i in range(64)), LONGROPE_FACTOR, 4096
        ),
    ),
}


def test_every_golden_kind_is_tested() -> None:
    assert set(ROPES) == set(json.loads((GOLDENS / "rope.json").read_text()))


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_match_transformers(kind: str) -> None:
    with np.load(GOLDENS / "rope.npz") as golden:
        frequencies, factor = inverse_frequencies(ROPES[kind], HEAD_DIM, int(golden["positions"].max()) + 1)
        assert frequencies.dtype == np.float32
        np.testing.assert_allclose(frequencies, golden[f"{kind}.inv_freq"], rtol=2e-7)  # one ulp of pow
        assert factor == pytest.approx(float(golden[f"{kind}.factor"]), rel=1e-12)


@pytest.mark.parametrize("kind", ROPES)
def test_tables_match_transformers_up_to_position_40_000(kind: str) -> None:
    with np.load(GOLDENS / "rope.npz") as golden:
        positions = golden["positions"]
        table = rotary_table(ROPES[kind], HEAD_DIM, int(positions.max()) + 1)
        assert table.dtype == np.float32
        assert table.nbytes == rotary_nbytes([ROPES[kind]], HEAD_DIM, len(table))
        np.testing.assert_allclose(table[positions], golden[f"{kind}.table"], atol=1e-6)


# sha256 of the first 5,000 positions: the table is computed with the same bits on every machine.
DIGESTS = {
    "default": "bf69f8738503f3b7",
    "linear": "9ccdaa154ca0e43c",
    "llama3": "5f707bf7cc8bc8cf",
    "yarn": "d8981a03a34aaf68",
    "yarn_exact_range": "f935fa7b84a76798",
    "yarn_mscale": "df2c341fa273d257",
    "yarn_given_factor": "2ceb10e51fc7033f",
    "longrope": "ede891c8d4d7ca83",
}


@pytest.mark.parametrize("kind", ROPES)
def test_tables_have_the_same_bits_on_every_machine(kind: str) -> None:
    table = rotary_table(ROPES[kind], HEAD_DIM, 5000)
    assert hashlib.sha256(table.tobytes()).hexdigest()[:16] == DIGESTS[kind]


def test_cosines_and_sines_of_large_angles() -> None:
    angles = np.random.default_rng(0).uniform(0, 1.6e6, (1000, 64)).astype(np.float32).astype(np.float64)
    for got, want in zip(_cos_sin(angles), (np.cos(angles), np.sin(angles)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-16)


def test_position_0_rotates_by_0() -> None:
    assert rotary_table(Rope(10000.0), 6, 1).tolist() == [[1, 1, 1, 0, 0, 0]]


def test_a_part_of_a_head_is_rotated() -> None:
    whole = rotary_table(Rope(10000.0), 12, 50)
    part = rotary_table(Rope(10000.0, dim=12), 16, 50)
    assert part.tobytes() == whole.tobytes()


def test_layers_share_equal_tables() -> None:
    local = Rope(10000.0)
    full = Rope(1e6, dim=4)
    tables = rotary_tables([local, full, None, local], 8, 10)
    assert [table if table is None else table.shape for table in tables] == [(10, 8), (10, 4), None, (10, 8)]
    assert tables[0] is tables[3]
    assert rotary_nbytes([local, full, None, local], 8, 10) == 10 * (8 + 4) * 4


@pytest.mark.parametrize(("max_positions", "factor"), [(64, 2.0), (65, 4.0)])
def test_longrope_has_its_long_factors_where_more_positions_are_served_than_in_training(
    max_positions: int, factor: float
) -> None:
    rope = Rope(10000.0, LongRopeScaling((2.0,), (4.0,), 1.0, 64))
    frequencies, _ = inverse_frequencies(rope, 2, max_positions)
    assert frequencies.tolist() == [1 / factor]


def test_queries_are_scaled_by_the_periods_before_them() -> None:
    found = query_scales(QueryScales(0.5, 2), 5)
    assert found.dtype == np.float32
    assert found == pytest.approx([1, 1, 1 + 0.5 * np.log(2), 1 + 0.5 * np.log(2), 1 + 0.5 * np.log(3)], rel=1e-7)
