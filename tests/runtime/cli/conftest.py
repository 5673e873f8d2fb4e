"""A process that forks commands, and the environment of a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked_commands import ForkedCommands


def environment(**variables: str) -> dict[str, str]:
    """Ours without any setting of Quire's but no tuning, and with the tools that an editable install may ask for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    tools = str(Path(sys.executable).parent)
    kept |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONWARNINGS": "error", "QUIRE_TUNE": "off"}
    return kept | variables


@pytest.fixture(scope="session")
def forked() -> Iterator[ForkedCommands]:
    commands = ForkedCommands(environment())
    yield commands
    commands.close()
