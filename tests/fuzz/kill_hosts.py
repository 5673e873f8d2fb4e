"""Kill, stop and cut off engine hosts under streams of all kinds, and check that every stream keeps its bytes.

usage: kill_hosts.py [--models bundled qwen3_5] [--times 10] [--streams 32] [--hosts 3] [--seed 1]

For each model, the bundled one and goldens' families with random weights and the bundled vocabulary: `--times` rounds
of each fault: SIGKILL of an engine process, SIGKILL of a host, SIGSTOP of a host with its engine processes, a link that
drops everything, and a link that is cut. The fault hits the host with the most requests, when a random share of all
chunks has arrived; a round whose streams have all ended by then is repeated.

A pause is the longest time between two chunks of any stream without beam search. Exit status 1 if a stream differs
from its undisturbed run in any bit, logprobs included, or does not end; or if the median of the pauses is above 1 s
after a kill or a cut connection, or above 2 s after silence.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import structlog
import uvloop
from host_process import SECRET, HostProcess, LinkProxy, proxying, running_hosts
from quire import SamplingParams
from quire.runtime.cluster import Cluster, Credentials, Members
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.types import StructuredOutputs, join_chunks
from quire.runtime.engine import Engine, GenerateRequest, TextProcessor, models_digest
from quire.runtime.model import BUNDLED_MODEL

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, for tests.support

from tests.support.random_models import BUNDLED, MODELS, named_model

FLAGS = (
    *("--weights", "q8", "--kv-cache-dtype", "int8", "--kv-cache-memory", "32M", "--threads", "1"),
    *("--num-speculative-tokens", "3"),
)
ROUND_TIMEOUT_S = 120.0
MAX_ATTEMPTS = 5  # attempts at a round whose streams have all ended before the fault
MAX_MEDIAN_S = 1.0
MAX_SILENT_MEDIAN_S = 2.0  # a second of silence passes before it is noticed
COLORS = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 40}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.8, "n": 2, "max_tokens": 150},
    {"temperature": 0.8, "best_of": 3, "max_tokens": 150},
    {"beam_width": 3, "n": 2, "max_tokens": 40, "logprobs": 0},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "stop": ("\n\n\n", "no such text"), "min_tokens": 200},
    {"temperature": 1.0, "structured_outputs": StructuredOutputs(json=COLORS), "ignore_eos": False},
)


def random_streams(count: int, choose: random.Random) -> list[GenerateRequest]:
    streams = []
    for index in range(count):
        params = {"max_tokens": 250, "ignore_eos": True, "logprobs": 2, "seed": index, **KINDS[index % len(KINDS)]}
        prompt = tuple(choose.randrange(4, 4000) for _ in range(choose.randrange(10, 120)))
        if "beam_width" in params:
            del params["seed"]
        streams.append(GenerateRequest(prompt=prompt, sampling_params=SamplingParams(**params)))
    return streams


class Progress:
    """The output that one round has received."""

    def __init__(self) -> None:
        self.num_chunks = 0
        self.longest_s = 0.0  # longest gap between two chunks of one stream


async def read(engine: Engine[Cluster], request: GenerateRequest, progress: Progress) -> object:
    """Read a stream to its end."""
    chunks = []
    last = None
    async for chunk in await engine.submit(request):
        now = time.perf_counter()
        if last is not None and not request.sampling_params.beam_width:
            progress.longest_s = max(progress.longest_s, now - last)
        last = now
        progress.num_chunks += 1
        chunks.append(chunk)
    return join_chunks(chunks)


def kill_engine(host: HostProcess, proxy: LinkProxy) -> None:
    os.kill(host.processes()[1], signal.SIGKILL)


def kill_host(host: HostProcess, proxy: LinkProxy) -> None:
    host.kill()


def stop_host(host: HostProcess, proxy: LinkProxy) -> None:
    host.signal(signal.SIGSTOP)


def swallow(host: HostProcess, proxy: LinkProxy) -> None:
    proxy.is_blackhole = True


def cut(host: HostProcess, proxy: LinkProxy) -> None:
    proxy.cut()


SILENT = (stop_host, swallow)


def restore(host: HostProcess, proxy: LinkProxy) -> None:
    proxy.is_blackhole = False
    if host.process.poll() is None:
        host.signal(signal.SIGCONT)
    else:
        host.start()


class Campaign:
    """Streams over hosts behind proxies, and their results."""

    def __init__(self, hosts: Sequence[HostProcess], proxies: Sequence[LinkProxy], engine: Engine[Cluster]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._hosts = {proxy.address: (host, proxy) for host, proxy in zip(hosts, proxies, strict=True)}
        self.engine = engine

    async def ready(self) -> None:
        """Wait until every host is connected and has nothing to do."""
        hosts = self.engine.core.hosts.values()
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            while not all(host.is_ready for host in hosts) or self._is_busy():
                await asyncio.sleep(0.05)

    def _is_busy(self) -> bool:
        try:
            return self.engine.stats().running > 0
        except Exception:  # no host has sent statistics yet
            return True

    async def rounds(
        self, harm: Callable[[HostProcess, LinkProxy], None], times: int, streams: list[GenerateRequest], seed: int
    ) -> None:
        """Cause the fault `times` times; print how long streams paused and how many requests had to move."""
        choose = random.Random(seed)
        undisturbed = Progress()
        await self.ready()
        expected = await asyncio.gather(*(read(self.engine, stream, undisturbed) for stream in streams))
        longest = []
        num_requests = 0
        for number in range(times):
            for _ in range(MAX_ATTEMPTS):
                await self.ready()
                progress = Progress()
                running = [asyncio.create_task(read(self.engine, stream, progress)) for stream in streams]
                wanted = choose.uniform(0.02, 0.8) * undisturbed.num_chunks
                while progress.num_chunks < wanted and not all(task.done() for task in running):
                    await asyncio.sleep(0.002)
                hosts = self.engine.core.hosts
                address = max(hosts, key=lambda each: hosts[each].num_requests)
                harmed = hosts[address].num_requests
                harm(*self._hosts[address])
                await asyncio.wait(running, timeout=ROUND_TIMEOUT_S)
                self._compare(running, expected, f"{harm.__name__} {number}")
                await asyncio.to_thread(restore, *self._hosts[address])
                if harmed:
                    longest.append(progress.longest_s)
                    num_requests += harmed
                    break
        print(
            f"{harm.__name__}: {len(longest)} times under {len(streams)} streams, {num_requests} requests on the hosts,"
            f" pause median {median(longest):.2f} s, longest {max(longest):.2f} s",
            flush=True,
        )
        if median(longest) > (MAX_SILENT_MEDIAN_S if harm in SILENT else MAX_MEDIAN_S):
            self.outcomes["pauses too long"] += 1

    def _compare(self, running: Sequence[asyncio.Task[object]], expected: Sequence[object], what: str) -> None:
        for index, (task, wanted) in enumerate(zip(running, expected, strict=True)):
            if not task.done():
                outcome = "open"
                task.cancel()
            elif (error := task.exception()) is not None:
                outcome = f"{type(error).__name__}: {error}"
            else:
                outcome = "equal" if task.result() == wanted else "changed"
            self.outcomes[outcome] += 1
            if outcome != "equal":
                hosts = {name: (host.is_ready, host.num_requests) for name, host in self.engine.core.hosts.items()}
                print(f"{what}: stream {index} is {outcome}; hosts {hosts}", flush=True)


@contextlib.asynccontextmanager
async def fleet(hosts: Sequence[HostProcess], model: Path = BUNDLED_MODEL) -> AsyncIterator[Campaign]:
    async with contextlib.AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(proxying(host.address)) for host in hosts]
        members = Members(",".join(proxy.address for proxy in proxies))
        cluster = await Cluster.connect(
            members, Credentials(SECRET.encode()), models_digest(EngineConfig(model=str(model)))
        )
        engine = Engine(cluster, TextProcessor.load(model))
        stack.push_async_callback(engine.close)
        yield Campaign(hosts, proxies, engine)


async def attack(model: Path, options: argparse.Namespace, outcomes: Counter[str]) -> None:
    """Cause all faults on hosts of a model, and add the outcomes of the streams."""
    streams = random_streams(options.streams, random.Random(options.seed))
    with running_hosts(options.hosts, str(model), *FLAGS) as hosts:
        async with fleet(hosts, model) as campaign:
            for harm in (kill_engine, kill_host, stop_host, swallow, cut):
                await campaign.rounds(harm, options.times, streams, options.seed)
        for host in hosts:
            if "Traceback" in (log := host.log()):
                print(f"a traceback in a host's log: {log[log.index('Traceback') :][:2000]}")
                campaign.outcomes["traceback"] += 1
    outcomes.update(campaign.outcomes)


async def main(options: argparse.Namespace) -> int:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            print(f"model {name}", flush=True)
            await attack(named_model(name, Path(folder)), options, outcomes)
    print(dict(outcomes))
    return int(set(outcomes) != {"equal"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--models", nargs="+", default=[BUNDLED, "qwen3_5"], choices=MODELS, metavar="MODEL")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    raise SystemExit(uvloop.run(main(parser.parse_args())))
