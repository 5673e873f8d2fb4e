"""The clients in this repository pass the conformance cases for clients of any language (tests/conformance/)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / "deploy" / "clients" / "node" / "node_modules"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")} | {
    "QUIRE_TUNE": "off"
}


def conform(client: str) -> None:
    command = [sys.executable, str(ROOT / "tests" / "conformance" / "run.py"), client]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_python_client_conforms() -> None:
    conform("python")


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(not PACKAGES.is_dir(), reason="msgpackr is not installed; `make conformance` installs it")
def test_the_node_client_conforms() -> None:
    conform("node")
