"""Simulations with known results: a trace worked out by hand, and a queue with a textbook waiting time."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from quire.runtime.tools.simulation import (
    Arrival,
    SimulatedSpill,
    SimulationStalled,
    Simulator,
    Workload,
    make_arrivals,
    summarize,
)
from quire.runtime.tools.simulation.report import ideal_cached_tokens
from quire.runtime.tools.traffic import NextTurn, read_mooncake
from quire.scheduler import FirstComeFirstServed, StepPlan

DATA = Path(__file__).parents[3] / "data"
Make = Callable[..., Simulator]


def test_a_trace_by_hand(make_simulator: Make) -> None:
    """Simulate three requests at a millisecond per row.

    Step 1: the first prompt, 1,024 rows. Step 2: its second token, the 76 tokens of the second prompt that the first
    does not have, and 600 tokens of the third prompt. Steps 3 and 4: the other two tokens of the third request.
    """
    simulator = make_simulator(read_mooncake(DATA / "mooncake.jsonl"))
    simulator.run()
    first, second, third = simulator.outcomes
    assert first.token_times == pytest.approx([1.024, 1.701])
    assert second.token_times == pytest.approx([1.701])
    assert third.token_times == pytest.approx([1.701, 1.702, 1.703])
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 1024, 0)
    report = summarize(simulator)
    assert (report.steps, simulator.computed_tokens, report.output_tokens) == (4, 1703, 6)
    assert report.ttft_ms is not None
    assert (report.ttft_ms.p50, report.ttft_ms.max) == pytest.approx((1201.0, 1201.0))
    assert report.queue_ms is not None
    assert (report.queue_ms.mean, report.queue_ms.max) == pytest.approx((2 * 524 / 3, 524.0))
    assert report.itl_ms is not None
    assert (report.itl_ms.p50, report.itl_ms.max) == pytest.approx((1.0, 677.0))
    assert report.cached_share == pytest.approx(1024 / 2724)
    assert report.pool_max == pytest.approx(0.55)  # 33 pages, 3 of the second's own, 19
    assert report.pool_mean == pytest.approx((32 * 1.024 + 55 * 0.677 + 19 * 0.002) / 1.703 / 100)
    assert report.output_throughput == pytest.approx(6 / 1.703)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_queueing_time_is_that_of_the_textbook(make_simulator: Make, load: float) -> None:
    """Simulate M/D/1: requests of one step each, one at a time, wait load / (2 (1 - load)) steps on average.

    Each request waits for the end of the request before, exactly.
    """
    step_s = 0.01
    workload = Workload(request_rate=load / step_s, num_prompts=1_000, prompt_tokens="1", output_tokens="1")
    arrivals = list(make_arrivals(workload))
    simulator = make_simulator(
        arrivals, lambda plan: step_s, max_num_seqs=1, max_num_waiting=1_000, num_pages=2, debug=False
    )
    simulator.run()
    waits, free_s = [], 0.0
    for arrival in arrivals:
        begun_s = max(arrival.time_s, free_s)
        waits.append(begun_s - arrival.time_s)
        free_s = begun_s + step_s
    assert [outcome.queue_s for outcome in simulator.outcomes] == pytest.approx(waits, abs=1e-9)
    queue_ms = summarize(simulator).queue_ms
    assert queue_ms is not None
    assert queue_ms.mean == pytest.approx(1000 * step_s * load / (2 * (1 - load)), rel=0.2)


def test_a_request_that_arrives_during_a_step_waits_for_its_end(make_simulator: Make) -> None:
    simulator = make_simulator([Arrival(0.0, 100, 1), Arrival(0.03, 10, 1)])
    simulator.run()
    assert simulator.outcomes[1].queue_s == pytest.approx(0.07)
    assert simulator.outcomes[1].ttft_s == pytest.approx(0.08)


def test_time_passes_between_requests(make_simulator: Make) -> None:
    simulator = make_simulator([Arrival(5.0, 10, 1), Arrival(9.0, 10, 1)])
    simulator.run()
    assert [outcome.token_times for outcome in simulator.outcomes] == [[pytest.approx(5.01)], [pytest.approx(9.01)]]


def test_the_next_turn_finds_the_conversation_in_the_cache(make_simulator: Make) -> None:
    """The prompt of the second turn has 100 + 30 tokens of the first, whose last was never computed."""
    turns = (NextTurn(2.0, 20, 1), NextTurn(1.0, 2000, 1), NextTurn(1.0, 1, 1))
    simulator = make_simulator([Arrival(0.0, 100, 30, conversation=7, turns=turns)], max_model_len=1000)
    simulator.run()
    _, second, third = simulator.outcomes
    assert second.arrival.time_s == pytest.approx(0.129 + 2.0)
    assert (second.arrival.prompt_tokens, second.cached_tokens) == (150, 128)
    assert second.ttft_s == pytest.approx(0.022)
    assert third.refused == "ContextLengthExceeded", "and its user gives up"
    assert ideal_cached_tokens(simulator.outcomes, 32) == 128


def test_an_ideal_cache_has_what_any_earlier_request_had(make_simulator: Make) -> None:
    arrivals = [
        Arrival(time_s, prompt_tokens, 1, tenant, blocks=blocks, block_tokens=64)
        for time_s, prompt_tokens, tenant, blocks in (
            (0.0, 130, "", (1, 2)),
            (1.0, 130, "", (1, 2)),
            (2.0, 128, "", (1, 2)),
            (3.0, 130, "", (2, 1)),
            (4.0, 130, "other", (1,)),
            (5.0, 130, "", (1, 5)),
        )
    ]
    simulator = make_simulator(arrivals)
    simulator.run()
    assert [each.cached_tokens for each in simulator.outcomes] == [0, 128, 96, 0, 0, 64]
    assert ideal_cached_tokens(simulator.outcomes, 32) == 128 + 96 + 128 + 64, "a block is known by its tokens alone"


def test_deadlines_pass(make_simulator: Make) -> None:
    """Two requests expire while they decode and one before it runs; the last one finishes in time."""
    arrivals = [
        Arrival(0.0, 100, 50, deadline_s=0.1295),
        Arrival(0.0, 10, 50, deadline_s=0.1495),
        Arrival(0.0, 10, 1, deadline_s=0.05),
        Arrival(0.0, 10, 1, deadline_s=0.2),
    ]
    simulator = make_simulator(arrivals, max_num_seqs=2)
    simulator.run()
    assert [outcome.refused for outcome in simulator.outcomes] == ["DeadlineExceeded"] * 3 + [None]
    assert [outcome.end for outcome in simulator.outcomes] == pytest.approx([0.130, 0.150, 0.110, 0.141])
    assert simulator.pager.pool.num_owned == 0


def test_refused_requests_have_outcomes(make_simulator: Make) -> None:
    arrivals = [Arrival(0.0, 10**7, 1), Arrival(0.0, 320, 32), Arrival(0.0, 10, 4), *[Arrival(0.001, 10, 1)] * 3]
    simulator = make_simulator(arrivals, num_pages=10, max_model_len=2_000, max_num_seqs=1, max_num_waiting=1)
    simulator.run()
    reasons = ["ContextLengthExceeded", "TooLong", None, None, "QueueFull", "QueueFull"]
    assert [outcome.refused for outcome in simulator.outcomes] == reasons
    report = summarize(simulator)
    assert (report.offered, report.finished) == (6, 2)
    assert report.refused == {"ContextLengthExceeded": 1, "QueueFull": 2, "TooLong": 1}


def test_recomputed_tokens_count_as_wasted(make_simulator: Make) -> None:
    """Four pages, two requests of 32 tokens that grow to three pages each: the younger one is preempted."""
    simulator = make_simulator([Arrival(0.0, 32, 64), Arrival(0.0, 31, 64)], num_pages=4)
    simulator.run()
    report = summarize(simulator)
    assert report.finished == 2
    assert report.preemptions == 1
    assert report.wasted_share > 0
    assert report.pool_max == 1.0


def test_spilling_takes_slots_and_time() -> None:
    spill = SimulatedSpill(page_bytes=1_000_000, max_bytes=3_500_000)
    assert spill.seconds(3) == pytest.approx(0.0045)  # written at 1 GB/s, read at 2
    assert spill.seconds(4) is None
    slots = spill.save([7, 8])
    assert slots is not None
    assert len(set(slots)) == 2
    assert spill.save([7, 8]) is None
    assert spill.load(slots, [1, 2])
    assert spill.pop_spent_s() == pytest.approx(0.003)
    assert spill.pop_spent_s() == 0.0
    spill.free(slots)
    assert spill.seconds(3) is not None


def test_a_step_waits_for_the_disk_and_for_each_sequence(make_simulator: Make) -> None:
    spill = SimulatedSpill(page_bytes=1_000_000, max_bytes=3_500_000)
    arrivals = [Arrival(0.0, 10, 1), Arrival(0.0, 20, 1)]
    simulator = make_simulator(arrivals, spill=spill, sequence_s=0.5)
    spill.save([7, 8])
    simulator.run()
    assert [outcome.token_times for outcome in simulator.outcomes] == [[pytest.approx(0.03 + 0.002 + 2 * 0.5)]] * 2


def test_the_output_counts_in_the_length_of_a_request(make_simulator: Make) -> None:
    simulator = make_simulator([Arrival(0.0, 50, 50), Arrival(0.0, 50, 51)], max_model_len=100)
    simulator.run()
    assert [outcome.refused for outcome in simulator.outcomes] == [None, "ContextLengthExceeded"]


def test_deadlines_count_from_the_arrival(make_simulator: Make) -> None:
    simulator = make_simulator([Arrival(5.0, 10, 50, deadline_s=0.0295), Arrival(9.0, 10, 1, deadline_s=0.5)])
    simulator.run()
    late, finished = simulator.outcomes
    assert (late.refused, late.end) == ("DeadlineExceeded", pytest.approx(5.030))
    assert (finished.refused, finished.end) == (None, pytest.approx(9.010))


def test_requests_that_wait_are_counted_with_the_newest(make_simulator: Make) -> None:
    simulator = make_simulator([Arrival(0.0, 10, 1)] * 3, max_num_seqs=1)
    simulator.run()
    assert simulator.max_waiting == 3


def test_a_conversation_ends_with_an_answer_that_misses_its_deadline(make_simulator: Make) -> None:
    turns = (NextTurn(1.0, 1, 1),)
    simulator = make_simulator([Arrival(0.0, 10, 50, deadline_s=0.0295, conversation=1, turns=turns)])
    simulator.run()
    assert [outcome.refused for outcome in simulator.outcomes] == ["DeadlineExceeded"]


def test_turns_of_two_conversations_may_arrive_at_the_same_time(make_simulator: Make) -> None:
    turns = (NextTurn(1.0, 1, 1),)
    simulator = make_simulator([Arrival(0.0, 10, 1, conversation=number, turns=turns) for number in range(2)])
    simulator.run()
    assert [outcome.arrival.time_s for outcome in simulator.outcomes] == pytest.approx([0.0, 0.0, 1.02, 1.02])
    assert [outcome.arrival.conversation for outcome in simulator.outcomes] == [0, 1, 0, 1]


class NothingFirst(FirstComeFirstServed):
    def head(self, passed_over: Collection[str] = ()) -> None:
        return None


def test_deadlines_pass_while_nothing_runs(make_simulator: Make) -> None:
    simulator = make_simulator([Arrival(0.0, 100, 1, deadline_s=1.0)], policy=NothingFirst())
    simulator.run()
    (outcome,) = simulator.outcomes
    assert (outcome.refused, outcome.end) == ("DeadlineExceeded", 1.0)


def test_requests_that_can_never_run_are_detected(make_simulator: Make) -> None:
    simulator = make_simulator([Arrival(0.0, 100, 1)], policy=NothingFirst())
    with pytest.raises(SimulationStalled, match="1 requests are unfinished"):
        simulator.run()


def test_the_same_seed_gives_the_same_report(make_simulator: Make) -> None:
    def report(seed: int) -> str:
        workload = Workload(
            request_rate=4, num_prompts=50, prompt_tokens="8-64", output_tokens="1-40", tenants="a=3,b=1", seed=seed
        )
        simulator = make_simulator(make_arrivals(workload))
        simulator.run()
        return json.dumps(summarize(simulator).as_dict())

    assert report(1) == report(1)
    assert report(1) != report(2)


def test_the_clock_advances_by_the_cost_of_each_step(make_simulator: Make) -> None:
    plans: list[StepPlan] = []

    def cost(plan: StepPlan) -> float:
        plans.append(plan)
        return 0.01

    simulator = make_simulator([Arrival(0.0, 10, 2)], cost)
    simulator.run()
    assert [(plan.num_prefill_tokens, plan.num_decode_rows) for plan in plans] == [(10, 0), (0, 1)]
    assert simulator.clock.now == pytest.approx(0.02)
