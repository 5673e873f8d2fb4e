"""The engine on the bundled model: how requests stop, fail and end, and what their streams contain."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.pager import check
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    QuireError,
    QuotaExceeded,
    Unavailable,
)
from quire.runtime.common.types import OutputChunk, SamplingParams, StructuredOutputs, join_chunks
from quire.runtime.engine import Engine, GenerateRequest, LocalEngine
from quire.runtime.engine.text import Tokenizer
from quire.scheduler import speculative

PROMPT = "This module provides"
IDS = (5, 6, 7)  # a prompt that is queued by `submit` itself, so that several requests join the same step
EOS = 0
Running = Callable[..., AbstractAsyncContextManager[LocalEngine]]


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Running:
    """Start engines whose pager is audited at every step; check that all pages are free afterwards."""
    monkeypatch.setenv("QUIRE_DEBUG", "1")

    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[LocalEngine]:
        engine = await Engine.start(EngineConfig(**{"kv_cache_memory": 8 << 20, **settings}))
        try:
            yield engine
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.pages_owned) == (0, 0, 0)
            check(engine.core.pager, [])
        finally:
            await engine.close()

    return start


def new_request(
    prompt: str | tuple[int, ...] = PROMPT, deadline_ms: int | None = None, pin_ms: int | None = None, **params: Any
) -> GenerateRequest:
    params = {"max_tokens": 40, "ignore_eos": True, **params}
    return GenerateRequest(
        prompt=prompt, sampling_params=SamplingParams(**params), deadline_ms=deadline_ms, pin_ms=pin_ms
    )


async def chunks_of(engine: LocalEngine, request: GenerateRequest) -> list[OutputChunk]:
    return [chunk async for chunk in await engine.submit(request)]


def text_of(chunks: list[OutputChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def ids_of(chunks: list[OutputChunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


class NanSampler:
    """A sampler that makes the logits of `row` NaN in every step with `num_rows` rows."""

    def __init__(self, sampler: Any, num_rows: int, row: int) -> None:
        self._sampler = sampler
        self._num_rows = num_rows
        self._row = row

    def sample(self, logits: Any, maxima: Any, rows: Any, adjustments: Any, masks: Any) -> Any:
        if len(rows) == self._num_rows:
            logits[self._row] = maxima[self._row] = np.nan
        return self._sampler.sample(logits, maxima, rows, adjustments, masks)


# Streams


async def test_only_the_last_chunk_ends_the_stream(running: Running) -> None:
    async with running() as engine:
        chunks = await chunks_of(engine, new_request())
    assert [chunk.finish_reason for chunk in chunks] == [None] * 39 + ["length"]
    assert [chunk.usage is None for chunk in chunks] == [True] * 39 + [False]
    assert [chunk.first_index for chunk in chunks] == list(range(40))


async def test_text_is_the_decoded_tokens(running: Running) -> None:
    async with running() as engine:
        chunks = await chunks_of(engine, new_request(temperature=1.0, seed=3))
        assert engine.text_processor.tokenizer is not None
        assert text_of(chunks) == engine.text_processor.tokenizer.decode(ids_of(chunks))


async def test_a_stream_is_iterated_once(running: Running) -> None:
    async with running() as engine:
        stream = await engine.submit(new_request(max_tokens=1))
        assert [chunk.finish_reason async for chunk in stream] == ["length"]
        with pytest.raises(RuntimeError, match="once"):
            await anext(aiter(stream))


async def test_an_unread_stream_ends(running: Running) -> None:
    async with running() as engine:
        await engine.submit(new_request(max_tokens=5))
        await engine.drain()


async def test_closing_the_iterator_cancels_the_request(running: Running) -> None:
    async with running() as engine:
        stream = aiter(await engine.submit(new_request(max_tokens=2000)))
        await anext(stream)
        await stream.aclose()
        await engine.drain()
        assert engine.stats().step < 100


async def test_cancel_ends_the_stream_and_is_idempotent(running: Running) -> None:
    async with running() as engine:
        stream = await engine.submit(new_request(max_tokens=2000))
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 3:
                stream.cancel()
                stream.cancel()
        stream.cancel()
    assert chunks[-1].finish_reason == "cancelled"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ids_of(chunks)) >= 3


async def test_cancel_before_the_first_step(running: Running) -> None:
    async with running() as engine:
        stream = await engine.submit(new_request())
        stream.cancel()
        (chunk,) = [chunk async for chunk in stream]
        assert (chunk.finish_reason, chunk.token_ids) == ("cancelled", ())


# Stopping


async def test_stop_strings_are_found_across_tokens(running: Running) -> None:
    """Any part of the greedy text, wherever its tokens begin, is found as a stop string."""
    async with running() as engine:
        whole = text_of(await chunks_of(engine, new_request()))
        for begin in range(3, 40, 5):
            stop = whole[begin : begin + 7]
            cut = whole.index(stop)
            without, included = await asyncio.gather(
                chunks_of(engine, new_request(stop=("never in it", stop))),
                chunks_of(engine, new_request(stop=(stop,), include_stop_str_in_output=True)),
            )
            assert text_of(without) == whole[:cut]
            assert text_of(included) == whole[: cut + len(stop)]
            assert without[-1].finish_reason == included[-1].finish_reason == "stop"


async def test_no_chunk_ends_inside_a_possible_stop_string(running: Running) -> None:
    async with running() as engine:
        whole = text_of(await chunks_of(engine, new_request()))
        chunks = await chunks_of(engine, new_request(stop=(whole[5:15] + "\0",)))
        assert text_of(chunks) == whole
        assert not any(text_of(chunks[:count]).endswith(whole[5:10]) for count in range(len(chunks)))


async def test_stop_token_ids(running: Running) -> None:
    async with running() as engine:
        whole = ids_of(await chunks_of(engine, new_request()))
        stop = whole[10]
        chunks = await chunks_of(engine, new_request(stop_token_ids=(stop,)))
        assert ids_of(chunks) == whole[: whole.index(stop) + 1]
        assert chunks[-1].finish_reason == "stop"


async def test_ignore_eos(running: Running) -> None:
    certain = {EOS: 100.0}
    async with running() as engine:
        stopped = await chunks_of(engine, new_request(ignore_eos=False, logit_bias=certain))
        ignored = await chunks_of(engine, new_request(ignore_eos=True, logit_bias=certain))
    assert (ids_of(stopped), stopped[-1].finish_reason) == ((EOS,), "stop")
    assert (ids_of(ignored), ignored[-1].finish_reason) == ((EOS,) * 40, "length")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_nothing_ends_a_request_before_min_tokens(running: Running, temperature: float) -> None:
    """End and stop ids are not sampled before, however likely they are; a stop string is ordinary text."""
    eager = {EOS: 100.0, 262: 100.0}
    async with running() as engine:
        chunks = await chunks_of(
            engine,
            new_request(
                ignore_eos=False,
                min_tokens=7,
                stop_token_ids=(262,),
                logit_bias=eager,
                temperature=temperature,
                seed=1,
            ),
        )
        ids = ids_of(chunks)
        assert len(ids) == 8
        assert {EOS, 262}.isdisjoint(ids[:7])
        assert ids[7] in (EOS, 262)
        texts = await chunks_of(engine, new_request(stop=(" ",), min_tokens=9))
        assert len(ids_of(texts)) >= 9


# Logprobs, usage and speculation


async def test_logprobs(running: Running) -> None:
    async with running() as engine:
        none, own, three = [
            await chunks_of(engine, new_request(logprobs=count, temperature=1.0, seed=5)) for count in (None, 0, 3)
        ]
    assert all(chunk.logprobs is None for chunk in none)
    owns = [entry for chunk in own for entry in chunk.logprobs or ()]
    threes = [entry for chunk in three for entry in chunk.logprobs or ()]
    assert tuple(entry.token_id for entry in owns) == ids_of(own) == ids_of(three) == ids_of(none)
    assert [entry.logprob for entry in owns] == [entry.logprob for entry in threes]
    assert all(entry.top == () for entry in owns)
    for entry in threes:
        values = [logprob for _, logprob in entry.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert max(values) <= 0
        assert entry.logprob <= values[0]
        assert dict(entry.top).get(entry.token_id, entry.logprob) == entry.logprob


async def test_usage(running: Running) -> None:
    prompt = tuple(range(1, 101))
    async with running() as engine:
        first, second = [(await chunks_of(engine, new_request(prompt)))[-1].usage for _ in range(2)]
        assert first is not None
        assert second is not None
        assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == (100, 40, 0)
        assert (second.prompt_tokens, second.completion_tokens, second.cached_tokens) == (100, 40, 96)
        assert (first.recomputed_tokens, second.recomputed_tokens) == (0, 0)
        assert min(first.queue_ms, first.prefill_ms, first.decode_ms, first.stall_ms) >= 0
        assert first.prefill_ms > 0
        assert first.decode_ms > 0
        whole = (await chunks_of(engine, new_request(tuple(range(1, 65)))))[-1].usage
        assert whole is not None
        assert whole.cached_tokens == 32, "the last token of a prompt is always computed"


@pytest.mark.parametrize("params", [{}, {"beam_width": 2}], ids=["sampling", "beams"])
async def test_progress_is_reported_while_the_prompt_is_computed_and_not_after(
    running: Running, params: dict[str, Any]
) -> None:
    async with running(max_num_batched_tokens=64) as engine:
        stream = await engine.submit(new_request(tuple(range(1, 201)), max_tokens=4, **params))
        computed: list[int] = []
        stream.watch_prefill(computed.append)
        async for _ in stream:
            pass
    assert computed == [64, 128, 192]


async def test_usage_has_the_drawn_seed(running: Running) -> None:
    async with running() as engine:
        drawn = await chunks_of(engine, new_request(temperature=1.0))
        assert drawn[-1].usage is not None
        again = await chunks_of(engine, new_request(temperature=1.0, seed=drawn[-1].usage.seed))
        assert ids_of(again) == ids_of(drawn)


@pytest.mark.parametrize("count", [1, 4])
async def test_speculation_changes_only_the_number_of_steps(
    running: Running, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft tokens of repetitive text are accepted; the output, stop strings and usage are the same."""
    monkeypatch.setattr(speculative, "MARGIN", 0.0)  # whatever a step is measured to cost on a busy machine
    requests = [
        new_request("a, b, c, d, a, b, c, d, a, b,", max_tokens=60, logprobs=2),
        new_request("x = x + 1\nx = x + 1\nx =", max_tokens=60, stop=("x + 1\n",)),
        new_request(
            (7, 8, 9) * 12, temperature=1.0, seed=2, n=2, max_tokens=30, logit_bias={7: 20.0, 8: 20.0, 9: 20.0}
        ),
    ]
    async with running() as engine:
        wanted = [await chunks_of(engine, request) for request in requests]
        steps = engine.stats().step
    async with running(num_speculative_tokens=count) as engine:
        seen = [await chunks_of(engine, request) for request in requests]
        stats = engine.stats()
    assert [join_chunks(chunks) for chunks in seen] == [join_chunks(chunks) for chunks in wanted]
    for one, other in zip(seen, wanted, strict=True):
        assert one[-1].usage is not None
        assert other[-1].usage is not None
        assert one[-1].usage.completion_tokens == other[-1].usage.completion_tokens
    assert 0 < stats.accepted_draft_tokens <= stats.draft_tokens
    assert stats.step < steps


# Several outputs


async def test_output_i_equals_a_request_with_seed_plus_i(running: Running) -> None:
    """Tokens and logprobs are equal to the last bit, also where the seed wraps around."""
    sampling = {"temperature": 1.0, "logprobs": 2, "max_tokens": 20}
    last = 2**64 - 1
    async with running() as engine:
        alone = [
            join_chunks(await chunks_of(engine, new_request(seed=seed, **sampling)))[0]
            for seed in (last - 1, last, 0, 1)
        ]
        chunks = await chunks_of(engine, new_request(seed=last - 1, n=4, **sampling))
    assert join_chunks(chunks) == tuple(alone)
    assert len({choice.token_ids for choice in alone}) == 4
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.completion_tokens, usage.seed) == (80, last - 1)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert sum(chunk.finish_reason is not None for chunk in chunks) == 4


async def test_each_output_has_its_own_stop(running: Running) -> None:
    async with running() as engine:
        sampling = {"temperature": 1.0, "stop": (" the", "e "), "max_tokens": 30}
        alone = [join_chunks(await chunks_of(engine, new_request(seed=seed, **sampling)))[0] for seed in range(5)]
        chunks = await chunks_of(engine, new_request(seed=0, n=5, **sampling))
    assert join_chunks(chunks) == tuple(alone)
    assert len({len(choice.token_ids) for choice in alone}) > 1
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == sum(len(choice.token_ids) for choice in alone)


async def test_best_of_samples_more_than_it_returns(running: Running) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 12}
    async with running() as engine:
        drawn = join_chunks(await chunks_of(engine, new_request(seed=5, n=6, logprobs=0, **sampling)))
        chunks = await chunks_of(engine, new_request(seed=5, n=2, best_of=6, **sampling))
    best = sorted(drawn, key=lambda choice: -(choice.cumulative_logprob or 0))[:2]
    assert [choice.token_ids for choice in join_chunks(chunks)] == [choice.token_ids for choice in best]
    assert [chunk.cumulative_logprob for chunk in chunks] == [choice.cumulative_logprob for choice in best]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 72


async def test_beams_equal_a_search_over_the_logits(running: Running) -> None:
    width = 3
    prompt = (5, 6, 7)
    async with running() as engine:
        chunks = await chunks_of(engine, new_request(prompt, max_tokens=5, beam_width=width, n=3, logprobs=0))
        beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(5):
            grown = []
            for total, ids in beams:
                wide = (await engine.logits((*prompt, *ids)))[-1].astype(np.float64)
                logprobs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
                best = np.argsort(-logprobs)[: 2 * width].tolist()
                grown += [(total + logprobs[token], (*ids, token)) for token in best]
            beams = sorted(grown, key=lambda beam: -beam[0])[:width]
        together = await asyncio.gather(
            *(chunks_of(engine, new_request(prompt, max_tokens=5, beam_width=width, n=count)) for count in (1, 2, 3)),
            chunks_of(engine, new_request(max_tokens=9)),
        )
    choices = join_chunks(chunks)
    assert [choice.token_ids for choice in choices] == [ids for _, ids in beams]
    assert [choice.cumulative_logprob for choice in choices] == pytest.approx([total for total, _ in beams], abs=1e-4)
    for choice in choices:
        assert choice.cumulative_logprob == sum(entry.logprob for entry in choice.logprobs or ())
        assert choice.text == engine.text_processor.tokenizer.decode(choice.token_ids)  # type: ignore[union-attr]
    for count, seen in enumerate(together[:3], 1):
        assert ids_of(seen[:1]) == choices[0].token_ids
        assert len(join_chunks(seen)) == count
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 15


async def test_one_beam_is_greedy(running: Running) -> None:
    async with running() as engine:
        greedy, beam = [await chunks_of(engine, new_request(beam_width=width)) for width in (0, 1)]
    assert join_chunks(beam)[0].token_ids == ids_of(greedy)
    assert join_chunks(beam)[0].text == text_of(greedy)


async def test_cancel_ends_every_output(running: Running) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0}
    for params in ({"n": 3, **sampling}, {"n": 2, "best_of": 3, **sampling}, {"n": 2, "beam_width": 3}):
        async with running(max_num_seqs=3) as engine:
            stream = await engine.submit(new_request(max_tokens=1000, **params))
            while engine.stats().step < 3:
                await asyncio.sleep(0.001)
            stream.cancel()
            chunks = [chunk async for chunk in stream]
            await engine.drain()
        choices = join_chunks(chunks)
        assert [choice.finish_reason for choice in choices] == ["cancelled"] * params["n"]


async def test_an_output_that_fails_fails_its_request(running: Running) -> None:
    async with running(enable_prefix_caching=False) as engine:
        wanted = await chunks_of(engine, new_request(IDS))
        runner = engine.core.runner
        runner._sampler = NanSampler(runner._sampler, num_rows=4, row=2)  # type: ignore[assignment]
        good = await engine.submit(new_request(IDS))
        bad = await engine.submit(new_request(IDS, n=3, temperature=1.0))
        results = await asyncio.gather(collect(good), collect(bad), return_exceptions=True)
        assert ids_of(results[0]) == ids_of(wanted)  # type: ignore[arg-type]
        assert isinstance(results[1], GenerationFailed)


# Deadlines, limits, failures


async def test_a_deadline_counts_from_submission(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline that passes while the prompt is tokenized ends the request before its first step."""
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, **options: bool) -> list[int]:
        time.sleep(0.05)
        return encode(self, text, **options)

    async with running() as engine:
        monkeypatch.setattr(Tokenizer, "encode", slow)
        stream = await engine.submit(new_request(deadline_ms=20, max_tokens=2000))
        with pytest.raises(DeadlineExceeded, match="20 ms"):
            [chunk async for chunk in stream]
        assert engine.stats().step <= 2


async def test_a_deadline_during_generation_keeps_earlier_chunks(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as engine:
        execute = engine.core.runner.execute

        def slowly(plan: Any, masks: Any = None) -> Any:
            time.sleep(0.005)  # a deadline that leaves time for the first token passes long before the last one
            return execute(plan, masks)

        monkeypatch.setattr(engine.core.runner, "execute", slowly)
        deadline_ms = 20
        first = None
        while first is None:  # a busy machine needs longer for the first token
            deadline_ms *= 2
            with suppress(DeadlineExceeded):
                stream = aiter(await engine.submit(new_request(deadline_ms=deadline_ms, max_tokens=2000)))
                first = await anext(stream)
        assert len(first.token_ids) == 1
        with pytest.raises(DeadlineExceeded):
            [chunk async for chunk in stream]
        await engine.drain()


async def test_a_failing_step_fails_only_its_requests(running: Running) -> None:
    async with running(max_num_seqs=2) as engine:
        wanted = await chunks_of(engine, new_request(IDS))
        runner = engine.core.runner
        execute = runner.execute
        calls = []

        def flaky(plan: Any, masks: Any = None) -> Any:
            calls.append(len(plan.sequences))
            if len(calls) == 5:
                raise ZeroDivisionError("a bug")
            return execute(plan, masks)

        runner.execute = flaky  # type: ignore[method-assign]
        streams = [await engine.submit(new_request(IDS)) for _ in range(3)]
        results = await asyncio.gather(*(collect(stream) for stream in streams), return_exceptions=True)
        assert [type(result) for result in results] == [GenerationFailed, GenerationFailed, list]
        assert "a bug" in str(results[0])
        assert ids_of(results[2]) == ids_of(wanted)  # type: ignore[arg-type]


async def collect(stream: Any) -> list[OutputChunk]:
    return [chunk async for chunk in stream]


async def test_nan_logits_fail_only_their_request(running: Running) -> None:
    async with running(enable_prefix_caching=False) as engine:
        wanted = await chunks_of(engine, new_request(IDS))
        runner = engine.core.runner
        runner._sampler = NanSampler(runner._sampler, num_rows=2, row=1)  # type: ignore[assignment]
        one, other = [await engine.submit(new_request(IDS)) for _ in range(2)]
        results = await asyncio.gather(collect(one), collect(other), return_exceptions=True)
        assert ids_of(results[0]) == ids_of(wanted)  # type: ignore[arg-type]
        assert isinstance(results[1], GenerationFailed)
        assert "not finite" in str(results[1])


async def test_a_failing_detokenizer_fails_only_its_request(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        wanted = await chunks_of(engine, new_request())
        assert engine.text_processor.tokenizer is not None
        monkeypatch.setitem(engine.text_processor.tokenizer._bytes_by_id, 4095, 5)  # not bytes
        bad, good = await asyncio.gather(
            collect(await engine.submit(new_request(logit_bias={4095: 100.0}))),
            collect(await engine.submit(new_request())),
            return_exceptions=True,
        )
        assert isinstance(bad, GenerationFailed)
        assert "could not be turned into text" in str(bad)
        assert ids_of(good) == ids_of(wanted)  # type: ignore[arg-type]


async def test_a_failing_tokenizer_is_a_typed_error(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> None:
            raise MemoryError("no memory")

    async with running() as engine:
        with monkeypatch.context() as patched:
            patched.setattr(engine.text_processor.tokenizer, "_fast", Broken())
            with pytest.raises(GenerationFailed, match="could not be tokenized: no memory"):
                await engine.submit(new_request())
        assert ids_of(await chunks_of(engine, new_request((1, 2, 3))))


async def test_a_full_queue(running: Running) -> None:
    async with running(max_num_seqs=1, max_num_waiting=2) as engine:
        streams = [await engine.submit(new_request((5, 6), max_tokens=3)) for _ in range(2)]
        with pytest.raises(
            Overloaded, match="2 requests are waiting, the limit is 2; position 2 in the queue; pages: free 128"
        ):
            await engine.submit(new_request((5, 6)))
        assert [stream.admission.position for stream in streams] == [0, 1]
        assert len({ids_of(await collect(stream)) for stream in streams}) == 1


async def test_a_full_queue_refuses_before_tokenizing(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(max_num_seqs=4, max_num_waiting=4) as engine:
        (stream,) = [await engine.submit(new_request(max_tokens=3))]
        tokenized: list[str] = []
        monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **_: tokenized.append(text) or [1])
        with pytest.raises(Overloaded):
            await engine.submit(new_request(n=4))
        assert tokenized == []
        await collect(await engine.submit(new_request(n=3, max_tokens=1)))
        assert tokenized == [PROMPT]
        await collect(stream)


async def test_kv_share_per_tenant(running: Running) -> None:
    """A request that exceeds its tenant's share alone is refused without a retry; others wait in the queue."""
    async with running(max_kv_share_per_tenant=0.04) as engine:  # 5 of 128 pages
        with pytest.raises(QuotaExceeded, match="a tenant may have 5; position 0 in the queue; pages: needed 6"):
            await engine.submit(new_request((5, 6), max_tokens=170))
        outputs = await asyncio.gather(*(chunks_of(engine, new_request((5, 6), max_tokens=100)) for _ in range(3)))
        assert len({ids_of(output) for output in outputs}) == 1


async def test_the_wait_is_predicted_after_the_first_steps(running: Running) -> None:
    async with running(max_num_seqs=1) as engine:
        stream = await engine.submit(new_request())
        assert stream.admission.predicted_wait_s is None
        await collect(stream)
        running_one, waiting = [await engine.submit(new_request(IDS)) for _ in range(2)]
        waits = [stream.admission.predicted_wait_s for stream in (running_one, waiting)]
        assert 0 < waits[0] < waits[1]  # type: ignore[operator]
        with pytest.raises(DeadlineExceeded, match="after the request's deadline; position 2 in the queue"):
            await engine.submit(new_request(IDS, deadline_ms=1))
        await asyncio.gather(collect(running_one), collect(waiting))


# Spilled and pinned pages


async def test_preempted_pages_are_restored_from_the_spill_file(running: Running) -> None:
    """Tokens and logprobs are the same as without preemption, and nothing is computed again."""
    requests = [new_request(tuple(range(first, first + 60)), max_tokens=90, logprobs=1) for first in (1, 100, 200)]
    page_bytes = 32 * 4 * 2 * 2 * 64 * 2  # tokens, layers, K and V, heads, dims, bf16
    async with running() as engine:
        wanted = [await chunks_of(engine, request) for request in requests]
    async with running(kv_cache_memory=8 * page_bytes, kv_spill_size=64 << 20) as engine:
        engine.core.pager.spill_seconds = lambda num_pages: 0.0  # type: ignore[method-assign]  # independent of the disk
        engine.core.scheduler._batch._cost.predict_prefill = lambda num_tokens: 1.0  # type: ignore[method-assign]
        seen = await asyncio.gather(*(chunks_of(engine, request) for request in requests))
        stats = engine.stats()
        assert (stats.preemptions, stats.preemptions_spilled > 0, stats.pages_spilled) == (
            stats.preemptions_spilled,
            True,
            0,
        )
    assert [join_chunks(chunks) for chunks in seen] == [join_chunks(chunks) for chunks in wanted]
    assert all(chunks[-1].usage.recomputed_tokens == 0 for chunks in seen if chunks[-1].usage)


async def test_pinned_prompts_are_evicted_last(running: Running) -> None:
    pinned = tuple(range(1, 129))
    others = [tuple(range(first, first + 128)) for first in range(200, 2000, 200)]
    async with running(kv_cache_memory=1 << 20) as engine:  # 16 pages
        for pin_ms, cached in ((None, 0), (60_000, 0), (None, 96)):
            usage = (await chunks_of(engine, new_request(pinned, max_tokens=1, pin_ms=pin_ms)))[-1].usage
            assert usage is not None
            assert usage.cached_tokens == cached
            for other in others:
                await chunks_of(engine, new_request(other, max_tokens=1))
            assert engine.stats().pages_pinned == (0 if pin_ms is None and not cached else 4)


# Closing and internal errors


async def test_ends_lost_with_the_loop_become_errors() -> None:
    """The loop breaks after a step in which a request ended is committed, and before it is published."""
    engine = await Engine.start(EngineConfig(kv_cache_memory=8 << 20))
    commit = engine.core.scheduler.commit

    def broken(result: Any) -> Any:
        updates = commit(result)
        if any(update.ended for update in updates):
            raise KeyError("a bug")
        return updates

    engine.core.scheduler.commit = broken  # type: ignore[method-assign]
    streams = [await engine.submit(new_request(IDS, max_tokens=count)) for count in (3, 30)]
    async with asyncio.timeout(60):
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
    assert [str(result) for result in results] == ["the engine stopped unexpectedly"] * 2
    with pytest.raises(Unavailable):
        await engine.submit(new_request())
    with pytest.raises(KeyError, match="a bug"):
        await engine.close()


async def test_close_ends_running_queued_and_tokenizing_requests(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = threading.Event()

    def wait(self: Tokenizer, text: str, **options: bool) -> list[int]:
        closed.wait()
        return list(IDS)

    async with running(max_num_seqs=1) as engine:
        streams = [await engine.submit(new_request(max_tokens=2000)) for _ in range(2)]
        await anext(aiter(streams[0]))
        monkeypatch.setattr(Tokenizer, "encode", wait)
        tokenizing = engine.submit(new_request())
        await engine.close()
        closed.set()
        with pytest.raises(Unavailable, match="the engine was closed"):
            await collect(streams[1])
        with pytest.raises(Unavailable, match="no new requests"):
            await tokenizing
        with pytest.raises(Unavailable, match="no new requests"):
            await engine.submit(new_request())
        with pytest.raises(Unavailable):
            await engine.logits((1, 2))
        await engine.close()


async def test_a_broken_engine_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that ends the engine loop ends every request with a typed error, and `stats` raises from then on."""
    engine = await Engine.start(EngineConfig(kv_cache_memory=8 << 20))
    await asyncio.sleep(0)  # the loop has started and waits for work

    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine.core.scheduler, "schedule", fail)
    with pytest.raises(QuireError, match="stopped unexpectedly"):
        await chunks_of(engine, new_request())
    with pytest.raises(Unavailable, match="internal error"):
        engine.stats()
    with pytest.raises(Unavailable):
        await engine.submit(new_request())
    with pytest.raises(RuntimeError, match="a bug"):  # `close` raises it
        await engine.close()


async def test_closing_frees_threads_at_once() -> None:
    """`close` frees kernel threads and memory itself, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        before = set(os.listdir("/proc/self/task"))
        engine = await Engine.start(EngineConfig(kv_cache_memory=1 << 20, threads=6))
        await chunks_of(engine, new_request((1, 2, 3), max_tokens=2))
        during = os.listdir("/proc/self/task")
        await engine.close()
        assert len(set(during) - before) >= 5, "threads of other tests may have ended"
        await until_threads_are_at_most(len(during) - 5)
    finally:
        gc.enable()


async def test_closing_ends_the_threads_of_texts_and_the_processes_that_try_grammars() -> None:
    before = children() | text_threads()
    engine = await Engine.start(EngineConfig(kv_cache_memory=1 << 20, threads=1))
    choice = StructuredOutputs(choice=["yes", "no"])
    params = SamplingParams(max_tokens=4, structured_outputs=choice)
    await chunks_of(engine, GenerateRequest(prompt="Is it?", sampling_params=params))
    assert children() - before
    assert text_threads() - before
    await engine.close()
    async with asyncio.timeout(60):
        while (children() | text_threads()) - before:
            await asyncio.sleep(0.001)


def text_threads() -> set[str]:
    """Return the threads for texts, also of engines of other tests, by number."""
    return {f"thread {each.native_id}" for each in threading.enumerate() if each.name.startswith("quire-text")}


def children() -> set[str]:
    """Return the processes that threads of this process have started and not waited for."""
    found: set[str] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found |= set(file.read_text().split())
    return found


async def test_an_engine_that_cannot_start_leaves_no_thread() -> None:
    before = len(os.listdir("/proc/self/task"))
    with pytest.raises(ValueError, match="at least 1") as failure:
        await Engine.start(EngineConfig(kv_cache_memory=1 << 20, threads=6, max_num_waiting=0))
    await until_threads_are_at_most(before + 4)
    assert failure.value is not None, "its traceback keeps what was not closed"


async def until_threads_are_at_most(count: int) -> None:
    """Wait until the system has removed threads that have ended, which it may do after they are joined."""
    async with asyncio.timeout(60):
        while len(os.listdir("/proc/self/task")) > count:
            await asyncio.sleep(0.001)


def open_files(folder: Path) -> list[str]:
    """Return the files of `folder` that this process has open, nameless ones included."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(os.readlink(entry))
    return [link for link in links if link.startswith(str(folder))]


async def test_closing_closes_the_spill_file(tmp_path: Path) -> None:
    config = EngineConfig(kv_cache_memory=1 << 20, kv_spill_size=64 << 20, kv_spill_dir=str(tmp_path))
    engine = await Engine.start(config)
    assert len(open_files(tmp_path)) == 1
    await engine.close()
    assert open_files(tmp_path) == []
    assert os.listdir(tmp_path) == []


async def test_closing_a_broken_engine_closes_the_spill_file(tmp_path: Path) -> None:
    config = EngineConfig(kv_cache_memory=1 << 20, kv_spill_size=64 << 20, kv_spill_dir=str(tmp_path))
    engine = await Engine.start(config)
    await asyncio.sleep(0)

    def fail() -> None:
        raise RuntimeError("a bug")

    engine.core.scheduler.schedule = fail  # type: ignore[method-assign]
    with pytest.raises(QuireError):
        await chunks_of(engine, new_request())
    with pytest.raises(RuntimeError, match="a bug"):
        await engine.close()
    assert open_files(tmp_path) == []


async def test_an_engine_that_cannot_start_leaves_no_spill_file(tmp_path: Path) -> None:
    config = EngineConfig(
        kv_cache_memory=1 << 20, kv_spill_size=64 << 20, kv_spill_dir=str(tmp_path), max_num_waiting=0
    )
    with pytest.raises(ValueError, match="at least 1") as failure:
        await Engine.start(config)
    assert open_files(tmp_path) == []
    assert failure.value is not None


async def test_text_that_may_begin_a_stop_string_arrives_at_the_end(running: Running) -> None:
    async with running() as engine:
        text = "".join(each.text for each in await chunks_of(engine, new_request(max_tokens=12)))
        chunks = await chunks_of(engine, new_request(max_tokens=12, stop=(text[-3:] + "and more",)))
        assert "".join(each.text for each in chunks) == text
        assert chunks[-1].text.endswith(text[-3:])


# Logits


async def test_logits_need_an_idle_engine(running: Running) -> None:
    async with running() as engine:
        stream = await engine.submit(new_request(max_tokens=5))
        with pytest.raises(Unavailable, match="between requests"):
            await engine.logits((1, 2, 3))
        await collect(stream)
        scoring = asyncio.create_task(engine.logits(tuple(range(300))))
        await asyncio.sleep(0)
        for refused in (engine.submit(new_request((1, 2))), engine.logits((1, 2))):
            with pytest.raises(Unavailable):
                await refused
        assert (await scoring).shape == (300, 4096)
        assert ids_of(await chunks_of(engine, new_request((1, 2))))


async def test_closing_ends_logits_with_a_typed_error(running: Running) -> None:
    async with running() as engine:
        scoring = asyncio.create_task(engine.logits(tuple(range(2000))))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(Unavailable, match="closed"):
            await scoring


@pytest.mark.parametrize("token_ids", [(), (4096,), (-1,), (1,) * 2049], ids=["none", "too high", "negative", "many"])
async def test_logits_of_invalid_prompts(running: Running, token_ids: tuple[int, ...]) -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest):
            await engine.logits(token_ids)


async def test_sampling_params_of_numpys_types(running: Running) -> None:
    async with running() as engine:
        numpy = SamplingParams(max_tokens=2, seed=np.int64(3), temperature=np.float32(0.5))  # type: ignore[arg-type]
        assert len(ids_of(await chunks_of(engine, GenerateRequest(prompt=(1,), sampling_params=numpy)))) == 2
