"""Run an attack on a live server while bystander clients read their streams, and report the breaches.

Exit status 1 after any breach: a crash, a leak, a changed byte, a lost connection of a well-behaved client, or a
traceback in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import uvloop
from quire import AsyncClient, RequestOutput, SamplingParams
from quire.runtime.common.errors import Overloaded, QuireError
from server_process import MIB, ServerProcess, Vitals, start_server

BYSTANDER_REQUESTS = (
    ("This module provides", SamplingParams(max_tokens=120, temperature=0.8, seed=4, ignore_eos=True, logprobs=2)),
    ("If *timeout* is not ``None``, then", SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0)),
)
RETRY_S = 0.1
PING_EVERY_S = 0.05
NUM_SAMPLES = 12  # samples of the server's vitals, at equal intervals
MEMORY_EVERY_S = 0.5
MIN_SECONDS_FOR_MEMORY = 120  # least duration: in shorter runs allocators and caches are still filling
GROWTH_ALLOWED = 0.05  # growth of mean resident memory, from the second third of the run to the last, or:
GROWTH_ALLOWED_BYTES = 16 * MIB


@dataclass
class CampaignReport:
    """The results of a campaign."""

    cases: Counter[str] = field(default_factory=Counter)  # attacks by outcome
    breaches: list[str] = field(default_factory=list)
    rounds: Counter[str] = field(default_factory=Counter)  # requests of the bystanders by outcome
    memory: list[int] = field(default_factory=list)  # resident bytes of the server's processes, at equal intervals
    slowest_ping_s: float = 0.0
    slowest_wakeup_s: float = 0.0  # how late this process woke up: it shares the machine with the server

    def breach(self, text: str) -> None:
        """Record a breach, and print it at once: a campaign may be ended before its report."""
        self.breaches.append(text)
        print(f"breach: {text}", file=sys.stderr, flush=True)

    def check_log(self, server: ServerProcess) -> None:
        """Report a traceback in the server's log as a breach."""
        log = server.log()
        if "Traceback" in log:
            self.breach(f"a traceback in the server's log: {log[log.index('Traceback') :][:2000]}")

    def print(self) -> int:
        """Print the report and return the exit status."""
        for title, counts in (("cases", self.cases), ("bystanders", self.rounds)):
            outcomes = ", ".join(f"{name} {count}" for name, count in counts.most_common())
            print(f"{title:<12} {counts.total()}: {outcomes}")
        print(f"{'equal':<12} {'yes' if self.rounds['equal'] and not self.rounds['changed'] else 'NO'}")
        print(
            f"{'slowest PING':<12} {self.slowest_ping_s:.2f} s; this process was late by {self.slowest_wakeup_s:.2f} s"
        )
        print(f"{'breaches':<12} {len(self.breaches)}")
        for text in self.breaches[:20]:
            print(f"  {text}")
        return 1 if self.breaches else 0


Attack = Callable[[ServerProcess, CampaignReport, argparse.Namespace], Awaitable[None]]


def run(
    attack: Attack,
    parser: argparse.ArgumentParser,
    *,
    flags: Sequence[str] = (),
    token: str | None = None,
    most_bytes: float = math.inf,
    program: Sequence[str] = (),
    judge: Callable[[CampaignReport], None] = lambda _: None,
    level: Callable[[Sequence[int]], float] = mean,
) -> int:
    """Start a server, run `attack` for `--seconds` while bystanders read, print the report, return the exit status.

    `flags` are of quire serve; `token` is the bystanders' key. The attack may make the server's processes larger by
    `most_bytes`. In the last third of a long run their `level` must not exceed that of the second third.
    `program` is run instead of `quire`; `judge` adds to the report when it has ended.
    """
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of quire serve, after --")
    options = parser.parse_args()
    report = CampaignReport()
    with start_server(*flags, *options.flags, program=program) as server:
        uvloop.run(_run(server, attack, report, options, token))
        report.check_log(server)
    _check_memory(report, most_bytes, options.seconds, level)
    judge(report)
    return report.print()


async def _run(
    server: ServerProcess, attack: Attack, report: CampaignReport, options: argparse.Namespace, token: str | None
) -> None:
    before = await server.settled()
    print(f"{'before':<9} {before}")
    watching = asyncio.create_task(_watch_memory(server, report))
    async with bystanders(server, report, token):
        attacking = asyncio.ensure_future(attack(server, report, options))
        for number in range(1, NUM_SAMPLES + 1):
            await asyncio.wait([attacking], timeout=options.seconds / NUM_SAMPLES)
            if not server.is_alive:
                report.breach("the server died")
                return
            try:
                vitals: object = await asyncio.to_thread(server.vitals)
            except KeyError:  # metrics are missing while an engine is being replaced
                vitals = "an engine process was lost"
                report.breach(f"{vitals}; the log ends with {server.log()[-2000:]}")
            print(f"{options.seconds * number / NUM_SAMPLES:7.0f} s {vitals}", flush=True)
        attacking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attacking
    watching.cancel()
    after = await server.settled(before.descriptors)
    print(f"{'after':<9} {after}")
    check_settled(before, after, report)


async def attackers(script: str, *arguments: object) -> dict[str, Any]:
    """Run an attacking script of this folder in a separate process. Return its report: cases, breaches, cpu_s."""
    command = (sys.executable, Path(__file__).with_name(script), *arguments)
    process = await asyncio.create_subprocess_exec(*map(str, command), stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    lines = output.decode().splitlines()
    return dict(json.loads(lines[-1])) if lines else {"cases": {}, "breaches": ["the attackers crashed"], "cpu_s": 0.0}


def check_settled(before: Vitals, after: Vitals, report: CampaignReport) -> None:
    """Report the resources that the server still holds after all clients have left."""
    if after.descriptors > before.descriptors:
        report.breach(f"{before.descriptors} descriptors before, {after.descriptors} after")
    if after.live or after.pages["owned"]:
        report.breach(f"{after.live} live requests and {after.pages['owned']} owned pages are left without a client")
    if not after.pages_balance:
        report.breach(f"pages {after.pages} do not add up to {after.pages_total}")


async def _watch_memory(server: ServerProcess, report: CampaignReport) -> None:
    while True:
        report.memory.append(await asyncio.to_thread(server.rss))
        await asyncio.sleep(MEMORY_EVERY_S)


def quietest(samples: Sequence[int]) -> float:
    """Return the value that a tenth of the samples stay below: the memory between large requests."""
    return sorted(samples)[len(samples) // 10]


def _check_memory(
    report: CampaignReport, most_bytes: float, seconds: float, level: Callable[[Sequence[int]], float]
) -> None:
    """Compare the measurements with the limit, and the last third of the run with the second one."""
    length = len(report.memory) // 3
    if not length:
        return
    before = report.memory[0]
    most = max(report.memory)
    parts = [report.memory[start : start + length] for start in (0, length, 2 * length)]
    thirds = [level(part) for part in parts]
    means, quiet = (", ".join(f"{each(part) / MIB:.0f}" for part in parts) for each in (mean, quietest))
    print(
        f"{'memory':<12} {before / MIB:.0f} MiB before; in the thirds of the run {means}, in the quietest tenth of "
        f"each {quiet}, at most {most / MIB:.0f}"
    )
    if most - before > most_bytes:
        report.breach(f"memory: at most {most_bytes / MIB:.0f} MiB more than before are allowed")
    growth = max(GROWTH_ALLOWED_BYTES, GROWTH_ALLOWED * thirds[1])
    if seconds >= MIN_SECONDS_FOR_MEMORY and thirds[2] - thirds[1] > growth:
        report.breach("memory: the last third of the run has more than the second")


@asynccontextmanager
async def bystanders(server: ServerProcess, report: CampaignReport, token: str | None = None) -> AsyncIterator[None]:
    """Run clients that repeat the same requests and expect the same answers. Entered after their first answers."""
    async with contextlib.AsyncExitStack() as stack:
        tasks = []
        for prompt, params in BYSTANDER_REQUESTS:
            client = await stack.enter_async_context(AsyncClient(server.address, token))
            first = await client.complete(prompt, params)
            tasks.append(asyncio.create_task(_repeat(client, prompt, params, first, report)))
        tasks.append(asyncio.create_task(_ping(client, report)))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _repeat(
    client: AsyncClient, prompt: str, params: SamplingParams, first: RequestOutput, report: CampaignReport
) -> None:
    while True:
        started = time.perf_counter()
        try:
            answer = await client.complete(prompt, params)
        except Overloaded:
            report.rounds["refused, retried"] += 1
            await asyncio.sleep(RETRY_S)
            continue
        except QuireError as error:
            report.breach(f"a bystander's request ended in {error!r} after {time.perf_counter() - started:.1f} s")
            return
        equal = answer.outputs == first.outputs
        report.rounds["equal" if equal else "changed"] += 1
        if not equal:
            report.breach(f"a bystander got {answer.text!r}, not {first.text!r}")


async def _ping(client: AsyncClient, report: CampaignReport) -> None:
    while True:
        report.slowest_ping_s = max(report.slowest_ping_s, await client.ping())
        asleep_since = time.perf_counter()
        await asyncio.sleep(PING_EVERY_S)
        report.slowest_wakeup_s = max(report.slowest_wakeup_s, time.perf_counter() - asleep_since - PING_EVERY_S)
