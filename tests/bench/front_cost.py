"""Measure what sockets and a separate engine process cost: `quire serve` against the engine alone, in turns.

usage: front_cost.py [--model DIR] [--users 32] [--prompt-tokens 128] [--new-tokens 64] [--rounds 5] [--requests 60]
                     [-- FLAGS OF BOTH]

Speed: tokens of all users per second, from when the last user has its first token until the first user has its last.
Time to first token: one short request at a time. The same code measures both as the consumer sees them: in the engine's
own process, and over a socket, where API server process, engine process and this client share the CPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence

import uvloop
from quire import AsyncClient, SamplingParams
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.settings import resolve_settings
from quire.runtime.common.types import OutputChunk
from quire.runtime.engine import Engine, GenerateRequest

Generate = Callable[[Sequence[int], SamplingParams], AsyncIterator[OutputChunk]]


async def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("flags", nargs="*")
    arguments = parser.parse_args()
    names = [flag.removeprefix("--").replace("-", "_") for flag in arguments.flags[::2]]
    flags = dict(zip(names, arguments.flags[1::2], strict=True))
    config = resolve_settings({"model": arguments.model, **flags}, {}).engine

    async with contextlib.AsyncExitStack() as stack:
        ways = {
            "engine": await stack.enter_async_context(engine(config)),
            "serve": await stack.enter_async_context(server(arguments.model, arguments.flags)),
            "serve --in-process": await stack.enter_async_context(
                server(arguments.model, [*arguments.flags, "--in-process"])
            ),
        }
        await report_speed(ways, arguments)
        await report_first_token(ways, arguments)


@contextlib.asynccontextmanager
async def engine(config: EngineConfig) -> AsyncIterator[Generate]:
    running = await Engine.start(config)

    async def generate(prompt: Sequence[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        async for chunk in await running.submit(GenerateRequest(prompt=tuple(prompt), sampling_params=params)):
            yield chunk

    try:
        yield generate
    finally:
        await running.close()


@contextlib.asynccontextmanager
async def server(model: str | None, flags: Sequence[str]) -> AsyncIterator[Generate]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "quire.runtime.cli.main", "serve", *([model] if model else [])),
        *("--port", "0", "--operator-port", "0", "--openai-port", "0", *flags),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "QUIRE_LOG_LEVEL": "error"},
    )
    assert process.stdout is not None
    try:
        ready = (await process.stdout.readline()).decode()
        async with AsyncClient(ready.split()[3]) as client:
            yield client.generate
    finally:
        process.terminate()
        await process.wait()


async def report_speed(ways: dict[str, Generate], arguments: argparse.Namespace) -> None:
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number, (name, generate) in itertools.product(range(arguments.rounds + 1), ways.items()):
        speed = await decode_speed(generate, arguments.users, arguments.prompt_tokens, arguments.new_tokens)
        if round_number:  # the first round warms up
            speeds[name].append(speed)
    alone = statistics.median(speeds["engine"])
    for name, measured in speeds.items():
        ratios = [speed / base for speed, base in zip(measured, speeds["engine"], strict=True)]
        print(
            f"{name:20} {statistics.median(measured):8.1f} tok/s, {statistics.median(measured) / alone:.3f} of the "
            f"engine alone; round by round {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


async def decode_speed(generate: Generate, users: int, prompt_tokens: int, new_tokens: int) -> float:
    arrivals: list[list[tuple[float, int]]] = [[] for _ in range(users)]

    async def user(times: list[tuple[float, int]]) -> None:
        # The extra tokens keep early users running until the last one has started.
        params = SamplingParams(max_tokens=new_tokens + users, ignore_eos=True)
        async for chunk in generate(random_prompt(prompt_tokens), params):
            times.append((time.perf_counter(), len(chunk.token_ids)))

    await asyncio.gather(*map(user, arrivals))
    begin = max(times[0][0] for times in arrivals)
    end = min(times[-1][0] for times in arrivals)
    tokens = sum(count for times in arrivals for moment, count in times if begin < moment <= end)
    return tokens / (end - begin)


async def report_first_token(ways: dict[str, Generate], arguments: argparse.Namespace) -> None:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _, (name, generate) in itertools.product(range(arguments.requests), ways.items()):
        prompt = random_prompt(16)
        start = time.perf_counter()
        async for _ in generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True)):
            times[name].append(time.perf_counter() - start)
            break
        await asyncio.sleep(0.02)
    alone = statistics.median(times["engine"])
    for name, measured in times.items():
        median = statistics.median(measured)
        print(f"{name:20} TTFT p50 {median * 1000:7.2f} ms, {(median - alone) * 1000:+.2f} ms", flush=True)


def random_prompt(num_tokens: int) -> list[int]:
    return [random.randrange(10, 4000) for _ in range(num_tokens)]


if __name__ == "__main__":
    uvloop.run(main())
