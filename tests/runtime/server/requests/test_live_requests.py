"""Requests are counted for their tenant before the engine accepts them, and no longer after a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.runtime.common.errors import InvalidRequest
from quire.runtime.engine.facade import GenerateRequest
from quire.runtime.server.tenancy.tenants import Tenant, TenantLimits

from tests.support.server import FakeServer, chunk, generate, names

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


async def test_the_status_lists_the_oldest_requests_with_their_progress(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(generate(1), generate(2), generate(3))
    assert [live.request_id for live in server.requests.oldest(2)] == ["1", "2"]
    generation = server.engine.generations[0]
    shown = []
    for num_computed in (1, 2):
        generation.note_prefill(num_computed)
        shown += server.requests.oldest(1)
    await generation.put(chunk(0))
    shown += server.requests.oldest(1)
    assert [(live.state, live.prefilled, live.generated) for live in shown] == [
        ("prefill", 1, 0),
        ("prefill", 2, 0),
        ("decode", 3, 1),  # the last chunk of a prefill is not noted
    ]
