"""Images, and texts to embed, on engine hosts: the bits of one machine, also when a host is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from quire import SamplingParams
from quire.runtime.cluster import Cluster, Members, connected_cluster
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.images import extract_images
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.settings import Settings
from quire.runtime.engine import EmbedRequest, Engine, GenerateRequest, load_texts

from tests.fuzz.host_process import SECRET, HostProcess, running_hosts
from tests.support.bits import outcome, running
from tests.support.image_folder import write_qwen_folder

from .test_embedding_models import golden
from .test_engine_hosts import bits_of
from .test_images import messages, png
from .test_survival import Reader

FLAGS = (
    *("--weights", "q8", "--kv-cache-dtype", "int8", "--kv-cache-memory", "4M", "--threads", "1"),
    *("--max-image-tokens", "32"),
)
OPTIONS: dict[str, Any] = {"weights": "q8", "kv_cache_dtype": "int8", "max_image_tokens": 32}
FILES = (png("red", "blue"), png("green", "white", "black", size=(20, 40)), png("blue"))
TEXTS = tuple(f"text {index % 7} " * (1 + index % 11) for index in range(1200))


def asked_about(*files: bytes, n: int = 1) -> GenerateRequest:
    bare, images = extract_images(messages(*files))
    params = SamplingParams(max_tokens=180, ignore_eos=True, temperature=0.8, seed=3, n=n)
    return GenerateRequest(prompt=None, messages=bare, image_files=images, sampling_params=params)


REQUESTS = [asked_about(FILES[0]), asked_about(*FILES[:2], n=2), asked_about(FILES[1]), asked_about(FILES[2])]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_qwen_folder(tmp_path_factory.mktemp("model"), "qwen3_vl")
    return EngineConfig(model=str(folder), embedding_model=golden("bert")[0], **OPTIONS)


@pytest.fixture(scope="module")
def hosts(config: EngineConfig) -> Iterator[list[HostProcess]]:
    assert config.embedding_model is not None
    with running_hosts(2, str(config.model), "--embedding-model", config.embedding_model, *FLAGS) as hosts:
        yield hosts


def connected(hosts: list[HostProcess], config: EngineConfig) -> Any:
    members = Members(",".join(host.address for host in hosts))
    return connected_cluster(Settings(engine=config, server=ServerConfig()), members, SECRET.encode())


async def embedded(engine: Engine[Any], harm: asyncio.Event | None = None) -> Any:
    """Return the vectors of all texts; set `harm` after the first ones."""
    found = []
    async for chunk in await engine.embed(EmbedRequest(inputs=TEXTS)):
        found.append(chunk.values)
        if harm is not None:
            harm.set()
    return np.concatenate(found)


async def stopped_under_streams(engine: Engine[Cluster], hosts: list[HostProcess]) -> tuple[list[Reader], HostProcess]:
    """Stop the host with the most requests, some of which have tokens. Begin again if they had ended before."""
    remote = engine.core.hosts
    while True:
        readers = [Reader(engine, request) for request in REQUESTS]  # type: ignore[arg-type]
        while not any(reader.num_tokens for reader in readers):
            await asyncio.sleep(0.001)
        stopped = max(hosts, key=lambda host: remote[host.address].num_requests)
        stopped.signal(signal.SIGSTOP)
        for _ in range(20):  # turns of the event loop, which read the host's messages
            await asyncio.sleep(0.001)
        if remote[stopped.address].num_requests:
            return readers, stopped
        stopped.signal(signal.SIGCONT)
        await asyncio.gather(*(reader.task for reader in readers))


async def test_images_and_texts_have_the_bits_of_one_machine_when_a_host_is_lost(
    hosts: list[HostProcess], config: EngineConfig
) -> None:
    local = {"model": config.model, "embedding_model": config.embedding_model, **OPTIONS}
    async with running(**local) as engine:
        expected = [await outcome(engine, request) for request in REQUESTS]
        vectors = await embedded(engine)
    assert expected[0] != expected[3], "the image counts"
    async with connected(hosts, config) as cluster:
        engine = Engine(cluster, *load_texts(config))  # type: ignore[assignment]
        assert engine.info.max_images == 16
        begun = asyncio.Event()
        embedding = asyncio.create_task(embedded(engine, begun))
        await begun.wait()
        readers, lost = await stopped_under_streams(engine, hosts)  # type: ignore[arg-type]
        lost.kill()
        await asyncio.gather(*(reader.task for reader in readers))
        assert bits_of(readers) == expected
        assert (await embedding).tobytes() == vectors.tobytes()
        assert sum(status.moved_requests for status in cluster.host_statuses()) > 0
        await engine.close()


async def test_a_server_that_makes_larger_images_than_its_hosts_take_does_not_start(
    hosts: list[HostProcess], config: EngineConfig
) -> None:
    larger = EngineConfig(model=config.model, embedding_model=config.embedding_model, max_image_tokens=64)
    with pytest.raises(ConfigError, match="max_image_tokens: an engine host takes images of"):
        async with connected(hosts, larger):
            pass
    beyond = EngineConfig(model=config.model, max_image_memory=(1 << 30) + 1)
    with pytest.raises(ConfigError, match="max_image_memory must be at most 1073741824 with engine hosts"):
        async with connected(hosts, beyond):
            pass
