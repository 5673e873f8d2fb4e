"""Measure fairness: the time to first token of a tenant while another one sends 20 times as much.

    python tests/bench/fairness.py [FOLDER] [--rate 0.1] [--requests 6] [--prompt 512] [--new-tokens 32] [--target 150]

The modest tenant sends `--rate` requests per second: first alone, then with the flood under each scheduling policy.
Together they send more than the engine can serve, so the flood's queue keeps growing. Weights q8, KV int8.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

import msgspec
import uvloop
from quire import SamplingParams
from quire.runtime.common.config import EngineConfig
from quire.runtime.engine import Engine, GenerateRequest, LocalEngine

FLOOD = 20  # times the modest tenant's rate


async def ask(engine: LocalEngine, tenant: str, arguments: argparse.Namespace, generator: random.Random) -> float:
    """Send one request and return the seconds to its first token."""
    prompt = tuple(generator.randrange(10, 2000) for _ in range(arguments.prompt))
    params = SamplingParams(max_tokens=arguments.new_tokens, ignore_eos=True)
    start = time.perf_counter()
    first_s = 0.0
    async for _ in await engine.submit(GenerateRequest(prompt=prompt, sampling_params=params, tenant=tenant)):
        first_s = first_s or time.perf_counter() - start
    return first_s


async def flood(engine: LocalEngine, arguments: argparse.Namespace, generator: random.Random) -> None:
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(ask(engine, "flood", arguments, generator))
            await asyncio.sleep(generator.expovariate(FLOOD * arguments.rate))


async def measure(config: EngineConfig, arguments: argparse.Namespace, has_flood: bool) -> float:
    """Return the modest tenant's median TTFT in seconds."""
    engine = await Engine.start(config)
    generator = random.Random(1)
    try:
        await ask(engine, "modest", arguments, generator)  # warms up, and trains the cost model
        flooding = asyncio.create_task(flood(engine, arguments, generator)) if has_flood else None
        asked = []
        for _ in range(arguments.requests):
            await asyncio.sleep(1 / arguments.rate)
            asked.append(asyncio.create_task(ask(engine, "modest", arguments, generator)))
        first_s = await asyncio.gather(*asked)
        if flooding is not None:
            flooding.cancel()
            await asyncio.wait([flooding])
    finally:
        await engine.close()
    return statistics.median(first_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--policies", default="fair,fcfs")
    parser.add_argument("--target", type=int, default=150, help="itl_target_ms")
    arguments = parser.parse_args()
    config = EngineConfig(
        model=arguments.folder,
        weights="q8",
        kv_cache_dtype="int8",
        max_num_seqs=16,
        max_model_len=arguments.prompt + arguments.new_tokens,
        max_num_waiting=100_000,
        enable_prefix_caching=False,
        itl_target_ms=arguments.target,
    )
    alone_s = uvloop.run(measure(config, arguments, has_flood=False))
    print(f"alone      median TTFT {alone_s * 1e3:9.1f} ms", flush=True)
    for policy in arguments.policies.split(","):
        loaded_s = uvloop.run(
            measure(msgspec.structs.replace(config, scheduling_policy=policy), arguments, has_flood=True)
        )
        print(f"{policy:<10} median TTFT {loaded_s * 1e3:9.1f} ms, {loaded_s / alone_s:6.2f} x", flush=True)


if __name__ == "__main__":
    main()
