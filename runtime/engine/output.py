"""One accepted request until its end: what the scheduler reports of its sequences, as the chunks its user sees.

It must not know the scheduler's door, sockets or metrics. One invariant: a chunk depends on the tokens alone, never on
how many of them came in one update; what comes after a stop string was never there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...scheduler import Request, RequestUpdate, SampledToken
from ..common.errors import QuireError
from ..common.types import FinishReason, OutputChunk, SamplingParams, TokenLogprobs, Usage
from .facade import GenerateRequest
from .stream import Stream
from .text import IncrementalDetokenizer

NewDetokenizer = Callable[[], IncrementalDetokenizer | None]  # None: the model has no tokenizer


class Piece(NamedTuple):
    """What is known of a choice that is not streamed."""

    tokens: Sequence[SampledToken]
    text: str
    finish_reason: FinishReason | None


@dataclass(slots=True)
class SequenceOutput:
    """One scheduled sequence of a live request."""

    output: StreamingOutput
    index: int
    request: Request
    detokenizer: IncrementalDetokenizer | None
    num_tokens: int = 0  # generated and kept
    last_tokens_s: float | None = None  # when the latest of them came
    finish_reason: FinishReason | None = None
    held: list[Piece] = field(default_factory=list)  # where nothing is told before all have ended

    def read(self, update: RequestUpdate) -> tuple[Sequence[SampledToken], str]:
        """The update's tokens up to a stop string, and their text. Notes how the sequence ended, if it did."""
        tokens, text, reason = update.tokens, "", update.finish_reason
        detokenizer = self.detokenizer
        if detokenizer is not None:
            text = detokenizer.push(_ids(tokens))
            if detokenizer.stop_string is not None:
                assert detokenizer.stop_token_index is not None, "set together"
                tokens, reason = tokens[: detokenizer.stop_token_index + 1 - self.num_tokens], "stop"
            elif reason is not None:
                text += detokenizer.finish()
        self.num_tokens += len(tokens)
        if reason is not None:
            self.finish_reason = reason
            self.output.num_open -= 1
        return tokens, text


class StreamingOutput:
    """A request whose choices are streamed as they come, one for each of `requests`."""

    def __init__(
        self,
        stream: Stream,
        request: GenerateRequest,
        seed: int,
        submitted: float,
        requests: Sequence[Request],
        new_detokenizer: NewDetokenizer,
    ) -> None:
        self.stream = stream
        self.request = request
        self.params = request.sampling_params
        self.seed = seed
        self.submitted = submitted
        self.error: QuireError | None = None  # what a failure should be called, where the scheduler cannot know
        self.sequences = [SequenceOutput(self, i, request, new_detokenizer()) for i, request in enumerate(requests)]
        self.num_open = len(self.sequences)  # that have not ended
        self._new_detokenizer = new_detokenizer

    def take(self, sequence: SequenceOutput, update: RequestUpdate) -> Sequence[OutputChunk]:
        """What may go out now that this is known. The usage is still to be added to the last chunk of all.

        Raises whatever a detokenizer raises.
        """
        tokens, text = sequence.read(update)
        if not tokens and sequence.finish_reason is None:
            return ()
        return (self._chunk(sequence.index, sequence.num_tokens - len(tokens), tokens, text, sequence.finish_reason),)

    def note_prefill(self, sequence: SequenceOutput, num_tokens: int) -> None:
        """So many tokens of its prompt are computed, and the rest is not. Sequences compute one prompt, the first's."""
        if sequence.index == 0 and sequence.num_tokens == 0:
            self.stream.note_prefill(num_tokens)

    def usage(self) -> Usage:
        """Of a request that has ended."""
        requests = [sequence.request for sequence in self.sequences]
        first = requests[0]
        return Usage(
            prompt_tokens=first.num_prompt_tokens,
            completion_tokens=sum(sequence.num_tokens for sequence in self.sequences),
            cached_tokens=first.cached_tokens,
            recomputed_tokens=sum(request.recomputed_tokens for request in requests),
            seed=self.seed,
            queue_ms=first.queue_s * 1000,
            prefill_ms=first.prefill_s * 1000,
            decode_ms=max(request.decode_s for request in requests) * 1000,
            stall_ms=max(request.stall_s for request in requests) * 1000,
        )

    def first_token_time(self) -> float | None:
        times = [sequence.request.first_token_time for sequence in self.sequences]
        return min((time for time in times if time is not None), default=None)

    def time_per_output_token_s(self) -> float | None:
        """Mean seconds per token after the first, of the sequence that decoded longest."""
        slowest = max(self.sequences, key=lambda sequence: sequence.request.decode_s)
        return slowest.request.decode_s / (slowest.num_tokens - 1) if slowest.num_tokens > 1 else None

    def _chunk(
        self,
        choice: int,
        first_index: int,
        tokens: Sequence[SampledToken],
        text: str,
        reason: FinishReason | None,
        cumulative_logprob: float | None = None,
    ) -> OutputChunk:
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = tuple([TokenLogprobs(t.token_id, t.logprob or 0.0, t.top_logprobs) for t in tokens])
        return OutputChunk(
            first_index=first_index,
            token_ids=_ids(tokens),
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            choice=choice,
            cumulative_logprob=cumulative_logprob,
        )

    def _cancelled(self) -> list[OutputChunk]:
        """The choices of a request that nobody waits for any more, where none was told before the end."""
        return [self._chunk(choice, 0, (), "", "cancelled") for choice in range(self.params.n)]


class BestOfOutput(StreamingOutput):
    """`best_of`: all sequences are drawn to their end, the likeliest are told, the earlier of equals first."""

    def take(self, sequence: SequenceOutput, update: RequestUpdate) -> Sequence[OutputChunk]:
        sequence.held.append(Piece(*sequence.read(update), sequence.finish_reason))
        if self.num_open:
            return ()
        if any(sequence.finish_reason == "cancelled" for sequence in self.sequences):
            return self._cancelled()
        joined = [_join(sequence.held) for sequence in self.sequences]
        found = [(_cumulative_logprob(whole.tokens), whole) for whole in joined]
        found.sort(key=lambda ranked: -ranked[0])
        return [self._chunk(i, 0, *whole, logprob) for i, (logprob, whole) in enumerate(found[: self.params.n])]


class BeamOutput(StreamingOutput):
    """`beam_width`: one scheduled request, whose hypotheses are the choices."""

    def take(self, sequence: SequenceOutput, update: RequestUpdate) -> Sequence[OutputChunk]:
        sequence.read(update)
        if sequence.finish_reason is None:
            return ()
        if sequence.finish_reason == "cancelled":
            return self._cancelled()
        found = sequence.request.hypotheses
        sequence.num_tokens = sum(len(each.tokens) for each in found)
        return [
            self._chunk(i, 0, each.tokens, self._text(each.tokens), each.finish_reason, each.cumulative_logprob)
            for i, each in enumerate(found)
        ]

    def _text(self, tokens: Sequence[SampledToken]) -> str:
        detokenizer = self._new_detokenizer()
        return "" if detokenizer is None else detokenizer.push(_ids(tokens)) + detokenizer.finish()

    def time_per_output_token_s(self) -> float | None:
        """Steps of a search are no tokens."""
        return None


def output_class(params: SamplingParams) -> type[StreamingOutput]:
    """How the choices of such a request reach their user."""
    if params.beam_width:
        return BeamOutput
    return StreamingOutput if params.best_of is None else BestOfOutput


def _ids(tokens: Sequence[SampledToken]) -> tuple[int, ...]:
    if len(tokens) == 1:  # by far the most frequent
        return (tokens[0].token_id,)
    return tuple([token.token_id for token in tokens])


def _join(pieces: Sequence[Piece]) -> Piece:
    tokens = [token for piece in pieces for token in piece.tokens]
    return Piece(tokens, "".join(piece.text for piece in pieces), pieces[-1].finish_reason)


def _cumulative_logprob(tokens: Sequence[SampledToken]) -> float:
    return sum(token.logprob or 0.0 for token in tokens)
