"""`quire simulate`: what it prints, and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.cli.main import main

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
    first, second = run(*flags)[1], run(*flags)[1]
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
