"""The cache of tuned functions: kept by processor, build and shape; no content of its folder stops an engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire.kernels import CpuBudget
from quire.runtime.cli.info import info
from quire.runtime.model.runner import tuned
from quire.runtime.model.runner.tuned import Tuning, cache_folder, describe_choices, kept_tunings, tune
from quire.runtime.model.runner.tuning import Effort, Trial

from tests.kernels.conftest import Toy

OWN, RIVAL = "avx512-vnni-bf16", "avx2"
CHOICES = {"linear q8 1": RIVAL}


class FakeCapacity:
    """The capacity of an engine on one thread."""

    isa = OWN
    cpus = CpuBudget(1, "")

    def __init__(self, mode: str) -> None:
        self.tune = mode


class RecordingProgram:
    """A program that notes the last choices."""

    choices: Mapping[str, str] | None = None

    def choose(self, choices: Mapping[str, str]) -> None:
        self.choices = choices


class Tuner:
    """Tunes a program whose measurement would give CHOICES; counts the measurements."""

    def __init__(self) -> None:
        self.ops = Toy(weights="q8", kv="int8").ops
        self.efforts: list[Effort] = []

    def measure(self, program: Any, ops: Any, kv_dtype: str, trials: Any, isa: str, effort: Effort) -> dict[str, str]:
        self.efforts.append(effort)
        return CHOICES

    def tune(self, mode: str = "auto") -> Mapping[str, str] | None:
        """Return the choices that the program has afterwards."""
        program = RecordingProgram()
        trial = Trial(1, 1, lambda first, end: None)
        chosen = tune(program, self.ops, "int8", [trial], FakeCapacity(mode))  # type: ignore[arg-type]
        assert chosen == (program.choices or {})
        return program.choices


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tuner:
    tuner = Tuner()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuned, "rivals_of", lambda isa: (RIVAL,) if isa == OWN else ())
    monkeypatch.setattr(tuned, "fastest_functions", tuner.measure)
    return tuner


def only_file() -> Path:
    folder = cache_folder()
    assert folder is not None
    (path,) = folder.iterdir()
    return path


def test_functions_are_measured_once_and_then_kept(tuner: Tuner) -> None:
    assert [tuner.tune(), tuner.tune(), tuner.tune()] == [CHOICES] * 3
    assert tuner.efforts == [Effort(rounds=5, seconds=0.2)]


def test_full_measures_at_each_start_and_for_longer_and_off_never(tuner: Tuner) -> None:
    assert tuner.tune("off") is None
    assert not list(kept_tunings())
    assert [tuner.tune("full"), tuner.tune("full"), tuner.tune("auto")] == [CHOICES] * 3
    assert tuner.efforts == [Effort(rounds=25, seconds=20.0)] * 2


@pytest.mark.parametrize("part", ["processor_id", "build_id"])
def test_another_processor_or_build_measures_for_itself(
    monkeypatch: pytest.MonkeyPatch, tuner: Tuner, part: str
) -> None:
    tuner.tune()
    first = only_file()
    monkeypatch.setattr(tuned, part, lambda: "another")
    assert list(kept_tunings()) == []
    tuner.tune()
    assert len(tuner.efforts) == 2
    assert first.exists()
    assert [each.choices for each in kept_tunings()] == [CHOICES]


def test_another_shape_measures_for_itself(tuner: Tuner) -> None:
    tuner.tune()
    tuner.ops = Toy(weights="q8", kv="int8", hidden=96).ops
    tuner.tune()
    assert len(tuner.efforts) == len(list(kept_tunings())) == 2


def changed(**fields: Any) -> bytes:
    content = msgspec.json.decode(only_file().read_bytes())
    content["key"] |= fields.pop("key", {})
    return msgspec.json.encode(content | fields)


HOSTILE = {
    "empty": lambda: b"",
    "half": lambda: only_file().read_bytes()[:-9],
    "bytes": lambda: bytes(range(256)),
    "deep": lambda: b"[" * 60_000,
    "large": lambda: b" " * (1 << 16) + only_file().read_bytes(),
    "another type": lambda: b"[1]",
    "another format": lambda: changed(format=2),
    "another key": lambda: changed(key={"threads": 2}),
    "more fields": lambda: changed(more=1),
    "unknown function": lambda: changed(choices={"linear bf16 1": RIVAL}),
    "a level that is no rival": lambda: changed(choices={"linear q8 1": OWN}),
    "an unknown level": lambda: changed(choices={"linear q8 1": "avx1024"}),
    "an isa of any text": lambda: changed(key={"isa": "mmx"}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_damaged_file_is_measured_anew_and_replaced(tuner: Tuner, content: Any) -> None:
    tuner.tune()
    good = only_file().read_bytes()
    only_file().write_bytes(content())
    assert tuner.tune() == CHOICES
    assert len(tuner.efforts) == 2
    assert only_file().read_bytes() == good


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/dev/zero"),
    ],
    ids=["pipe", "folder", "loop", "device"],
)
def test_no_other_kind_of_file_stops_an_engine(tuner: Tuner, make: Any) -> None:
    tuner.tune()
    path = only_file()
    path.unlink()
    make(path)
    assert tuner.tune() == CHOICES
    assert len(tuner.efforts) == 2
    list(kept_tunings())


@pytest.mark.parametrize("base", ["/dev/null", "/proc/1/nothing", "relative", ""])
def test_without_a_folder_to_write_each_start_measures(
    monkeypatch: pytest.MonkeyPatch, tuner: Tuner, base: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("HOME", "/dev/null")
    assert [tuner.tune(), tuner.tune()] == [CHOICES] * 2
    assert len(tuner.efforts) == 2
    assert list(kept_tunings()) == []


def test_many_writers_leave_one_whole_file(tuner: Tuner) -> None:
    threads = [threading.Thread(target=tuner.tune, args=("full",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for tuning in kept_tunings():
            assert tuning.choices == CHOICES
    assert msgspec.json.decode(only_file().read_bytes(), type=Tuning).choices == CHOICES


def test_info_prints_the_choices_that_are_kept_for_this_machine(
    tuner: Tuner, capsys: pytest.CaptureFixture[str]
) -> None:
    tuner.tune()
    info()
    tune_line, tuned_line = (line for line in capsys.readouterr().out.splitlines() if line.startswith("tune"))
    assert tune_line == f"tune       off  (measured choices of functions: {cache_folder()})"
    assert tuned_line == (
        "tuned      avx512-vnni-bf16, 1 threads, KV int8: attention 6/2x24, convert, linear 80x144 q8, "
        "linear 384x80 q8, linear 80x176 q8: functions of other levels: linear q8 1 by avx2"
    )


def test_the_oldest_files_go_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch, tuner: Tuner) -> None:
    monkeypatch.setattr(tuned, "MAX_KEPT_FILES", 2)
    names = []
    for hidden in (64, 96, 128):
        tuner.ops = Toy(weights="q8", kv="int8", hidden=hidden).ops
        tuner.tune()
        folder = cache_folder()
        assert folder is not None
        (new,) = (path for path in folder.iterdir() if path.name not in names)
        os.utime(new, (hidden, hidden))
        names.append(new.name)
    assert {path.name for path in folder.iterdir()} == set(names[1:])


def test_choices_are_described_in_one_line() -> None:
    assert describe_choices({}) == "functions of other levels: none"
    assert describe_choices(CHOICES | {"attention int8 37-": OWN}) == (
        "functions of other levels: linear q8 1 by avx2, attention int8 37- by avx512-vnni-bf16"
    )
