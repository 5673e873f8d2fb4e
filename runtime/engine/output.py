"""Conversion of the core's updates into chunks of text for a request's reader.

A `Stream` carries the chunks of one request. The class that makes them depends on the request: `StreamingOutput` passes
on tokens as they arrive, `BestOfOutput` and `BeamOutput` wait until the outputs can be ranked. A chunk's content
depends on the tokens alone, not on how the core grouped them into updates, and tokens after a stop string are dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ...scheduler import FinalCounters, Request, RequestUpdate, SampledToken
from ..common.errors import QuireError
from ..common.types import FinishReason, OutputChunk, SamplingParams, TokenLogprobs, Usage
from ..model.runner import ReasoningMarkers, find_reasoning
from .adapters import NO_ADAPTER, Adapter
from .continuation import Continuation
from .facade import GenerateRequest
from .stream import Stream
from .text import Detokenizer

NO_COUNTERS = FinalCounters()
NewDetokenizer = Callable[[], Detokenizer | None]  # None: the model has no tokenizer

_token_id = attrgetter("token_id")


@dataclass(slots=True)
class SequenceOutput:
    """The output of one scheduled sequence of a request."""

    output: StreamingOutput  # output of the request
    index: int  # index among the request's sequences
    request: Request
    detokenizer: Detokenizer | None
    num_tokens: int = 0  # generated tokens that are part of the output
    first_token_s: float | None = None  # time of the first token, without tokens of another server
    last_tokens_s: float | None = None  # time of the most recent tokens
    counters: FinalCounters = NO_COUNTERS  # known from the end on
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # see `OutputChunk`
    held_tokens: list[SampledToken] = field(default_factory=list)  # tokens of an output that is not streamed
    held_text: str = ""
    token_ids: array[int] = field(default_factory=lambda: array("I"))  # all tokens, if reasoning among them is counted

    def is_first_to_prefill(self) -> bool:
        """Return whether this is the request's first sequence and has no token yet: the sequences share one prompt."""
        return self is self.output.sequences[0] and self.num_tokens == len(self.request.generated)

    def read(self, update: RequestUpdate) -> tuple[Sequence[SampledToken], str]:
        """Return the update's tokens up to a stop string, and the text they finished. Record the sequence's end."""
        tokens = update.tokens
        text = ""
        reason = update.finish_reason
        detokenizer = self.detokenizer
        if update.counters is not None:
            self.counters = update.counters
        if detokenizer is not None:
            text = detokenizer.push(map(_token_id, tokens))
            if detokenizer.stop_string is not None:
                assert detokenizer.stop_token_index is not None, "set together"
                tokens = tokens[: detokenizer.stop_token_index + 1 - self.num_tokens]
                reason = "stop"
            elif reason is not None:
                text += detokenizer.finish()
        self.num_tokens += len(tokens)
        if self.output.reasoning is not None:
            self.token_ids.extend(map(_token_id, tokens))
        if reason is not None:
            self.finish_reason = reason
            self.stop_reason = self._stopped_by(tokens, reason)
            self.output.num_open -= 1
        return tokens, text

    def _stopped_by(self, tokens: Sequence[SampledToken], reason: FinishReason) -> int | str | None:
        """Return the match of the request's own stop parameters; None if the model ended the output."""
        if self.detokenizer is not None and self.detokenizer.stop_string is not None:
            return self.detokenizer.stop_string
        if reason == "stop" and tokens and tokens[-1].token_id in self.output.params.stop_token_ids:
            return tokens[-1].token_id
        return None


class StreamingOutput:
    """The output of a request whose sequences are streamed as they are generated, one for each of `requests`."""

    def __init__(
        self,
        stream: Stream,
        request: GenerateRequest,
        requests: Sequence[Request],
        new_detokenizer: NewDetokenizer,
        *,
        seed: int,
        submitted: float,
        continuation: Continuation | None = None,
        reasoning: ReasoningMarkers | None = None,
        image_bytes: int = 0,
        adapter: Adapter = NO_ADAPTER,
    ) -> None:
        self.stream = stream
        self.request = request
        self.params = request.sampling_params
        self.seed = seed
        self.submitted = submitted
        self.reasoning = reasoning
        self.image_bytes = image_bytes  # pixels of the prompt's images, until the request ends
        self.adapter = adapter  # adapter that the request uses, until it ends
        # The error to raise if the core ends the request with an error.
        self.error: QuireError | None = None
        self._num_former_tokens = 0  # tokens of outputs that another server has ended
        if continuation is None:
            self.sequences = [SequenceOutput(self, i, each, new_detokenizer()) for i, each in enumerate(requests)]
        else:
            self.sequences = self._replayed(continuation, requests)
        self.num_open = len(self.sequences)  # sequences that have not ended
        self._new_detokenizer = new_detokenizer

    def _replayed(self, continuation: Continuation, requests: Sequence[Request]) -> list[SequenceOutput]:
        self._num_former_tokens = continuation.num_former_tokens
        sequences = []
        for output, request in zip(continuation.open, requests, strict=True):
            num_tokens = len(output.token_ids)
            sequence = SequenceOutput(self, output.choice, request, output.detokenizer, num_tokens)
            sequence.token_ids.extend(output.token_ids)
            sequences.append(sequence)
            if output.parser is not None:
                self.stream.go_on(output.choice, output.parser)
        return sequences

    def chunks(self, sequence: SequenceOutput, tokens: Sequence[SampledToken], text: str) -> Sequence[OutputChunk]:
        """Return the chunks that can be sent after a sequence has read `tokens` and `text`.

        The request's last chunk still lacks its usage. Raises whatever the detokenizer raises.
        """
        reason = sequence.finish_reason
        if not tokens and reason is None:
            return ()
        chunk = OutputChunk(
            first_index=sequence.num_tokens - len(tokens),
            token_ids=tuple(map(_token_id, tokens)),
            text=text,
            logprobs=None if self.params.logprobs is None else _logprobs(tokens),
            finish_reason=reason,
            choice=sequence.index,
            stop_reason=sequence.stop_reason,
        )
        return (chunk,)

    def usage(self) -> Usage:
        """Return the usage of a request that has ended."""
        all_counters = [sequence.counters for sequence in self.sequences]
        prompt_tokens = len(self.stream.prompt_token_ids)
        num_tokens = sum(max(0, each.num_tokens - len(each.request.spec.echoed)) for each in self.sequences)
        counts: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._num_former_tokens + num_tokens,
            "reasoning_tokens": self._num_reasoning_tokens(),
        }
        if not all_counters:  # another server has generated everything
            return Usage(seed=self.seed, **counts)
        first = all_counters[0]
        return Usage(
            **counts,
            cached_tokens=min(first.cached_tokens, prompt_tokens),
            recomputed_tokens=sum(each.recomputed_tokens for each in all_counters),
            seed=self.seed,
            queue_ms=first.queue_s * 1000,
            prefill_ms=first.prefill_s * 1000,
            decode_ms=max(each.decode_s for each in all_counters) * 1000,
            stall_ms=max(each.stall_s for each in all_counters) * 1000,
        )

    def _num_reasoning_tokens(self) -> int | None:
        """Return the tokens of reasoning in all outputs; None if the model's markers are not single tokens."""
        markers = self.reasoning
        if markers is None:
            return None
        begun = markers.begins_in(self.stream.prompt_token_ids)
        found = [find_reasoning(markers, each, 0, len(each), begun=begun) for each in self._generated()]
        return sum(each.num_tokens for each in found)

    def _generated(self) -> list[Sequence[int]]:
        """Return the tokens of all outputs, including outputs that another server has ended."""
        open_choices = {sequence.index for sequence in self.sequences}
        former = [ids for choice, ids in enumerate(self.request.generated or ()) if choice not in open_choices]
        return [*former, *(each.token_ids[len(each.request.spec.echoed) :] for each in self.sequences)]

    def first_token_time(self) -> float | None:
        """Return the time of the request's first token."""
        times = [sequence.first_token_s for sequence in self.sequences]
        return min((time for time in times if time is not None), default=None)

    def time_per_output_token_s(self) -> float | None:
        """Return the mean seconds per token after the first, of the sequence that decoded longest."""
        slowest = max(self.sequences, key=lambda sequence: sequence.counters.decode_s, default=None)
        if slowest is None:
            return None
        num_tokens = slowest.num_tokens - len(slowest.request.generated)
        return slowest.counters.decode_s / (num_tokens - 1) if num_tokens > 1 else None

    def _whole(
        self,
        choice: int,
        tokens: Sequence[SampledToken],
        text: str,
        reason: FinishReason | None,
        logprob: float | None = None,
        stop_reason: int | str | None = None,
    ) -> OutputChunk:
        """Return one chunk that is a whole output."""
        return OutputChunk(
            first_index=0,
            token_ids=tuple(map(_token_id, tokens)),
            text=text,
            logprobs=None if self.params.logprobs is None else _logprobs(tokens),
            finish_reason=reason,
            choice=choice,
            cumulative_logprob=logprob,
            stop_reason=stop_reason,
        )

    def _cancelled(self) -> list[OutputChunk]:
        """Return the empty outputs of a cancelled request that streams nothing."""
        return [self._whole(choice, (), "", "cancelled") for choice in range(self.params.n)]


class BestOfOutput(StreamingOutput):
    """The output of `best_of`: the `n` sequences with the highest cumulative logprob, once all have ended.

    The best output comes first; among equals, the one with the lower index.
    """

    def chunks(self, sequence: SequenceOutput, tokens: Sequence[SampledToken], text: str) -> Sequence[OutputChunk]:
        """Hold the tokens; return all outputs when the last sequence has ended."""
        sequence.held_tokens += tokens
        sequence.held_text += text
        if self.num_open:
            return ()
        if any(each.finish_reason == "cancelled" for each in self.sequences):
            return self._cancelled()
        ranked = [(sum(token.logprob or 0.0 for token in each.held_tokens), each) for each in self.sequences]
        ranked.sort(key=lambda pair: -pair[0])
        return [
            self._whole(i, each.held_tokens, each.held_text, each.finish_reason, logprob, each.stop_reason)
            for i, (logprob, each) in enumerate(ranked[: self.params.n])
        ]


class BeamOutput(StreamingOutput):
    """The output of `beam_width`: the hypotheses of one scheduled beam search, once it has ended."""

    def chunks(self, sequence: SequenceOutput, tokens: Sequence[SampledToken], text: str) -> Sequence[OutputChunk]:
        """Return the hypotheses when the search has ended."""
        if sequence.finish_reason is None:
            return ()
        if sequence.finish_reason == "cancelled":
            return self._cancelled()
        found = sequence.counters.hypotheses
        sequence.num_tokens = sum(len(each.tokens) for each in found)
        return [
            self._whole(i, each.tokens, self._text(each.tokens), each.finish_reason, each.cumulative_logprob)
            for i, each in enumerate(found)
        ]

    def _generated(self) -> list[Sequence[int]]:
        found = [each for sequence in self.sequences for each in sequence.counters.hypotheses]
        return [list(map(_token_id, each.tokens)) for each in found]

    def _text(self, tokens: Sequence[SampledToken]) -> str:
        detokenizer = self._new_detokenizer()
        return "" if detokenizer is None else detokenizer.push(map(_token_id, tokens)) + detokenizer.finish()

    def time_per_output_token_s(self) -> None:
        """Return None: the steps of a search do not yield one token each."""


def output_class(params: SamplingParams) -> type[StreamingOutput]:
    """Return the class that makes the chunks of a request with these parameters."""
    if params.beam_width:
        return BeamOutput
    return StreamingOutput if params.best_of is None else BestOfOutput


def _logprobs(tokens: Sequence[SampledToken]) -> tuple[TokenLogprobs, ...]:
    return tuple([TokenLogprobs(token.token_id, token.logprob or 0.0, token.top_logprobs) for token in tokens])
