"""Measure the cost of a flood of texts to embed for decoding users, and the flood's share of the remaining time.

    python tests/bench/embedding_flood.py EMBEDDING_MODEL [--model FOLDER] [--users 16] [--targets 10,20] [--seconds 6]

The users decode on the bundled model, or on FOLDER; requests of 256 texts keep the encoder's queue full. For each
latency target there are three runs: users alone, texts alone, and both. The table has the users' inter-token latency
alone and beside the flood, its p99 relative to the target, texts per second, and two shares:
    of the target   texts beside / texts alone, over (target - the median latency of the users alone) / target
    of the rest     the same over the share of the time in which the steps of the users beside did not decode
Both models have weights in q8.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field

import uvloop
from quire import SamplingParams
from quire.runtime.common.config import EngineConfig
from quire.runtime.engine import EmbedRequest, Engine, GenerateRequest, LocalEngine
from quire.runtime.tools.percentiles import percentile

PROMPT_TOKENS = 128
REQUEST_TEXTS = 256
FLOOD_REQUESTS = 2  # concurrent requests
WARM_S = 1.0  # least time of each run, not counted
POLL_S = 0.05


@dataclass
class Run:
    """The shares of users and texts in some seconds."""

    seconds: float
    itls_s: list[float] = field(default_factory=list)
    num_texts: int = 0

    @property
    def texts_per_s(self) -> float:
        return self.num_texts / self.seconds


class Load:
    """Users and texts on one engine; both continue until `stop`."""

    def __init__(self, engine: LocalEngine, arguments: argparse.Namespace) -> None:
        self._engine = engine
        self._random = random.Random(1)
        self._arguments = arguments
        self._chunks: list[tuple[float, int]] = []  # times when texts were embedded, and their number
        self._readings: list[list[float]] = []  # arrival times of each request's tokens

    async def run(self, users: int, requests: int) -> Run:
        self._chunks = []
        self._readings = []
        tasks = [asyncio.create_task(self._read()) for _ in range(users)]
        tasks += [asyncio.create_task(self._flood()) for _ in range(requests)]
        await asyncio.sleep(WARM_S)
        while not all(self._readings):  # each user must have a token
            await asyncio.sleep(POLL_S)
        begin = time.perf_counter()
        await asyncio.sleep(self._arguments.seconds)
        end = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        pairs = itertools.chain.from_iterable(map(itertools.pairwise, self._readings))
        return Run(
            end - begin,
            [after - before for before, after in pairs if begin <= before and after <= end],
            sum(count for at, count in self._chunks if begin <= at <= end),
        )

    async def _read(self) -> None:
        params = SamplingParams(max_tokens=self._arguments.output_tokens, ignore_eos=True)
        while True:
            times: list[float] = []
            self._readings.append(times)
            prompt = self._tokens(PROMPT_TOKENS, self._engine.info.vocab_size)
            async for _ in await self._engine.submit(GenerateRequest(prompt=prompt, sampling_params=params)):
                times.append(time.perf_counter())

    async def _flood(self) -> None:
        info = self._engine.info.encoder
        assert info is not None, "there is an embedding model"
        while True:
            texts = [self._tokens(self._arguments.text_tokens, info.vocab_size) for _ in range(REQUEST_TEXTS)]
            async for chunk in await self._engine.embed(EmbedRequest(inputs=tuple(texts))):
                self._chunks.append((time.perf_counter(), len(chunk.values)))

    def _tokens(self, length: int, vocab_size: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(vocab_size), k=length))


async def measure(arguments: argparse.Namespace, target_ms: float) -> None:
    config = EngineConfig(
        model=arguments.model,
        embedding_model=arguments.embedding_model,
        weights="q8",
        max_num_seqs=arguments.users,
        enable_prefix_caching=False,
        itl_target_ms=target_ms,
    )
    engine = await Engine.start(config)
    load = Load(engine, arguments)
    try:
        users = await load.run(arguments.users, 0)
        texts = await load.run(0, FLOOD_REQUESTS)
        both = await load.run(arguments.users, FLOOD_REQUESTS)
    finally:
        await engine.close()
    if not (users.itls_s and texts.num_texts and both.itls_s):
        raise SystemExit(f"{arguments.seconds:g} s are too short for this machine; raise --seconds")
    target_s = target_ms / 1000
    decode_s = percentile(users.itls_s, 50)
    got = both.texts_per_s / texts.texts_per_s
    steps = len(both.itls_s) / arguments.users
    rest = 1 - steps * decode_s / both.seconds
    p99_s = percentile(both.itls_s, 99)
    print(
        f"target {target_ms:g} ms  ITL alone {_latency(users)}  beside {_latency(both)}"
        f" = {p99_s / target_s:.2f} x target  texts/s alone {texts.texts_per_s:.1f} beside {both.texts_per_s:.1f}"
        f"  share of the target {got / max(1e-9, 1 - decode_s / target_s):.0%} of the rest {got / rest:.0%}",
        flush=True,
    )


def _latency(run: Run) -> str:
    return "p50 {:.2f} p99 {:.2f} ms".format(*(1e3 * percentile(run.itls_s, percent) for percent in (50, 99)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("embedding_model")
    parser.add_argument("--model")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=1500)
    parser.add_argument("--targets", default="10,20")
    parser.add_argument("--text-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=6.0)
    arguments = parser.parse_args()
    for target in arguments.targets.split(","):
        uvloop.run(measure(arguments, float(target)))


if __name__ == "__main__":
    main()
