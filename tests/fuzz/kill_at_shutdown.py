"""Kill, stop and interrupt the processes of a server at random moments around its SIGTERM.

usage: kill_at_shutdown.py [--times 500] [--streams 32] [--seed 1] [--moment start|streams|restart] [-- FLAGS]

Each round starts a server and sends it SIGTERM at one of three moments: while it starts, under streams of all kinds, or
while a killed engine process is being replaced. Up to two faults come before or after it, at random times: SIGKILL or
SIGSTOP of an engine process or of the processes that try grammars, SIGKILL of the server, a second SIGTERM, and clients
that disappear.

Exit status 1 if a process of the server lives for longer than `MARGIN_S` after the drain, a stream does not end, the
exit status is unexpected, or a log has a traceback. A server that is late prints the stacks of its threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import IO, Any

import uvloop
from campaign import CampaignReport
from quire import AsyncClient, SamplingParams
from quire.runtime.common.errors import QuireError
from quire.runtime.common.types import StructuredOutputs
from server_process import PORTS, descendants

DRAIN_S = 0.7
MARGIN_S = 3.0
STACKS_S = 1.0  # time for a late process to print its stacks
STREAMS_TIMEOUT_S = 20.0  # time for clients to notice that the server is gone
START_S = 3.0  # longest time until a server that starts gets SIGTERM
AROUND_S = 0.9  # time before or after SIGTERM in which a fault is caused
MOMENTS = ("start", "streams", "streams", "restart")
HARMS = ("none", "kill engine", "stop engine", "kill trials", "stop trials", "kill server", "SIGTERM", "lose clients")
TRIAL = "trial_process"
ENGINE = "engine_main"
PID_AND_START = tuple[int, str]


def identities(pids: Sequence[int]) -> set[PID_AND_START]:
    """Return each process that is not a zombie with its start time, since ids are reused."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                found.add((pid, fields[19]))
    return found


class Round:
    """One server process and its clients."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str], random: Random) -> None:
        self.process = process
        self.term_at: float | None = None
        self.num_terms = 0
        self.was_killed = False
        self._log = log
        self._random = random
        self._seen = identities([process.pid])
        self.clients: list[asyncio.Task[Any]] = []

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def judge_exit(self, what: str, report: CampaignReport, *allowed: int) -> None:
        """Report a traceback, and any exit status but 0, SIGTERM's and `allowed` ones."""
        status = self.process.poll()
        if status not in {None, 0, 128 + signal.SIGTERM, -signal.SIGTERM, *allowed}:
            report.breach(f"{what}: exit status {status}: {self.log()[-1000:]}")
        if "Traceback" in (log := self.log()):
            report.breach(f"{what}: a traceback: {log[log.index('Traceback') :][:2000]}")

    async def end_late(self, what: str, report: CampaignReport) -> None:
        """Report processes that should have ended, kill them, and print the end of their log."""
        report.breach(f"{what}: {self.names()} still there")
        await self.kill_late()
        print(f"{what}\n" + "\n".join(self.log().splitlines()[-60:]), flush=True)

    def look(self) -> None:
        """Note the present processes."""
        self._seen |= identities([self.process.pid, *descendants(self.process.pid)])

    def living(self) -> set[PID_AND_START]:
        self.process.poll()
        return self._seen & identities([pid for pid, _ in self._seen])

    def signal_all(self, name: str, number: signal.Signals) -> None:
        """Signal the child processes whose command line has `name`."""
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                if name in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, number)

    def terminate(self) -> None:
        self.num_terms += 1
        if self.term_at is None:
            self.term_at = time.monotonic()
        if self.process.poll() is None:
            self.process.terminate()

    def harm(self, name: str) -> None:
        self.look()
        match name:
            case "kill engine":
                self.signal_all(ENGINE, signal.SIGKILL)
            case "stop engine":
                self.signal_all(ENGINE, signal.SIGSTOP)
            case "kill trials":
                self.signal_all(TRIAL, signal.SIGKILL)
            case "stop trials":
                self.signal_all(TRIAL, signal.SIGSTOP)
            case "kill server":
                self.was_killed = True
                self.process.kill()
            case "SIGTERM":
                self.terminate()
            case "lose clients":
                for client in self.clients[::2]:
                    client.cancel()

    async def end(self) -> float | None:
        """Wait until every process is gone. Return the seconds after the drain; None if it took too long."""
        assert self.term_at is not None
        while time.monotonic() < self.term_at + DRAIN_S + MARGIN_S:
            self.look()
            if not self.living():
                return max(0.0, time.monotonic() - self.term_at - DRAIN_S)
            await asyncio.sleep(0.01)
        return None

    async def kill_late(self) -> None:
        """Make the remaining processes print their stacks, and kill them."""
        for number in (signal.SIGCONT, signal.SIGABRT, signal.SIGKILL):
            for pid, _ in self.living():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            await asyncio.sleep(STACKS_S)

    def close(self) -> None:
        """Kill the remaining processes, and wait for the server."""
        for pid, _ in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def names(self) -> list[str]:
        """Return the shortened command lines of the remaining processes."""
        found = []
        for pid, _ in self.living():
            with contextlib.suppress(OSError, IndexError):
                line = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                found.append(next((name for name in (TRIAL, ENGINE) if name in " ".join(line)), "server"))
        return found


async def read(address: str, index: int, random: Random) -> str:
    """Read streams until one fails. Return the class of its error.

    Streams of clients with an even index are resumable: they wait a minute for a server that is gone.
    """
    try:
        async with AsyncClient(address) as client:
            while True:
                await client.complete(f"module {index}", _params(index, random), resumable=index % 2 == 0)
    except QuireError as error:
        return type(error).__name__


def _params(index: int, random: Random) -> SamplingParams:
    seed = random.getrandbits(63)
    kinds = (
        SamplingParams(max_tokens=400, ignore_eos=True),
        SamplingParams(max_tokens=200, temperature=0.8, n=2, seed=seed),
        SamplingParams(max_tokens=30, beam_width=3, n=2),
        SamplingParams(
            max_tokens=100,
            temperature=1.0,
            seed=seed,
            structured_outputs=StructuredOutputs(json={"type": "array", "items": {"enum": [f"a{seed}", "b"]}}),
        ),
    )
    return kinds[index % len(kinds)]


def start(log: IO[str], flags: Sequence[str]) -> subprocess.Popen[str]:
    ports = [part for port in PORTS for part in (port, "0")]
    command = [str(Path(sys.executable).with_name("quire")), "serve", *ports, "--shutdown-timeout", str(DRAIN_S)]
    return subprocess.Popen(
        [*command, "--kv-cache-memory", "64MiB", "--threads", "1", "--log-level", "warning", *flags],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )


async def one_round(number: int, moment: str, options: argparse.Namespace, report: CampaignReport) -> float | None:
    """Run one server to its end. Return the time that it took after the drain."""
    random = Random(f"{options.seed} {number}")
    harms = random.sample(HARMS, 2)
    what = f"round {number}: SIGTERM in {moment}, {' and '.join(harms)}"
    with tempfile.TemporaryFile("w+") as log:
        this = Round(start(log, options.flags), log, random)
        try:
            if not await _disturb(this, moment, harms, random, options.streams):
                print(f"{what}: the server did not start: {this.log()}", flush=True)
                report.cases[f"{moment}: not started"] += 1
                return None
            took_s = await this.end()
            if took_s is None:
                await this.end_late(f"{what}: {MARGIN_S:g} s after the drain", report)
            await _judge(this, what, report)
            report.cases[f"{moment}: {'late' if took_s is None else 'ended'}"] += 1
            return took_s
        finally:
            this.close()


async def _disturb(this: Round, moment: str, harms: Sequence[str], random: Random, num_streams: int) -> bool:
    """Send SIGTERM at the moment, and cause the faults around it. Return whether the server started."""
    first_s = 0.0
    if moment == "start":
        first_s = random.uniform(0.0, START_S)
    else:
        assert this.process.stdout is not None
        ready = await asyncio.to_thread(this.process.stdout.readline)
        if "clients " not in ready:
            return False
        address = ready.partition("clients ")[2].split()[0]
        this.clients = [asyncio.create_task(read(address, index, random)) for index in range(num_streams)]
        first_s = random.uniform(0.0, 1.0) + AROUND_S
    due = [(first_s + random.uniform(-AROUND_S, AROUND_S), harm) for harm in harms] + [(first_s, "terminate")]
    if moment == "restart":
        due.append((first_s - random.uniform(0.0, AROUND_S), "kill engine"))
    due.sort()
    for (before_s, _), (due_s, harm) in pairwise([(0.0, ""), *due]):
        await asyncio.sleep(max(0.0, due_s - max(0.0, before_s)))
        if harm == "terminate":
            this.look()
            this.terminate()
        else:
            this.harm(harm)
    return True


async def _judge(this: Round, what: str, report: CampaignReport) -> None:
    """Report a wrong exit status, a traceback, and streams that have not ended."""
    if this.clients:
        _, open_streams = await asyncio.wait(this.clients[1::2], timeout=STREAMS_TIMEOUT_S)
        if open_streams:
            report.breach(f"{what}: {len(open_streams)} streams have not ended")
        for client in this.clients:
            client.cancel()
        await asyncio.wait(this.clients)
        report.rounds.update(task.result() for task in this.clients if task.done() and not task.cancelled())
    this.judge_exit(what, report, *((-signal.SIGKILL,) if this.was_killed else ()))


async def main(options: argparse.Namespace, report: CampaignReport) -> None:
    took: list[float] = []
    moments = [options.moment] if options.moment else MOMENTS
    for number in range(options.first, options.first + options.times):
        took_s = await one_round(number, moments[number % len(moments)], options, report)
        took += [] if took_s is None else [took_s]
        if number % 20 == 19:
            print_times(took, report)
    print_times(took, report)


def print_times(took: Sequence[float], report: CampaignReport) -> None:
    """Print how many servers ended within each half second, and the cases and breaches so far."""
    counts = Counter(int(each * 2) / 2 for each in took)
    shares = ", ".join(f"{count} in less than {half + 0.5:g} s" for half, count in sorted(counts.items()))
    print(f"{len(took)} ended: {shares}; {dict(report.cases)}; {len(report.breaches)} breaches", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--times", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first round, to repeat it")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--moment", choices=sorted(set(MOMENTS)))
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="flags of quire serve, after --")
    arguments = parser.parse_args()
    outcome = CampaignReport()
    uvloop.run(main(arguments, outcome))
    print(f"streams ended in {dict(outcome.rounds)}")
    raise SystemExit(int(bool(outcome.breaches)))
