"""Functions are chosen by measurement: a level below the own one must win by a margin, and the bits stay the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.kernels.isa import pick_level
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.model.runner import capacity, load_model, tuning
from quire.runtime.model.runner.encoder_runner import load_encoder
from quire.runtime.model.runner.tuning import Effort, Trial, fastest_functions, rivals_of
from quire.scheduler import EncodedText

from tests.kernels.conftest import Toy

LONG = Effort(rounds=5, seconds=1e9)
OWN, RIVAL, SLOWER = "amx", "avx512-vnni-bf16", "avx2"
BUNDLED: dict[str, Any] = {"weights": "q8", "kv_cache_dtype": "int8", "kv_cache_memory": 1 << 20, "threads": 2}
SHORT: dict[str, Any] = {"max_model_len": 9, "max_num_seqs": 2, "max_num_batched_tokens": 3, "kv_cache_memory": 1 << 18}


class ScriptedProgram:
    """A program whose ops take the seconds that a function of level and op gives, in each run another level."""

    def __init__(self, ops: list[Any], seconds: Callable[[str, int], float]) -> None:
        self.ops = ops
        self.levels: list[str] = []  # level of each run
        self._choices: Mapping[str, str] = {}
        self._seconds = seconds
        self._spent = [0.0] * len(ops)

    def choose(self, choices: Mapping[str, str]) -> None:
        self._choices = choices

    def run(self, first: int, end: int) -> None:
        level = next(iter(self._choices.values()), OWN)
        self.levels.append(level)
        for index in range(first, end):
            self._spent[index] = self._seconds(level, len(self.levels))

    def op_seconds(self) -> list[float]:
        spent, self._spent = self._spent, [0.0] * len(self.ops)
        return spent

    def fastest(self, effort: Effort = LONG) -> dict[str, str]:
        trials = [Trial(1, 1, self.run), Trial(128, 128, self.run)]
        return fastest_functions(self, self.ops, "int8", trials, OWN, effort)  # type: ignore[arg-type]


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    levels = ("scalar", "amx-twin", SLOWER, RIVAL, OWN)
    monkeypatch.setattr(tuning, "NAMES", levels)
    monkeypatch.setattr(tuning, "supported_levels", lambda: levels)
    return Toy(weights="q8", kv="int8", windows=(0, 0, 0)).ops


def test_rivals_are_the_lower_levels_of_this_machine_but_for_those_of_tests(ops: list[Any]) -> None:
    assert {level: rivals_of(level) for level in (OWN, RIVAL, SLOWER, "amx-twin", "scalar")} == {
        OWN: (RIVAL, SLOWER),
        RIVAL: (SLOWER,),
        SLOWER: (),
        "amx-twin": (),
        "scalar": (),
    }


def test_a_faster_level_runs_the_functions_of_all_measured_classes(ops: list[Any]) -> None:
    program = ScriptedProgram(ops, lambda level, run: {OWN: 1.0, RIVAL: 0.9, SLOWER: 1.2}[level])
    assert program.fastest() == {
        "linear q8 1": RIVAL,
        "linear q8 37-": RIVAL,
        "attention int8 2-7": RIVAL,
        "attention int8 37-": RIVAL,
    }


@pytest.mark.parametrize(
    "seconds",
    [
        lambda level, run: 1.0,
        lambda level, run: 1.0 if level == OWN else 0.96,
        lambda level, run: 1.0 if level == OWN or run % 7 == 0 else 1.01,
        lambda level, run: (0.92 if run in (2, 18) else 1.0) if level == OWN else 0.9,
    ],
    ids=["equal", "within the margin", "slower", "faster, but not than the own level's fastest round"],
)
def test_the_own_level_stays_unless_another_wins_clearly(ops: list[Any], seconds: Callable[[str, int], float]) -> None:
    assert ScriptedProgram(ops, seconds).fastest() == {}


def test_a_slow_level_is_tried_twice_and_then_no_more(ops: list[Any]) -> None:
    program = ScriptedProgram(ops, lambda level, run: 4.0 if level == SLOWER else 1.0)
    program.fastest()
    assert program.levels.count(SLOWER) == 2


def test_levels_take_turns_in_beginning_a_round(ops: list[Any]) -> None:
    program = ScriptedProgram(ops, lambda level, run: 1.0)
    program.fastest(Effort(rounds=3, seconds=1e9))
    assert program.levels[1:10] == [OWN, RIVAL, SLOWER, RIVAL, SLOWER, OWN, SLOWER, OWN, RIVAL]


def test_without_time_nothing_is_chosen(ops: list[Any]) -> None:
    program = ScriptedProgram(ops, lambda level, run: 0.1 if level == RIVAL else 1.0)
    assert program.fastest(Effort(rounds=5, seconds=0.0)) == {}
    assert program.levels == [OWN, OWN]
    assert not any(program.op_seconds())


def test_a_function_that_was_measured_long_enough_is_chosen_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, ops: list[Any]
) -> None:
    """Each run takes a second, and the time is over in the second trial."""
    program = ScriptedProgram(ops, lambda level, run: 0.9 if level == RIVAL else 1.0)
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: float(len(program.levels)))
    trials = [Trial(rows, 1, program.run) for rows in (1, 8)]
    effort = Effort(rounds=5, seconds=18.5)
    assert fastest_functions(program, ops, "int8", trials, OWN, effort) == {  # type: ignore[arg-type]
        "linear q8 1": RIVAL,
        "attention int8 2-7": RIVAL,
    }
    assert len(program.levels) == 19


def test_ops_in_bf16_are_not_measured(monkeypatch: pytest.MonkeyPatch, ops: list[Any]) -> None:
    program = ScriptedProgram(Toy(weights="bf16", kv="bf16").ops, lambda level, run: 0.1 if level == RIVAL else 1.0)
    trials = [Trial(1, 1, program.run)]
    assert fastest_functions(program, program.ops, "bf16", trials, OWN, LONG) == {}  # type: ignore[arg-type]
    assert program.levels == []


def let_rivals_win(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(tuning, "_fastest_level", lambda trials, isa: rivals_of(isa)[-1])


@pytest.mark.skipif(not rivals_of(pick_level()), reason="this machine has one level for engines")
@pytest.mark.parametrize("sizes", [{}, SHORT], ids=["default", "short"])
def test_a_tuned_decoder_has_the_bits_of_an_untuned_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: dict[str, Any]
) -> None:
    let_rivals_win(monkeypatch, tmp_path)
    scores = {}
    for mode in ("off", "full"):
        runner = load_model(EngineConfig(**BUNDLED | sizes, tune=mode))
        assert not any(runner.op_seconds().values())
        scores[mode] = (len(runner.tuned) > 0, runner.score([5, 6, 7], 0, [[0]], 2).tobytes())
        runner.close()
    assert [tuned for tuned, _ in scores.values()] == [False, True]
    assert scores["off"][1] == scores["full"][1]


@pytest.mark.skipif(not rivals_of(pick_level()), reason="this machine has one level for engines")
def test_a_tuned_encoder_has_the_bits_of_an_untuned_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    let_rivals_win(monkeypatch, tmp_path)
    vectors = {}
    for mode in ("off", "auto"):
        runner = load_encoder(EngineConfig(model="demo_embedding", weights="q8", threads=2, tune=mode))
        runner.begin([EncodedText((5, 6, 7)), EncodedText(tuple(range(40)))])
        assert runner.advance(runner.num_stages)
        vectors[mode] = (len(runner.tuned) > 0, runner.values())
        runner.close()
    assert [tuned for tuned, _ in vectors.values()] == [False, True]
    np.testing.assert_array_equal(vectors["off"][1], vectors["auto"][1])


def test_the_mode_is_the_option_else_the_variable_else_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    for variable in ("", "off"):
        monkeypatch.setenv("QUIRE_TUNE", variable)
        modes += [capacity.pick_tune_mode(EngineConfig(tune=mode)) for mode in (None, "full")]
    assert modes == ["auto", "full", "off", "full"]
    monkeypatch.setenv("QUIRE_TUNE", "fast")
    with pytest.raises(ConfigError, match="`tune` or QUIRE_TUNE must be one of off, auto, full, not 'fast'"):
        load_model(EngineConfig(kv_cache_memory=1 << 20))
