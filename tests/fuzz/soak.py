"""Send random traffic at capacity for a long time: memory, descriptors, metric series and pages must stay flat.

usage: soak.py [--minutes 30] [--users 96] [--seed 1] [--sample-seconds 60] [-- FLAGS OF quire serve]

There are more users than sequence slots, and each sends its next request when the last one has ended: random prompts of
any length, random sampling parameters, at times several choices. Some users cancel, some read slowly, some grant credit
token by token, some leave in mid-stream and may resume; bystanders must get the same bytes throughout. Every sample is
printed. The first quarter is warm-up. Flat means that the median of the last third of the rest exceeds that of the
first third by at most 2 % for the resident memory of each process, and by no more than a few descriptors, threads and
metric series. Exit status 1 if not flat, or on a breach.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import string
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from statistics import median

import msgspec
import uvloop
from campaign import CampaignReport, bystanders, check_settled
from quire import AsyncClient, SamplingParams
from quire.runtime.common.errors import QuireError
from quire.runtime.protocol.frames import Credit, Done, Error, Generate, Resume, Tokens
from server_process import RawClient, ServerProcess, Vitals, start_server

WARM_UP = 1 / 4  # share of the samples
LONGEST_PROMPT = 1500
VOCAB_SIZE = 4096  # vocabulary of the bundled model
GROWTH_ALLOWED = 0.02  # growth of resident memory
FILES_ALLOWED = 10  # open connections differ from sample to sample
THREADS_ALLOWED = 4
SERIES_ALLOWED = 5  # a label value may first appear late
TRICKLERS, LEAVERS = 1 / 16, 1 / 16  # shares of the users


def main() -> int:
    options = _options()
    report = CampaignReport()
    samples: list[Vitals] = []
    with start_server(*options.flags) as server:
        uvloop.run(_soak(server, options, report, samples))
        report.check_log(server)
    _judge(samples, report)
    status = report.print()
    print(f"{'verdict':<12} {'NOT flat, or a breach' if status else 'flat'}")
    return status


User = Callable[[ServerProcess, CampaignReport, Random, asyncio.Event], Awaitable[None]]


async def _soak(
    server: ServerProcess, options: argparse.Namespace, report: CampaignReport, samples: list[Vitals]
) -> None:
    before = await server.settled()
    started = time.monotonic()
    over = asyncio.Event()
    async with bystanders(server, report):
        users = [
            asyncio.create_task(_kind(index, options.users)(server, report, Random(f"{options.seed}:{index}"), over))
            for index in range(options.users)
        ]
        while (elapsed := time.monotonic() - started) < options.minutes * 60:
            await asyncio.sleep(min(options.sample_seconds, options.minutes * 60 - elapsed))
            samples.append(await asyncio.to_thread(server.vitals))
            print(f"{(time.monotonic() - started) / 60:6.1f} min  {samples[-1]}", flush=True)
            if not samples[-1].pages_balance:
                report.breach(f"pages {samples[-1].pages} do not add up to {samples[-1].pages_total}")
        over.set()
        await asyncio.wait(users)
    after = await server.settled(before.descriptors)
    print(f"{'after':>10}  {after}")
    check_settled(before, after, report)


def _kind(index: int, users: int) -> User:
    """Return the behavior of the user with this number."""
    if index < TRICKLERS * users:
        return _trickler
    return _leaver if index < (TRICKLERS + LEAVERS) * users else _user


async def _trickler(server: ServerProcess, report: CampaignReport, rng: Random, over: asyncio.Event) -> None:
    """Grant the credit for a stream token by token; now and then stop, so that the server has to end the request."""
    while not over.is_set():
        client = await RawClient.open(server.endpoint)
        try:
            for request_id in range(rng.randrange(1, 5)):
                params = msgspec.structs.replace(_params(rng), logprobs=20, n=1)
                client.send(Generate(request_id, _prompt(rng), params, credit=1, resumable=rng.random() < 0.5))
                gives_up_after = rng.choice((5, 50, 500))
                for _ in range(gives_up_after):
                    frame = await client.receive()
                    if frame is None or isinstance(frame, Done | Error):
                        break
                    await asyncio.sleep(rng.choice((0, 0.1)))
                    if isinstance(frame, Tokens):
                        client.send(Credit(request_id, 1))
                report.cases["trickled"] += 1
        finally:
            client.abort()


async def _leaver(server: ServerProcess, report: CampaignReport, rng: Random, over: asyncio.Event) -> None:
    """Leave streams before their end, and resume some of them on another connection."""
    session = None
    while not over.is_set():
        client = await RawClient.open(server.endpoint, session=session)
        if session is not None and rng.random() < 0.5:
            client.send(Resume(0, 0))
        else:
            key = f"key {rng.getrandbits(64)}" if rng.random() < 0.5 else None
            client.send(Generate(0, _prompt(rng), _params(rng), resumable=True, idempotency_key=key))
        session = client.welcome.session if client.welcome else None
        for _ in range(rng.randrange(60)):
            frame = await client.receive()
            if frame is None or isinstance(frame, Done | Error):
                break
        report.cases["left"] += 1
        client.abort()
        await asyncio.sleep(rng.random())


async def _user(server: ServerProcess, report: CampaignReport, rng: Random, over: asyncio.Event) -> None:
    """Send requests until the soak is over, over a new connection every few requests."""
    while not over.is_set():
        try:
            async with AsyncClient(server.address) as client:
                for _ in range(rng.randrange(1, 20)):
                    if not over.is_set():
                        report.cases[await _ask(client, rng)] += 1
        except QuireError as error:
            report.breach(f"a well-behaved connection ended in {error!r}")
            return


async def _ask(client: AsyncClient, rng: Random) -> str:
    """Send one request and return the outcome in a word."""
    cancel_after = rng.randrange(30) if rng.random() < 0.2 else None
    is_slow = rng.random() < 0.05
    stream = client.generate(_prompt(rng), _params(rng))
    try:
        async with contextlib.aclosing(stream) as chunks:
            received = 0
            async for chunk in chunks:
                received += 1
                if received == cancel_after and chunk.usage is None:
                    return "cancelled"
                if is_slow:
                    await asyncio.sleep(0.1)
    except QuireError as error:
        if error.retryable:
            await asyncio.sleep(0.1)
        return error.code
    return chunk.finish_reason or "unfinished"


def _prompt(rng: Random) -> str | list[int]:
    length = int(LONGEST_PROMPT ** rng.random())
    if rng.random() < 0.5:
        return [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    return "".join(rng.choices(string.ascii_letters + " \n.:日é", k=length))


def _params(rng: Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randrange(1, 200),
        temperature=rng.choice((0.0, 0.7, 1.5)),
        top_p=rng.choice((1.0, 0.9)),
        seed=rng.choice((None, rng.getrandbits(64))),
        logprobs=rng.choice((None, None, 0, 5)),
        stop=rng.choice(((), ("the",), (".\n", "::"))),
        n=rng.choice((1, 1, 1, 1, 3)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
    )


def _judge(samples: Sequence[Vitals], report: CampaignReport) -> None:
    """Compare the first and the last third of the samples after warm-up."""
    steady = samples[int(len(samples) * WARM_UP) :]
    if len(steady) < 3:
        report.breach(f"{len(samples)} samples are too few to judge; run longer or sample more often")
        return
    third = len(steady) // 3
    measures: dict[str, tuple[Callable[[Vitals], int], float, float]] = {  # allowed: share of the first third, and more
        "server, bytes": (lambda vitals: vitals.server_rss, GROWTH_ALLOWED, 0),
        "engines, bytes": (lambda vitals: vitals.engines_rss, GROWTH_ALLOWED, 0),
        "descriptors": (lambda vitals: vitals.descriptors, 0, FILES_ALLOWED),
        "threads": (lambda vitals: vitals.threads, 0, THREADS_ALLOWED),
        "series": (lambda vitals: vitals.series, 0, SERIES_ALLOWED),
    }
    for name, (measure, share, number) in measures.items():
        first, last = (median(map(measure, part)) for part in (steady[:third], steady[-third:]))
        growth = last - first
        print(
            f"{name:<15} first third {first:14,.0f}  last third {last:14,.0f}  {growth:+12,.0f} {growth / first:+7.2%}"
        )
        if growth > share * first + number:
            report.breach(f"{name} grew from {first:,.0f} to {last:,.0f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--users", type=int, default=96, help="by default the server has 64 sequence slots")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample-seconds", type=float, default=60)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of quire serve, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
