"""The least work of a phase, counted by hand for a small model."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from quire.kernels.ops import LinearRecurrence, MatrixState, Region, Ring, RoutingRule, StateDtype
from quire.pager import KVLayout
from quire.runtime.model.program import F32, ProgramBuilder
from quire.runtime.tools.bench.roofline import Roofline
from quire.runtime.tools.bench.speed import Phase
from quire.runtime.tools.bench.work import chosen_experts, decode_work, prefill_work


@dataclass
class FakeWeight:
    """The part of a packed matrix that is counted."""

    out_features: int
    in_features: int
    dtype: str
    nbytes: int
    input_order: None = None


@dataclass
class FakeSpec:
    windows: tuple[int, ...]
    num_heads: int = 4
    vocab_size: int = 500

    @property
    def attention_kinds(self) -> list[tuple[int, tuple[int, int]]]:
        return [(window, (2, 32)) for window in self.windows]

    def pair_ops(self, head_dim: int) -> int:
        return 2 * self.num_heads * 2 * head_dim


@dataclass
class FakeCapacity:
    layout: KVLayout


@dataclass
class FakeModelRunner:
    """Two layers with one linear each, and a head."""

    kv: str
    spec: FakeSpec = field(default_factory=lambda: FakeSpec((0, 3)))

    def __post_init__(self) -> None:
        self.capacity = FakeCapacity(KVLayout(2, 2, 32, self.kv))
        builder = ProgramBuilder(16, 4)
        x = builder.embed(FakeWeight(500, 64, "q8", 34000))
        for _ in range(2):
            builder.linear_add(x, FakeWeight(64, 64, "q8", 4352), None, x)
        logits = builder.logits(builder.gather(x), FakeWeight(500, 64, "q8", 34000))
        self.ops = builder.build(logits).ops


class FakeMixture(FakeModelRunner):
    """Layers of 8 experts, two per token, and a head."""

    def __post_init__(self) -> None:
        self.capacity = FakeCapacity(KVLayout(2, 2, 32, self.kv))
        builder = ProgramBuilder(16, 4)
        experts = (FakeWeight(64, 64, "q8", 4352),) * 8
        x = builder.embed(FakeWeight(500, 64, "q8", 34000))
        for _ in range(2):
            logits = builder.linear(x, FakeWeight(8, 64, "f32", 8192), None, "router")
            routing = builder.route(logits, logits.columns, 2, RoutingRule(normalized=True), None)
            builder.combine_add(builder.expert_linear(x, experts, None, routing), routing, x, None, logits)
        self.ops = builder.build(builder.logits(builder.gather(x), FakeWeight(500, 64, "q8", 34000))).ops


def test_only_the_chosen_experts_are_read_and_computed():
    fixed = 2 * 8192 + 34000
    kv = FakeSpec((0, 3))
    one, four = (decode_work(FakeMixture("f32", kv), [(5,) * users]) for users in (1, 4))
    assert one.weight_bytes == fixed + 2 * 2 * 4352
    assert four.weight_bytes == fixed + round(2 * 8 * (1 - 0.75**4) * 4352)
    assert one.ops["q8"] == 2 * (2 * 2 * 64 * 64 + 500 * 64)
    assert four.ops["q8"] == 4 * one.ops["q8"]


def test_the_expected_number_of_chosen_experts():
    assert [chosen_experts(8, 2, rows) for rows in (1, 2)] == [2, 3.5]
    assert chosen_experts(8, 8, 1) == 8
    assert chosen_experts(128, 8, 1000) == pytest.approx(128)


def test_decode_reads_the_weights_once_per_step_and_all_visible_keys_and_values():
    work = decode_work(FakeModelRunner("bf16"), [(5, 2), (6, 3)])
    assert work.weight_bytes == 2 * (2 * 4352 + 34000)
    token_bytes = 2 * 2 * 32 * 2  # K and V, KV heads, head_dim, bf16
    assert work.kv_bytes == (5 + 2 + 6 + 3) * token_bytes + (3 + 2 + 3 + 3) * token_bytes
    assert work.ops == {
        "q8": 4 * 2 * (2 * 64 * 64 + 500 * 64),
        "bf16": 2 * 2 * (16 + 11) * 4 * 32,
    }


def test_prefill_computes_the_causal_half_and_the_head_once_per_user():
    work = prefill_work(FakeModelRunner("f32"), 3, 5, [(5, 5), (5,)])
    pairs = 3 * (1 + 2 + 3 + 4 + 5) + 3 * (1 + 2 + 3 + 3 + 3)
    assert work.ops == {"q8": 2 * 15 * 2 * 64 * 64 + 2 * 3 * 500 * 64, "f32": 2 * 2 * pairs * 4 * 32}
    assert work.weight_bytes == 2 * (2 * 4352 + 34000)


def test_int8_keys_and_values_are_multiplied_as_int8():
    work = decode_work(FakeModelRunner("int8"), [(4,)])
    assert work.ops == {"q8": 2 * (2 * 64 * 64 + 500 * 64) + 2 * 2 * (4 + 3) * 4 * 32}
    assert work.kv_bytes == (4 + 3) * KVLayout(1, 2, 32, "int8").token_bytes


def test_the_least_time_uses_the_peak_of_each_dtype():
    work = decode_work(FakeModelRunner("bf16"), [(4,)])
    roofline = Roofline(1000, {"q8": 100, "bf16": 50, "f32": 25})
    assert work.compute_seconds(roofline) == pytest.approx(work.ops["q8"] / 100 + work.ops["bf16"] / 50)
    assert work.memory_seconds(roofline) == pytest.approx((work.weight_bytes + work.kv_bytes) / 1000)


def test_a_ring_is_read_once_per_sequence_and_written_once_per_token() -> None:
    runner = FakeModelRunner("bf16")
    builder = ProgramBuilder(16, 4)
    gates = builder.linear(
        builder.embed(FakeWeight(500, 64, "q8", 34000)), FakeWeight(192, 64, "f32", 49152), None, "gates"
    )
    runner.ops = builder.build(builder.short_conv(gates, np.zeros((3, 64), np.float32), None, Ring(0, 5), F32)).ops
    assert decode_work(runner, [(4, 9), (5,)]).state_bytes == (3 * 2 + 3) * 64 * 4
    assert prefill_work(runner, 2, 12, [(6, 6), (12, 12)]).state_bytes == (4 * 2 + 4 * 3) * 64 * 4


@pytest.mark.parametrize(("dtype", "itemsize"), [("f32", 4), ("bf16", 2)])
@pytest.mark.parametrize(("rate", "per_element"), [(3, 7), (None, 5)])
def test_matrices_are_read_and_written_once_per_sequence(
    dtype: StateDtype, itemsize: int, rate: int | None, per_element: int
) -> None:
    runner = FakeModelRunner("bf16")
    x, vector = Region(0, 4, 64, "f32"), np.zeros(3, np.float32)
    state = MatrixState(0, 3, 8, 5, 2, dtype)
    op = LinearRecurrence(x, 0, 8, 16, 1, x, 50, rate, a=vector, bias=vector, state=state, out=x)
    without = decode_work(runner, [(4, 9), (5,)])
    runner.ops = [*runner.ops, op]
    work = decode_work(runner, [(4, 9), (5,)])
    assert work.state_bytes == 2 * 3 * (3 * 8 * 5) * itemsize
    assert work.ops == without.ops | {"f32": per_element * 3 * (3 * 8 * 5)}
    assert Phase(3, 2.0, 2, {"linear": 0.5, "linearrecurrence": 0.25}, work).state_bytes_per_s == 4 * work.state_bytes
    assert Phase(3, 2.0, 2, {"linear": 0.5}, without).state_bytes_per_s == 0
