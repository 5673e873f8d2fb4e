"""The structs between scheduler and model runner: a `StepPlan` goes out, a `StepResult` comes back.

Nothing else passes between the two, and both structs are immutable. A plan contains no tensors: page ids, positions and
token ids are all that kernels need. The structs that exist per sequence and step are named tuples, which cost less to
create than frozen dataclasses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class PlacedImage(NamedTuple):
    """An image in a prompt, and the consecutive tokens that stand for it."""

    position: int  # position in the prompt of the first of these tokens
    tokens: int
    digest: bytes  # sha256 of the size and the pixels
    height: int
    width: int
    pixels: bytes  # uint8 [height, width, 3]

    @property
    def end(self) -> int:
        return self.position + self.tokens


def whole_chunk(images: Sequence[PlacedImage], first: int, num_tokens: int) -> int:
    """Return the most of the `num_tokens` tokens from `first` on whose end is inside no image."""
    for image in images:
        if image.position < first + num_tokens < image.end:
            return max(0, image.position - first)
    return num_tokens


def least_whole_chunk(images: Sequence[PlacedImage], first: int) -> int:
    """Return the least number of tokens from `first` on, 1 or more, whose end is inside no image."""
    return next((image.end - first for image in images if image.position <= first < image.end), 1)


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step."""

    request_id: int
    tables: Sequence[Sequence[int]]  # page table per layer group; pages in the window are owned for the whole step
    first_position: int  # position of token_ids[0]
    token_ids: Sequence[int]  # tokens to compute; the last num_samples - 1 are draft tokens
    num_samples: int  # the last rows that sample; 0: prefill is not complete, 1: the next token, more: verify drafts
    sampling: object  # passed from the request to the model runner
    context: Sequence[int]  # tokens up to the last row, drafts included; sample j sees all but num_samples - 1 - j
    num_prompt_tokens: int  # leading tokens of context
    echoed: Sequence[int] = ()  # output tokens that are not sampled
    images: Sequence[PlacedImage] = ()  # images that some of token_ids stand for
    salt: bytes = b""  # only sequences with the same salt share computed images
    prompt_images: Sequence[PlacedImage] = ()  # all images of the prompt: positions in height and width depend on them
    state: int = 0  # slot of the sequence's state, for models that have states


class EncodedText(NamedTuple):
    """One text as an encoder takes it."""

    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...] | None = None  # type of each token, for models that have token types; None: all 0


class EncoderStep(NamedTuple):
    """Some stages of one batch of texts."""

    texts: tuple[EncodedText, ...]  # texts of a batch that begins; empty: the batch of the previous step continues
    num_stages: int
    is_last: bool  # the batch ends
    request_ids: tuple[int, ...]  # ids of the batch's requests, each once


@dataclass(frozen=True, slots=True)
class DraftTask:
    """The draft tokens that a draft model should propose after a step, for the next one."""

    lengths: Mapping[int, int]  # request id -> most tokens to propose; 0: a head only reads the rows of the step
    salts: Mapping[int, bytes]  # request id -> salt of its cached pages
    max_rows: int  # rows of the first pass, in which missing tokens are computed
    ended: tuple[int, ...]  # ids of requests that have ended since the last task


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: decode rows first, then prefill chunks, each in order of admission; then the encoder. Never empty."""

    step_id: int
    sequences: tuple[ScheduledSequence, ...]
    num_decode_rows: int
    num_prefill_tokens: int
    encoder: tuple[EncoderStep, ...] = ()  # batches, one after another
    images_s: float = 0.0  # approximate time budget for images; sequences whose image takes longer are deferred
    max_forced: int = 0  # most grammar-forced tokens per sequence that are worth drafting in the next step
    drafting: DraftTask | None = None  # work of the draft model after the step, if there is any


class SampledToken(NamedTuple):
    """The result of one sample: a token, an error if its logits could not be sampled (NaN), or deferred."""

    request_id: int
    token_id: int
    logprob: float | None = None  # natural log of the raw probability; None unless requested
    top_logprobs: tuple[tuple[int, float], ...] = ()
    error: str | None = None
    forced: tuple[int, ...] = ()  # the only text that the request's grammar allows next, if there is one; draft tokens
    is_deferred: bool = False  # the row must be computed again: the mask of allowed tokens was not ready in time


class EncoderResult(NamedTuple):
    """The result of one `EncoderStep`: an error ends every request of the batch."""

    duration_s: float
    values: tuple[bytes | None, ...] = ()  # f32 per text, if the batch ends; None: not finite
    error: str | None = None


@dataclass(frozen=True, slots=True)
class DraftResult:
    """The proposals of a draft model, and the work they took."""

    tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # request id -> tokens that may follow
    num_passes: int = 0
    num_rows: int = 0  # rows of all passes
    seconds: float = 0.0


NO_DRAFTS = DraftResult()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Samples in the plan's order, grouped by sequence, and the seconds that the sequences took."""

    step_id: int
    sampled: tuple[SampledToken, ...]
    duration_s: float  # duration without `images_s`
    encoder: tuple[EncoderResult, ...] = ()  # one result per batch of the plan
    deferred: frozenset[int] = frozenset()  # ids of sequences that were not computed because their image is not done
    images_s: float = 0.0  # time of images, before the sequences
    drafting: DraftResult = NO_DRAFTS


def verified_samples(sequence: ScheduledSequence, samples: Sequence[SampledToken]) -> Sequence[SampledToken]:
    """Return a sequence's samples up to the first that differs from its draft token, or that has no token."""
    last = len(samples) - 1
    for index, sample in enumerate(samples):
        if sample.error is not None or sample.is_deferred:
            return samples[:index]
        if index < last and sample.token_id != sequence.token_ids[index - last]:
            return samples[: index + 1]
    return samples
