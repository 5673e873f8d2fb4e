"""Engine hosts are killed, stopped and cut off: every stream continues at another host with the same bytes.

Two real hosts on loopback, a proxy before each. Rules without processes are tested in `tests/runtime/cluster/`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.client import AsyncClient
from quire.runtime.cluster import Cluster, Credentials, Members
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.types import OutputChunk, StructuredOutputs
from quire.runtime.engine import Engine, GenerateRequest, TextProcessor, models_digest
from quire.runtime.model import BUNDLED_MODEL

from tests.fuzz.host_process import SECRET, HostProcess, LinkProxy, proxying, running_hosts
from tests.fuzz.server_process import start_server
from tests.support.bits import asked, bits, prompt, running, together

from .test_survival import Reader, each_gains

FLAGS = (
    *("--weights", "q8", "--kv-cache-dtype", "int8", "--kv-cache-memory", "16M", "--threads", "1"),
    *("--num-speculative-tokens", "3"),
)
LOCAL: dict[str, Any] = {"weights": "q8", "kv_cache_dtype": "int8", "kv_cache_memory": 16 << 20}
DIGEST = models_digest(EngineConfig())
TEXT_PROCESSOR = TextProcessor.load(BUNDLED_MODEL)
JSON = StructuredOutputs(json={"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 12})


def all_kinds() -> list[GenerateRequest]:
    """Return streams of all kinds. All but the search and the schema take hundreds of steps, wherever they begin."""
    return [
        asked(prompt(40, 1), max_tokens=600),
        asked(prompt(9, 2), max_tokens=600, temperature=0.9, top_p=0.9, top_k=50, seed=3),
        asked(prompt(20, 3), max_tokens=500, temperature=0.8, seed=4, n=2),
        asked(prompt(21, 4), max_tokens=500, temperature=0.8, seed=5, best_of=3, n=1),
        asked(prompt(22, 5), max_tokens=40, beam_width=3, n=2, logprobs=0),
        asked(prompt(23, 6), max_tokens=600, temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3, seed=8),
        asked("The module provides", max_tokens=600, stop=("no such string", "\n\n\n\n"), min_tokens=590),
        asked("Colors: ", max_tokens=120, structured_outputs=JSON, ignore_eos=False, temperature=1.0, seed=2),
    ]


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[HostProcess]]:
    with running_hosts(2, *FLAGS) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def expected() -> list[list[str]]:
    """Return the results of the streams on one engine in this process."""

    async def undisturbed() -> list[list[str]]:
        async with running(**LOCAL) as engine:
            return await together(engine, all_kinds())

    return asyncio.run(undisturbed())


@dataclass
class Fleet:
    engine: Engine[Cluster]
    hosts: list[HostProcess]
    proxies: list[LinkProxy]

    def busiest(self) -> int:
        """Return the index of the host with the most requests."""
        cluster = self.engine.core
        return max(range(len(self.hosts)), key=lambda at: cluster.hosts[self.proxies[at].address].num_requests)


@asynccontextmanager
async def fleet(hosts: Sequence[HostProcess], **options: Any) -> AsyncIterator[Fleet]:
    """Run an engine over the hosts; check at the end that they have nothing left."""
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(proxying(host.address)) for host in hosts]
        members = Members(",".join(proxy.address for proxy in proxies))
        cluster = await Cluster.connect(members, Credentials(SECRET.encode()), DIGEST, **options)
        engine = Engine(cluster, TEXT_PROCESSOR)
        stack.push_async_callback(engine.close)
        yield Fleet(engine, list(hosts), proxies)
        await engine.drain()
        async with asyncio.timeout(60):
            while (
                not all(
                    cluster.hosts[proxy.address].is_ready or process.process.poll() is not None
                    for proxy, process in zip(proxies, hosts, strict=True)
                )
                or engine.stats().running
            ):
                await asyncio.sleep(0.02)


def bits_of(readers: Sequence[Reader]) -> list[list[str]]:
    return [bits(reader.chunks) for reader in readers]


def cut(fleet: Fleet, at: int) -> None:
    fleet.proxies[at].cut()


def swallow(fleet: Fleet, at: int) -> None:
    fleet.proxies[at].is_blackhole = True


def kill_engine(fleet: Fleet, at: int) -> None:
    os.kill(fleet.hosts[at].processes()[1], signal.SIGKILL)


def stop(fleet: Fleet, at: int) -> None:
    fleet.hosts[at].signal(signal.SIGSTOP)


def kill(fleet: Fleet, at: int) -> None:
    fleet.hosts[at].kill()


def bring_back(fleet: Fleet, at: int) -> None:
    fleet.proxies[at].is_blackhole = False
    if fleet.hosts[at].process.poll() is None:
        fleet.hosts[at].signal(signal.SIGCONT)


class ClientReader(Reader):
    """Reads a stream of a client to its end."""

    async def _read(self, client: AsyncClient, request: GenerateRequest) -> list[OutputChunk]:  # type: ignore[override]
        assert request.prompt is not None
        async for chunk in client.generate(request.prompt, request.sampling_params):
            self.chunks.append(chunk)
        return self.chunks


async def test_streams_keep_their_bytes_when_their_api_server_and_then_an_engine_is_killed(
    hosts: list[HostProcess], expected: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    addresses = ",".join(host.address for host in hosts)
    flags = ("--engine-hosts", addresses, "--secret-file", str(tmp_path / "secret"))
    with start_server(*flags) as one, start_server(*flags) as other:
        async with AsyncClient([one.address, other.address]) as client:
            readers = [ClientReader(client, request) for request in all_kinds()]  # type: ignore[arg-type]
            await each_gains(readers[:2], 20)
            one.kill()
            await each_gains(readers[:2], 20)
            os.kill(hosts[0].processes()[1], signal.SIGKILL)
            await asyncio.gather(*(reader.task for reader in readers))
    assert bits_of(readers) == expected


@pytest.mark.parametrize("harm", [cut, swallow, stop, kill_engine, kill], ids=lambda harm: harm.__name__)
async def test_streams_of_all_kinds_keep_their_bytes_when_a_host_is_lost(
    harm: Callable[[Fleet, int], None], hosts: list[HostProcess], expected: list[list[str]]
) -> None:
    async with fleet(hosts) as many:
        async with asyncio.timeout(60):
            while not all(host.takes_requests for host in many.engine.core.hosts.values()):
                await asyncio.sleep(0.02)
        readers = [Reader(many.engine, request) for request in all_kinds()]
        await each_gains(readers[:2], 20)
        at = many.busiest()
        harm(many, at)
        try:
            await asyncio.gather(*(reader.task for reader in readers))
        finally:
            await asyncio.to_thread(bring_back, many, at)
        assert bits_of(readers) == expected
        assert sum(status.moved_requests for status in many.engine.core.host_statuses()) > 0
