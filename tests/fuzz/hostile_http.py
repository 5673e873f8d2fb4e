"""Attack the HTTP API of a live `quire serve` in all ways at once, while bystanders read their streams.

usage: hostile_http.py [--seconds 60] [--seed 1] [--attack storm|stored|unread] [--connections 3000]
                       [--phase-seconds 15] [--keys] [-- FLAGS OF quire serve]

The clients of http_attackers.py read as much output as others do in one phase, and attack in the next one, in turns. A
stream of another connection is read all the time; a step is the median gap between two of its tokens without an attack.
A token is late by a step if it waits for a turn of the server's event loop that takes more CPU time than a step. Such
turns may take 1 % more of the time of an attack than of the phase before it, in the median of all pairs of phases: so
the p99 of gaps is at most a step longer. The verdict ignores that a token may wait for several turns. The
longest wait is a run of turns without a pause. Runs are only printed, since a token waits for a part of a run, in which
others are answered. The gaps by the clock are only printed, with the time that the hypervisor gave to other
machines (steal) and the number of threads that wanted a core (load): other programs share the machine.

With `--keys`, attackers and bystanders are two tenants, and names of hosts are not checked. The attacks `stored` and
`unread` come from stream_attackers.py and always have keys. Exit status 1 on any breach.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from campaign import RETRY_S, CampaignReport, attackers, run
from quire import AsyncClient, SamplingParams
from quire.runtime.common.errors import Overloaded
from quire.runtime.tools.percentiles import percentiles
from server_process import ServerProcess

ATTACKER, SECOND, BYSTANDER = "attacker", "second", "bystander"  # names of tenants and their keys
CLIENTS = {"stored": 40, "unread": 200}  # clients of the attacks that open no crowd of connections
STREAM = SamplingParams(max_tokens=400, temperature=1.0, seed=1, ignore_eos=True)
START_S = 3.0  # time until the process of the attackers has started
MORE_LATE = 0.01  # share of the time of an attack
TIMED_SERVER = Path(__file__).with_name("timed_server.py")


@dataclass
class Phase:
    """The results of a bystander in a phase."""

    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # gaps between two chunks of a stream
    firsts_s: list[float] = field(default_factory=list)  # times from a request to its first chunk

    def __str__(self) -> str:
        p50, p99, longest = (1e3 * value for value in percentiles(self.gaps_s, (50, 99, 100)))
        first = 1e3 * median(self.firsts_s) if self.firsts_s else float("nan")
        gaps = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, longest {longest:.0f} ms"
        return f"gaps {len(self.gaps_s)}, {gaps}, first token {first:.0f} ms"

    def turns_s(self, turns: list[tuple[float, float]]) -> list[float]:
        """Return the CPU seconds of the turns of this phase."""
        return [cpu_s for moment, cpu_s in turns if self.began_s < moment <= self.ended_s]

    def late(self, turns: list[tuple[float, float]], step_s: float) -> float:
        """Return the share of the phase in turns that are longer than a step."""
        return sum(each for each in self.turns_s(turns) if each > step_s) / (self.ended_s - self.began_s)


Pairs = list[tuple[Phase, Phase]]  # phase without an attack, phase with one


async def attack(pairs: Pairs, server: ServerProcess, report: CampaignReport, options: argparse.Namespace) -> None:
    """Run pairs of phases as long as there is time for another one."""
    for number in range(max(1, int(options.seconds / 2 / (options.phase_seconds + START_S)))):
        calm = await _phase("calm", server, report, options, number)
        pairs.append((calm, await _phase(options.attack, server, report, options, number)))


def judge(pairs: Pairs, turns_file: Path, report: CampaignReport) -> None:
    """Compare the turns of the event loop in the phases of each pair."""
    if not pairs:
        report.breach("latency: not measured, the run ended before its first pair of phases")
        return
    noted = json.loads(turns_file.read_text())
    turns, runs = ([(moment, cpu_s) for moment, cpu_s in noted[name]] for name in ("turns", "runs"))
    step_s = median(float(percentiles(calm.gaps_s, (50,))[0]) for calm, _ in pairs)
    for name, phases in zip(("calm", "attack"), zip(*pairs, strict=True), strict=True):
        found = [each for phase in phases for each in phase.turns_s(turns)]
        late = median(phase.late(turns, step_s) for phase in phases)
        busy = median(phase.late(runs, step_s) for phase in phases)
        longest = f"longest turn {1e3 * max(found, default=0):.1f} ms of CPU time"
        print(f"{name:<12} {longest}, {late:.2%} of the time late; in runs longer than a step {busy:.2%}")
    more = median(storm.late(turns, step_s) - calm.late(turns, step_s) for calm, storm in pairs)
    figure = f"{more:+.2%} of the time in turns that take longer than a step of {1e3 * step_s:.2f} ms"
    print(f"{'latency':<12} {figure}")
    if more > MORE_LATE:
        report.breach(f"latency: {figure}")


async def _phase(
    kind: str, server: ServerProcess, report: CampaignReport, options: argparse.Namespace, number: int
) -> Phase:
    """Read a stream while one process of clients runs."""
    phase = Phase()
    before = _cpu_ticks()
    reading = asyncio.create_task(_read(server, phase, BYSTANDER if options.keys else None))
    token = ATTACKER if options.keys else ""
    arguments = (kind, options.phase_seconds, f"{options.seed}:{number}", server.openai_address)
    try:
        if kind in CLIENTS:
            outcome = await attackers("stream_attackers.py", *arguments, f"{token},{SECOND}", CLIENTS[kind])
        else:
            outcome = await attackers("http_attackers.py", *arguments, token, options.connections)
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        phase.ended_s = time.monotonic()
    if not reading.cancelled() and (error := reading.exception()) is not None:
        report.breach(f"{kind}: the bystander's stream ended in {error!r}")
    used, stolen = (now - then for now, then in zip(_cpu_ticks(), before, strict=True))
    load = os.getloadavg()[0]
    machine = f"clients {outcome['cpu_s']:.1f} s of CPU, steal {stolen / used:.1%}, load {load:.1f}"
    print(f"{kind:<9} {phase}; {machine}", flush=True)
    report.cases.update({name: count for name, count in outcome["cases"].items() if kind != "calm"})
    report.breaches += outcome["breaches"]
    return phase


async def _read(server: ServerProcess, phase: Phase, token: str | None) -> None:
    async with AsyncClient(server.address, token) as client:
        while True:
            asked = time.perf_counter()
            last = 0.0
            try:
                async for _ in client.generate("The", STREAM):
                    now = time.perf_counter()
                    (phase.gaps_s if last else phase.firsts_s).append(now - (last or asked))
                    last = now
            except Overloaded:
                await asyncio.sleep(RETRY_S)


def _cpu_ticks() -> tuple[int, int]:
    """Return the time of all cores so far, and the part of it that the hypervisor gave to other machines."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return sum(ticks), ticks[7]


def main(parser: argparse.ArgumentParser) -> int:
    known = parser.parse_known_args()[0]
    pairs = Pairs()
    if known.attack in CLIENTS:
        parser.set_defaults(keys=True)
    has_keys = known.keys or known.attack in CLIENTS
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        keys = Path(folder, "keys.toml")
        turns = Path(folder, "turns.json")
        digests = {token: hashlib.sha256(token.encode()).hexdigest() for token in (ATTACKER, SECOND, BYSTANDER)}
        keys.write_text("".join(f'[{token}]\nkeys = ["{digest}"]\n' for token, digest in digests.items()))
        keys.chmod(0o600)
        return run(
            partial(attack, pairs),
            parser,
            flags=("--auth-tokens", str(keys)) if has_keys else (),
            token=BYSTANDER if has_keys else None,
            program=(sys.executable, str(TIMED_SERVER), str(turns)),
            judge=partial(judge, pairs, turns),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=3000)
    parser.add_argument("--phase-seconds", type=float, default=15)
    parser.add_argument("--attack", choices=("storm", *CLIENTS), default="storm")
    parser.add_argument("--keys", action="store_true", help="attackers and bystanders are two tenants")
    sys.exit(main(parser))
