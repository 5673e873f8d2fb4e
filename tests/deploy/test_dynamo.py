"""The Dynamo worker, against a double of the interface that Dynamo documents for engines."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from quire import LLM, InvalidRequest, SamplingParams
from quire.runtime.common.errors import Overloaded, Unavailable

from tests.deploy.queries import DEPLOY

PROMPT = (5, 300, 4095, 17)


@dataclass
class EngineConfig:
    model: str
    served_model_name: str | None = None
    runtime_data: dict[str, Any] | None = None
    llm: Any = None


@dataclass
class WorkerConfig:
    namespace: str
    component: str = "backend"
    endpoint: str = "generate"
    model_name: str = ""
    served_model_name: str | None = None
    endpoint_types: str = "chat,completions"
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    event_plane: str | None = None


@dataclass(frozen=True)
class ZmqSource:
    endpoint: str
    topic: str = ""
    dp_rank: int = 0


class DynamoException(Exception):
    """Base of Dynamo's errors."""


@dataclass
class Context:
    """Dynamo's handle of one request."""

    name: str = "request"

    def id(self) -> str:
        return self.name


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the worker's module, imported with the double in place of Dynamo."""
    errors = {name: type(name, (DynamoException,), {}) for name in ("EngineShutdown", "InvalidArgument", "Unknown")}
    backend = {"EngineConfig": EngineConfig, "WorkerConfig": WorkerConfig, "LlmRegistration": SimpleNamespace}
    doubles = {
        "dynamo.common.backend": backend | {"LLMEngine": object, "GenerateChunk": dict, "GenerateRequest": dict},
        "dynamo.common.backend.publisher": {"ZmqSource": ZmqSource},
        "dynamo.common.backend.run": {"run": None},
        "dynamo.llm.exceptions": errors | {"DynamoException": DynamoException},
    }
    for path, names in doubles.items():
        for end in range(1, path.count(".") + 2):
            parent = ".".join(path.split(".")[:end])
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
        vars(sys.modules[path]).update(names)
    spec = importlib.util.spec_from_file_location("quire_dynamo", DEPLOY / "dynamo" / "quire_dynamo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Running:
    """A started engine, and the result of its `start`."""

    engine: Any
    config: EngineConfig
    contexts: list[Context] = field(default_factory=list)

    async def chunks(self, request: dict[str, Any], context: Context | None = None) -> list[dict[str, Any]]:
        return [chunk async for chunk in self.engine.generate(request, context or Context())]


@pytest.fixture
async def running(worker: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    for name, value in (("THREADS", "1"), ("KV_CACHE_MEMORY", "16MiB"), ("WEIGHTS", "q8")):
        monkeypatch.setenv(f"QUIRE_{name}", value)
    engine, _ = await worker.QuireEngine.from_args([])
    try:
        yield Running(engine, await engine.start(1))
    finally:
        await engine.cleanup()
        await engine.cleanup()


async def test_the_worker_generates_the_tokens_of_quire(running: Running) -> None:
    registration = running.config.llm
    assert (registration.kv_cache_block_size, registration.max_num_seqs) == (32, 64)
    assert registration.total_kv_blocks > 0
    request = {
        "token_ids": list(PROMPT),
        "sampling_options": {"temperature": 0.8, "seed": 7, "n": 2, "top_k": -1, "top_p": None},
        "stop_conditions": {"max_tokens": 12, "ignore_eos": True, "stop": None, "stop_token_ids_hidden": [3]},
        "output_options": {"logprobs": 1},
    }
    chunks = await running.chunks(request)
    params = SamplingParams(
        max_tokens=12, ignore_eos=True, temperature=0.8, seed=7, n=2, stop_token_ids=(3,), logprobs=1
    )
    with LLM(weights="q8", kv_cache_memory="16MiB", threads=1) as llm:
        (expected,) = llm.generate([PROMPT], params)
    for index, output in enumerate(expected.outputs):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert [token for chunk in own for token in chunk["token_ids"]] == list(output.token_ids)
        assert output.logprobs is not None
        assert [each for chunk in own for each in chunk.get("log_probs", [])] == [e.logprob for e in output.logprobs]
        assert own[-1]["finish_reason"] == output.finish_reason == "length"
        first = own[0]["top_logprobs"][0]
        assert [(each["rank"], each["token_id"], each["logprob"]) for each in first] == [
            (1, *output.logprobs[0].top[0])
        ]
    usage = [chunk["completion_usage"] for chunk in chunks if "completion_usage" in chunk]
    assert [each["total_tokens"] for each in usage] == [len(PROMPT) + 24]


async def test_requests_that_are_aborted_left_or_refused_leave_nothing(worker: Any, running: Running) -> None:
    endless = {"token_ids": list(PROMPT), "stop_conditions": {"max_tokens": 1500, "ignore_eos": True}}
    context = Context("one")
    stream = running.engine.generate(endless, context)
    await anext(stream)
    await running.engine.abort(context)
    assert [chunk async for chunk in stream][-1]["finish_reason"] == "cancelled"
    await running.engine.abort(context)
    stream = running.engine.generate(endless, Context("two"))
    await anext(stream)
    await stream.aclose()
    assert running.engine._streams == {}
    assert (await running.chunks(endless | {"stop_conditions": {"max_tokens": 2}}))[-1]["finish_reason"] == "length"
    refused: tuple[dict[str, Any], ...] = (
        {"token_ids": []},
        {"token_ids": [10**6]},
        {"token_ids": [5] * 10_000},
        {"token_ids": [5], "sampling_options": {"temperature": "hot"}},
        {"token_ids": [5], "sampling_options": {"use_beam_search": True}},
        {"token_ids": [5], "sampling_options": {"guided_decoding": {"whitespace_pattern": "x"}}},
    )
    for request in refused:
        with pytest.raises(worker.InvalidArgument):
            await running.chunks(request)
    assert isinstance(worker._dynamo_error(Unavailable("gone")), worker.EngineShutdown)
    assert isinstance(worker._dynamo_error(Overloaded("full")), worker.Unknown)


async def test_an_engine_that_is_not_started_is_shut_down(worker: Any) -> None:
    engine, _ = await worker.QuireEngine.from_args([])
    with pytest.raises(worker.EngineShutdown):
        await anext(engine.generate({"token_ids": [5]}, Context()))
    await engine.cleanup()


async def test_dynamo_finds_the_worker_and_its_events(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KV_EVENTS", "tcp://*:5557")
    monkeypatch.setenv("QUIRE_KV_EVENTS_TOPIC", "kv")
    engine, where = await worker.QuireEngine.from_args(["--served-model-name", "m", "--component", "c"])
    assert (where.namespace, where.component, where.served_model_name) == ("dynamo", "c", "m")
    assert await engine.kv_event_sources() == [ZmqSource("tcp://127.0.0.1:5557", "kv")]
    monkeypatch.delenv("QUIRE_KV_EVENTS")
    engine, _ = await worker.QuireEngine.from_args([])
    assert await engine.kv_event_sources() == []


def test_options_become_sampling_parameters(worker: Any) -> None:
    assert worker.sampling_params({"token_ids": [5]}, 9) == SamplingParams(temperature=1.0, max_tokens=9)
    guided = {"json": {"type": "object"}, "regex": None, "choice": [], "backend": "auto"}
    params = worker.sampling_params({"sampling_options": {"guided_decoding": guided}, "stop_conditions": None}, 9)
    assert params.structured_outputs.json == '{"type": "object"}'
    with pytest.raises(InvalidRequest, match="exactly one"):
        worker.sampling_params({"sampling_options": {"guided_decoding": {"regex": "a", "choice": ["b"]}}}, 9)
