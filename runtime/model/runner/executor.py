"""The executor: turns a `StepPlan` into a `StepResult` on the kernels. Owns the program, the sampler and their memory.

It must not know requests, queues or asyncio, and keeps no state between steps but the pages themselves. Blocking: the
engine calls it from its own thread, one step at a time.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ....kernels import Program, Sampler
from ....kernels.ops import Region
from ....scheduler.plan import SampledToken, ScheduledSequence, StepPlan, StepResult
from .sampling import sampling_rows

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's share of a forward pass: `token_ids` from `first_position`, through `tables`.

    `tables` are page ids by number of page, one table for each layer group. `samples` lists which of the rows, counted
    from its first, go on to the head.
    """

    token_ids: Sequence[int]
    first_position: int
    tables: Sequence[Sequence[int]]
    samples: Sequence[int]


class Executor:
    def __init__(
        self, program: Program, logits: Region, maxima: Region, vocab_size: int, sampler: Sampler, max_rows: int
    ) -> None:
        self.program = program
        self.max_rows = max_rows  # tokens of one step
        self._logits: Floats = program.view(logits)  # [max_samples, padded vocab]
        self._maxima: Floats = program.view(maxima)  # [max_samples, padded(padded vocab / 32)]
        self._vocab_size = vocab_size
        self._sampler = sampler
        self._sampling_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step. Samples whose logits are not finite get an error of their own; the others are untouched."""
        start = time.perf_counter()
        self._forward([_rows_of(sequence) for sequence in plan.sequences])
        sampled = self._sample(plan.sequences)
        return StepResult(plan.step_id, sampled, time.perf_counter() - start)

    def forward(self, sequences: Sequence[Rows]) -> Floats:
        """Run rows and return the logits [sampling rows, vocab] of those listed: a view, valid until the next call."""
        samples = self._forward(sequences)
        return self._logits[:samples, : self._vocab_size]

    def score(self, token_ids: Sequence[int], first_position: int, tables: Sequence[Sequence[int]]) -> Floats:
        """Logits [len(token_ids), vocab] after each of at most `max_samples` tokens of a sequence: as `forward`'s."""
        return self.forward([Rows(token_ids, first_position, tables, range(len(token_ids)))])

    def op_seconds(self) -> tuple[list[float], float]:
        """Seconds in each op of the program, and in sampling, since this was last asked."""
        sampling_s, self._sampling_s = self._sampling_s, 0.0
        return self.program.op_seconds(), sampling_s

    @property
    def max_samples(self) -> int:
        return len(self._logits)

    def _forward(self, sequences: Sequence[Rows]) -> int:
        counts = [len(sequence.token_ids) for sequence in sequences]
        by_group = zip(*(sequence.tables for sequence in sequences), strict=True)
        tables = [table for group in by_group for table in group]
        page_ids = array("i")
        for table in tables:
            page_ids.extend(table)
        row_start = _starts(counts)
        samples = [
            row + int(start) for sequence, start in zip(sequences, row_start, strict=False) for row in sequence.samples
        ]
        token_ids = (token for sequence in sequences for token in sequence.token_ids)
        self.program.run(
            np.fromiter(token_ids, np.int32, int(row_start[-1])),
            row_start,
            np.array([sequence.first_position for sequence in sequences], np.int32),
            np.frombuffer(page_ids, np.int32),
            _starts([len(table) for table in tables]),
            np.array(samples, np.int32),
        )
        return len(samples)

    def _sample(self, sequences: Sequence[ScheduledSequence]) -> tuple[SampledToken, ...]:
        owners = [sequence.request_id for sequence in sequences for _ in range(sequence.num_samples)]
        if not owners:
            return ()
        rows, adjustments = sampling_rows(sequences)
        start = time.perf_counter()
        tokens, logprobs, top_ids, top_logprobs = self._sampler.sample(self._logits, self._maxima, rows, adjustments)
        self._sampling_s += time.perf_counter() - start
        wanted: list[int] = rows["logprobs"].tolist()
        return tuple(
            _sampled(request_id, token, logprob, n, top_ids[i], top_logprobs[i])
            for i, (request_id, token, logprob, n) in enumerate(
                zip(owners, tokens.tolist(), logprobs.tolist(), wanted, strict=True)
            )
        )


def _rows_of(sequence: ScheduledSequence) -> Rows:
    rows = len(sequence.token_ids)
    samples = range(rows - sequence.num_samples, rows)
    return Rows(sequence.token_ids, sequence.first_position, sequence.tables, samples)


def _starts(counts: Sequence[int]) -> Ints:
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _sampled(
    request_id: int, token: int, logprob: float, wanted: int, top_ids: npt.NDArray[Any], top_logprobs: npt.NDArray[Any]
) -> SampledToken:
    if token < 0:
        return SampledToken(request_id, 0, error="the model's logits are not finite numbers")
    if wanted < 0:
        return SampledToken(request_id, token)
    ids, values = top_ids[:wanted].tolist(), top_logprobs[:wanted].tolist()
    top = tuple((i, value) for i, value in zip(ids, values, strict=True) if i >= 0)
    return SampledToken(request_id, token, logprob, top)
