"""Random traffic at capacity for a long time: memory, descriptors, metric series and pages must stay flat.

usage: soak.py [--minutes 30] [--users 96] [--seed 1] [--sample-seconds 60] [-- FLAGS OF quire serve]

More users than places, each asks again once answered: prompts that nobody sent before, of any length, with any
sampling, several choices now and then; some leave early, some connections are new, some users are slow. Bystanders get
the same bytes throughout. Every sample is printed. The first quarter is warm-up; flat means that of the others, the
last third's median is not above the first third's by more than is allowed. Exit status 1 if not flat, or on a breach.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import string
import sys
import time
from collections.abc import Callable, Sequence
from random import Random
from statistics import median

import uvloop
from campaign import GROWTH_ALLOWED_BYTES, Report, bystanders
from quire import AsyncClient, SamplingParams
from quire.runtime.common.errors import QuireError
from served import Served, Vitals, served

WARM_UP = 1 / 4  # of the samples
LONGEST_PROMPT = 1500
VOCABULARY = 4096  # of the bundled model; ids of special tokens are as good as any
GROWTH_ALLOWED = 0.01
SERIES_ALLOWED = 5  # a label may be seen for the first time late


def main() -> int:
    options = _options()
    report, samples = Report(), list[Vitals]()
    with served(*options.flags) as server:
        uvloop.run(_soak(server, options, report, samples))
        if "Traceback" in (log := server.log()):
            report.breach(f"a traceback in the server's log: {log[log.index('Traceback') :][:2000]}")
    _judge(samples, report)
    status = report.print()
    print(f"{'verdict':<12} {'NOT flat, or a breach' if status else 'flat'}")
    return status


async def _soak(server: Served, options: argparse.Namespace, report: Report, samples: list[Vitals]) -> None:
    before = await server.settled()
    started, over = time.monotonic(), asyncio.Event()
    async with bystanders(server, report):
        users = [
            asyncio.create_task(_user(server, report, Random(f"{options.seed}:{index}"), over))
            for index in range(options.users)
        ]
        while (elapsed := time.monotonic() - started) < options.minutes * 60:
            await asyncio.sleep(min(options.sample_seconds, options.minutes * 60 - elapsed))
            samples.append(await asyncio.to_thread(server.vitals))
            print(f"{(time.monotonic() - started) / 60:6.1f} min  {samples[-1]}", flush=True)
            if not samples[-1].books_balance:
                report.breach(f"pages {samples[-1].pages} are not the {samples[-1].pages_total} there were")
        over.set()
        await asyncio.wait(users)
    after = await server.settled(before.descriptors)
    print(f"{'after':>10}  {after}")
    if after.descriptors > before.descriptors:
        report.breach(f"{before.descriptors} descriptors before, {after.descriptors} after")
    if after.live or after.pages["owned"]:
        report.breach(f"{after.live} requests are live and {after.pages['owned']} pages owned with nobody there")


async def _user(server: Served, report: Report, chance: Random, over: asyncio.Event) -> None:
    """One user after another, each with a connection for some requests."""
    while not over.is_set():
        try:
            async with AsyncClient(server.address) as client:
                for _ in range(chance.randrange(1, 20)):
                    if not over.is_set():
                        report.cases[await _ask(client, chance)] += 1
        except QuireError as error:
            report.breach(f"a connection that did nothing wrong ended in {error!r}")
            return


async def _ask(client: AsyncClient, chance: Random) -> str:
    """One request. What became of it, in a word."""
    leaves_after = chance.randrange(30) if chance.random() < 0.2 else None
    is_slow = chance.random() < 0.05
    stream = client.generate(_prompt(chance), _params(chance))
    try:
        async with contextlib.aclosing(stream) as chunks:
            received = 0
            async for chunk in chunks:
                received += 1
                if received == leaves_after and chunk.usage is None:
                    return "left"
                if is_slow:
                    await asyncio.sleep(0.1)
    except QuireError as error:
        if error.retryable:
            await asyncio.sleep(0.1)
        return error.code
    return chunk.finish_reason or "unfinished"


def _prompt(chance: Random) -> str | list[int]:
    length = int(LONGEST_PROMPT ** chance.random())
    if chance.random() < 0.5:
        return [chance.randrange(VOCABULARY) for _ in range(length)]
    return "".join(chance.choices(string.ascii_letters + " \n.:日é", k=length))


def _params(chance: Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=chance.randrange(1, 200),
        temperature=chance.choice((0.0, 0.7, 1.5)),
        top_p=chance.choice((1.0, 0.9)),
        seed=chance.choice((None, chance.getrandbits(64))),
        logprobs=chance.choice((None, None, 0, 5)),
        stop=chance.choice(((), ("the",), (".\n", "::"))),
        n=chance.choice((1, 1, 1, 1, 3)),
        repetition_penalty=chance.choice((1.0, 1.0, 1.2)),
    )


def _judge(samples: Sequence[Vitals], report: Report) -> None:
    """Compare thirds of what comes after warm-up."""
    steady = samples[int(len(samples) * WARM_UP) :]
    if len(steady) < 3:
        report.breach(f"{len(samples)} samples are too few to judge; run longer or sample more often")
        return
    third = len(steady) // 3
    measures: dict[str, tuple[Callable[[Vitals], int], float]] = {
        "front, bytes": (lambda vitals: vitals.front_rss, GROWTH_ALLOWED_BYTES),
        "engines, bytes": (lambda vitals: vitals.engines_rss, GROWTH_ALLOWED_BYTES),
        "descriptors": (lambda vitals: vitals.descriptors, 10),
        "series": (lambda vitals: vitals.series, SERIES_ALLOWED),
    }
    for name, (measure, allowed) in measures.items():
        first, last = (median(map(measure, part)) for part in (steady[:third], steady[-third:]))
        print(f"{name:<15} first third {first:14,.0f}  last third {last:14,.0f}  {last - first:+12,.0f}")
        if last - first > max(allowed, GROWTH_ALLOWED * first):
            report.breach(f"{name} grew from {first:,.0f} to {last:,.0f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--users", type=int, default=96, help="the server has 64 places unless told otherwise")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample-seconds", type=float, default=60)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of quire serve, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
