"""Measure the cost of a link over Serve's handles, compared with TCP: CPU time per token of API server and engine host.

usage: python -m tests.bench.handle_cost [--users 16] [--tokens 500] [--rounds 2]

A Ray cluster with one API server and one host of the bundled model, deployed with both kinds of links in turns. Counted
are all threads of the two replicas, Serve's and Ray's included, without the engine process. The first run after each
deployment warms up.
"""

from __future__ import annotations

import argparse
import asyncio
from statistics import median

from quire import AsyncClient, SamplingParams

from tests.bench.link_cost import cpu_s
from tests.ray.ray_fleet import RayFleet, ray_fleet

LINKS = ("tcp", "handles")
RUNS = 3  # runs after each deployment


async def cpu_per_token(address: str, pids: list[int], users: int, tokens: int) -> list[float]:
    """Return the CPU seconds per token of each run."""
    found = []
    async with AsyncClient(address) as client:
        for _ in range(1 + RUNS):
            before = sum(map(cpu_s, pids))
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            await asyncio.gather(*(client.complete(f"{user} The module provides", params) for user in range(users)))
            found.append((sum(map(cpu_s, pids)) - before) / (users * tokens))
    return found[1:]


async def measure(fleet: RayFleet, users: int, tokens: int) -> list[float]:
    return await cpu_per_token(await fleet.address(), [*fleet.servers(), *fleet.hosts()], users, tokens)


def main(options: argparse.Namespace) -> None:
    costs: dict[str, list[float]] = {links: [] for links in LINKS}
    with ray_fleet(1) as fleet:
        for _ in range(options.rounds):
            for links in LINKS:
                fleet.deploy(1, host_links=links)
                fleet.until(lambda: len(fleet.servers()) == 1 and len(fleet.hosts()) == 1)
                costs[links] += asyncio.run(measure(fleet, options.users, options.tokens))
    for links, found in costs.items():
        print(f"{links:<8} {median(found) * 1000:.4f} ms of CPU per token ({min(found) * 1000:.4f} at least)")
    print(f"handles + {(median(costs['handles']) - median(costs['tcp'])) * 1000:.4f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=2)
    main(parser.parse_args())
