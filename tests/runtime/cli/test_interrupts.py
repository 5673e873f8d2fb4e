"""Ctrl-C and SIGTERM while a model loads: the load stops, and the command ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from quire.runtime.cli import serve as command
from quire.runtime.cli import stop_signal
from quire.runtime.cli.interrupts import leave, leaving_at_once
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import Unavailable
from quire.runtime.common.settings import resolve_settings
from quire.runtime.engine import EngineCore, build
from quire.runtime.model import pack_model


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_the_model_loads_ends_the_start(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = asyncio.Event()

    @asynccontextmanager
    async def loading(*_: Any) -> AsyncIterator[None]:
        signal.raise_signal(number)
        try:
            await asyncio.Event().wait()
            yield
        finally:
            left.set()

    monkeypatch.setattr(command, "_core", loading)
    monkeypatch.setattr(stop_signal, "CANCEL_TIMEOUT_S", 1e6)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        settings = resolve_settings({}, {})
        assert await stop_signal.until_signal(lambda stop: command._start_and_serve(settings, stop)) == number
    finally:
        for each, handler in handlers.items():
            asyncio.get_running_loop().remove_signal_handler(each)
            signal.signal(each, handler)
    assert left.is_set()


async def test_cancelling_a_load_stops_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def load_model(_: EngineConfig, stop: threading.Event, **__: Any) -> None:
        begun.set()
        if stop.wait(60):
            ended.set()
        raise Unavailable("loading the model was cancelled")

    monkeypatch.setattr(build, "load_model", load_model)
    loading = asyncio.create_task(EngineCore.load(EngineConfig()))
    await asyncio.to_thread(begun.wait)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert await asyncio.to_thread(ended.wait, 60)


def test_packing_stops_when_it_is_cancelled() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Unavailable, match="loading the model was cancelled"):
        pack_model(None, "bf16", stop)


def test_an_interrupt_leaves_at_once_only_while_loading() -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with leaving_at_once():
            assert signal.getsignal(signal.SIGINT) is leave
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


THREADS_THAT_NEVER_END = """
import asyncio, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from quire.runtime.cli.stop_signal import run_until_signal

async def main(stop):
    stop.cancel_start = None
    loop = asyncio.get_running_loop()
    loop.run_in_executor({executor}, time.sleep, 600)
    os.kill(os.getpid(), signal.{number})
    await stop.wait()

texts = ThreadPoolExecutor(1, thread_name_prefix="quire-text")
try:
    run_until_signal(main)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("executor", ["None", "texts"], ids=["of the event loop", "of texts"])
@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_a_command_does_not_wait_for_threads_when_everything_is_closed(executor: str, number: str, status: int) -> None:
    script = THREADS_THAT_NEVER_END.format(executor=executor, number=number)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == status, ended.stderr
    assert "threads left behind" in ended.stdout + ended.stderr
