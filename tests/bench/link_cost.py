"""Measure what a link between machines costs: an engine host on loopback against engine processes of this machine.

usage: link_cost.py [--users 16] [--tokens 200] [--rounds 120] [--requests 30]

Both setups serve the bundled model with the same options and are measured in turns, by the same code: tokens of all
users per second, the time to the first token of one short request at a time, and the CPU time per token of the API
server's process and the host's, without the engine process. Single rounds on two shared CPUs differ by a quarter, so
the measurement takes a hundred rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import structlog
import uvloop
from quire.runtime.cluster import Cluster, Credentials, Members
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import Engine, GenerateRequest, TextProcessor, models_digest
from quire.runtime.model import model_path
from quire.runtime.workers import EnginePool

from tests.fuzz.host_process import SECRET, HostProcess, running_hosts

FLAGS = ("--weights", "q8", "--kv-cache-dtype", "int8", "--kv-cache-memory", "64M", "--threads", "1")
CONFIG = EngineConfig(weights="q8", kv_cache_dtype="int8", kv_cache_memory=64_000_000, threads=1)

Core = EnginePool | Cluster


def request(number: int, tokens: int) -> GenerateRequest:
    prompt = tuple(4 + (number * 37 + at) % 3000 for at in range(32))
    return GenerateRequest(prompt=prompt, sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True))


async def read(engine: Engine[Core], asked: GenerateRequest) -> float:
    """Read a stream to its end. Return the seconds to its first token."""
    began = time.perf_counter()
    first = 0.0
    async for _ in await engine.submit(asked):
        first = first or time.perf_counter() - began
    return first


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process's threads, to the nanosecond; `stat` counts in hundredths of a second."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def tokens_per_second(
    engine: Engine[Core], options: argparse.Namespace, cpu: Callable[[], float]
) -> tuple[float, float]:
    """Return tokens per second, and the CPU seconds per token."""
    cpu_before = cpu()
    began = time.perf_counter()
    await asyncio.gather(*(read(engine, request(user, options.tokens)) for user in range(options.users)))
    num_tokens = options.users * options.tokens
    return num_tokens / (time.perf_counter() - began), (cpu() - cpu_before) / num_tokens


async def main(options: argparse.Namespace, host: HostProcess) -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    texts = TextProcessor.load(model_path(None))
    pool = await EnginePool.launch(CONFIG, num_processes=1)
    cluster = await Cluster.connect(
        Members(host.address), Credentials(SECRET.encode()), models_digest(CONFIG), heartbeat_timeout_s=30.0
    )
    engines: dict[str, Engine[Core]] = {"processes": Engine(pool, texts), "host": Engine(cluster, texts)}
    pids = {"processes": (os.getpid(),), "host": (os.getpid(), host.process.pid)}
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    costs: dict[str, list[float]] = {name: [] for name in engines}
    firsts: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(options.rounds + 1):
        for name in engines if turn % 2 else reversed(engines):
            speed, cost = await tokens_per_second(engines[name], options, lambda name=name: sum(map(cpu_s, pids[name])))
            if turn:  # the first one warms up
                speeds[name].append(speed)
                costs[name].append(cost)
    for number in range(options.requests):
        for name, engine in engines.items():
            firsts[name].append(await read(engine, request(1000 + number, 2)))
    for name, engine in engines.items():
        print(
            f"{name:<10} {statistics.median(speeds[name]):8.0f} tokens/s   first token "
            f"{statistics.median(firsts[name]) * 1000:6.2f} ms   CPU per token "
            f"{statistics.median(costs[name]) * 1000:.4f} ms"
        )
        await engine.close()
    ratios = [one / other for one, other in zip(speeds["host"], speeds["processes"], strict=True)]
    added = statistics.median(costs["host"]) - statistics.median(costs["processes"])
    print(f"throughput x {statistics.median(ratios):.3f}, CPU + {added * 1000:.4f} ms per token")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--requests", type=int, default=30)
    arguments = parser.parse_args()
    with running_hosts(1, *FLAGS) as (started,):
        uvloop.run(main(arguments, started))
