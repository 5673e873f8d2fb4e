"""Requests to embed and to score: chunks, limits, truncation, cancelling and failures, on a fake encoder."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    Unavailable,
    UnsupportedModel,
)
from quire.runtime.common.fair_executor import FairExecutor
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import (
    EmbedRequest,
    EmbedStats,
    Engine,
    GenerateRequest,
    LocalEngine,
    SilentObserver,
    TextProcessor,
)
from quire.runtime.engine.embedding.embedder import (
    CHARACTERS_PER_TOKEN,
    CHUNK_CHARACTERS,
    CHUNK_TEXTS,
    Embedder,
    EmbeddingStream,
)
from quire.runtime.engine.embedding.vectors import activated, cosines, probabilities, shortened
from quire.runtime.engine.validator import MAX_INPUTS
from quire.runtime.model.runner import ModelRunner, load_model
from quire.scheduler import AdmissionEstimate, EncodedText, RequestUpdate

from tests.support.fake_encoder import (
    ENCODER_INFO,
    FAILING_TOKEN,
    MAX_MODEL_LEN,
    NAN_TOKEN,
    FakeEncoder,
    FakeTexts,
    fake_encoder_core,
    vector,
)
from tests.support.waiting import until

Running = Callable[..., AbstractAsyncContextManager[LocalEngine]]
LABELS = msgspec.structs.replace(ENCODER_INFO, num_labels=1, score_activation="sigmoid", prompts={})


class Observer(SilentObserver):
    def __init__(self) -> None:
        self.ended: list[EmbedStats] = []
        self.rejected: list[str] = []

    def on_embedded(self, stats: EmbedStats) -> None:
        self.ended.append(stats)

    def on_rejected(self, error: Any) -> None:
        self.rejected.append(error.code)


@asynccontextmanager
async def running(
    encoder: FakeEncoder | None = None, runner: ModelRunner | None = None, **settings: Any
) -> AsyncIterator[LocalEngine]:
    encoder = encoder or FakeEncoder()
    core = fake_encoder_core(encoder, runner, **settings)
    engine = Engine(core, TextProcessor(None, None), FakeTexts())
    engine.set_observer(Observer())
    try:
        yield engine
    finally:
        await engine.close()
    assert encoder.is_closed
    assert not core.scheduler.has_work


def embed(*inputs: Any, **options: Any) -> EmbedRequest:
    return EmbedRequest(inputs=inputs, **options)


async def values_of(engine: LocalEngine, request: EmbedRequest) -> npt.NDArray[np.float32]:
    async with asyncio.timeout(60):
        return np.concatenate([chunk.values async for chunk in await engine.embed(request)])


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


async def test_texts_and_token_ids_become_vectors_in_order() -> None:
    async with running() as engine:
        values = await values_of(engine, embed("a", (5, 6), "bc"))
        assert np.array_equal(values, np.stack([vector(each) for each in (ids("a"), (5, 6), ids("bc"))]))
        stats = engine.stats()
        assert (stats.encoded_texts, stats.encoded_tokens) == (3, 5)
        (ended,) = engine._outputs.observer.ended  # type: ignore[attr-defined]
        assert (ended.kind, ended.num_texts, ended.prompt_tokens, ended.error) == ("embed", 3, 5, None)


async def test_thousands_of_texts_pass_in_chunks_of_which_few_are_in_the_core() -> None:
    encoder = FakeEncoder()
    texts = [chr(65 + index % 50) * (1 + index % 9) for index in range(2000)]
    async with running(encoder) as engine:
        seen = []
        first_index = 0
        async for chunk in await engine.embed(embed(*texts)):
            assert chunk.first_index == first_index
            first_index += len(chunk.values)
            stats = engine.stats()
            assert stats.encoder_waiting + stats.encoder_running <= 2
            seen.append(chunk.values)
        assert np.array_equal(np.concatenate(seen), np.stack([vector(ids(text)) for text in texts]))
        assert max(map(len, seen)) == CHUNK_TEXTS
        (ended,) = engine._outputs.observer.ended  # type: ignore[attr-defined]
        assert (ended.num_texts, ended.prompt_tokens) == (2000, sum(map(len, texts)))


async def test_a_reader_that_pauses_pauses_the_work() -> None:
    async with running() as engine:
        stream = aiter(await engine.embed(embed(*["x"] * 10 * CHUNK_TEXTS)))
        await anext(stream)
        await asyncio.wait_for(until(lambda: engine.stats().encoded_texts == 2 * CHUNK_TEXTS), 60)
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats().encoded_texts == 2 * CHUNK_TEXTS
        assert engine.stats().encoder_waiting == 0
        await stream.aclose()
        await engine.drain()


async def test_closing_or_cancelling_frees_the_queue_at_once() -> None:
    encoder = FakeEncoder()
    async with running(encoder) as engine:
        encoder.gate.clear()
        stream = await engine.embed(embed("a"))
        stream.cancel()
        stream.cancel()
        reading = asyncio.create_task(anext(aiter(await engine.embed(embed("b")))))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        await until(lambda: not engine.core.scheduler.has_work)
        encoder.gate.set()
        assert len(await values_of(engine, embed("c"))) == 1


async def test_dimensions_cut_and_normalize_again() -> None:
    async with running() as engine:
        (short,) = await values_of(engine, embed("abc", dimensions=2))
        (whole,) = await values_of(engine, embed("abc", dimensions=4))
    assert np.array_equal(whole, vector(ids("abc")))
    assert short.shape == (2,)
    assert math.isclose(float(np.linalg.norm(short)), 1.0, rel_tol=1e-6)
    assert np.allclose(short / short[1], whole[:2] / whole[1], rtol=1e-6)
    assert not np.isnan(shortened(np.zeros((1, 4), np.float32), 2, normalize=True)).any()


async def test_shortened_vectors_of_a_model_that_does_not_normalize_keep_their_values() -> None:
    async with running(FakeEncoder(msgspec.structs.replace(ENCODER_INFO, normalize=False))) as engine:
        (short,) = await values_of(engine, embed("abc", dimensions=2))
    assert np.array_equal(short, vector(ids("abc"))[:2])


async def test_a_prompt_may_have_an_empty_name() -> None:
    encoder = FakeEncoder(
        msgspec.structs.replace(ENCODER_INFO, prompts={"": "e: ", "document": "d: "}, default_prompt="document")
    )
    async with running(encoder) as engine:
        await values_of(engine, embed("a", prompt_name=""))
    assert encoder.batches[0][0].token_ids == ids("e: a")


async def test_prompts_go_before_texts_and_not_before_ids() -> None:
    encoder = FakeEncoder()
    async with running(encoder) as engine:
        await values_of(engine, embed("a", (7,), prompt_name="query"))
        with pytest.raises(InvalidRequest, match="prompt_name 'x' is not one of this model's prompts: document, query"):
            engine.embed(embed("a", prompt_name="x"))
    assert [text.token_ids for text in encoder.batches[0]] == [ids("q: a"), (7,)]
    encoder = FakeEncoder(msgspec.structs.replace(ENCODER_INFO, default_prompt="document"))
    async with running(encoder) as engine:
        await values_of(engine, embed("a"))
    assert encoder.batches[0][0].token_ids == ids("d: a")


async def test_a_vector_model_scores_by_the_cosine_of_query_and_document() -> None:
    encoder = FakeEncoder()
    documents = ["one", "two", "three"] * 40
    async with running(encoder) as engine:
        scores = await values_of(engine, embed(*documents, query="which"))
        (ended,) = engine._outputs.observer.ended  # type: ignore[attr-defined]
        assert (ended.kind, ended.num_texts) == ("score", 120)
    assert encoder.batches[0][0].token_ids == ids("q: which")
    query = vector(ids("q: which"))
    rows = np.stack([vector(ids(f"d: {each}")) for each in documents])
    assert scores.shape == (120, 1)
    assert np.array_equal(scores, cosines(query, rows))
    assert np.allclose(scores[:, 0], rows @ query, atol=1e-6)


@pytest.mark.parametrize(
    ("prompts", "used"), [({"passage": "p: "}, "p: "), ({"passage": "p: ", "document": "d: "}, "d: ")]
)
async def test_documents_of_scores_have_the_prompt_for_documents_or_else_for_passages(
    prompts: dict[str, str], used: str
) -> None:
    encoder = FakeEncoder(msgspec.structs.replace(ENCODER_INFO, prompts=prompts))
    async with running(encoder) as engine:
        await values_of(engine, embed("a", query="b"))
    assert [text.token_ids for text in encoder.batches[0]] == [ids("b"), ids(f"{used}a")]


@pytest.mark.parametrize("is_multi_label", [False, True])
async def test_a_classifier_gives_the_probability_of_each_label(is_multi_label: bool) -> None:
    info = msgspec.structs.replace(
        ENCODER_INFO, num_labels=3, labels=("a", "b", "c"), is_multi_label=is_multi_label, prompts={}
    )
    async with running(FakeEncoder(info)) as engine:
        found = await values_of(engine, embed("yes", (5, 6), classify=True))
    logits = np.stack([vector(ids("yes")), vector((5, 6))])[:, :3].astype(np.float64) * 8
    expected = 1 / (1 + np.exp(-logits)) if is_multi_label else np.exp(logits)
    assert np.allclose(found, expected if is_multi_label else expected / expected.sum(1, keepdims=True), atol=1e-6)


async def test_requests_are_counted_by_their_kind() -> None:
    async with running(FakeEncoder(msgspec.structs.replace(LABELS, labels=("LABEL_0",)))) as engine:
        await values_of(engine, embed("a", query="b"))
        await values_of(engine, embed("a", classify=True))
        assert [each.kind for each in engine._outputs.observer.ended] == ["score", "classify"]  # type: ignore[attr-defined]


async def test_what_a_model_without_labels_cannot_do() -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest, match="has no labels"):
            engine.embed(embed("a", classify=True))
    one = msgspec.structs.replace(LABELS, labels=("LABEL_0",))
    async with running(FakeEncoder(one)) as engine:
        ((score,),) = await values_of(engine, embed((9,), classify=True))
    assert score == pytest.approx(1 / (1 + math.exp(-8 * vector((9,))[0])))


async def test_a_model_with_one_label_scores_pairs() -> None:
    encoder = FakeEncoder(LABELS)
    async with running(encoder) as engine:
        scores = await values_of(engine, embed("yes", "no", query="is it"))
        with pytest.raises(InvalidRequest, match="makes no embeddings"):
            engine.embed(embed("a"))
    assert encoder.batches[0][0] == FakeTexts().encode_pair("is it", "yes")
    logits = [float(vector(ids(f"is it{each}"))[0]) * 8 for each in ("yes", "no")]
    assert np.allclose(scores[:, 0], [1 / (1 + math.exp(-each)) for each in logits], atol=1e-6)


def test_vectors_of_all_dimensions_keep_their_bits() -> None:
    rows = np.array([[0.1, 0.2, 0.3]], np.float32)
    for dimensions in (None, 3):
        np.testing.assert_array_equal(shortened(rows, dimensions, True), rows)
    np.testing.assert_array_equal(shortened(np.array([[3, 4, 9]], np.float32), 2, True), np.float32([[0.6, 0.8]]))


def test_a_cosine_does_not_depend_on_the_lengths_of_vectors() -> None:
    query = np.array([3, 0], np.float32)
    rows = np.array([[2, 0], [0, 5], [-4, 0], [0.5, 0.5]], np.float32)
    np.testing.assert_array_equal(cosines(query, rows), np.float32([[1], [0], [-1], [0.5**0.5]]))


def test_extreme_values_have_scores() -> None:
    three = msgspec.structs.replace(ENCODER_INFO, labels=("a", "b", "c"))
    assert probabilities(np.float32([[1e30, 0, -1e30]]), three).tolist() == [[1.0, 0.0, 0.0]]
    assert activated(np.float32([[-1e30], [0], [1e30]]), "sigmoid").tolist() == [[pytest.approx(0.0)], [0.5], [1.0]]
    assert cosines(np.ones(2, np.float32), np.zeros((1, 2), np.float32)).tolist() == [[0.0]]


def test_probabilities_have_the_bits_of_the_exact_sum() -> None:
    """Each of 2,000 unlikely labels is too small to change the sum with a likely one, but together they change a
    bit."""
    info = msgspec.structs.replace(ENCODER_INFO, labels=tuple(map(str, range(2002))))
    row = np.float32([[0.0, -0.20036832988262177, *[-37.4] * 2000]])
    assert probabilities(row, info)[0, 1] == np.float32(0.45007482171058655)


async def test_all_chunks_of_a_request_have_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float | None] = []
    async with running() as engine:
        add = engine.core.add_encoding

        async def note(request: Any) -> Any:
            deadlines.append(request.spec.deadline)
            return await add(request)

        monkeypatch.setattr(engine.core, "add_encoding", note)
        await values_of(engine, embed(*["a"] * 3 * CHUNK_TEXTS, deadline_ms=60_000))
    assert len(deadlines) == 3
    assert deadlines[0] is not None
    assert len(set(deadlines)) == 1


async def test_all_chunks_of_a_request_have_its_tenant_and_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Any] = []
    async with running() as engine:
        add = engine.core.add_encoding

        async def note(request: Any) -> Any:
            added.append((request.spec.tenant, request.spec.priority, request.spec.is_continuation))
            return await add(request)

        monkeypatch.setattr(engine.core, "add_encoding", note)
        await values_of(engine, embed(*["a"] * 2 * CHUNK_TEXTS, tenant="one", priority=7))
    assert added == [("one", 7, False), ("one", 7, True)]


async def test_a_cancelled_request_is_counted_once() -> None:
    async with running() as engine:
        stream = await engine.embed(embed("a"))
        stream.cancel()
        stream.cancel()
        assert len(engine._outputs.observer.ended) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (embed(), "inputs has 0 entries"),
        (embed(*["a"] * (MAX_INPUTS + 1)), f"1 to {MAX_INPUTS} are allowed"),
        (embed("a", ""), r"inputs\[1\] is empty"),
        (embed("a", ()), r"inputs\[1\] is empty"),
        (embed((5, 2000)), r"inputs\[0\]: the token id 2000 is outside the vocabulary 0..1999"),
        (embed((-1,)), "outside the vocabulary"),
        (embed("\ud800"), "lone surrogate"),
        (embed("a", dimensions=5), "dimensions must be between 1 and 4, not 5"),
        (embed("a", dimensions=0), "dimensions must be between 1 and 4, not 0"),
        (embed("a", truncate_prompt_tokens=33), "truncate_prompt_tokens must be between 1 and 32"),
        (
            embed("a", truncate_prompt_tokens=0),
            "truncate_prompt_tokens must be -1, for as many as fit, or 1 to 32, not 0",
        ),
        (embed("a", deadline_ms=0), "deadline_ms"),
        (embed("a", query=""), "query is empty"),
        (embed((1,), query="a", input_name="documents[{}]"), r"documents\[0\] must be text"),
        (embed("a", query="a", dimensions=2), "leave them out"),
    ],
)
async def test_what_is_not_allowed_is_refused_by_name(request_: EmbedRequest, message: str) -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest, match=message):
            engine.embed(request_)
        assert engine._outputs.observer.rejected == ["INVALID_ARGUMENT"]  # type: ignore[attr-defined]


async def test_dimensions_of_a_matryoshka_model_are_those_it_was_trained_for() -> None:
    async with running(FakeEncoder(msgspec.structs.replace(ENCODER_INFO, matryoshka=(2, 4)))) as engine:
        assert (await values_of(engine, embed("a", dimensions=2))).shape == (1, 2)
        with pytest.raises(InvalidRequest, match="dimensions must be one of 2, 4, not 3"):
            engine.embed(embed("a", dimensions=3))


async def test_a_text_that_is_too_long_is_refused_unless_truncation_is_asked_for() -> None:
    long = "x" * (MAX_MODEL_LEN + 1)
    async with running() as engine:
        with pytest.raises(ContextLengthExceeded, match=r"inputs\[1\] has 33 tokens, the limit of this model is 32"):
            await engine.embed(embed("a", long))
        with pytest.raises(ContextLengthExceeded, match=r"inputs\[0\] has 33 tokens"):
            await engine.embed(embed((7,) * 33))
        late = [*["a"] * 3 * CHUNK_TEXTS, long]
        with pytest.raises(ContextLengthExceeded, match=rf"inputs\[{3 * CHUNK_TEXTS}\]"):
            await values_of(engine, embed(*late))
        cut = await values_of(engine, embed(long, (7,) * 33, truncate_prompt_tokens=-1))
        assert np.array_equal(cut, np.stack([vector(ids("x" * 32)), vector((7,) * 32)]))
        few = await values_of(engine, embed("abcdef", truncate_prompt_tokens=3))
        assert np.array_equal(few[0], vector(ids("abc")))


async def test_long_texts_are_chunks_of_their_own() -> None:
    text = "x" * CHUNK_CHARACTERS
    async with running() as engine:
        chunks = [
            len(chunk.values) async for chunk in await engine.embed(embed("a", text, "b", truncate_prompt_tokens=-1))
        ]
    assert chunks == [1, 1, 1]


async def test_each_chunk_has_as_many_characters_as_the_first_one() -> None:
    text = "x" * (CHUNK_CHARACTERS // 4)
    async with running() as engine:
        request = embed(*[text] * 10, truncate_prompt_tokens=-1)
        assert [len(chunk.values) async for chunk in await engine.embed(request)] == [4, 4, 2]


async def test_a_long_query_counts_in_the_length_of_each_chunk() -> None:
    query = "x" * (CHUNK_CHARACTERS // 2)
    async with running(FakeEncoder(LABELS)) as engine:
        request = embed("a", "b", "c", query=query, truncate_prompt_tokens=-1)
        chunks = [len(chunk.values) async for chunk in await engine.embed(request)]
    assert chunks == [1, 1, 1]


async def test_token_ids_need_no_helper_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        monkeypatch.setattr(FairExecutor, "submit", None)
        values = await values_of(engine, embed((5, 6), (7,) * 33, truncate_prompt_tokens=2))
    assert np.array_equal(values, np.stack([vector((5, 6)), vector((7, 7))]))


async def test_a_text_that_is_far_too_long_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine tokenizes only the beginning of a text that may be truncated."""
    tokenized: list[int] = []
    encode = FakeTexts.encode

    def note(self: FakeTexts, text: str, prompt: str = "") -> Any:
        tokenized.append(len(text))
        return encode(self, text, prompt)

    monkeypatch.setattr(FakeTexts, "encode", note)
    most = MAX_MODEL_LEN * CHARACTERS_PER_TOKEN
    long = "x" * (most + 1)
    message = f"has {most + 1} characters; a text of 32 tokens, the limit of this model, may have {most}"
    async with running() as engine:
        with pytest.raises(ContextLengthExceeded, match=rf"inputs\[1\] {message}"):
            await engine.embed(embed("a", long))
        with pytest.raises(ContextLengthExceeded, match=f"query {message}"):
            await engine.embed(embed("a", query=long))
        assert tokenized == [1]
        (cut,) = await values_of(engine, embed(long, truncate_prompt_tokens=3))
        assert tokenized == [1, most]
        assert np.array_equal(cut, vector(ids("xxx")))


async def test_a_text_of_the_encoder_that_is_far_too_long_is_refused_by_tokenize_as_well() -> None:
    most = MAX_MODEL_LEN * CHARACTERS_PER_TOKEN
    async with running() as engine:
        with pytest.raises(ContextLengthExceeded, match=f"{most + 1} characters"):
            await engine.tokenize("x" * (most + 1), of_encoder=True)


async def test_a_text_of_as_many_characters_as_are_tokenized_is_measured_in_tokens() -> None:
    most = MAX_MODEL_LEN * CHARACTERS_PER_TOKEN
    async with running() as engine:
        with pytest.raises(ContextLengthExceeded, match=f"has {most} tokens, the limit of this model is 32"):
            await engine.embed(embed("x" * most))


async def test_pairs_are_as_long_as_texts_at_most() -> None:
    most = MAX_MODEL_LEN * CHARACTERS_PER_TOKEN
    long = "x" * (most + 1)
    async with running(FakeEncoder(LABELS)) as engine:
        for pair in (embed(long, query="a"), embed("a", query=long)):
            with pytest.raises(ContextLengthExceeded, match=f"has {most + 1} characters"):
                await engine.embed(pair)
        cut = embed(long, query="a" * (most + 1), truncate_prompt_tokens=-1)
        assert len(await values_of(engine, cut)) == 1


@pytest.mark.parametrize("method", ["encode", "encode_pair"])
async def test_a_failure_of_the_tokenizer_is_an_error_of_its_request(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise GenerationFailed("the text could not be tokenized: a bug of the library")

    is_pair = method == "encode_pair"
    async with running(FakeEncoder(LABELS) if is_pair else None) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(FakeTexts, method, fail)
            with pytest.raises(GenerationFailed, match="could not be tokenized: a bug of the library"):
                await engine.embed(embed("a", query="b" if is_pair else None))
        assert len(await values_of(engine, embed("a", query="b" if is_pair else None))) == 1


async def test_a_token_id_of_the_tokenizer_that_the_model_lacks_is_refused_by_name() -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest, match=r"inputs\[1\]: the tokenizer makes token id 9731 .* 0\.\.1999"):
            await values_of(engine, embed("a", "b\u2603"))
        with pytest.raises(InvalidRequest, match=r"inputs\[0\]: the tokenizer makes token id 2000 .* 0\.\.1999"):
            await values_of(engine, embed(chr(2000)))


@pytest.mark.parametrize(
    "options",
    [{"dimensions": "4"}, {"dimensions": 1.5}, {"dimensions": True}, {"prompt_name": 5}, {"prompt_name": []},
     {"truncate_prompt_tokens": "4"}, {"truncate_prompt_tokens": 2.5}, {"priority": None}],
)  # fmt: skip
async def test_options_of_another_type_are_refused_by_name(options: dict[str, Any]) -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest, match=next(iter(options))):
            engine.embed(embed("a", **options))


async def test_values_that_are_not_finite_and_a_failing_batch_end_only_their_requests() -> None:
    encoder = FakeEncoder(max_rows=2)
    async with running(encoder) as engine:
        results = await asyncio.gather(
            values_of(engine, embed("ok")),
            values_of(engine, embed((NAN_TOKEN, 5))),
            values_of(engine, embed((FAILING_TOKEN, 5))),
            values_of(engine, embed("go")),
            return_exceptions=True,
        )
        assert isinstance(results[1], GenerationFailed)
        assert "not finite" in str(results[1])
        assert isinstance(results[2], GenerationFailed)
        assert "a bug" in str(results[2])
        assert [len(results[0]), len(results[3])] == [1, 1]  # type: ignore[arg-type]
        codes = [each.error and each.error.code for each in engine._outputs.observer.ended]  # type: ignore[attr-defined]
        assert sorted(map(str, codes)) == ["INTERNAL", "INTERNAL", "None", "None"]


async def test_values_that_are_not_finite_leave_the_other_texts_of_their_batch() -> None:
    encoder = FakeEncoder()
    async with running(encoder) as engine:
        encoder.gate.clear()
        await engine.embed(embed("first"))
        await until(lambda: bool(encoder.batches))
        failing = await engine.embed(embed((NAN_TOKEN,)))
        other = await engine.embed(embed("ok"))
        encoder.gate.set()
        assert [len(chunk.values) async for chunk in other] == [1]
        with pytest.raises(GenerationFailed, match="not finite"):
            [chunk async for chunk in failing]
    assert [text.token_ids for text in encoder.batches[1]] == [(NAN_TOKEN,), ids("ok")]


async def test_a_full_queue_refuses_a_request_and_no_later_chunk_of_one() -> None:
    encoder = FakeEncoder(max_rows=1)
    async with running(encoder, max_num_waiting=1) as engine:
        encoder.gate.clear()
        held = await engine.embed(embed(*["a"] * 3 * CHUNK_TEXTS))
        await until(lambda: bool(encoder.batches))
        with pytest.raises(Overloaded, match="1 requests are waiting, the limit is 1"):
            engine.embed(embed("b"))
        encoder.gate.set()
        assert sum([len(chunk.values) async for chunk in held]) == 3 * CHUNK_TEXTS


async def test_deadlines_end_requests_that_wait() -> None:
    encoder = FakeEncoder()
    async with running(encoder) as engine:
        encoder.gate.clear()
        running_ = await engine.embed(embed("a"))
        with pytest.raises(DeadlineExceeded, match="30 ms"):
            await values_of(engine, embed("b", deadline_ms=30))
        encoder.gate.set()
        assert [len(chunk.values) async for chunk in running_] == [1]


async def test_a_request_that_is_left_counts_the_texts_that_were_read() -> None:
    async with running() as engine:
        stream = aiter(await engine.embed(embed(*["x"] * 3 * CHUNK_TEXTS)))
        await anext(stream)
        await stream.aclose()
        (ended,) = engine._outputs.observer.ended  # type: ignore[attr-defined]
        assert (ended.num_texts, ended.prompt_tokens) == (CHUNK_TEXTS, CHUNK_TEXTS)


async def test_a_text_without_tokens_is_refused_and_no_drain_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTexts, "encode", lambda self, text, prompt: EncodedText(()))
    async with running() as engine:
        with pytest.raises(InvalidRequest, match=r"inputs\[0\] has no tokens; give at least one character"):
            await engine.embed(embed(" "))
        async with asyncio.timeout(60):
            await engine.drain()


class HeldCore:
    """A core that accepts encode requests while `may_accept` is set, and computes nothing."""

    def __init__(self) -> None:
        self.may_accept = asyncio.Event()
        self.may_accept.set()
        self.added: list[int] = []  # ids
        self.dropped: list[int] = []

    def check_room(self, tenant: str, count: int) -> None:
        pass

    async def add_encoding(self, request: Any) -> AdmissionEstimate:
        self.added.append(request.request_id)
        await self.may_accept.wait()
        return AdmissionEstimate(0, 0, 0)

    def drop(self, request_id: int, error: str) -> None:
        self.dropped.append(request_id)


def held_embedder() -> tuple[Embedder, HeldCore]:
    core = HeldCore()
    embedder = Embedder(core, ENCODER_INFO, FakeTexts(), None, itertools.count().__next__)  # type: ignore[arg-type]
    return embedder, core


@pytest.mark.parametrize("end", ["update", "failure", "end of the core"])
async def test_whatever_ends_a_request_after_the_engine_was_closed_it_is_unavailable(end: str) -> None:
    embedder, core = held_embedder()
    stream = await embedder.accept(embed((5,)))
    embedder.close()
    if end == "update":
        embedder.receive(RequestUpdate(0, (), error="closed"))
    elif end == "failure":
        embedder.fail(0, GenerationFailed("the engine crashed"))
    else:
        embedder.fail_all()
    with pytest.raises(Unavailable, match="the engine was closed before this request ended"):
        [chunk async for chunk in stream]
    with pytest.raises(Unavailable, match="the engine was closed before this request ended"):
        await embedder.accept(embed((5,)))
    assert core.added == [0]


async def test_a_request_whose_caller_leaves_before_the_core_answers_is_dropped_there() -> None:
    embedder, core = held_embedder()
    core.may_accept.clear()
    accepting = asyncio.create_task(embedder.accept(embed((5,))))
    while not core.added:
        await asyncio.sleep(0)
    accepting.cancel()
    await asyncio.wait([accepting])
    assert core.dropped == core.added
    async with asyncio.timeout(60):
        await embedder.drain()


async def test_the_error_of_a_second_chunk_is_not_logged_after_that_of_the_first() -> None:
    embedder, core = held_embedder()
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["message"]))
    accepted = await embedder.accept(embed(*[(5,)] * (CHUNK_TEXTS + 1)))

    async def read(stream: EmbeddingStream) -> None:
        with pytest.raises(GenerationFailed, match="first"):
            [chunk async for chunk in stream]

    reading = asyncio.create_task(read(accepted))
    while len(core.added) < 2:
        await asyncio.sleep(0)
    embedder.fail(0, GenerationFailed("first"))
    embedder.fail(1, GenerationFailed("second"))
    await reading
    del reading, accepted
    gc.collect()
    await asyncio.sleep(0)
    assert problems == []


async def test_draining_waits_for_all_chunks_and_refuses_new_requests() -> None:
    async with running() as engine:
        stream = await engine.embed(embed(*["a"] * 4 * CHUNK_TEXTS))
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            engine.embed(embed("b"))
        assert sum([len(chunk.values) async for chunk in stream]) == 4 * CHUNK_TEXTS
        await asyncio.wait_for(draining, 60)


async def test_draining_waits_for_texts_whose_reader_pauses() -> None:
    """The core has nothing to do: the next chunk of texts begins when the reader continues."""
    async with running() as engine:
        stream = await engine.embed(embed(*["a"] * 8 * CHUNK_TEXTS))
        core = engine.core
        while not core.stats().encoded_texts or core.scheduler.has_work:
            await asyncio.sleep(0.001)
        draining = asyncio.create_task(engine.drain())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not draining.done()
        assert sum([len(chunk.values) async for chunk in stream]) == 8 * CHUNK_TEXTS
        await draining


async def test_draining_does_not_wait_for_a_request_that_was_refused() -> None:
    async with running() as engine:
        with pytest.raises(ContextLengthExceeded):
            await engine.embed(embed((1,) * 10_000))
        await asyncio.wait_for(engine.drain(), 60)


async def test_closing_the_engine_ends_streams_with_unavailable() -> None:
    encoder = FakeEncoder()
    async with running(encoder) as engine:
        encoder.gate.clear()
        stream = await engine.embed(embed(*["a"] * 4 * CHUNK_TEXTS))
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        encoder.gate.set()
        with pytest.raises(Unavailable):
            [chunk async for chunk in stream]
        await closing


async def test_text_is_generated_beside_texts_with_the_same_tokens() -> None:
    request = GenerateRequest(prompt=(5, 6, 7), sampling_params=SamplingParams(max_tokens=30, ignore_eos=True))

    async def generated(engine: LocalEngine) -> list[int]:
        return [token async for chunk in await engine.submit(request) for token in chunk.token_ids]

    async with running(FakeEncoder(stage_s=10.0), load_model(EngineConfig(kv_cache_memory=1 << 20))) as engine:
        alone = await generated(engine)
        beside, values = await asyncio.gather(generated(engine), values_of(engine, embed(*["ab"] * 100)))
    assert alone == beside
    assert values.shape == (100, 4)


async def test_an_encoder_alone_generates_no_text() -> None:
    async with running() as engine:
        assert not engine.info.generates
        assert (engine.info.max_model_len, engine.info.num_pages) == (MAX_MODEL_LEN, 0)
        with pytest.raises(InvalidRequest, match="generates no text"):
            engine.submit(GenerateRequest(prompt=(5, 6)))
        with pytest.raises(UnsupportedModel, match="is an encoder"):
            engine.core.runner  # noqa: B018


async def test_an_engine_without_an_encoder_says_so() -> None:
    engine = await Engine.start(EngineConfig(kv_cache_memory=1 << 20))
    try:
        with pytest.raises(InvalidRequest, match="no embedding model"):
            engine.embed(embed("a"))
    finally:
        await engine.close()
