"""Ask a server for more models than its memory holds: every request is answered, or refused with a time.

Two generating models and an embedding model share a memory that holds two of them. A pinned model streams all the time,
once without loads and once while random requests of a Zipf mix load and unload the others. The run fails if a request
ends in another way, or if the engine processes take more memory than `models_memory`; it prints the gaps between the
tokens of the streams.

usage: python tests/fuzz/switch_models.py [--requests 200] [--model PATH] [--weights q8] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from quire.runtime.common.config import EngineConfig
from quire.runtime.engine.planned_engine import plan_engine
from server_process import descendants

QUIET_S = 5.0
SAMPLE_S = 0.02
STREAM_TOKENS = 400
CONCURRENCY = 4
MIB = 1 << 20


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--model", default="")
    parser.add_argument("--weights", default="q8")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    limit = models_memory(options.model, options.weights)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.toml"
        file.write_text(tables(options.model, options.weights, limit))
        command = [sys.executable, "-P", "-m", "quire.runtime.cli.main", "serve", "--config", str(file)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        ready = (await process.stdout.readline()).decode()
        print(ready.strip(), flush=True)
        try:
            await Campaign(ready, process.pid, limit, options.seed).run(options.requests)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


def models_memory(model: str, weights: str) -> int:
    """Return the memory of both generating models."""
    configs: list[Any] = [
        {"model": model or None, "weights": each, "kv_cache_memory": 64 * MIB} for each in (weights, "f32")
    ]
    return sum(plan_engine(EngineConfig(**config), 1 << 40).total_bytes for config in configs)


def tables(model: str, weights: str, limit: int) -> str:
    path = f"model = {json.dumps(model)}\n" if model else ""
    return f"""
port = 0
operator_port = 0
openai_port = 0
models_memory = {limit}
kv_cache_memory = "64MiB"
itl_target_ms = 100

[models.resident]
{path}weights = "{weights}"
load = "start"
pinned = true

[models.other]
{path}weights = "f32"

[models.search]
model = "demo_embedding"
"""


class Campaign:
    """Requests to one server, and what became of them."""

    def __init__(self, ready: str, pid: int, limit: int, seed: int) -> None:
        found = re.search(r"metrics (\S+)/metrics +api (\S+)", ready)
        assert found is not None, ready
        self.operators, self.api = found.groups()
        self.pid = pid
        self.limit = limit
        self.choose = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.gaps: dict[str, list[float]] = {"quiet": [], "loading": []}
        self.phase = "quiet"
        self.peak_bytes = 0

    async def run(self, num_requests: int) -> None:
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            background = [asyncio.create_task(self.stream(session)), asyncio.create_task(self.watch())]
            try:
                await asyncio.sleep(QUIET_S)
                self.phase = "loading"
                slots = asyncio.Semaphore(CONCURRENCY)
                names = self.choose.choices(["resident", "other", "search"], [1, 1 / 2, 1 / 3], k=num_requests)
                await asyncio.gather(*(self.ask(session, slots, name) for name in names))
                async with session.get(f"{self.operators}/models") as answer:
                    models = (await answer.json())["models"]
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
        self.report(models)

    async def ask(self, session: aiohttp.ClientSession, slots: asyncio.Semaphore, name: str) -> None:
        async with slots:
            path, body = "completions", {"prompt": "The module", "max_tokens": self.choose.randrange(1, 40)}
            if name == "search":
                path, body = "embeddings", {"input": "a text"}
            async with session.post(f"{self.api}/{path}", json={"model": name, **body}) as answer:
                await answer.read()
                with_time = "retry-after" in answer.headers
                self.outcomes[f"{answer.status}{' with a time' if with_time else ''}"] += 1

    async def stream(self, session: aiohttp.ClientSession) -> None:
        """Note the gaps between the events of one stream of the pinned model after the other."""
        body = {"model": "resident", "prompt": "def", "max_tokens": STREAM_TOKENS, "min_tokens": STREAM_TOKENS}
        while True:
            async with session.post(f"{self.api}/completions", json={**body, "stream": True}) as answer:
                last = None
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last is not None:
                            self.gaps[self.phase].append(now - last)
                        last = now

    async def watch(self) -> None:
        """Sample the memory of the processes below the server."""
        while True:
            engines = sum(map(resident_bytes, descendants(self.pid)))
            self.peak_bytes = max(self.peak_bytes, engines)
            await asyncio.sleep(SAMPLE_S)

    def report(self, models: list[dict[str, object]]) -> None:
        """Print the figures as JSON. Exits with an error for a request that was lost, or too much memory."""
        p99_ms = {phase: round(1000 * float(np.percentile(gaps, 99)), 2) for phase, gaps in self.gaps.items()}
        figures = {
            "outcomes": dict(self.outcomes),
            "models": [
                {key: each[key] for key in ("name", "loads", "evictions", "waits", "load_s")} for each in models
            ],
            "models_memory": self.limit,
            "peak_resident_bytes": self.peak_bytes,
            "p99_gap_ms": p99_ms,
            "ratio": round(p99_ms["loading"] / p99_ms["quiet"], 2),
        }
        print(json.dumps(figures, indent=1))
        if set(self.outcomes) - {"200", "429 with a time", "503 with a time"}:
            sys.exit("FAILED: a request was neither answered nor refused with a time")
        if self.peak_bytes > self.limit:
            sys.exit("FAILED: the engine processes took more memory than models_memory")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; pages that processes share count in equal parts."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    asyncio.run(main())
