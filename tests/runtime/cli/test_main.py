"""The `quire` command before its subcommands: help imports nothing heavy, and errors name flags."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from quire.runtime.cli.app import COMMANDS, app
from quire.runtime.cli.flags import with_flags
from quire.runtime.cli.main import main
from quire.runtime.common.config import EngineConfig, ServerConfig
from quire.runtime.common.options import flag_name, options_of

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


def test_an_interrupt_during_the_imports_exits_with_130() -> None:
    program = (
        "import builtins\n"
        "from quire.runtime.cli.main import main\n"
        "real = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name.startswith('cyclopts'): raise KeyboardInterrupt\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["quire", command, "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert capsys.readouterr().out.startswith(f"Usage: quire {command}")


def test_every_option_is_a_flag_of_serve() -> None:
    arguments = app["serve"].assemble_argument_collection(parse_docstring=False)
    names = {*options_of(EngineConfig), *options_of(ServerConfig), "config", "block_size"} - {"model"}
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
