"""Requests are counted for their tenant before the engine accepts them, and no longer after a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.runtime.common.errors import InvalidRequest
from quire.runtime.engine.facade import GenerateRequest
from quire.runtime.server.tenancy.tenants import Tenant, TenantLimits

from tests.support.server import FakeServer, generate, names

Serve = Callable[..., FakeServer]


async def test_a_request_beyond_its_tenants_limit_keeps_no_text(serve: Serve) -> None:
    server = serve(tenant=Tenant("ann", TenantLimits(max_concurrent_requests=1)))
    peer = await server.connect()
    assert names(await peer.ask(generate(1), generate(2, "a long prompt"))) == ["Error", "Accepted"]
    assert server.requests.texts.num_bytes == 0


async def test_a_request_that_ends_before_the_engine_receives_it_keeps_no_text(serve: Serve) -> None:
    """The connection of the request was lost before its task began."""
    server = serve()
    server.engine.submit = lambda _: asyncio.get_running_loop().create_future()  # type: ignore[method-assign]
    live = server.requests.submit(server.tenant, 1, GenerateRequest(prompt="a long prompt"))
    assert server.requests.texts.num_bytes > 0
    live.end(None)
    assert (server.requests.texts.num_bytes, len(server.requests)) == (0, 0)


async def test_a_request_that_the_engine_refuses_is_no_longer_counted(serve: Serve) -> None:
    server = serve(tenant=Tenant("ann", TenantLimits(max_concurrent_requests=1)))
    peer = await server.connect()
    server.engine.refusal = InvalidRequest("no")
    assert names(await peer.ask(generate(1))) == ["Error"]
    assert server.requests.texts.num_bytes == 0
    server.engine.refusal = None
    assert names(await peer.ask(generate(2))) == ["Accepted"]
