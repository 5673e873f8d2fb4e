"""From updates to chunks: the result does not depend on how tokens are grouped into updates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from quire.runtime.common.errors import GenerationFailed, Overloaded, Unavailable
from quire.runtime.common.types import (
    CompletionOutput,
    Delta,
    OutputChunk,
    SamplingParams,
    TokenLogprobs,
    Usage,
    join_chunks,
)
from quire.runtime.engine.embedding.no_embedder import NoEmbedder
from quire.runtime.engine.facade import GenerateRequest
from quire.runtime.engine.live_outputs import LiveOutputs
from quire.runtime.engine.markup.markup import KNOWN_MARKUPS, THINK
from quire.runtime.engine.markup.markup_parser import MarkupParser
from quire.runtime.engine.output import SequenceOutput, StreamingOutput, output_class
from quire.runtime.engine.stream import Stream
from quire.runtime.engine.text import Detokenizer, IncrementalDetokenizer, StopDetokenizer, Tokenizer
from quire.runtime.model import BUNDLED_MODEL
from quire.scheduler import FinalCounters, Request, RequestSpec, RequestUpdate, SampledToken
from quire.scheduler.beam import Hypothesis

TOKENIZER = Tokenizer(BUNDLED_MODEL)
STALLED = FinalCounters((1.0, 3.0, 1.0, 7.0, 0.0), recomputed_tokens=64)
TEXT = "This module provides a queue. Changed in version 3.11: added «日本» and a lock."
IDS = TOKENIZER.encode(TEXT)


def output_with(sequences: int = 1, **params: Any) -> StreamingOutput:
    wanted = SamplingParams(max_tokens=len(IDS), **params)
    requests = [Request(RequestSpec(i, (1, 2, 3), max_tokens=len(IDS))) for i in range(sequences)]

    def new_detokenizer() -> Detokenizer:
        text = IncrementalDetokenizer(TOKENIZER)
        if not wanted.stop:
            return text
        return StopDetokenizer(text, wanted.stop, wanted.include_stop_str_in_output, wanted.min_tokens)

    stream = Stream((1, 2, 3), 0, lambda: None)
    request = GenerateRequest(prompt=(1, 2, 3), sampling_params=wanted)
    return output_class(wanted)(stream, request, requests, new_detokenizer, seed=7, submitted=0.0)


def sampled(index: int) -> SampledToken:
    return SampledToken(0, IDS[index], -0.5 - index, ((IDS[index], -0.5 - index),))


def received(output: StreamingOutput, sequence: SequenceOutput, update: RequestUpdate) -> Sequence[OutputChunk]:
    """Return the chunks of an update."""
    return output.chunks(sequence, *sequence.read(update))


def published(
    output: StreamingOutput, sizes: list[int], reason: Any = "length", sequence: int = 0
) -> list[OutputChunk]:
    """Return the chunks for updates of `sizes` tokens, the last with `reason`; stop at the sequence's end."""
    chunks: list[OutputChunk] = []
    first = 0
    for count, size in enumerate(sizes, 1):
        tokens = tuple(sampled(index) for index in range(first, first + size))
        first += size
        update = RequestUpdate(
            output.sequences[sequence].request.request_id, tokens, reason if count == len(sizes) else None
        )
        chunks += received(output, output.sequences[sequence], update)
        if output.sequences[sequence].finish_reason is not None:
            break
    return chunks


def outcome(output: StreamingOutput, chunks: list[OutputChunk]) -> tuple[CompletionOutput, int]:
    (choice,) = join_chunks(chunks)
    return choice, output.usage().completion_tokens


def random_sizes(seed: int) -> list[int]:
    chance = random.Random(seed)
    sizes = []
    while sum(sizes) < len(IDS):
        sizes.append(min(chance.randrange(1, 9), len(IDS) - sum(sizes)))
    return sizes


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["queue", "e", "3.1", "日本", "lock.", "never", "s a q"])
def test_tokens_after_a_stop_string_are_dropped(stop: str, include: bool, seed: int) -> None:
    params = {"stop": (stop,), "include_stop_str_in_output": include, "logprobs": 1}
    output = output_with(**params)
    wanted = outcome(output, published(output, [1] * len(IDS)))
    assert (wanted[0].finish_reason == "stop") == (stop in TEXT)
    output = output_with(**params)
    chunks = published(output, random_sizes(seed))
    assert outcome(output, chunks) == wanted
    assert [chunk.first_index for chunk in chunks] == [
        sum(len(before.token_ids) for before in chunks[:count]) for count in range(len(chunks))
    ]
    assert all(len(chunk.token_ids) == len(chunk.logprobs or ()) for chunk in chunks)


@pytest.mark.parametrize("size", [1, 3, len(IDS)])
@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_completes_a_stop_string_is_kept(include: bool, size: int) -> None:
    """Token ids, logprobs and usage include it, whether or not the text includes the stop string."""
    sizes = [size] * (len(IDS) // size) + [len(IDS) % size][: len(IDS) % size]
    output = output_with(stop=("queue",), include_stop_str_in_output=include, logprobs=0)
    (choice,) = join_chunks(published(output, sizes))
    completing = next(count for count in range(len(IDS)) if "queue" in TOKENIZER.decode(IDS[:count]))
    assert choice.token_ids == tuple(IDS[:completing])
    assert len(choice.logprobs or ()) == completing
    assert output.usage().completion_tokens == completing
    assert choice.text == ("This module provides a queue" if include else "This module provides a ")


def test_min_tokens_and_stop_strings_within_one_update() -> None:
    one, all_at_once = (output_with(stop=("e",), min_tokens=12) for _ in range(2))
    wanted = outcome(one, published(one, [1] * len(IDS)))
    assert wanted[1] >= 12
    assert outcome(all_at_once, published(all_at_once, [len(IDS)])) == wanted


def test_an_error_after_a_stop_string_is_dropped() -> None:
    output = output_with(stop=("module",))
    (sequence,) = output.sequences
    (chunk,) = received(
        output, sequence, RequestUpdate(sequence.request.request_id, tuple(map(sampled, range(len(IDS)))), None, "NaN")
    )
    assert sequence.finish_reason == chunk.finish_reason == "stop"
    assert len(chunk.token_ids) < len(IDS)


def test_tokens_before_an_error_are_kept() -> None:
    output = output_with()
    (sequence,) = output.sequences
    (chunk,) = received(
        output, sequence, RequestUpdate(sequence.request.request_id, (sampled(0), sampled(1)), None, "NaN")
    )
    assert chunk.token_ids == tuple(IDS[:2])
    assert received(output, sequence, RequestUpdate(sequence.request.request_id, (), None, "NaN")) == ()
    assert output.num_open == 1


def test_outputs_are_streamed_as_they_come() -> None:
    output = output_with(2, n=2)
    second = published(output, [1, 2], sequence=1)
    assert [(chunk.choice, chunk.first_index, chunk.finish_reason) for chunk in second] == [
        (1, 0, None),
        (1, 1, "length"),
    ]
    assert output.num_open == 1
    first = published(output, [4])
    assert [(chunk.choice, chunk.finish_reason) for chunk in first] == [(0, "length")]
    assert (output.num_open, output.usage().completion_tokens, output.usage().prompt_tokens) == (0, 7, 3)


def test_best_of_ranks_by_logprob_then_by_index() -> None:
    output = output_with(4, n=3, best_of=4)
    assert published(output, [5], sequence=3) == []
    assert published(output, [3], sequence=1) == []
    assert published(output, [1, 1], sequence=2) == []
    chunks = published(output, [2], sequence=0)
    assert [len(chunk.token_ids) for chunk in chunks] == [2, 2, 3]
    assert [chunk.cumulative_logprob for chunk in chunks] == [-2.0, -2.0, -4.5]
    assert [(chunk.choice, chunk.first_index, chunk.finish_reason) for chunk in chunks] == [
        (0, 0, "length"),
        (1, 0, "length"),
        (2, 0, "length"),
    ]
    assert all(chunk.logprobs is None for chunk in chunks), "they were needed for ranking, not requested"
    assert output.usage().completion_tokens == 12, "outputs that are not returned count too"


def test_best_of_ranks_by_the_sum_of_logprobs_and_not_by_their_mean() -> None:
    output = output_with(2, n=1, best_of=2)
    for sequence, logprobs in zip(output.sequences, ((-0.5,) * 4, (-1.5,)), strict=True):
        tokens = tuple(SampledToken(0, IDS[0], logprob) for logprob in logprobs)
        chunks = received(output, sequence, RequestUpdate(sequence.request.request_id, tokens, "length"))
    assert [chunk.cumulative_logprob for chunk in chunks] == [-1.5]


def test_a_cancelled_best_of_returns_empty_outputs() -> None:
    output = output_with(3, n=2, best_of=3)
    assert published(output, [5], sequence=0) == []
    assert published(output, [3], "cancelled", sequence=1) == []
    chunks = published(output, [3], "cancelled", sequence=2)
    assert [(chunk.choice, chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [
        (0, (), "cancelled"),
        (1, (), "cancelled"),
    ]


def test_usage_has_the_longest_stall_and_what_all_sequences_recomputed() -> None:
    """The preempted sequence may be the first or a fork."""
    for stalled in range(3):
        output = output_with(3, n=3)
        for index, sequence in enumerate(output.sequences):
            counters = STALLED if index == stalled else FinalCounters((1.0, 1.0, 10.0, 0.0, 0.0))
            received(output, sequence, RequestUpdate(index, (), "length", None, counters))
        usage = output.usage()
        assert (usage.stall_ms, usage.queue_ms, usage.decode_ms) == (7000.0, 1000.0, 10000.0)
        assert usage.recomputed_tokens == 64


@pytest.mark.parametrize(
    ("params", "reason", "stop_reason"),
    [
        ({"stop": ("queue",)}, "length", "queue"),
        ({"stop_token_ids": (IDS[-1],)}, "stop", IDS[-1]),
        ({"stop_token_ids": (IDS[0],)}, "stop", None),
        ({"stop_token_ids": (IDS[-1],)}, "length", None),
    ],
    ids=["a stop string", "a stop token", "the model's own end", "the limit"],
)
def test_an_output_names_what_the_request_ended_it_with(params: Any, reason: str, stop_reason: object) -> None:
    (chunk,) = published(output_with(**params), [len(IDS)], reason)
    assert chunk.stop_reason == stop_reason
    if "stop_token_ids" in params:
        best = output_with(2, n=1, best_of=2, **params)
        assert published(best, [len(IDS)], reason, sequence=1) == []
        (chunk,) = published(best, [len(IDS)], reason)
        assert chunk.stop_reason == stop_reason


def test_the_logprobs_of_a_chunk_have_those_of_other_tokens() -> None:
    (chunk,) = published(output_with(logprobs=1), [1])
    assert chunk.logprobs == (TokenLogprobs(IDS[0], -0.5, ((IDS[0], -0.5),)),)
    best = output_with(2, n=1, best_of=2, logprobs=1)
    assert published(best, [1], sequence=1) == []
    (whole,) = published(best, [1])
    assert whole.logprobs == chunk.logprobs


def test_a_beam_may_end_within_a_character() -> None:
    output = output_with(1, n=1, beam_width=2)
    (sequence,) = output.sequences
    first_byte, *others = TOKENIZER.encode("日")
    assert others
    tokens = (sampled(0), SampledToken(0, first_byte, -1.0))
    counters = FinalCounters(hypotheses=(Hypothesis(tokens, -1.5, -1.5, "length"),))
    (chunk,) = received(output, sequence, RequestUpdate(0, (), "length", None, counters))
    assert chunk.text == TOKENIZER.decode(IDS[:1]) + "\ufffd"
    assert (chunk.token_ids, chunk.cumulative_logprob) == ((IDS[0], first_byte), -1.5)


def test_the_first_sequence_reports_the_prefill_until_it_has_a_token() -> None:
    output = output_with(2, n=2)
    assert [each.is_first_to_prefill() for each in output.sequences] == [True, False]
    published(output, [1], None)
    assert [each.is_first_to_prefill() for each in output.sequences] == [False, False]


def test_a_continued_sequence_reports_the_prefill_until_it_has_a_token_of_its_own() -> None:
    output = output_with()
    (sequence,) = output.sequences
    sequence.request = Request(RequestSpec(0, (1, 2, 3), max_tokens=len(IDS)), IDS[:2])
    sequence.num_tokens = 2
    assert sequence.is_first_to_prefill()
    received(output, sequence, RequestUpdate(0, (sampled(2),), None))
    assert not sequence.is_first_to_prefill()


def test_usage_counts_no_more_cached_tokens_than_the_prompt_has() -> None:
    """A preempted request finds its own output tokens in the cache."""
    output = output_with()
    output.sequences[0].counters = FinalCounters(cached_tokens=5)
    assert output.usage().cached_tokens == 3


def test_usage_counts_no_tokens_of_an_echo() -> None:
    output = output_with()
    (sequence,) = output.sequences
    sequence.request = Request(RequestSpec(0, (1,), max_tokens=len(IDS), echoed=(2, 3)))
    counts = []
    for index in range(4):
        received(output, sequence, RequestUpdate(0, (sampled(index),), None))
        counts.append(output.usage().completion_tokens)
    assert counts == [0, 0, 1, 2]


def test_latencies_are_those_of_the_first_token_and_of_the_slowest_sequence() -> None:
    output = output_with(2, n=2)
    assert (output.first_token_time(), output.time_per_output_token_s()) == (None, None)
    for sequence, first_s, decode_s in zip(output.sequences, (3.0, 2.0), (6.0, 2.0), strict=True):
        published(output, [4 - sequence.index], sequence=sequence.index)
        sequence.first_token_s = first_s
        sequence.counters = FinalCounters((1.0, first_s - 1.0, decode_s, 0.0, 0.0))
    assert output.first_token_time() == 2.0
    assert output.time_per_output_token_s() == 2.0  # 6 s for the last 3 of 4 tokens


# The stream


def test_images_are_accepted_until_their_memory_is_full() -> None:
    outputs = LiveOutputs(Mock(drop=lambda *_: None), NoEmbedder(), lambda adapter: None)
    first, second, third = (output_with() for _ in range(3))
    for output in (first, second, third):
        output.image_bytes = 40
    outputs.add(first, 80)
    outputs.add(second, 80)
    with pytest.raises(Overloaded, match="this request take 40 bytes, those of others 80, and all may take 80"):
        outputs.add(third, 80)
    outputs.discard(first, "it was refused")
    outputs.add(third, 80)


def test_a_request_that_the_engine_stops_ends_in_that_error_and_not_in_its_cores() -> None:
    outputs = LiveOutputs(Mock(drop=lambda *_: None), NoEmbedder(), lambda adapter: None)
    output = output_with()
    outputs.add(output, None)
    outputs.stop()
    outputs.listener.fail(0, GenerationFailed("the engine process has exited"), STALLED)
    received: list[Any] = []
    output.stream.deliver(received.append)
    (error,) = received
    assert isinstance(error, Unavailable)


def a_chunk(index: int, *, last: bool = False) -> OutputChunk:
    usage = Usage(prompt_tokens=3, completion_tokens=index + 1) if last else None
    return OutputChunk(first_index=index, token_ids=(index,), text="x", usage=usage)


def test_a_stream_delivers_what_came_early_and_then_each_item_when_it_comes() -> None:
    stream = Stream((1, 2, 3), 0, lambda: None)
    seen: list[object] = []
    stream.put(a_chunk(0))
    stream.put(a_chunk(1))
    stream.deliver(seen.append)
    assert seen == [a_chunk(0), a_chunk(1)]
    stream.end(a_chunk(2, last=True))
    assert seen[2:] == [a_chunk(2, last=True)]
    stream.put(a_chunk(3))
    stream.end(a_chunk(4, last=True))
    assert len(seen) == 3, "nothing follows the last chunk"


def test_items_that_a_reader_causes_come_after_those_before() -> None:
    stream = Stream((1, 2, 3), 0, lambda: None)
    seen: list[object] = []

    def receive(item: object) -> None:
        seen.append(item)
        if len(seen) == 1:
            stream.end(a_chunk(2, last=True))

    stream.put(a_chunk(0))
    stream.put(a_chunk(1))
    stream.deliver(receive)
    assert seen == [a_chunk(0), a_chunk(1), a_chunk(2, last=True)]


async def test_a_stream_is_read_once() -> None:
    stream = Stream((1, 2, 3), 0, lambda: None)
    stream.deliver(lambda _: None)
    with pytest.raises(RuntimeError, match="read only once"):
        stream.deliver(lambda _: None)
    with pytest.raises(RuntimeError, match="read only once"):
        await anext(aiter(stream))


@pytest.mark.parametrize("last", [a_chunk(0, last=True), GenerationFailed("a")])
def test_a_stream_that_has_ended_cancels_nothing(last: Any) -> None:
    cancel = Mock()
    stream = Stream((1, 2, 3), 0, cancel)
    stream.cancel()
    cancel.assert_called_once_with()
    stream.end(last)
    stream.cancel()
    cancel.assert_called_once_with()


def read(*chunks: OutputChunk) -> list[OutputChunk]:
    """Return the chunks of a stream that reads outputs."""
    seen: list[Any] = []
    new_parser = partial(MarkupParser, replace(KNOWN_MARKUPS["hermes"], reasoning=THINK), {})
    stream = Stream((1, 2, 3), 0, lambda: None, new_parser, reads_output=True)
    stream.deliver(seen.append)
    for chunk in chunks:
        stream.put(chunk)
    return seen


def test_a_stream_reads_each_output_apart() -> None:
    pieces = ((0, "<think>So</th"), (1, "<think>But"), (0, "ink>a"), (1, "</think>b"), (0, "c"))
    seen = read(*(OutputChunk(first_index=0, token_ids=(), text=text, choice=choice) for choice, text in pieces))
    assert [(chunk.choice, chunk.text, chunk.deltas) for chunk in seen] == [
        (0, "", (Delta("reasoning", "So"),)),
        (1, "", (Delta("reasoning", "But"),)),
        (0, "a", None),
        (1, "b", None),
        (0, "c", None),
    ]


@pytest.mark.parametrize(("end", "text"), [("stop", "a <tool"), ("length", "a")])
def test_held_text_ends_an_output_unless_it_may_be_the_beginning_of_a_cut_call(end: Any, text: str) -> None:
    seen = read(
        OutputChunk(first_index=0, token_ids=(), text="a <tool"),
        OutputChunk(first_index=0, token_ids=(), text="", finish_reason=end),
    )
    assert "".join(chunk.text for chunk in seen) == text
