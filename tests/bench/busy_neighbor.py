"""Measure what another busy process costs: decode speed alone and with a process that spins, alternating.

usage: busy_neighbor.py [MODEL] [--weights q8] [--users 1,8] [--repeats 5]

With a share s of the CPUs taken, a step should take 1 / (1 - s) times as long. If it takes longer, ops wait for
threads that do not run.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire import LLM
from quire.runtime.tools.bench.speed import Shape, time_decode

PROMPT_TOKENS = 16
NEW_TOKENS = 64
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--weights", default="q8")
    parser.add_argument("--users", default="1,8")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with LLM(arguments.model, weights=arguments.weights, kv_cache_memory=1 << 30, enable_prefix_caching=False) as llm:
        capacity = llm.engine.core.runner.capacity
        print(f"{capacity.isa}, {capacity.cpus.threads} threads; medians of {arguments.repeats}")
        for users in map(int, arguments.users.split(",")):
            print(compare(llm, users, arguments.repeats), flush=True)


def compare(llm: LLM, users: int, repeats: int) -> str:
    shape = Shape(users, PROMPT_TOKENS)
    generator = random.Random(1)
    time_decode(llm, generator, shape, NEW_TOKENS)
    alone = []
    loaded = []
    taken = []
    for _ in range(repeats):
        alone.append(time_decode(llm, generator, shape, NEW_TOKENS).tokens_per_s)
        with spinning() as neighbor:
            before = cpu_seconds(neighbor)
            start = time.monotonic()
            loaded.append(time_decode(llm, generator, shape, NEW_TOKENS).tokens_per_s)
            taken.append((cpu_seconds(neighbor) - before) / (time.monotonic() - start))
    share = statistics.median(taken) / llm.engine.core.runner.capacity.cpus.threads
    quiet = statistics.median(alone)
    busy = statistics.median(loaded)
    return (
        f"{users:3d} users: {quiet:8.1f} tok/s alone, {busy:8.1f} with a busy process: "
        f"slower by {quiet / busy:.2f}x; it took {share:.0%} of the CPUs, which explains {1 / (1 - share):.2f}x"
    )


@contextmanager
def spinning() -> Iterator[int]:
    """Run a process that keeps a CPU busy, and give its id."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


if __name__ == "__main__":
    main()
