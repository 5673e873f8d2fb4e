"""What a phase of a measurement had to do at least: bytes from memory and useful operations, counted from the program.

It must not measure. One invariant: nothing is counted that the model's definition does not ask for, no padding of rows,
no masked half of a tile, no byte read twice in a step; so a share of a roof is never flattered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....kernels.ops import QUERY_FORMS, Form, Linear
from ....scheduler import chunk_pairs
from ...model.runner import ModelRunner
from .roofline import Roofline

Contexts = tuple[int, ...]  # of one step: per sequence, tokens in the KV cache after it


@dataclass(frozen=True, slots=True)
class Work:
    weight_bytes: int  # packed, once per step; of the embedding nothing, steps read a few of its columns
    kv_bytes: int  # as stored, int8's scales included, once per step and sequence
    ops: dict[Form, int]  # multiplications and additions, by the form of their operands

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def num_ops(self) -> int:
        return sum(self.ops.values())

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.num_ops / self.num_bytes

    def compute_seconds(self, roof: Roofline) -> float:
        """The least seconds this can take, were memory infinitely fast: each form's operations at its own peak."""
        return sum(count / roof.peak_ops_per_s[form] for form, count in self.ops.items())

    def memory_seconds(self, roof: Roofline) -> float:
        """The least seconds this can take, were arithmetic infinitely fast."""
        return self.num_bytes / roof.read_bytes_per_s


def prefill_work(runner: ModelRunner, users: int, prompt_tokens: int, steps: Sequence[Contexts]) -> Work:
    """Prompts of `users` from their first token on, computed in `steps`; each user samples one token."""

    def pairs(window: int) -> int:
        return users * visible_pairs(0, prompt_tokens, window)

    return _work(runner, users * prompt_tokens, users, steps, pairs)


def decode_work(runner: ModelRunner, steps: Sequence[Contexts]) -> Work:
    """One token for each sequence of each step, all of which sample."""
    rows = sum(len(contexts) for contexts in steps)
    return _work(runner, rows, rows, steps, lambda window: _seen(steps, window))


def visible_pairs(first: int, rows: int, window: int) -> int:
    """Pairs of a query and a key that it sees: `rows` tokens after `first` others, in a window (0: all before it)."""
    growing = min(rows, max(0, window - first)) if window else rows  # they see everything before them
    return chunk_pairs(first, growing) + (rows - growing) * window


def _seen(steps: Sequence[Contexts], window: int) -> int:
    """Tokens whose keys and values a layer reads, once per step and sequence."""
    return sum(min(context, window or context) for contexts in steps for context in contexts)


def _work(runner: ModelRunner, rows: int, samples: int, steps: Sequence[Contexts], pairs: Callable[[int], int]) -> Work:
    """`pairs(window)`: how many (query, visible key) pairs a layer of that window has."""
    ops: dict[Form, int] = {}
    weight_bytes = 0
    for op in runner.ops:
        if isinstance(op, Linear):
            weight = op.weight
            of = samples if op.maxima is not None else rows  # only the lm_head leaves maxima
            ops[weight.dtype] = ops.get(weight.dtype, 0) + 2 * of * weight.out_features * weight.in_features
            weight_bytes += weight.nbytes * len(steps)
    spec, layout = runner.spec, runner.capacity.layout
    form = QUERY_FORMS[layout.dtype]  # of keys and values as they are multiplied
    kv_bytes = 0
    for window in spec.windows:
        ops[form] = ops.get(form, 0) + 4 * pairs(window) * spec.num_heads * spec.head_dim
        kv_bytes += _seen(steps, window) * layout.layer_page_bytes // layout.page_size
    return Work(weight_bytes, kv_bytes, ops)
