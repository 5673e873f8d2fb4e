"""Engine processes killed, and stopped, under streams over real sockets: all end with the bytes they would have.

usage: kill_engine.py [--times 20] [--streams 32] [--tokens 300] [--seed 1] [-- FLAGS OF quire serve]

A round is so many streams and one death at a random moment, by SIGKILL, then as many rounds by SIGSTOP, and at last
one set of longer streams that meets all its deaths. A pause is the longest time between two chunks of any stream.
Exit status 1 for any stream that is not, to the last bit of its logprobs, what it is undisturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from random import Random
from statistics import median

import uvloop
from campaign import CampaignReport
from quire import AsyncClient, SamplingParams
from server_process import MIB, ServerProcess, start_server

Streams = list[tuple[tuple[int, ...], SamplingParams]]


async def one(client: AsyncClient, prompt: tuple[int, ...], params: SamplingParams, pauses: list[float]) -> object:
    chunks, last = [], time.perf_counter()
    async for chunk in client.generate(prompt, params):
        pauses.append(time.perf_counter() - last)
        last += pauses[-1]
        chunks.append(chunk)
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    logprobs = tuple(entry for chunk in chunks for entry in chunk.logprobs or ())
    return tokens, "".join(chunk.text for chunk in chunks), logprobs, chunks[-1].finish_reason


async def all_of(client: AsyncClient, streams: Streams, pauses: list[float]) -> list[object]:
    return await asyncio.gather(*(one(client, *stream, pauses) for stream in streams))


def drawn(random: Random, count: int, tokens: int) -> Streams:
    return [
        (
            tuple(random.randrange(4, 4000) for _ in range(random.randrange(10, 120))),
            SamplingParams(
                max_tokens=tokens, temperature=random.choice((0.0, 0.8)), seed=index, ignore_eos=True, logprobs=1
            ),
        )
        for index in range(count)
    ]


async def rounds(
    server: ServerProcess, options: argparse.Namespace, report: CampaignReport, number: signal.Signals
) -> None:
    random = Random(options.seed)
    streams = drawn(random, options.streams, options.tokens)
    longest: list[float] = []
    async with AsyncClient(server.address) as client:
        started = time.perf_counter()
        wanted = await all_of(client, streams, [])
        undisturbed_s = time.perf_counter() - started
        before = server.vitals().server_rss
        for _ in range(options.times):
            pauses: list[float] = []
            running = asyncio.create_task(all_of(client, streams, pauses))
            await asyncio.sleep(random.uniform(0, 0.9) * undisturbed_s)
            strike(server, number)
            compare(await running, wanted, number.name, report)
            longest.append(max(pauses))
            await server.settled()
        grown = server.vitals().server_rss - before
    print(
        f"{number.name}: {options.times} deaths, {options.streams} streams each; pause median {median(longest):.2f} s, "
        f"longest {max(longest):.2f} s; front {before / MIB:.1f} MiB, {grown / MIB:+.1f} MiB after",
        flush=True,
    )


async def one_life(server: ServerProcess, options: argparse.Namespace, report: CampaignReport) -> None:
    streams = drawn(Random(options.seed + 1), options.streams, 1500)
    async with AsyncClient(server.address) as client:
        wanted = await all_of(client, streams, [])
        pauses: list[float] = []
        running = asyncio.create_task(all_of(client, streams, pauses))
        deaths = 0
        while deaths < options.times and not running.done():
            await asyncio.sleep(2.0)  # back, and everybody has gained a token
            deaths += strike(server, signal.SIGKILL)
        compare(await running, wanted, "the same streams", report)
    print(f"the same {options.streams} streams: {deaths} deaths, longest pause {max(pauses):.2f} s", flush=True)


def strike(server: ServerProcess, number: signal.Signals) -> int:
    """How many there were to strike."""
    engines = server.engines()
    for pid in engines:
        os.kill(pid, number)
    return len(engines)


def compare(found: list[object], wanted: list[object], what: str, report: CampaignReport) -> None:
    equal = sum(one == other for one, other in zip(found, wanted, strict=True))
    report.cases[f"{what}: equal"] += equal
    report.rounds["equal" if equal == len(wanted) else "changed"] += 1
    if equal < len(wanted):
        report.breach(f"{what}: {len(wanted) - equal} of {len(wanted)} streams changed")


async def main(server: ServerProcess, options: argparse.Namespace, report: CampaignReport) -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        await rounds(server, options, report, number)
    await one_life(server, options, report)
    print(await server.settled())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of quire serve, after --")
    arguments = parser.parse_args()
    outcome = CampaignReport()
    with start_server(*arguments.flags) as running_server:
        uvloop.run(main(running_server, arguments, outcome))
        if "Traceback" in (written := running_server.log()):
            outcome.breach(f"a traceback in the server's log: {written[written.index('Traceback') :][:2000]}")
    raise SystemExit(outcome.print())
