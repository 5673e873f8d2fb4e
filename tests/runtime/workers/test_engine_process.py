"""Starting an engine process: what is left behind when that fails."""

from __future__ import annotations

import asyncio
import os
import sys
from errno import EMFILE
from pathlib import Path
from typing import Any, NoReturn

import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.workers import engine_process
from quire.runtime.workers.engine_link import EngineLink, StartEngine
from quire.runtime.workers.engine_process import EngineProcess

START = StartEngine(EngineConfig(), None, None, "engine-0", None)


def no_descriptors(*_: Any, **__: Any) -> NoReturn:
    raise OSError(EMFILE, "Too many open files")


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("where", "name"), [(os, "pipe"), (asyncio, "create_subprocess_exec"), (EngineLink, "open")], ids=lambda each: each
)
async def test_a_failed_start_leaves_no_process_and_no_descriptor(
    where: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    processes, files = children(), descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, no_descriptors)
        with pytest.raises(OSError, match="Too many open files"):
            await EngineProcess.spawn(START, lambda message: None, lambda: None)
    while children() != processes:  # the event loop waits for what was killed
        await asyncio.sleep(0.01)
    assert descriptors() <= files
