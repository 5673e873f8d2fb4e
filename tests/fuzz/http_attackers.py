"""Clients that break the rules of HTTP, in a process of low priority; started by hostile_http.py.

usage: http_attackers.py storm|calm SECONDS SEED ADDRESS TOKEN CONNECTIONS

`storm` sends heads a byte at a time, bodies that are huge, late, or of another length than they say, broken chunks,
pipelined requests, deep and duplicated JSON, paths and hosts of other sites, wrong fields, and stored requests without
end; its clients leave at any moment, never read, or open thousands of connections. `calm` asks for about as much output
and reads all of it, to measure the bystanders without an attack. Silence, wrong answers and internal errors are
breaches. At the end it prints one line of JSON: cases by name, breaches, and its own CPU seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import uvloop
from campaign import CampaignReport
from raw_http import ANSWER_S, HostileClient, WrongAnswer

NICE = 10
CLIENTS_PER_KIND = 3
CROWD_PAUSE_S = 5.0
CROWD_AT_ONCE = 100
SPARE_DESCRIPTORS = 300
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
MESSAGES = [{"role": "user", "content": "What is a queue?"}]
LONG = {"prompt": "This module", "max_tokens": 1500, "ignore_eos": True, "logprobs": 20, "n": 4, "stream": True}


Kind = Callable[[HostileClient, Random], Awaitable[str]]


def body_of(path: str, rng: Random, **fields: Any) -> dict[str, Any]:
    """Return a small request that is right."""
    if path == "/v1/responses":
        return {"input": "What is a queue?", "max_output_tokens": rng.randrange(1, 20), **fields}
    own = {"prompt": "This module"} if path == "/v1/completions" else {"messages": MESSAGES}
    return {**own, "max_tokens": rng.randrange(1, 20), **fields}


async def _slow_head(client: HostileClient, rng: Random) -> str:
    for byte in b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"y" * 50:
        client.write(bytes([byte]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                return await client.word()
    return await client.word()


async def _slow_body(client: HostileClient, rng: Random) -> str:
    client.send("POST", rng.choice(GENERATING), b"", content_length="1000")
    for _ in range(30):
        client.write(b" ")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                return await client.word()
    return await client.word()


async def _huge_body(client: HostileClient, rng: Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        client.send("POST", rng.choice(GENERATING), b"", content_length=str(rng.choice((10**8, 10**12, 10**30))))
    elif kind == 1:
        client.send("POST", rng.choice(GENERATING), b"x" * 100, transfer_encoding="chunked", content_length="5")
    else:
        client.send("POST", rng.choice(GENERATING), json.dumps({"prompt": "ab " * rng.randrange(400_000)}).encode())
    with contextlib.suppress(ConnectionError):
        await client.writer.drain()
    return await client.word()


async def _chunked_lies(client: HostileClient, rng: Random) -> str:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    client.write(head + b"transfer-encoding: chunked\r\n\r\n")
    for _ in range(rng.randrange(1, 20)):
        size = rng.choice((b"5", b"ffffffffffffffff", b"-1", b"0x5", b"5;" + b"a" * 200, b"", b"00000005", b"zz"))
        client.write(size + b"\r\n" + b"x" * rng.randrange(8) + rng.choice((b"\r\n", b"\n", b"")))
    client.write(rng.choice((b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"")))
    return await client.word()


async def _pipelines(client: HostileClient, rng: Random) -> str:
    count = rng.randrange(2, 200)
    for index in range(count):
        path = rng.choice(GENERATING) if not index % 10 else "/v1/models"
        body = json.dumps(body_of(path, rng)).encode() if not index % 10 else b""
        client.send("POST" if body else "GET", path, body)
    num_answers = 0
    while num_answers < count and await client.answer() is not None:
        num_answers += 1
    return "all answered" if num_answers == count else "closed"


async def _hostile_json(client: HostileClient, rng: Random) -> str:
    size = rng.randrange(1, 100_000)
    body = rng.choice(
        (
            b'{"prompt": ' + b"[" * size + b"]" * size + b"}",
            b'{"a": ' * size + b"1" + b"}" * size,
            b'{"prompt": "a", "prompt": "b"}',
            b'{"temperature": NaN, "prompt": "a"}',
            b'{"seed": ' + b"9" * size + b', "prompt": "a"}',
            b'{"temperature": 1e' + b"9" * 30 + b', "prompt": "a"}',
            b'{"prompt": "\\ud800"}',
            b'{"prompt": "' + rng.randbytes(20) + b'"}',
            b'{"x": [' + b"[]," * size + b"1]}",
            b'{"a":"' + rng.choice((b'"', b'\\"', b'"[', b"\\\\")) * size,
            rng.randbytes(rng.randrange(100)),
            b"",
        )
    )
    client.send("POST", rng.choice(GENERATING), body)
    return await client.word()


async def _wrong_fields(client: HostileClient, rng: Random) -> str:
    values = (
        None,
        True,
        -1,
        10**18,
        1e308,
        "",
        "x" * 5000,
        [],
        {},
        [[]],
        {"a": None},
        ["a", 1],
        [None],
        "\x00",
        "🦆" * 9,
    )
    names = (
        "model", "prompt", "messages", "input", "max_tokens", "max_output_tokens", "temperature", "top_p", "top_k",
        "n", "best_of", "stop", "stop_token_ids", "logprobs", "top_logprobs", "logit_bias", "seed", "stream",
        "stream_options", "response_format", "structured_outputs", "tools", "tool_choice", "store", "background",
        "previous_response_id", "include", "metadata", "service_tier", "priority", "cache_salt", "echo", "pin_ms",
        "deadline_ms", "user", "text", "instructions", "return_token_ids", "return_tokens_as_token_ids",
        "reasoning_effort", "chat_template_kwargs",
    )  # fmt: skip
    path = rng.choice(GENERATING)
    changed = {rng.choice(names): rng.choice(values) for _ in range(rng.randrange(1, 5))}
    client.send("POST", path, json.dumps({**body_of(path, rng), **changed}).encode())
    return await client.word()


async def _path_tricks(client: HostileClient, rng: Random) -> str:
    names = (
        "..",
        ".",
        "",
        "%2e%2e",
        "v1",
        "models",
        "responses",
        "resp_0",
        "cancel",
        "input_items",
        "chat",
        "%00",
        "a" * 300,
    )
    path = "/" + "/".join(rng.choice(names) for _ in range(rng.randrange(1, 8)))
    path = rng.choice((path, path + "?stream=true&starting_after=" + "9" * rng.randrange(30), "*", "http://x" + path))
    client.send(rng.choice(("GET", "POST", "DELETE", "OPTIONS", "TRACE", "X")), path, b"")
    return await client.word()


async def _hosts_and_origins(client: HostileClient, rng: Random) -> str:
    host = rng.choice(
        ("evil.example", "localhost.evil.example", "127.0.0.1.evil", "[::1", "a" * 500, "localhost:x", "")
    )
    path = rng.choice(GENERATING)
    client.send("POST", path, json.dumps(body_of(path, rng)).encode(), host=host, origin="http://evil.example")
    answer = await client.answer()
    if answer is not None and answer.status == 200 and "evil" in host and not client.token:
        raise WrongAnswer(f"the host {host!r} was answered")
    return "closed" if answer is None else str(answer.status)


async def _broken_heads(client: HostileClient, rng: Random) -> str:
    client.write(
        rng.choice(
            (
                b"GET / HTTP/9.9\r\nhost: localhost\r\n\r\n",
                b"GET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
                b"GET /v1/models HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(5000)) + b"\r\n",
                b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 200_000,
                b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n x: folded\r\n\r\n",
                b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200) + b"\n\n",
                rng.randbytes(rng.randrange(1, 300)) + b"\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            )
        )
    )
    return await client.word("GET")


async def _leaves(client: HostileClient, rng: Random) -> str:
    path = rng.choice(GENERATING)
    fields: dict[str, Any] = {"stream": rng.random() < 0.7, "ignore_eos": True}
    fields["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 1500
    key = {"idempotency_key": str(rng.randrange(50))} if rng.random() < 0.3 else {}
    client.send("POST", path, json.dumps({**body_of(path, rng), **fields}).encode(), **key)
    await asyncio.sleep(rng.random() * 0.5)
    return "left"


async def _never_reads(client: HostileClient, rng: Random) -> str:
    for _ in range(20):
        client.send("POST", "/v1/completions", json.dumps(LONG).encode())
    for _ in range(14):
        await asyncio.sleep(0.5)
        if client.writer.transport.is_closing():
            return "closed by the server"
    return "left"


async def _stores(client: HostileClient, rng: Random) -> str:
    """Store responses, continue, read, cancel and delete them, in any order."""
    names = ["resp_0"]
    for _ in range(rng.randrange(2, 20)):
        name = rng.choice(names)
        action = rng.randrange(6)
        if action < 2:
            fields: dict[str, Any] = {"store": True, "background": rng.random() < 0.5, "metadata": {"a": "b" * 500}}
            if rng.random() < 0.3:
                fields["previous_response_id"] = name
            client.send("POST", "/v1/responses", json.dumps(body_of("/v1/responses", rng, **fields)).encode())
        elif action == 2:
            client.send("GET", f"/v1/responses/{name}?stream=true&starting_after={rng.randrange(20)}")
        elif action == 3:
            client.send("POST", f"/v1/responses/{name}/cancel")
        elif action == 4:
            client.send("GET", f"/v1/responses/{name}{rng.choice(('', '/input_items'))}", last_event_id="1")
        else:
            client.send("DELETE", f"/v1/responses/{name}")
        answer = await client.answer()
        if answer is None:
            return "closed"
        if action < 2 and answer.status == 200:
            names.append(json.loads(answer.body)["id"])
    return "answered"


async def _reads(client: HostileClient, rng: Random) -> str:
    client.send("POST", "/v1/completions", json.dumps(LONG).encode())
    return await client.skip()


async def _asks(client: HostileClient, rng: Random) -> str:
    path = rng.choice(GENERATING)
    client.send("POST", path, json.dumps(body_of(path, rng)).encode())
    return await client.word()


STORM: tuple[Kind, ...] = (
    _slow_head,
    _slow_body,
    _huge_body,
    _chunked_lies,
    _pipelines,
    _hostile_json,
    _wrong_fields,
    _path_tricks,
    _hosts_and_origins,
    _broken_heads,
    _leaves,
    _never_reads,
    _stores,
)
CALM: tuple[Kind, ...] = (_reads, _asks)


async def _repeat(kind: Kind, address: str, report: CampaignReport, rng: Random, token: str) -> None:
    """Run one client after another. Silence, invalid answers and internal errors are breaches."""
    name = kind.__name__.strip("_")
    while True:
        try:
            client = await HostileClient.open(address, token)
        except OSError:
            report.cases[f"{name}: not connected"] += 1
            await asyncio.sleep(1)
            continue
        try:
            async with asyncio.timeout(ANSWER_S) as client.limit:
                report.cases[f"{name}: {await kind(client, rng)}"] += 1
        except TimeoutError:
            report.breach(f"{name}: no answer within {ANSWER_S:.0f} s")
        except (WrongAnswer, ValueError, KeyError) as error:
            report.breach(f"{name}: {error!r}")
        except OSError:
            report.cases[f"{name}: reset"] += 1
        finally:
            client.abort()
        await asyncio.sleep(0.02)


async def _crowd(address: str, report: CampaignReport, connections: int) -> None:
    """Open thousands of connections: some send half a head; then all disconnect at once."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    possible = min(connections, hard - SPARE_DESCRIPTORS)
    gate = asyncio.Semaphore(CROWD_AT_ONCE)

    async def join(index: int) -> HostileClient | None:
        async with gate:
            try:
                client = await HostileClient.open(address, "")
            except OSError:
                report.cases["crowd: connection refused"] += 1
                return None
            client.write(b"GET /v1/mod" if index % 2 else b"")
            report.cases["crowd: connected"] += 1
            return client

    while True:
        crowd = await asyncio.gather(*map(join, range(possible)))
        await asyncio.sleep(CROWD_PAUSE_S)
        for client in filter(None, crowd):
            client.abort()


async def _run(kind: str, seconds: float, seed: str, address: str, token: str, connections: int) -> CampaignReport:
    report = CampaignReport()
    tasks = [
        asyncio.create_task(_repeat(each, address, report, Random(f"{seed}:{each.__name__}:{index}"), token))
        for each in (STORM if kind == "storm" else CALM)
        for index in range(CLIENTS_PER_KIND)
    ]
    if kind == "storm":
        tasks.append(asyncio.create_task(_crowd(address, report, connections)))
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done() and (error := task.exception()) is not None:
            report.breach(f"an attack failed in itself: {error!r}")
        task.cancel()
    await asyncio.wait(tasks)
    return report


def main() -> None:
    kind, seconds, seed, address, token, connections = sys.argv[1:]
    os.nice(NICE)
    report = uvloop.run(_run(kind, float(seconds), seed, address, token, int(connections)))
    print(json.dumps({"cases": report.cases, "breaches": report.breaches, "cpu_s": time.process_time()}))


if __name__ == "__main__":
    main()
