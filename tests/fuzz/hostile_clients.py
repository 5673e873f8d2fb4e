"""Attack a live `quire serve` with clients that misbehave, all at once, while bystanders read their streams.

usage: hostile_clients.py [--seconds 60] [--seed 1] [--connections 5000] [-- FLAGS OF quire serve]

The clients never read, send half a frame or a byte per second, open thousands of connections, use ids twice, cancel
while their request finishes, disconnect in mid-stream, and never give credit. Each must end as the protocol specifies:
with one DONE or ERROR per accepted id, or with a closed connection. The server's timeouts are shortened
(`SHORT_TIMEOUTS` in server_process.py). Exit status 1 on any breach.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

from campaign import CampaignReport, run
from quire.runtime.common.errors import ProtocolError
from quire.runtime.common.types import SamplingParams
from quire.runtime.protocol.codec import encode
from quire.runtime.protocol.frames import ALREADY_EXISTS, Accepted, Cancel, Done, Error, Frame, Generate, Tokens
from server_process import Endpoint, RawClient, ServerProcess

CLIENTS_PER_KIND = 4
LONG = SamplingParams(max_tokens=1500, ignore_eos=True, logprobs=20)
UNREAD_REQUESTS = 16  # long requests of a client that never reads
ANSWER_S = 60.0
CROWD_PAUSE_S = 5.0
CROWD_AT_ONCE = 100  # connections that are opened at the same time
SPARE_DESCRIPTORS = 200


async def attack(server: ServerProcess, report: CampaignReport, options: argparse.Namespace) -> None:
    async with asyncio.TaskGroup() as group:
        for kind in KINDS:
            for index in range(CLIENTS_PER_KIND):
                group.create_task(
                    repeat(kind, server.endpoint, report, Random(f"{options.seed}:{kind.__name__}:{index}"))
                )
        group.create_task(_crowd(server, report, options.connections))


Kind = Callable[[RawClient, Random], Awaitable[str]]


async def repeat(kind: Kind, endpoint: Endpoint, report: CampaignReport, rng: Random, pause_s: float = 0.0) -> None:
    """Run one client after another, `pause_s` apart. Silence and invalid frames are breaches."""
    name = kind.__name__.strip("_")
    while True:
        client = await RawClient.open(endpoint)
        try:
            if not client.is_welcome:  # the crowd has taken all connections
                report.cases[f"{name}: not welcome"] += 1
                await asyncio.sleep(1)
                continue
            async with asyncio.timeout(ANSWER_S):
                report.cases[f"{name}: {await kind(client, rng)}"] += 1
        except TimeoutError:
            report.breach(f"{name}: no end within {ANSWER_S:.0f} s")
        except ConnectionError:
            report.cases[f"{name}: reset"] += 1
        except (ProtocolError, WrongAnswer) as error:
            report.breach(f"{name}: {error}")
        finally:
            client.abort()
        await asyncio.sleep(pause_s)


class WrongAnswer(Exception):
    """The server answered, but not as the protocol specifies."""


async def _never_reads(client: RawClient, rng: Random) -> str:
    client.send(*(Generate(index, "This module", LONG) for index in range(UNREAD_REQUESTS)))
    while not client.writer.transport.is_closing():
        await asyncio.sleep(0.5)
        client.send(Cancel(99))  # only a write notices that the connection was closed
        await client.writer.drain()
        if rng.random() < 0.03:
            return "disconnected"
    return "closed by the server"


async def _half_a_frame(client: RawClient, rng: Random) -> str:
    data = encode(Generate(1, "This module " * 100))
    client.writer.write(data[: rng.randrange(1, len(data))])
    return await _closed(client)


async def _a_byte_per_second(client: RawClient, rng: Random) -> str:
    for byte in encode(Generate(1, "x" * rng.randrange(100))):
        client.writer.write(bytes([byte]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                return await _closed(client)
    return "sent all bytes"


async def _uses_ids_twice(client: RawClient, rng: Random) -> str:
    params = SamplingParams(max_tokens=rng.randrange(1, 20), ignore_eos=True)
    times = rng.randrange(2, 20)
    client.send(*(Generate(5, "This module", params) for _ in range(times)))
    answers = Counter(map(_word, await _ends(client, times)))
    if answers["done"] < 1 or answers.keys() - {"done", ALREADY_EXISTS, "RESOURCE_EXHAUSTED"}:
        raise WrongAnswer(f"{times} requests of one id ended as {dict(answers)}")
    return "one end each"


async def _cancels_at_the_end(client: RawClient, rng: Random) -> str:
    count = rng.randrange(1, 30)
    params = SamplingParams(max_tokens=rng.randrange(1, 5), ignore_eos=True)
    client.send(*(Generate(index, "This module", params) for index in range(count)))
    for index in rng.sample(range(count), count):
        await asyncio.sleep(rng.random() * 0.01)
        client.send(Cancel(index), Cancel(index))
    ends = await _ends(client, count)
    if sorted(end.request_id or 0 for end in ends) != list(range(count)):
        raise WrongAnswer(f"{count} requests ended as {ends}")
    return "one end each"


async def _disconnects(client: RawClient, rng: Random) -> str:
    resumable = rng.random() < 0.5
    running = rng.randrange(1, 5)
    client.send(*(Generate(index, "This module", LONG, resumable=resumable) for index in range(running)))
    for _ in range(rng.randrange(30)):
        running -= isinstance(await client.receive(), Done | Error)
        if not running:  # the last one was refused
            break
    return "disconnected"


async def _gives_no_credit(client: RawClient, rng: Random) -> str:
    granted = rng.randrange(4)
    client.send(Generate(1, "This module", LONG, credit=granted))
    left = granted
    while frame := await client.receive():
        if isinstance(frame, Tokens):
            if frame.token_ids and left <= 0:
                raise WrongAnswer(f"more than the first {granted - left} tokens were sent for a credit of {granted}")
            left -= len(frame.token_ids)
        if isinstance(frame, Done | Error):
            break
    return f"ended in {_word(frame)}"


KINDS = (
    _never_reads,
    _half_a_frame,
    _a_byte_per_second,
    _uses_ids_twice,
    _cancels_at_the_end,
    _disconnects,
    _gives_no_credit,
)


async def _ends(client: RawClient, count: int) -> list[Done | Error]:
    """Read until `count` requests have ended."""
    ends: list[Done | Error] = []
    while len(ends) < count:
        frame = await client.receive()
        if frame is None or (isinstance(frame, Error) and frame.request_id is None):
            raise WrongAnswer(f"the connection was closed: {frame}")
        if isinstance(frame, Done | Error):
            ends.append(frame)
    return ends


async def _closed(client: RawClient) -> str:
    last: Frame | None = None
    while frame := await client.receive():
        last = frame
    return f"closed, {_word(last)}"


def _word(frame: Frame | None) -> str:
    return frame.code if isinstance(frame, Error) else type(frame).__name__.lower()


async def _crowd(server: ServerProcess, report: CampaignReport, connections: int) -> None:
    """Open thousands of connections: half of them send HELLO, some a short request; then all disconnect at once."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (possible := min(connections, hard - SPARE_DESCRIPTORS)) < connections:
        print(f"only {possible} connections: this process may have {hard} descriptors")
    gate = asyncio.Semaphore(CROWD_AT_ONCE)

    async def join(index: int) -> RawClient | None:
        async with gate:
            try:
                client = await RawClient.open(server.endpoint, hello=bool(index % 2))
            except OSError:
                report.cases["crowd: connection refused"] += 1
                return None
            if index % 2 and not client.is_welcome:
                report.cases["crowd: not welcome"] += 1
            elif index % 20 == 1:
                client.send(Generate(1, "This module", SamplingParams(max_tokens=3)))
            report.cases["crowd: connected"] += 1
            return client

    while True:
        crowd = await asyncio.gather(*map(join, range(possible)))
        try:
            await asyncio.sleep(CROWD_PAUSE_S)
            await _check_requests(
                [client for client in crowd[1::20] if client is not None and client.is_welcome], report
            )
        finally:
            for client in filter(None, crowd):
                client.abort()


async def _check_requests(requesters: list[RawClient], report: CampaignReport) -> None:
    """Check that each request was answered or refused."""
    for client in requesters:
        word = "silence"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while frame := await client.receive():
                    word = _word(frame)
                    if isinstance(frame, Done | Error):
                        break
        report.cases[f"crowd: {word}"] += 1
        if word == "silence" or word == Accepted.__name__.lower():
            report.breach(f"crowd: a request ended in {word}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=5000)
    sys.exit(run(attack, parser))
