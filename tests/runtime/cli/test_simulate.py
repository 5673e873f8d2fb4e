"""`quire simulate`: its output and its errors."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from quire.kernels import CpuBudget
from quire.runtime.cli.main import main
from quire.runtime.tools.bench import MachineProfile, Roofline, write_profile
from quire.runtime.tools.bench.profile import FORMAT, PROFILE_VERSION, MeasuredRoofline
from quire.runtime.tools.simulation import given_roofline

simulate = importlib.import_module("quire.runtime.cli.simulate")
DATA = Path(__file__).parents[2] / "data"
MACHINE = ("--bandwidth", "34", "--peak", "920", "--threads", "2")
POOL = ("--kv-cache-memory", "64MiB")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the command in this process and returns its status, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["quire", "simulate", *arguments])
        try:
            main()
            status = 0
        except SystemExit as exit:
            status = int(exit.code or 0)
        return status, *capsys.readouterr()

    return run


def test_tables_show_every_figure(run: Any) -> None:
    status, printed, errors = run(
        *MACHINE, *POOL, "--request-rate", "20", "--num-prompts", "60", "--tenants", "a=20,b=1"
    )
    assert (status, errors) == (0, "")
    for figure in (
        "time to first token",
        "inter-token latency",
        "throughput",
        "KV pool",
        "fairness",
        "tokens per second",
    ):
        assert figure in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_json_is_the_same_for_the_same_seed(run: Any) -> None:
    flags = (*MACHINE, *POOL, "--num-prompts", "30", "--noise", "0.1", "--goodput", "ttft:2000", "itl:200", "--json")
    first = run(*flags)[1]
    second = run(*flags)[1]
    assert first == second
    report = json.loads(first)
    assert (report["offered"], report["finished"], report["goodput_share"]) == (30, 30, 1.0)
    assert report["objectives"] == {"ttft": 2000, "itl": 200}
    assert report["read_bytes_per_s"] == 34e9
    assert run(*flags, "--seed", "2")[1] != first


def test_scheduling_options_have_an_effect(run: Any) -> None:
    flags = (*MACHINE, *POOL, "--num-prompts", "60", "--request-rate", "200", "--max-num-seqs", "4", "--json")
    plain = json.loads(run(*flags)[1])
    bounded = json.loads(run(*flags, "--itl-target-ms", "10", "--max-num-waiting", "20")[1])
    assert bounded["itl_ms"]["p99"] < plain["itl_ms"]["p99"]
    assert set(bounded["refused"]) == {"QueueFull"}


def test_a_config_json_and_a_trace_are_enough(run: Any) -> None:
    model = str(DATA / "qwen3-0.6b")
    trace = ("--arrivals", "mooncake", "--dataset-path", str(DATA / "mooncake.jsonl"))
    flags = ("--weights", "q8", "--kv-cache-memory", "1GiB", *trace, *MACHINE, "--json")
    report = json.loads(run(model, *flags)[1])
    assert (report["offered"], report["finished"], report["output_tokens"]) == (3, 3, 6)
    assert report["cached_share"] == pytest.approx(1024 / 2724)


def test_the_machine_is_measured_if_it_is_not_given(run: Any) -> None:
    report = json.loads(run(*POOL, "--num-prompts", "2", "--peak", "920", "--json")[1])
    assert report["read_bytes_per_s"] > 1e8
    assert report["peak_ops_per_s"] == {"q8": 920e9, "bf16": 460e9, "f32": 230e9}


def test_a_machine_profile_replaces_the_measurement(run: Any, tmp_path: Path) -> None:
    peaks: Any = {"q8": 800e9, "bf16": 400e9, "f32": 200e9}
    rooflines = tuple(
        MeasuredRoofline(isa="another level", threads=threads, read_bytes_per_s=threads * 1e10, peak_ops_per_s=peaks)
        for threads in (1, 64)
    )
    profile = MachineProfile(
        format=FORMAT, version=PROFILE_VERSION, machine="a test", isa="another level", threads=64, rooflines=rooflines
    )
    path = tmp_path / "machine.json"
    write_profile(profile, path)
    flags = (*POOL, "--num-prompts", "2", "--profile", str(path), "--json")
    report = json.loads(run(*flags)[1])
    assert (report["threads"], report["read_bytes_per_s"], report["peak_ops_per_s"]) == (64, 640e9, peaks)
    report = json.loads(run(*flags, "--threads", "1", "--peak", "920")[1])
    assert (report["threads"], report["read_bytes_per_s"], report["peak_ops_per_s"]["q8"]) == (1, 1e10, 920e9)
    status, _, errors = run(*flags, "--threads", "65")
    assert (status, errors) == (2, "quire: --threads must be between 1 and 64, as in the machine profile, not 65\n")


def test_more_threads_than_cpus_scale_the_measured_peak_and_need_a_bandwidth(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    class Meter:
        def __init__(self, threads: int, isa: str) -> None:
            counts.append(threads)

        def measure(self) -> Roofline:
            return given_roofline(30e9, 1000e9)

    monkeypatch.setattr(simulate, "available_cpus", lambda: CpuBudget(2, "a test"))
    monkeypatch.setattr(simulate, "RooflineMeter", Meter)
    flags = (*POOL, "--num-prompts", "2", "--threads", "64")
    report = json.loads(run(*flags, "--bandwidth", "300", "--json")[1])
    assert (report["threads"], report["read_bytes_per_s"], counts) == (64, 300e9, [2])
    assert report["peak_ops_per_s"] == {"q8": 32_000e9, "bf16": 16_000e9, "f32": 8_000e9}
    status, printed, errors = run(*flags)
    assert (status, printed, counts) == (2, "", [2])
    assert errors == "quire: --bandwidth is needed: this machine has 2 CPUs, fewer than the 64 threads to simulate\n"


def test_threads_change_the_times_of_the_same_machine(run: Any) -> None:
    flags = (str(DATA / "qwen3-0.6b"), "--weights", "q8", "--kv-cache-memory", "1GiB", "--num-prompts", "5", "--json")
    machine = ("--bandwidth", "300", "--peak", "20000")
    few, many = (json.loads(run(*flags, *machine, "--threads", threads)[1]) for threads in ("32", "64"))
    assert many["ttft_ms"]["mean"] > 1.1 * few["ttft_ms"]["mean"]  # o and down have 32 blocks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate", "0"], "--request-rate must be between"),
        (["--request-rate", "often"], "rate"),
        (["--arrivals", "sometimes"], "arrivals"),
        (["--arrivals", "azure"], "needs --dataset-path FILE"),
        (["--arrivals", "azure", "--dataset-path", "/nowhere.csv"], "/nowhere.csv cannot be read"),
        (["--prompt-tokens", "many"], "--prompt-tokens: 'many' is not allowed"),
        (["--tenants", "a"], "--tenants: 'a' is not allowed"),
        (["--goodput", "soon"], "--goodput: 'soon' is not allowed"),
        (["--bandwidth", "0"], "--bandwidth must be above 0"),
        (["--peak", "nan"], "--peak must be above 0"),
        (["--noise", "-1"], "--noise must be between"),
        (["/nowhere"], "/nowhere"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--deadline-ms", "0"], "--deadline-ms must be between"),
        (["--num-speculative-tokens", "3"], "--num-speculative-tokens cannot be simulated"),
    ],
)
def test_errors_are_one_line_and_status_2(arguments: list[str], message: str, run: Any) -> None:
    machine = () if arguments[0] in MACHINE else MACHINE
    status, printed, errors = run(*machine, *POOL, "--num-prompts", "2", *arguments)
    assert (status, printed) == (2, "")
    assert re.fullmatch(r"quire: .*", errors.strip(), re.S)
    assert message in errors


FLEET = ("--hosts", "4", "--api-servers", "2", "--turns", "1-3", "--think-time", "1-2", "--shared-prefix-tokens", "128")


def test_a_fleet_has_figures_of_its_hosts(run: Any) -> None:
    flags = (*MACHINE, *POOL, *FLEET, "--num-prompts", "30", "--request-rate", "10", "--output-tokens", "8")
    status, printed, errors = run(*flags, "--host-losses", "1")
    assert (status, errors) == (0, "")
    assert "4 behind 2 API servers, routing home" in printed
    assert "prompt tokens" in printed
    assert max(map(len, printed.splitlines())) <= 100
    report = json.loads(run(*flags, "--routing", "round-robin", "--json")[1])
    fleet = report["fleet"]
    assert (fleet["hosts"], fleet["routing"], fleet["api_servers"]) == (4, "round-robin", 2)
    assert 30 < report["finished"] == report["offered"] == 4 * fleet["mean_requests"]
    assert 0 < report["cached_share"] < fleet["ideal_cached_share"] < 1
    assert json.loads(run(*MACHINE, *POOL, "--num-prompts", "1", "--json")[1])["fleet"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--hosts", "0"), "--hosts must be between 1 and 10000, not 0"),
        (("--routing", "by-weather"), "routing"),
        (("--host-losses", "0.1"), "--host-losses needs at least 2 --hosts"),
        (("--turns", "0"), "--turns: '0' is not allowed"),
        (("--think-time", "long"), "--think-time: 'long' is not allowed"),
    ],
)
def test_invalid_fleets_are_refused(run: Any, flags: tuple[str, ...], message: str) -> None:
    status, printed, errors = run(*MACHINE, *POOL, *flags)
    assert (status, printed) == (2, "")
    assert message in errors
