"""The expected time to the first token and speed of decode of a model on a machine, by number of users."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ....scheduler import ScheduledSequence, StepPlan
from ..bench import Shape
from .cost import SEQUENCE_S, StepCost

DECODED_TOKENS = 32  # tokens of each user; decode is predicted in the middle of them

Chunk = tuple[int, int, int]  # rows of one sequence: tokens before it, rows, rows that sample


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one shape, in the terms of `quire bench`."""

    first_token_s: float  # seconds until every user has its first token, if all begin at once
    tokens_per_s: float  # tokens of all users together, while all decode


def predict_speed(cost: StepCost, shape: Shape, max_rows: int) -> Speed:
    """Predict the speed of `shape` with steps of at most `max_rows` tokens."""
    prefill_s = sum(step_seconds(cost, chunks) for chunks in _prefill_steps(shape, max_rows))
    decode_s = step_seconds(cost, [(shape.prompt_tokens + DECODED_TOKENS // 2, 1, 1)] * shape.batch)
    return Speed(prefill_s, shape.batch / decode_s)


def step_seconds(cost: StepCost, chunks: Iterable[Chunk]) -> float:
    """Return the seconds from a step with one chunk per sequence to the next step."""
    sequences = tuple(
        ScheduledSequence(index, ((),), first, range(rows), samples, None, (), 0)
        for index, (first, rows, samples) in enumerate(chunks)
    )
    return cost(StepPlan(1, sequences, 0, 0)) + len(sequences) * SEQUENCE_S


def _prefill_steps(shape: Shape, max_rows: int) -> Iterator[list[Chunk]]:
    """Yield the chunks of each step that prefills the prompts, one after another."""
    chunks: list[Chunk] = []
    free = max_rows
    for _ in range(shape.batch):
        first = 0
        while first < shape.prompt_tokens:
            rows = min(free, shape.prompt_tokens - first)
            chunks.append((first, rows, int(first + rows == shape.prompt_tokens)))
            first += rows
            free -= rows
            if not free:
                yield chunks
                chunks = []
                free = max_rows
    if chunks:
        yield chunks
