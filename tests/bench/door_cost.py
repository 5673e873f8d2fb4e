"""Measure what an HTTP API adds to a token: the time of an event, and the time to the first token, in turns.

usage: door_cost.py [--streams 32] [--events 300] [--requests 60]

Time of an event: chunks of one token are written to streams in memory, as the server does. Time
to first token: one short chat at a time to one server, from the request's first byte to the first event with text.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import h11
from quire.runtime.common.types import OutputChunk, SamplingParams
from quire.runtime.engine.facade import GenerateRequest
from quire.runtime.engine.text import Token
from quire.runtime.server.anthropic.door import ANTHROPIC_FORM
from quire.runtime.server.anthropic.formats import MessageFormat
from quire.runtime.server.http.answer_writers import EventWriter
from quire.runtime.server.http.calls import Call
from quire.runtime.server.http.errors import DoorForm
from quire.runtime.server.http.formats import Format, PromptSize
from quire.runtime.server.http.logprobs import Vocabulary
from quire.runtime.server.http.request_cycle import RequestCycle
from quire.runtime.server.ollama.door import OLLAMA_FORM
from quire.runtime.server.ollama.formats import LineFormat
from quire.runtime.server.openai.api import OPENAI_FORM
from quire.runtime.server.openai.formats import ChatFormat

HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
MESSAGE = {"role": "user", "content": "What is a queue?"}
CHUNK = OutputChunk(first_index=5, token_ids=(5,), text=" queue")
FORMS: dict[str, tuple[DoorForm, Callable[[Call, str, Vocabulary], Format]]] = {
    "openai": (OPENAI_FORM, ChatFormat),
    "anthropic": (ANTHROPIC_FORM, MessageFormat),
    "ollama": (OLLAMA_FORM, partial(LineFormat, is_chat=True)),
}
# Path, body, and the bytes before the first text of a stream.
CHATS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "openai": ("/v1/chat/completions", {"max_tokens": 2, "stream": True}, b'"delta":{"content":"'),
    "anthropic": ("/v1/messages", {"model": "quire", "max_tokens": 2, "stream": True}, b'"text_delta"'),
    "ollama": ("/api/chat", {"model": "quire", "options": {"num_predict": 2}}, b'"content":"'),
}


async def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument("--requests", type=int, default=60)
    arguments = parser.parse_args()
    report_events(arguments.streams, arguments.events)
    await report_first_token(arguments.requests)


def report_events(num_streams: int, num_events: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    streams = {name: [new_stream(name) for _ in range(num_streams)] for name in FORMS}
    for _, (name, writers) in itertools.product(range(num_events), streams.items()):
        start = time.perf_counter()
        for writer in writers:
            writer.write(0, CHUNK)
        times[name].append((time.perf_counter() - start) / num_streams)
    for name, measured in times.items():
        print(f"{name:10} {statistics.median(measured) * 1e6:6.2f} µs per event of {num_streams} streams", flush=True)


def new_stream(name: str) -> EventWriter:
    http = h11.Connection(h11.SERVER)
    http.receive_data(HEAD)
    door, new_form = FORMS[name]
    send_buffer = SimpleNamespace(send_bytes=lambda _: None, hold=lambda *_: None)
    cycle = RequestCycle(http, cast(Any, send_buffer), cast(h11.Request, http.next_event()), 1, door)
    call = Call((GenerateRequest(prompt=None, sampling_params=SamplingParams()),), True)
    form = new_form(call, "quire", Vocabulary(lambda token: Token(bytes([token]), False)))
    form.prompt_sizes = [PromptSize(5)]
    form.read_with(None)
    writer = EventWriter(cycle, form)
    writer.begin()
    return writer


async def report_first_token(num_requests: int) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "quire.runtime.cli.main", "serve", "--served-model-name", "quire"),
        *("--port", "0", "--operator-port", "0", "--openai-port", "0", "--ollama-port", "0"),
        *("--kv-cache-memory", "64MiB", "--log-format", "json"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "QUIRE_LOG_LEVEL": "error"},
    )
    assert process.stdout is not None
    times: dict[str, list[float]] = {name: [] for name in CHATS}
    try:
        ready = json.loads(await process.stdout.readline())
        host, _, port = ready["ollama"].removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for number, (name, (path, fields, before)) in itertools.product(range(num_requests + 1), CHATS.items()):
            body = json.dumps({**fields, "messages": [MESSAGE]}).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            start = time.perf_counter()
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await reader.readuntil(before)
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - start)
            await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
    finally:
        process.terminate()
        await process.wait()
    base = statistics.median(times["openai"])
    for name, measured in times.items():
        median = statistics.median(measured)
        print(f"{name:10} TTFT p50 {median * 1000:7.2f} ms, {(median - base) * 1000:+.2f} ms", flush=True)


asyncio.run(main())
