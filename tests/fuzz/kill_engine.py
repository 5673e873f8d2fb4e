"""Kill and stop engine processes under streams over real sockets, and check that every stream keeps its bytes.

usage: kill_engine.py [--times 20] [--streams 32] [--tokens 300] [--seed 1] [-- FLAGS OF quire serve]

Each round runs the streams and kills the engine once at a random moment: `--times` rounds with SIGKILL, then as many
with SIGSTOP. At last one set of longer streams meets all kills. A pause is the longest time between two chunks of any
stream. Exit status 1 if a stream differs from its undisturbed run in any bit, logprobs included.
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


async def read(client: AsyncClient, prompt: tuple[int, ...], params: SamplingParams, pauses: list[float]) -> object:
    """Read a stream to its end, add its pauses to `pauses`, and return everything to compare."""
    chunks, last = [], time.perf_counter()
    async for chunk in client.generate(prompt, params):
        pauses.append(time.perf_counter() - last)
        last += pauses[-1]
        chunks.append(chunk)
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    logprobs = tuple(entry for chunk in chunks for entry in chunk.logprobs or ())
    return tokens, "".join(chunk.text for chunk in chunks), logprobs, chunks[-1].finish_reason


async def read_all(client: AsyncClient, streams: Streams, pauses: list[float]) -> list[object]:
    return await asyncio.gather(*(read(client, *stream, pauses) for stream in streams))


def random_streams(random: Random, count: int, tokens: int) -> Streams:
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
    streams = random_streams(random, options.streams, options.tokens)
    longest: list[float] = []
    async with AsyncClient(server.address) as client:
        started = time.perf_counter()
        expected = await read_all(client, streams, [])
        undisturbed_s = time.perf_counter() - started
        before, grown = server.vitals().server_rss, 0
        for _ in range(options.times):
            pauses: list[float] = []
            running = asyncio.create_task(read_all(client, streams, pauses))
            await asyncio.sleep(random.uniform(0, 0.9) * undisturbed_s)
            kill_engines(server, number)
            compare(await running, expected, number.name, report)
            longest.append(max(pauses))
            grown = (await server.settled()).server_rss - before
    print(
        f"{number.name}: {options.times} times, {options.streams} streams each; pause median {median(longest):.2f} s, "
        f"longest {max(longest):.2f} s; server {before / MIB:.1f} MiB, {grown / MIB:+.1f} MiB after",
        flush=True,
    )


async def many_kills(server: ServerProcess, options: argparse.Namespace, report: CampaignReport) -> None:
    """Kill the engine again and again under the same streams."""
    streams = random_streams(Random(options.seed + 1), options.streams, 1500)
    async with AsyncClient(server.address) as client:
        expected = await read_all(client, streams, [])
        pauses: list[float] = []
        running = asyncio.create_task(read_all(client, streams, pauses))
        num_kills = 0
        while num_kills < options.times and not running.done():
            await engine_computes(server)
            await asyncio.sleep(1.0)  # every stream gains a token
            num_kills += kill_engines(server, signal.SIGKILL)
            await asyncio.sleep(1.0)  # the server notices
        compare(await running, expected, "many kills", report)
    print(f"{options.streams} streams killed {num_kills} times: longest pause {max(pauses):.2f} s", flush=True)


async def engine_computes(server: ServerProcess) -> None:
    """Wait until an engine process is ready: metrics are missing before."""
    while True:
        try:
            await asyncio.to_thread(server.vitals)
            return
        except KeyError:
            await asyncio.sleep(0.1)


def kill_engines(server: ServerProcess, number: signal.Signals) -> int:
    """Signal every engine process, and return how many there were."""
    engines = server.engines()
    for pid in engines:
        os.kill(pid, number)
    return len(engines)


def compare(found: list[object], expected: list[object], name: str, report: CampaignReport) -> None:
    equal = sum(one == other for one, other in zip(found, expected, strict=True))
    report.cases[f"{name}: equal"] += equal
    report.rounds["equal" if equal == len(expected) else "changed"] += 1
    if equal < len(expected):
        report.breach(f"{name}: {len(expected) - equal} of {len(expected)} streams changed")


async def main(server: ServerProcess, options: argparse.Namespace, report: CampaignReport) -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        await rounds(server, options, report, number)
    await many_kills(server, options, report)
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
        outcome.check_log(running_server)
    raise SystemExit(outcome.print())
