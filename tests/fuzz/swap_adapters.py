"""Load and evict 200 adapters under traffic: every answer is that of its adapter alone, and memory stays flat.

usage: python -m tests.fuzz.swap_adapters [--adapters 200] [--places 8] [--users 4] [--seconds 300] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from quire.runtime.cli.local_server import local_server

from tests.support.adapters import write_adapter

MOST_GROWTH_BYTES = 16 << 20  # growth of all processes after the first third of the time
PROMPT = "This module provides"


class Campaign:
    """One server, its operator and its users."""

    def __init__(self, url: str, paths: Sequence[str], options: argparse.Namespace) -> None:
        self.counts: Counter[str] = Counter()
        self.sizes: list[int] = []  # resident bytes, by second
        self._url = url
        self._paths = paths
        self._choose = random.Random(options.seed)
        self._seconds = options.seconds
        self._users = options.users
        self._texts: dict[int, str] = {}  # adapter -> its first answer
        self._end = 0.0
        self._served: set[int] = set()

    async def run(self) -> None:
        self._end = time.monotonic() + self._seconds
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(
                self._operate(session), self._measure(), *(self._use(session) for _ in range(self._users))
            )
        self.counts["adapters"] = len(self._texts)

    async def _operate(self, session: aiohttp.ClientSession) -> None:
        """Load all adapters in turn; then unload and load random ones."""
        for number, path in enumerate(self._paths):
            await self._load(session, number, path)
        while time.monotonic() < self._end:
            number = self._choose.choice(sorted(self._served))
            self._served.discard(number)
            body = {"lora_name": f"adapter-{number}"}
            async with session.post(f"{self._url}/unload_lora_adapter", json=body) as reply:
                assert reply.status == 200, await reply.text()
            await self._load(session, number, self._paths[number])

    async def _load(self, session: aiohttp.ClientSession, number: int, path: str) -> None:
        body = {"lora_name": f"adapter-{number}", "lora_path": path}
        while True:
            async with session.post(f"{self._url}/load_lora_adapter", json=body) as reply:
                text = await reply.text()
            if reply.status != 429:
                break
            self.counts["refused loads"] += 1
            await asyncio.sleep(float(reply.headers["retry-after"]))
        assert reply.status == 200, text
        self.counts["loads"] += 1
        self._served.add(number)

    async def _use(self, session: aiohttp.ClientSession) -> None:
        while time.monotonic() < self._end:
            if not self._served:
                await asyncio.sleep(0.05)
                continue
            served = sorted(self._served)
            number = served[min(int(self._choose.paretovariate(0.7)) - 1, len(served) - 1)]
            body = {"model": f"adapter-{number}", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            async with session.post(f"{self._url}/completions", json=body) as reply:
                answer = await reply.json()
            self.counts[f"status {reply.status}"] += 1
            if reply.status == 200:
                text = answer["choices"][0]["text"]
                assert self._texts.setdefault(number, text) == text, f"adapter {number} has changed its answer"
            else:
                # 404 or "no loaded adapter": unloaded meanwhile; 429: no place
                assert reply.status in (404, 429) or "is no loaded adapter" in answer["error"]["message"], answer
                await asyncio.sleep(0.1)

    async def _measure(self) -> None:
        while time.monotonic() < self._end:
            self.sizes.append(sum(map(_resident_bytes, _descendants())))
            await asyncio.sleep(1)


def _descendants() -> list[int]:
    """Return the processes that this one has started, and theirs."""
    found: list[int] = []
    unseen = ["self"]
    while unseen:
        for children in Path(f"/proc/{unseen.pop()}/task").glob("*/children"):
            for pid in children.read_text().split():
                found.append(int(pid))
                unseen.append(pid)
    return found


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("adapters", 200), ("places", 8), ("users", 4), ("seconds", 300), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        paths = [write_adapter(folder / str(seed), seed) for seed in range(options.adapters)]
        flags = (f"--max-loras={options.places}", "--max-lora-rank=16", "--kv-cache-memory=64MiB")
        async with local_server(*flags) as server:
            campaign = Campaign(server.api_url, paths, options)
            await campaign.run()
    finally:
        shutil.rmtree(folder)
    sizes = campaign.sizes
    before, after = max(sizes[: len(sizes) // 3]), max(sizes[len(sizes) // 3 :])
    print(dict(campaign.counts))
    print(f"resident: {before / 2**20:.1f} MiB in the first third, {after / 2**20:.1f} MiB later")
    if after - before > MOST_GROWTH_BYTES:
        sys.exit("FAILED: memory grows")


if __name__ == "__main__":
    asyncio.run(main())
