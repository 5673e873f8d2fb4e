"""Options of many machines that do not go together are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.runtime.cli.main import run


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("serve --engine-hosts a:1", "--engine-hosts needs --secret-file"),
        ("serve --secret-file s", "--secret-file needs --engine-hosts"),
        ("serve --engine-hosts-ca c", "--engine-hosts-ca needs --engine-hosts"),
        ("serve --engine-hosts a:1 --secret-file s --weights q8", "--weights cannot be set with --engine-hosts"),
        ("serve --engine-hosts a:1 --secret-file s --in-process", "--in-process cannot be set with --engine-hosts"),
        ("serve --engine-hosts a:1 --secret-file s --prefix-snapshot p", "--prefix-snapshot cannot be set"),
        ("serve --engine-hosts a:1 --secret-file missing", "--secret-file missing cannot be read"),
        ("serve --engine-hosts a --secret-file good", "--engine-hosts: 'a' is not allowed; write host:port"),
        ("engine-host", "--secret-file is needed"),
        ("engine-host --secret-file missing", "--secret-file missing cannot be read"),
        ("engine-host --secret-file short", "has 5 bytes; at least 16 are needed"),
        ("engine-host --secret-file good --listen here", "--listen: 'here' is not allowed; write host:port"),
        ("engine-host --secret-file good --tls-cert c", "--tls-cert is set without --tls-key"),
        ("engine-host --token t", "unknown option --token"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("short")
    Path("good").write_text("sixteen or more bytes")
    assert run(arguments.split()) == 2
    assert problem in capsys.readouterr().err
