"""Kill and stop engine processes under streams over real sockets, and check that every stream keeps its bytes.

usage: kill_engine.py [--times 20] [--streams 32] [--tokens 300] [--seed 1] [--families] [-- FLAGS OF quire serve]

Each round runs the streams, some of them samples of one prompt and beam searches, and kills the engine once:

* `--times` rounds with SIGKILL at a random moment, then as many with SIGSTOP;
* `--times` rounds with SIGKILL while a pool that is too small spills pages to the disk;
* one set of longer streams during all kills;
* `--times` servers whose engine is killed while it writes the prefix snapshot at their end.

With `--families`, instead: `--times` rounds with SIGKILL on the golden of every model family, with q8 and q4 weights,
and on quantized folders, with their own types.

A pause is the longest time between two chunks of any stream. Exit status 1 if a stream differs from its undisturbed run
in any bit, logprobs included, or if a killed snapshot is not reported or leaves a file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import uvloop
from campaign import CampaignReport
from quire import AsyncClient, SamplingParams
from quire.runtime.common.types import join_chunks
from server_process import MIB, ServerProcess, start_server

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, for tests.support

from tests.support.quantized_folders import common_folders

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
GOLDEN_TOKENS = 90  # tokens of each stream; goldens have 128 positions or more, and 160 tokens in their vocabulary
Streams = list[tuple[tuple[int, ...], SamplingParams]]


async def read(client: AsyncClient, prompt: tuple[int, ...], params: SamplingParams, pauses: list[float]) -> object:
    """Read a stream to its end, add its pauses to `pauses`, and return everything to compare."""
    chunks = []
    last = time.perf_counter()
    async for chunk in client.generate(prompt, params):
        pauses.append(time.perf_counter() - last)
        last += pauses[-1]
        chunks.append(chunk)
    return join_chunks(chunks)


async def read_all(client: AsyncClient, streams: Streams, pauses: list[float]) -> list[object]:
    return await asyncio.gather(*(read(client, *stream, pauses) for stream in streams))


def random_streams(
    random: Random, count: int, tokens: int, vocabulary: int = 4000, longest_prompt: int = 120
) -> Streams:
    """Return streams: one in eight is a beam search, and one in eight has two samples."""
    streams = []
    for index in range(count):
        params = SamplingParams(max_tokens=tokens // 4, beam_width=3, n=2, ignore_eos=True)
        if index % 8 != 7:
            temperature = random.choice((0.0, 0.8))
            n = 2 if index % 8 == 5 else 1
            params = SamplingParams(
                max_tokens=tokens, temperature=temperature, seed=index, n=n, ignore_eos=True, logprobs=1
            )
        prompt = tuple(random.randrange(4, vocabulary) for _ in range(random.randrange(10, longest_prompt)))
        streams.append((prompt, params))
    return streams


async def rounds(
    server: ServerProcess,
    options: argparse.Namespace,
    report: CampaignReport,
    number: signal.Signals,
    *,
    while_spilling: bool = False,
    family: str | None = None,
) -> None:
    name = f"{number.name} while spilling" if while_spilling else f"{family or ''} {number.name}".strip()
    random = Random(options.seed)
    streams = (
        random_streams(random, options.streams, options.tokens)
        if family is None
        else random_streams(random, options.streams, GOLDEN_TOKENS, 150, 36)
    )
    longest: list[float] = []
    async with AsyncClient(server.address) as client:
        started = time.perf_counter()
        expected = await read_all(client, streams, [])
        undisturbed_s = time.perf_counter() - started
        before = server.vitals().server_rss
        grown = 0
        for _ in range(options.times):
            pauses: list[float] = []
            running = asyncio.create_task(read_all(client, streams, pauses))
            if family is None:
                await asyncio.sleep(random.uniform(0, 0.9 if not while_spilling else 0.5) * undisturbed_s)
            else:  # a few streams at a time, so that the others have not ended when the first ones are read
                wanted = random.randrange(options.streams * GOLDEN_TOKENS // 3)
                while len(pauses) < wanted and not running.done():
                    await asyncio.sleep(0)
            if not while_spilling or await engine_writes(server, running):
                report.cases[f"{name}: killed"] += kill_engines(server, number)
            compare(await running, expected, name, report)
            longest.append(max(pauses))
            grown = (await server.settled()).server_rss - before
    print(
        f"{name}: {options.times} times, {options.streams} streams each; pause median {median(longest):.2f} s, "
        f"longest {max(longest):.2f} s; server {before / MIB:.1f} MiB, {grown / MIB:+.1f} MiB after",
        flush=True,
    )


async def many_kills(server: ServerProcess, options: argparse.Namespace, report: CampaignReport) -> None:
    """Kill the engine repeatedly under the same streams."""
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


async def killed_snapshots(options: argparse.Namespace, report: CampaignReport) -> None:
    """Kill the engine while it writes its snapshot: the exit status shows it, and the file keeps its old content."""
    streams = [((1 + index,) * 1000, SamplingParams(max_tokens=1)) for index in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prefixes"
        for index in range(options.times + 1):
            before = path.read_bytes() if path.exists() else None
            with start_server("--kv-cache-memory", "96M", "--prefix-snapshot", str(path)) as server:
                async with AsyncClient(server.address) as client:
                    await read_all(client, streams, [])
                ending = asyncio.create_task(server.terminate())
                killed = index > 0 and await engine_writes(server, ending) and kill_engines(server, signal.SIGKILL)
                status = await ending
                log = server.log()
            report.cases[f"snapshots {'killed' if killed else 'written'}"] += 1
            if status != int(bool(killed)) or (killed and "did not stop well" not in log):
                report.breach(f"snapshot {index}: exit status {status} after {killed} kills")
            if os.listdir(folder) != ["prefixes"] or (killed and path.read_bytes() != before):
                report.breach(f"snapshot {index}: {os.listdir(folder)} remain")


async def engine_writes(server: ServerProcess, running: asyncio.Future[Any]) -> bool:
    """Wait until an engine writes much more than messages: pages. Return False if `running` ends before."""
    written = sum(map(_written, server.engines()))
    while not running.done():
        await asyncio.sleep(0.001)
        now = sum(map(_written, server.engines()))
        if now - written > MIB // 4:
            return True
        written = now
    return False


def _written(pid: int) -> int:
    """Return the bytes that a process has written; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/io").read_text().split("wchar: ")[1].split()[0])
    except OSError:
        return 0


async def engine_computes(server: ServerProcess) -> None:
    """Wait until an engine process is ready: before that, metrics are missing."""
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


def family_models(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield models and the dtypes of their weights; quantized folders are written into `folder`."""
    for golden in sorted(GOLDENS.glob("*/golden.npz")):
        config = json.loads((golden.parent / "config.json").read_text())
        yield from ((golden.parent, dtype) for dtype in ("q8", "q4", *(["auto"] * ("quantization_config" in config))))
    for path in common_folders(folder, vocab_size=160, max_position_embeddings=256).values():
        yield path, "auto"


async def main_of_families(options: argparse.Namespace, report: CampaignReport) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for path, weights in family_models(Path(folder)):
            flags = ("--weights", weights, "--kv-cache-dtype", "int8", "--kv-cache-memory", "8M", "--max-num-seqs", "3")
            with start_server(str(path), *flags, *options.flags) as server:
                await rounds(server, options, report, signal.SIGKILL, family=f"{path.name} {weights}")
                report.check_log(server)


async def main(server: ServerProcess, options: argparse.Namespace, report: CampaignReport) -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        await rounds(server, options, report, number)
    await many_kills(server, options, report)
    print(await server.settled())
    with start_server("--kv-cache-memory", "4M", "--kv-spill-size", "256M") as small:
        await rounds(small, options, report, signal.SIGKILL, while_spilling=True)
        report.check_log(small)
    await killed_snapshots(options, report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--families", action="store_true")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of quire serve, after --")
    arguments = parser.parse_args()
    outcome = CampaignReport()
    if arguments.families:
        uvloop.run(main_of_families(arguments, outcome))
    else:
        with start_server(*arguments.flags) as running_server:
            uvloop.run(main(running_server, arguments, outcome))
            outcome.check_log(running_server)
    raise SystemExit(outcome.print())
