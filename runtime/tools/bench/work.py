"""Compute the least work of a phase from the model's program: bytes read from memory, and useful operations.

Only work that the model's definition requires is counted: no padded rows, no masked half of a tile, no byte read twice
in a step. So the share of the roofline is never too high. In a mixture of experts only the chosen experts are read;
their number is the expected one if all experts are chosen equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....kernels.ops import (
    INPUT_DTYPES,
    QUERY_DTYPES,
    RECURRENT,
    DType,
    ExpertLinear,
    HeadLinear,
    Linear,
    LinearRecurrence,
    MatrixState,
)
from ....scheduler import chunk_pairs
from ...model.runner import ModelRunner
from .roofline import Roofline

Contexts = tuple[int, ...]  # [sequences]: tokens in the KV cache after one step


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and operations of a phase."""

    weight_bytes: int  # packed weights, once per step, without the embedding: steps read only a few of its columns
    kv_bytes: int  # stored bytes, with the scales of int8, once per step and sequence
    ops: dict[DType, int]  # multiplications and additions, by operand dtype
    state_bytes: int = 0  # parts of states that steps read and write

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.state_bytes

    @property
    def num_ops(self) -> int:
        return sum(self.ops.values())

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.num_ops / self.num_bytes

    def compute_seconds(self, roofline: Roofline) -> float:
        """Return the least seconds with infinitely fast memory: the operations of each dtype at its peak."""
        return sum(count / roofline.peak_ops_per_s[dtype] for dtype, count in self.ops.items())

    def memory_seconds(self, roofline: Roofline) -> float:
        """Return the least seconds with infinitely fast arithmetic."""
        return self.num_bytes / roofline.read_bytes_per_s


def prefill_work(runner: ModelRunner, users: int, prompt_tokens: int, steps: Sequence[Contexts]) -> Work:
    """Return the work of prefilling the prompts of `users` in `steps`; each user samples one token."""

    def pairs(window: int) -> int:
        return users * visible_pairs(0, prompt_tokens, window)

    return _work(runner, users * prompt_tokens, users, steps, pairs)


def decode_work(runner: ModelRunner, steps: Sequence[Contexts]) -> Work:
    """Return the work of decoding one token for each sequence of each step."""
    rows = sum(len(contexts) for contexts in steps)
    return _work(runner, rows, rows, steps, lambda window: _seen(steps, window))


def visible_pairs(first: int, rows: int, window: int) -> int:
    """Count the pairs of query and visible key of `rows` tokens after `first` others (window 0: full attention)."""
    growing = min(rows, max(0, window - first)) if window else rows  # rows whose window is not full yet
    return chunk_pairs(first, growing) + (rows - growing) * window


def chosen_experts(num_experts: int, top_k: int, rows: float) -> float:
    """Return the expected number of experts that `rows` rows choose, if all experts are chosen equally often."""
    missed: float = (1 - top_k / num_experts) ** rows
    return num_experts * (1 - missed)


def _seen(steps: Sequence[Contexts], window: int) -> int:
    """Count the tokens whose keys and values a layer reads, once per step and sequence."""
    return sum(min(context, window or context) for contexts in steps for context in contexts)


def _work(runner: ModelRunner, rows: int, samples: int, steps: Sequence[Contexts], pairs: Callable[[int], int]) -> Work:
    """Add up the work of all ops. `pairs(window)` counts the (query, visible key) pairs of a layer with that window."""
    ops: dict[DType, int] = {}
    weight_bytes = 0.0
    for op in runner.ops:
        if isinstance(op, LinearRecurrence):
            each = 5 if op.rate is None else 7  # the decay, the token's product, the query, and with a rate the key
            ops["f32"] = ops.get("f32", 0) + each * rows * _elements(op.state)
            continue
        if isinstance(op, Linear):
            weight = op.weight
            read = 1.0
            of = samples if op.maxima is not None else rows  # only the lm_head computes maxima
        elif isinstance(op, ExpertLinear):
            weight = op.weights[0]
            of = rows * op.routing.top_k
            read = chosen_experts(op.routing.num_experts, op.routing.top_k, rows / len(steps))
        elif isinstance(op, HeadLinear):
            weight = op.weights[0]
            of = rows * len(op.weights)
            read = float(len(op.weights))
        else:
            continue
        dtype = INPUT_DTYPES[weight.dtype]
        ops[dtype] = ops.get(dtype, 0) + 2 * of * weight.out_features * weight.in_features
        weight_bytes += read * weight.nbytes * len(steps)
    spec = runner.spec
    layout = runner.capacity.layout
    dtype = QUERY_DTYPES[layout.dtype]  # dtype of keys and values when they are multiplied
    kv_bytes = 0
    for window, heads in spec.attention_kinds:
        ops[dtype] = ops.get(dtype, 0) + pairs(window) * spec.pair_ops(heads[1])
        kv_bytes += _seen(steps, window) * layout.slot_bytes(heads) // layout.page_size
    return Work(round(weight_bytes), kv_bytes, ops, _state_bytes(runner, rows, steps))


def _state_bytes(runner: ModelRunner, rows: int, steps: Sequence[Contexts]) -> int:
    """Return the bytes of states that steps read and write: earlier inputs once per sequence, and its new inputs.

    A ring keeps at most the last `taps` inputs of a step. Matrices are read and written once per sequence.
    """
    sequences = sum(len(contexts) for contexts in steps)
    total = 0
    for op in runner.ops:
        if isinstance(op, LinearRecurrence):
            total += 2 * sequences * _elements(op.state) * (2 if op.state.dtype == "bf16" else 4)
        elif isinstance(op, RECURRENT):
            taps, columns = op.weight.shape
            total += ((taps - 1) * sequences + min(rows, taps * sequences)) * columns * 4
    return total


def _elements(state: MatrixState) -> int:
    """Return the numbers in the matrices of a sequence."""
    return state.num_heads * state.key_dim * state.value_dim
