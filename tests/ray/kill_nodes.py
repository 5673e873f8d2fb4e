"""Kill and stop nodes and engine hosts of a Ray cluster under streams of all kinds: every stream must keep its bytes.

usage: python -m tests.ray.kill_nodes [--times 20] [--streams 32] [--tokens 300] [--hosts 3] [--links tcp] [--seed 1]
                                      [--ways kill_node stop_node kill_host stop_host]

`--times` rounds of each fault: SIGKILL of all processes of a node, as if its machine were lost, and SIGSTOP of them, as
if its machine fell silent; the same for a replica with its engine process. The fault hits the host with the most
requests at a random moment; the next round begins when Serve has replaced the host. With `--links handles`, Serve's
handles carry the links.

A pause is the longest time between two chunks of any stream without beam search. Exit status 1 if a stream differs
from its undisturbed run in any bit, logprobs included, or does not end; or if the median of the pauses is above 1 s
after a kill, or above 2 s after silence.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
from quire import AsyncClient, CompletionOutput, OutputChunk, SamplingParams
from quire.runtime.common.types import join_chunks

from tests.ray.ray_fleet import RayFleet, descendants, ray_fleet
from tests.ray.test_ray import streams

ROUND_TIMEOUT_S = 120.0
MAX_ATTEMPTS = 5  # attempts at a round in which the affected host has no request
MAX_MEDIAN_S = 1.0
MAX_SILENT_MEDIAN_S = 2.0  # a second of silence passes before it is noticed

Asked = tuple[str, SamplingParams]


def shortened(params: SamplingParams, tokens: int) -> SamplingParams:
    """Return parameters of a stream of at most `tokens` tokens."""
    max_tokens = min(params.max_tokens, tokens)
    return msgspec.structs.replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))


class Progress:
    """The output that one round has received."""

    def __init__(self) -> None:
        self.num_chunks = 0
        self.longest_s = 0.0  # longest gap between two chunks of one stream


async def read(client: AsyncClient, asked: Asked, progress: Progress) -> Sequence[CompletionOutput]:
    """Read a stream to its end."""
    chunks: list[OutputChunk] = []
    last = None
    async for chunk in client.generate(*asked):
        now = time.perf_counter()
        if last is not None and not asked[1].beam_width:
            progress.longest_s = max(progress.longest_s, now - last)
        last = now
        progress.num_chunks += 1
        chunks.append(chunk)
    return join_chunks(chunks)


def kill_node(fleet: RayFleet, host: int) -> None:
    fleet.kill_node_of(host)


def stop_node(fleet: RayFleet, host: int) -> None:
    signal_all(fleet.processes_of(fleet.node_of(host)), signal.SIGSTOP)


def kill_host(fleet: RayFleet, host: int) -> None:
    os.kill(host, signal.SIGKILL)


def stop_host(fleet: RayFleet, host: int) -> None:
    signal_all([host, *descendants(host)], signal.SIGSTOP)


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


WAYS = {way.__name__: way for way in (kill_node, stop_node, kill_host, stop_host)}


class Campaign:
    """Streams of one client over the hosts that Serve runs, and their results."""

    def __init__(self, fleet: RayFleet, address: str, options: argparse.Namespace) -> None:
        self.outcomes: Counter[str] = Counter()
        self._fleet = fleet
        self._address = address
        self._num_hosts: int = options.hosts
        self._choose = random.Random(options.seed)
        self._streams = [(prompt, shortened(params, options.tokens)) for prompt, params in streams(options.streams)]

    async def prepare(self) -> None:
        """Read the streams with nothing done to them."""
        undisturbed = Progress()
        async with AsyncClient(self._address) as client:
            reading = [read(client, asked, undisturbed) for asked in self._streams]
            self._expected = await asyncio.gather(*reading)
        self._num_chunks = undisturbed.num_chunks
        print(f"undisturbed: {self._num_chunks} chunks, longest pause {undisturbed.longest_s:.2f} s", flush=True)

    async def rounds(self, harm: Callable[[RayFleet, int], None], times: int) -> None:
        num_moves = self._fleet.num_moves()
        pauses = []
        for number in range(times):
            for _ in range(MAX_ATTEMPTS):
                if (pause := await self._round(harm, f"{harm.__name__} {number}")) is not None:
                    pauses.append(pause)
                    break
        num_moves = self._fleet.num_moves() - num_moves
        print(
            f"{harm.__name__}: {len(pauses)} times under {len(self._streams)} streams, {num_moves} moves; pause median "
            f"{median(pauses):.2f} s, longest {max(pauses):.2f} s",
            flush=True,
        )
        if median(pauses) > (MAX_SILENT_MEDIAN_S if harm in (stop_node, stop_host) else MAX_MEDIAN_S):
            self.outcomes["pauses too long"] += 1

    async def _round(self, harm: Callable[[RayFleet, int], None], what: str) -> float | None:
        """Return the longest pause; None if no host had a request."""
        fleet = self._fleet
        progress = Progress()
        async with AsyncClient(self._address) as client:
            running = [asyncio.create_task(read(client, asked, progress)) for asked in self._streams]
            wanted = self._choose.uniform(0.02, 0.6) * self._num_chunks
            while progress.num_chunks < wanted and not all(task.done() for task in running):
                await asyncio.sleep(0.002)
            host = await asyncio.to_thread(fleet.busiest_host_now)
            if host is not None:
                harm(fleet, host)
            await asyncio.wait(running, timeout=ROUND_TIMEOUT_S)
            self._compare(running, what)
        if host is None:
            return None
        self._restore(harm, host)
        await asyncio.to_thread(self._wait_for_hosts, host, harm is not stop_host)
        return progress.longest_s

    def _restore(self, harm: Callable[[RayFleet, int], None], host: int) -> None:
        """Restore the cluster's lost parts. Ray adds nodes in the main thread only."""
        fleet = self._fleet
        if harm is stop_node:
            fleet.kill_node_of(host)
        if harm in (kill_node, stop_node):
            fleet.add_node()
        if harm is stop_host:
            signal_all([host, *descendants(host)], signal.SIGCONT)

    def _wait_for_hosts(self, host: int, is_gone: bool) -> None:
        """Wait until the API server uses as many hosts as before."""
        fleet = self._fleet
        fleet.until(lambda: not is_gone or host not in fleet.hosts())
        fleet.until(lambda: len(fleet.hosts()) == self._num_hosts and fleet.num_hosts_up() == self._num_hosts)

    def _compare(self, running: Sequence[asyncio.Task[Sequence[CompletionOutput]]], what: str) -> None:
        for index, (task, wanted) in enumerate(zip(running, self._expected, strict=True)):
            if not task.done():
                outcome = "open"
                task.cancel()
            elif (error := task.exception()) is not None:
                outcome = f"{type(error).__name__}: {error}"
            else:
                outcome = "equal" if task.result() == wanted else "changed"
            self.outcomes[outcome] += 1
            if outcome != "equal":
                print(f"{what}: stream {index} is {outcome}", flush=True)


async def run(fleet: RayFleet, options: argparse.Namespace) -> int:
    campaign = Campaign(fleet, await fleet.address(), options)
    await campaign.prepare()
    for way in options.ways:
        await campaign.rounds(WAYS[way], options.times)
    print(dict(campaign.outcomes))
    return int(set(campaign.outcomes) != {"equal"})


def main(options: argparse.Namespace) -> int:
    with ray_fleet(options.hosts) as fleet:
        fleet.deploy(options.hosts, host_links=options.links)
        return asyncio.run(run(fleet, options))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--links", choices=("tcp", "handles"), default="tcp")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seed", type=int, default=1)
    raise SystemExit(main(parser.parse_args()))
