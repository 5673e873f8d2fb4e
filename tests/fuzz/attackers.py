"""Clients that try to take other tenants' service, in a process of low priority; started by attack.py.

usage: attackers.py storm|calm SECONDS SEED ADDRESS METRICS_URL CA TOKEN

`storm` runs all attacks side by side. `calm` sends ordinary requests that keep as many sequence slots busy, to measure
the bystanders without an attack. Every client pauses between its steps, so that this process takes little CPU time. At
the end it prints one line of JSON: cases by name, breaches, and its own CPU seconds.
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
from urllib.parse import urlsplit

import uvloop
from campaign import CampaignReport
from fuzz_server import fuzz
from hostile_clients import KINDS, repeat
from quire.runtime.common.types import SamplingParams
from quire.runtime.net.address import TCPAddress, parse_address
from quire.runtime.protocol.frames import Credit, Done, Error, Frame, Generate, Ping, Tokenize
from server_process import Endpoint, RawClient

NICE = 19
SOURCE = "127.0.0.66"  # source of connections that never speak: limits per address must not hit the bystanders
NUM_STREAMS = 13  # streams of ordinary traffic: about as many as the attackers' page quota allows
NUM_SCRAPERS = 60
NUM_HALF_REQUESTS = 64
NUM_SILENT = 3000
HOUR_MS = 3_600_000
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: quire\r\n\r\n"
CHATTY = SamplingParams(max_tokens=64, ignore_eos=True, logprobs=20)

HOSTILE_CONTENTS: tuple[Any, ...] = (
    "{{ 9 ** 9 ** 9 }}" * 500,
    [{"type": "text", "text": "x" * 50_000}] * 3,
    {"a": {"b": [[]]}},
    10**9,
)

Attack = Callable[[Endpoint, CampaignReport, Random], Awaitable[None]]


async def ordinary_streams(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    """Keep `NUM_STREAMS` sequence slots busy and read everything."""
    client = await RawClient.open(endpoint)
    params = SamplingParams(max_tokens=1500, ignore_eos=True)
    num_sent = num_ended = 0
    while True:
        while num_sent - num_ended < NUM_STREAMS:
            num_sent += 1
            client.send(Generate(num_sent, tuple(rng.randrange(4, 4000) for _ in range(300)), params))
        frame = await client.receive()
        if frame is None:
            return
        num_ended += isinstance(frame, Done | Error)
        report.cases["ordinary requests"] += isinstance(frame, Done)


async def trickled_kept_streams(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    """Fill the memory of resumable streams and keys, and keep every stream alive with a trickle of credit."""
    client = await RawClient.open(endpoint)
    reading = asyncio.create_task(client.discard())
    request_id = 0
    while not reading.done():
        for _ in range(8):
            request_id += 1
            prompt = (rng.randrange(4, 4000), 5)
            key = f"key {rng.getrandbits(64)}"
            client.send(Generate(request_id, prompt, CHATTY, credit=1, resumable=True, idempotency_key=key))
        client.send(*(Credit(each, 1) for each in range(max(1, request_id - 300), request_id, 4)))
        report.cases["kept streams with a trickle of credit"] += 8
        await asyncio.sleep(1)


async def unread_output(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    """Generate many long outputs with logprobs and give no credit for them, or read nothing at all."""
    params = SamplingParams(max_tokens=1500, n=8, logprobs=20, ignore_eos=True, temperature=1.0)
    while True:
        client = await RawClient.open(endpoint)
        credit = rng.choice((1, None))
        reading = asyncio.create_task(client.discard() if credit else asyncio.sleep(20))
        for request_id in range(1, 20):
            client.send(Generate(request_id, (rng.randrange(4, 4000), 5), params, credit=credit))
            report.cases["long outputs without credit or reader"] += 1
            await asyncio.wait([reading], timeout=2)
            if reading.done():
                break
        reading.cancel()
        client.abort()


async def pinned_prompts(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    """Pin a new prompt of 300 tokens once a second, for an hour."""

    def frame(request_id: int) -> Frame:
        prompt = tuple(rng.randrange(4, 4000) for _ in range(300))
        return Generate(request_id, prompt, SamplingParams(max_tokens=1), pin_ms=HOUR_MS)

    await _send_repeatedly(endpoint, report, "pinned prompts", frame, 1)


async def unread_scrapes(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    """Pipeline /metrics on many connections and never read."""

    async def scrape() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(*_operator_port(endpoint))
                for _ in range(100):
                    if writer.is_closing():
                        break
                    writer.write(SCRAPE * 10)
                    report.cases["unread scrapes"] += 10
                    await asyncio.sleep(1)
                writer.transport.abort()
            await asyncio.sleep(1)

    await asyncio.gather(*(scrape() for _ in range(NUM_SCRAPERS)))


async def half_sent_probes(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    """Hold every connection of the operator port with a request that is never complete."""

    async def hold() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(*_operator_port(endpoint))
                writer.write(b"GET /readyz HTTP/1.1\r\nHo")
                report.cases["half-sent probes"] += 1
                await reader.read()
                writer.transport.abort()
            await asyncio.sleep(0.5)

    await asyncio.gather(*(hold() for _ in range(NUM_HALF_REQUESTS)))


async def malformed_probes(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(*_operator_port(endpoint))
            writer.write(rng.randbytes(20) + b"\r\n\r\n")
            report.cases["malformed probes"] += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await reader.read()
            writer.transport.abort()
        await asyncio.sleep(0.2)


async def silent_connections(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    """Connect to the clients' TLS port thousands of times, and never speak."""
    address = parse_address(endpoint.address)
    assert isinstance(address, TCPAddress), "TLS needs TCP"
    loop = asyncio.get_running_loop()
    num_open = 0

    class Silent(asyncio.Protocol):
        def connection_lost(self, error: Exception | None) -> None:
            nonlocal num_open
            num_open -= 1

    while True:
        for _ in range(20):
            if num_open < NUM_SILENT:
                try:
                    async with asyncio.timeout(1):
                        await loop.create_connection(Silent, address.host, address.port, local_addr=(SOURCE, 0))
                except (OSError, TimeoutError):
                    report.cases["silent connections refused"] += 1
                else:
                    num_open += 1
                    report.cases["silent connections"] += 1
        await asyncio.sleep(0.1)


async def tokenize_flood(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    def frame(request_id: int) -> Frame:
        return Tokenize(request_id, f"{rng.random()} def f(x): return " * 200)

    await _send_repeatedly(endpoint, report, "texts to tokenize", frame, 0.25)


async def unread_pongs(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    while True:
        client = await RawClient.open(endpoint)
        while not client.writer.transport.is_closing():
            client.send(*(Ping(nonce) for nonce in range(100)))
            report.cases["unread PONGs"] += 100
            await asyncio.sleep(0.5)
        client.abort()


async def hostile_chats(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    def frame(request_id: int) -> Frame:
        content = rng.choice(HOSTILE_CONTENTS)
        return Generate(request_id, None, CHATTY, messages=({"role": "user", "content": content},))

    await _send_repeatedly(endpoint, report, "hostile chats", frame, 0.5)


async def broken_frames(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    await fuzz(endpoint, report, str(rng.random()), pause_s=0.2)


async def hostile_clients(endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    await asyncio.gather(*(repeat(kind, endpoint, report, Random(rng.random()), pause_s=1) for kind in KINDS))


STORM: tuple[Attack, ...] = (
    trickled_kept_streams,
    unread_output,
    pinned_prompts,
    unread_scrapes,
    half_sent_probes,
    malformed_probes,
    silent_connections,
    tokenize_flood,
    unread_pongs,
    hostile_chats,
    broken_frames,
    hostile_clients,
)
CALM: tuple[Attack, ...] = (ordinary_streams,)


def _operator_port(endpoint: Endpoint) -> tuple[str, int]:
    parts = urlsplit(endpoint.metrics_url)
    return parts.hostname or "", parts.port or 0


async def _send_repeatedly(
    endpoint: Endpoint, report: CampaignReport, case: str, frame: Callable[[int], Frame], pause_s: float
) -> None:
    """Send `frame(1)`, `frame(2)` and so on, and drop the answers, until the server closes the connection."""
    client = await RawClient.open(endpoint)
    reading = asyncio.create_task(client.discard())
    request_id = 0
    while not reading.done():
        request_id += 1
        client.send(frame(request_id))
        report.cases[case] += 1
        await asyncio.sleep(pause_s)


async def _again(attack: Attack, endpoint: Endpoint, report: CampaignReport, rng: Random) -> None:
    """Run an attack, and repeat it whenever the server ends its connection or refuses it."""
    while True:
        with contextlib.suppress(OSError, AttributeError):
            await attack(endpoint, report, rng)
        report.cases[f"{attack.__name__}: begun again"] += 1
        await asyncio.sleep(1)


async def _run(
    attacks: tuple[Attack, ...], seconds: float, seed: int, endpoint: Endpoint, report: CampaignReport
) -> None:
    tasks = [
        asyncio.create_task(_again(attack, endpoint, report, Random(f"{seed}:{attack.__name__}"))) for attack in attacks
    ]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            report.breach(f"an attack failed in itself: {error!r}")
        task.cancel()
    await asyncio.wait(tasks)


def main() -> None:
    kind, seconds, seed, address, metrics_url, ca, token = sys.argv[1:]
    os.nice(NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report = CampaignReport()
    attacks = STORM if kind == "storm" else CALM
    uvloop.run(_run(attacks, float(seconds), int(seed), Endpoint(address, metrics_url, token, ca), report))
    print(json.dumps({"cases": report.cases, "breaches": report.breaches, "cpu_s": time.process_time()}))


if __name__ == "__main__":
    main()
