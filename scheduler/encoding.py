"""The encoder's part of a step: which texts form a batch, and how many stages of which batches the step runs.

Must not import sequences' requests, pages or budgets. Batches run one after another. A batch advances by stages (about
a layer each), so that sequences decode between two of them:

* While sequences decode under a latency target, batches get the time that is left under it, and at least
  `ENCODER_SHARE` of the step. A new batch has the number of texts for which whole stages fill that time best. Without a
  target, batches get as much time as the sequences take.
* Without sequences, batches get `ALONE_S` per step, so that a new sequence does not wait for the end of a long batch.

A text's values depend neither on the other texts of its batch nor on the division of stages among steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .admission import AdmissionEstimate, CannotMeetDeadline
from .cost import CostModel, StepLoad
from .plan import EncodedText, EncoderResult, EncoderStep
from .policy import Policy
from .request import EncodeRequest, Ending, RequestUpdate, State

ENCODER_SHARE = 0.1  # least share of a step with sequences for a batch in progress
ALONE_S = 0.05  # seconds of a step without sequences
RATIO_MEMORY = 0.9  # weight of earlier steps in the ratio of measured to predicted time
SLACK = 0.1  # share of a stage by which a step may exceed its seconds: `_ratio` changes a little in every step
MAX_STAGES = 8  # most stages of a new batch in one step: with more, little time is left over
MAX_BATCHES = 8  # batches in one step; a request that arrives waits for all of them
MAX_STEP_RATIO = 8.0  # limit of measured to predicted time in one step; beyond it other processes are the cause
NOT_FINITE = "the model's values for a text are not finite numbers"


class EncoderLimits(Protocol):
    """The limits and costs of an encoder."""

    max_rows: int  # tokens of a batch
    max_texts: int  # most texts in a batch
    num_stages: int  # stages of a batch

    def stage_seconds(self, tokens: int, pairs: int) -> float:
        """Return the predicted seconds of one stage of a batch: its tokens, and its pairs of a query and a key."""


class _NoEncoder:
    """The limits of a scheduler without an encoder: a batch has no texts."""

    max_rows = max_texts = num_stages = 0

    def stage_seconds(self, tokens: int, pairs: int) -> float:
        """Return 0: there are no stages."""
        return 0.0


NO_ENCODER: EncoderLimits = _NoEncoder()


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """Counters and gauges of one encoder."""

    waiting: int = 0  # requests with texts that are in no batch yet
    running: int = 0  # requests whose texts are all in a batch, or done
    texts: int = 0  # encoded texts
    tokens: int = 0  # tokens of the encoded texts


class _BatchText(NamedTuple):
    """A text of a batch, and its request."""

    request: EncodeRequest
    text: EncodedText


@dataclass(slots=True, eq=False)
class _Batch:
    """Texts that are computed together."""

    texts: list[_BatchText]
    num_stages_left: int
    stage_s: float  # predicted, before the correction by measured times
    has_begun: bool = False
    planned_s: float = 0.0  # predicted time of its stages in the step in flight
    measured_s: float = 0.0  # time of all its stages so far

    @property
    def is_wanted(self) -> bool:
        """Whether any of its requests has not ended."""
        return any(each.request.state is not State.ENDED for each in self.texts)


class EncoderPlanner:
    """Encode requests, from `add` to their last update. `plan` and `commit` alternate.

    Without an encoder there are no requests, and steps have no encoder part.
    """

    def __init__(
        self,
        limits: EncoderLimits,
        policy: Policy[EncodeRequest],
        cost: CostModel,
        count_waiting: Callable[[str, int], None],
    ) -> None:
        """`count_waiting(tenant, amount)` is called when requests of a tenant begin (1) or cease (-1) to wait."""
        self.requests: dict[int, EncodeRequest] = {}  # requests that have not ended, in order of arrival
        self._limits = limits
        self._policy = policy
        self._cost = cost
        self._count_waiting = count_waiting
        self._waiting_tokens = 0
        self._batch: _Batch | None = None  # batch that the next step continues
        self._in_flight: list[_Batch] = []  # batches of the latest step
        self._ratio = 1.0  # measured to predicted time of a stage
        self._rate: float | None = None  # tokens per second; None until a batch has ended
        self._num_texts = 0
        self._num_tokens = 0

    @property
    def has_encoder(self) -> bool:
        """Whether texts can be encoded."""
        return self._limits.max_texts > 0

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.requests)

    def stats(self) -> EncoderStats:
        """Return a snapshot."""
        return EncoderStats(
            len(self._policy), len(self.requests) - len(self._policy), self._num_texts, self._num_tokens
        )

    def check_deadline(self, request: EncodeRequest, now: float) -> AdmissionEstimate:
        """Return the prospects of the request. Raises CannotMeetDeadline."""
        wait_s = None if self._rate is None else (self._waiting_tokens + _num_tokens(request)) / self._rate
        estimate = AdmissionEstimate(len(self._policy), 0, 0, wait_s)
        if request.spec.deadline is not None and wait_s is not None and now + wait_s > request.spec.deadline:
            raise CannotMeetDeadline(f"the values are {wait_s:.3g} s away, after the request's deadline", estimate)
        return estimate

    def add(self, request: EncodeRequest) -> None:
        """Queue a request that has arrived."""
        self.requests[request.request_id] = request
        self._policy.push(request)
        self._count_waiting(request.spec.tenant, 1)
        self._waiting_tokens += _num_tokens(request)

    def end(self, request: EncodeRequest, ending: Ending, now: float) -> RequestUpdate:
        """End a request in any state, with its values if it has them all. Return its last update."""
        if request.num_taken < len(request.spec.texts):
            self._waiting_tokens -= _num_tokens(request)
            self._leave_queue(request)
        del self.requests[request.request_id]
        request.finish_reason, request.error = ending
        request.enter(State.ENDED, now)
        values = tuple(request.values) if ending.reason == "stop" else ()
        return RequestUpdate(request.request_id, (), *ending, request.final_counters(), values)

    def end_all(self, error: str, now: float) -> list[RequestUpdate]:
        """End every request with `error`. Return their last updates."""
        return [self.end(request, Ending(error=error), now) for request in tuple(self.requests.values())]

    def plan(self, load: StepLoad, seconds_left: float | None, now: float) -> tuple[EncoderStep, ...]:
        """Return the encoder's part of a step whose sequences are `load`.

        `seconds_left` are left under the latency target; None if it does not limit the step.
        """
        self._in_flight = []
        if not self.requests:
            return ()
        seconds = whole = seconds_beside(load, seconds_left, self._cost)
        steps: list[EncoderStep] = []
        while len(steps) < MAX_BATCHES and (batch := self._next_batch(whole, now)) is not None:
            stage_s = batch.stage_s * self._ratio
            if steps and stage_s > seconds:
                break
            fitting = batch.num_stages_left
            if stage_s > 0:
                fitting = max(1, int(min(seconds / stage_s + SLACK, fitting)))
            steps.append(self._advance(batch, fitting))
            seconds -= fitting * stage_s
            if batch.num_stages_left:
                break
            self._batch = None
        return tuple(steps)

    def commit(self, results: Sequence[EncoderResult], now: float) -> list[RequestUpdate]:
        """Take the results of the step's batches. Return the last updates of the requests that ended."""
        updates: list[RequestUpdate] = []
        for batch, result in zip(self._in_flight, results, strict=True):
            if result.error is not None:
                updates += self._fail(batch, result.error, now)
                continue
            self._learn(batch, result.duration_s)
            if not batch.num_stages_left:
                updates += self._finish(batch, result.values, now)
        return updates

    def abandon(self, error: str, now: float) -> list[RequestUpdate]:
        """End all requests of the failed step's batches with `error`."""
        return [update for batch in self._in_flight for update in self._fail(batch, error, now)]

    # Helpers

    def _next_batch(self, seconds: float, now: float) -> _Batch | None:
        """Return the batch to continue: the one in progress, or a new one."""
        if self._batch is not None and not self._batch.is_wanted:
            self._batch = None
        if self._batch is None and len(self._policy):
            self._batch = self._fill_batch(seconds, now)
        return self._batch

    def _advance(self, batch: _Batch, num_stages: int) -> EncoderStep:
        texts = () if batch.has_begun else tuple([each.text for each in batch.texts])
        batch.has_begun = True
        batch.num_stages_left -= num_stages
        batch.planned_s = num_stages * batch.stage_s
        self._in_flight.append(batch)
        ids = tuple(dict.fromkeys(each.request.request_id for each in batch.texts))
        return EncoderStep(texts, num_stages, batch.num_stages_left == 0, ids)

    def _fill_batch(self, seconds: float, now: float) -> _Batch:
        """Take texts in the policy's order, up to the row limit and the step's time budget."""
        limit_s: float | None = None  # limit of one stage; a text alone needs none
        tokens = pairs = 0
        texts: list[_BatchText] = []
        while (request := self._policy.head()) is not None:
            text = request.spec.texts[request.num_taken]
            length = len(text.token_ids)
            if texts:
                if tokens + length > self._limits.max_rows or len(texts) == self._limits.max_texts:
                    break
                limit_s = self._stage_limit(seconds, tokens) if limit_s is None else limit_s
                if self._stage_s(tokens + length, pairs + length * length) > limit_s:
                    break
            tokens += length
            pairs += length * length
            texts.append(_BatchText(request, text))
            self._take(request, length, now)
        return _Batch(texts, self._limits.num_stages, self._limits.stage_seconds(tokens, pairs))

    def _stage_limit(self, seconds: float, length: int) -> float:
        """Return the seconds that a stage of a batch may take, so that whole stages fill the seconds of a step.

        If all texts have the `length` of the batch's first one, this limit lets a step compute the most texts.
        """
        one_s, two_s = (self._stage_s(count * length, count * length * length) for count in (1, 2))
        most = min(self._limits.max_texts, max(1, self._limits.max_rows // length))
        fitting = {
            stages: min(most, 1 + int((seconds / stages - one_s) / (two_s - one_s)))
            for stages in range(1, MAX_STAGES + 1)
            if two_s > one_s and seconds / stages >= one_s
        }
        if not fitting:
            return seconds
        return seconds / max(fitting, key=lambda stages: stages * fitting[stages])

    def _stage_s(self, tokens: int, pairs: int) -> float:
        """Return the predicted seconds of one stage, corrected by measured times."""
        return self._limits.stage_seconds(tokens, pairs) * self._ratio

    def _take(self, request: EncodeRequest, num_tokens: int, now: float) -> None:
        """Note that the request's next text is in a batch."""
        self._waiting_tokens -= num_tokens
        self._policy.served(request, num_tokens, 0)
        if request.state is State.WAITING:
            request.enter(State.PREFILL, now)
        request.num_taken += 1
        if request.num_taken == len(request.spec.texts):
            self._leave_queue(request)

    def _finish(self, batch: _Batch, values: Sequence[bytes | None], now: float) -> list[RequestUpdate]:
        """Give the texts of a batch their values. Return the last updates of the requests that ended."""
        self._note_rate(batch)
        updates = []
        for (request, text), value in zip(batch.texts, values, strict=True):
            if request.state is State.ENDED:
                continue
            if value is None:
                updates.append(self.end(request, Ending(error=NOT_FINITE), now))
                continue
            self._num_texts += 1
            self._num_tokens += len(text.token_ids)
            request.values.append(value)
            if len(request.values) == len(request.spec.texts):
                updates.append(self.end(request, Ending("stop"), now))
        return updates

    def _fail(self, batch: _Batch, error: str, now: float) -> list[RequestUpdate]:
        """End all requests of a batch with `error`."""
        requests = dict.fromkeys(each.request for each in batch.texts if each.request.state is not State.ENDED)
        return [self.end(request, Ending(error=error), now) for request in requests]

    def _leave_queue(self, request: EncodeRequest) -> None:
        self._policy.remove(request)
        self._count_waiting(request.spec.tenant, -1)

    def _learn(self, batch: _Batch, seconds: float) -> None:
        batch.measured_s += seconds
        if batch.planned_s > 0 and seconds > 0:
            ratio = min(max(seconds / batch.planned_s, 1 / MAX_STEP_RATIO), MAX_STEP_RATIO)
            self._ratio = math.exp(RATIO_MEMORY * math.log(self._ratio) + (1 - RATIO_MEMORY) * math.log(ratio))

    def _note_rate(self, batch: _Batch) -> None:
        if batch.measured_s > 0:
            rate = sum(len(each.text.token_ids) for each in batch.texts) / batch.measured_s
            self._rate = rate if self._rate is None else RATIO_MEMORY * self._rate + (1 - RATIO_MEMORY) * rate


def seconds_beside(load: StepLoad, seconds_left: float | None, cost: CostModel) -> float:
    """Return the seconds that an encoder may use in a step whose sequences are `load`."""
    if not load.decode_rows and not load.prefill_tokens:
        return ALONE_S
    sequences_s = cost.predict(load)
    if seconds_left is None:
        return sequences_s
    return max(seconds_left, sequences_s * ENCODER_SHARE / (1 - ENCODER_SHARE))


def _num_tokens(request: EncodeRequest) -> int:
    """Return the tokens of the request's texts that are in no batch yet."""
    return sum(len(text.token_ids) for text in request.spec.texts[request.num_taken :])
