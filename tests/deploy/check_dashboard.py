"""Run every query of the dashboards and the rules against a real Prometheus that scrapes a server under load.

usage, from the repository's root: python -m tests.deploy.check_dashboard [--seconds 30]

Requires `prometheus` on PATH; takes about a minute. A dashboard query fails if Prometheus refuses it or returns only
NaN. A rule fails if Prometheus could not evaluate it or if a metric that it names has no series; whether an alert fires
does not matter. The load produces data for every panel: a queue that overflows, a KV pool that is too small, shared
prefixes, draft tokens, cancelled streams, texts to embed, an engine process that is killed, and a fleet that loses a
host.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from quire import AsyncClient, QuireError, SamplingParams

from tests.deploy.queries import DEPLOY, dashboard_queries, metrics_in, rule_queries, with_variables
from tests.fuzz.host_process import SECRET, HostProcess, running_hosts
from tests.fuzz.server_process import free_port

USERS = 24
ENCODER = str(DEPLOY.parent / "tests" / "goldens" / "encoders" / "bert")
SERVER_FLAGS = (
    *("--kv-cache-memory", "4MiB", "--max-model-len", "512", "--max-num-seqs", "16", "--max-num-waiting", "6"),
    *("--num-speculative-tokens", "4", "--kv-spill-size", "16MiB", "--embedding-model", ENCODER),
)
RATE_INTERVAL = "10s"
OPENINGS = (
    "This module provides access to ",
    "If *timeout* is not ``None``, then ",
    ".. function:: open(path, mode)\n\n ",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of the load")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        server = running.enter_context(quire_server(*SERVER_FLAGS))
        hosts = running.enter_context(running_hosts(2, "--kv-cache-memory", "8MiB", "--threads", "1"))
        secret = Path(folder) / "secret"
        secret.write_text(SECRET)
        addresses = ",".join(host.address for host in hosts)
        fleet = running.enter_context(quire_server("--engine-hosts", addresses, "--secret-file", str(secret)))
        targets = [server.operator_address, fleet.operator_address]
        prometheus = running.enter_context(prometheus_server(Path(folder) / "prometheus", targets))
        failed = asyncio.run(load_and_report(server, fleet, hosts, seconds, prometheus))
    sys.exit(1 if failed else 0)


# Queries


def report(prometheus: str) -> int:
    """Print a line for each query and return the number of queries that failed."""
    failed = 0
    for query in dashboard_queries():
        failed += not print_result(query.where, *evaluate(prometheus, with_variables(query.promql, RATE_INTERVAL)))
    states = rule_states(prometheus)
    for query in rule_queries():
        missing = [name for name in sorted(metrics_in(query.promql)) if not instant_query(prometheus, name)]
        health, state = states[query.where]
        good = health == "ok" and not missing
        failed += not print_result(query.where, good, f"{state} {' '.join(missing) or health}")
    return failed


def print_result(where: str, good: bool, details: str) -> bool:
    print(f"{'ok  ' if good else 'FAIL'} {where:45} {details}")
    return good


def evaluate(prometheus: str, promql: str) -> tuple[bool, str]:
    """Return whether the query has a numeric result, and a description of the result.

    The suffix ` > 0`, by which a panel hides series that are zero, is removed first.
    """
    values = [float(sample["value"][1]) for sample in instant_query(prometheus, promql.removesuffix(" > 0"))]
    values = [value for value in values if not math.isnan(value)]
    return bool(values), f"{len(values):3} series" + (f", {min(values):.4g} to {max(values):.4g}" if values else "")


def rule_states(prometheus: str) -> dict[str, tuple[str, str]]:
    """Return the health and, for alerts, the state of each rule by its name."""
    groups = get(f"{prometheus}/api/v1/rules")["groups"]
    return {rule["name"]: (rule["health"], rule.get("state", "")) for group in groups for rule in group["rules"]}


def instant_query(prometheus: str, promql: str) -> list[dict[str, Any]]:
    parameters = urllib.parse.urlencode({"query": promql})
    samples: list[dict[str, Any]] = get(f"{prometheus}/api/v1/query?{parameters}")["result"]
    return samples


def get(url: str) -> Any:
    """Return `data` of the response. Raise HTTPError if Prometheus refuses the query."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)["data"]


# Processes


class QuireServer(NamedTuple):
    address: str  # address for clients
    operator_address: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def quire_server(*flags: str) -> Iterator[QuireServer]:
    """Start `quire serve`; yield its addresses and the API server process."""
    command = (
        sys.executable,
        "-m",
        "quire.runtime.cli.main",
        "serve",
        "--port",
        "0",
        "--operator-port",
        "0",
        "--openai-port",
        "0",
        *flags,
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"clients (\S+)  metrics http://(\S+)/metrics", server.stdout.readline())
            assert found, "the server did not start"
            yield QuireServer(found[1], found[2], server)
        finally:
            server.terminate()


@contextlib.contextmanager
def prometheus_server(folder: Path, targets: list[str]) -> Iterator[str]:
    """Start Prometheus with the configuration and rules of deploy/, for `targets`, more often; yield its URL."""
    shutil.copytree(DEPLOY / "prometheus", folder, dirs_exist_ok=True)
    config = yaml.safe_load((folder / "prometheus.yml").read_text("utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    url = f"http://127.0.0.1:{free_port()}"
    command = (
        *("prometheus", "--config.file", str(folder / "prometheus.yml"), "--storage.tsdb.path", str(folder / "data")),
        *("--web.listen-address", url.removeprefix("http://"), "--log.level", "error"),
    )
    with subprocess.Popen(command) as prometheus:
        try:
            wait_until_ready(url, prometheus)
            yield url
        finally:
            prometheus.terminate()


def wait_until_ready(url: str, prometheus: subprocess.Popen[bytes]) -> None:
    while prometheus.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=1):
            return
        time.sleep(0.1)
    raise SystemExit("prometheus ended before it was ready")


# Load


async def load_and_report(
    server: QuireServer, fleet: QuireServer, hosts: Sequence[HostProcess], seconds: float, prometheus: str
) -> int:
    """Load both servers, the fleet until all queries have run. Return the number of queries that failed."""
    loading = asyncio.create_task(load(fleet.address, math.inf, lambda: restart_a_host(hosts[0], seconds / 2)))
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(embed_texts(server.address, seconds))
            await load(server.address, seconds, lambda: kill_an_engine(server.process.pid, seconds / 2))
        async with AsyncClient(server.address) as client:  # alone: with a full batch no draft tokens are verified
            await client.complete("queue, lock, " * 40, SamplingParams(max_tokens=300, ignore_eos=True))
        return await asyncio.to_thread(report, prometheus)
    finally:
        loading.cancel()
        await asyncio.wait([loading])


async def load(address: str, seconds: float, disturb: Callable[[], None]) -> None:
    end = time.monotonic() + seconds
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for number in range(USERS):
            group.create_task(user(client, random.Random(number), end))
        group.create_task(asyncio.to_thread(disturb))


async def embed_texts(address: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    async with AsyncClient(address) as client:
        while time.monotonic() < end:
            with contextlib.suppress(QuireError):
                await client.embed(OPENINGS)
            await asyncio.sleep(0.1)


async def user(client: AsyncClient, rng: random.Random, end: float) -> None:
    """Send requests one after the other until `end`; cancel one in eight streams after a few chunks."""
    while time.monotonic() < end:
        prompt = rng.choice(OPENINGS) + " ".join(
            rng.choices(("queue", "lock", "bytes", "iterator"), k=rng.randint(2, 80))
        )
        max_chunks = rng.randint(1, 4) if rng.random() < 1 / 8 else None
        try:
            stream = client.generate(prompt, SamplingParams(max_tokens=rng.randint(16, 160), ignore_eos=True))
            async with contextlib.aclosing(stream):
                num_chunks = 0
                async for _ in stream:
                    num_chunks += 1
                    if num_chunks == max_chunks:
                        break
        except QuireError:
            await asyncio.sleep(0.2)


def restart_a_host(host: HostProcess, after_s: float) -> None:
    """Kill an engine host after `after_s` seconds and start it again."""
    time.sleep(after_s)
    host.kill()
    host.start()
    print(f"killed and restarted engine host {host.address}")


def kill_an_engine(server_pid: int, after_s: float) -> None:
    """Kill the first child of the API server process, which is an engine process, after `after_s` seconds."""
    time.sleep(after_s)
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    if children:
        os.kill(int(children[0]), signal.SIGKILL)
    print(f"killed engine process {children[0]}" if children else "the API server has no engine process")


if __name__ == "__main__":
    main()
