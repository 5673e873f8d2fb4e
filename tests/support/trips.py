"""The functions of a request's way to the scheduler's queue, and of a token's way back, counted with a profile hook.

API server, engine process and client share one process and one event loop; between the first two is a real link.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest import mock

import quire.runtime
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import Engine, EngineCore
from quire.runtime.engine.build import load_texts
from quire.runtime.protocol.codec import Decoder, encode
from quire.runtime.protocol.frames import MAX_FRAME_BYTES, SERVER_FRAMES, Done, Frame, Generate, Hello
from quire.runtime.server import Server
from quire.runtime.workers import EnginePool, engine_main, engine_process, link_end
from quire.runtime.workers.engine_link import TO_ENGINE, StartEngine, ToEngine
from quire.runtime.workers.health import HealthTimeouts

ROOT = str(Path(quire.runtime.__file__).resolve().parents[1])
UNNAMED = ("<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
NUM_REQUESTS = 3  # a function counts if every request calls it
TIMERS = ("Supervisor._watch", "History.watch", "Readiness.watch")  # roots of calls that belong to no request
MAX_TOKENS = 12
KV_BYTES = 8 << 20
END_OF_CHUNKS = b"\r\n0\r\n\r\n"
MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = {"messages": MESSAGES, "max_tokens": MAX_TOKENS, "stream": True, "ignore_eos": True, "temperature": 0}
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0)


class Call(NamedTuple):
    """A call of a function of the project."""

    code: CodeType
    caller: CodeType | None  # the function of the project below it on the stack
    thread: int


class Trip(NamedTuple):
    """The functions between two points of a request's life.

    Properties, constructors, comprehensions and the functions of `monitoring` are left out.
    """

    functions: tuple[str, ...]  # sorted by their first call
    hops: tuple[str, ...]  # functions that call another one of them: they pass the request or token on


class Recorder:
    """Records calls while `is_on`, in every thread that started after it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_on = False

    def __enter__(self) -> Recorder:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self.is_on or not _is_ours(frame.f_code):
            return
        stack = [each.f_code for each in _outward(frame) if _is_ours(each.f_code)]
        if stack[-1].co_qualname not in TIMERS:
            self.calls.append(Call(stack[0], stack[1] if len(stack) > 1 else None, threading.get_ident()))


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(ROOT) and "/tests/" not in name and "/.venv/" not in name and code.co_name not in UNNAMED


def _uncounted() -> set[CodeType]:
    """Return the code of every property of the project."""
    found: set[CodeType] = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("quire."):
            for _, cls in inspect.getmembers(module, inspect.isclass):
                properties = [value for value in vars(cls).values() if isinstance(value, property)]
                found.update(each.fget.__code__ for each in properties if inspect.isfunction(each.fget))
    return found


def trip_of(windows: list[list[Call]]) -> Trip:
    """Return the functions that are called in each of the windows, and the hops among them."""
    uncounted = _uncounted()

    def counts(code: CodeType) -> bool:
        is_constructor = code.co_name.startswith("__") and code.co_name != "__call__"
        return code not in uncounted and not is_constructor and "/monitoring/" not in code.co_filename

    common = set.intersection(*({call.code for call in window} for window in windows))
    functions = [each for each in dict.fromkeys(call.code for call in windows[0]) if each in common and counts(each)]
    callers = [
        {call.caller for call in each if call.code in functions and call.caller is not call.code} for each in windows
    ]
    passing = set.intersection(*callers)
    return Trip(tuple(map(_name, functions)), tuple(_name(each) for each in functions if each in passing))


def _name(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(ROOT + '/').removesuffix('.py')}:{code.co_qualname}"


@dataclass
class EngineHere:
    """Takes the place of an engine process: serves a core on this event loop. Has the methods of `Popen` in use."""

    pid: int = field(default_factory=os.getpid)
    returncode: int | None = None
    task: asyncio.Task[None] | None = None

    def start(self, link_fd: int, _heartbeat_fd: int) -> EngineHere:
        self.task = asyncio.create_task(self._serve(socket.socket(fileno=os.dup(link_fd))))
        return self

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            self.returncode = -signal.SIGKILL

    async def _serve(self, end: socket.socket) -> None:
        first: asyncio.Future[ToEngine] = asyncio.get_running_loop().create_future()
        stopping = asyncio.Event()
        link = await link_end.EngineLink.open(end, TO_ENGINE, first.set_result, stopping.set)
        start = await first
        assert isinstance(start, StartEngine)
        core = await EngineCore.load(start.config)
        try:
            await engine_main.CoreServer(core, link, stopping).run()
        finally:
            await core.close()
            link.close()
            self.returncode = 0


@contextlib.asynccontextmanager
async def whole_server() -> AsyncIterator[Server]:
    """Serve the bundled model with an engine behind a link, on free ports."""
    config = EngineConfig(kv_cache_memory=KV_BYTES, threads=1)
    here = EngineHere()
    with (
        mock.patch.object(engine_process, "_started", here.start),
        mock.patch.object(engine_main, "STATS_INTERVAL_S", math.inf),
        mock.patch.object(link_end, "TURN_S", math.inf),
    ):
        pool = await EnginePool.launch(config, HealthTimeouts(math.inf, math.inf), num_processes=1)
        engine = Engine(pool, *load_texts(config))
        server = Server()
        try:
            await server.start(engine, ServerConfig(port=0, operator_port=0, openai_port=0))
            yield server
        finally:
            await server.close()
            await engine.close()
            assert here.task is not None
            await here.task


async def record_frames(server: Server, recorder: Recorder) -> list[list[Call]]:
    """Return the calls of each of several requests over msgpack."""
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    decoder = Decoder(SERVER_FRAMES, MAX_FRAME_BYTES)

    async def receive(last: type[Frame]) -> None:
        while data := await reader.read(1 << 16):
            if any(isinstance(frame, last) for frame in decoder.feed(data)):
                return

    writer.write(encode(Hello((1,))))
    await asyncio.sleep(0.05)
    recorded = []
    for number in range(NUM_REQUESTS + 1):
        data = encode(Generate(number + 1, "This module provides", PARAMS))
        with _recording(recorder) as calls:
            writer.write(data)
            await receive(Done)
        if number:  # the first request fills caches
            recorded.append(calls)
    writer.close()
    return recorded


async def record_chats(server: Server, recorder: Recorder) -> list[list[Call]]:
    """Return the calls of each of several streamed chats over HTTP."""
    host, _, port = server.openai_address.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(CHAT).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    recorded = []
    for number in range(NUM_REQUESTS + 1):
        with _recording(recorder) as calls:
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            await reader.readuntil(b"[DONE]")
        await reader.readuntil(END_OF_CHUNKS)
        if number:  # the first request opens the connection and fills caches
            recorded.append(calls)
    writer.close()
    return recorded


@contextlib.contextmanager
def _recording(recorder: Recorder) -> Iterator[list[Call]]:
    calls: list[Call] = []
    recorder.calls = calls
    recorder.is_on = True
    try:
        yield calls
    finally:
        recorder.is_on = False


def way_in(calls: list[Call], end: str) -> list[Call]:
    """Return the calls from the first one to the function `end`."""
    return calls[: _find(calls, end, 0) + 1]


def way_back(calls: list[Call]) -> list[Call]:
    """Return the calls from the commit of a token in mid-output until its bytes are unsent output, and their write.

    The engine process continues when it has sent the token: its calls before the server receives the token are left
    out.
    """
    here = threading.get_ident()
    own = [call for call in calls if call.thread == here]
    commits = [index for index, call in enumerate(own) if call.code.co_qualname == "Scheduler.commit"]
    first = commits[len(commits) // 2]
    sent = _find(own, "EngineLink.send", first)
    received = _find(own, "EngineLink.data_received", sent)
    unsent = _find(own, "SendBuffer.send_bytes", received)
    return own[first : sent + 1] + own[received : unsent + 1] + [own[_find(own, "SendBuffer._write", unsent)]]


def _find(calls: list[Call], name: str, start: int) -> int:
    return next(index for index in range(start, len(calls)) if calls[index].code.co_qualname == name)


async def measure_trips() -> dict[str, Trip]:
    """Return the trips over both doors, by name."""
    with Recorder() as recorder:
        async with whole_server() as server:
            frames = await record_frames(server, recorder)
            chats = await record_chats(server, recorder)
    ways: dict[str, tuple[list[list[Call]], Callable[[list[Call]], Any]]] = {
        "frame to queue": (frames, lambda calls: way_in(calls, "RequestQueue.add")),
        "chat to engine": (chats, lambda calls: way_in(calls, "Engine.submit")),
        "chat to queue": (chats, lambda calls: way_in(calls, "RequestQueue.add")),
        "token to frame": (frames, way_back),
        "token to event": (chats, way_back),
    }
    return {name: trip_of([window(calls) for calls in recorded]) for name, (recorded, window) in ways.items()}
