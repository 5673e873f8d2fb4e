"""The `quire` command before its subcommands: help imports nothing heavy, and errors name flags."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from cyclopts import App
from quire.runtime.cli.app import COMMANDS, app
from quire.runtime.cli.flags import with_flags
from quire.runtime.cli.main import _with_standard_input, main, run
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.options import flag_name, options_of
from quire.runtime.common.server_config import ServerConfig

from tests.support.forked_commands import ForkedCommands

from .conftest import environment

HEAVY = ("numpy", "msgspec", "uvloop", "rich.markdown", "quire.kernels", "quire.scheduler", "quire.runtime.engine")
NAMES = ("max_num_seqs", "kv_cache_memory", "threads", "token", "auth_tokens", "n")


def test_help_imports_no_command() -> None:
    program = (
        "import sys\n"
        "from quire.runtime.cli.app import app\n"
        "app(['--help'], result_action='return_value')\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "[]\n"
    for command in COMMANDS:
        assert re.search(rf"^│ {command} +\S", done.stdout, re.MULTILINE), command


def interrupted(moment: str) -> subprocess.CompletedProcess[str]:
    """Run `quire plan` with a SIGINT when a module whose name begins with `moment` is imported."""
    program = f"""
        import builtins, os, signal, sys
        from quire.runtime.cli.main import main
        real = builtins.__import__
        def interrupting(name, *rest):
            if name.startswith({moment!r}): os.kill(os.getpid(), signal.SIGINT)
            return real(name, *rest)
        builtins.__import__ = interrupting
        sys.argv = ["quire", "plan"]
        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("moment", ["cyclopts", "numpy", "msgspec"])
def test_an_interrupt_during_the_imports_exits_with_130(moment: str) -> None:
    done = interrupted(moment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_of_a_command_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    commands = App(name="quire")
    commands.command(interrupt)
    monkeypatch.setattr("quire.runtime.cli.app.app", commands)
    monkeypatch.setattr("sys.argv", ["quire", "interrupt"])
    try:
        with pytest.raises(SystemExit, match="130"):
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "a", "b"], "unexpected argument 'b'; see `quire plan --help`"),
        (["generate", "a", "b", "c"], "unexpected argument 'c'; see `quire generate --help`"),
        (["generate", "b", "--model", "a"], "unknown option --model; the model is the first argument"),
        (["plan", "--weights"], "--weights needs a value"),
        (["token"], "TENANT is missing"),
        (["rm"], "MODEL is missing"),
        (["bench", "--new-tokens", "x"], "--new-tokens must be a whole number, not 'x'"),
        (["bench", "--new-tokens", "1e3"], "--new-tokens must be a whole number, not '1e3'"),
        (["loadtest", "--num-prompts", "1.5"], "--num-prompts must be a whole number, not '1.5'"),
        (["bench", "--bogus"], "unknown option --bogus; see `quire bench --help`"),
        (["bench", "--kv-cache=3"], "--kv-cache must be true or false, not '3'"),
        (["demo", "--users", "2.5"], "--users must be a whole number, not '2.5'"),
        (["plan", "--weights", "q8", "--weights", "f32"], "--weights is given twice"),
        (["plan", "--weigths", "q8"], "unknown option --weigths; did you mean --weights?"),
        (["serve", "--model", "a"], "unknown option --model; the model is the first argument"),
        (["plan", "-m", "a"], "unknown option -m; the model is the first argument"),
        (["demo", "--model", "a"], "unknown option --model; see `quire demo --help`"),
        (["serve", "--dtype=bfloat16"], "unknown option --dtype; did you mean --weights?"),
        (["serve", "--api-key", "a"], "unknown option --api-key; did you mean --token?"),
        (["bench", "--api-key", "a"], "unknown option --api-key; see `quire bench --help`"),
        (["serve", "--ctx-size", "4096"], "unknown option --ctx-size; did you mean --max-model-len?"),
        (["serve", "-c", "4096"], "unknown option -c; did you mean --max-model-len?"),
        (
            ["serve", "--tensor-parallel-size", "2"],
            "unknown option --tensor-parallel-size; did you mean --threads or --engine-processes?",
        ),
        (["bench", "--tensor-parallel-size", "2"], "unknown option --tensor-parallel-size; did you mean --threads?"),
        (
            ["serve", "--gpu-memory-utilization", "0.5"],
            "unknown option --gpu-memory-utilization; did you mean --kv-cache-share or --kv-cache-memory?",
        ),
        (["generate", "a", "--max-new-tokens", "9"], "unknown option --max-new-tokens; did you mean --max-tokens?"),
        (["serve", "--max-seq-len", "9"], "unknown option --max-seq-len; did you mean --max-model-len?"),
        (["serve", "--tokenizer", "a"], "unknown option --tokenizer; see `quire serve --help`"),
        (["serve", "--batch-size", "9"], "unknown option --batch-size; see `quire serve --help`"),
        (["srve"], "unknown command 'srve'; did you mean 'serve'?"),
        (["fly"], "unknown command 'fly'; see `quire --help`"),
        (["download", "a/b"], "unknown command 'download'; `quire pull ORGANIZATION/NAME` downloads a model"),
        (
            ["ls"],
            "unknown command 'ls'; `quire list` lists the models that are downloaded, `quire models` what is supported",
        ),
        (["help"], "unknown command 'help'; see `quire --help`"),
    ],
)
def test_errors_of_the_command_line_are_in_plain_words(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().err == f"quire: {message}\n"


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("generate a -n 3", "generate a -n 3"),
        ("generate - --n 3", "generate --n 3 -- -"),
        ("generate model - --ignore-eos --n 3", "generate --ignore-eos --n 3 -- model -"),
        ("generate --ignore-eos model -", "generate --ignore-eos -- model -"),
        ("generate - model", "generate -- - model"),
        ("generate --stop - --stop a model -", "generate --stop=- --stop a -- model -"),
        ("generate --stop=- model -", "generate --stop=- -- model -"),
        ("generate --n 3 -- model -", "generate --n 3 -- model -"),
        ("generate --stop - -- model -", "generate --stop=- -- model -"),
        ("generate - -- -", "generate -- - -"),
        ("loadtest --report - --seed 1", "loadtest --report=- --seed 1 --"),
        ("- a", "- a"),
        ("--version -", "--version -"),
        ("generate --help -", "generate --help -"),
        ("unknown -", "unknown -"),
    ],
)
def test_a_hyphen_is_an_argument_or_the_value_of_its_flag(given: str, taken: str) -> None:
    assert _with_standard_input(given.split()) == taken.split()


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("loadtest --report - --num-prompts 1", "--report -: the name must end in .html"),
        ("serve --port -", "--port must be a whole number from 0 to 65535, not '-'"),
        ("serve --ollama-port --port -", "--port must be a whole number from 0 to 65535, not '-'"),
        ("serve --ollama-port -", "--ollama-port must be a whole number from 0 to 65535, not '-'"),
    ],
)
def test_a_hyphen_as_a_wrong_value_is_refused(command: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command.split()) == 2
    assert error in capsys.readouterr().err


PRINTED = {"--help": "", "serve --help": "", "plan": "It fits: .*\n", "info": "", "token a": "", "--version": ""}


@pytest.mark.parametrize("command", PRINTED)
@pytest.mark.parametrize("closed", ["stdout", "both"])
def test_a_closed_pipe_exits_with_141(forked: ForkedCommands, tmp_path: Path, command: str, closed: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        stderr = writing if closed == "both" else None
        done = forked.run(command.split(), tmp_path, environment(), stdout=writing, stderr=stderr)
    finally:
        os.close(writing)
    assert done.returncode == 141
    assert re.fullmatch(PRINTED[command] if closed == "stdout" else "", done.stderr)


@pytest.mark.parametrize("command", ["plan", "info", "token a", "--version"])
def test_a_full_disk_exits_with_1(forked: ForkedCommands, tmp_path: Path, command: str) -> None:
    with open("/dev/full", "w") as full:
        done = forked.run(command.split(), tmp_path, environment(), stdout=full.fileno())
    assert done.returncode == 1
    error = "quire: standard output cannot be written: No space left on device\n"
    assert re.fullmatch(PRINTED[command] + error, done.stderr)


@pytest.mark.parametrize(("closed", "output"), [("<&- >&-", ""), (">&- 2>&-", ""), ("2>&-", "0.1.0\n")])
def test_closed_standard_streams_are_read_and_written_as_empty_files(closed: str, output: str) -> None:
    command = f'"$0" -m quire.runtime.cli.main --version {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "")


@pytest.mark.parametrize(("encoding", "character"), [("ascii", "\\xe9"), ("utf-8:surrogateescape", "\\ud800")])
def test_characters_that_the_output_cannot_show_are_escaped(encoding: str, character: str) -> None:
    program = f"""
        import sys
        from quire.runtime.cli import main
        main.run = lambda arguments: print("caf{character}")
        main.main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"caf{character}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: quire {command}")


def test_every_option_is_a_flag_of_serve() -> None:
    arguments = app["serve"].assemble_argument_collection(parse_docstring=False)
    of_others = {"model", "listen"}  # an argument, and an option of engine hosts
    names = {
        *options_of(EngineConfig),
        *options_of(ServerConfig),
        "config",
        "block_size",
        "api_host",
        "api_port",
    } - of_others
    assert {flag_name(name) for name in names} <= {name for argument in arguments for name in argument.names}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("max_num_seqs must be at least 1", "--max-num-seqs must be at least 1"),
        ("threads must be at most 4, not 5", "--threads must be at most 4, not 5"),
        ("n must be between 1 and 64", "--n must be between 1 and 64"),
        ("token: too short", "--token: too short"),
        ("4 threads need a token", "4 threads need a token"),
        ("set `token` or `auth_tokens`", "set --token or --auth-tokens"),
        ("lower max_num_seqs, or raise kv_cache_memory.", "lower --max-num-seqs, or raise --kv-cache-memory."),
        ("'max_num_seqs' in /max_num_seqs/quire.toml must be", "'max_num_seqs' in /max_num_seqs/quire.toml must be"),
        ("the tenant's max_num_seqs and the server's", "the tenant's --max-num-seqs and the server's"),
        ("QUIRE_MAX_NUM_SEQS must be", "QUIRE_MAX_NUM_SEQS must be"),
        ("max_num_seqs.toml cannot be read", "max_num_seqs.toml cannot be read"),
        ("my_max_num_seqs and max_num_seqs_2 and `python`", "my_max_num_seqs and max_num_seqs_2 and `python`"),
    ],
)
def test_errors_name_flags(message: str, shown: str) -> None:
    assert with_flags(message, NAMES) == shown


@pytest.mark.parametrize("command", COMMANDS)
def test_values_in_help_have_one_name_per_kind(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert run([command, "--help"]) == 0
    values = set(re.findall(r" --[a-z0-9-]+ ([A-Z]+)", capsys.readouterr().out))
    assert values <= {
        "ADDRESS", "ADDRESSES", "CHOICE", "ENDPOINT", "FILE", "FOLDER", "HOSTS", "LEVEL", "N", "NAME", "PATH", "SIZE",
        "TEXT",
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_argument_has_a_help_text(command: str) -> None:
    arguments = app[command].assemble_argument_collection(parse_docstring=False)
    assert all(argument.parameter.help for argument in arguments if argument.name.isupper())


def test_the_help_of_generate_says_what_its_arguments_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["generate", "--help"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"Usage: quire generate \[OPTIONS\] \[ARGS\]", shown)
    assert re.search("MODEL +The model: a folder", shown)
    assert re.search(r"PROMPT +The text to continue; - reads standard input\.", shown)
    assert re.search("--max-tokens N +Maximum number of tokens to generate", shown)
    assert re.search(r"--stop TEXT\.\.\. --empty-stop +Texts at which", shown)


def test_help_about_hosts_of_images_names_no_flag() -> None:
    arguments = app["serve"].assemble_argument_collection(parse_docstring=False)
    (option,) = (argument for argument in arguments if "--allowed-image-hosts" in argument.names)
    assert option.parameter.help == (
        "Hosts from which images of the HTTP API are fetched over https, separated by commas: a name, a name with a "
        "port (`name:port`) or an address; addresses that are not public must be in the list themselves."
    )


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", ["serve", "generate", "loadtest"])
def test_no_flag_is_broken_in_help(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run([command, "--help"]) == 0
    shown = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    arguments = app[command].assemble_argument_collection(parse_docstring=False)
    names = {name for argument in arguments for name in (*argument.names, *argument.negatives)}
    assert shown <= names | {"--help", "--version"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_80_columns_has_every_word(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words: dict[int, Counter[str]] = {}
    for columns in (80, 1000):  # 1000: each flag and its help text are one line
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run([command, "--help"]) == 0
        shown = re.sub("[│─╭╮╰╯]", " ", capsys.readouterr().out)
        words[columns] = Counter(shown.split())
    assert words[80] == words[1000]
    arguments = app[command].assemble_argument_collection(parse_docstring=True)
    texts = " ".join(argument.parameter.help or "" for argument in arguments if argument.show)
    assert Counter(texts.split()) <= words[80]


@pytest.mark.parametrize("command", ["serve", "generate", "bench"])
def test_help_texts_have_room_beside_long_choices(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert re.search("--tool-call-parser NAME +How the model writes", shown)
    assert "qwen3_coder" in shown
