"""The content of a step: the order of admission and prefill, the counts of the budget, and texts to encode."""

from __future__ import annotations

from quire.scheduler import BeamSpec, Coefficients, CostModel, Fair, LatencyBudget, Priority, State, StepLoad

from tests.scheduler.conftest import Expected, MakeHarness


def test_a_newcomer_of_higher_priority_goes_before_the_rest_of_a_prompt(make_harness: MakeHarness) -> None:
    harness = make_harness(policy=Priority(), max_num_batched_tokens=8, num_pages=32)
    harness.add(1, [1] * 30, priority=1)
    harness.step()
    harness.add(2, [2] * 6, priority=0)
    harness.add(3, [3] * 6, priority=2)
    plan = harness.step()
    assert {row.request_id: len(row.token_ids) for row in plan.sequences} == {2: 6, 1: 2}


def test_the_context_of_decoding_requests_leaves_less_time_for_prompts(make_harness: MakeHarness) -> None:
    cost = CostModel(Coefficients(0.001, 0.0, 0.001, 0.0001, 0.0))
    chunks = []
    for context in (10, 200):
        harness = make_harness(cost=cost, budget=LatencyBudget(cost, 0.05, 256), num_pages=256)
        harness.add(1, [1] * context, max_tokens=9)
        harness.step()
        harness.add(2, [2] * 100, max_tokens=2)
        plan = harness.step()
        chunks.append({row.request_id: len(row.token_ids) for row in plan.sequences}[2])
    assert chunks == [43, 24]


def test_a_prompt_that_is_displaced_is_not_in_the_step(make_harness: MakeHarness, expected: Expected) -> None:
    harness = make_harness(num_pages=64, max_num_seqs=2, max_num_batched_tokens=8, policy=Fair(credit_tokens=0))
    for request_id, length in ((1, 4), (2, 30)):
        harness.add(request_id, [request_id] * length, max_tokens=20, tenant="flood")
    harness.step()
    harness.step()
    assert harness.requests[2].state is State.PREFILL
    harness.add(3, [3] * 5, max_tokens=2, tenant="other")
    plan = harness.step()
    assert [row.request_id for row in plan.sequences] == [1, 3]
    harness.run()
    assert harness.outputs == {1: expected([1] * 4, 20), 2: expected([2] * 30, 20), 3: expected([3] * 5, 2)}


def test_a_newcomer_waits_if_its_own_context_would_exceed_the_latency_target(make_harness: MakeHarness) -> None:
    cost = CostModel(Coefficients(0.001, 0.0, 0.0, 0.0001, 0.0))
    harness = make_harness(cost=cost, budget=LatencyBudget(cost, 0.02, 256), num_pages=256)
    harness.add(1, [1] * 20, max_tokens=4)
    harness.step()
    harness.add(2, [2] * 160, max_tokens=4)  # 0.0181 s for both; a step is planned for 0.018 s
    harness.step()
    assert harness.scheduler.stats().waiting_by_reason == {"latency": 1}
    harness.add(3, [3] * 10, max_tokens=4)
    harness.cancel(2)
    harness.step()
    assert harness.requests[3].state is State.DECODE


def test_a_search_whose_beams_exceed_the_target_together_runs_alone(make_harness: MakeHarness) -> None:
    cost = CostModel(Coefficients(0.01, 0.01, 0.0, 0.0, 0.0))
    harness = make_harness(cost=cost, budget=LatencyBudget(cost, 0.03, 32))
    harness.add(1, [1, 2, 3], max_tokens=4, beam=BeamSpec(3))
    harness.add(2, [4], max_tokens=4)
    harness.step()
    assert [harness.requests[each].state for each in (1, 2)] == [State.DECODE, State.WAITING]
    harness.run()
    assert harness.ended == {1: "length", 2: "length"}


def test_the_cost_of_a_chunk_is_learned_with_the_context_that_it_reads(make_harness: MakeHarness) -> None:
    loads = []

    class Noting(CostModel):
        def observe(self, load: StepLoad, seconds: float) -> None:
            loads.append(load)

    harness = make_harness(cost=Noting(), max_num_batched_tokens=8)
    harness.step_s = 0.01
    harness.add(1, [1] * 20, max_tokens=3)
    harness.run()
    chunks = [(8, 36), (8, 100), (4, 74)]  # tokens, and pairs of a query and a key
    decodes = [StepLoad(1, 0, 20, 0), StepLoad(1, 0, 21, 0)]
    assert loads == [*(StepLoad(0, tokens, 0, pairs) for tokens, pairs in chunks), *decodes]
