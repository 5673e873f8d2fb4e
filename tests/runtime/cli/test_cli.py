"""The `quire` command in its own process, in any folder; errors are one line."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from quire import LLM, Client, SamplingParams, StructuredOutputs
from quire.kernels import supported_levels, unsupported_levels
from quire.runtime.cli.local_server import local_server
from quire.runtime.cli.main import run
from quire.runtime.cli.serve import _together
from quire.runtime.common.errors import ConfigError, Unavailable
from quire.runtime.model import BUNDLED_MODEL, kv_layout, read_spec
from quire.runtime.server.tenancy.auth import Keyring
from quire.runtime.tools.bench import Roofline, speed
from quire.runtime.tools.bench.roofline import DTYPES

from tests.support.forked_commands import ForkedCommands

from .conftest import environment

MODULE = [sys.executable, "-P", "-m", "quire.runtime.cli.main"]
SCRIPT = [str(Path(sys.executable).with_name("quire"))]
PACKAGE = [sys.executable, "-P", "-m", "quire"]
QUICK = ["--kv-cache-memory", "4MiB"]
TIMEOUT_S = 240  # only to stop a hang


@pytest.fixture
def hostile_folder(tmp_path: Path) -> Path:
    """Return a working directory with packages named like Quire's, which must not be imported."""
    for name in ("kernels", "runtime", "pager", "scheduler", "quire"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a stranger was imported')\n")
    return tmp_path


@pytest.fixture
def quire(hostile_folder: Path, forked: ForkedCommands) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str, given: bytes = b"", **variables: str) -> subprocess.CompletedProcess[str]:
        return forked.run(arguments, hostile_folder, environment(**variables), given=given)

    return run


Quire = Callable[..., subprocess.CompletedProcess[str]]


# Output


@pytest.mark.parametrize("command", [MODULE, SCRIPT, PACKAGE], ids=["module", "script", "package"])
def test_info(hostile_folder: Path, command: list[str]) -> None:
    variables = environment(XDG_CACHE_HOME=str(hostile_folder))
    done = subprocess.run(
        [*command, "info"], cwd=hostile_folder, env=variables, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(dict.fromkeys(line.split()[0] for line in done.stdout.splitlines())) == [
        *("quire", "python", "machine", "ISA", "threads", "tune", "q8", "model")
    ]


def test_info_says_why_a_level_was_chosen_or_not(quire: Quire) -> None:
    best, *missing = [line for line in quire("info").stdout.splitlines() if line.startswith("ISA ")]
    assert best == f"ISA        {supported_levels()[-1]}  (the best of {', '.join(supported_levels())})"
    assert missing == [f"ISA        not {level}: {reason}" for level, reason in unsupported_levels().items()]
    assert "ISA        scalar  (requested by --isa or QUIRE_ISA; " in quire("info", "--isa", "scalar").stdout


def test_plan(quire: Quire) -> None:
    done = quire("plan", *QUICK, "--arena")
    assert done.returncode == 0
    assert done.stderr.startswith("It fits: ")
    assert "4,194,304 B  64 pages" in done.stdout
    assert "step arena, by offset" in done.stdout


def test_sizes(quire: Quire) -> None:
    done = quire("plan", "--sizes")
    assert (done.returncode, done.stderr) == (0, "")
    assert "234,881,024" in done.stdout


def test_generate_prints_what_llm_generates(quire: Quire) -> None:
    flags = ["--max-tokens", "30", "--temperature", "0.8", "--seed", "5", "--ignore-eos", "--stop", "zebra"]
    done = quire("generate", "This module provides", *flags, *QUICK)
    assert done.returncode == 0, done.stderr
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=5, ignore_eos=True, stop=("zebra",))
    with LLM(kv_cache_memory=4 << 20) as llm:
        (output,) = llm.generate("This module provides", params)
    assert done.stdout == output.text
    assert "30 generated" in done.stderr
    assert "seed 5" in done.stderr


def test_generate_prints_choices_one_after_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-tokens", "8", "--temperature", "0.8", "--seed", "5", "--n", "2", "--ignore-eos"]
    assert run(["generate", "This module provides", *flags, *QUICK]) == 0
    out, _ = capsys.readouterr()
    with LLM(kv_cache_memory=4 << 20) as llm:
        (output,) = llm.generate(
            "This module provides", SamplingParams(max_tokens=8, temperature=0.8, seed=5, n=2, ignore_eos=True)
        )
    assert out == "".join(
        f"[choice {number}: length]\n{choice.text}\n\n" for number, choice in enumerate(output.outputs, 1)
    )


def test_a_new_key_is_admitted_by_what_standard_output_gets(quire: Quire, tmp_path: Path) -> None:
    done = quire("token", "lab-1")
    assert done.returncode == 0
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(done.stdout)
    key = done.stderr.split()[-1]
    assert Keyring.load(tokens).authenticate(key).name == "lab-1"
    assert key not in done.stdout


def test_generate_reads_standard_input(quire: Quire) -> None:
    flags = ["--max-tokens", "8", "--temperature", "0", *QUICK]

    def generated(*arguments: str, given: bytes = b"") -> tuple[int, str, str]:
        done = quire("generate", *arguments, *flags, given=given)
        return done.returncode, done.stdout, done.stderr

    status, text, _ = generated("This module\nprovides")
    assert status == 0
    assert generated(str(BUNDLED_MODEL), "-", given=b"This module\nprovides\n")[:2] == (0, text)
    assert generated("-", given=b"This module\nprovides")[:2] == (0, text)
    status, _, errors = generated("-", given=b"caf\xe9")
    assert (status, errors) == (2, "quire: the prompt on standard input is no UTF-8 text: unexpected end of data\n")


# Prints the status and the peak memory of a command. The kernel counts the memory of the process that starts it, too,
# which is small here and large in a process that has run tests.
MEASURED = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(status, usage.ru_maxrss)
"""


def test_generate_takes_the_memory_of_its_prompt_only(hostile_folder: Path) -> None:
    """Let one prompt run with default options: a cache for 64 sequences of 2,048 tokens alone would take 256 MiB."""
    command = [sys.executable, "-c", MEASURED, *MODULE, "generate", "This module", "--max-tokens", "8"]
    out = subprocess.run(command, cwd=hostile_folder, env=environment(), capture_output=True, check=True).stdout
    status, peak_kib = map(int, out.split())
    assert status == 0
    assert peak_kib < 200 << 10


def test_a_closed_pipe_is_no_traceback(hostile_folder: Path) -> None:
    """Run `quire generate … | head -c 1`. The pipe holds less than the text, so that the command cannot end before."""
    process = subprocess.Popen(
        [*MODULE, "generate", "This", "--max-tokens", "2000", "--ignore-eos", *QUICK],
        cwd=hostile_folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pipesize=4096,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    with process.stderr:
        assert b"Traceback" not in process.stderr.read()
    assert process.wait(TIMEOUT_S) == 141


# bench


def test_bench_json(quire: Quire, tmp_path: Path) -> None:
    picture = tmp_path / "roofline.png"
    shapes = ("--shapes", "1x8,3x5", "--new-tokens", "4", "--repeats", "1")
    done = quire("bench", "--json", *shapes, "--weights", "q8", "--kv-cache-dtype", "int8", "--plot", str(picture))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report.keys() >= {"model", "weights", "kv_cache_dtype", "isa", "threads", "shapes"}
    assert report["weights"] == "q8"
    assert [(row["shape"], row["batch"], row["prompt_tokens"]) for row in report["shapes"]] == [
        ("1x8", 1, 8),
        ("3x5", 3, 5),
    ]
    for row in report["shapes"]:
        assert row["roofline"]["read_bytes_per_s"] > 0
        assert row["roofline"]["peak_ops_per_s"].keys() == {"q8", "bf16", "f32"}
        assert row["prefill"]["tokens"] == row["batch"] * row["prompt_tokens"]
        assert row["decode"]["tokens"] == row["batch"] * 4
        for phase in (row["prefill"], row["decode"]):
            assert phase["tokens_per_s"] == pytest.approx(phase["tokens"] / phase["seconds"])
            assert 0 < sum(phase["op_seconds"].values()) < phase["seconds"]
            assert phase["ops"].keys() == {"q8"}
    layout = kv_layout(read_spec(BUNDLED_MODEL), "int8", 32)
    assert report["shapes"][0]["decode"]["kv_bytes"] == (9 + 10 + 11 + 12) * layout.page_bytes // 32
    overhead = report["step_overhead_us_per_sequence"]
    parts = [overhead[name] for name in ("schedule", "commit", "publish", "frames")]
    assert overhead["event_loop"] == pytest.approx(sum(parts))
    assert min(parts) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_of_an_encoder(quire: Quire) -> None:
    model = str(Path(__file__).parents[3] / "tests" / "goldens" / "encoders" / "bert")
    shapes = ("--task", "embed", "--shapes", "1x8,3x5", "--repeats", "1")
    results = json.loads(quire("bench", model, *shapes, "--json").stdout)["results"]
    assert [(each["num_texts"], each["text_tokens"]) for each in results] == [(1, 8), (3, 5)]
    assert all(each["tokens_per_s"] == each["texts_per_s"] * each["text_tokens"] > 0 for each in results)
    for flags, message in (
        ((model,), "measure it with --task embed"),
        ((model, *shapes[:2], "--shapes", "1x1000"), "texts of more than 190 tokens"),
        ((model, *shapes, "--new-tokens", "4"), "leave out the other flags of bench"),
    ):
        done = quire("bench", *flags)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr


class KnownPeaks:
    """The roofline of a machine, which takes no time to measure."""

    def __init__(self, threads: int, isa: str) -> None: ...

    def measure(self) -> Roofline:
        return Roofline(34e9, dict.fromkeys(DTYPES, 2e12))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `quire bench` in this process, with a known roofline, and return its standard output."""
    monkeypatch.setattr(speed, "RooflineMeter", KnownPeaks)

    def run_bench(*flags: str) -> str:
        status = run(["bench", *flags, "--new-tokens", "2", "--repeats", "1"])
        output = capsys.readouterr()
        assert (status, output.err) == (0, "")
        return output.out

    return run_bench


def test_bench_tables_fit_100_columns(bench: Callable[..., str]) -> None:
    printed = bench("--shapes", "1x8,2x8,3x8,4x8,5x8")
    assert max(len(line) for line in printed.splitlines()) <= 100
    for word in ("GB/s", "share of", "attention", "between ops and steps", "step overhead"):
        assert word in printed


def test_bench_threads_sweep(bench: Callable[..., str]) -> None:
    report = json.loads(bench("--json", "--shapes", "1x8", "--threads-sweep", "2,1", "--weights", "q8"))
    assert report.keys() == {"model", "weights", "kv_cache_dtype", "isa", "thread_counts"}
    assert [each["threads"] for each in report["thread_counts"]] == [1, 2]
    for each in report["thread_counts"]:
        assert each["least_op_s"] > 0
        assert each["shapes"][0]["roofline"]["read_bytes_per_s"] > 0
        assert each["shapes"][0]["decode"]["ratio_to_fewest_threads"] > 0


def test_bench_warns_of_options_from_elsewhere_that_it_sets_itself(quire: Quire, tmp_path: Path) -> None:
    (tmp_path / "quire.toml").write_text("max_num_seqs = 3\n")
    flags = ("--config", str(tmp_path / "quire.toml"), "--shapes", "8", "--threads-sweep")
    done = quire("bench", *flags, QUIRE_MAX_MODEL_LEN="512", QUIRE_THREADS="3", QUIRE_WEIGHTS="q8")
    assert (done.returncode, done.stdout) == (2, "")
    warning, error = done.stderr.splitlines()
    assert warning == "quire: warning: bench sets max_model_len, max_num_seqs, threads itself; other values are ignored"
    assert "'8' is not a shape" in error


def test_bench_without_the_cache(quire: Quire, tmp_path: Path) -> None:
    picture = tmp_path / "story.png"
    done = quire(*("bench", "--no-kv-cache", "--json", "--shapes", "1x40", "--new-tokens", "6", "--plot", str(picture)))
    assert done.returncode == 0, done.stderr
    story = json.loads(done.stdout)
    assert story["prompt_tokens"] == 40
    assert story["same_tokens"] is True
    for name in ("cached", "uncached"):
        assert story[name].keys() >= {"ttft_s", "decode_tokens_per_s", "forward_s", "token_ids"}
        assert len(story[name]["forward_s"]) == len(story[name]["token_ids"]) == 6
    assert story["cached"]["token_ids"] == story["uncached"]["token_ids"]
    assert picture.read_bytes().startswith(b"\x89PNG")


# Errors: exit status 2 and one line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "unknown command 'fly'"),
        (["serve", "--port", "many"], "--port must be a whole number from 0 to 65535, not 'many'"),
        (["serve", "--port", "70000"], "--port must be a whole number from 0 to 65535, not '70000'"),
        (["serve", "--host", "0.0.0.0", *QUICK], "requires --token or --auth-tokens"),
        (["serve", "--max-num-waiting", "0"], "--max-num-waiting must be a whole number of at least 1, not '0'"),
        (["serve", "/nowhere"], "/nowhere does not exist"),
        (["serve", "--kv-spill-size", "1KiB", *QUICK], "--kv-spill-size: a spill file needs at least a page"),
        (["serve", "--kv-spill-size", "1MiB", "--kv-spill-dir", "/nowhere", *QUICK], "--kv-spill-dir: cannot create"),
        (["serve", __file__], "is neither a folder nor a .gguf file"),
        (
            ["serve", "--in-process", "--engine-processes", "2", *QUICK],
            "--engine-processes cannot be above 1 with --in",
        ),
    ],
)
def test_errors_of_a_process(quire: Quire, arguments: list[str], message: str) -> None:
    refused(quire(*arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "--bogus"], "--bogus"),
        (["token", "a b"], "tenant 'a b': a name is 1 to 64"),
        (["info", "--weights", "q8"], "unknown option --weights"),
        (["info", "--isa", "mmx"], "--isa or QUIRE_ISA: unknown ISA level 'mmx'"),
        (["plan", "/"], "has no config.json"),
        (["plan", "--weights", "int3"], "--weights must be auto, bf16, f32, q4 or q8, not 'int3'"),
        (["plan", "--kv-cache-memory", "lots"], "--kv-cache-memory"),
        (["plan", "--max-model-len", "4096"], "2048 positions"),
        (["plan", "--max-num-seqs", str(1 << 63)], "--max-num-seqs must be below 10^18, not '9223372036854775808'"),
        (["plan", "--memory", "8GiB", "--kv-cache-share", "0.1"], "--memory cannot be given with --kv-cache-share"),
        (["plan", "--config", "/nowhere.toml"], "/nowhere.toml cannot be read"),
        (["generate"], "PROMPT is missing; write `quire generate MODEL PROMPT`"),
        (["generate", str(BUNDLED_MODEL)], "PROMPT is missing; write `quire generate MODEL PROMPT`"),
        (["generate", "model.gguf", *QUICK], "PROMPT is missing; write `quire generate MODEL PROMPT`"),
        (["generate", "missing", "hi"], "missing"),
        (["generate", "", *QUICK], "the prompt is empty"),
        (["generate", "hi", "--max-tokens", "0", *QUICK], "--max-tokens must be between"),
        (["generate", "hi", "--n", "65", *QUICK], "--n must be between 1 and 64, not 65"),
        (["generate", "hi", "--temperature", "nan", *QUICK], "--temperature must be between 0 and 100, not nan"),
        (["bench", "--shapes", "8"], "'8' is not a shape"),
        (["bench", "--shapes", "9" * 5000 + "x1"], f"'{'9' * 80}' is not a shape"),
        (["bench", "--shapes", "1x4096"], "--shapes: the longest sequence takes 4,137 of the model's 2,048 positions"),
        (["bench", "--no-kv-cache", "--repeats", "2"], "give --shapes 1xTOKENS and no --repeats"),
        (["bench", "--no-kv-cache", "--shapes", "2x8"], "give --shapes 1xTOKENS"),
        (["bench", "--no-kv-cache", "--shapes", "1x8,1x9"], "give --shapes 1xTOKENS"),
        (["bench", "--new-tokens", "0"], "at least 1"),
        (["bench", "--plot", "/no/x.png"], "/no is not a folder"),
        (["bench", "--plot", "x.story"], "must end in one of"),
        (["bench", "--no-kv-cache", "--shapes", "1x8", "--new-tokens", "2", "--plot", "/no/x.png"], "/no/x.png"),
        (["demo", "--users", "0"], "--users must be at least 1"),
        *(
            (["bench", *flags], f"{flags[0]} cannot be given to bench, which sets it for its shapes")
            for flags in (["--max-model-len", "512"], ["--max-num-seqs", "3"], ["--max-num-waiting", "3"])
        ),
        (["bench", "--threads-sweep", "1,none"], "--threads-sweep: '1,none'"),
        (["bench", "--threads-sweep", "--threads", "2"], "--threads cannot be given with --threads-sweep"),
        (["bench", "--threads-sweep", "--no-kv-cache"], "--threads-sweep cannot be given with --no-kv-cache"),
        (["bench", "--threads-sweep", "1", "--plot", "x.svg"], "--plot cannot be given with --threads-sweep"),
        (["bench", "--enable-prefix-caching"], "--enable-prefix-caching cannot be given to bench"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_errors_in_this_process(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run commands that, unlike `serve`, change nothing in the process, such as its logging."""
    status = run(arguments)
    out, errors = capsys.readouterr()
    refused(subprocess.CompletedProcess(arguments, status, out, errors), message)


@pytest.mark.parametrize(
    ("variable", "value"), [("QUIRE_MAX_NUM_SEQS", "many"), ("QUIRE_WEIGHTS", "int3"), ("QUIRE_THREADS", "0")]
)
def test_errors_of_environment_variables(quire: Quire, variable: str, value: str) -> None:
    refused(quire("plan", **{variable: value}), f"{variable} must be ")


def refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    *log, line = done.stderr.splitlines()
    assert line.startswith("quire: ")
    assert message in line
    assert not log or "serve" in done.args
    assert all("[info     ] " in each for each in log)


# serve


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `quire serve` on free ports; yield the process and its ready line."""
    process = subprocess.Popen(
        [*SCRIPT, "serve", "--operator-port", "0", "--openai-port", "0", *QUICK, *flags],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def address_in(ready: str) -> str:
    assert ready.startswith("quire ready: clients ")
    return ready.split()[3]


async def test_texts_and_the_engine_are_loaded_together_and_the_first_error_ends_both() -> None:
    ended = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hang")

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ConfigError("no tokenizer")

    async def give(value: int) -> int:
        return value

    assert await _together(give(1), give(2)) == (1, 2)
    for pair in ((hang(), fail()), (fail(), hang())):
        with pytest.raises(ConfigError, match="no tokenizer"):
            await _together(*pair)
    assert ended == ["hang", "hang"]


def test_serve_over_tcp_until_terminated(hostile_folder: Path) -> None:
    with server(hostile_folder, "--port", "0") as (process, ready):
        with Client(address_in(ready)) as client:
            assert len(client.complete("This module", SamplingParams(max_tokens=5, ignore_eos=True)).token_ids) == 5
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert out == "", "standard output has only the ready line"
    assert "Traceback" not in errors


def test_sigterm_ends_every_process_although_they_are_stopped(hostile_folder: Path) -> None:
    """An engine process and one that tries grammars are stopped by a signal."""
    flags = ("--port", "0", "--shutdown-timeout", "0.1")
    with server(hostile_folder, *flags) as (process, ready), Client(address_in(ready)) as client:
        colors = StructuredOutputs(choice=["red", "green"])
        client.complete("A color:", SamplingParams(max_tokens=8, structured_outputs=colors))
        stopped = children(process.pid)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, len(stopped)) == (0, 2)
    assert "it is stopped by a signal or a debugger" in errors
    assert "Traceback" not in errors
    assert not any(lives(pid) for pid in stopped)


def children(pid: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def lives(pid: int) -> bool:
    """Return whether a process runs or is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_serve_says_what_it_does_from_its_start_to_its_end(hostile_folder: Path) -> None:
    with server(hostile_folder, "--port", "0", "--log-format", "json") as (process, ready):
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate()
    assert out == ""
    event = json.loads(ready)
    assert (event["event"], event["pages"], event["page_size"]) == ("quire ready", 64, 32)
    assert event["clients"].startswith("127.0.0.1:")
    lines = [json.loads(line) for line in log.splitlines()]
    events = [line["event"] for line in lines]
    assert events[0] == "starting serve"
    assert (events[-1], lines[-1]["signal"]) == ("stopped", "SIGTERM")
    (loading,) = (line for line in lines if line["event"] == "loading the model")
    assert (loading["weights"], loading["kv_cache"], loading["kv_cache_bytes"]) == ("bf16", "bf16", 4 << 20)
    assert loading["weights_bytes"] < loading["total_bytes"]
    assert events.index("reading the tokenizer") < events.index("loading the model") < events.index("listening")


def test_serve_says_that_a_model_has_no_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(BUNDLED_MODEL / name, tmp_path / name)
    with server(tmp_path, "--port", "0", "--in-process", str(tmp_path)) as (process, ready):
        address_in(ready)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert "the model has no tokenizer: prompts must be token ids" in errors


def test_serve_removes_its_unix_socket(hostile_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with server(hostile_folder, "--uds", str(path), "--shutdown-timeout", "0.1") as (process, ready):
        assert address_in(ready) == f"unix:{path}"
        with Client(f"unix:{path}") as client:
            stream = client.generate("This module", SamplingParams(max_tokens=2000, ignore_eos=True))
            next(stream)
            process.send_signal(signal.SIGINT)  # a stream runs now
            process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert not path.exists()


def test_a_port_in_use_is_an_error(quire: Quire) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = f"cannot listen on 127.0.0.1:{port}"
        refused(quire("serve", "--port", port, "--operator-port", "0", "--openai-port", "0", *QUICK), message)
        refused(quire("serve", "--port", "0", "--operator-port", port, "--openai-port", "0", *QUICK), message)
        answer = quire("serve", "--port", "0", "--operator-port", "0", "--openai-port", port, *QUICK)
        refused(answer, f"{message}: Address already in use; this is the port of the HTTP API, --openai-port")
        started, _ = answer.stderr.splitlines()
        assert started.endswith("starting serve"), "the port is found before the model is read"


# serve --prefix-snapshot

WARM = "This module provides access to the functions that are defined by the C standard. " * 6


def served(folder: Path, snapshot: Path) -> tuple[Any, str]:
    """Send one prompt to a server and terminate it; return the completion and the server's log."""
    with server(folder, "--port", "0", "--prefix-snapshot", str(snapshot)) as (process, ready):
        with Client(address_in(ready)) as client:
            done = client.complete(WARM, SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    return done, errors


def test_a_snapshot_makes_a_restart_warm(hostile_folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "prefixes.quire"
    cold, errors = served(hostile_folder, snapshot)
    assert cold.usage.cached_tokens == 0
    assert "prefix snapshot saved" in errors
    assert snapshot.stat().st_mode & 0o777 == 0o600

    warm, errors = served(hostile_folder, snapshot)
    assert warm.usage.cached_tokens == 64
    assert "prefix snapshot loaded" in errors
    assert warm.outputs == cold.outputs, "the same bits, with logprobs"


def test_a_file_that_is_not_a_snapshot_is_not_overwritten(quire: Quire, tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("four years of work")
    ports = ("--port", "0", "--operator-port", "0", "--openai-port", "0")
    done = quire("serve", *ports, *QUICK, "--prefix-snapshot", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"quire: --prefix-snapshot {path} would be replaced at the end: the file is not a snapshot" in done.stderr
    assert "Traceback" not in done.stderr
    assert path.read_text() == "four years of work"


@pytest.mark.parametrize("flags", [(), ("--in-process",)], ids=["supervised", "in process"])
def test_a_snapshot_that_cannot_be_saved_is_in_the_log_and_in_the_exit_status(
    hostile_folder: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with server(hostile_folder, "--port", "0", "--prefix-snapshot", str(folder / "cache.quire"), *flags) as (
        process,
        _,
    ):
        folder.rmdir()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "prefix snapshot not saved" in errors
    assert f"cannot write the snapshot {folder / 'cache.quire'} (No such file or directory)" in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_paths_that_cannot_hold_a_snapshot_are_errors(quire: Quire, tmp_path: Path) -> None:
    serve = ("serve", "--port", "0", "--operator-port", "0", "--openai-port", "0", *QUICK, "--prefix-snapshot")
    refused(quire(*serve, str(tmp_path)), "is a folder; name a file")
    refused(quire(*serve, "/nowhere/at/all"), "cannot create a file in /nowhere/at")


# demo


def test_demo_shows_its_users_and_ends_its_processes(quire: Quire) -> None:
    mark = secrets.token_hex()
    done = quire("demo", "--users", "3", "--max-tokens", "20", COLUMNS="120", MARK=mark)
    assert done.returncode == 0, done.stderr
    for shown in ("user 1", "user 2", "user 3", "TTFT ms", "cached", "120 tokens for 3 concurrent users", "searched"):
        assert shown in done.stdout
    assert not processes_with(mark)


def test_a_local_server_that_does_not_start_says_why() -> None:
    async def start() -> None:
        async with local_server("--max-num-seqs", "0"):
            pass

    with pytest.raises(
        Unavailable, match=r"^the server did not start: --max-num-seqs must be a whole number of at least 1, not '0'$"
    ):
        asyncio.run(start())


def test_sigterm_to_a_demo_ends_its_processes() -> None:
    mark = secrets.token_hex()
    command = [sys.executable, "-m", "quire.runtime.cli.main", "demo", "--max-tokens", "2000"]
    environment = os.environ | {"MARK": mark}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while len(processes_with(mark)) < 3 and process.poll() is None:  # the demo, its server, the server's engine
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "")
    assert not processes_with(mark)


def processes_with(mark: str) -> list[int]:
    """Return the ids of the processes with `mark` in their environment."""
    entries = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [int(entry.name) for entry in entries if mark.encode() in _environment_of(entry)]


def _environment_of(entry: Path) -> bytes:
    try:
        return (entry / "environ").read_bytes()
    except OSError:
        return b""


def test_generate_names_a_missing_tokenizer_before_it_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(BUNDLED_MODEL / "config.json", tmp_path)
    assert run(["generate", str(tmp_path), "hi"]) == 2
    assert f"{tmp_path} has no tokenizer.json, which a prompt of text needs" in capsys.readouterr().err


def test_unknown_variables_are_warned_of_once(quire: Quire) -> None:
    done = quire("info", QUIRE_MAX_SEQS="3")
    assert done.returncode == 0
    assert done.stderr == (
        "quire: warning: QUIRE_MAX_SEQS has no effect: it is not an option (did you mean QUIRE_MAX_NUM_SEQS?)\n"
    )
