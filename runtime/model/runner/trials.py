"""The steps in which the ops of a loaded program are timed: single rows of some sequences, and a chunk of many rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....kernels import Program
from ....pager import KVLayout
from .tuning import Trial

TRIAL_ROWS = (1, 4, 8, 24)  # rows, one for each class of row counts below the largest
TRIAL_CHUNK = 128  # rows of prefill, or tokens of a text
DECODE_CONTEXT = 255  # tokens before each row that decodes


def decoder_trials(
    program: Program,
    layout: KVLayout,
    num_pages: int,
    *,
    max_rows: int,
    max_sequences: int,
    max_model_len: int,
) -> Iterator[Trial]:
    """Yield a step for each class of row counts: sequences that decode, as many as may run, and a chunk of prefill.

    Pages are used in order, again from the first one if there are too few.
    """

    def step(sequences: int, rows: int, first: int) -> Trial:
        per_table = -(-(first + rows) // layout.page_size)
        tables = sequences * len(layout.group_windows)
        arrays = (
            np.zeros(sequences * rows, np.int32),
            np.arange(sequences + 1, dtype=np.int32) * np.int32(rows),
            np.full(sequences, first, np.int32),
            (np.arange(tables * per_table) % num_pages).astype(np.int32),
            np.arange(tables + 1, dtype=np.int32) * np.int32(per_table),
            np.zeros(0, np.int32),
        )

        def run(first_op: int, end_op: int) -> None:
            program.run(*arrays, first=first_op, end=end_op)

        return Trial(sequences * rows, rows, run)

    for rows in TRIAL_ROWS:
        if rows <= min(max_sequences, max_rows):
            yield step(rows, 1, min(DECODE_CONTEXT, max_model_len - 1))
    chunk = min(TRIAL_CHUNK, max_rows, max_model_len)
    if chunk > TRIAL_ROWS[-1]:
        yield step(1, chunk, 0)


def text_trials(program: Program, *, max_rows: int, max_tokens: int) -> Iterator[Trial]:
    """Yield a text for each class of row counts that the program takes."""

    def text(tokens: int) -> Trial:
        ids = np.zeros(tokens, np.int32)
        row_start = np.array([0, tokens], np.int32)

        def run(first_op: int, end_op: int) -> None:
            program.run_texts(ids, row_start, None, first_op, end_op)

        return Trial(tokens, tokens, run)

    for tokens in (*TRIAL_ROWS, TRIAL_CHUNK):
        if tokens <= min(max_rows, max_tokens):
            yield text(tokens)
