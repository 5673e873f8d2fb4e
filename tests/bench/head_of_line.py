"""A long prompt arrives while many users decode: what they notice of it, and how long it takes.

    python tests/bench/head_of_line.py FOLDER [--users 16] [--prompt 4096] [--targets 150,250,0] [--runs 3]

Everybody else decodes from prompts of 128 tokens. For each latency target (0: none) it prints the users' inter-token
latency before and while the long prompt is computed, and the long prompt's time to first token beside that of the same
prompt alone, without a target, on the same engine. Medians over the runs. Weights q8, KV int8.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from dataclasses import dataclass

import uvloop
from quire import SamplingParams
from quire.runtime.common.config import EngineConfig
from quire.runtime.engine import Engine, GenerateRequest, LocalEngine


@dataclass
class Result:
    alone_s: float  # TTFT of the long prompt
    beside_s: float
    calm: list[float]  # inter-token latencies, seconds
    busy: list[float]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def prompt(generator: random.Random, length: int) -> tuple[int, ...]:
    return tuple(generator.randrange(10, 8000) for _ in range(length))


async def first_token_s(engine: LocalEngine, tokens: tuple[int, ...]) -> float:
    start = time.perf_counter()
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    async for _ in await engine.submit(GenerateRequest(prompt=tokens, sampling_params=params)):
        pass
    return time.perf_counter() - start


async def decode(engine: LocalEngine, tokens: tuple[int, ...], times: list[float]) -> None:
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    async for _ in await engine.submit(GenerateRequest(prompt=tokens, sampling_params=params)):
        times.append(time.perf_counter())


def gaps(times: list[list[float]], begin: float, end: float) -> list[float]:
    """Inter-token latencies of tokens that came between."""
    return [b - a for each in times for a, b in itertools.pairwise(each) if begin <= b <= end]


async def run(engine: LocalEngine, generator: random.Random, users: int, length: int, calm_s: float) -> Result:
    alone_s = await first_token_s(engine, prompt(generator, length))
    times: list[list[float]] = [[] for _ in range(users)]
    tasks = [asyncio.create_task(decode(engine, prompt(generator, 128), each)) for each in times]
    while not all(times):
        await asyncio.sleep(0.05)
    calm = time.perf_counter()
    await asyncio.sleep(calm_s)
    begin = time.perf_counter()
    beside_s = await first_token_s(engine, prompt(generator, length))
    end = time.perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Result(alone_s, beside_s, gaps(times, calm, begin), gaps(times, begin, end))


async def measure(folder: str, target_ms: int, users: int, length: int, runs: int, calm_s: float) -> None:
    config = EngineConfig(
        model=folder,
        weights="q8",
        kv_cache_dtype="int8",
        max_num_seqs=users + 1,
        max_model_len=max(length + 1, 128 + 4000),
        enable_prefix_caching=False,
        itl_target_ms=target_ms or None,
    )
    engine = await Engine.start(config)
    generator = random.Random(1)
    try:
        results = [await run(engine, generator, users, length, calm_s) for _ in range(runs + 1)][
            1:
        ]  # the first warms up
    finally:
        await engine.close()
    calm = [gap for result in results for gap in result.calm]
    busy = [gap for result in results for gap in result.busy]
    ratio = statistics.median(result.beside_s / result.alone_s for result in results)
    print(
        f"target {target_ms or '-':>5} ms  ITL before p50 {percentile(calm, 0.5) * 1e3:6.0f} p99 "
        f"{percentile(calm, 0.99) * 1e3:6.0f} ms  beside p50 {percentile(busy, 0.5) * 1e3:6.0f} p99 "
        f"{percentile(busy, 0.99) * 1e3:6.0f} ms"
        + (f" = {percentile(busy, 0.99) * 1e3 / target_ms:.2f} x target" if target_ms else "")
        + f"  TTFT {statistics.median(result.beside_s for result in results):5.1f} s, alone "
        f"{statistics.median(result.alone_s for result in results):5.1f} s: {ratio:.2f} x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--targets", default="150,250,0")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--calm", type=float, default=3.0, help="seconds of decoding before the long prompt comes")
    args = parser.parse_args()
    for target in args.targets.split(","):
        uvloop.run(measure(args.folder, int(target), args.users, args.prompt, args.runs, args.calm))


if __name__ == "__main__":
    main()
