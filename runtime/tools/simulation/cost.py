"""The duration of a step on a machine, computed from the model's shape and the machine's roofline.

A linear layer reads its weights while it computes, so a step takes the longer of the two; attention is added. The share
of the roofline that the kernels reach was measured (tests/bench/LOG.md: two vCPUs, avx512-vnni-bf16, the shape of
Qwen3-0.6B). `threads.py` has the losses of more threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from ....kernels.ops import (
    BLOCK,
    GATED,
    INPUT_DTYPES,
    QUERY_DTYPES,
    ROWS_IN_CACHE,
    DType,
    ExpertLinear,
    HeadLinear,
    Linear,
    WeightDtype,
    padded,
)
from ....kernels.pack import PackedMatrix, packed_nbytes
from ....scheduler import StepPlan
from ...model import DecoderSpec
from ...model.runner import Capacity
from ..bench import Roofline
from ..bench.work import chosen_experts, visible_pairs
from .threads import THREAD_READ, busy_share, finish_seconds, start_seconds

LinearLayer = Linear | ExpertLinear | HeadLinear
StepCost = Callable[[StepPlan], float]  # the seconds that executing a step takes

WEIGHTS_READ = 0.88  # share of the read bandwidth: one user decodes
KV_READ = 0.93  # eight users at 2,048 tokens: 34 of 36 GB/s, without HEAD_S
LINEAR_PEAK: dict[DType, float] = {"q8": 0.65, "bf16": 0.80, "f32": 0.83}  # share of the peak: prefill of 8 x 128
ARITHMETIC: dict[WeightDtype, float] = {  # arithmetic of a dtype, relative to q4 and q8
    "mxfp4": 1.09,
    "q4_z": 1.12,
    "q4_k": 1.16,
    "q5_k": 1.18,
    "q6_k": 1.5,
}
# Share of the peak: 512 rows after 3,584 tokens; f32: 1 x 1,024.
ATTENTION_PEAK: dict[DType, float] = {"q8": 0.40, "bf16": 0.74, "f32": 0.60}
SEQUENCE_S = 30e-6  # time per sequence between steps: schedule, commit, publish, arrays (measured by `quire bench`)
HEAD_S = 1.4e-6  # time of one thread in attention, per sequence, layer and KV head, whatever the context
SPLIT = 256  # tokens of a unit of decode attention, as in kernels/attention.pyx
TILE = 64  # rows, with all query heads of a KV head, of a unit of prefill attention
SHARED_HEADS = 3  # per thread: with more heads, a unit of decode attention is a whole head


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """The seconds of each part of a step on `threads` threads. A `StepCost`."""

    step_s: float  # waking the threads, and waiting for the end of each op
    weights_s: float  # reading all weights but the experts, once per step
    linears: tuple[LinearCost, ...]  # linear layers of all layers
    experts: tuple[ExpertsCost, ...]  # experts of all layers; empty unless the model is a mixture of experts
    head: LinearCost  # lm_head, of the rows that sample
    sequence_s: float  # attention, per sequence, if all threads work
    layers: tuple[LayerCost, ...]
    threads: int
    num_kv_heads: int
    query_tile: int  # tokens of a unit of prefill attention
    max_read_share: float  # bandwidth of all threads, each reading alone, over the machine's

    def __call__(self, plan: StepPlan) -> float:
        rows = samples = 0
        busy = busy_share(self._attention_units(plan), self.threads)
        read_share = min(1.0, busy * self.max_read_share)
        attention_s = len(plan.sequences) * self.sequence_s / busy
        for sequence in plan.sequences:
            count = len(sequence.token_ids)
            rows += count
            samples += sequence.num_samples
            for layer in self.layers:
                attention_s += layer.seconds(count, sequence.first_position, busy, read_share)
        weights_s = self.weights_s + sum(experts.read_seconds(rows) for experts in self.experts)
        return self.step_s + max(weights_s, self.linear_seconds(rows, samples)) + attention_s

    def linear_seconds(self, rows: int, samples: int) -> float:
        """Return the seconds of the linear layers' arithmetic for `rows` tokens of which `samples` sample."""
        layers_s = sum(linear.seconds(rows, self.threads) for linear in self.linears)
        experts_s = sum(experts.seconds(rows, self.threads) for experts in self.experts)
        return layers_s + experts_s + self.head.seconds(samples, self.threads)

    def _attention_units(self, plan: StepPlan) -> int:
        """Return the units of work into which an attention op of the step is partitioned."""
        heads = len(plan.sequences) * self.num_kv_heads
        by_split = heads <= SHARED_HEADS * self.threads
        units = 0
        for sequence in plan.sequences:
            if len(sequence.token_ids) > 1:
                units += -(-len(sequence.token_ids) // self.query_tile)
            else:
                units += sequence.first_position // SPLIT + 1 if by_split else 1
        return units * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Linear layers with the same number of blocks. A unit of work is a block for one group of rows."""

    num_blocks: int
    row_s: float  # per row, if all threads work

    def seconds(self, rows: int, threads: int) -> float:
        units = self.num_blocks * -(-rows // ROWS_IN_CACHE)
        return rows * self.row_s / busy_share(units, threads) if units else 0.0


@dataclass(frozen=True, slots=True)
class ExpertsCost:
    """Linear layers of experts with the same number of blocks, if all experts are chosen equally often."""

    num_experts: int
    top_k: int
    num_blocks: int
    read_s: float  # time for one expert's weights, in all of these layers
    row_s: float  # per row and expert, if all threads work

    def read_seconds(self, rows: int) -> float:
        return self.read_s * chosen_experts(self.num_experts, self.top_k, rows)

    def seconds(self, rows: int, threads: int) -> float:
        chosen = chosen_experts(self.num_experts, self.top_k, rows)
        units = self.num_blocks * max(1, round(max(chosen, rows * self.top_k / ROWS_IN_CACHE)))
        return rows * self.top_k * self.row_s / busy_share(units, threads)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Attention of all layers with the same KV heads and window (0: full attention)."""

    window: int
    read_s: float  # per visible token in the KV cache
    pair_s: float  # per query and key

    def seconds(self, rows: int, first: int, busy: float = 1.0, read_share: float = 1.0) -> float:
        """Return the seconds of attention for `rows` tokens after `first` others: reading or computing, the longer.

        `busy` is the share of the threads that work, `read_share` the share of the bandwidth that they can use.
        """
        window = self.window
        end = first + rows
        seen = min(end, rows + window - 1) if window else end
        return max(seen * self.read_s / read_share, visible_pairs(first, rows, window) * self.pair_s / busy)


def roofline_cost(spec: DecoderSpec, capacity: Capacity, roofline: Roofline) -> RooflineCost:
    """Return the cost of steps on a machine with this roofline, from the program that would run there."""
    lm_heads = [op for op in capacity.memory.program.ops if isinstance(op, Linear) and op.maxima is not None]
    experts = [op for op in capacity.memory.program.ops if isinstance(op, ExpertLinear)]
    dense = [op for op in capacity.memory.program.ops if isinstance(op, (Linear, HeadLinear))]
    layout = capacity.layout
    read_s = 1 / layout.page_size / (KV_READ * roofline.read_bytes_per_s)  # per byte of a slot
    dtype = QUERY_DTYPES[layout.dtype]
    pair_s = 1 / (ATTENTION_PEAK[dtype] * roofline.peak_ops_per_s[dtype])  # per operation
    threads = capacity.cpus.threads
    ops = len(capacity.memory.program.ops)
    max_read_share = max(1.0, threads * THREAD_READ / roofline.read_bytes_per_s)
    return RooflineCost(
        step_s=start_seconds(threads) + ops * finish_seconds(threads),
        weights_s=sum(_read_seconds(op, roofline, threads, max_read_share) for op in dense),
        linears=_linear_costs((op for op in dense if isinstance(op, HeadLinear) or op.maxima is None), roofline),
        experts=_experts_costs(experts, roofline, threads, max_read_share),
        head=_linear_costs(lm_heads, roofline)[0],
        sequence_s=HEAD_S * spec.num_layers * spec.num_kv_heads / threads,
        layers=tuple(
            LayerCost(window, count * layout.slot_bytes(heads) * read_s, count * spec.pair_ops(heads[1]) * pair_s)
            for (window, heads), count in sorted(Counter(spec.attention_kinds).items())
        ),
        threads=threads,
        num_kv_heads=spec.num_kv_heads,
        query_tile=max(1, TILE * spec.num_kv_heads // spec.num_heads),
        max_read_share=max_read_share,
    )


def num_blocks(op: LinearLayer) -> int:
    """Return the blocks of 32 output columns that the threads share; a block of SwiGLU has 32 of gate and 32 of up."""
    blocks = padded(_weight(op).out_features) // BLOCK
    if isinstance(op, HeadLinear):
        return blocks * len(op.weights)
    return blocks // (2 if op.epilogue in GATED else 1)


def _weight(op: LinearLayer) -> PackedMatrix:
    """Return the weight of a linear layer, or of one of its experts or heads."""
    return op.weight if isinstance(op, Linear) else op.weights[0]


def _matrices_per_row(op: LinearLayer) -> int:
    """Return the matrices that a row is multiplied by: those of all heads, or one, also of each expert."""
    return len(op.weights) if isinstance(op, HeadLinear) else 1


def _read_seconds(op: LinearLayer, roofline: Roofline, threads: int, max_read_share: float) -> float:
    weight = _weight(op)
    nbytes = packed_nbytes(weight.out_features, weight.in_features, weight.ranges, weight.group) * _matrices_per_row(op)
    read_share = min(1.0, busy_share(num_blocks(op), threads) * max_read_share)
    return nbytes / (WEIGHTS_READ * read_share * roofline.read_bytes_per_s)


def _linear_costs(linears: Iterable[Linear | HeadLinear], roofline: Roofline) -> tuple[LinearCost, ...]:
    row_s: dict[int, float] = {}  # number of blocks -> seconds
    for op in linears:
        row_s[num_blocks(op)] = row_s.get(num_blocks(op), 0.0) + _row_seconds(op, roofline)
    return tuple(LinearCost(blocks, seconds) for blocks, seconds in sorted(row_s.items()))


def _experts_costs(
    linears: Iterable[ExpertLinear], roofline: Roofline, threads: int, max_read_share: float
) -> tuple[ExpertsCost, ...]:
    seconds: dict[tuple[int, int, int], tuple[float, float]] = {}  # seconds of reading, and seconds per row
    for op in linears:
        shape = op.routing.num_experts, op.routing.top_k, num_blocks(op)
        read_s, row_s = seconds.get(shape, (0.0, 0.0))
        read_s += _read_seconds(op, roofline, threads, max_read_share)
        seconds[shape] = read_s, row_s + _row_seconds(op, roofline)
    return tuple(ExpertsCost(*shape, *both) for shape, both in sorted(seconds.items()))


def _row_seconds(op: LinearLayer, roofline: Roofline) -> float:
    """Return the seconds of the arithmetic of one row, if all threads work."""
    weight = _weight(op)
    peaks = {dtype: LINEAR_PEAK[dtype] * peak for dtype, peak in roofline.peak_ops_per_s.items()}
    return _matrices_per_row(op) * sum(
        2 * columns * weight.in_features * ARITHMETIC.get(dtype, 1.0) / peaks[INPUT_DTYPES[dtype]]
        for columns, dtype in weight.ranges
    )


class NoisyCost:
    """A `StepCost` that multiplies another one by lognormal factors of mean 1 and the given sigma."""

    def __init__(self, cost: StepCost, sigma: float, seed: int) -> None:
        self._cost = cost
        self._sigma = sigma
        self._random = Random(seed)

    def __call__(self, plan: StepPlan) -> float:
        return self._cost(plan) * self._random.lognormvariate(-self._sigma * self._sigma / 2, self._sigma)
