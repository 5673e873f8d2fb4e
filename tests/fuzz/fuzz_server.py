"""Broken frames against a live `quire serve`, while bystanders read their streams.

usage: fuzz_server.py [--seconds 60] [--seed 1] [--connections 16] [-- FLAGS OF quire serve]

After frames whose length is right the server must answer a PING or have closed the connection with an ERROR; after
others it must close once we do. Silence is a breach, and so is an answer that is no frame of the protocol.
Exit status 1 on any breach.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from random import Random

from campaign import Report, run
from mutations import Case, mutated
from quire.runtime.common.errors import ProtocolError
from quire.runtime.protocol.codec import encode
from quire.runtime.protocol.frames import Error, Ping, Pong
from served import Peer, Served

CASES_PER_CONNECTION = 20
SILENCE_S = 30.0
NONCE = 0x5EED


async def hostility(server: Served, report: Report, options: argparse.Namespace) -> None:
    async with asyncio.TaskGroup() as group:
        for index in range(options.connections):
            group.create_task(_fuzz(server, report, f"{options.seed}:{index}"))


async def _fuzz(server: Served, report: Report, seed: str) -> None:
    """Connections one after another, each until it is closed or has had its share."""
    chance = Random(seed)
    while True:
        peer = await Peer.open(server.address, hello=chance.random() < 0.9)
        try:
            for _ in range(CASES_PER_CONNECTION):
                case = mutated(chance)
                try:
                    async with asyncio.timeout(SILENCE_S):
                        outcome = await _try(peer, case)
                except TimeoutError:
                    report.breach(f"silence for {SILENCE_S:.0f} s after {case.data.hex()} (seed {seed})")
                    outcome = "silence"
                except ProtocolError as error:
                    report.breach(f"an answer that is no frame: {error}, to {case.data.hex()} (seed {seed})")
                    outcome = "nonsense"
                report.cases[outcome] += 1
                if outcome != "answered":
                    break
        finally:
            peer.abort()


async def _try(peer: Peer, case: Case) -> str:
    """What became of it, in a word."""
    peer.writer.write(case.data)
    if case.framed:
        peer.writer.write(encode(Ping(NONCE)))
    else:
        peer.writer.write_eof()
    last = None
    while frame := await peer.receive():
        if frame == Pong(NONCE):
            return "answered"
        last = frame
    return "refused" if isinstance(last, Error) and last.request_id is None else "closed"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=16)
    sys.exit(run(hostility, parser))
