"""Attack one server in all ways at once while two other tenants use it, and check that these are not affected.

usage: attack.py [--seconds 120] [--quiet-seconds 30] [--seed 1] [-- FLAGS OF quire serve]

The server has TLS, keys for three tenants and a snapshot file. Two tenants, the bystanders, repeat streams of known
output, lose connections and resume, retry with idempotency keys, open new connections and probe the operator port. The
third first sends ordinary requests (quiet), then attacks (attackers.py, in a process of low priority). At the end the
engine is killed twice under the attack, and once more while it writes the snapshot.

Exit status 1 unless the bystanders' bytes are unchanged, their p99 inter-token latency is at most 1.5 times that of the
quiet phase, each promise to keep a stream or a key is kept, new connections and probes are answered within 2 s, memory
stays within its budget, and descriptors, threads, requests and pages return to what they were.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop
from campaign import CampaignReport, attackers, check_settled
from quire import AsyncClient, RequestOutput, SamplingParams
from quire.runtime.common.errors import QuireError
from quire.runtime.protocol.frames import Accepted, Done, Error, Generate, Resume, Tokens
from quire.runtime.tools.percentiles import percentiles
from server_process import MIB, Endpoint, RawClient, ServerProcess, start_server

HERE = Path(__file__).parent
TLS = HERE.parent / "data" / "tls"
TENANTS = ("ada", "bob", "eve")  # the last one attacks
KEPT_S = 15.0  # resume timeout
PINNED_SHARE = 0.3
VARIABLES = {  # settings without a flag: small budgets and short times, so that a short run reaches them
    "QUIRE_RESUME_TIMEOUT_MS": f"{KEPT_S * 1000:.0f}",
    "QUIRE_IDEMPOTENCY_WINDOW_MS": "60000",
    "QUIRE_MAX_KEPT_BYTES": str(16 * MIB),
    "QUIRE_MAX_UNSENT_BYTES": str(16 * MIB),
    "QUIRE_CREDIT_TIMEOUT_MS": "5000",
    "QUIRE_HANDSHAKE_TIMEOUT_MS": "5000",
    "QUIRE_FRAME_TIMEOUT_MS": "5000",
    "QUIRE_WRITE_TIMEOUT_MS": "5000",
}
STREAMS = (
    ("This module provides", SamplingParams(max_tokens=300, temperature=0.8, seed=4, ignore_eos=True, logprobs=2)),
    ("If *timeout* is not ``None``, then", SamplingParams(max_tokens=200, ignore_eos=True)),
)
MAX_ITL_RATIO = 1.5
ANSWER_S = 2.0  # limit for new connections and probes
GIVE_UP_S = 60.0
KILL_PAUSE_S = 12.0  # pause in which streams continue in another engine and end


@dataclass
class Observations:
    """The results of the bystanders in one phase."""

    gaps_s: list[float] = field(default_factory=list)  # gaps between two chunks of a stream
    streams: int = 0
    promises: int = 0  # streams resumed and keys retried
    connects_s: list[float] = field(default_factory=list)
    probes_s: list[float] = field(default_factory=list)
    unready: int = 0  # probes that were answered with 503
    problems: list[str] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        return float(percentiles(self.gaps_s, (99,))[0]) if self.gaps_s else float("nan")

    def __str__(self) -> str:
        return (
            f"streams {self.streams}, inter-token p99 {1000 * self.p99_s:.1f} ms, promises kept {self.promises}, "
            f"slowest connection {max(self.connects_s, default=0):.2f} s, slowest probe "
            f"{max(self.probes_s, default=0):.2f} s, problems {len(self.problems)}"
        )


class Bystanders:
    """The clients of two tenants. `during` runs them and returns their observations."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoints = [replace(endpoint, token=f"key of {tenant}") for tenant in TENANTS[:2]]
        self._expected: dict[str, RequestOutput] = {}
        self._seen = Observations()

    async def learn(self) -> None:
        """Record the outputs that every later stream must repeat. Make the server start its helper threads."""
        async with self._client(0) as client:
            short = SamplingParams(max_tokens=1)
            await asyncio.gather(*(client.complete(f"{index} " * 800, short) for index in range(32)))
            self._expected = {prompt: await client.complete(prompt, params) for prompt, params in STREAMS}

    @asynccontextmanager
    async def during(self) -> AsyncIterator[Observations]:
        seen = self._seen = Observations()
        tasks = [asyncio.create_task(self._repeat(tenant, *stream)) for tenant in (0, 1) for stream in STREAMS]
        jobs = (self._connect, self._probe, self._resume_and_retry)
        tasks += [asyncio.create_task(self._watch(job)) for job in jobs]
        try:
            yield seen
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _client(self, tenant: int) -> AsyncClient:
        endpoint = self._endpoints[tenant]
        return AsyncClient(endpoint.address, endpoint.token, endpoint.tls or False)

    async def _repeat(self, tenant: int, prompt: str, params: SamplingParams) -> None:
        """Read one stream repeatedly; note each gap between chunks, and every difference."""
        expected = self._expected[prompt].outputs[0]
        async with self._client(tenant) as client:
            while True:
                tokens: list[int] = []
                text = ""
                last_s = 0.0
                try:
                    async for chunk in client.generate(prompt, params):
                        now = time.perf_counter()
                        if last_s and chunk.token_ids:
                            self._seen.gaps_s.append(now - last_s)
                        last_s = now
                        tokens += chunk.token_ids
                        text += chunk.text
                except QuireError as error:
                    self._seen.problems.append(f"a stream of {TENANTS[tenant]} ended in {error!r}")
                    await asyncio.sleep(1)
                    continue
                self._seen.streams += 1
                if (tuple(tokens), text) != (expected.token_ids, expected.text):
                    self._seen.problems.append(f"a stream of {TENANTS[tenant]} has other bytes")

    async def _watch(self, job: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                async with asyncio.timeout(GIVE_UP_S):
                    await job()
            except (OSError, QuireError, TimeoutError, EOFError) as error:
                self._seen.problems.append(f"{job.__name__.strip('_')}: {error!r}")
            await asyncio.sleep(1)

    async def _connect(self) -> None:
        started = time.perf_counter()
        async with self._client(1) as client:
            await client.ping()
        self._seen.connects_s.append(time.perf_counter() - started)

    async def _probe(self) -> None:
        for path in ("/readyz", "/metrics"):
            started = time.perf_counter()
            try:
                await asyncio.to_thread(_get, self._endpoints[0].metrics_url.replace("/metrics", path))
            except urllib.error.HTTPError:
                self._seen.unready += 1
            finally:
                self._seen.probes_s.append(time.perf_counter() - started)

    async def _resume_and_retry(self) -> None:
        """Lose the connection after the end of a resumable stream, resume it before its time is over, then retry."""
        key = f"bystander {time.monotonic_ns()}"
        params = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)  # a random seed: a rerun differs
        first = await RawClient.open(self._endpoints[1])
        first.send(Generate(1, "This module", params, resumable=True, idempotency_key=key))
        tokens, is_promised = await _tokens(first)
        session = first.welcome.session if first.welcome else None
        first.abort()
        await asyncio.sleep(0.7 * KEPT_S)
        second = await RawClient.open(self._endpoints[1], session=session)
        second.send(Resume(1, 0))
        resumed, _ = await _tokens(second)
        second.send(Generate(2, "This module", params, idempotency_key=key))
        retried, _ = await _tokens(second)
        second.abort()
        if not is_promised:
            self._seen.problems.append("a tenant within its share may not resume")
        for what, found in (("resumed", resumed), ("retried", retried)):
            if found == tokens:
                self._seen.promises += 1
            else:
                self._seen.problems.append(f"a {what} stream has {len(found)} tokens, not the same {len(tokens)}")


async def _tokens(client: RawClient) -> tuple[list[int], bool]:
    """Read one request to its end. Return its tokens, and whether the server promised to keep it."""
    tokens: list[int] = []
    is_promised = True
    while (frame := await client.receive()) is not None:
        match frame:
            case Accepted():
                is_promised = getattr(frame, "resumable", None) is not False
            case Tokens():
                tokens += frame.token_ids
            case Done():
                return tokens, is_promised
            case Error():
                return [], is_promised
    raise EOFError("the connection was closed")


def _get(url: str) -> None:
    with urllib.request.urlopen(url, timeout=30) as answer:
        answer.read()


async def attackers_of(kind: str, server: ServerProcess, seconds: float, seed: int) -> dict[str, Any]:
    """Run attackers.py and return its report."""
    endpoint = server.endpoint
    key = f"key of {TENANTS[2]}"
    arguments = (kind, seconds, seed, endpoint.address, endpoint.metrics_url, TLS / "cert.pem", key)
    return await attackers("attackers.py", *arguments)


async def campaign(server: ServerProcess, options: argparse.Namespace, report: CampaignReport, snapshot: Path) -> None:
    bystanders = Bystanders(replace(server.endpoint, ca=str(TLS / "cert.pem")))
    await bystanders.learn()
    async with bystanders.during() as quiet:
        await attackers_of("calm", server, options.quiet_seconds, options.seed)
    print(f"{'quiet':<9} {quiet}", flush=True)
    before = await server.settled()
    print(f"{'before':<9} {before}", flush=True)
    rss_before = server.server_rss()
    files_before = server.open_files()
    async with bystanders.during() as storm:
        seconds = options.seconds + 2.5 * KILL_PAUSE_S
        attacking = asyncio.create_task(attackers_of("storm", server, seconds, options.seed))
        peaks = await _watch_vitals(server, options.seconds)
    print(f"{'storm':<9} {storm}", flush=True)
    async with bystanders.during() as kills:
        for _ in range(2):
            await asyncio.sleep(KILL_PAUSE_S / 4)  # streams are under way
            for pid in server.engines():
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(KILL_PAUSE_S)
    print(f"{'kills':<9} {kills}, longest pause {max(kills.gaps_s, default=0):.2f} s", flush=True)
    outcome = await attacking
    print(f"{'attackers':<9} {outcome['cpu_s']:.1f} s of CPU time, {json.dumps(outcome['cases'])}", flush=True)
    after = await server.settled(before.descriptors)
    print(f"{'after':<9} {after}", flush=True)
    if after.descriptors > before.descriptors:
        print(f"{'new files':<9} {', '.join(sorted(server.open_files() - files_before))}", flush=True)

    ratio = storm.p99_s / quiet.p99_s
    verdict(report, "bytes", f"{storm.streams + kills.streams} streams", all_equal(storm, kills))
    verdict(report, "latency", f"p99 {ratio:.2f} times the quiet one", ratio <= MAX_ITL_RATIO)
    verdict(report, "promises", f"{storm.promises} kept", storm.promises > 0)
    slowest = max(*storm.connects_s, 0.0), max(*storm.probes_s, 0.0)
    figure = f"connection {slowest[0]:.2f} s, probe {slowest[1]:.2f} s, {storm.unready} times not ready"
    verdict(report, "answers", figure, max(slowest) <= ANSWER_S and not storm.unready)
    budget = int(re.search(r"total_bytes=(\d+)", server.log())[1])  # type: ignore[index]
    grown = peaks[0] - rss_before
    pinned = max(peaks[1], server.pinned_share())
    figure = f"{grown / MIB:+.1f} MiB in the API server process, whose budget for clients is {budget / MIB:.0f} MiB"
    verdict(report, "memory", figure, grown <= budget)
    verdict(report, "pins", f"{pinned:.0%} of the pages pinned", pinned <= PINNED_SHARE)
    verdict(report, "threads", f"{before.threads} before, {after.threads} after", after.threads <= before.threads)
    for phase in (quiet, storm, kills):
        for problem in dict.fromkeys(phase.problems):
            report.breach(problem)
    report.breaches += outcome["breaches"]
    check_settled(before, after, report)
    await snapshot_is_not_lost(server, report, snapshot)


def all_equal(*phases: Observations) -> bool:
    """Return whether streams were read in each phase, and all had their bytes."""
    return all(seen.streams for seen in phases) and not any(
        "other bytes" in problem for phase in phases for problem in phase.problems
    )


def verdict(report: CampaignReport, name: str, figure: str, holds: bool) -> None:
    print(f"{name:<9} {figure}: {'ok' if holds else 'BREACH'}", flush=True)
    if not holds:
        report.breach(f"{name}: {figure}")


async def _watch_vitals(server: ServerProcess, seconds: float) -> tuple[int, float]:
    """Return the peak of the API server's resident bytes and of the share of pinned pages."""
    until = time.monotonic() + seconds
    peak = 0
    pinned = 0.0
    while time.monotonic() < until:
        peak = max(peak, server.server_rss())
        with contextlib.suppress(OSError, KeyError):  # probes that fail are reported by the bystanders
            pinned = max(pinned, await asyncio.to_thread(server.pinned_share))
        await asyncio.sleep(0.5)
    return peak, pinned


async def snapshot_is_not_lost(server: ServerProcess, report: CampaignReport, snapshot: Path) -> None:
    """Kill the engine while it writes its snapshot; that must be logged and leave no file."""
    (engine,) = server.engines()
    stopping = asyncio.create_task(server.terminate())
    was_writing = False
    while not stopping.done() and not was_writing:
        await asyncio.sleep(0.001)
        was_writing = _has_open_in(engine, snapshot.parent)
    if was_writing:
        os.kill(engine, signal.SIGKILL)
    status = await stopping
    log = server.log()
    if not was_writing:
        print(f"{'snapshot':<9} the engine was too quick to be killed while it wrote; exit status {status}")
        return
    said = any("snapshot" in line and ("error" in line or "warning" in line) for line in log.splitlines())
    left = [path.name for path in snapshot.parent.iterdir() if path != snapshot]
    figure = f"exit status {status}, {'logged' if said else 'nothing in the log'}, files left {left}"
    verdict(report, "snapshot", figure, said and status != 0 and not left)


def _has_open_in(pid: int, folder: Path) -> bool:
    """Return whether the process has a file of this folder open, with or without a name."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry).startswith(str(folder)):
                    return True
    return False


def _write_keys(path: Path) -> None:
    hashes = {tenant: hashlib.sha256(f"key of {tenant}".encode()).hexdigest() for tenant in TENANTS}
    path.write_text("".join(f'[{tenant}]\nkeys = ["{digest}"]\n' for tenant, digest in hashes.items()))
    path.chmod(0o600)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="of the attack")
    parser.add_argument("--quiet-seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of quire serve, after --")
    options = parser.parse_args()
    report = CampaignReport()
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        keys = Path(folder, "keys.toml")
        snapshot = Path(folder, "snapshots", "prefix")
        snapshot.parent.mkdir()
        _write_keys(keys)
        flags = {
            "auth-tokens": keys,
            "tls-cert": TLS / "cert.pem",
            "tls-key": TLS / "key.pem",
            "prefix-snapshot": snapshot,
            "scheduling-policy": "fair",
            "max-num-seqs": 20,
            "max-kv-share-per-tenant": PINNED_SHARE,
            "kv-cache-memory": "128MiB",
        }
        arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        with start_server(*arguments, *options.flags, variables=VARIABLES) as server:
            uvloop.run(campaign(server, options, report, snapshot))
            report.check_log(server)
    print(f"{'breaches':<9} {len(report.breaches)}")
    for text in report.breaches[:20]:
        print(f"  {text}")
    return 1 if report.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
