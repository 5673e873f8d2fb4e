"""Hostility beside bystanders: run it, then say what it did to the server and to them.

It must not know what the hostility is. One invariant: a campaign that saw a breach of the promises (a crash, a leak, a
changed byte, a lost connection of who did nothing wrong, a traceback in the log) ends with exit status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvloop
from quire import AsyncClient, RequestOutput, SamplingParams
from quire.runtime.common.errors import Overloaded, QuireError
from served import MIB, Served, Vitals, served

WANTED = (  # by the bystanders
    ("This module provides", SamplingParams(max_tokens=120, temperature=0.8, seed=4, ignore_eos=True, logprobs=2)),
    ("If *timeout* is not ``None``, then", SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0)),
)
RETRY_S = 0.1
PING_EVERY_S = 0.05
LOOKS = 12  # at the server, in equal times
JUDGED_S = 120  # shorter runs say nothing about memory: allocators and caches are still filling
GROWTH_ALLOWED = 0.05  # of the peak of resident memory, from the first half of the run to the second, or:
GROWTH_ALLOWED_BYTES = 16 * MIB


@dataclass
class Report:
    cases: Counter[str] = field(default_factory=Counter)  # by what became of them
    breaches: list[str] = field(default_factory=list)
    rounds: Counter[str] = field(default_factory=Counter)  # of the bystanders
    slowest_ping_s: float = 0.0
    slowest_self_s: float = 0.0  # this process, which shares the machine with the server, woke up so much too late

    def breach(self, text: str) -> None:
        self.breaches.append(text)

    def print(self) -> int:
        """The exit status."""
        for title, counts in (("cases", self.cases), ("bystanders", self.rounds)):
            told = ", ".join(f"{name} {count}" for name, count in counts.most_common())
            print(f"{title:<12} {counts.total()}: {told}")
        print(f"{'equal':<12} {'yes' if self.rounds['equal'] and not self.rounds['changed'] else 'NO'}")
        print(f"{'slowest PING':<12} {self.slowest_ping_s:.2f} s; this process was late by {self.slowest_self_s:.2f} s")
        print(f"{'breaches':<12} {len(self.breaches)}")
        for text in self.breaches[:20]:
            print(f"  {text}")
        return 1 if self.breaches else 0


Hostility = Callable[[Served, Report, argparse.Namespace], Awaitable[None]]


def run(hostility: Hostility, parser: argparse.ArgumentParser) -> int:
    """Start a server, let `hostility` run for `--seconds` beside bystanders, print the figures. The exit status."""
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of quire serve, after --")
    options = parser.parse_args()
    report = Report()
    with served(*options.flags) as server:
        uvloop.run(_campaign(server, hostility, report, options))
        if "Traceback" in (log := server.log()):
            report.breach(f"a traceback in the server's log: {log[log.index('Traceback') :][:2000]}")
    return report.print()


async def _campaign(server: Served, hostility: Hostility, report: Report, options: argparse.Namespace) -> None:
    before = await server.settled()
    print(f"{'before':<9} {before}")
    looks: list[Vitals] = []
    async with bystanders(server, report):
        hostile = asyncio.ensure_future(hostility(server, report, options))
        for number in range(1, LOOKS + 1):
            await asyncio.wait([hostile], timeout=options.seconds / LOOKS)
            if not server.is_alive:
                report.breach("the server died")
                return
            looks.append(await asyncio.to_thread(server.vitals))
            print(f"{options.seconds * number / LOOKS:7.0f} s {looks[-1]}", flush=True)
        hostile.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hostile
    after = await server.settled(before.descriptors)
    print(f"{'after':<9} {after}")
    _compare(before, after, report)
    if options.seconds >= JUDGED_S:
        _compare_memory(looks, report)


def _compare(before: Vitals, after: Vitals, report: Report) -> None:
    if after.descriptors > before.descriptors:
        report.breach(f"{before.descriptors} descriptors before, {after.descriptors} after")
    if after.live or after.pages["owned"]:
        report.breach(f"{after.live} requests are live and {after.pages['owned']} pages owned with nobody there")
    if not after.books_balance:
        report.breach(f"pages {after.pages} are not the {after.pages_total} there were")


def _compare_memory(looks: list[Vitals], report: Report) -> None:
    """The peaks of both halves: what grows with every case is higher in the second."""
    first, second = (max(look.rss for look in half) for half in (looks[: LOOKS // 2], looks[LOOKS // 2 :]))
    if second - first > max(GROWTH_ALLOWED_BYTES, GROWTH_ALLOWED * first):
        report.breach(f"resident memory was at most {first / MIB:.1f} MiB, then {second / MIB:.1f} MiB")


@asynccontextmanager
async def bystanders(server: Served, report: Report) -> AsyncIterator[None]:
    """Users who ask the same again and again, each on a connection; entered after their first answers."""
    async with contextlib.AsyncExitStack() as stack:
        tasks = []
        for prompt, params in WANTED:
            client = await stack.enter_async_context(AsyncClient(server.address))
            first = await client.complete(prompt, params)
            tasks.append(asyncio.create_task(_ask_again(client, prompt, params, first, report)))
        tasks.append(asyncio.create_task(_ping_again(client, report)))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _ask_again(
    client: AsyncClient, prompt: str, params: SamplingParams, first: RequestOutput, report: Report
) -> None:
    while True:
        started = time.perf_counter()
        try:
            answer = await client.complete(prompt, params)
        except Overloaded:
            report.rounds["told to come back"] += 1
            await asyncio.sleep(RETRY_S)
            continue
        except QuireError as error:
            report.breach(f"a bystander's request ended in {error!r} after {time.perf_counter() - started:.1f} s")
            return
        equal = answer.outputs == first.outputs
        report.rounds["equal" if equal else "changed"] += 1
        if not equal:
            report.breach(f"a bystander got {answer.text!r}, not {first.text!r}")


async def _ping_again(client: AsyncClient, report: Report) -> None:
    while True:
        report.slowest_ping_s = max(report.slowest_ping_s, await client.ping())
        asleep_since = time.perf_counter()
        await asyncio.sleep(PING_EVERY_S)
        report.slowest_self_s = max(report.slowest_self_s, time.perf_counter() - asleep_since - PING_EVERY_S)
