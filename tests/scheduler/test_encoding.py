"""Texts to encode together with sequences: batches, stages, shares of a step, fairness, and all endings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from quire.scheduler import (
    DEADLINE_PASSED,
    CannotMeetDeadline,
    Coefficients,
    CostModel,
    DuplicateRequest,
    EncodedText,
    EncodeRequest,
    EncoderResult,
    EncoderStep,
    EncodeSpec,
    EngineLoop,
    Fair,
    LatencyBudget,
    NotAccepting,
    QueueFull,
    RequestUpdate,
    StepMismatch,
    StepPlan,
    StepResult,
)
from quire.scheduler.encoding import ENCODER_SHARE, NOT_FINITE

from tests.scheduler.conftest import SchedulerHarness

STAGE_S = 0.001  # time of one token
COST = Coefficients(step=0.01, decode_row=0.001, prefill_token=0.001, kv_token=0, prefill_pair=0)


class FakeEncoder:
    """Limits of an encoder whose stages take `stage_s` per token."""

    def __init__(self, max_rows: int = 8, num_stages: int = 4, stage_s: float = 0.0) -> None:
        self.max_rows = max_rows
        self.max_texts = 30
        self.num_stages = num_stages
        self.stage_s = stage_s

    def stage_seconds(self, tokens: int, pairs: int) -> float:
        return self.stage_s * tokens


class EncoderHarness(SchedulerHarness):
    """A scheduler with an encoder whose values of a text are its token ids."""

    def __init__(self, encoder: FakeEncoder | None = None, **options: Any) -> None:
        super().__init__(encoder=encoder or FakeEncoder(), **options)
        self.values: dict[int, tuple[bytes, ...]] = {}
        self.batches: list[list[tuple[int, ...]]] = []  # token ids of each batch's texts
        self.stages: list[int] = []  # stages of each step
        self.slowness = 1.0  # measured to predicted time of the encoder
        self._texts: tuple[EncodedText, ...] = ()

    def encode(self, request_id: int, *texts: Sequence[int], **options: Any) -> Any:
        encoded = tuple(EncodedText(tuple(text)) for text in texts)
        return self.scheduler.add_encoding(EncodeRequest(EncodeSpec(request_id, encoded, **options)))

    def encoded(self, plan: StepPlan, error: str | None = None) -> tuple[EncoderResult, ...]:
        return tuple(self._encoded(part, None if index else error) for index, part in enumerate(plan.encoder))

    def _encoded(self, part: EncoderStep, error: str | None) -> EncoderResult:
        self.stages.append(part.num_stages)
        if part.texts:
            self._texts = part.texts
            self.batches.append([text.token_ids for text in part.texts])
        seconds = self.slowness * STAGE_S * part.num_stages
        if not part.is_last or error is not None:
            return EncoderResult(seconds, error=error)
        return EncoderResult(
            seconds, tuple(None if 99 in text.token_ids else bytes(text.token_ids) for text in self._texts)
        )

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        return StepResult(result.step_id, result.sampled, result.duration_s, self.encoded(plan))

    def note(self, update: RequestUpdate) -> None:
        if update.request_id in self.requests:
            super().note(update)
        else:
            assert update.request_id not in self.ended, "each request ends once"
            self.ended[update.request_id] = update.error or str(update.finish_reason)
            self.values[update.request_id] = update.values


def test_a_request_ends_with_the_values_of_its_texts_in_order():
    harness = EncoderHarness()
    harness.encode(1, [1, 2], [3], [4, 5, 6])
    assert harness.scheduler.has_work
    harness.run()
    assert harness.values == {1: (b"\1\2", b"\3", b"\4\5\6")}
    assert harness.ended == {1: "stop"}
    assert not harness.scheduler.has_work
    stats = harness.scheduler.stats().encoder
    assert (stats.texts, stats.tokens, stats.waiting, stats.running) == (3, 6, 0, 0)


def test_batches_take_texts_of_several_requests_up_to_the_rows():
    harness = EncoderHarness(FakeEncoder(max_rows=4))
    harness.encode(1, [1, 2], [3, 4, 5])
    harness.encode(2, [6], [7, 8, 9, 10])
    harness.run()
    assert harness.batches == [[(1, 2)], [(3, 4, 5), (6,)], [(7, 8, 9, 10)]]
    assert harness.values == {1: (b"\1\2", b"\3\4\5"), 2: (b"\6", b"\7\b\t\n")}


def test_a_batch_has_so_many_texts_at_most():
    harness = EncoderHarness(FakeEncoder(max_rows=100))
    harness.encode(1, *[[7]] * 40)
    harness.run()
    assert list(map(len, harness.batches)) == [30, 10]


def test_alone_a_step_runs_as_many_stages_as_fit_a_twentieth_of_a_second():
    harness = EncoderHarness(FakeEncoder(max_rows=8, num_stages=30, stage_s=STAGE_S * 5))
    harness.encode(1, [1], [2])
    harness.run()
    assert harness.stages[0] == 5
    assert sum(harness.stages) == 30
    assert harness.ended == {1: "stop"}


def test_a_step_runs_several_batches_while_their_stages_fit():
    harness = EncoderHarness(FakeEncoder(max_rows=1, num_stages=2, stage_s=0.01))
    harness.slowness = 10.0
    harness.encode(1, *[[7]] * 4)
    harness.step()
    assert harness.stages == [2, 2, 1]  # steps of 50 ms
    assert len(harness.batches) == 3
    harness.run()
    assert harness.stages == [2, 2, 1, 1, 2]
    assert harness.values == {1: (b"\7",) * 4}


def test_a_step_runs_eight_batches_at_most():
    harness = EncoderHarness(FakeEncoder(max_rows=1))
    harness.encode(1, *[[7]] * 20)
    harness.step()
    assert len(harness.batches) == 8
    harness.run()
    assert len(harness.values[1]) == 20


def test_the_measured_time_of_stages_corrects_the_predicted_one():
    harness = EncoderHarness(FakeEncoder(num_stages=2000, stage_s=STAGE_S))
    harness.slowness = 2.0
    harness.encode(1, [1])
    harness.run()
    assert harness.stages[0] == 50
    assert harness.stages[-2] <= 27


def test_one_very_slow_step_changes_the_prediction_little():
    harness = EncoderHarness(FakeEncoder(num_stages=2000, stage_s=STAGE_S))
    harness.encode(1, [1])
    harness.slowness = 1e6
    harness.step()
    harness.slowness = 1.0
    harness.step()
    assert 40 <= harness.stages[1] < 50 == harness.stages[0]


def test_batches_have_fewer_texts_where_stages_take_longer_than_predicted():
    harness = EncoderHarness(FakeEncoder(max_rows=100, num_stages=1, stage_s=STAGE_S))
    harness.slowness = 1e6
    harness.encode(1, *[[7, 7]] * 200)
    harness.run()
    assert max(map(len, harness.batches[-4:])) < len(harness.batches[0]) / 2


def test_the_predicted_wait_counts_the_texts_that_are_left():
    harness = EncoderHarness(FakeEncoder(num_stages=2, stage_s=0.05))
    harness.encode(1, [1])
    harness.run()
    assert harness.stages == [1, 1]  # steps of 1 ms each: 500 tokens per second
    assert harness.encode(2, [1] * 4, [2]).predicted_wait_s == pytest.approx(5 / 500)
    harness.scheduler.finish(2, "cancelled")
    assert harness.encode(3, [1]).predicted_wait_s == pytest.approx(1 / 500)


def _decoding(harness: EncoderHarness, count: int) -> None:
    """Have `count` sequences decode."""
    for request_id in range(100, 100 + count):
        harness.add(request_id, [1], max_tokens=4)
    harness.step()


def _target_harness(target_s: float, **encoder: Any) -> EncoderHarness:
    cost = CostModel(COST)
    budget = LatencyBudget(cost, target_s, 64)
    return EncoderHarness(FakeEncoder(**encoder), budget=budget, cost=cost, num_pages=64)


def test_the_predicted_wait_is_that_of_tokens_not_of_texts():
    harness = EncoderHarness(FakeEncoder(max_rows=4))
    harness.encode(1, [1, 2, 3, 4])
    harness.run()  # 4 tokens in 4 stages of a millisecond
    assert harness.encode(2, [1] * 4, [1] * 2).predicted_wait_s == pytest.approx(0.006)


def test_beside_decoding_the_encoder_gets_what_is_left_under_the_target():
    harness = _target_harness(0.04, num_stages=100, stage_s=STAGE_S)
    _decoding(harness, 4)
    harness.encode(1, [1])
    plan = harness.step()
    assert plan is not None
    assert plan.num_decode_rows == 4
    assert harness.stages == [22]  # 0.9 * 40 ms - (10 ms + 4 * 1 ms)


def test_prefill_and_the_encoder_share_what_is_left():
    harness = _target_harness(0.06, num_stages=100, stage_s=STAGE_S)
    _decoding(harness, 4)
    harness.encode(1, [1])
    harness.add(200, list(range(50)), max_tokens=2)
    plan = harness.step()
    assert plan is not None
    assert plan.num_prefill_tokens == 20
    assert harness.stages == [20]


def test_where_decoding_takes_all_of_the_target_the_encoder_gets_its_least_share():
    harness = _target_harness(0.0201, num_stages=100, stage_s=STAGE_S)
    _decoding(harness, 8)
    harness.encode(1, [1])
    harness.step()
    assert harness.stages == [int(0.018 * ENCODER_SHARE / (1 - ENCODER_SHARE) / STAGE_S)]


def test_one_stage_runs_in_every_step_however_long_it_takes():
    harness = _target_harness(0.001, num_stages=3, stage_s=10.0)
    _decoding(harness, 8)
    harness.encode(1, [1])
    for _ in range(3):
        harness.step()
    assert harness.stages == [1, 1, 1]
    assert harness.ended[1] == "stop"


def test_without_a_target_the_encoder_gets_the_time_of_the_sequences():
    cost = CostModel(COST)
    harness = EncoderHarness(FakeEncoder(num_stages=100, stage_s=STAGE_S), cost=cost)
    _decoding(harness, 5)
    harness.encode(1, [1])
    harness.step()
    assert harness.stages == [15]


def test_beside_decoding_a_batch_has_so_few_texts_that_a_stage_fits():
    harness = _target_harness(0.04, max_rows=1000, num_stages=2, stage_s=STAGE_S)
    _decoding(harness, 4)
    harness.encode(1, *[[7]] * 200)
    harness.step()
    assert 19 <= len(harness.batches[0]) <= 25  # 22 ms; predicted every eighth more rows


def test_decoding_goes_on_in_every_step_of_a_batch_with_the_same_tokens():
    alone = EncoderHarness()
    beside = EncoderHarness(FakeEncoder(num_stages=20, stage_s=1.0))
    for harness in (alone, beside):
        harness.add(1, [1, 2, 3], max_tokens=12)
    beside.encode(2, [1], [2])
    alone.run()
    beside.run()
    assert beside.outputs[1] == alone.outputs[1]
    assert beside.values[2] == (b"\1", b"\2")


def test_tenants_share_batches_fairly():
    harness = EncoderHarness(FakeEncoder(max_rows=10), encoder_policy=Fair(credit_tokens=0))
    harness.encode(1, *[[1]] * 50, tenant="flood")
    harness.encode(2, *[[2]] * 10, tenant="other")
    harness.run()
    of_each = [(batch.count((1,)), batch.count((2,))) for batch in map(list, harness.batches)]
    assert of_each == [(5, 5), (5, 5), (10, 0), (10, 0), (10, 0), (10, 0)]


def test_a_text_without_finite_values_ends_its_request_alone():
    harness = EncoderHarness()
    harness.encode(1, [1], [99], [2])
    harness.encode(2, [3])
    harness.run()
    assert harness.ended == {1: NOT_FINITE, 2: "stop"}
    assert harness.values == {1: (), 2: (b"\3",)}


def test_an_error_of_the_encoder_ends_its_batch_and_no_sequence():
    harness = EncoderHarness(FakeEncoder(max_rows=1))
    harness.add(1, [1, 2], max_tokens=3)
    harness.encode(2, [1])
    harness.encode(3, [2])
    plan = harness.scheduler.schedule()
    assert plan is not None
    result = SchedulerHarness.execute(harness, plan)
    broken = StepResult(result.step_id, result.sampled, result.duration_s, harness.encoded(plan, error="broken"))
    for update in harness.scheduler.commit(broken):
        harness.note(update)
    harness.run()
    assert harness.ended == {1: "length", 2: "broken", 3: "stop"}


def test_a_failed_step_ends_its_batch_too():
    harness = EncoderHarness()
    harness.encode(1, [1])
    assert harness.scheduler.schedule() is not None
    (update,) = harness.scheduler.abandon("lost")
    assert (update.request_id, update.error) == (1, "lost")
    assert not harness.scheduler.has_work


def test_a_result_without_the_encoders_part_is_refused():
    harness = EncoderHarness()
    harness.encode(1, [1])
    plan = harness.scheduler.schedule()
    assert plan is not None
    with pytest.raises(StepMismatch, match="encoder"):
        harness.scheduler.commit(StepResult(plan.step_id, (), 0.0))


def test_cancelling_frees_the_queue_at_once_also_during_a_step():
    harness = EncoderHarness(FakeEncoder(max_rows=2, num_stages=4, stage_s=1.0), max_num_waiting=2)
    harness.encode(1, [1], [2], [3], [4], tenant="a")
    plan = harness.scheduler.schedule()
    assert plan is not None
    update = harness.scheduler.finish(1, "cancelled")
    assert update is not None
    assert update.finish_reason == "cancelled"
    assert update.values == ()
    assert harness.scheduler.stats().encoder.waiting == 0
    assert harness.scheduler.commit(harness.execute(plan)) == []
    assert harness.step() is None  # the rest of the batch is not computed
    harness.encode(2, [5])
    harness.encode(3, [6])
    harness.run()
    assert harness.ended == {2: "stop", 3: "stop"}


def test_a_batch_goes_on_without_the_requests_that_were_cancelled():
    harness = EncoderHarness(FakeEncoder(num_stages=20, stage_s=0.01))
    harness.encode(1, [1])
    harness.encode(2, [2])
    harness.step()
    assert harness.batches == [[(1,), (2,)]]
    harness.scheduler.finish(1, "cancelled")
    harness.run()
    assert harness.values == {2: (b"\2",)}


def test_the_limits_of_the_queue_count_texts_and_prompts_together():
    harness = EncoderHarness(max_num_waiting=3, max_num_waiting_per_tenant=2)
    harness.encode(1, [1], tenant="a")
    harness.add(2, [1], tenant="a")
    for add in (harness.encode, harness.add):
        with pytest.raises(QueueFull, match="2 requests of this tenant are waiting, the limit is 2"):
            add(3, [1], tenant="a")
    harness.encode(3, [1], tenant="b")
    with pytest.raises(QueueFull, match="3 requests are waiting, the limit is 3"):
        harness.encode(4, [1], tenant="c")
    harness.encode(4, [1], tenant="c", is_continuation=True)
    with pytest.raises(DuplicateRequest):
        harness.encode(4, [1], tenant="c", is_continuation=True)
    with pytest.raises(DuplicateRequest):
        harness.add(3, [1], tenant="c")


def test_a_deadline_ends_a_request_and_one_that_cannot_be_met_refuses_it():
    harness = EncoderHarness(FakeEncoder(max_rows=1, num_stages=1, stage_s=0.05))  # one batch per step
    harness.encode(1, *[[1]] * 3, deadline=5.0)
    harness.step()
    harness.now = 5.0
    (update,) = harness.scheduler.expire()
    assert (update.request_id, update.error) == (1, DEADLINE_PASSED)
    with pytest.raises(CannotMeetDeadline, match="deadline"):
        harness.encode(2, *[[1]] * 100, deadline=5.05)  # 1000 tokens per second were measured
    harness.encode(2, [1], deadline=5.05)
    harness.run()
    assert harness.ended == {2: "stop"}


def test_a_request_without_tokens_is_a_bug_of_the_caller():
    for texts in ((), (EncodedText(()),)):
        with pytest.raises(ValueError, match="at least 1"):
            EncodeRequest(EncodeSpec(1, texts))


async def test_the_loop_runs_drains_and_closes_with_texts():
    harness = EncoderHarness(FakeEncoder(num_stages=3, stage_s=1.0))
    gate = asyncio.Event()

    async def execute(plan: StepPlan) -> StepResult:
        await gate.wait()
        return harness.execute(plan)

    loop = EngineLoop(
        harness.scheduler, execute, lambda updates: [harness.note(each) for each in updates] and None, lambda _: None
    )
    loop.start()
    for request_id in (1, 2):
        loop.add_encoding(EncodeRequest(EncodeSpec(request_id, (EncodedText((request_id,)),))))
    loop.cancel(2)
    assert harness.ended == {2: "cancelled"}
    gate.set()
    async with asyncio.timeout(60):
        await loop.drain()
    assert harness.ended == {1: "stop", 2: "cancelled"}
    more = EncodeSpec(3, (EncodedText((3,)),))
    with pytest.raises(NotAccepting):
        loop.add_encoding(EncodeRequest(more))
    gate.clear()
    loop.add_encoding(EncodeRequest(EncodeSpec(3, (EncodedText((3,)),), is_continuation=True)))
    closing = asyncio.create_task(loop.close("closed"))
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(60):
        await closing
    assert harness.ended[3] == "closed"
    with pytest.raises(NotAccepting):
        loop.add_encoding(EncodeRequest(EncodeSpec(4, (EncodedText((3,)),), is_continuation=True)))
