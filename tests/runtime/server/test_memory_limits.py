"""Limits on the memory for clients: too low to work, or above the memory of the machine."""

from __future__ import annotations

from typing import Any

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.server import Server
from quire.runtime.server.memory_limits import MemoryLimits


@pytest.mark.parametrize(
    ("settings", "num_tenants", "message"),
    [
        ({"max_outgoing_bytes": 300}, 1, "max_outgoing_bytes is 300 bytes; allowed: at least 4194308"),
        ({"max_outgoing_bytes": 65_539, "max_frame_bytes": 65_536}, 1, "at least 65540"),
        ({"max_unsent_bytes": 1}, 1, "max_unsent_bytes is 1 bytes; allowed: at least 65536"),
        ({"max_unsent_bytes": 131_071}, 2, "at least 131072, to hold one frame of each of 2 tenants"),
        ({"max_pending_bytes": 131_071}, 1, "at least 131072, to hold one frame and one before HELLO"),
        ({"max_kept_bytes": 5215}, 1, "at least 5216"),
        ({"max_kept_bytes": (1 << 40) + 1}, 1, f"allowed: at most {1 << 40}, this machine's memory"),
    ],
)
def test_limits_that_cannot_work_are_refused(settings: dict[str, Any], num_tenants: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryLimits(ServerConfig(**settings)).check(num_tenants, 1 << 40)


def test_the_smallest_limits_are_accepted() -> None:
    config = ServerConfig(
        max_frame_bytes=65_536,
        max_outgoing_bytes=65_540,
        max_unsent_bytes=65_536,
        max_pending_bytes=131_072,
        max_text_bytes=65_536,
        max_kept_bytes=5216,
    )
    MemoryLimits(config).check(1, 131_072)
    MemoryLimits(ServerConfig()).check(1000, 1 << 40)


async def test_a_server_with_such_limits_does_not_start() -> None:
    with pytest.raises(ConfigError, match="max_unsent_bytes"):
        await Server().start(None, ServerConfig(port=0, operator_port=0, openai_port=0, max_unsent_bytes=1))  # type: ignore[arg-type]
