"""The operator's HTTP port beside a live server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from http.client import HTTPConnection
from typing import Any, NamedTuple

import msgspec
from quire import AsyncClient, SamplingParams
from quire.runtime.server.monitoring.status import Status

Serve = Callable[..., Awaitable[Any]]


class Answer(NamedTuple):
    status_code: int
    content_type: str
    text: str


async def get(system: Any, path: str) -> Answer:
    def ask() -> Answer:
        with closing(HTTPConnection(system.server.http_address, timeout=5)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return Answer(response.status, response.headers["content-type"], response.read().decode())

    return await asyncio.to_thread(ask)


async def test_health_and_readiness(system: Any) -> None:
    assert (await get(system, "/healthz")).text == "ok\n"
    assert (await get(system, "/readyz")).status_code == 200
    assert (await get(system, "/nothing")).status_code == 404


async def test_an_engine_without_progress_is_not_ready(serve: Serve) -> None:
    system = await serve(stall_timeout_ms=1)
    client = await system.raw()
    client.send("GENERATE", 1, "hold", {"max_tokens": 9})
    await client.until("TOKENS")
    client.send("PING", 1)
    await client.receive()
    await get(system, "/readyz")
    answer = await get(system, "/readyz")
    assert answer.status_code == 503
    assert "1 requests wait or run" in answer.text


async def test_cancels_and_rejections_are_counted_by_cause(system: Any) -> None:
    client = await system.raw()
    client.send("GENERATE", 1, "hold", {"max_tokens": 9})
    await client.until("TOKENS")
    client.send("CANCEL", 1)
    await client.until("DONE")
    client.send("GENERATE", 2, "x", {"unknown": 1})
    await client.until("ERROR")
    text = (await get(system, "/metrics")).text
    assert 'quire_cancelled_total{cause="client"} 1.0' in text
    assert 'quire_admission_rejections_total{reason="invalid_argument"} 1.0' in text


async def test_metrics_are_prometheus_text(system: Any) -> None:
    answer = await get(system, "/metrics")
    assert answer.content_type.startswith("text/plain")
    assert 'quire_kv_pages{state="owned"} 4.0' in answer.text


async def test_the_status_page_tells_of_real_requests(serving: Callable[..., Any]) -> None:
    async with serving() as real:
        async with AsyncClient(real.address) as client:
            params = SamplingParams(max_tokens=9, ignore_eos=True)
            chunks = [chunk async for chunk in client.generate("This module provides", params)]
            status = msgspec.json.decode((await get(real, "/status.json")).text, type=Status)
        (ended,) = status.recent
        usage = chunks[-1].usage
        assert usage is not None
        assert (ended.outcome, ended.generated, ended.prompt_tokens) == ("length", 9, usage.prompt_tokens)
        assert (ended.prefill_ms, ended.decode_ms) == (usage.prefill_ms, usage.decode_ms)
        assert status.info == real.engine.info
        assert status.latencies.time_to_first_token.count == status.latencies.e2e.count == 1
        assert status.latencies.inter_token.count == 8
        assert status.connections == 1
        assert "status.js" in (await get(real, "/")).text
