"""Rotary tables against those transformers computed, for every kind of scaling we accept."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from quire.runtime.model.rope import inverse_frequencies, rotary_nbytes, rotary_table
from quire.runtime.model.spec import LinearScaling, Llama3Scaling, Rope, YarnScaling

GOLDENS = Path(__file__).parents[2] / "goldens"
HEAD_DIM = 128
LN4 = math.log(4)

# The kinds of rope.json as specs; test_config_json.py tests the reading of config.json.
ROPES = {
    "default": Rope(10000.0),
    "linear": Rope(10000.0, LinearScaling(3.0)),
    "llama3": Rope(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    "yarn": Rope(1e6, YarnScaling(4.0, 0.1 * LN4 + 1, 32.0, 1.0, True, 32768)),
    "yarn_exact_range": Rope(1e6, YarnScaling(4.0, 0.1 * LN4 + 1, 24.0, 1.0, False, 4096)),
    "yarn_mscale": Rope(1e6, YarnScaling(4.0, (0.0707 * LN4 + 1) / (0.1 * LN4 + 1), 32.0, 1.0, True, 4096)),
    "yarn_given_factor": Rope(1e6, YarnScaling(4.0, 1.25, 32.0, 1.0, True, 4096)),
}


def test_every_golden_kind_is_tested() -> None:
    assert set(ROPES) == set(json.loads((GOLDENS / "rope.json").read_text()))


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_match_transformers(kind: str) -> None:
    with np.load(GOLDENS / "rope.npz") as golden:
        frequencies, factor = inverse_frequencies(ROPES[kind], HEAD_DIM)
        assert frequencies.dtype == np.float32
        np.testing.assert_allclose(frequencies, golden[f"{kind}.inv_freq"], rtol=2e-7)  # one ulp of pow
        assert factor == pytest.approx(float(golden[f"{kind}.factor"]), rel=1e-12)


@pytest.mark.parametrize("kind", ROPES)
def test_tables_match_transformers_up_to_position_40_000(kind: str) -> None:
    with np.load(GOLDENS / "rope.npz") as golden:
        positions = golden["positions"]
        table = rotary_table(ROPES[kind], HEAD_DIM, int(positions.max()) + 1)
        assert table.dtype == np.float32
        assert table.nbytes == rotary_nbytes(*table.shape)
        np.testing.assert_allclose(table[positions], golden[f"{kind}.table"], atol=1e-6)


def test_position_0_rotates_by_0() -> None:
    assert rotary_table(Rope(10000.0), 6, 1).tolist() == [[1, 1, 1, 0, 0, 0]]
