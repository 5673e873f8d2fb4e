"""Measure a real server at ten times its capacity: the latency of accepted requests, and the time of a rejection.

usage: overload.py [--model DIR] [--seconds 30] [--prompt-tokens N] [--new-tokens 32] [-- FLAGS OF quire serve]

First it measures the capacity, in a closed loop of more users than sequence slots. Then requests arrive in an open loop
(Poisson, several connections), at half of the capacity and at ten times. The client is this process, the server
another one. A step takes longer with a full batch than with half a batch, so compare the gaps between tokens
under overload with the gaps at capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import re
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import uvloop
from quire import SamplingParams
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import Overloaded
from quire.runtime.engine import Engine, GenerateRequest, LocalEngine
from quire.runtime.protocol.frames import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    Done,
    Error,
    Frame,
    Generate,
    Hello,
    ServerFrame,
    Tokens,
)

CONNECTIONS = 8
LOW, HIGH = 0.5, 10.0  # times capacity
CANCEL_EVERY = 20  # every 20th request is cancelled after 3 updates
CANCEL_AFTER = 3
WARM_UP_S = 2.0
RETRY_S = 0.1
ENDING_TIMEOUT_S = 60.0
HEARTBEAT_S = 1.0  # the engine process reports its state more often than this
PROMPT_CHARACTERS = 200
WORDS = ("queue", "lock", "returns", "the", "module", "of", "bytes", "iterator", "in", "version", "changed", "a")
LENGTH = struct.Struct(">I")
decode = msgspec.msgpack.Decoder(ServerFrame).decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder; default: the bundled model")
    parser.add_argument("--seconds", type=float, default=30, help="of overload; the runs before take half as long")
    parser.add_argument(
        "--prompt-tokens", type=int, help=f"random ids; default: texts of {PROMPT_CHARACTERS} characters"
    )
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-waiting", type=int, default=16)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="more flags of quire serve, after --")
    arguments = parser.parse_args()
    uvloop.run(measure_submit())
    gc.disable()  # keeps the client's own pauses out of the figures
    with serving(arguments) as server:
        uvloop.run(measure_server(server, arguments))


# The time of a rejection inside the server's process


async def measure_submit() -> None:
    """Time `Engine.submit` while the queue is full. Nothing awaits in between, so no step runs in the meantime."""
    engine = await Engine.start(EngineConfig(max_num_seqs=1, max_num_waiting=1))
    try:
        for _ in range(2):
            await engine.submit(GenerateRequest(prompt=(1, 2, 3), sampling_params=SamplingParams(max_tokens=1000)))
            await asyncio.sleep(0.05)  # lets the first request leave the queue
        for name, prompt in (("3 token ids", (1, 2, 3)), ("20 characters", "x" * 20), ("2,000 characters", "x" * 2000)):
            micros = 1e6 * np.array([await time_rejection(engine, prompt) for _ in range(2000)])
            print(f"Engine.submit of a full queue, {name}: p50 {np.median(micros):.0f} us, p99 {p99(micros):.0f} us")
        start = time.perf_counter()
        assert engine.text_processor.tokenizer is not None
        engine.text_processor.tokenizer.encode("x" * 2000)
        print(f"for comparison, to tokenize 2,000 characters: {1e6 * (time.perf_counter() - start):.0f} us")
    finally:
        await engine.close()


async def time_rejection(engine: LocalEngine, prompt: str | tuple[int, ...]) -> float:
    request = GenerateRequest(prompt=prompt, sampling_params=SamplingParams(max_tokens=100))
    start = time.perf_counter()
    try:
        await engine.submit(request)
    except Overloaded:
        return time.perf_counter() - start
    raise SystemExit("the queue was not full")


# The server


@dataclass(frozen=True)
class ServerProcess:
    pid: int
    ready: str  # the line it printed when it was ready

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self._after("clients ").rpartition(":")
        return host, int(port)

    def metric(self, series: str) -> float:
        with urllib.request.urlopen(self._after("metrics "), timeout=10) as answer:
            text = answer.read().decode()
        found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
        if found is None:
            raise LookupError(f"the server has no metric {series}")
        return float(found[1])

    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * 4096 / 2**20

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def _after(self, label: str) -> str:
        return self.ready.partition(label)[2].split()[0]


@contextmanager
def serving(arguments: argparse.Namespace) -> Iterator[ServerProcess]:
    command = [str(Path(sys.executable).with_name("quire")), "serve", *([arguments.model] if arguments.model else [])]
    command += [
        "--port",
        "0",
        "--operator-port",
        "0",
        "--openai-port",
        "0",
        "--max-num-seqs",
        str(arguments.max_num_seqs),
    ]
    command += ["--max-num-waiting", str(arguments.max_num_waiting), *arguments.flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().strip()
        if not ready:
            raise SystemExit("the server did not start")
        print(ready, flush=True)
        yield ServerProcess(process.pid, ready)
    finally:
        process.terminate()
        process.wait()


# The client: as light as possible, because it shares the machine with the server


@dataclass(slots=True)
class SentRequest:
    """One request and its outcome. Times are seconds of perf_counter."""

    frame: Generate
    sent: float = 0.0
    ended: float = 0.0
    last: Done | Error | None = None
    updates: list[float] = field(default_factory=list)
    cancels: bool = False
    on_end: Callable[[], None] | None = None

    @property
    def ending(self) -> str:
        match self.last:
            case Done(finish_reason=reason):
                return "cancelled" if reason == "cancelled" else "finished"
            case Error(code=code):
                return code
        return "none"


class Connection(asyncio.Protocol):
    """One connection of the client."""

    def __init__(self) -> None:
        self.live: dict[int, SentRequest] = {}
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._write(Hello((PROTOCOL_VERSION,), None, (), MAX_FRAME_BYTES))

    def send(self, request: SentRequest) -> None:
        self.live[request.frame.request_id] = request
        request.sent = time.perf_counter()
        self._write(request.frame)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        at = 0
        while at + 4 <= len(self._buffer):
            end = at + 4 + LENGTH.unpack_from(self._buffer, at)[0]
            if end > len(self._buffer):
                break
            self._take(decode(memoryview(self._buffer)[at + 4 : end]), now)
            at = end
        del self._buffer[:at]

    def _take(self, frame: Frame, now: float) -> None:
        match frame:
            case Tokens(request_id):
                request = self.live[request_id]
                request.updates.append(now)
                if request.cancels and len(request.updates) == CANCEL_AFTER:
                    self._write(Cancel(request_id))
            case Done(request_id) | Error(int(request_id)):
                request = self.live.pop(request_id)
                request.last = frame
                request.ended = now
                if request.on_end is not None:
                    request.on_end()
            case Error(None):
                raise SystemExit(f"the connection was refused: {frame.message}")

    def _write(self, frame: Frame) -> None:
        payload = msgspec.msgpack.encode(frame)
        assert self._transport is not None
        self._transport.write(LENGTH.pack(len(payload)) + payload)


class Client:
    """Sends requests over several connections in turn."""

    def __init__(self, connections: list[Connection], arguments: argparse.Namespace) -> None:
        self._connections = connections
        self._prompt_tokens: int | None = arguments.prompt_tokens
        count = arguments.new_tokens
        self._params = SamplingParams(max_tokens=count, min_tokens=count, temperature=0, ignore_eos=True)
        self._random = random.Random(1)
        self._num_sent = 0

    @classmethod
    async def connect(cls, address: tuple[str, int], arguments: argparse.Namespace) -> Client:
        loop = asyncio.get_running_loop()
        return cls([(await loop.create_connection(Connection, *address))[1] for _ in range(CONNECTIONS)], arguments)

    def send(self, on_end: Callable[[], None] | None = None) -> SentRequest:
        self._num_sent += 1
        request = SentRequest(Generate(self._num_sent, self._prompt(), self._params), on_end=on_end)
        request.cancels = self._num_sent % CANCEL_EVERY == 0
        self._connections[self._num_sent % CONNECTIONS].send(request)
        return request

    async def closed_loop(self, users: int, seconds: float) -> list[SentRequest]:
        requests: list[SentRequest] = []
        end = time.perf_counter() + seconds

        def send() -> None:
            if time.perf_counter() < end:
                request = self.send(lambda: send_again(request))
                requests.append(request)

        def send_again(request: SentRequest) -> None:
            if isinstance(request.last, Error):
                asyncio.get_running_loop().call_later(RETRY_S, send)
            else:
                send()

        for _ in range(users):
            send()
        await asyncio.sleep(seconds)
        return requests

    async def open_loop(self, rate: float, seconds: float) -> list[SentRequest]:
        requests: list[SentRequest] = []
        due = start = time.perf_counter()
        while due < start + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            while due <= time.perf_counter():
                requests.append(self.send())
                due += self._random.expovariate(rate)
        return requests

    async def wait_until_ended(self) -> None:
        deadline = time.perf_counter() + ENDING_TIMEOUT_S
        while any(connection.live for connection in self._connections) and time.perf_counter() < deadline:
            await asyncio.sleep(0.02)

    def _prompt(self) -> str | tuple[int, ...]:
        if self._prompt_tokens is not None:
            return tuple(self._random.choices(range(1000), k=self._prompt_tokens))
        words = self._random.choices(WORDS, k=PROMPT_CHARACTERS // 3)
        return " ".join(words)[:PROMPT_CHARACTERS]


# The measurement


@dataclass(frozen=True)
class LoadRun:
    """The outcome of one load."""

    name: str
    seconds: float  # time during which requests were sent
    requests: list[SentRequest]
    resident_mib: list[float]  # once a second
    cpu_share: float  # share of one CPU that the server used

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second that arrived while requests were sent."""
        end = self.requests[0].sent + self.seconds
        return sum(at < end for request in self.requests for at in request.updates) / self.seconds

    def row(self) -> str:
        gaps = 1e3 * np.concatenate([np.diff(request.updates) for request in self.requests] or [np.zeros(0)])
        rejections = [request for request in self.requests if request.ending == "RESOURCE_EXHAUSTED"]
        rejection_ms = 1e3 * np.array([request.ended - request.sent for request in rejections])
        endings = Counter(request.ending for request in self.requests)
        finished = endings["finished"] + endings["cancelled"]
        return (
            f"{self.name:14} {len(self.requests) / self.seconds:7.1f} {finished:8d} {endings['RESOURCE_EXHAUSTED']:8d} "
            f"{spread(gaps):>17} {spread(rejection_ms):>17} {self.cpu_share:5.0%} "
            f"{self.resident_mib[0]:7.1f} {self.resident_mib[-1]:7.1f}"
        )


async def measure_server(server: ServerProcess, arguments: argparse.Namespace) -> None:
    client = await Client.connect(server.address, arguments)
    half = arguments.seconds / 2
    users = arguments.max_num_seqs + arguments.max_num_waiting // 2
    await client.closed_loop(users, WARM_UP_S)
    await client.wait_until_ended()
    full = await run(server, client, "at capacity", half, lambda: client.closed_loop(users, half))
    capacity = full.tokens_per_s / np.mean([len(request.updates) for request in full.requests if request.updates])
    low = await run(server, client, f"{LOW:g}x", half, lambda: client.open_loop(LOW * capacity, half))
    seconds = arguments.seconds
    high = await run(server, client, f"{HIGH:g}x", seconds, lambda: client.open_loop(HIGH * capacity, seconds))
    runs = (full, low, high)

    print(f"capacity: {capacity:.1f} requests/s with {users} users")
    print(f"{'':14} {'sent/s':>7} {'answered':>8} {'rejected':>8} {'token gap ms':>17} {'rejection ms':>17} "
          f"{'CPU':>5} {'MiB at':>7} {'at end':>7}")  # fmt: skip
    for each in runs:
        print(each.row())
    report_end(server, full, high)


async def run(
    server: ServerProcess, client: Client, name: str, seconds: float, load: Callable[[], Awaitable[list[SentRequest]]]
) -> LoadRun:
    """Run one load until all its requests have ended."""
    resident = [server.resident_mib()]
    watching = asyncio.create_task(watch_memory(server, resident))
    cpu_s = server.cpu_s()
    start = time.perf_counter()
    requests = await load()
    cpu_share = (server.cpu_s() - cpu_s) / (time.perf_counter() - start)
    watching.cancel()
    resident.append(server.resident_mib())
    await client.wait_until_ended()
    return LoadRun(name, seconds, requests, resident, cpu_share)


async def watch_memory(server: ServerProcess, resident: list[float]) -> None:
    while True:
        await asyncio.sleep(1)
        resident.append(server.resident_mib())


def report_end(server: ServerProcess, full: LoadRun, high: LoadRun) -> None:
    advice = [request.last.retry_after_ms for request in high.requests if isinstance(request.last, Error)]
    known = [ms for ms in advice if ms is not None]
    waits = 1e3 * np.array([request.updates[0] - request.sent for request in high.requests if request.updates])
    states = ("num_requests_running", "num_requests_waiting", 'kv_pages{state="owned"}')
    print(f"tokens per second under overload: {high.tokens_per_s / full.tokens_per_s:.0%} of those at capacity")
    print(f"endings: {dict(Counter(request.ending for request in high.requests))}")
    print(f"retry_after_ms: in {len(known)} of {len(advice)} rejections, {spread(np.array(known))}")
    print(f"time to first token of accepted requests, ms: {spread(waits)}")
    time.sleep(HEARTBEAT_S)
    print("afterwards: " + ", ".join(f"{server.metric(f'quire_{state}'):.0f} {state}" for state in states))


def spread(values: np.ndarray) -> str:
    return f"{np.median(values):.2f} / {p99(values):.2f}" if len(values) else "-"


def p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99))


if __name__ == "__main__":
    main()
