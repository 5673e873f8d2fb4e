"""The checks of an API server before it uses engine hosts. The hosts are fakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from quire.runtime.cluster import Members, connected_cluster
from quire.runtime.cluster import start as start_module
from quire.runtime.cluster.host_link import MAX_IMAGE_BYTES
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.settings import Settings
from quire.runtime.engine.facade import ImageInfo

from tests.support.engine_processes import core_info


class FakeCluster:
    """Hosts that take images of 64 tokens."""

    info = core_info(images=ImageInfo(token_id=5, num_tokens=64, block=28))
    is_closed = False

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    found = FakeCluster()

    async def connect(*_: Any, **__: Any) -> FakeCluster:
        return found

    monkeypatch.setattr(start_module, "Cluster", SimpleNamespace(connect=connect))
    monkeypatch.setattr(start_module, "read_vision", lambda _, most: SimpleNamespace(num_tokens=most))
    return found


def connected(max_image_tokens: int, max_image_memory: int = MAX_IMAGE_BYTES) -> Any:
    engine = EngineConfig(max_image_tokens=max_image_tokens, max_image_memory=max_image_memory)
    return connected_cluster(Settings(engine=engine, server=ServerConfig()), Members("a:1"), b"sixteen or more bytes")


@pytest.mark.parametrize("max_image_tokens", [20, 64])
async def test_images_may_be_as_large_as_hosts_take_them_or_smaller(
    cluster: FakeCluster, max_image_tokens: int
) -> None:
    async with connected(max_image_tokens):
        assert not cluster.is_closed
    assert cluster.is_closed


async def test_larger_images_than_hosts_take_end_the_start(cluster: FakeCluster) -> None:
    with pytest.raises(ConfigError, match="host takes images of 64 tokens, this server makes them of up to 65; set"):
        async with connected(65):
            pass
    assert cluster.is_closed


async def test_images_take_at_most_the_memory_that_a_link_may_need(cluster: FakeCluster) -> None:
    with pytest.raises(ConfigError, match="max_image_memory must be at most 1073741824 with engine hosts"):
        async with connected(64, MAX_IMAGE_BYTES + 1):
            pass
