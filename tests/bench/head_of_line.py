"""Measure head-of-line blocking: a long prompt arrives while many users decode.

    python tests/bench/head_of_line.py FOLDER [--users 16] [--prompt 4096] [--targets 150,250,0] [--runs 3]

The users decode from prompts of 128 tokens. For each latency target (0: none) it prints the users' inter-token latency
before and during the long prompt's prefill, and the long prompt's time to first token, under this load and alone on
the same engine. Medians over the runs. Weights q8, KV int8.
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
from quire.runtime.tools.percentiles import percentile


@dataclass
class Result:
    """Seconds of one run."""

    alone_s: float  # TTFT of the long prompt
    loaded_s: float  # TTFT of the long prompt while the users decode
    itls_before: list[float]
    itls_during: list[float]


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
    """Return the inter-token latencies of the tokens that arrived between `begin` and `end`."""
    return [b - a for each in times for a, b in itertools.pairwise(each) if begin <= b <= end]


async def run(engine: LocalEngine, generator: random.Random, users: int, length: int, wait_s: float) -> Result:
    alone_s = await first_token_s(engine, prompt(generator, length))
    times: list[list[float]] = [[] for _ in range(users)]
    tasks = [asyncio.create_task(decode(engine, prompt(generator, 128), each)) for each in times]
    while not all(times):
        await asyncio.sleep(0.05)
    start = time.perf_counter()
    await asyncio.sleep(wait_s)
    begin = time.perf_counter()
    loaded_s = await first_token_s(engine, prompt(generator, length))
    end = time.perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Result(alone_s, loaded_s, gaps(times, start, begin), gaps(times, begin, end))


async def measure(folder: str, target_ms: int, users: int, length: int, runs: int, wait_s: float) -> None:
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
        results = [await run(engine, generator, users, length, wait_s) for _ in range(runs + 1)]
    finally:
        await engine.close()
    results = results[1:]  # the first run warms up
    before = [1e3 * itl for result in results for itl in result.itls_before]
    during = [1e3 * itl for result in results for itl in result.itls_during]
    ratio = statistics.median(result.loaded_s / result.alone_s for result in results)
    print(
        f"target {target_ms or '-':>5} ms  ITL before p50 {percentile(before, 50):6.0f} p99 "
        f"{percentile(before, 99):6.0f} ms  during p50 {percentile(during, 50):6.0f} p99 "
        f"{percentile(during, 99):6.0f} ms"
        + (f" = {percentile(during, 99) / target_ms:.2f} x target" if target_ms else "")
        + f"  TTFT {statistics.median(result.loaded_s for result in results):5.1f} s, alone "
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
    parser.add_argument("--wait", type=float, default=3.0, help="seconds of decoding before the long prompt arrives")
    args = parser.parse_args()
    for target in args.targets.split(","):
        uvloop.run(measure(args.folder, int(target), args.users, args.prompt, args.runs, args.wait))


if __name__ == "__main__":
    main()
