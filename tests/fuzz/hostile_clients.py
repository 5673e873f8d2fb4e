"""Clients who behave badly, all at once, against a live `quire serve`, while bystanders read their streams.

usage: hostile_clients.py [--seconds 60] [--seed 1] [--connections 5000] [-- FLAGS OF quire serve]

They never read, send half a frame, or a byte per second; they open thousands of connections, use ids twice, cancel as
their request finishes, vanish in mid-stream, and never give credit. Each must end as the protocol says: with one DONE
or ERROR per accepted id, or with its connection closed. The server's time limits are shortened (`PATIENCE`, served.py).
Exit status 1 on any breach.
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

from campaign import Report, run
from quire.runtime.common.errors import ProtocolError
from quire.runtime.common.types import SamplingParams
from quire.runtime.protocol.codec import encode
from quire.runtime.protocol.frames import ALREADY_EXISTS, Accepted, Cancel, Done, Error, Frame, Generate, Tokens
from served import Peer, Served

OF_EACH_KIND = 4
LONG = SamplingParams(max_tokens=1500, ignore_eos=True, logprobs=20)
FLOOD = 16  # long requests of a client who never reads
ANSWER_S = 60.0
CROWD_PAUSE_S = 5.0
CROWD_AT_ONCE = 100  # connections being opened
SPARE_DESCRIPTORS = 200


async def hostility(server: Served, report: Report, options: argparse.Namespace) -> None:
    async with asyncio.TaskGroup() as group:
        for kind in KINDS:
            for index in range(OF_EACH_KIND):
                group.create_task(_again(kind, server, report, Random(f"{options.seed}:{kind.__name__}:{index}")))
        group.create_task(_crowd(server, report, options.connections))


Kind = Callable[[Peer, Random], Awaitable[str]]


async def _again(kind: Kind, server: Served, report: Report, chance: Random) -> None:
    """One bad client after another. Their answers may not be silence, nor anything but frames."""
    name = kind.__name__.strip("_")
    while True:
        peer = await Peer.open(server.address)
        try:
            if not peer.is_welcome:  # the crowd fills the house
                report.cases[f"{name}: not welcome"] += 1
                await asyncio.sleep(1)
                continue
            async with asyncio.timeout(ANSWER_S):
                report.cases[f"{name}: {await kind(peer, chance)}"] += 1
        except TimeoutError:
            report.breach(f"{name}: no end within {ANSWER_S:.0f} s")
        except ConnectionError:
            report.cases[f"{name}: reset"] += 1
        except (ProtocolError, Wrong) as error:
            report.breach(f"{name}: {error}")
        finally:
            peer.abort()


class Wrong(Exception):
    """The server answered, but not what the protocol says."""


async def _never_reads(peer: Peer, chance: Random) -> str:
    peer.send(*(Generate(index, "This module", LONG) for index in range(FLOOD)))
    while not peer.writer.transport.is_closing():
        await asyncio.sleep(0.5)
        peer.send(Cancel(99))  # only who writes notices that he was cut off
        await peer.writer.drain()
        if chance.random() < 0.03:
            return "left"
    return "cut off"


async def _half_a_frame(peer: Peer, chance: Random) -> str:
    data = encode(Generate(1, "This module " * 100))
    peer.writer.write(data[: chance.randrange(1, len(data))])
    return await _closed(peer)


async def _a_byte_per_second(peer: Peer, chance: Random) -> str:
    for byte in encode(Generate(1, "x" * chance.randrange(100))):
        peer.writer.write(bytes([byte]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                return await _closed(peer)
    return "sent it all"


async def _uses_ids_twice(peer: Peer, chance: Random) -> str:
    params = SamplingParams(max_tokens=chance.randrange(1, 20), ignore_eos=True)
    times = chance.randrange(2, 20)
    peer.send(*(Generate(5, "This module", params) for _ in range(times)))
    answers = Counter(map(_word, await _ends(peer, times)))
    if answers["done"] < 1 or answers.keys() - {"done", ALREADY_EXISTS, "RESOURCE_EXHAUSTED"}:
        raise Wrong(f"{times} requests of one id ended as {dict(answers)}")
    return "one end each"


async def _cancels_at_the_end(peer: Peer, chance: Random) -> str:
    count = chance.randrange(1, 30)
    params = SamplingParams(max_tokens=chance.randrange(1, 5), ignore_eos=True)
    peer.send(*(Generate(index, "This module", params) for index in range(count)))
    for index in chance.sample(range(count), count):
        await asyncio.sleep(chance.random() * 0.01)
        peer.send(Cancel(index), Cancel(index))
    ends = await _ends(peer, count)
    if sorted(end.request_id or 0 for end in ends) != list(range(count)):
        raise Wrong(f"{count} requests ended as {ends}")
    return "one end each"


async def _vanishes(peer: Peer, chance: Random) -> str:
    resumable = chance.random() < 0.5
    peer.send(*(Generate(index, "This module", LONG, resumable=resumable) for index in range(chance.randrange(1, 5))))
    for _ in range(chance.randrange(30)):
        await peer.receive()
    return "gone"


async def _gives_no_credit(peer: Peer, chance: Random) -> str:
    granted = chance.randrange(4)
    peer.send(Generate(1, "This module", LONG, credit=granted))
    left = granted
    while frame := await peer.receive():
        if isinstance(frame, Tokens):
            if frame.token_ids and left <= 0:
                raise Wrong(f"more than the first {granted - left} tokens were sent for a credit of {granted}")
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
    _vanishes,
    _gives_no_credit,
)


async def _ends(peer: Peer, count: int) -> list[Done | Error]:
    """Of `count` requests; none may be answered after its end, nor twice."""
    ends: list[Done | Error] = []
    while len(ends) < count:
        frame = await peer.receive()
        if frame is None or (isinstance(frame, Error) and frame.request_id is None):
            raise Wrong(f"the connection was closed: {frame}")
        if isinstance(frame, Done | Error):
            ends.append(frame)
    return ends


async def _closed(peer: Peer) -> str:
    last: Frame | None = None
    while frame := await peer.receive():
        last = frame
    return f"closed, {_word(last)}"


def _word(frame: Frame | None) -> str:
    return frame.code if isinstance(frame, Error) else type(frame).__name__.lower()


async def _crowd(server: Served, report: Report, connections: int) -> None:
    """Thousands who connect and stay: half of them say HELLO, some ask for a little, then all leave at once."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (possible := min(connections, hard - SPARE_DESCRIPTORS)) < connections:
        print(f"only {possible} connections: this process may have {hard} descriptors")
    gate = asyncio.Semaphore(CROWD_AT_ONCE)

    async def join(index: int) -> Peer | None:
        async with gate:
            try:
                peer = await Peer.open(server.address, hello=bool(index % 2))
            except OSError:
                report.cases["crowd: not let in"] += 1
                return None
            if index % 2 and not peer.is_welcome:
                report.cases["crowd: not welcome"] += 1
            elif index % 20 == 1:
                peer.send(Generate(1, "This module", SamplingParams(max_tokens=3)))
            report.cases["crowd: connected"] += 1
            return peer

    while True:
        crowd = await asyncio.gather(*map(join, range(possible)))
        try:
            await asyncio.sleep(CROWD_PAUSE_S)
            await _judge([peer for peer in crowd[1::20] if peer is not None and peer.is_welcome], report)
        finally:
            for peer in filter(None, crowd):
                peer.abort()


async def _judge(askers: list[Peer], report: Report) -> None:
    """Who asked got his one answer, or was told that the house is full."""
    for peer in askers:
        word = "silence"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while frame := await peer.receive():
                    word = _word(frame)
                    if isinstance(frame, Done | Error):
                        break
        report.cases[f"crowd: {word}"] += 1
        if word == "silence" or word == Accepted.__name__.lower():
            report.breach(f"crowd: a request ended in {word}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=5000)
    sys.exit(run(hostility, parser))
