"""Traces of requests at every door, received by a collector."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from quire import AsyncClient, Overloaded, SamplingParams
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.types import Usage
from quire.runtime.engine.facade import EmbedRequest, GenerateRequest
from quire.runtime.protocol.frames import FEATURES
from quire.runtime.server.monitoring.open_tracer import open_tracer

from tests.support.http_client import HTTPClient

pytest.importorskip("opentelemetry.sdk", reason="pip install 'quire[traces]'")
from tests.support.collector import PATH, Collector, attributes, collecting, duration

Serve = Callable[..., Awaitable[Any]]

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"
CALLER = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
USER = {"role": "user", "content": "Hello"}
HELLO = {"model": "quire", "messages": [USER]}
ERROR = 2  # status of a span


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


async def post(address: str, path: str, body: object, headers: dict[str, str]) -> int:
    client = await HTTPClient.open(address)
    try:
        client.send("POST", path, body, headers)
        return (await client.receive()).status
    finally:
        client.writer.close()


async def test_the_phases_of_every_kind_of_request_add_up_to_its_time(
    serving: Callable[..., Any], collector: Collector
) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    chat = {**HELLO, "max_tokens": 5}
    async with serving(otlp_traces_endpoint=collector.url, max_num_seqs=4) as real:
        async with AsyncClient(real.address) as client:
            await client.complete("A queue", params)
            await client.complete("A queue", SamplingParams(max_tokens=6, ignore_eos=True, n=3, seed=1))
        assert await post(real.server.openai_address, "/v1/chat/completions", chat, {}) == 200
        assert await post(real.server.openai_address, "/v1/chat/completions", {**chat, "stream": True}, {}) == 200
    assert collector.paths[0] == PATH
    assert collector.resources[0]["service.name"] == "quire"
    spans = collector.requests()
    assert [span.name for span in spans] == ["text_completion quire"] * 2 + ["chat quire"] * 2
    for span in spans:
        phases = collector.phases(span)
        assert sum(phases.values()) == duration(span)
        assert {"prepare", "queue", "prefill", "decode"} <= phases.keys()
        assert span.parent_span_id == b""
    assert len({span.trace_id for span in spans}) == 4


async def test_a_span_has_the_attributes_of_the_conventions_for_generative_ai(
    serving: Callable[..., Any], collector: Collector
) -> None:
    async with serving(otlp_traces_endpoint=collector.url) as real, AsyncClient(real.address) as client:
        for _ in range(2):
            await client.complete((5,) * 40, SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.5, top_k=7))
    _, span = collector.requests()
    assert attributes(span) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "quire",
        "gen_ai.response.model": "quire",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 32,
    }
    assert [(event.name, attributes(event)) for event in span.events] == [
        ("quire.prefix_cache_hit", {"quire.cached_tokens": 32})
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HELLO),
        ("/v1/completions", {"model": "quire", "prompt": "Hello"}),
        ("/v1/responses", {"model": "quire", "input": "Hello"}),
        ("/v1/messages", {**HELLO, "max_tokens": 16}),
        ("/api/chat", HELLO),
        ("/api/generate", {"model": "quire", "prompt": "Hello"}),
    ],
)
async def test_a_request_over_http_belongs_to_the_trace_of_its_caller(
    path: str, body: object, serve: Serve, collector: Collector
) -> None:
    system = await serve(otlp_traces_endpoint=collector.url, ollama_port=0)
    headers = {**CALLER, "anthropic-version": "2023-06-01"}
    assert await post(system.server.ollama_address, path, body, headers) == 200
    await system.server.close()
    (span,) = collector.requests()
    assert span.trace_id.hex() == TRACE_ID
    assert span.parent_span_id.hex() == SPAN_ID
    assert span.trace_state == "vendor=1"


async def test_a_request_over_frames_belongs_to_the_trace_of_its_caller(serve: Serve, collector: Collector) -> None:
    system = await serve(otlp_traces_endpoint=collector.url)
    async with AsyncClient(system.address) as client:
        await client.complete("hi", SamplingParams(max_tokens=2), traceparent=TRACEPARENT)
        await client.complete("hi", SamplingParams(max_tokens=2))
        await client.complete("hi", SamplingParams(max_tokens=2), traceparent="00-zz")
    await system.server.close()
    first, *others = collector.requests()
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert all(span.trace_id.hex() != TRACE_ID and span.parent_span_id == b"" for span in others)


async def test_a_caller_that_does_not_sample_gets_no_span(serve: Serve, collector: Collector) -> None:
    system = await serve(otlp_traces_endpoint=collector.url)
    async with AsyncClient(system.address) as client:
        await client.complete("hi", SamplingParams(max_tokens=2), traceparent=NOT_SAMPLED)
    await system.server.close()
    assert collector.spans == []
    assert [request.trace_id for request in system.engine.requests] == [""]


async def test_a_span_of_a_request_without_an_answer_has_its_error(serve: Serve, collector: Collector) -> None:
    system = await serve(otlp_traces_endpoint=collector.url)
    async with AsyncClient(system.address) as client:
        with pytest.raises(Overloaded):
            await client.complete("full")
        stream = client.generate("hold", SamplingParams(max_tokens=9))
        await anext(stream)
        await stream.aclose()
    assert await post(system.server.openai_address, "/v1/completions", {"model": "quire", "prompt": "fail"}, {}) == 500
    await system.server.close()
    errors = [(attributes(span).get("error.type"), span.status.code) for span in collector.requests()]
    assert errors == [("RESOURCE_EXHAUSTED", ERROR), (None, 0), ("INTERNAL", ERROR)]


async def test_texts_to_embed_have_spans(collector: Collector) -> None:
    from .test_embeddings import embedding_system

    async with embedding_system(otlp_traces_endpoint=collector.url) as system, AsyncClient(system.address) as client:
        await client.embed(["a", "b"], traceparent=TRACEPARENT)
        await client.score("q", ["a"], traceparent=TRACEPARENT)
    spans = collector.requests()
    assert [span.name for span in spans] == ["embeddings quire", "rerank quire"]
    for span in spans:
        assert collector.phases(span).keys() == {"prepare", "encode"}
        assert sum(collector.phases(span).values()) == duration(span)
        assert span.trace_id.hex() == TRACE_ID


async def test_integers_that_no_attribute_holds_harm_no_other_span(serve: Serve, collector: Collector) -> None:
    system = await serve(otlp_traces_endpoint=collector.url)
    long = {"model": "quire", "prompt": "hi", "top_k": 1 << 80}
    await post(system.server.openai_address, "/v1/completions", long, {})
    await post(system.server.openai_address, "/v1/completions", {**long, "top_k": 5}, {})
    await system.server.close()
    assert [attributes(span).get("gen_ai.request.top_k") for span in collector.requests()][-1] == 5


async def test_a_server_without_a_collector_serves_and_closes(serve: Serve) -> None:
    system = await serve(otlp_traces_endpoint="http://127.0.0.1:9")
    async with AsyncClient(system.address) as client:
        assert (await client.complete("hi", SamplingParams(max_tokens=2))).usage.completion_tokens == 2
    await system.server.close()


async def test_a_span_says_which_adapter_task_and_delay_a_request_had(collector: Collector) -> None:
    tracer = open_tracer(f"{collector.url}/", "base", "1")
    trace = tracer.begin(GenerateRequest(prompt="x", lora="sql"))
    trace.accept()
    trace.finish(Usage(prompt_tokens=1, completion_tokens=9, reasoning_tokens=4, stall_ms=5), "stop")
    trace = tracer.begin(EmbedRequest(inputs=("x",), classify=True))
    trace.accept()
    trace.fail(None)
    await tracer.close()
    assert collector.paths == [PATH]
    generated, classified = collector.requests()
    assert (generated.name, classified.name) == ("text_completion sql", "classify base")
    assert attributes(generated)["gen_ai.usage.reasoning.output_tokens"] == 4
    assert [event.name for event in generated.events] == ["quire.preempted"]
    assert attributes(classified)["error.type"] == "_OTHER"
    assert collector.phases(classified).keys() == {"prepare", "encode"}


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:4318", "ftp://a", "http://", "http://a:x", "http://a:0"])
async def test_an_endpoint_that_is_no_url_is_refused(endpoint: str, serve: Serve) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint must be a URL such as http://127"):
        await serve(otlp_traces_endpoint=endpoint)


async def test_a_traceparent_needs_its_feature(serve: Serve) -> None:
    system = await serve()
    raw = await system.raw()
    raw.send("GENERATE", 1, "hi", {}, None, 0, None, None, None, None, False, None, None, [], "", [], "", TRACEPARENT)
    assert (await raw.receive())[:4] == [
        "ERROR", 1, "INVALID_ARGUMENT", "traceparent belongs to the feature `trace`, which HELLO did not request"
    ]  # fmt: skip


async def test_an_older_server_gets_no_traceparent(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tuple(feature for feature in FEATURES if feature != "trace")
    monkeypatch.setattr("quire.runtime.server.msgpack.connection.FEATURES", known)
    system = await serve()
    async with AsyncClient(system.address) as client:
        await client.complete("hi", SamplingParams(max_tokens=2), traceparent=TRACEPARENT)


async def test_metrics_in_openmetrics_have_the_traces_of_slow_requests(
    serving: Callable[..., Any], collector: Collector
) -> None:
    async with serving(otlp_traces_endpoint=collector.url) as real:
        async with AsyncClient(real.address) as client:
            await client.complete("A queue", SamplingParams(max_tokens=3, ignore_eos=True), traceparent=TRACEPARENT)
        http = await HTTPClient.open(real.server.operator_address)
        http.send("GET", "/metrics", None, {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})
        reply = await http.receive("GET")
        http.writer.close()
    assert reply.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    found = {
        family.name
        for family in text_string_to_metric_families(reply.content.decode())
        for sample in family.samples
        if sample.exemplar is not None and sample.exemplar.labels == {"trace_id": TRACE_ID}
    }
    assert found == {
        "quire_time_to_first_token_seconds",
        "quire_request_time_per_output_token_seconds",
        "quire_e2e_request_latency_seconds",
        "quire_request_queue_time_seconds",
        "quire_request_prefill_time_seconds",
        "quire_request_decode_time_seconds",
    }
