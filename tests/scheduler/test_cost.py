"""The cost model learns what steps cost; the latency budget uses it to keep steps within a target."""

from __future__ import annotations

import random

import pytest
from quire.scheduler import LEAST_PREFILL, PREFILL_SHARE, Coefficients, CostModel, LatencyBudget, StepLoad
from quire.scheduler.budget import TokenBudget, WaitForecast
from quire.scheduler.cost import chunk_pairs

TRUE = Coefficients(18e-3, 2.4e-3, 1.4e-3, 1.2e-6, 2.5e-7)


def true_seconds(load: StepLoad) -> float:
    return CostModel(TRUE).predict(load)


def some_load(generator: random.Random) -> StepLoad:
    rows = generator.randrange(33)
    tokens = generator.choice([0, 0, 16, 64, 300])
    context = generator.randrange(4000)
    return StepLoad(rows, tokens, rows * generator.randrange(50, 3000), chunk_pairs(context, tokens))


@pytest.mark.parametrize("scale", [1e-2, 1.0, 30.0])
def test_the_model_learns_costs_far_from_its_prior(scale: float) -> None:
    generator = random.Random(1)
    model = CostModel()
    for _ in range(400):
        load = some_load(generator)
        noise = generator.lognormvariate(0, 0.05) * (2.5 if generator.random() < 0.03 else 1)
        model.observe(load, scale * true_seconds(load) * noise)
    for _ in range(100):
        load = some_load(generator)
        assert model.predict(load) == pytest.approx(scale * true_seconds(load), rel=0.25)


def test_coefficients_without_new_data_are_kept() -> None:
    generator = random.Random(1)
    model = CostModel()
    for _ in range(300):
        load = some_load(generator)
        model.observe(load, true_seconds(load))
    prefill = StepLoad(8, 256, 8000, chunk_pairs(500, 256))
    for _ in range(2000):
        load = StepLoad(8, 0, 8 * 1000)
        model.observe(load, true_seconds(load) * generator.lognormvariate(0, 0.1))
    assert model.predict(prefill) == pytest.approx(true_seconds(prefill), rel=0.3)


def test_no_coefficient_is_ever_negative() -> None:
    generator = random.Random(2)
    model = CostModel()
    for _ in range(2000):
        model.observe(some_load(generator), generator.choice([0.0, 1e-4, 1.0, 100.0]))
        assert min(model.coefficients) >= 0


def test_one_slow_step_changes_little() -> None:
    generator = random.Random(3)
    model = CostModel()
    for _ in range(200):
        load = some_load(generator)
        model.observe(load, true_seconds(load))
    model.observe(StepLoad(8, 0, 8000), 50.0)
    assert model.predict(StepLoad(8, 0, 8000)) < 2.5 * true_seconds(StepLoad(8, 0, 8000))


def test_query_key_pairs_of_a_chunk() -> None:
    assert chunk_pairs(0, 4) == 1 + 2 + 3 + 4
    assert chunk_pairs(10, 3) == 11 + 12 + 13


@pytest.mark.parametrize("context", [0, 100, 3000])
@pytest.mark.parametrize("target_s", [0.1, 0.2, 0.5])
def test_prefill_fills_a_step_up_to_the_target(context: int, target_s: float) -> None:
    budget = LatencyBudget(CostModel(TRUE), target_s, 512)
    step = budget.begin(8, 8 * 500)
    tokens = step.prefill_tokens(context)
    step.spend(tokens, context)
    assert true_seconds(step.load) <= 0.9 * target_s
    assert (
        LEAST_PREFILL <= tokens == 504
        or true_seconds(StepLoad(8, tokens + 1, 4000, chunk_pairs(context, tokens + 1))) > 0.9 * target_s
    )
    assert step.prefill_tokens(context) <= 1


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("step_s", [0.0005, 0.002, 0.05])
def test_steps_that_cost_the_same_with_any_context_are_predicted(rows: int, step_s: float) -> None:
    """The context grows at no cost: its former estimate must not remain in other coefficients."""
    cost = CostModel()
    for step in range(60):
        cost.observe(StepLoad(rows, 0, rows * (8 + 4 * step)), step_s)
    assert cost.predict(StepLoad(rows, 0, rows * 250)) == pytest.approx(step_s, rel=0.1)
    assert min(cost.coefficients) >= 0


def test_several_prefills_share_the_budget() -> None:
    step = LatencyBudget(CostModel(TRUE), 0.2, 512).begin(4, 400)
    first = step.prefill_tokens(0)
    step.spend(first // 2, 0)
    assert step.prefill_tokens(0) == pytest.approx(first // 2, abs=2)


def test_prefill_never_starves() -> None:
    """A step that decoding fills still gets the least prefill, but only once."""
    load = StepLoad(8, 0, 8 * 500)
    step = LatencyBudget(CostModel(TRUE), true_seconds(load) / 0.899, 512).begin(*load[::2])
    assert step.prefill_tokens(0) == LEAST_PREFILL
    step.spend(LEAST_PREFILL, 0)
    assert step.prefill_tokens(0) == 0
    assert step.limit == "latency"


@pytest.mark.parametrize("load", [StepLoad(64, 0, 32_000), StepLoad(64, 0, 256_000)])
def test_prefill_gets_its_share_where_decoding_alone_exceeds_the_target(load: StepLoad) -> None:
    step = LatencyBudget(CostModel(TRUE), 0.01, 2048).begin(*load[::2])
    decode_s = true_seconds(load)
    tokens = step.prefill_tokens(0)
    step.spend(tokens, 0)
    share = (true_seconds(step.load) - decode_s) / true_seconds(step.load)
    assert PREFILL_SHARE - 0.02 < share <= PREFILL_SHARE
    assert tokens > LEAST_PREFILL


def test_a_step_that_is_full_of_tokens_says_so() -> None:
    budget = LatencyBudget(CostModel(TRUE), 10.0, 10)
    assert budget.begin(10, 10).limit == "tokens"
    assert budget.begin(4, 10).limit == "latency"


def test_without_decoding_sequences_prefill_fills_the_step() -> None:
    assert LatencyBudget(CostModel(TRUE), 0.01, 512).begin(0, 0).prefill_tokens(0) == 512


def test_sequences_that_would_exceed_the_target_do_not_join() -> None:
    budget = LatencyBudget(CostModel(TRUE), 0.05, 512)
    assert budget.may_join(8, 8 * 500)
    assert not budget.may_join(16, 16 * 500)
    assert LatencyBudget(CostModel(TRUE), 1e-3, 512).may_join(1, 500)


def test_no_sequence_waits_for_a_target_that_one_sequence_alone_exceeds() -> None:
    alone_s = true_seconds(StepLoad(1, 0, 500))
    assert LatencyBudget(CostModel(TRUE), alone_s, 512).may_join(8, 8 * 500)
    assert not LatencyBudget(CostModel(TRUE), alone_s / 0.89, 512).may_join(8, 8 * 500)


def test_the_mean_output_length_follows_new_requests_slowly() -> None:
    """With one slot, the request behind one that runs waits for a whole output of it, one step of 10 ms per token."""
    cost = CostModel(Coefficients(0.01, 0.0, 0.0, 0.0, 0.0))
    for _ in range(8):
        cost.observe(StepLoad(1, 0, 0), 0.01)
    forecast = WaitForecast(cost, TokenBudget(512), max_num_seqs=1)

    def slot_s() -> float:
        with_slot, without = (forecast.wait_s(1, position, 1, 0) for position in (0, -1))
        assert with_slot is not None
        assert without is not None
        return with_slot - without

    forecast.note_output(100)
    assert slot_s() == pytest.approx(1.0, rel=0.01)
    forecast.note_output(0)
    assert slot_s() == pytest.approx(0.95, rel=0.01)
    for _ in range(100):
        forecast.note_output(40)
    assert slot_s() == pytest.approx(0.4, rel=0.02)


@pytest.mark.parametrize("target_s", [0.0, -1.0, float("nan")])
def test_impossible_targets_are_refused(target_s: float) -> None:
    with pytest.raises(ValueError, match="itl_target_s"):
        LatencyBudget(CostModel(), target_s, 512)
