"""Several models in one server: every door finds the model that a request names, by its name, adapter or alias."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest
from quire.runtime.client import AsyncClient
from quire.runtime.common.errors import InvalidRequest, Overloaded, Unavailable
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import Engine, TextProcessor
from quire.runtime.server import CatalogModel, ManagedEngine, ModelCatalog, Residency, Resident, Server

from tests.support.fake_encoder import ENCODER_INFO, FakeEncoder, FakeTexts, fake_encoder_core
from tests.support.http_client import HTTPClient, Reply
from tests.support.waiting import until

from .conftest import FREE_PORTS, FakeEngine, raw_client

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
NAMES = ["big", "small", "sql", "vectors", "gpt-4o-mini"]


class Models:
    """A server with two models that generate, the second with an adapter, and one that makes vectors."""

    def __init__(self) -> None:
        self.big = FakeEngine(fingerprint="b")
        self.small = FakeEngine(fingerprint="s", adapters={"sql": "sql@00"}, default_sampling={"temperature": 0.25})
        encoder = FakeEncoder(msgspec.structs.replace(ENCODER_INFO, name="vectors"))
        self.vectors = Engine(fake_encoder_core(encoder, None), TextProcessor(None, None), FakeTexts())
        self.server = Server()

    @property
    def address(self) -> str:
        return self.server.address

    async def ask(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Reply:
        """Ask at the port of Ollama's clients, which has all HTTP APIs."""
        client = await HTTPClient.open(self.server.ollama_address)
        try:
            return await client.ask(method, path, body, headers)
        finally:
            client.writer.transport.abort()


@asynccontextmanager
async def models() -> AsyncIterator[Models]:
    system = Models()
    served = [
        CatalogModel("big", system.big),  # type: ignore[arg-type]
        CatalogModel("small", system.small, "small"),  # type: ignore[arg-type]
        CatalogModel("vectors", system.vectors, "vectors"),
    ]
    config = ServerConfig(ollama_port=0, **FREE_PORTS)
    await system.server.start_models(ModelCatalog(served, {"gpt-4o-mini": "small"}), config)
    try:
        yield system
        await until(lambda: len(system.server._context.requests) == 0)  # type: ignore[union-attr]
    finally:
        await system.server.close()
        await system.vectors.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1, "store": True}),
        ("/v1/messages", CHAT),
        ("/api/chat", {**CHAT, "stream": False}),
        ("/api/generate", {"prompt": "hi", "stream": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_each_http_api_finds_the_model_of_a_body(path: str, body: dict[str, Any]) -> None:
    async with models() as system:
        for name, engine, lora in (
            ("big", system.big, ""),
            ("small", system.small, ""),
            ("sql", system.small, "sql"),
            ("gpt-4o-mini", system.small, ""),
        ):
            reply = await system.ask("POST", path, {**body, "model": name})
            assert (reply.status, reply.json["model"]) == (200, name)
            assert {request.lora for request in engine.requests} == {lora}
            assert not (system.big if engine is system.small else system.small).requests
            engine.requests.clear()
        unknown = await system.ask("POST", path, {**body, "model": "other"})
        assert unknown.status == 404
        assert all(repr(name) in unknown.content.decode() for name in NAMES)


async def test_a_model_that_cannot_do_a_task_is_refused_by_name() -> None:
    async with models() as system:
        for path, body, name, problem in (
            ("/v1/completions", {"prompt": "a"}, "vectors", "'vectors' makes vectors only, and generates no text"),
            ("/v1/chat/completions", CHAT, "vectors", "'vectors' makes vectors only, and generates no text"),
            ("/v1/embeddings", {"input": "a"}, "gpt-4o-mini", "'gpt-4o-mini' generates text only"),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}, "big", "'big' generates text only"),
        ):
            reply = await system.ask("POST", path, {**body, "model": name})
            assert (reply.status, problem in reply.content.decode()) == (400, True)
        assert (system.big.requests, system.small.requests) == ([], [])


async def test_a_body_without_a_model_gets_the_first_one_that_can_do_it() -> None:
    async with models() as system:
        reply = await system.ask("POST", "/v1/chat/completions", CHAT)
        assert (reply.status, reply.json["model"], len(system.big.requests)) == (200, "big", 1)
        reply = await system.ask("POST", "/v1/embeddings", {"input": "ab"})
        assert (reply.status, reply.json["model"]) == (200, "vectors")


async def test_vectors_and_tokens_come_from_the_named_model() -> None:
    async with models() as system:
        for name in ("vectors", None):
            reply = await system.ask("POST", "/v1/embeddings", {"input": "ab", "model": name})
            assert (reply.status, reply.json["model"]) == (200, "vectors")
        reply = await system.ask("POST", "/api/embed", {"input": "ab", "model": "vectors:latest"})
        assert (reply.status, reply.json["model"]) == (200, "vectors:latest")
        reply = await system.ask("POST", "/tokenize", {"prompt": "ab", "model": "small"})
        assert reply.json["tokens"] == [0, *b"ab"]
        reply = await system.ask("POST", "/tokenize", {"prompt": "ab", "model": "vectors"})
        assert "this model has no tokenizer" in reply.error["message"]


async def test_the_recommended_sampling_is_that_of_the_named_model() -> None:
    async with models() as system:
        for name in ("big", "gpt-4o-mini"):
            await system.ask("POST", "/v1/chat/completions", {**CHAT, "model": name})
        assert system.big.requests[0].sampling_params.temperature == 1.0
        assert system.small.requests[0].sampling_params.temperature == 0.25


async def test_a_stored_response_is_read_by_its_own_model() -> None:
    async with models() as system:
        body = {"input": "hi", "max_output_tokens": 1, "store": True, "model": "small"}
        first = (await system.ask("POST", "/v1/responses", body)).json
        again = (await system.ask("GET", f"/v1/responses/{first['id']}")).json
        assert (again["model"], again["output"]) == ("small", first["output"])


async def test_all_names_are_listed_with_their_own_limits() -> None:
    async with models() as system:
        cards = {card["id"]: card for card in (await system.ask("GET", "/v1/models")).json["data"]}
        assert list(cards) == NAMES
        assert cards["vectors"]["capabilities"] == ["embedding", "rerank"]
        assert cards["vectors"]["max_model_len"] == ENCODER_INFO.max_model_len
        assert cards["sql"]["parent"] == "small"
        assert cards["gpt-4o-mini"]["root"] == "small"
        assert cards["small"]["default_sampling_params"] == {"temperature": 0.25}
        assert (await system.ask("GET", "/v1/models/gpt-4o-mini")).json == cards["gpt-4o-mini"]
        listed = (await system.ask("GET", "/v1/models", headers={"anthropic-version": "2023-06-01"})).json["data"]
        assert [card["id"] for card in listed] == NAMES
        tags = (await system.ask("GET", "/api/tags")).json["models"]
        assert [card["name"] for card in tags] == [f"{name}:latest" for name in NAMES]


async def test_the_client_finds_models_by_name() -> None:
    async with models() as system, AsyncClient(system.address) as client:
        params = SamplingParams(max_tokens=1)
        await client.complete("hi", params, model="sql")
        assert [request.lora for request in system.small.requests] == ["sql"]
        await client.complete("hi", params)
        assert len(system.big.requests) == 1
        assert (await client.embed("ab", model="vectors")).shape == (1, ENCODER_INFO.dimensions)
        assert await client.tokenize("ab", model="small") == (0, *b"ab")
        with pytest.raises(InvalidRequest, match="this model has no tokenizer"):
            await client.tokenize("ab", model="vectors")
        assert [model.name for model in await client.models()] == NAMES
        assert [model.task for model in await client.models()] == ["generate"] * 3 + ["embed", "generate"]
        for ask in (client.complete("hi", model="x"), client.embed("a", model="x"), client.tokenize("a", model="x")):
            with pytest.raises(InvalidRequest, match="the model 'x' does not exist here; this server has 'big' and"):
                await ask


async def test_a_peer_without_the_feature_sees_the_first_model_and_may_name_none() -> None:
    async with models() as system:
        raw = await raw_client(system.address)
        raw.send("MODELS", 1)
        assert [model["name"] for model in (await raw.receive())[2]] == ["big"]
        raw.send("TOKENIZE", 2, "ab", True, "small")
        error = await raw.receive()
        assert error[:3] == ["ERROR", 2, "INVALID_ARGUMENT"]
        assert "feature `models`" in error[3]
        raw.writer.transport.abort()


async def test_the_fingerprint_stands_for_all_models() -> None:
    def fingerprint(*fingerprints: str) -> str:
        engines: list[Any] = [FakeEngine(fingerprint=each) for each in fingerprints]
        return ModelCatalog([CatalogModel(str(index), engine) for index, engine in enumerate(engines)]).fingerprint

    assert fingerprint("a") == "a"
    assert len({fingerprint("a", "b"), fingerprint("a", "c"), fingerprint("b", "a"), fingerprint("a", "a")}) == 4


def test_an_alias_may_stand_for_an_adapter() -> None:
    engine: Any = FakeEngine(adapters={"sql": "sql@00"})
    found = ModelCatalog([CatalogModel("base", engine)], {"text2sql": "sql"}).find("text2sql")
    assert found is not None
    assert (found.name, found.target, found.lora) == ("text2sql", "sql", "sql")


def test_all_engines_are_observed_and_the_statistics_are_sums_of_engines_that_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> Any:
        raise Unavailable("no answer")

    engines: list[Any] = [FakeEngine(steps=1), FakeEngine(steps=2), FakeEngine(steps=4)]
    catalog = ModelCatalog([CatalogModel(str(index), engine, str(index)) for index, engine in enumerate(engines)])
    observer: Any = object()
    catalog.set_observer(observer)
    assert [engine.observer for engine in engines] == [observer] * 3
    monkeypatch.setattr(engines[1], "stats", fail)
    assert catalog.stats().step == 5


# Models that are loaded when a request needs them


class Loaded:
    """A server with two models, of which one fits, on fake engines whose loads a test may hold."""

    def __init__(self) -> None:
        self.server = Server()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.engines: dict[str, FakeEngine] = {}

    @asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[Any]:
        await self.may_load.wait()
        engine = self.engines[name] = FakeEngine()
        yield engine
        assert not engine.live, "a stream was cut"

    async def start(self, **options: Any) -> None:
        residents = [Resident(name, 3, partial(self.open, name), **options) for name in ("a", "b")]
        residency = Residency(residents, 5)
        models = []
        for resident in residents:
            facade = resident.facade = ManagedEngine(FakeEngine().info, partial(residency.using, resident))
            models.append(CatalogModel(resident.name, facade, resident.name if models else ""))
        await residency.start()
        self.residency = residency
        config = ServerConfig(ollama_port=0, **FREE_PORTS)
        await self.server.start_models(ModelCatalog(models, {}, residency), config)

    async def ask(self, method: str, address: str, path: str, body: object = None) -> Reply:
        client = await HTTPClient.open(address)
        try:
            return await client.ask(method, path, body)
        finally:
            client.writer.transport.abort()

    async def chat(self, model: str) -> Reply:
        return await self.ask("POST", self.server.openai_address, "/v1/chat/completions", {**CHAT, "model": model})


@asynccontextmanager
async def loaded(**options: Any) -> AsyncIterator[Loaded]:
    system = Loaded()
    await system.start(**options)
    try:
        yield system
        await until(lambda: len(system.server._context.requests) == 0)  # type: ignore[union-attr]
        assert system.server._context.requests.texts.num_bytes == 0  # type: ignore[union-attr]
    finally:
        await system.server.close()
        await system.residency.close()


async def test_requests_of_all_apis_wait_for_their_model() -> None:
    async with loaded() as system, AsyncClient(system.server.address) as client:
        system.may_load.clear()
        bodies = {"/v1/chat/completions": CHAT, "/v1/messages": CHAT, "/api/chat": {**CHAT, "stream": False}}
        port = system.server.ollama_address
        waiting: list[Any] = [system.ask("POST", port, path, {**body, "model": "b"}) for path, body in bodies.items()]
        waiting.append(client.complete("hi", SamplingParams(max_tokens=1), model="b"))
        tasks = [asyncio.create_task(each) for each in waiting]
        await until(lambda: system.residency.statuses()[1].waits == 4)
        cards = (await system.ask("GET", port, "/v1/models")).json["data"]
        assert [(card["id"], card["state"]) for card in cards] == [("a", "unloaded"), ("b", "loading")]
        assert 0 < cards[1]["ready_in_s"] <= 2.01
        assert [card["name"] for card in (await system.ask("GET", port, "/api/ps")).json["models"]] == []
        system.may_load.set()
        *replies, output = await asyncio.gather(*tasks)
        assert [reply.status for reply in replies] == [200] * 3
        assert output.outputs[0].token_ids == (0,)
        assert len(system.engines["b"].requests) == 4
        assert [card["name"] for card in (await system.ask("GET", port, "/api/ps")).json["models"]] == ["b:latest"]


async def test_models_take_turns_in_one_memory_and_metrics_count() -> None:
    async with loaded() as system:
        for model in ("a", "b", "b", "a"):
            assert (await system.chat(model)).status == 200
        metrics = generate_latest(system.server.observer.registry).decode()
        for sample in (
            'quire_model_loads_total{model="a"} 2.0',
            'quire_model_evictions_total{model="b"} 1.0',
            'quire_model_waits_total{model="a"} 2.0',
            'quire_model_loaded{model="b"} 0.0',
            "quire_models_memory_limit_bytes 5.0",
            "quire_models_memory_used_bytes 3.0",
        ):
            assert sample in metrics


async def test_a_model_of_an_operator_is_refused_until_it_is_loaded() -> None:
    async with loaded(policy="operator") as system:
        refused = await system.chat("a")
        assert (refused.status, refused.headers["x-should-retry"]) == (503, "true")
        assert "an operator of this server loads it" in refused.error["message"]
        operators = system.server.operator_address
        assert (await system.ask("POST", operators, "/models/a/load")).status == 202
        await until(lambda: system.residency.statuses()[0].state == "ready")
        assert (await system.chat("a")).status == 200
        assert [model["state"] for model in (await system.ask("GET", operators, "/models")).json["models"]] == [
            "ready",
            "unloaded",
        ]
        assert (await system.ask("POST", operators, "/metrics")).status == 405


async def test_a_refusal_says_after_which_time_the_model_is_expected() -> None:
    async with loaded() as system:
        system.residency.residents["b"].load_s = 100.0
        reply = await system.chat("b")
        assert (reply.status, reply.headers["retry-after"], reply.headers["x-should-retry"]) == (429, "100", "true")
        assert reply.error["code"] == "rate_limit_exceeded"
        async with AsyncClient(system.server.address) as client:
            with pytest.raises(Overloaded) as caught:
                await client.complete("hi", model="b")
        assert caught.value.retry_after_ms == 100_000
