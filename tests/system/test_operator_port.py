"""The operator's HTTP port of a live server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import closing
from http.client import HTTPConnection
from typing import Any, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from quire import AsyncClient, SamplingParams
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.engine import Engine, TextProcessor
from quire.runtime.model import model_path
from quire.runtime.server import Server
from quire.runtime.server.monitoring.status import Status
from quire.runtime.workers import EnginePool

Serve = Callable[..., Awaitable[Any]]


class Answer(NamedTuple):
    status_code: int
    content_type: str
    text: str


async def get(system: Any, path: str) -> Answer:
    return await fetch(system.server.operator_address, path)


async def fetch(address: str, path: str) -> Answer:
    def ask() -> Answer:
        with closing(HTTPConnection(address, timeout=60)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return Answer(response.status, response.headers["content-type"], response.read().decode())

    return await asyncio.to_thread(ask)


async def test_health_and_readiness(system: Any) -> None:
    assert (await get(system, "/healthz")).text == "ok\n"
    assert (await get(system, "/readyz")).status_code == 200
    assert (await get(system, "/nothing")).status_code == 404


async def test_the_http_api_has_the_metrics_without_a_key_if_asked(serve: Serve) -> None:
    system = await serve(openai_metrics=True, metrics_compat="vllm", token="a key")
    answer = await fetch(system.server.openai_address, "/metrics")
    assert answer.status_code == 200
    assert answer.content_type == (await get(system, "/metrics")).content_type
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    read_by_gateways = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info")
    assert names >= {f"vllm:{name}" for name in read_by_gateways}
    assert (await fetch(system.server.openai_address, "/v1/models")).status_code == 401


async def test_the_http_api_has_no_metrics_otherwise(system: Any) -> None:
    assert (await fetch(system.server.openai_address, "/metrics")).status_code == 404


async def test_an_engine_without_progress_is_not_ready(serve: Serve) -> None:
    system = await serve(stall_timeout_ms=1)
    client = await system.raw()
    client.send("GENERATE", 1, "hold", {"max_tokens": 9})
    await client.until("TOKENS")
    client.send("PING", 1)
    await client.receive()
    async with asyncio.timeout(60):
        while (answer := await get(system, "/readyz")).status_code != 503:
            await asyncio.sleep(0.001)
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


async def test_the_status_has_the_numbers_of_real_requests(serving: Callable[..., Any]) -> None:
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


async def test_no_counter_falls_when_the_engine_restarts() -> None:
    core = await EnginePool.launch(EngineConfig(kv_cache_memory=8 << 20))
    engine = Engine(core, TextProcessor.load(model_path(None)))
    server = Server()
    try:
        await server.start(engine, ServerConfig(port=0, operator_port=0, openai_port=0))
        async with AsyncClient(server.address) as client:
            for _ in range(3):
                await client.complete([5] * 70, SamplingParams(max_tokens=60, ignore_eos=True))
            before = await counters(server, lambda found: found["quire_steps_total"] >= 180)
            pid = core.members[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await client.complete([5] * 70, SamplingParams(max_tokens=2, ignore_eos=True))
            after = await counters(server, lambda found: found["quire_engine_restarts_total"] == 1)
    finally:
        await server.close()
        await engine.close()
    assert before.keys() <= after.keys()
    assert [name for name in before if after[name] < before[name]] == []
    assert before["quire_prefix_cache_hits_total"] > 0
    assert after["quire_generation_tokens_total"] == before["quire_generation_tokens_total"] + 2


async def counters(server: Server, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Wait for the engine's metrics and `condition`; return every counter and histogram sample."""
    async with asyncio.timeout(60):
        while True:
            text = (await fetch(server.operator_address, "/metrics")).text
            found = {
                str((sample.name, sample.labels)) if sample.labels else sample.name: sample.value
                for family in text_string_to_metric_families(text)
                if family.type in ("counter", "histogram")
                for sample in family.samples
            }
            if "quire_steps_total" in found and condition(found):
                return found
            await asyncio.sleep(0.02)
