"""The first line of a command that serves: before anything heavy is imported, in the form of the logs."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from quire.runtime.cli.first_line import write_first_line

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"


def written(*arguments: str, **environ: str) -> str:
    stream = io.StringIO()
    write_first_line(arguments, environ, stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("arguments", "environ", "line"),
    [
        (["serve", "./Qwen3-0.6B", "--weights", "q8"], {}, r"starting serve                 model='\./Qwen3-0\.6B'"),
        (["serve"], {}, "starting serve"),
        (["serve", "--port", "0"], {"QUIRE_MODEL": "m"}, "starting serve                 model='m'"),
        (["engine-host", "a'b\n"], {}, r"starting engine-host           model=\"a'b\\n\""),
    ],
)
def test_a_line_for_people(arguments: list[str], environ: dict[str, str], line: str) -> None:
    assert re.fullmatch(rf"{TIME} \[info     \] {line}\n", written(*arguments, **environ))


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["serve", "é", "--log-format", "json"], {}),
        (["serve", "é", "--log-format=json"], {"QUIRE_LOG_FORMAT": "console"}),
        (["serve", "é"], {"QUIRE_LOG_FORMAT": "json"}),
        (["serve", "é", "--config", "file"], {}),
    ],
)
def test_a_line_of_json_where_the_logs_will_be_json(
    arguments: list[str], environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text('log_format = "json"\n')
    event = json.loads(written(*arguments, **environ))
    assert re.fullmatch(TIME, event.pop("timestamp"))
    assert event == {"event": "starting serve", "level": "info", "model": "é"}


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        ([], {}),
        (["plan", "serve"], {}),
        (["serve", "--help"], {}),
        (["serve", "--log-level", "warning"], {}),
        (["serve"], {"QUIRE_LOG_LEVEL": "error"}),
    ],
)
def test_no_line(arguments: list[str], environ: dict[str, str]) -> None:
    assert written(*arguments, **environ) == ""


@pytest.mark.parametrize(
    "rest", [["--log-format"], ["--config"], ["--config", "/nowhere"], ["--config=/proc/self/mem"]]
)
def test_a_wrong_command_line_is_left_to_those_who_read_all_of_it(rest: list[str]) -> None:
    assert "[info     ] starting serve" in written("serve", *rest)


def test_nothing_heavy_is_imported_before_it() -> None:
    script = (
        "import sys; from quire.runtime.cli.main import write_first_line; write_first_line(['serve']);"
        "print([name for name in ('numpy', 'cyclopts', 'structlog', 'msgspec', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert "starting serve" in done.stderr
