"""What a step contains, when requests are let in, and how they end. Pages hold 4 tokens."""

from __future__ import annotations

from collections.abc import Callable
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

MakeWorld = Callable[..., Any]
Expected = Callable[..., list[int]]


def rows(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    """(request id, first position, tokens, samples) of each row."""
    assert plan is not None
    return [(row.request_id, row.first_position, len(row.token_ids), row.num_samples) for row in plan.sequences]


def test_a_request_from_prompt_to_length(make_world: MakeWorld, expected: Expected) -> None:
    world = make_world()
    world.add(1, [1, 2, 3, 4, 5], max_tokens=3)
    assert rows(world.step()) == [(1, 0, 5, 1)]
    assert rows(world.step()) == [(1, 5, 1, 1)]
    assert rows(world.step()) == [(1, 6, 1, 1)]
    assert world.step() is None
    assert world.outputs == {1: expected([1, 2, 3, 4, 5], 3)}
    assert world.ended == {1: "length"}
    assert world.scheduler.stats().pages_owned == 0


def test_a_plan_carries_what_the_executor_needs(make_world: MakeWorld) -> None:
    world = make_world()
    sampling = object()
    world.add(7, [1, 2, 3, 4, 5], sampling=sampling)
    first = world.step()
    assert (first.step_id, first.num_decode_rows, first.num_prefill_tokens) == (1, 0, 5)
    second = world.scheduler.schedule()
    assert (second.step_id, second.num_decode_rows, second.num_prefill_tokens) == (2, 1, 0)
    (row,) = second.sequences
    assert row.sampling is sampling
    assert list(row.tables[0]) == [0, 1]
    assert row.token_ids == [world.outputs[7][0]]
    assert row.context == [1, 2, 3, 4, 5, world.outputs[7][0]]
    assert row.num_prompt_tokens == 5


def test_decode_rows_come_first_then_prefill_up_to_the_budget(make_world: MakeWorld) -> None:
    world = make_world(max_num_batched_tokens=10)
    world.add(1, [1] * 3)
    world.step()
    world.add(2, [2] * 20)
    world.add(3, [3] * 2)
    assert rows(world.step()) == [(1, 3, 1, 1), (2, 0, 9, 0)]
    assert rows(world.step()) == [(1, 4, 1, 1), (2, 9, 9, 0)]
    plan = world.step()
    assert rows(plan) == [(1, 5, 1, 1), (2, 18, 2, 1), (3, 0, 2, 1)]
    assert (plan.num_decode_rows, plan.num_prefill_tokens) == (1, 4)
    assert rows(world.step()) == [(2, 20, 1, 1), (3, 2, 1, 1)]


def test_a_prompt_that_ends_mid_budget_lets_the_next_one_in(make_world: MakeWorld) -> None:
    world = make_world(max_num_batched_tokens=8)
    for request_id in (1, 2, 3):
        world.add(request_id, [request_id] * 3)
    assert rows(world.step()) == [(1, 0, 3, 1), (2, 0, 3, 1), (3, 0, 2, 0)]


def test_running_sequences_are_bounded(make_world: MakeWorld) -> None:
    world = make_world(max_num_seqs=2)
    for request_id in (1, 2, 3):
        world.add(request_id, [request_id] * 3, max_tokens=2)
    assert [row[0] for row in rows(world.step())] == [1, 2]
    assert (world.scheduler.stats().running, world.scheduler.stats().waiting) == (2, 1)
    assert [row[0] for row in rows(world.step())] == [1, 2]
    assert [row[0] for row in rows(world.step())] == [3]


def test_the_chunk_limit_is_per_sequence(make_world: MakeWorld) -> None:
    world = make_world(max_chunk=3)
    world.add(1, [1] * 7)
    world.add(2, [2] * 4)
    assert rows(world.step()) == [(1, 0, 3, 0), (2, 0, 3, 0)]
    assert rows(world.step()) == [(1, 3, 3, 0), (2, 3, 1, 1)]
    assert rows(world.step()) == [(2, 4, 1, 1), (1, 6, 1, 1)]


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 7, None])
@pytest.mark.parametrize("caching", [True, False])
def test_any_chunking_gives_the_same_tokens(
    make_world: MakeWorld, expected: Expected, chunk: int | None, caching: bool
) -> None:
    world = make_world(max_chunk=chunk, enable_prefix_caching=caching)
    prompts = [[1] * 9, [1] * 9 + [2], [3, 4]]
    for request_id, prompt in enumerate(prompts):
        world.add(request_id, prompt, max_tokens=6)
    world.run()
    assert world.outputs == {i: expected(prompt, 6) for i, prompt in enumerate(prompts)}


def test_nothing_to_do_is_no_plan(make_world: MakeWorld) -> None:
    world = make_world()
    assert world.scheduler.schedule() is None
    assert not world.scheduler.has_work
    assert world.scheduler.num_steps == 0


class TestAdmission:
    def test_it_tells_position_and_pages(self, make_world: MakeWorld) -> None:
        world = make_world(num_pages=16)
        assert world.add(1, [1] * 6, max_tokens=4) == AdmissionEstimate(position=0, pages_needed=3, pages_free=16)
        assert world.add(2, [2] * 6, max_tokens=2) == AdmissionEstimate(position=1, pages_needed=2, pages_free=16)
        world.step()
        assert world.add(3, [1], max_tokens=1) == AdmissionEstimate(position=0, pages_needed=1, pages_free=12)

    def test_the_longest_request_that_fits_is_taken_and_a_longer_one_is_not(self, make_world: MakeWorld) -> None:
        world = make_world(num_pages=4)
        with pytest.raises(TooLong, match="17 together, need 5 pages of 4"):
            world.add(1, [1] * 10, max_tokens=7)
        assert not world.scheduler.has_work
        world.add(1, [1] * 10, max_tokens=6)
        world.run()
        assert world.ended == {1: "length"}

    def test_a_full_queue_refuses_and_changes_nothing(self, make_world: MakeWorld) -> None:
        world = make_world(max_num_waiting=2)
        world.add(1, [1])
        world.add(2, [1])
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            world.add(3, [1])
        assert world.scheduler.stats().waiting == 2
        world.step()
        world.add(3, [1])

    def test_a_live_id_cannot_be_used_again_an_ended_one_can(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, [1], max_tokens=1)
        with pytest.raises(DuplicateRequest, match="id 1 is already in use"):
            world.add(1, [2])
        world.run()
        world.ended.clear()
        world.add(1, [2])

    def test_newcomers_leave_the_pages_alone_that_running_requests_still_need(self, make_world: MakeWorld) -> None:
        world = make_world(num_pages=8, max_num_batched_tokens=8)
        world.add(1, [1] * 16, max_tokens=4)  # 4 pages, of which 2 in the first step, and 1 to come
        world.add(2, [2] * 13, max_tokens=1)  # 4 pages: one too many beside it
        world.step()
        world.step()
        world.step()
        assert world.requests[2].state is State.WAITING
        world.run()
        assert world.scheduler.stats().preemptions == 0
        assert world.ended == {1: "length", 2: "length"}

    def test_a_pool_for_all_at_their_longest_runs_all_at_once(self, make_world: MakeWorld) -> None:
        """Nobody is kept out for growth that will never come: four users, eight tokens each, two pages each."""
        world = make_world(num_pages=8, max_num_seqs=4)
        for request_id in range(4):
            world.add(request_id, [request_id] * 6, max_tokens=2)
        assert [row[0] for row in rows(world.step())] == [0, 1, 2, 3]

    def test_a_head_that_does_not_fit_is_not_overtaken(self, make_world: MakeWorld) -> None:
        world = make_world(num_pages=8)
        world.add(1, [1] * 20, max_tokens=4)
        world.add(2, [2] * 20, max_tokens=4)
        world.add(3, [3], max_tokens=1)
        assert [row[0] for row in rows(world.step())] == [1]
        assert [row[0] for row in rows(world.step())] == [1]
        world.run()
        assert list(world.ended) == [1, 3, 2]

    @pytest.mark.parametrize("options", [{"max_num_seqs": 0}, {"max_num_seqs": 33}])
    def test_impossible_settings_are_refused(self, make_world: MakeWorld, options: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="max_num_seqs"):
            make_world(max_num_batched_tokens=32, **options)


class TestPrefixCache:
    PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)

    def test_a_later_request_computes_only_what_is_new(self, make_world: MakeWorld, expected: Expected) -> None:
        world = make_world()
        world.add(1, self.PROMPT)
        world.step()
        world.add(2, [*self.PROMPT, 10])
        assert rows(world.step()) == [(1, 9, 1, 1), (2, 8, 2, 1)]
        world.run()
        assert (world.requests[1].cached_tokens, world.requests[2].cached_tokens) == (0, 8)
        assert world.outputs[2] == expected([*self.PROMPT, 10], 4)
        stats = world.scheduler.stats()
        assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (19, 8)

    def test_pages_are_shared_as_soon_as_they_are_computed(self, make_world: MakeWorld) -> None:
        world = make_world(max_chunk=4)
        world.add(1, self.PROMPT)
        world.step()
        world.add(2, self.PROMPT)
        assert rows(world.step()) == [(1, 4, 4, 0), (2, 4, 4, 0)]

    def test_the_same_prompt_in_the_same_step_ends_up_on_the_same_pages(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, self.PROMPT)
        world.add(2, self.PROMPT)
        world.step()
        tables = [list(world.requests[request_id].table.pages[0]) for request_id in (1, 2)]
        assert tables == [[0, 1, 2], [0, 1, 5]]
        assert world.scheduler.stats().pages_owned == 4

    def test_the_answer_is_cached_for_the_next_turn(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, self.PROMPT, max_tokens=4)
        world.run()
        turn = [*self.PROMPT, *world.outputs[1], 20]  # 12 of these 14 were computed
        world.add(2, turn)
        assert rows(world.step()) == [(2, 12, 2, 1)]

    def test_tenants_do_not_share(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, self.PROMPT, tenant="alice")
        world.step()
        world.add(2, self.PROMPT, tenant="bob")
        world.run()
        assert world.requests[2].cached_tokens == 0


class TestEnds:
    def test_a_stop_token_is_the_last_token(self, make_world: MakeWorld, expected: Expected) -> None:
        world = make_world()
        tokens = expected([1, 2, 3], 4)
        world.add(1, [1, 2, 3], max_tokens=9, stop_token_ids=frozenset({tokens[3]}))
        world.run()
        assert (world.outputs[1], world.ended[1]) == (tokens, "stop")

    def test_cancelling_a_waiting_request(self, make_world: MakeWorld) -> None:
        world = make_world(max_num_seqs=1)
        world.add(1, [1] * 3)
        world.add(2, [2] * 3)
        world.step()
        update = world.cancel(2)
        assert (update.finish_reason, update.tokens, world.requests[2].state) == ("cancelled", (), State.ENDED)
        world.run()
        assert world.ended == {1: "length", 2: "cancelled"}

    def test_cancelling_between_steps_returns_every_page_at_once(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, [1] * 6, max_tokens=9)
        world.step()
        assert world.scheduler.stats().pages_owned == 2
        world.cancel(1)
        assert world.scheduler.stats().pages_owned == 0
        assert not world.scheduler.has_work

    def test_cancelling_during_a_step_keeps_its_pages_until_the_commit(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, [1] * 6, max_tokens=9)
        world.add(2, [2] * 6, max_tokens=9)
        world.step()
        plan = world.scheduler.schedule()
        assert world.cancel(1) is None
        assert world.cancel(1) is None
        assert world.scheduler.stats().pages_owned == 4
        updates = world.commit(plan)
        assert [(update.request_id, update.finish_reason, len(update.tokens)) for update in updates] == [
            (1, "cancelled", 0),
            (2, None, 1),
        ]
        assert world.scheduler.stats().pages_owned == 2
        assert len(world.outputs[1]) == 1

    def test_cancelling_a_bystander_during_a_step_ends_it_at_once(self, make_world: MakeWorld) -> None:
        world = make_world(max_num_batched_tokens=2, max_num_seqs=2, max_chunk=1)
        world.add(1, [1] * 3, max_tokens=9)
        world.add(2, [2] * 3, max_tokens=9)
        world.add(3, [3] * 3, max_tokens=9)
        plan = world.scheduler.schedule()
        assert world.cancel(3).finish_reason == "cancelled"
        world.commit(plan)

    def test_cancelling_a_preempted_request(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, [1] * 6)
        world.step()
        world.scheduler.preempt(1)
        assert world.cancel(1).finish_reason == "cancelled"
        assert not world.scheduler.has_work

    def test_an_unknown_or_ended_id_is_ignored(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, [1], max_tokens=1)
        world.run()
        assert world.cancel(1) is None
        assert world.cancel(99) is None

    def test_the_engine_may_end_a_request_for_its_own_reason_or_error(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, [1] * 3)
        world.add(2, [2] * 3)
        world.step()
        assert world.scheduler.finish(1, "stop").finish_reason == "stop"
        update = world.scheduler.finish(2, error="detokenizer failed")
        assert (update.finish_reason, update.error, update.ended) == (None, "detokenizer failed", True)
        assert world.requests[2].error == "detokenizer failed"
        assert world.scheduler.stats().pages_owned == 0

    def test_the_first_ending_asked_for_during_a_step_counts(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, [1] * 3)
        plan = world.scheduler.schedule()
        world.scheduler.finish(1, error="too late")
        world.scheduler.finish(1, "cancelled")
        world.commit(plan)
        assert world.ended == {1: "too late"}

    def test_an_ending_asked_for_during_a_step_is_gone_with_the_step(
        self, make_world: MakeWorld, expected: Expected
    ) -> None:
        """A later request with the same id runs to its own end."""
        for fails in (False, True):
            world = make_world()
            world.add(1, [1] * 3)
            plan = world.scheduler.schedule()
            world.cancel(1)
            updates = world.scheduler.abandon("failed") if fails else world.scheduler.commit(world.execute(plan))
            assert [(update.finish_reason, update.tokens) for update in updates] == [("cancelled", ())]
            world.add(1, [2] * 3)
            world.run()
            assert (world.outputs[1], world.ended[1]) == (expected([2] * 3, 4), "length")

    def test_ending_all_ends_the_step_in_flight_too(self, make_world: MakeWorld, expected: Expected) -> None:
        world = make_world(max_num_seqs=1)
        world.add(1, [1] * 3)
        world.add(2, [2] * 3)
        world.scheduler.schedule()
        world.cancel(1)
        updates = world.scheduler.end_all("closed")
        assert [(update.finish_reason, update.error) for update in updates] == [("cancelled", None), (None, "closed")]
        assert world.scheduler.stats().pages_owned == 0
        world.add(1, [2] * 3)
        world.run()
        assert (world.outputs[1], world.ended[1]) == (expected([2] * 3, 4), "length")

    @pytest.mark.parametrize("ending", [{}, {"reason": "stop", "error": "both"}])
    def test_an_ending_is_a_reason_or_an_error(self, make_world: MakeWorld, ending: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="a reason or with an error"):
            make_world().scheduler.finish(1, **ending)

    def test_logits_that_cannot_be_sampled_end_that_request_only(
        self, make_world: MakeWorld, expected: Expected
    ) -> None:
        world = make_world()
        world.add(1, [1] * 5)
        world.add(2, [2] * 5)
        world.failing[1] = "NaN logits"
        world.run()
        assert world.ended == {1: "NaN logits", 2: "length"}
        assert world.outputs == {1: [], 2: expected([2] * 5, 4)}

    def test_pages_behind_unusable_logits_are_not_published(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, [1] * 5)
        world.failing[1] = "NaN logits"
        world.run()
        assert world.scheduler.stats().pages_cached == 0

    def test_a_failed_step_ends_its_requests_and_nobody_else(self, make_world: MakeWorld, expected: Expected) -> None:
        world = make_world(max_num_seqs=2)
        for request_id in (1, 2, 3):
            world.add(request_id, [request_id] * 5)
        world.scheduler.schedule()
        world.scheduler.finish(2, "cancelled")
        for update in world.scheduler.abandon("kernel failed"):
            world.note(update)
        assert world.ended == {1: "kernel failed", 2: "cancelled"}
        assert world.scheduler.stats().pages_owned == 0
        assert world.scheduler.num_steps == 1
        world.run()
        assert world.outputs[3] == expected([3] * 5, 4)

    def test_ending_everything(self, make_world: MakeWorld) -> None:
        world = make_world(max_num_seqs=2)
        for request_id in (1, 2, 3):
            world.add(request_id, [request_id] * 5)
        world.scheduler.schedule()
        world.scheduler.finish(1, "cancelled")
        for update in world.scheduler.end_all("closed"):
            world.note(update)
        assert world.ended == {1: "cancelled", 2: "closed", 3: "closed"}
        assert world.scheduler.stats().pages_owned == 0
        assert world.step() is None


class TestProtocol:
    def test_a_step_must_be_committed_before_the_next(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, [1])
        world.scheduler.schedule()
        with pytest.raises(StepMismatch, match="step 1 is still in flight"):
            world.scheduler.schedule()

    def test_nothing_can_be_committed_or_abandoned_twice(self, make_world: MakeWorld) -> None:
        world = make_world()
        world.add(1, [1])
        plan = world.scheduler.schedule()
        result = world.execute(plan)
        world.scheduler.commit(result)
        with pytest.raises(StepMismatch, match="step 1 is not in flight"):
            world.scheduler.commit(result)
        with pytest.raises(StepMismatch, match="no step is in flight"):
            world.scheduler.abandon("late")

    def test_a_result_that_does_not_match_changes_nothing(self, make_world: MakeWorld, expected: Expected) -> None:
        world = make_world()
        world.add(1, [1] * 3)
        world.add(2, [2] * 3)
        plan = world.scheduler.schedule()
        wrong_order = (SampledToken(2, 0), SampledToken(1, 0))
        for sampled in ((), wrong_order, (*wrong_order, SampledToken(3, 0))):
            with pytest.raises(StepMismatch, match=r"must sample for requests \[1, 2\]"):
                world.scheduler.commit(StepResult(plan.step_id, sampled, 0.0))
        world.commit(plan)
        world.run()
        assert world.outputs == {1: expected([1] * 3, 4), 2: expected([2] * 3, 4)}


class TestTimes:
    def test_queue_prefill_decode_and_first_token(self, make_world: MakeWorld) -> None:
        world = make_world(max_chunk=3)
        world.now = 1.0
        world.add(1, [1] * 6, max_tokens=2)
        for world.now in (3.0, 10.0, 25.0):
            world.step()
        request = world.requests[1]
        assert (request.arrival_time, request.first_token_time) == (1.0, 10.0)
        assert (request.queue_s, request.prefill_s, request.decode_s, request.stall_s) == (2.0, 7.0, 15.0, 0.0)


def test_debug_is_on_when_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
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
