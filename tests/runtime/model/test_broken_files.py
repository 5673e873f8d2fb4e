"""A small part of tests/fuzz/fuzz_files.py, which breaks model files at random: typed errors only, bounded memory."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.fuzz_files import make_seeds, outcome, run


def test_the_seeds_are_valid(tmp_path: Path) -> None:
    assert {outcome(seed.model) for seed in make_seeds(tmp_path)} == {"loaded"}


def test_broken_files_are_refused_by_typed_errors(tmp_path: Path) -> None:
    outcomes, breaches, _, _ = run(tmp_path, cases=500, seed=7)
    assert not breaches
    assert sum(outcomes.values()) == 500
    assert len({outcome.split(": ")[1] for outcome in outcomes}) > 3
