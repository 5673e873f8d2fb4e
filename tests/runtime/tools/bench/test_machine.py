"""The report of a whole machine, on a small model: every figure is there, as JSON and as tables of 100 columns."""

from __future__ import annotations

import json

import pytest
from quire.kernels.isa import pick_level
from quire.runtime.cli.bench import bench
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.model.runner.tuning import Effort, rivals_of
from quire.runtime.tools.bench import machine, profile
from quire.runtime.tools.bench.machine import measure_machine
from quire.runtime.tools.bench.overhead import StepOverhead
from quire.runtime.tools.bench.profile import MachineProfile, MeasuredRoofline
from quire.runtime.tools.bench.roofline import Roofline

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 320, "head_dim": 32}
PEAKS = {"q8": 4e9, "bf16": 2e9, "f32": 1e9}


class GivenMeter:
    """A meter of one roofline, which is not measured."""

    def __init__(self, threads: int, isa: str) -> None: ...

    def measure(self) -> Roofline:
        return Roofline(5e9, PEAKS)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = pick_level()
    rooflines = (MeasuredRoofline(isa=isa, threads=1, read_bytes_per_s=5e9, peak_ops_per_s=PEAKS),)
    sizes = {"machine": "a machine", "isa": isa, "threads": 1, "rooflines": rooflines}
    given = MachineProfile(format=profile.FORMAT, version=1, **sizes)
    monkeypatch.setattr(machine, "measure_profile", lambda isa, threads, report: given)
    monkeypatch.setattr(machine, "least_op_seconds", lambda threads, isa: 2e-6)
    monkeypatch.setattr(machine, "measure_overhead", lambda config: StepOverhead(*[1.0] * 6))
    monkeypatch.setattr("quire.runtime.tools.bench.speed.RooflineMeter", GivenMeter)
    monkeypatch.setattr(machine, "QWEN3_SHAPE", machine.QWEN3_SHAPE | SMALL)
    monkeypatch.setattr(machine, "DECODERS", (("q8", "int8", "1x8,2x4"), ("bf16", "bf16", "1x8")))
    monkeypatch.setattr(machine, "FUNCTION_EFFORT", Effort(rounds=1, seconds=1e9, slow=1e9))
    for name, value in (("TOKENS_PER_USER", 2), ("REPEATS", 1), ("TEXT_SHAPES", "1x4")):
        monkeypatch.setattr(machine, name, value)


def test_all_figures_are_in_one_report(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    runs: list[str] = []
    report = measure_machine(EngineConfig(threads=1), runs.append)
    figures = json.loads(json.dumps(report.as_dict()))
    assert {"quire", "processor", "levels", "load_average_before", "profile", "texts"} <= figures.keys()
    assert [[each["shape"] for each in of["shapes"]] for of in figures["decoders"]] == [["1x8", "2x4"], ["1x8"]]
    own = [pick_level(), *rivals_of(pick_level())]
    assert {name: list(times) for name, times in figures["function_s"].items()} == dict.fromkeys(
        ("linear q8 1", "attention int8 2-7"), own
    )
    # q8 has two bytes more for each 128 inputs; o for each 64, the columns of one KV head.
    assert figures["layer_bytes"] == 1024 * (64 + 2) + 64 * (512 + 16) + 192 * (64 + 2) + 64 * (96 + 2)
    assert runs[:2] == ["writing random weights", "q8, 1x8: run 1 of 1"]
    report.print()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    titles = ("machine", "one layer of the decoder, q8 and int8", "bundled embedding model, q8")
    assert [line.strip() for line in lines if line.strip() in titles] == list(titles)


@pytest.mark.parametrize(
    "flags", [{"shapes": "1x8"}, {"repeats": 2}, {"threads_sweep": ("1",)}, {"task": "embed"}, {"model": "folder"}]
)
def test_flags_that_have_no_place_in_it_are_refused(flags: dict[str, object]) -> None:
    model = flags.pop("model", None)
    with pytest.raises(ConfigError, match="--machine takes --json, --threads, --isa and --tune"):
        bench(model, machine=True, **flags)  # type: ignore[arg-type]
