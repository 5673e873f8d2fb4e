"""Embeddings and scores over both doors, on an engine with a fake encoder: answers, limits, credit, cancel, clients."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from quire.runtime.client import AsyncClient
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ContextLengthExceeded, InvalidRequest
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.engine import EmbedRequest, Engine, TextProcessor
from quire.runtime.engine.embedding.embedder import CHUNK_TEXTS
from quire.runtime.engine.embedding.vectors import cosines
from quire.runtime.engine.text import Tokenizer
from quire.runtime.model import BUNDLED_MODEL, model_path
from quire.runtime.model.runner import ModelRunner, load_model
from quire.runtime.server import Server

from tests.support.fake_encoder import (
    ENCODER_INFO,
    MAX_MODEL_LEN,
    NAN_TOKEN,
    FakeEncoder,
    FakeTexts,
    fake_encoder_core,
    vector,
)
from tests.support.http_client import Reply, connection
from tests.support.waiting import until

from .conftest import FREE_PORTS, RawClient, System, raw_client

FEATURES = ("embeddings",)


@asynccontextmanager
async def embedding_system(
    encoder: FakeEncoder | None = None, runner: ModelRunner | None = None, **settings: Any
) -> AsyncIterator[Any]:
    encoder = encoder or FakeEncoder()
    engine = Engine(fake_encoder_core(encoder, runner), TextProcessor(None, None), FakeTexts())
    server, clients = Server(), []  # type: ignore[var-annotated]
    await server.start(engine, ServerConfig(served_model_name="quire", **FREE_PORTS, **settings))
    try:

        async def raw(features: tuple[str, ...]) -> RawClient:
            client = await raw_client(server.address, hello=False)
            client.send("HELLO", [1], None, features)
            assert (await client.receive())[0] == "WELCOME"
            clients.append(client)
            return client

        yield System(engine, server, raw)  # type: ignore[arg-type]
        for client in clients:
            client.writer.transport.abort()
        await until(lambda: not engine.core.scheduler.has_work)
        await until(lambda: len(server._context.requests) == 0)  # type: ignore[union-attr]
        assert server._context.requests.texts.num_bytes == 0  # type: ignore[union-attr]
    finally:
        await server.close()
        await engine.close()


def rows(*texts: str) -> np.ndarray[Any, Any]:
    return np.stack([vector(tuple(map(ord, text))) for text in texts])


async def ask(system: Any, path: str, method: str = "POST", **body: Any) -> Reply:
    async with connection(system) as client:
        return await client.ask(method, path, {"model": "quire", **body} if method == "POST" else None)


# /v1/embeddings, /v1/rerank, /v1/score


@pytest.mark.parametrize("given", ["ab", ["ab", "c"], [97, 98], [[97, 98], "c"]], ids=str)
async def test_embeddings_have_openais_form(given: Any) -> None:
    texts = ["ab", "c"] if given not in ("ab", [97, 98]) else ["ab"]
    async with embedding_system() as system:
        reply = await ask(system, "/v1/embeddings", input=given)
        assert reply.status == 200
        assert reply.json["object"] == "list"
        assert reply.json["model"] == "quire"
        assert [each["index"] for each in reply.json["data"]] == list(range(len(texts)))
        assert np.array_equal(np.float32([each["embedding"] for each in reply.json["data"]]), rows(*texts))
        num_tokens = len("".join(texts))
        assert reply.json["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def test_an_embedding_model_beside_another_has_its_own_name() -> None:
    info = msgspec.structs.replace(ENCODER_INFO, name="small")
    runner = load_model(EngineConfig(kv_cache_memory=1 << 20))
    async with embedding_system(FakeEncoder(info), runner) as system:
        listed = await ask(system, "/v1/models", method="GET")
        assert [each["id"] for each in listed.json["data"]] == ["quire", "small"]
        assert (await ask(system, "/v1/models/small", method="GET")).json["id"] == "small"
        for model in ("small", None):
            reply = await ask(system, "/v1/embeddings", input="a", model=model)
            assert (reply.status, reply.json["model"]) == (200, "small")
        reply = await ask(system, "/v1/embeddings", input="a", model="other")
        assert (reply.status, "'quire' and 'small'" in reply.error["message"]) == (404, True)


MISTAKEN: list[tuple[str, str, dict[str, Any]]] = [
    ("small", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("small", "/v1/completions", {"prompt": "a"}),
    ("small", "/v1/responses", {"input": "a"}),
    ("small", "/v1/responses/input_tokens", {"input": "a"}),
    ("small", "/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
    ("quire", "/v1/embeddings", {"input": "a"}),
    ("quire", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("quire", "/v1/score", {"text_1": "a", "text_2": "b"}),
]


@pytest.mark.parametrize(("num_labels", "makes"), [(0, "makes vectors"), (1, "scores texts")])
async def test_a_model_that_cannot_do_what_is_asked_says_so(num_labels: int, makes: str) -> None:
    info = msgspec.structs.replace(ENCODER_INFO, name="small", num_labels=num_labels)
    async with embedding_system(FakeEncoder(info), load_model(EngineConfig(kv_cache_memory=1 << 20))) as system:
        for model, path, body in MISTAKEN:
            reply = await ask(system, path, model=model, **body)
            text = f"'small' {makes} only" if model == "small" else f"'quire' generates text only; 'small' {makes}"
            assert (reply.status, reply.error["param"], text in reply.error["message"]) == (400, "model", True)


async def test_texts_are_tokenized_by_the_model_that_is_named(serving: Callable[..., Any]) -> None:
    async with serving(embedding_model="demo_embedding") as system:
        for model, tokenizer, length in (
            ("quire", Tokenizer(BUNDLED_MODEL), 2048),
            ("demo_embedding", Tokenizer(model_path("demo_embedding")), 512),
        ):
            reply = await ask(system, "/tokenize", model=model, prompt="a queue", return_token_strs=True)
            ids = tokenizer.encode("a queue")
            assert (reply.json["tokens"], reply.json["max_model_len"]) == (ids, length)
            assert reply.json["token_strs"] == [tokenizer.token(each).data.decode() for each in ids]
            bare = await ask(system, "/tokenize", model=model, prompt="a queue", add_special_tokens=False)
            assert (await ask(system, "/detokenize", model=model, tokens=bare.json["tokens"])).json[
                "prompt"
            ] == "a queue"
            card = await ask(system, f"/v1/models/{model}", method="GET")
            assert card.json["max_model_len"] == length
            beyond = await ask(system, "/detokenize", model=model, tokens=[10**6])
            assert (beyond.status, beyond.error["param"]) == (400, "tokens")
        long = await ask(system, "/tokenize", model="demo_embedding", prompt="a" * (512 * 128 + 1))
        assert (long.status, long.error["code"]) == (400, "context_length_exceeded")


async def test_two_models_of_one_name_are_listed_once() -> None:
    info = msgspec.structs.replace(ENCODER_INFO, name="quire")
    async with embedding_system(FakeEncoder(info), load_model(EngineConfig(kv_cache_memory=1 << 20))) as system:
        listed = await ask(system, "/v1/models", method="GET")
        assert [each["id"] for each in listed.json["data"]] == ["quire"]
        assert (await ask(system, "/v1/completions", prompt=[5], model="small")).status == 404


async def test_models_say_what_each_is_for() -> None:
    runner = load_model(EngineConfig(kv_cache_memory=1 << 20))
    pairs = msgspec.structs.replace(ENCODER_INFO, num_labels=1, name="pairs", prompts={})
    topics = msgspec.structs.replace(pairs, num_labels=3, name="topics")
    vectors = {"capabilities": ["embedding", "rerank"], "prompt_names": ["query", "document"]}
    scores = {"capabilities": ["rerank", "classify"]}
    labels = {"capabilities": ["classify"]}
    text = {"capabilities": ["completion"], "default_sampling_params": {"temperature": 1.0}}
    one_name = msgspec.structs.replace(ENCODER_INFO, name="quire")
    both = {**text, **vectors, "capabilities": ["completion", "embedding", "rerank"]}
    for info, beside, expected, cards in (
        (ENCODER_INFO, None, [("quire", "embed")], [vectors]),
        (pairs, None, [("quire", "score")], [scores]),
        (pairs, runner, [("quire", "generate"), ("pairs", "score")], [text, scores]),
        (topics, runner, [("quire", "generate"), ("topics", "score")], [text, labels]),
        (one_name, runner, [("quire", "generate"), ("quire", "embed")], [both]),
    ):
        async with embedding_system(FakeEncoder(info), beside) as system:
            listed = (await ask(system, "/v1/models", method="GET")).json["data"]
            told = ("capabilities", "prompt_names", "default_sampling_params")
            assert [{name: card[name] for name in told if name in card} for card in listed] == cards
            async with AsyncClient(str(system.server.address)) as client:
                models = await client.models()
            assert [(each.name, each.task) for each in models] == expected
            assert models[-1].max_model_len == MAX_MODEL_LEN


async def test_base64_has_the_bits_of_the_floats() -> None:
    async with embedding_system() as system:
        reply = await ask(system, "/v1/embeddings", input=["ab"], encoding_format="base64", dimensions=2)
        whole = await ask(system, "/v1/embeddings", input=["ab"], dimensions=2)
    values = struct.unpack("<2f", base64.b64decode(reply.json["data"][0]["embedding"]))
    assert list(values) == whole.json["data"][0]["embedding"]


async def test_a_prompt_goes_before_each_text() -> None:
    async with embedding_system() as system, AsyncClient(str(system.server.address)) as client:
        reply = await ask(system, "/v1/embeddings", input=["a", "b"], prompt_name="query")
        assert np.array_equal(np.float32([each["embedding"] for each in reply.json["data"]]), rows("q: a", "q: b"))
        assert np.array_equal(await client.embed(["a", "b"], prompt_name="document"), rows("d: a", "d: b"))


async def test_thousands_of_texts_are_one_answer() -> None:
    texts = [chr(65 + index % 50) * (1 + index % 7) for index in range(1500)]
    async with embedding_system() as system:
        reply = await ask(system, "/v1/embeddings", input=texts)
        assert np.array_equal(np.float32([each["embedding"] for each in reply.json["data"]]), rows(*texts))
        assert [each["index"] for each in reply.json["data"]] == list(range(1500))
        assert reply.json["usage"]["prompt_tokens"] == sum(map(len, texts))
        assert 'quire_embed_requests_total{kind="embed"} 1.0' in system.metrics()
        assert "quire_encoded_texts_total 1500.0" in system.metrics()


async def test_rerank_sorts_and_score_keeps_the_order() -> None:
    documents = ["b", "a", "cc", "a"]
    scores = cosines(rows("q: q")[0], rows(*(f"d: {each}" for each in documents)))[:, 0]
    async with embedding_system() as system:
        ranked = (await ask(system, "/v1/rerank", query="q", documents=documents, top_n=3)).json
        scored = (await ask(system, "/v1/score", text_1="q", text_2=documents)).json
        single = (await ask(system, "/score", queries="q", documents="b")).json
        objects = await ask(system, "/rerank", query="q", documents=[{"text": "b"}], return_documents=False)
        cohere = (await ask(system, "/v2/rerank", query="q", documents=documents, top_n=3)).json
    order = sorted(range(4), key=lambda index: -scores[index])[:3]
    assert [each["index"] for each in ranked["results"]] == order
    assert cohere["results"] == ranked["results"]
    assert [each["document"]["text"] for each in ranked["results"]] == [documents[index] for index in order]
    assert np.array_equal(np.float32([each["relevance_score"] for each in ranked["results"]]), scores[order])
    assert np.array_equal(np.float32([each["score"] for each in scored["data"]]), scores)
    assert [each["score"] for each in single["data"]] == [scores[0]]
    assert "document" not in objects.json["results"][0]


async def test_classes_have_vllms_form() -> None:
    info = msgspec.structs.replace(ENCODER_INFO, num_labels=2, labels=("bad", "good"), prompts={})
    async with embedding_system(FakeEncoder(info)) as system:
        reply = await ask(system, "/classify", input=["ab", "c"])
        assert 'quire_embed_requests_total{kind="classify"} 1.0' in system.metrics()
        alone = await ask(system, "/classify", input="ab", truncate_prompt_tokens=1)
        odd = await ask(system, "/classify", input="ab", dimensions=2)
    assert reply.json["object"] == "list"
    assert reply.json["id"].startswith("classify-")
    for index, each in enumerate(reply.json["data"]):
        assert (each["index"], each["num_classes"], sum(each["probs"])) == (index, 2, pytest.approx(1))
        assert each["label"] == ("bad", "good")[int(np.argmax(each["probs"]))]
    assert reply.json["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert alone.json["usage"]["prompt_tokens"] == 1
    assert (odd.status, "dimensions" in odd.error["message"]) == (400, True)


async def test_classes_of_many_texts_have_the_index_of_their_text() -> None:
    info = msgspec.structs.replace(ENCODER_INFO, num_labels=2, labels=("bad", "good"), prompts={})
    async with embedding_system(FakeEncoder(info)) as system:
        reply = await ask(system, "/classify", input=["a"] * (CHUNK_TEXTS + 2))
    assert [each["index"] for each in reply.json["data"]] == list(range(CHUNK_TEXTS + 2))


@pytest.mark.parametrize(
    ("path", "body", "text", "param"),
    [
        ("/classify", {"input": "a"}, "this model has no labels", None),
        ("/classify", {}, "input is missing", "input"),
        ("/v1/embeddings", {}, "input is missing", "input"),
        ("/v1/embeddings", {"input": 5}, "input must be text, token ids or a list", "input"),
        ("/v1/embeddings", {"input": ["a", [True]]}, "input must be", "input"),
        ("/v1/embeddings", {"input": []}, "input has 0 entries", "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1] is empty", "input"),
        ("/v1/embeddings", {"input": ["a", [10**6]]}, "input[1]: the token id ", "input"),
        ("/v1/embeddings", {"input": [10**6]}, "input: the token id ", "input"),
        ("/v1/embeddings", {"input": "x" * 33}, "input has 33 tokens", "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 9}, "between 1 and 4, not 9", "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "float or base64", "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": "x"}, "must be", "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "not supported", "stream"),
        ("/v1/embeddings", {"input": "a", "input_type": "query"}, "use prompt_name", "input_type"),
        ("/v1/embeddings", {"input": "a", "normalize": False}, "not supported here; leave it out", "normalize"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "not supported", "embed_dtype"),
        ("/classify", {"input": "a", "softmax": False}, "not supported", "softmax"),
        ("/classify", {"input": "a", "prompt_name": "query"}, "not supported", "prompt_name"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "use_activation": 1}, "not supported", "use_activation"),
        ("/v1/rerank", {"query": "q", "max_tokens_per_doc": 5}, "truncate_prompt_tokens", "max_tokens_per_doc"),
        ("/v1/rerank", {"query": "q"}, "documents is missing", "documents"),
        ("/v1/rerank", {"query": "q", "documents": "a"}, "list of texts", "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a", {}]}, "documents[1] must be text", "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "at least 1", "top_n"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "one text, not 2", "text_1"),
        ("/v1/score", {"text_1": [], "text_2": "c"}, "one text, not 0", "text_1"),
        ("/v1/score", {"text_1": 5, "text_2": "c"}, "text_1 must be text", "text_1"),
        ("/v1/score", {"text_1": "x" * 40, "text_2": "c"}, "text_1 has 43 tokens", "text_1"),
        ("/v1/score", {"queries": "a", "text_2": ""}, "text_2 is empty", "text_2"),
        ("/v1/score", {"queries": "", "documents": ["b", "c"]}, "queries is empty", "queries"),
        ("/v1/score", {"text_1": "a", "documents": ["b", "x" * 40]}, "documents[1] has 43 tokens", "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1] is empty", "documents"),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "two names of one field", "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "c", "documents": ["d"]}, "two names of one field", "text_2"),
        ("/v1/completions", {"prompt": "a"}, "generates no text", None),
    ],
)
async def test_wrong_fields_are_refused_by_name(path: str, body: dict[str, Any], text: str, param: str | None) -> None:
    async with embedding_system() as system:
        reply = await ask(system, path, **body)
    assert reply.status == 400
    assert text in reply.error["message"]
    assert reply.error["param"] == param


async def test_a_top_n_above_the_documents_ranks_them_all() -> None:
    async with embedding_system() as system:
        reply = await ask(system, "/v1/rerank", query="q", documents=["a", "bb"], top_n=1000)
    assert sorted(each["index"] for each in reply.json["results"]) == [0, 1]


async def test_a_text_that_is_too_long_names_the_limit() -> None:
    async with embedding_system() as system:
        reply = await ask(system, "/v1/embeddings", input=["a", "x" * (MAX_MODEL_LEN + 1)])
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "input[1] has 33 tokens, the limit of this model is 32" in reply.error["message"]
        cut = await ask(system, "/v1/embeddings", input=["x" * 99], truncate_prompt_tokens=-1)
        assert cut.json["usage"]["prompt_tokens"] == 32


async def test_an_answer_that_is_too_long_to_hold_is_refused() -> None:
    async with embedding_system(max_outgoing_bytes=65 << 10, max_frame_bytes=64 << 10) as system:
        reply = await ask(system, "/v1/embeddings", input=["a"] * 2000)
        assert reply.status == 400
        assert "max_outgoing_bytes" in reply.error["message"]


async def test_an_answer_that_other_answers_leave_no_room_for_may_be_tried_again() -> None:
    async with embedding_system(max_unsent_bytes=65 << 10, max_frame_bytes=64 << 10) as system:
        unsent = system.server._context.unsent.of("")  # bytes of the only tenant
        unsent.add(60 << 10)
        reply = await ask(system, "/v1/embeddings", input=["a"] * 300)
        assert (reply.status, reply.headers["x-should-retry"]) == (429, "true")
        unsent.add(-60 << 10)
        assert (await ask(system, "/v1/embeddings", input=["a"] * 300)).status == 200
        long = await ask(system, "/v1/embeddings", input=["a"] * 2000)
        assert (long.status, "or ask for base64" in long.error["message"]) == (400, True)
        long = await ask(system, "/v1/embeddings", input=["a"] * 2000, encoding_format="base64")
        assert (long.status, "base64" in long.error["message"]) == (400, False)


async def test_an_answer_is_not_counted_as_held_and_as_sent() -> None:
    """The held values take 280 kB, the answer 150 kB, the limit is 350 kB; the connection continues."""
    body = {"model": "quire", "input": ["a"] * 2000, "encoding_format": "base64"}
    limits = {"max_outgoing_bytes": 350_000, "max_frame_bytes": 300_000}
    async with embedding_system(**limits) as system, connection(system) as client:
        for _ in range(2):
            reply = await client.ask("POST", "/v1/embeddings", body)
            assert (reply.status, len(reply.json["data"])) == (200, 2000)


async def test_an_answer_that_fails_is_not_held_any_more() -> None:
    async with embedding_system() as system, connection(system) as client:
        body = {"model": "quire", "input": [*["a"] * 2 * CHUNK_TEXTS, [NAN_TOKEN]]}
        assert (await client.ask("POST", "/v1/embeddings", body)).status == 500
        await until(lambda: system.server._context.unsent.num_bytes == 0)


async def test_a_connection_that_closes_after_its_answer_has_cancelled_nothing() -> None:
    async with embedding_system() as system, connection(system) as client:
        reply = await client.ask("POST", "/v1/embeddings", {"model": "quire", "input": "a"}, {"connection": "close"})
        assert reply.status == 200
        assert await client.is_closed()
        await until(lambda: not system.server.num_connections)
        assert 'quire_cancelled_total{cause="disconnect"} 0.0' in system.metrics()


async def test_a_draining_server_embeds_no_more_texts() -> None:
    async with embedding_system() as system:
        await system.server.drain(0)
        reply = await ask(system, "/v1/embeddings", input="a")
        assert (reply.status, reply.error["message"][:27]) == (503, "the server is shutting down")


async def test_a_lost_http_connection_cancels_its_texts() -> None:
    encoder = FakeEncoder()
    async with embedding_system(encoder) as system:
        encoder.gate.clear()
        async with connection(system) as client:
            client.send("POST", "/v1/embeddings", {"input": ["a"] * 500})
            await until(lambda: bool(encoder.batches))
        await until(lambda: not system.engine.core.scheduler.has_work)
        encoder.gate.set()


# EMBED and SCORE


async def test_embed_is_answered_in_the_order_of_its_inputs() -> None:
    async with embedding_system() as system:
        client = await system.raw(features=FEATURES)
        client.send("EMBED", 7, ["ab", [97, 98], "c"])
        *others, done = await client.until("DONE")
        accepted, vectors = others[-2:]
        assert accepted[:2] == ["ACCEPTED", 7]
        assert vectors[:4] == ["VECTORS", 7, 0, 4]
        assert np.array_equal(np.frombuffer(vectors[4], "<f4").reshape(3, 4), rows("ab", "ab", "c"))
        assert done[:3] == ["DONE", 7, "stop"]
        assert done[3]["prompt_tokens"] == 5


async def test_score_is_answered_with_floats() -> None:
    async with embedding_system() as system:
        client = await system.raw(features=FEATURES)
        client.send("SCORE", 7, "q", ["a", "b"])
        *_, scores, done = await client.until("DONE")
        assert scores[:3] == ["SCORES", 7, 0]
        assert scores[3] == pytest.approx(cosines(rows("q: q")[0], rows("d: a", "d: b"))[:, 0].tolist())
        assert done[2] == "stop"


async def test_without_credit_the_server_stops_computing() -> None:
    encoder = FakeEncoder()
    async with embedding_system(encoder) as system:
        client = await system.raw(features=FEATURES)
        client.send("EMBED", 1, ["a"] * 10 * CHUNK_TEXTS, None, None, None, None, 0, 1)
        received = await client.until("VECTORS")
        await until(lambda: system.engine.stats().encoded_texts == 3 * CHUNK_TEXTS)
        for _ in range(20):
            await asyncio.sleep(0)
        assert system.engine.stats().encoded_texts == 3 * CHUNK_TEXTS
        client.send("CREDIT", 1, 1 << 20)
        received += await client.until("DONE")
        assert sum(len(each[4]) for each in received if each[0] == "VECTORS") == 16 * 10 * CHUNK_TEXTS


async def test_a_client_that_grants_no_credit_is_ended() -> None:
    async with embedding_system(credit_timeout_ms=50) as system:
        client = await system.raw(features=FEATURES)
        client.send("EMBED", 1, ["a"] * 10 * CHUNK_TEXTS, None, None, None, None, 0, 1)
        error = (await client.until("ERROR"))[-1]
        assert error[2] == "DEADLINE_EXCEEDED"
        assert "grant CREDIT" in error[3]


async def test_cancel_ends_a_request_and_frees_its_id() -> None:
    encoder = FakeEncoder()
    async with embedding_system(encoder) as system:
        client = await system.raw(features=FEATURES)
        encoder.gate.clear()
        client.send("EMBED", 1, ["a"] * 500)
        await until(lambda: bool(encoder.batches))
        client.send("CANCEL", 1)
        assert (await client.until("DONE"))[-1][:3] == ["DONE", 1, "cancelled"]
        encoder.gate.set()
        client.send("EMBED", 1, ["a"])
        assert (await client.until("DONE"))[-1][:3] == ["DONE", 1, "stop"]


async def test_a_server_that_leaves_names_the_last_embed() -> None:
    encoder = FakeEncoder()
    async with embedding_system(encoder) as system:
        client = await system.raw(features=FEATURES)
        encoder.gate.clear()
        client.send("EMBED", 7, ["a"])
        assert (await client.receive())[:2] == ["ACCEPTED", 7]
        draining = asyncio.create_task(system.server.drain(30))
        assert (await client.receive())[:2] == ["GOAWAY", 7]
        encoder.gate.set()
        assert (await client.until("DONE"))[-1][:3] == ["DONE", 7, "stop"]
        await draining


async def test_a_request_that_ends_before_it_runs_is_not_counted_any_more() -> None:
    async with embedding_system() as system:
        requests = system.server._context.requests
        tenant = system.server._context.keyring.authenticate(None)
        live = requests.embed(tenant, 1, EmbedRequest(inputs=("a",)))
        assert (len(requests), tenant.totals.live) == (1, 1)
        live.close()
        live.close()
        await asyncio.sleep(0)
        assert (len(requests), tenant.totals.live, requests.texts.num_bytes) == (0, 0, 0)
        assert (await ask(system, "/v1/embeddings", input="a")).status == 200


async def test_a_malformed_frame_fails_its_request_only_and_one_without_the_feature_its_connection() -> None:
    async with embedding_system() as system:
        client = await system.raw(features=FEATURES)
        client.send("EMBED", 1, [5])
        assert (await client.until("ERROR"))[-1][1:3] == [1, "INVALID_ARGUMENT"]
        client.send("EMBED", 2, ["a"])
        assert (await client.until("DONE"))[-1][1] == 2
        other = await system.raw(features=())
        other.send("EMBED", 1, ["a"])
        error = (await other.until("ERROR"))[-1]
        assert error[1] is None
        assert "embeddings" in error[3]


async def test_vectors_come_in_chunks() -> None:
    async with embedding_system() as system:
        client = await system.raw(features=FEATURES)
        client.send("EMBED", 1, ["a"] * (2 * CHUNK_TEXTS))
        frames = [each for each in await client.until("DONE") if each[0] == "VECTORS"]
        assert [each[2] for each in frames] == [0, CHUNK_TEXTS]


async def test_the_client_embeds_scores_and_reports_progress() -> None:
    texts = [chr(65 + index % 50) for index in range(3000)]
    progress: list[tuple[int, int]] = []
    async with embedding_system() as system, AsyncClient(str(system.server.address)) as client:
        values = await client.embed(texts, on_progress=lambda done, total: progress.append((done, total)))
        assert np.array_equal(values, rows(*texts))
        assert progress[-1] == (3000, 3000)
        assert len(progress) > 10
        assert np.array_equal(await client.embed("ab", dimensions=4), rows("ab"))
        assert np.array_equal(await client.embed([97, 98]), rows("ab"))
        scores = await client.score("q", ["a", "b"])
        assert np.array_equal(scores, cosines(rows("q: q")[0], rows("d: a", "d: b"))[:, 0])
        with pytest.raises(ContextLengthExceeded, match=r"inputs\[0\]"):
            await client.embed("x" * 99)
        assert np.array_equal(await client.embed(iter(["ab", "c"])), rows("ab", "c"))  # type: ignore[arg-type]
        assert np.array_equal(await client.embed(np.array([97, 98])), rows("ab"))  # type: ignore[arg-type]
        assert np.array_equal(await client.score("q", iter(["a", "b"])), scores)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="inputs has 0 entries"):
            await client.embed([])
        for inputs in (5, {"a": 1}, b"a"):
            with pytest.raises(InvalidRequest, match="prompts are text, token ids or a list"):
                await client.embed(inputs)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="list of texts"):
            await client.score("q", "a")
        with pytest.raises(TypeError, match="nothing"):
            await client.embed("a", nothing=1)  # type: ignore[call-arg]


async def test_a_cancelled_call_of_the_client_cancels_its_request() -> None:
    encoder = FakeEncoder()
    async with embedding_system(encoder) as system, AsyncClient(str(system.server.address)) as client:
        encoder.gate.clear()
        call = asyncio.create_task(client.embed(["a"] * 500))
        await until(lambda: bool(encoder.batches))
        call.cancel()
        await asyncio.wait([call])
        await until(lambda: not system.engine.core.scheduler.has_work)
        encoder.gate.set()
