"""Fixtures: the metrics that a server exports, and external tools that may be missing."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Callable

import pytest
from prometheus_client import generate_latest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.engine import Engine
from quire.runtime.server import Server

from tests.deploy.queries import ROOT
from tests.support.samples import HOSTS

SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="session")
def exported() -> set[str]:
    """Return the names of the series that `quire serve` exports, with engine hosts."""
    families = re.findall(r"^# TYPE (\S+) (\S+)$", asyncio.run(scrape()), re.MULTILINE)
    return {name + suffix for name, kind in families for suffix in SUFFIXES.get(kind, ("",))}


async def scrape() -> str:
    engine = await Engine.start(EngineConfig(kv_cache_memory=1 << 20, max_model_len=128, threads=1))
    engine.core.host_statuses = lambda: HOSTS  # type: ignore[method-assign]
    server = Server()
    try:
        await server.start(engine, ServerConfig(port=0, operator_port=0, openai_port=0))
        return generate_latest(server.observer.registry).decode()
    finally:
        await server.close()
        await engine.close()


@pytest.fixture
def tool() -> Callable[..., str]:
    """Return a function that runs a tool, e.g. `tool("promtool", …)`, and returns its output.

    The test fails if the tool reports an error, and is skipped if the tool is not on PATH.
    """

    def run(name: str, *arguments: object) -> str:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not on PATH")
        done = subprocess.run([name, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=60)
        if done.returncode:
            pytest.fail(f"{name} {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}", pytrace=False)
        return done.stdout

    return run
