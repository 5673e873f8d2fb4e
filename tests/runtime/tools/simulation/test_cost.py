"""The cost of a step: the speeds measured on the machine of tests/bench/LOG.md, and how the cost grows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, pstdev

import pytest
from quire.kernels.ops import RoutingRule
from quire.runtime.common.config import EngineConfig, WeightDtype
from quire.runtime.model import DecoderSpec, read_spec
from quire.runtime.model.runner import decide_capacity
from quire.runtime.model.spec import Experts
from quire.runtime.model.weights.tensors import expected_tensors
from quire.runtime.tools.simulation import NoisyCost, RooflineCost, given_roofline, roofline_cost
from quire.runtime.tools.simulation.cost import WEIGHTS_READ, ExpertsCost, LayerCost
from quire.scheduler import ScheduledSequence, StepPlan

SHAPE = Path(__file__).parents[3] / "data" / "qwen3-0.6b"
MACHINE = given_roofline(34.5e9, 920e9)  # machine of tests/bench/LOG.md: 32-37 GB/s, 926-939 GOP/s

Chunk = tuple[int, int, int]  # rows of one sequence: first position, rows, samples


def plan(*chunks: Chunk) -> StepPlan:
    sequences = (
        ScheduledSequence(index, ((),), first, [0] * rows, samples, None, (), 0)
        for index, (first, rows, samples) in enumerate(chunks)
    )
    return StepPlan(1, tuple(sequences), 0, 0)


def cost_of(spec: DecoderSpec, weights: WeightDtype = "q8") -> RooflineCost:
    config = EngineConfig(weights=weights, kv_cache_dtype="int8", kv_cache_memory=1 << 30, threads=2)
    return roofline_cost(spec, decide_capacity(config, spec), MACHINE)


@pytest.fixture(scope="module")
def cost() -> RooflineCost:
    return cost_of(read_spec(SHAPE))


@pytest.mark.parametrize(
    ("users", "context", "tokens_per_s"),
    [(1, 128, 47.1), (8, 128, 325), (32, 128, 398), (1, 4096, 35.8), (8, 2048, 152)],
)
def test_decode_is_as_fast_as_measured(users: int, context: int, tokens_per_s: float, cost: RooflineCost) -> None:
    """Compare with the machine of tests/bench/LOG.md: shape of Qwen3-0.6B, q8 weights, int8 KV cache.

    47.1 is `quire bench` with one user.
    """
    assert users / cost(plan(*[(context + 16, 1, 1)] * users)) == pytest.approx(tokens_per_s, rel=0.1)


@pytest.mark.parametrize(("prompt", "tokens_per_s"), [(512, 640), (4096, 364), (2048, 470)])
def test_prefill_is_as_fast_as_measured(prompt: int, tokens_per_s: float, cost: RooflineCost) -> None:
    seconds = sum(cost(plan((first, 512, int(first + 512 == prompt)))) for first in range(0, prompt, 512))
    assert prompt / seconds == pytest.approx(tokens_per_s, rel=0.1)


@pytest.mark.parametrize(("kind", "decode", "prefill"), [("Q4_0", (73, 334, 359), 670), ("Q4_K", (82, 331, 326), 567)])
def test_ggufs_types_are_as_fast_as_measured(kind: str, decode: tuple[float, ...], prefill: float) -> None:
    """Compare with Q4_0 and Q4_K_M files of Qwen3-0.6B in tests/bench/LOG.md; in both the embedding is Q6_K."""
    spec = read_spec(SHAPE)
    kinds = {name: "Q6_K" if "embed" in name else kind for name, shape in expected_tensors(spec) if len(shape) > 1}
    cost = cost_of(replace(spec, quantized=kinds), "auto")
    for users, tokens_per_s in zip((1, 8, 32), decode, strict=True):
        assert users / cost(plan(*[(144, 1, 1)] * users)) == pytest.approx(tokens_per_s, rel=0.15)
    assert 512 / cost(plan(*[(0, 128, 1)] * 4)) == pytest.approx(prefill, rel=0.1)


def test_the_absorbed_matrices_of_latent_attention_are_read(tmp_path: Path) -> None:
    """They are the tensors of three axes here. All matrices are read but the embedding."""
    config = {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "hidden_size": 2048}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 16, "first_k_dense_replace": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    spec = read_spec(tmp_path)
    shapes = [shape for name, shape in expected_tensors(spec) if len(shape) > 1 and "embed" not in name]
    assert [shape for shape in shapes if len(shape) == 3] == [(16, 512, 128), (16, 128, 512)] * 2
    read_s = 4 * sum(math.prod(shape) for shape in shapes) / (WEIGHTS_READ * 34.5e9)
    assert cost_of(spec, "f32").weights_s == pytest.approx(read_s, rel=0.01)


def test_reading_the_weights_hides_the_arithmetic_of_few_rows(cost: RooflineCost) -> None:
    one = cost(plan((0, 1, 1)))
    four = cost(plan(*[(0, 1, 1)] * 4))
    assert four < 1.1 * one


def test_more_work_takes_longer(cost: RooflineCost) -> None:
    least = cost(plan((64, 100, 1)))
    for more in (plan((65, 100, 1)), plan((64, 101, 1)), plan((64, 100, 2)), plan((64, 100, 1), (0, 1, 0))):
        assert cost(more) > least


def test_attention_of_a_prompt_costs_the_same_in_any_chunks() -> None:
    layer = LayerCost(window=0, read_s=0.0, pair_s=1.0)
    assert layer.seconds(100, 0) == 100 * 101 / 2
    assert sum(layer.seconds(rows, first) for first, rows in ((0, 30), (30, 60), (90, 10))) == layer.seconds(100, 0)


@pytest.mark.parametrize(
    ("rows", "first"), [(1, 0), (1, 9), (1, 10), (1, 500), (7, 0), (7, 5), (30, 0), (30, 8), (5, 80)]
)
def test_a_window_limits_reads_and_pairs(rows: int, first: int) -> None:
    window = 10
    visible = [range(max(0, position - window + 1), position + 1) for position in range(first, first + rows)]
    seen = len(set().union(*visible))
    assert LayerCost(window, read_s=1.0, pair_s=0.0).seconds(rows, first) == seen
    assert LayerCost(window, read_s=0.0, pair_s=1.0).seconds(rows, first) == sum(map(len, visible))


def test_layers_with_a_window_cost_less(cost: RooflineCost) -> None:
    spec = read_spec(SHAPE)
    hybrid = cost_of(replace(spec, windows=(0, 512) * (spec.num_layers // 2)))
    assert hybrid(plan((200, 1, 1))) == pytest.approx(cost(plan((200, 1, 1))))
    assert hybrid(plan((4096, 1, 1))) < cost(plan((4096, 1, 1)))


def test_a_step_reads_only_the_experts_that_its_rows_choose() -> None:
    spec = read_spec(SHAPE)
    layers = (True,) * spec.num_layers
    experts = Experts(num_experts=64, top_k=4, intermediate_size=768, rule=RoutingRule(normalized=True), layers=layers)
    cost = cost_of(replace(spec, experts=experts))
    one, all_experts = (sum(layer.read_seconds(rows) for layer in cost.experts) for rows in (1, 10_000))
    assert one == pytest.approx(all_experts / 16)
    assert sum(layer.read_seconds(8) for layer in cost.experts) == pytest.approx(all_experts * (1 - (15 / 16) ** 8))
    assert cost(plan((0, 1, 1))) < cost(plan(*[(0, 1, 1)] * 8)) < cost(plan((0, 512, 1)))


def test_a_mixture_whose_experts_are_all_chosen_costs_what_the_dense_layers_cost() -> None:
    spec = read_spec(SHAPE)
    one_expert = Experts(
        num_experts=1,
        top_k=1,
        intermediate_size=spec.intermediate_size,
        rule=RoutingRule(normalized=True),
        layers=(True,) * spec.num_layers,
    )
    dense = cost_of(spec)
    mixture = cost_of(replace(spec, experts=one_expert))
    for step in (plan((64, 1, 1)), plan((0, 512, 1))):
        assert mixture(step) == pytest.approx(dense(step), rel=0.05)


def test_noise_has_mean_1_and_depends_on_the_seed() -> None:
    def draw(seed: int) -> list[float]:
        noisy: Callable[[StepPlan], float] = NoisyCost(lambda plan: 2.0, 0.1, seed)
        return [noisy(plan((0, 1, 1))) for _ in range(5_000)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert mean(draw(1)) == pytest.approx(2.0, rel=0.01)
    assert pstdev(draw(1)) == pytest.approx(0.2, rel=0.05)


def test_each_row_passes_all_experts_that_it_chooses() -> None:
    cost = ExpertsCost(num_experts=8, top_k=3, num_blocks=4, read_s=0.0, row_s=0.5)
    assert cost.seconds(rows=10, threads=1) == pytest.approx(10 * 3 * 0.5)
