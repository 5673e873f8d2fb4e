"""Send broken frames to a live `quire serve` while bystanders read their streams.

usage: fuzz_server.py [--seconds 60] [--seed 1] [--connections 16] [-- FLAGS OF quire serve]

After a frame whose length is right the server must answer a PING, or close the connection with an ERROR; after any
other it must close the connection when the client does. Silence is a breach, and so is an invalid frame. Exit status 1
on any breach.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from random import Random

from campaign import CampaignReport, run
from mutations import Case, mutated
from quire.runtime.common.errors import ProtocolError
from quire.runtime.protocol.codec import encode
from quire.runtime.protocol.frames import Error, Ping, Pong
from server_process import Endpoint, RawClient, ServerProcess

CASES_PER_CONNECTION = 20
SILENCE_S = 30.0
NONCE = 0x5EED


async def attack(server: ServerProcess, report: CampaignReport, options: argparse.Namespace) -> None:
    async with asyncio.TaskGroup() as group:
        for index in range(options.connections):
            group.create_task(fuzz(server.endpoint, report, f"{options.seed}:{index}"))


async def fuzz(endpoint: Endpoint, report: CampaignReport, seed: str, pause_s: float = 0.0) -> None:
    """Open connections one after another, and send several cases over each, `pause_s` apart, until it is closed."""
    rng = Random(seed)
    while True:
        client = await RawClient.open(endpoint, hello=rng.random() < 0.9)
        try:
            for _ in range(CASES_PER_CONNECTION):
                case = mutated(rng)
                try:
                    async with asyncio.timeout(SILENCE_S):
                        outcome = await _try(client, case)
                except TimeoutError:
                    report.breach(f"silence for {SILENCE_S:.0f} s after {case.data.hex()} (seed {seed})")
                    outcome = "silence"
                except ProtocolError as error:
                    report.breach(f"an invalid answer: {error}, to {case.data.hex()} (seed {seed})")
                    outcome = "invalid answer"
                report.cases[outcome] += 1
                await asyncio.sleep(pause_s)
                if outcome != "answered":
                    break
        finally:
            client.abort()


async def _try(client: RawClient, case: Case) -> str:
    """Send one case and return the outcome in a word."""
    client.writer.write(case.data)
    if case.framed:
        client.writer.write(encode(Ping(NONCE)))
    elif client.writer.can_write_eof():
        client.writer.write_eof()
    else:  # TLS
        return "left"
    last = None
    while frame := await client.receive():
        if frame == Pong(NONCE):
            return "answered"
        last = frame
    return "refused" if isinstance(last, Error) and last.request_id is None else "closed"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=16)
    sys.exit(run(attack, parser))
