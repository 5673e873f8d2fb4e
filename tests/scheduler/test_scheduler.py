"""The content of a step, the admission of requests, and their ends. Pages hold 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest
from quire.pager import Pager
from quire.scheduler import (
    AdmissionEstimate,
    DuplicateRequest,
    QueueFull,
    SampledToken,
    Scheduler,
    SchedulerConfig,
    State,
    StepMismatch,
    StepPlan,
    StepResult,
    TokenBudget,
    TooLong,
)

from tests.scheduler.conftest import Expected, MakeHarness
from tests.support.forced_preemption import preempt


def rows(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    """Return (request id, first position, tokens, samples) of each row."""
    assert plan is not None
    return [(row.request_id, row.first_position, len(row.token_ids), row.num_samples) for row in plan.sequences]


def test_a_request_from_prompt_to_length(make_harness: MakeHarness, expected: Expected) -> None:
    harness = make_harness()
    harness.add(1, [1, 2, 3, 4, 5], max_tokens=3)
    assert rows(harness.step()) == [(1, 0, 5, 1)]
    assert rows(harness.step()) == [(1, 5, 1, 1)]
    assert rows(harness.step()) == [(1, 6, 1, 1)]
    assert harness.step() is None
    assert harness.outputs == {1: expected([1, 2, 3, 4, 5], 3)}
    assert harness.ended == {1: "length"}
    assert harness.scheduler.stats().pages_owned == 0


def test_a_plan_has_what_the_model_runner_needs(make_harness: MakeHarness) -> None:
    harness = make_harness()
    sampling = object()
    harness.add(7, [1, 2, 3, 4, 5], sampling=sampling)
    first = harness.step()
    assert (first.step_id, first.num_decode_rows, first.num_prefill_tokens) == (1, 0, 5)
    second = harness.scheduler.schedule()
    assert (second.step_id, second.num_decode_rows, second.num_prefill_tokens) == (2, 1, 0)
    (row,) = second.sequences
    assert row.sampling is sampling
    assert list(row.tables[0]) == [0, 1]
    assert row.token_ids == [harness.outputs[7][0]]
    assert row.context == [1, 2, 3, 4, 5, harness.outputs[7][0]]
    assert row.num_prompt_tokens == 5


def test_decode_rows_come_first_then_prefill_up_to_the_budget(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_batched_tokens=10)
    harness.add(1, [1] * 3)
    harness.step()
    harness.add(2, [2] * 20)
    harness.add(3, [3] * 2)
    assert rows(harness.step()) == [(1, 3, 1, 1), (2, 0, 9, 0)]
    assert rows(harness.step()) == [(1, 4, 1, 1), (2, 9, 9, 0)]
    plan = harness.step()
    assert rows(plan) == [(1, 5, 1, 1), (2, 18, 2, 1), (3, 0, 2, 1)]
    assert (plan.num_decode_rows, plan.num_prefill_tokens) == (1, 4)
    assert rows(harness.step()) == [(2, 20, 1, 1), (3, 2, 1, 1)]


def test_a_prompt_that_ends_mid_budget_lets_the_next_one_in(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_batched_tokens=8)
    for request_id in (1, 2, 3):
        harness.add(request_id, [request_id] * 3)
    assert rows(harness.step()) == [(1, 0, 3, 1), (2, 0, 3, 1), (3, 0, 2, 0)]


def test_running_sequences_are_limited(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=2)
    for request_id in (1, 2, 3):
        harness.add(request_id, [request_id] * 3, max_tokens=2)
    assert [row[0] for row in rows(harness.step())] == [1, 2]
    assert (harness.scheduler.stats().running, harness.scheduler.stats().waiting) == (2, 1)
    assert [row[0] for row in rows(harness.step())] == [1, 2]
    assert [row[0] for row in rows(harness.step())] == [3]


def test_the_chunk_limit_is_per_sequence(make_harness: MakeHarness) -> None:
    harness = make_harness(max_chunk=3)
    harness.add(1, [1] * 7)
    harness.add(2, [2] * 4)
    assert rows(harness.step()) == [(1, 0, 3, 0), (2, 0, 3, 0)]
    assert rows(harness.step()) == [(1, 3, 3, 0), (2, 3, 1, 1)]
    assert rows(harness.step()) == [(2, 4, 1, 1), (1, 6, 1, 1)]


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 7, None])
@pytest.mark.parametrize("caching", [True, False])
def test_any_chunking_gives_the_same_tokens(
    make_harness: MakeHarness, expected: Expected, chunk: int | None, caching: bool
) -> None:
    harness = make_harness(max_chunk=chunk, enable_prefix_caching=caching)
    prompts = [[1] * 9, [1] * 9 + [2], [3, 4]]
    for request_id, prompt in enumerate(prompts):
        harness.add(request_id, prompt, max_tokens=6)
    harness.run()
    assert harness.outputs == {i: expected(prompt, 6) for i, prompt in enumerate(prompts)}


def test_nothing_to_do_is_no_plan(make_harness: MakeHarness) -> None:
    harness = make_harness()
    assert harness.scheduler.schedule() is None
    assert not harness.scheduler.has_work
    assert harness.scheduler.num_steps == 0


class TestAdmission:
    def test_the_estimate_has_position_and_pages(self, make_harness: MakeHarness) -> None:
        harness = make_harness(num_pages=16)
        assert harness.add(1, [1] * 6, max_tokens=4) == AdmissionEstimate(position=0, pages_needed=3, pages_free=16)
        assert harness.add(2, [2] * 6, max_tokens=2) == AdmissionEstimate(position=1, pages_needed=2, pages_free=16)
        harness.step()
        assert harness.add(3, [1], max_tokens=1) == AdmissionEstimate(position=0, pages_needed=1, pages_free=12)

    def test_the_longest_request_that_fits_is_accepted_and_a_longer_one_is_not(self, make_harness: MakeHarness) -> None:
        harness = make_harness(num_pages=4)
        with pytest.raises(TooLong, match="17 together, need 5 pages of 4"):
            harness.add(1, [1] * 10, max_tokens=7)
        assert not harness.scheduler.has_work
        harness.add(1, [1] * 10, max_tokens=6)
        harness.run()
        assert harness.ended == {1: "length"}

    def test_a_full_queue_refuses_and_changes_nothing(self, make_harness: MakeHarness) -> None:
        harness = make_harness(max_num_waiting=2)
        harness.add(1, [1])
        harness.add(2, [1])
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            harness.add(3, [1])
        assert harness.scheduler.stats().waiting == 2
        harness.step()
        harness.add(3, [1])

    def test_an_id_can_be_used_again_only_after_its_request_has_ended(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, [1], max_tokens=1)
        with pytest.raises(DuplicateRequest, match="id 1 is already in use"):
            harness.add(1, [2])
        harness.run()
        harness.ended.clear()
        harness.add(1, [2])

    def test_new_requests_leave_pages_that_running_ones_still_need(self, make_harness: MakeHarness) -> None:
        harness = make_harness(num_pages=8, max_num_batched_tokens=8)
        harness.add(1, [1] * 16, max_tokens=4)  # 4 pages for the prompt, 2 of them in the first step, and 1 for output
        harness.add(2, [2] * 13, max_tokens=1)  # 4 pages, but only 3 are left
        harness.step()
        harness.step()
        harness.step()
        assert harness.requests[2].state is State.WAITING
        harness.run()
        assert harness.scheduler.stats().preemptions == 0
        assert harness.ended == {1: "length", 2: "length"}

    def test_requests_that_fit_at_their_longest_all_run_at_once(self, make_harness: MakeHarness) -> None:
        """Four requests of eight tokens in eight pages: no page is kept for growth that cannot happen."""
        harness = make_harness(num_pages=8, max_num_seqs=4)
        for request_id in range(4):
            harness.add(request_id, [request_id] * 6, max_tokens=2)
        assert [row[0] for row in rows(harness.step())] == [0, 1, 2, 3]

    def test_a_head_that_does_not_fit_is_not_overtaken(self, make_harness: MakeHarness) -> None:
        harness = make_harness(num_pages=8)
        harness.add(1, [1] * 20, max_tokens=4)
        harness.add(2, [2] * 20, max_tokens=4)
        harness.add(3, [3], max_tokens=1)
        assert [row[0] for row in rows(harness.step())] == [1]
        assert [row[0] for row in rows(harness.step())] == [1]
        harness.run()
        assert list(harness.ended) == [1, 3, 2]

    @pytest.mark.parametrize("options", [{"max_num_seqs": 0}, {"max_num_seqs": 33}])
    def test_impossible_settings_are_refused(self, make_harness: MakeHarness, options: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="max_num_seqs"):
            make_harness(max_num_batched_tokens=32, **options)


class TestPrefixCache:
    PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    def test_a_later_request_computes_only_what_is_new(self, make_harness: MakeHarness, expected: Expected) -> None:
        harness = make_harness()
        harness.add(1, self.PROMPT)
        harness.step()
        harness.add(2, [*self.PROMPT, 10])
        assert rows(harness.step()) == [(1, 9, 1, 1), (2, 8, 2, 1)]
        harness.run()
        assert (harness.requests[1].cached_tokens, harness.requests[2].cached_tokens) == (0, 8)
        assert harness.outputs[2] == expected([*self.PROMPT, 10], 4)
        stats = harness.scheduler.stats()
        assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (19, 8)

    def test_pages_are_shared_as_soon_as_they_are_computed(self, make_harness: MakeHarness) -> None:
        harness = make_harness(max_chunk=4)
        harness.add(1, self.PROMPT)
        harness.step()
        harness.add(2, self.PROMPT)
        assert rows(harness.step()) == [(1, 4, 4, 0), (2, 4, 4, 0)]

    def test_the_same_prompt_in_the_same_step_ends_up_on_the_same_pages(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, self.PROMPT)
        harness.add(2, self.PROMPT)
        harness.step()
        tables = [list(harness.requests[request_id].table.pages[0]) for request_id in (1, 2)]
        assert tables == [[0, 1, 2], [0, 1, 5]]
        assert harness.scheduler.stats().pages_owned == 4

    def test_the_answer_is_cached_for_the_next_turn(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, self.PROMPT, max_tokens=4)
        harness.run()
        turn = [*self.PROMPT, *harness.outputs[1], 20]  # 12 of these 14 tokens were computed
        harness.add(2, turn)
        assert rows(harness.step()) == [(2, 12, 2, 1)]

    def test_tenants_do_not_share_pages(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, self.PROMPT, tenant="alice")
        harness.step()
        harness.add(2, self.PROMPT, tenant="bob")
        harness.run()
        assert harness.requests[2].cached_tokens == 0


class TestEnds:
    def test_a_stop_token_is_the_last_token(self, make_harness: MakeHarness, expected: Expected) -> None:
        harness = make_harness()
        tokens = expected([1, 2, 3], 4)
        harness.add(1, [1, 2, 3], max_tokens=9, stop_token_ids=frozenset({tokens[3]}))
        harness.run()
        assert (harness.outputs[1], harness.ended[1]) == (tokens, "stop")

    def test_cancelling_a_waiting_request(self, make_harness: MakeHarness) -> None:
        harness = make_harness(max_num_seqs=1)
        harness.add(1, [1] * 3)
        harness.add(2, [2] * 3)
        harness.step()
        update = harness.cancel(2)
        assert (update.finish_reason, update.tokens, harness.requests[2].state) == ("cancelled", (), State.ENDED)
        harness.run()
        assert harness.ended == {1: "length", 2: "cancelled"}

    def test_cancelling_between_steps_returns_every_page_at_once(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, [1] * 6, max_tokens=9)
        harness.step()
        assert harness.scheduler.stats().pages_owned == 2
        harness.cancel(1)
        assert harness.scheduler.stats().pages_owned == 0
        assert not harness.scheduler.has_work

    def test_cancelling_during_a_step_keeps_its_pages_until_the_commit(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, [1] * 6, max_tokens=9)
        harness.add(2, [2] * 6, max_tokens=9)
        harness.step()
        plan = harness.scheduler.schedule()
        assert harness.cancel(1) is None
        assert harness.cancel(1) is None
        assert harness.scheduler.stats().pages_owned == 4
        updates = harness.commit(plan)
        assert [(update.request_id, update.finish_reason, len(update.tokens)) for update in updates] == [
            (1, "cancelled", 0),
            (2, None, 1),
        ]
        assert harness.scheduler.stats().pages_owned == 2
        assert len(harness.outputs[1]) == 1

    def test_cancelling_a_request_outside_the_step_in_flight_ends_it_at_once(self, make_harness: MakeHarness) -> None:
        harness = make_harness(max_num_batched_tokens=2, max_num_seqs=2, max_chunk=1)
        harness.add(1, [1] * 3, max_tokens=9)
        harness.add(2, [2] * 3, max_tokens=9)
        harness.add(3, [3] * 3, max_tokens=9)
        plan = harness.scheduler.schedule()
        assert harness.cancel(3).finish_reason == "cancelled"
        harness.commit(plan)

    def test_cancelling_a_preempted_request(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, [1] * 6)
        harness.step()
        preempt(harness.scheduler, 1)
        assert harness.cancel(1).finish_reason == "cancelled"
        assert not harness.scheduler.has_work

    def test_an_unknown_or_ended_id_is_ignored(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, [1], max_tokens=1)
        harness.run()
        assert harness.cancel(1) is None
        assert harness.cancel(99) is None

    def test_the_engine_may_end_a_request_with_a_reason_or_an_error(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, [1] * 3)
        harness.add(2, [2] * 3)
        harness.step()
        assert harness.scheduler.finish(1, "stop").finish_reason == "stop"
        update = harness.scheduler.finish(2, error="detokenizer failed")
        assert (update.finish_reason, update.error, update.ended) == (None, "detokenizer failed", True)
        assert harness.requests[2].error == "detokenizer failed"
        assert harness.scheduler.stats().pages_owned == 0

    def test_the_first_ending_requested_during_a_step_counts(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, [1] * 3)
        plan = harness.scheduler.schedule()
        harness.scheduler.finish(1, error="too late")
        harness.scheduler.finish(1, "cancelled")
        harness.commit(plan)
        assert harness.ended == {1: "too late"}

    def test_an_ending_requested_during_a_step_does_not_outlast_the_step(
        self, make_harness: MakeHarness, expected: Expected
    ) -> None:
        """A later request with the same id runs to its own end."""
        for fails in (False, True):
            harness = make_harness()
            harness.add(1, [1] * 3)
            plan = harness.scheduler.schedule()
            harness.cancel(1)
            updates = harness.scheduler.abandon("failed") if fails else harness.scheduler.commit(harness.execute(plan))
            assert [(update.finish_reason, update.tokens) for update in updates] == [("cancelled", ())]
            harness.add(1, [2] * 3)
            harness.run()
            assert (harness.outputs[1], harness.ended[1]) == (expected([2] * 3, 4), "length")

    def test_end_all_ends_the_step_in_flight_too(self, make_harness: MakeHarness, expected: Expected) -> None:
        harness = make_harness(max_num_seqs=1)
        harness.add(1, [1] * 3)
        harness.add(2, [2] * 3)
        harness.scheduler.schedule()
        harness.cancel(1)
        updates = harness.scheduler.end_all("closed")
        assert [(update.finish_reason, update.error) for update in updates] == [("cancelled", None), (None, "closed")]
        assert harness.scheduler.stats().pages_owned == 0
        harness.add(1, [2] * 3)
        harness.run()
        assert (harness.outputs[1], harness.ended[1]) == (expected([2] * 3, 4), "length")

    @pytest.mark.parametrize("ending", [{}, {"reason": "stop", "error": "both"}])
    def test_an_ending_is_a_reason_or_an_error(self, make_harness: MakeHarness, ending: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="a reason or with an error"):
            make_harness().scheduler.finish(1, **ending)

    def test_logits_that_cannot_be_sampled_end_that_request_only(
        self, make_harness: MakeHarness, expected: Expected
    ) -> None:
        harness = make_harness()
        harness.add(1, [1] * 5)
        harness.add(2, [2] * 5)
        harness.failing[1] = "NaN logits"
        harness.run()
        assert harness.ended == {1: "NaN logits", 2: "length"}
        assert harness.outputs == {1: [], 2: expected([2] * 5, 4)}

    def test_pages_of_failed_logits_do_not_enter_the_prefix_cache(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, [1] * 5)
        harness.failing[1] = "NaN logits"
        harness.run()
        assert harness.scheduler.stats().pages_cached == 0

    def test_a_failed_step_ends_only_its_own_requests(self, make_harness: MakeHarness, expected: Expected) -> None:
        harness = make_harness(max_num_seqs=2)
        for request_id in (1, 2, 3):
            harness.add(request_id, [request_id] * 5)
        harness.scheduler.schedule()
        harness.scheduler.finish(2, "cancelled")
        for update in harness.scheduler.abandon("kernel failed"):
            harness.note(update)
        assert harness.ended == {1: "kernel failed", 2: "cancelled"}
        assert harness.scheduler.stats().pages_owned == 0
        assert harness.scheduler.num_steps == 1
        harness.run()
        assert harness.outputs[3] == expected([3] * 5, 4)

    def test_end_all_ends_every_request(self, make_harness: MakeHarness) -> None:
        harness = make_harness(max_num_seqs=2)
        for request_id in (1, 2, 3):
            harness.add(request_id, [request_id] * 5)
        harness.scheduler.schedule()
        harness.scheduler.finish(1, "cancelled")
        for update in harness.scheduler.end_all("closed"):
            harness.note(update)
        assert harness.ended == {1: "cancelled", 2: "closed", 3: "closed"}
        assert harness.scheduler.stats().pages_owned == 0
        assert harness.step() is None


class TestProtocol:
    def test_a_step_must_be_committed_before_the_next(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, [1])
        harness.scheduler.schedule()
        with pytest.raises(StepMismatch, match="step 1 is still in flight"):
            harness.scheduler.schedule()

    def test_a_step_cannot_be_committed_or_abandoned_twice(self, make_harness: MakeHarness) -> None:
        harness = make_harness()
        harness.add(1, [1])
        plan = harness.scheduler.schedule()
        result = harness.execute(plan)
        harness.scheduler.commit(result)
        with pytest.raises(StepMismatch, match="step 1 is not in flight"):
            harness.scheduler.commit(result)
        with pytest.raises(StepMismatch, match="no step is in flight"):
            harness.scheduler.abandon("late")

    def test_a_result_that_does_not_match_changes_nothing(self, make_harness: MakeHarness, expected: Expected) -> None:
        harness = make_harness()
        harness.add(1, [1] * 3)
        harness.add(2, [2] * 3)
        plan = harness.scheduler.schedule()
        wrong_order = (SampledToken(2, 0), SampledToken(1, 0))
        for sampled in ((), wrong_order, (*wrong_order, SampledToken(3, 0))):
            with pytest.raises(StepMismatch, match=r"must sample for requests \[1, 2\]"):
                harness.scheduler.commit(StepResult(plan.step_id, sampled, 0.0))
        harness.commit(plan)
        harness.run()
        assert harness.outputs == {1: expected([1] * 3, 4), 2: expected([2] * 3, 4)}


class TestTimes:
    def test_queue_prefill_decode_and_first_token(self, make_harness: MakeHarness) -> None:
        harness = make_harness(max_chunk=3)
        harness.now = 1.0
        harness.add(1, [1] * 6, max_tokens=2)
        for harness.now in (3.0, 10.0, 25.0):
            harness.step()
        request = harness.requests[1]
        assert (request.arrival_time, request.first_token_time) == (1.0, 10.0)
        counters = request.final_counters()
        assert (counters.queue_s, counters.prefill_s, counters.decode_s, counters.stall_s) == (2.0, 7.0, 15.0, 0.0)


def test_the_environment_switches_the_audit_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(debug: bool | None) -> Scheduler:
        pager = Pager(4, 4)
        pager.pool.num_free -= 1
        return Scheduler(pager, TokenBudget(8), SchedulerConfig(max_num_seqs=1), debug=debug)

    monkeypatch.setenv("QUIRE_DEBUG", "1")
    with pytest.raises(Exception, match="do not match the lists"):
        broken(None).schedule()
    assert broken(False).schedule() is None
    monkeypatch.delenv("QUIRE_DEBUG")
    assert broken(None).schedule() is None
