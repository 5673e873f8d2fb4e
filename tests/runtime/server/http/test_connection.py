"""Connections of the HTTP API, without sockets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

from quire.runtime.common.server_config import ServerConfig
from quire.runtime.server.http.connection import HTTPConnection
from quire.runtime.server.tenancy.tenants import Turns

HEAD = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def test_one_head_is_parsed_per_turn_of_the_event_loop() -> None:
    api = SimpleNamespace(turns=Turns())
    context = MagicMock(config=ServerConfig())
    loop = asyncio.get_running_loop()
    read_in: list[int] = []
    turn = 0

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count_turns)

    async def read_head() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(HEAD)
        accepted: Any = SimpleNamespace(reader=reader, writer=MagicMock(), awaited_since=loop.time())
        head = await HTTPConnection(accepted, context, cast(Any, api))._read_head()
        assert head is not None
        read_in.append(turn)

    count_turns()
    await asyncio.gather(*(read_head() for _ in range(5)))
    assert len(set(read_in)) == 5, read_in
