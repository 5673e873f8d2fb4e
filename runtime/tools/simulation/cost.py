"""How long a step takes on a machine, computed from the model's shape and the machine's roofline.

A linear layer reads its weights while it computes, so a step takes the longer of the two; attention is added. The share
of the roofline that the kernels reach was measured (tests/bench/LOG.md: two vCPUs, avx512-vnni-bf16, the shape of
Qwen3-0.6B).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ....kernels.ops import QUERY_DTYPES, DType, Linear
from ....kernels.pack import packed_nbytes
from ....scheduler import StepPlan
from ...model import DecoderSpec
from ...model.runner import Capacity
from ..bench import Roofline
from ..bench.work import visible_pairs

StepCost = Callable[[StepPlan], float]  # the seconds that executing a step takes

WEIGHTS_READ = 0.88  # share of the read bandwidth: one user decodes
KV_READ = 0.73  # eight users at 2,048 tokens: 25 of 34 GB/s
LINEAR_PEAK: dict[DType, float] = {"q8": 0.65, "bf16": 0.80, "f32": 0.83}  # of the dtype's peak: prefill of 8 x 128
ATTENTION_PEAK: dict[DType, float] = {
    "q8": 0.40,
    "bf16": 0.74,
    "f32": 0.60,
}  # 512 rows after 3,584 tokens; f32: 1 x 1,024
SEQUENCE_S = 30e-6  # between steps, per sequence: schedule, commit, publish, arrays (measured by `quire bench`)
HEAD_S = 1.3e-6  # of attention, per sequence, layer and KV head, whatever the context


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """The seconds of each part of a step, all threads together. A `StepCost`."""

    weights_s: float  # read once per step
    row_s: float  # linear layers, per token
    sample_s: float  # lm_head, per row that samples
    sequence_s: float  # attention, per sequence
    layers: tuple[LayerCost, ...]

    def __call__(self, plan: StepPlan) -> float:
        rows = samples = 0
        attention_s = len(plan.sequences) * self.sequence_s
        for sequence in plan.sequences:
            count = len(sequence.token_ids)
            rows += count
            samples += sequence.num_samples
            for layer in self.layers:
                attention_s += layer.seconds(count, sequence.first_position)
        return max(self.weights_s, rows * self.row_s + samples * self.sample_s) + attention_s


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Attention of all layers with the same window (0: full attention)."""

    window: int
    read_s: float  # per visible token in the KV cache
    pair_s: float  # per query and key

    def seconds(self, rows: int, first: int) -> float:
        """Return the seconds of attention for `rows` tokens after `first` others: reading or computing, the longer."""
        window, end = self.window, first + rows
        seen = min(end, rows + window - 1) if window else end
        return max(seen * self.read_s, visible_pairs(first, rows, window) * self.pair_s)


def roofline_cost(spec: DecoderSpec, capacity: Capacity, roofline: Roofline) -> RooflineCost:
    """Return the cost of steps on a machine with this roofline, from the program that would run there."""
    linears = [op for op in capacity.memory.program.ops if isinstance(op, Linear)]
    layout = capacity.layout
    read_s = layout.layer_page_bytes / layout.page_size / (KV_READ * roofline.read_bytes_per_s)
    dtype = QUERY_DTYPES[layout.dtype]
    pair_s = 4 * spec.num_heads * spec.head_dim / (ATTENTION_PEAK[dtype] * roofline.peak_ops_per_s[dtype])
    return RooflineCost(
        weights_s=sum(_weight_bytes(op) for op in linears) / (WEIGHTS_READ * roofline.read_bytes_per_s),
        row_s=sum(_row_seconds(op, roofline) for op in linears if op.maxima is None),
        sample_s=sum(_row_seconds(op, roofline) for op in linears if op.maxima is not None),
        sequence_s=HEAD_S * spec.num_layers * spec.num_kv_heads,
        layers=tuple(
            LayerCost(window, count * read_s, count * pair_s) for window, count in sorted(Counter(spec.windows).items())
        ),
    )


def _weight_bytes(op: Linear) -> int:
    return packed_nbytes(op.weight.out_features, op.weight.in_features, op.weight.dtype)


def _row_seconds(op: Linear, roofline: Roofline) -> float:
    weight = op.weight
    ops = 2 * weight.out_features * weight.in_features
    return ops / (LINEAR_PEAK[weight.dtype] * roofline.peak_ops_per_s[weight.dtype])


class NoisyCost:
    """A `StepCost` that multiplies another one by lognormal factors of mean 1 and the given sigma."""

    def __init__(self, cost: StepCost, sigma: float, seed: int) -> None:
        self._cost = cost
        self._sigma = sigma
        self._random = Random(seed)

    def __call__(self, plan: StepPlan) -> float:
        return self._cost(plan) * self._random.lognormvariate(-self._sigma * self._sigma / 2, self._sigma)
