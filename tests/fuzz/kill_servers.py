"""Kill API servers under streams of all kinds, and check that every stream keeps its bytes at the other server.

usage: kill_servers.py [--models bundled qwen3_5] [--times 10] [--streams 32] [--tokens 200] [--seed 1]
                       [-- FLAGS OF quire serve]

Two servers of each model: the bundled one, and goldens' families with random weights and the bundled vocabulary. In
each round one client runs the streams over both addresses, and the API server that it uses is killed with SIGKILL once,
when a random share of all chunks has come; then it is started again on its port.

A pause is the longest time between two chunks of any stream after a kill. Exit status 1 if a stream differs from its
undisturbed run in any bit, text, log probabilities and counts included, or if the median of the pauses is above 1 s.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median

import uvloop
from campaign import CampaignReport
from quire import AsyncClient, SamplingParams
from quire.runtime.common.types import StructuredOutputs, join_chunks
from server_process import ServerProcess, free_port, start_server

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, for tests.support

from tests.support.random_models import BUNDLED, MODELS, named_model

MAX_MEDIAN_PAUSE_S = 1.0
LIST = StructuredOutputs(json={"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 4})
Streams = list[tuple[str, SamplingParams]]


class Progress:
    """The output that one round has received."""

    def __init__(self) -> None:
        self.num_chunks = 0
        self.killed_at = float("inf")
        self.longest_s = 0.0  # longest gap between two chunks of one stream, after the kill


def streams_of_all_kinds(random: Random, count: int, tokens: int) -> Streams:
    """Return streams of eight kinds, each with its own prompt and seed."""
    streams = []
    for index in range(count):
        seed = random.getrandbits(64)
        temperature = random.choice((0.7, 1.0))
        kinds = (
            SamplingParams(max_tokens=tokens, ignore_eos=True),
            SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, logprobs=2, ignore_eos=True),
            SamplingParams(max_tokens=tokens // 2, temperature=temperature, seed=seed, n=3),
            SamplingParams(max_tokens=tokens // 8, temperature=temperature, seed=seed, n=2, best_of=3),
            SamplingParams(max_tokens=tokens // 8, n=2, beam_width=3),
            SamplingParams(
                max_tokens=tokens, temperature=temperature, seed=seed, repetition_penalty=1.2, frequency_penalty=0.3
            ),
            SamplingParams(
                max_tokens=tokens, temperature=temperature, seed=seed, stop=("\n\n", "e the"), min_tokens=20
            ),
            SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, structured_outputs=LIST),
        )
        words = " ".join(random.choice(("module", "returns", "the", "value", "of", "a", "lock")) for _ in range(20))
        streams.append((words, kinds[index % len(kinds)]))
    return streams


async def read(client: AsyncClient, prompt: str, params: SamplingParams, progress: Progress) -> object:
    """Read a stream to its end and return everything to compare."""
    chunks = []
    last = time.perf_counter()
    async for chunk in client.generate(prompt, params):
        now = time.perf_counter()
        if now > progress.killed_at:
            progress.longest_s = max(progress.longest_s, now - max(last, progress.killed_at))
        last = now
        progress.num_chunks += 1
        chunks.append(chunk)
    usage = chunks[-1].usage
    assert usage is not None, "a stream ends with its usage"
    return join_chunks(chunks), usage.prompt_tokens, usage.completion_tokens, params.seed in (None, usage.seed)


async def read_all(client: AsyncClient, streams: Streams, progress: Progress) -> list[object]:
    return await asyncio.gather(*(read(client, *stream, progress) for stream in streams))


class ServerPair:
    """Two servers on fixed ports."""

    def __init__(self, flags: list[str]) -> None:
        self._flags = flags
        self._ports = free_port(), free_port()
        self._stacks = [ExitStack(), ExitStack()]
        self.servers: list[ServerProcess] = [self._start(0), self._start(1)]

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def _start(self, index: int) -> ServerProcess:
        return self._stacks[index].enter_context(start_server("--port", str(self._ports[index]), *self._flags))

    def restart(self, index: int) -> None:
        """Start the killed server again, on the same port."""
        self._stacks[index].close()
        self.servers[index] = self._start(index)

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()


async def main(pair: ServerPair, options: argparse.Namespace, report: CampaignReport) -> None:
    random = Random(options.seed)
    streams = streams_of_all_kinds(random, options.streams, options.tokens)
    undisturbed = Progress()
    async with AsyncClient(pair.addresses[0]) as client:
        expected = await read_all(client, streams, undisturbed)
    pauses = []
    for number in range(options.times):
        progress = Progress()
        victim = number % 2
        addresses = [pair.addresses[victim], pair.addresses[1 - victim]]
        async with AsyncClient(addresses) as client:
            running = asyncio.create_task(read_all(client, streams, progress))
            wanted = random.uniform(0.05, 0.8) * undisturbed.num_chunks
            while progress.num_chunks < wanted and not running.done():
                await asyncio.sleep(0.002)
            progress.killed_at = time.perf_counter()
            pair.servers[victim].kill()
            found = await running
        equal = sum(one == other for one, other in zip(found, expected, strict=True))
        report.cases["streams equal"] += equal
        report.rounds["equal" if equal == len(expected) else "changed"] += 1
        for stream, one, other in zip(streams, found, expected, strict=True):
            if one != other:
                report.breach(f"round {number}: {stream} gave {one}, not {other}"[:1000])
        pauses.append(progress.longest_s)
        print(f"kill {number + 1}: {equal} of {len(expected)} equal, pause {progress.longest_s:.2f} s", flush=True)
        report.check_log(pair.servers[1 - victim])
        await asyncio.to_thread(pair.restart, victim)
    print(f"pause median {median(pauses):.2f} s, longest {max(pauses):.2f} s")
    if median(pauses) > MAX_MEDIAN_PAUSE_S:
        report.breach(f"the median of the pauses is {median(pauses):.2f} s, above {MAX_MEDIAN_PAUSE_S} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--models", nargs="+", default=[BUNDLED, "qwen3_5"], choices=MODELS, metavar="MODEL")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of quire serve, after --")
    arguments = parser.parse_args()
    outcome = CampaignReport()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            print(f"model {name}", flush=True)
            servers = ServerPair([str(named_model(name, Path(folder))), *arguments.flags])
            try:
                uvloop.run(main(servers, arguments, outcome))
            finally:
                servers.close()
    raise SystemExit(outcome.print())
