"""Machine profiles: measuring, writing and reading, and the roofline for a configuration."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire.kernels import CpuBudget, supported_levels
from quire.runtime.cli.main import run
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.tools.bench import MachineProfile, Roofline, read_profile, write_profile
from quire.runtime.tools.bench.profile import FORMAT, PROFILE_VERSION, MeasuredRoofline

profile_module = importlib.import_module("quire.runtime.tools.bench.profile")
LEVELS = [level for level in supported_levels() if level != "amx-twin"]


def roofline(threads: int, rate: float, isa: str = "avx2") -> MeasuredRoofline:
    peaks: Any = {"q8": 4 * rate, "bf16": 2 * rate, "f32": rate}
    return MeasuredRoofline(isa=isa, threads=threads, read_bytes_per_s=rate, peak_ops_per_s=peaks)


PROFILE = MachineProfile(
    format=FORMAT,
    version=PROFILE_VERSION,
    machine="a test",
    isa="avx2",
    threads=4,
    rooflines=(roofline(6, 40.0), roofline(1, 10.0), roofline(2, 20.0), roofline(1, 1.0, "scalar")),  # any order
)
VALID = json.loads(msgspec.json.encode(PROFILE))


@pytest.mark.parametrize(
    ("options", "threads", "read"),
    [
        ({}, 4, 30.0),  # half way between 2 and 6
        ({"threads": 2}, 2, 20.0),
        ({"threads": 6}, 6, 40.0),
        ({"isa": "scalar", "threads": 1}, 1, 1.0),
    ],
)
def test_the_roofline_is_that_of_the_level_and_the_threads(options: dict[str, Any], threads: int, read: float) -> None:
    config, found = PROFILE.configure(EngineConfig(**options))
    assert config.threads == threads
    assert found == Roofline(read, {"q8": 4 * read, "bf16": 2 * read, "f32": read})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 7}, "threads must be between 1 and 6, as in the machine profile, not 7"),
        ({"isa": "scalar"}, "threads must be between 1 and 1, as in the machine profile, not 4"),
        ({"isa": "amx"}, "isa must be one that the machine profile has, avx2, scalar, not amx"),
    ],
)
def test_what_was_not_measured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PROFILE.configure(EngineConfig(**options))


def test_a_profile_is_read_as_written(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "machine.json")
    assert read_profile(tmp_path / "machine.json") == PROFILE
    with pytest.raises(ConfigError, match=r"`measure` .* cannot be written: Is a directory"):
        write_profile(PROFILE, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a machine profile"),
        (b"\xff{}", "is not a machine profile"),
        (b"[" * 100_000, "is not a machine profile"),
        (b" " * (1 << 21), "has more than 1,048,576 bytes"),
        (json.dumps(VALID | {"version": 2}).encode(), f"{FORMAT!r}, version 2; `quire info --measure FILE` writes"),
        (json.dumps(VALID | {"format": "trace"}).encode(), "is 'trace', version 1"),
        (json.dumps(VALID | {"threads": 0}).encode(), "`int` >= 1"),
        (json.dumps(VALID | {"rooflines": [{"isa": "avx2"}]}).encode(), "missing required field"),
        *(
            (json.dumps(VALID | {"rooflines": [VALID["rooflines"][0] | wrong]}).encode(), "is not a machine profile")
            for wrong in (
                {"read_bytes_per_s": 0},
                {"read_bytes_per_s": -1.5},
                {"read_bytes_per_s": 1e300},
                {"read_bytes_per_s": "fast"},
                {"peak_ops_per_s": {"q8": 1.0, "bf16": 1.0}},
                {"peak_ops_per_s": {"q8": 1.0, "bf16": 1.0, "f32": 0.0}},
                {"peak_ops_per_s": {"q8": 1.0, "bf16": 1.0, "f32": 1.0, "f64": 1.0}},
                {"threads": 1e9},
            )
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "machine.json").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_profile(tmp_path / "machine.json")
    assert message in str(refused.value)


def test_a_profile_without_rooflines_covers_no_level() -> None:
    with pytest.raises(ConfigError, match="has, none, not avx2"):
        msgspec.structs.replace(PROFILE, rooflines=()).configure(EngineConfig())


def test_every_level_and_number_of_threads_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Meter:
        def __init__(self, threads: int, isa: str) -> None:
            self._rates = iter([factor * 1e9 * threads for factor in (1, 1.5, 2, 0.5, 1)])

        def measure(self) -> Roofline:
            rate = next(self._rates)
            return Roofline(rate, {"q8": 4 * rate, "bf16": 2 * rate, "f32": rate})

    monkeypatch.setattr(profile_module, "available_cpus", lambda: CpuBudget(4, "a test"))
    monkeypatch.setattr(profile_module, "RooflineMeter", Meter)
    path = tmp_path / "machine.json"
    assert run(["info", "--measure", str(path), "--threads", "2"]) == 0
    profile = read_profile(path)
    assert (profile.isa, profile.threads) == (supported_levels()[-1], 2)
    assert [(each.isa, each.threads) for each in profile.rooflines] == [
        (level, threads) for level in LEVELS for threads in (1, 2, 4)
    ]
    assert profile.rooflines[1].read_bytes_per_s == 4e9  # the best of five
    printed = capsys.readouterr().out
    assert f"written to {path}:" in printed
    assert printed.splitlines()[-1].split() == [LEVELS[-1], "4", "8.0", "32", "16", "8"]


def test_a_profile_that_cannot_be_written_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(profile_module, "RooflineMeter", None)
    for path in (tmp_path, tmp_path / "nowhere" / "machine.json"):
        assert run(["info", "--measure", str(path)]) == 2
        assert f"--measure {path} cannot be written" in capsys.readouterr().err
