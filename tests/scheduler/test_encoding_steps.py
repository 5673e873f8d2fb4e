"""Which stages and texts a step has: their numbers, times, pairs and shares, and what predictions learn from them."""

from __future__ import annotations

import pytest
from quire.scheduler import CostModel, EncodedText, EncodeRequest, EncoderStats, EncodeSpec, StepResult
from quire.scheduler.encoding import NOT_FINITE

from tests.scheduler.conftest import SchedulerHarness
from tests.scheduler.test_encoding import COST, STAGE_S, EncoderHarness, FakeEncoder


def test_each_step_has_the_next_number_whatever_it_computes():
    harness = EncoderHarness(FakeEncoder(stage_s=0.05))
    harness.encode(1, [1])
    numbers = [harness.step().step_id for _ in range(2)]
    harness.add(2, [1, 2], max_tokens=2)
    numbers += [harness.step().step_id for _ in range(2)]
    assert numbers == [1, 2, 3, 4]


def test_texts_alone_get_their_own_time_after_sequences_too():
    harness = EncoderHarness(FakeEncoder(num_stages=100, stage_s=STAGE_S), cost=CostModel(COST))
    harness.add(1, [1, 2], max_tokens=3)
    harness.run()
    harness.encode(2, [1])
    harness.run()
    assert harness.stages == [50, 50]


def test_a_stage_fits_if_it_exceeds_a_step_by_a_tenth_of_its_time():
    for stage_s, stages in ((0.0168, [3, 3]), (0.0173, [2, 2, 2])):
        harness = EncoderHarness(FakeEncoder(num_stages=6, stage_s=stage_s))
        harness.slowness = stage_s / STAGE_S
        harness.encode(1, [1])
        harness.run()
        assert harness.stages == stages


def test_the_texts_of_a_batch_are_sent_with_its_first_stages_and_its_values_come_with_the_last():
    harness = EncoderHarness(FakeEncoder(num_stages=3, stage_s=0.02))
    harness.encode(1, [1], [2])
    sent = []
    while (plan := harness.step()) is not None:
        sent += [([text.token_ids for text in part.texts], part.is_last) for part in plan.encoder]
    assert sent == [([(1,), (2,)], False), ([], False), ([], True)]


def test_a_batch_whose_requests_were_all_cancelled_gives_way_at_once():
    harness = EncoderHarness(FakeEncoder(num_stages=4, stage_s=0.05))
    harness.encode(1, [1])
    harness.step()
    harness.cancel(1)
    harness.encode(2, [2])
    plan = harness.step()
    assert [[text.token_ids for text in part.texts] for part in plan.encoder] == [[(2,)]]
    harness.run()
    assert harness.values == {1: (), 2: (b"\2",)}


def test_the_time_of_a_stage_is_learned_from_all_stages_of_a_step():
    harness = EncoderHarness(FakeEncoder(num_stages=50, stage_s=STAGE_S))
    for request_id in range(20):
        harness.encode(request_id, [1])
        harness.run()
    assert harness.stages == [50] * 20


def test_the_pairs_of_long_texts_count_in_the_time_of_a_batch():
    class Quadratic(FakeEncoder):
        def stage_seconds(self, tokens: int, pairs: int) -> float:
            return self.stage_s * pairs

    harness = EncoderHarness(Quadratic(max_rows=100, stage_s=STAGE_S))
    harness.encode(1, *[[1] * 4] * 6)
    harness.run()
    assert [len(batch) for batch in harness.batches] == [3, 3]  # 48 ms each; a step has 50


def test_a_long_text_does_not_join_short_ones_whose_stages_fit_several_times():
    encoder = FakeEncoder(max_rows=100, stage_s=STAGE_S)
    encoder.max_texts = 2
    harness = EncoderHarness(encoder)
    harness.encode(1, [1] * 4, [2] * 30)
    harness.run()
    assert [len(batch) for batch in harness.batches] == [1, 1]


def test_a_text_without_finite_values_ends_once_and_is_not_counted():
    harness = EncoderHarness()
    harness.encode(1, [99])
    harness.run()
    assert harness.ended == {1: NOT_FINITE}
    assert harness.scheduler.stats().encoder.texts == 0


def test_a_request_that_was_cancelled_does_not_fail_with_its_batch():
    harness = EncoderHarness()
    harness.encode(1, [1])
    harness.encode(2, [2])
    plan = harness.scheduler.schedule()
    harness.cancel(1)
    for update in harness.scheduler.commit(StepResult(plan.step_id, (), 0.0, harness.encoded(plan, "broken"))):
        harness.note(update)
    assert harness.ended == {1: "cancelled", 2: "broken"}


def test_the_predicted_wait_follows_the_speed_of_batches_slowly():
    harness = EncoderHarness()
    for slowness in (1.0, 2.0):
        harness.slowness = slowness
        harness.encode(int(slowness), [1])
        harness.run()
    estimate = harness.encode(3, [1])
    assert estimate.predicted_wait_s == pytest.approx(1 / (0.9 * 250 + 0.1 * 125))  # a batch of four stages of 1 ms


def test_the_predicted_wait_forgets_what_a_cancelled_request_still_had():
    harness = EncoderHarness(FakeEncoder(max_rows=2, stage_s=0.05))
    harness.encode(1, [1])
    harness.run()
    harness.encode(2, [1, 2], [3, 4])
    harness.step()  # takes the first text
    harness.cancel(2)
    assert harness.encode(3, [5]).predicted_wait_s == pytest.approx(1 / 250)


def test_beside_a_prompt_the_encoder_gets_the_time_that_the_prompt_takes():
    harness = EncoderHarness(FakeEncoder(num_stages=100, stage_s=STAGE_S), cost=CostModel(COST))
    harness.add(1, [1] * 20, max_tokens=2)
    harness.encode(2, [1])
    harness.step()
    assert harness.stages == [30]  # 10 ms and 1 ms for each token of the prompt


def test_a_request_waits_until_all_its_texts_are_in_a_batch():
    harness = EncoderHarness(FakeEncoder(max_rows=2, stage_s=0.05))
    estimates = [harness.encode(1, [1, 2]), harness.encode(2, [3, 4], [5, 6])]
    counts = []
    for _ in range(3):
        stats = harness.scheduler.stats().encoder
        counts.append((stats.waiting, stats.running))
        harness.step()
    assert counts == [(2, 0), (1, 1), (1, 1)]
    estimates.append(harness.encode(3, [7]))
    assert [estimate.position for estimate in estimates] == [0, 1, 1]


def test_a_request_waits_until_its_first_text_is_in_a_batch():
    harness = EncoderHarness(FakeEncoder(max_rows=1, num_stages=2, stage_s=0.05))
    harness.step_s = 2.0
    harness.slowness = 50
    harness.encode(1, [1], [2])
    harness.now = 3.0
    updates = []
    while (plan := harness.scheduler.schedule()) is not None:
        updates += harness.commit(plan)
    (end,) = updates
    assert end.counters.seconds_in == (3.0, 8.0, 0.0, 0.0, 0.0)  # four steps: two stages of two batches


def test_a_stage_is_made_for_as_many_texts_as_the_rows_of_a_batch_allow():
    """Two texts of 4 tokens fit, and five stages of both fit the step: a third text would leave time for four only."""
    harness = EncoderHarness(FakeEncoder(max_rows=10, num_stages=5, stage_s=0.00124))
    harness.encode(1, [1] * 4, [2] * 4, [3] * 2)
    harness.run()
    assert [len(batch) for batch in harness.batches] == [2, 1]


def test_a_scheduler_without_an_encoder_refuses_texts_and_plans_none():
    harness = SchedulerHarness()
    texts = EncodeRequest(EncodeSpec(1, (EncodedText((1,)),)))
    for call in (harness.scheduler.add_encoding, harness.scheduler.readmit):
        with pytest.raises(ValueError, match="this scheduler has no encoder"):
            call(texts)
    assert not harness.scheduler.has_work
    assert harness.scheduler.schedule() is None
    harness.add(1, [1, 2], max_tokens=1)
    assert harness.step().encoder == ()
    assert harness.scheduler.stats().encoder == EncoderStats(waiting=0, running=0, texts=0, tokens=0)
