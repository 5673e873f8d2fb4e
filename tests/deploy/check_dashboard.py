"""Every query of the dashboard and of the rules, asked of a real Prometheus that scrapes a live server under load.

usage, from the repository's root: python -m tests.deploy.check_dashboard [--seconds 30]

It needs `prometheus` on PATH and takes a minute. A query fails where Prometheus refuses it or has nothing but NaN for
it; an alert is silent when all is well, so of alerts every metric they name must have series, and Prometheus must have
evaluated them. The load makes everything happen that there is a panel for: more requests than there is room, a pool
too small for all, shared prefixes, guesses, users who leave, and an engine process that is killed.
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
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from quire import AsyncClient, QuireError, SamplingParams

from tests.deploy.queries import DEPLOY, dashboard_queries, filled_in, metrics_in, rule_queries

USERS = 24
SERVER_FLAGS = (
    *("--kv-cache-memory", "4MiB", "--max-model-len", "512", "--max-num-seqs", "16", "--max-num-waiting", "6"),
    *("--num-speculative-tokens", "4", "--kv-spill-size", "16MiB"),
)
RATE_INTERVAL = "10s"
OPENINGS = (
    "This module provides access to ",
    "If *timeout* is not ``None``, then ",
    ".. function:: open(path, mode)\n\n ",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0, help="of load")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        address, http_address, server = running.enter_context(quire_server())
        prometheus = running.enter_context(prometheus_server(Path(folder), http_address))
        asyncio.run(load(address, seconds, server))
        failed = report(prometheus)
    sys.exit(1 if failed else 0)


# What is asked


def report(prometheus: str) -> int:
    """How many queries failed."""
    failed = 0
    for query in dashboard_queries():
        failed += not say(query.where, *answer(prometheus, filled_in(query.promql, RATE_INTERVAL)))
    states = rule_states(prometheus)
    for query in rule_queries():
        missing = [name for name in sorted(metrics_in(query.promql)) if not ask(prometheus, name)]
        health, state = states[query.where]
        failed += not say(query.where, health == "ok" and not missing, f"{state} {' '.join(missing) or health}")
    return failed


def say(where: str, good: bool, what: str) -> bool:
    print(f"{'ok  ' if good else 'FAIL'} {where:45} {what}")
    return good


def answer(prometheus: str, promql: str) -> tuple[bool, str]:
    """Whether it has a number. A panel that hides what is zero is asked without hiding."""
    values = [float(sample["value"][1]) for sample in ask(prometheus, promql.removesuffix(" > 0"))]
    values = [value for value in values if not math.isnan(value)]
    return bool(values), f"{len(values):3} series" + (f", {min(values):.4g} to {max(values):.4g}" if values else "")


def rule_states(prometheus: str) -> dict[str, tuple[str, str]]:
    """Rule -> health, and of alerts the state."""
    groups = get(f"{prometheus}/api/v1/rules")["groups"]
    return {rule["name"]: (rule["health"], rule.get("state", "")) for group in groups for rule in group["rules"]}


def ask(prometheus: str, promql: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = get(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': promql})}")[
        "result"
    ]
    return found


def get(url: str) -> Any:
    """`data` of an answer. A query that is refused raises HTTPError."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)["data"]


# What is scraped


@contextlib.contextmanager
def quire_server() -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """Addresses of clients and operators, and the front process."""
    command = (
        sys.executable,
        "-m",
        "quire.runtime.cli.main",
        "serve",
        "--port",
        "0",
        "--http-port",
        "0",
        *SERVER_FLAGS,
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"clients (\S+)  metrics http://(\S+)/metrics", server.stdout.readline())
            assert found, "the server did not start"
            yield found[1], found[2], server
        finally:
            server.terminate()


@contextlib.contextmanager
def prometheus_server(folder: Path, target: str) -> Iterator[str]:
    """Our configuration and rules, for this one target and with shorter intervals."""
    shutil.copytree(DEPLOY / "prometheus", folder, dirs_exist_ok=True)
    config = yaml.safe_load((folder / "prometheus.yml").read_text("utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
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
    raise SystemExit("prometheus ended at once")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


# What happens meanwhile


async def load(address: str, seconds: float, server: subprocess.Popen[str]) -> None:
    end = time.monotonic() + seconds
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for number in range(USERS):
            group.create_task(user(client, random.Random(number), end))
        group.create_task(asyncio.to_thread(kill_an_engine, server.pid, seconds / 2))
    async with AsyncClient(address) as client:  # alone: beside a full batch guesses are not worth their time
        await client.complete("queue, lock, " * 40, SamplingParams(max_tokens=300, ignore_eos=True))


async def user(client: AsyncClient, rng: random.Random, end: float) -> None:
    """Asks again and again, at times for more than there is room for, and leaves every eighth stream early."""
    while time.monotonic() < end:
        prompt = rng.choice(OPENINGS) + " ".join(
            rng.choices(("queue", "lock", "bytes", "iterator"), k=rng.randint(2, 80))
        )
        patience = rng.randint(1, 4) if rng.random() < 1 / 8 else None
        try:
            stream = client.generate(prompt, SamplingParams(max_tokens=rng.randint(16, 160), ignore_eos=True))
            async with contextlib.aclosing(stream):
                async for _ in stream:
                    patience = None if patience is None else patience - 1
                    if patience == 0:
                        break
        except QuireError:
            await asyncio.sleep(0.2)


def kill_an_engine(front: int, after_s: float) -> None:
    """The first child of the front, where it has one: an engine process."""
    time.sleep(after_s)
    children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
    if children:
        os.kill(int(children[0]), signal.SIGKILL)
    print(f"killed engine process {children[0]}" if children else "the engine has no process of its own")


if __name__ == "__main__":
    main()
