"""Measure the cost of the HTTP API: tokens per second of the same streams over HTTP and over the own protocol, in
turns.

usage: python -m tests.bench.http_throughput [--model DIR] [--users 32] [--prompt-tokens 64] [--new-tokens 128]
                                             [--rounds 9] [--path /v1/completions] [-- FLAGS OF quire serve]

One server answers both protocols. A round sends one request per user over one protocol, and counts tokens from the
first token of the last user to the last token of the first user. Both clients read raw bytes and
decode no token, so that both take equally little time of the machine. The figure is the median ratio of neighboring
rounds; at least 0.97 is expected. Each token is an event or a frame; its cost is all CPU time of the API server
process, from the engine's link to the socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import uvloop
from quire import SamplingParams
from quire.runtime.net.address import TCPAddress, parse_address
from quire.runtime.protocol.codec import encode
from quire.runtime.protocol.frames import Generate, Hello

from tests.bench.link_cost import cpu_s

READ_BYTES = 1 << 16
POLL_S = 0.001
TOKEN_IDS = b'"token_ids":['  # part of each event but the first one of a chat, which has a role, and the last one
TOKENS_FRAME = b"\xa6TOKENS"  # how msgpack writes the type of the frame

Reading = Callable[[list[int], int, list[tuple[float, int]]], Awaitable[None]]


class Round(NamedTuple):
    """The figures of one protocol, while all users decode."""

    speed: float  # tokens per second
    cost: float  # CPU seconds of the API server's process per token


async def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--path", choices=("/v1/completions", "/v1/chat/completions"), default="/v1/completions")
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    model = [arguments.model] if arguments.model else []
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "quire.runtime.cli.main", "serve", *model),
        *("--port", "0", "--operator-port", "0", "--openai-port", "0", *arguments.flags),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "QUIRE_LOG_LEVEL": "error"},
    )
    assert process.stdout is not None
    try:
        words = (await process.stdout.readline()).decode().split()
        api = words[words.index("api") + 1].removeprefix("http://").removesuffix("/v1")
        ways = over_http(api, arguments.path), over_frames(words[3], arguments.path)
        await report(*ways, process.pid, arguments)
    finally:
        process.terminate()
        await process.wait()


async def report(http: Reading, frames: Reading, server: int, arguments: argparse.Namespace) -> None:
    rounds: dict[Reading, list[Round]] = {http: [], frames: []}
    for number in range(arguments.rounds + 1):
        for reading in (http, frames) if number % 2 else (frames, http):
            measured = await one_round(reading, server, arguments)
            if number:  # the first round warms up
                rounds[reading].append(measured)
    for name, reading in (("own protocol", frames), ("HTTP", http)):
        speed, cost = (statistics.median(values) for values in zip(*rounds[reading], strict=True))
        print(f"{name:<12} {speed:9.1f} tok/s, {1e6 * cost:6.1f} µs of the API server's CPU per token")
    ratios = [one.speed / other.speed for one, other in zip(rounds[http], rounds[frames], strict=True)]
    print(f"ratio        {statistics.median(ratios):.3f}, round by round {min(ratios):.3f} to {max(ratios):.3f}")


async def one_round(reading: Reading, server: int, arguments: argparse.Namespace) -> Round:
    arrivals: list[list[tuple[float, int]]] = [[] for _ in range(arguments.users)]
    prompts = [[random.randrange(4, 4000) for _ in range(arguments.prompt_tokens)] for _ in arrivals]
    # The extra tokens keep early users running until the last one has started.
    num_tokens = arguments.new_tokens + arguments.users
    users = [
        asyncio.ensure_future(reading(prompt, num_tokens, times))
        for prompt, times in zip(prompts, arrivals, strict=True)
    ]
    while not all(arrivals) and not any(user.done() for user in users):
        await asyncio.sleep(POLL_S)
    begin = time.perf_counter()
    cpu_before = cpu_s(server)
    await asyncio.wait(users, return_when=asyncio.FIRST_COMPLETED)
    end = time.perf_counter()
    cpu_after = cpu_s(server)
    await asyncio.gather(*users)
    tokens = sum(count for times in arrivals for moment, count in times if begin < moment <= end)
    if not tokens:
        raise SystemExit("no moment at which all users decoded: more --new-tokens, or a quieter machine")
    return Round(tokens / (end - begin), (cpu_after - cpu_before) / tokens)


def over_http(address: str, path: str) -> Reading:
    """Return a reader of one stream of server-sent events; each event is one token."""
    host, _, port = address.rpartition(":")

    async def read(prompt: list[int], num_tokens: int, times: list[tuple[float, int]]) -> None:
        own = {"prompt": prompt} if path == "/v1/completions" else {"messages": [_message(prompt)]}
        fields = {**own, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps({**fields, "return_token_ids": True}).encode()  # a token without text would have no event
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        await _count(host, int(port), request, TOKEN_IDS, b"[DONE]", times)

    return read


def over_frames(address: str, path: str) -> Reading:
    """Return a reader of one stream of TOKENS frames, one token each, for the request of `path`."""
    place = parse_address(address)
    assert isinstance(place, TCPAddress), "the server listens on TCP"

    async def read(prompt: list[int], num_tokens: int, times: list[tuple[float, int]]) -> None:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        if path == "/v1/completions":
            generate = Generate(1, tuple(prompt), params)
        else:
            generate = Generate(1, None, params, messages=(_message(prompt),))
        request = encode(Hello((1,))) + encode(generate)
        await _count(place.host, place.port, request, TOKENS_FRAME, b"\xa4DONE", times)

    return read


def _message(prompt: list[int]) -> dict[str, str]:
    return {"role": "user", "content": " ".join(map(str, prompt[: len(prompt) // 4]))}


async def _count(
    host: str, port: int, request: bytes, mark: bytes, last: bytes, times: list[tuple[float, int]]
) -> None:
    """Send a request and record the times and numbers of arrived marks, until `last` arrives."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    tail = b""  # a mark may begin in the tail
    is_over = False
    while not is_over:
        data = await reader.read(READ_BYTES)
        assert data, "the stream ended early"
        if count := (tail + data).count(mark) - tail.count(mark):
            times.append((time.perf_counter(), count))
        is_over = last in tail + data
        tail = data[-len(mark) - len(last) :]
    writer.transport.abort()


if __name__ == "__main__":
    uvloop.run(main())
