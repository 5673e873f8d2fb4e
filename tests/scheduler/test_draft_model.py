"""A draft model's proposals: when they are asked for, how many, and how they serve the steps after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from quire.scheduler import Coefficients, CostModel, DraftResult, DraftTask, LatencyBudget, StepPlan, StepResult

from tests.scheduler.conftest import Expected, MakeHarness, SchedulerHarness, continuation

ROWS = Coefficients(20e-3, 1e-3, 1e-3, 0.0, 0.0)
DRAFT_COST = 0.1  # time of the draft model's step over the model's
PASS_S = DRAFT_COST * 20e-3


def drafting(make_harness: MakeHarness, wrong: bool = False, **options: Any) -> Any:
    """Return a harness whose draft model proposes the right tokens, or wrong ones, and a list of its tasks."""
    cost = CostModel(ROWS)
    limits = {"num_speculative_tokens": 4, "max_num_samples": 32, "num_pages": 400}
    harness = make_harness(cost=cost, **{**limits, "draft_cost": DRAFT_COST, **options})
    tasks: list[DraftTask | None] = []
    execute = harness.execute

    def execute_with_draft(plan: StepPlan) -> StepResult:
        result = execute(plan)
        tasks.append(plan.drafting)
        return result if plan.drafting is None else replace(result, drafting=propose(harness, plan, result, wrong))

    harness.execute = execute_with_draft
    return harness, tasks


def propose(harness: SchedulerHarness, plan: StepPlan, result: StepResult, wrong: bool) -> DraftResult:
    task = plan.drafting
    assert task is not None
    tokens = {}
    for request_id, length in task.lengths.items():
        prompt = list(harness.requests[request_id].spec.prompt_token_ids)
        known = len(harness.outputs[request_id])
        right = continuation(prompt, known + 10 + length)[known:]
        row = next(row for row in plan.sequences if row.request_id == request_id)
        drafts = list(row.context[len(row.context) - row.num_samples + 1 :])
        gained = next((i for i, draft in enumerate(drafts) if draft != right[i]), len(drafts)) + 1
        tokens[request_id] = tuple((t + wrong) % 50 for t in right[gained : gained + length])
    most = max(task.lengths.values())
    tokens = {request_id: each for request_id, each in tokens.items() if each}
    return DraftResult(tokens, most, sum(map(len, tokens.values())), most * PASS_S)


def test_right_proposals_save_four_of_five_steps(make_harness: MakeHarness, expected: Expected) -> None:
    harness, tasks = drafting(make_harness)
    harness.add(1, [1, 2, 3], 101)
    steps = harness.run()
    assert harness.outputs[1] == expected([1, 2, 3], 101)
    assert steps < 30
    assert [task.lengths for task in tasks[5:10]] == [{1: 4}] * 5
    assert set(harness.scheduler.stats().drafted_by_source) == {"model"}


def test_wrong_proposals_are_asked_for_less_and_less(make_harness: MakeHarness, expected: Expected) -> None:
    harness, tasks = drafting(make_harness, wrong=True)
    harness.add(1, [1, 2, 3], 200)
    assert harness.run() == 200
    assert harness.outputs[1] == expected([1, 2, 3], 200)
    assert sum(task is not None for task in tasks[100:]) <= 8


def test_a_head_reads_the_rows_of_prompts_and_of_requests_beside_them(make_harness: MakeHarness) -> None:
    harness, tasks = drafting(make_harness, draft_reads_steps=True, max_num_batched_tokens=8)
    harness.add(1, [1] * 12, 9, tenant="a")
    harness.step()
    harness.step()
    harness.step()
    harness.add(2, [2] * 9, 3)
    harness.step()
    assert [task and task.lengths for task in tasks] == [{1: 0}, {1: 0}, {1: 2}, {1: 0, 2: 0}]
    assert tasks[0].salts == {1: b"a"}


def test_a_head_reads_no_rows_beside_31_others(make_harness: MakeHarness) -> None:
    harness, tasks = drafting(
        make_harness, draft_reads_steps=True, max_num_seqs=32, max_num_batched_tokens=128, max_num_samples=160
    )
    for number in range(32):
        harness.add(number, [number, 1], 20)
    harness.run()
    assert not any(tasks)


def test_a_head_proposes_for_a_prompt_of_any_length(make_harness: MakeHarness) -> None:
    harness, tasks = drafting(make_harness, draft_reads_steps=True, max_num_batched_tokens=600, num_pages=1000)
    harness.add(1, [i % 50 for i in range(500)], 4)
    harness.run()
    assert [task.lengths for task in tasks if task] == [{1: 0}, {1: 1}]
    assert harness.scheduler.stats().drafted_by_source == {"head": 1}


def test_no_proposals_beside_31_others(make_harness: MakeHarness) -> None:
    harness, tasks = drafting(make_harness, max_num_seqs=32, max_num_batched_tokens=128, max_num_samples=160)
    for number in range(32):
        harness.add(number, [number, 1], 20)
    harness.run()
    assert not any(tasks)


def test_proposals_serve_later_where_a_step_could_not_verify_them(
    make_harness: MakeHarness, expected: Expected
) -> None:
    harness, tasks = drafting(make_harness, max_num_batched_tokens=32)
    harness.add(1, [1, 2, 3], 60)
    while len(tasks) < 8:
        harness.step()
    harness.add(2, [4, 5], 1)  # the next step prefills, and the one after it verifies the rest of the proposal
    plan = harness.step()
    assert [row.num_samples for row in plan.sequences] == [1, 1]
    assert harness.step().sequences[0].num_samples == 4
    harness.run()
    assert harness.outputs[1] == expected([1, 2, 3], 60)


def test_a_prompt_that_costs_more_than_the_drafts_save_is_not_computed(make_harness: MakeHarness) -> None:
    harness, tasks = drafting(make_harness, max_num_batched_tokens=600, num_pages=1000)
    harness.add(1, [i % 50 for i in range(500)], 4)  # 50 ms for the draft model, for three tokens
    harness.run()
    assert not any(tasks)
    harness.add(2, [i % 50 for i in range(500)], 100)
    harness.run()
    assert any(tasks)


@pytest.mark.parametrize(("target_s", "most"), [(10.0, 4), (0.0275, 2), (0.0235, 0)])
def test_passes_stay_within_the_latency_target(make_harness: MakeHarness, target_s: float, most: int) -> None:
    """A pass takes 2 ms and a token to verify 1 ms, beside a step of 21 ms."""
    cost = CostModel(ROWS)
    cost.is_warm = True
    harness, tasks = drafting(make_harness, budget=LatencyBudget(cost, target_s / 0.9, 32))
    harness.add(1, [1, 2], 30)
    harness.run()
    lengths = [task.lengths[1] for task in tasks if task is not None]
    assert max(lengths, default=0) == most
    model: Any = harness.scheduler._speculator._model
    assert model._ended == ([1] if most else [])  # a request that was never proposed for is not remembered


def test_ended_requests_are_named_once_with_the_next_task(make_harness: MakeHarness) -> None:
    harness, tasks = drafting(make_harness)
    for number in (1, 2):
        harness.add(number, [number, 2, 3], 20, tenant=f"tenant {number}")
        harness.run()
    asked = [task for task in tasks if task is not None]
    assert [task.ended for task in asked if task.ended] == [(1,)]
    assert asked[0].salts == {1: b"tenant 1"}
    speculator: Any = harness.scheduler._speculator
    assert speculator._model._ended == [2]
    assert not speculator._model._started
    assert not speculator._model._proposals


def test_the_time_of_a_pass_is_learned(make_harness: MakeHarness) -> None:
    """The draft model takes as long as the model: no draft pays, however right."""
    harness, tasks = drafting(make_harness, draft_cost=0.02)
    execute = harness.execute

    def slow(plan: StepPlan) -> StepResult:
        result = execute(plan)
        drafted = result.drafting
        return replace(result, drafting=replace(drafted, seconds=drafted.num_passes * 20e-3))

    harness.execute = slow
    harness.add(1, [1, 2, 3], 400)
    harness.run()
    assert any(tasks[:10])
    assert sum(task is not None for task in tasks[-100:]) <= 5
