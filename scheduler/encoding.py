"""The encoder's part of a step: which texts form a batch, and how many stages of it the step runs.

Must not import sequences' requests, pages or budgets. One batch of texts is in progress at a time. It advances by
stages (about a layer each), so that sequences decode between two of them:

* Beside sequences with a latency target, the batch gets the time that is left under it, and at least `ENCODER_SHARE` of
  the step. Without a target it gets as much time as the sequences take.
* Alone it gets `ALONE_S` per step, so that a sequence that arrives does not wait for the end of a long batch.

A text's values do not depend on the other texts of its batch, nor on how stages are divided among steps.
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
from .request import EncodeRequest, Ending, FinalCounters, RequestUpdate, State

ENCODER_SHARE = 0.1  # least share of a step beside sequences that a batch in progress gets
ALONE_S = 0.05  # seconds of a step without sequences
RATIO_MEMORY = 0.9  # weight of earlier steps in the ratio of measured to predicted time
MAX_RATIO = 8.0  # of one step; beyond it other processes are the cause
NOT_FINITE = "the model's values for a text are not finite numbers"


class EncoderLimits(Protocol):
    """What the scheduler knows of an encoder."""

    max_rows: int  # tokens of a batch
    max_texts: int  # of a batch
    num_stages: int  # of a batch

    def stage_seconds(self, lengths: Sequence[int]) -> float:
        """Return the predicted seconds of one stage of a batch with texts of these numbers of tokens."""


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """Counters and gauges of one encoder."""

    waiting: int = 0  # requests with texts that are in no batch yet
    running: int = 0  # requests whose texts are all in a batch, or done
    texts: int = 0  # encoded
    tokens: int = 0  # of them


class _Place(NamedTuple):
    """A text of the batch in progress."""

    request: EncodeRequest
    text: EncodedText


class EncoderPlanner:
    """Encode requests, from `add` to their last update. `plan` and `commit` alternate."""

    def __init__(
        self,
        limits: EncoderLimits,
        policy: Policy[EncodeRequest],
        cost: CostModel,
        count_waiting: Callable[[str, int], None],
    ) -> None:
        """`count_waiting(tenant, amount)` is called when requests of a tenant begin (1) or cease (-1) to wait."""
        self.requests: dict[int, EncodeRequest] = {}  # that have not ended, in order of arrival
        self._limits = limits
        self._policy = policy
        self._cost = cost
        self._count_waiting = count_waiting
        self._waiting_tokens = 0
        self._batch: list[_Place] = []
        self._num_stages_left = 0
        self._ratio = 1.0  # measured to predicted time of a stage
        self._rate: float | None = None  # tokens per second; None until a batch has ended
        self._batch_s = 0.0  # spent on the batch in progress
        self._planned_s = 0.0  # predicted for the step in flight, before `_ratio`
        self._num_texts = 0
        self._num_tokens = 0

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
        """Return what the request can expect. Raises CannotMeetDeadline."""
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
        counters = FinalCounters(tuple(request.seconds_in), 0, 0, ())
        values = tuple(request.values) if ending.reason == "stop" else ()
        return RequestUpdate(request.request_id, (), *ending, counters, values)

    def plan(self, load: StepLoad, seconds_left: float | None, now: float) -> EncoderStep | None:
        """Return the encoder's part of a step whose sequences are `load`; None if there is none.

        `seconds_left` are left under the latency target; None if it does not limit the step.
        """
        if not any(place.request.state is not State.ENDED for place in self._batch):
            self._batch = []
        if not self._batch and not len(self._policy):
            return None
        seconds = self._seconds(load, seconds_left)
        texts: tuple[EncodedText, ...] = ()
        if not self._batch:
            self._fill_batch(seconds, now)
            texts = tuple([place.text for place in self._batch])
        stage_s = self._limits.stage_seconds(self._lengths())
        fitting = self._num_stages_left
        if stage_s > 0:
            fitting = max(1, int(min(seconds / (stage_s * self._ratio), self._num_stages_left)))
        self._num_stages_left -= fitting
        self._planned_s = fitting * stage_s
        ids = tuple(dict.fromkeys(place.request.request_id for place in self._batch))
        return EncoderStep(texts, fitting, self._num_stages_left == 0, ids)

    def commit(self, result: EncoderResult, now: float) -> list[RequestUpdate]:
        """Take the result of the step's part. Return the last updates of the requests that ended."""
        if result.error is not None:
            return self.abandon(result.error, now)
        self._learn(result.duration_s)
        if self._num_stages_left:
            return []
        batch, self._batch = self._batch, []
        self._note_rate(batch)
        updates = []
        for place, values in zip(batch, result.values, strict=True):
            request = place.request
            if request.state is State.ENDED:
                continue
            if values is None:
                updates.append(self.end(request, Ending(error=NOT_FINITE), now))
                continue
            self._num_texts += 1
            self._num_tokens += len(place.text.token_ids)
            request.values.append(values)
            if len(request.values) == len(request.spec.texts):
                updates.append(self.end(request, Ending("stop"), now))
        return updates

    def abandon(self, error: str, now: float) -> list[RequestUpdate]:
        """End all requests of the batch in progress with `error`."""
        batch, self._batch = self._batch, []
        requests = dict.fromkeys(place.request for place in batch if place.request.state is not State.ENDED)
        return [self.end(request, Ending(error=error), now) for request in requests]

    # Helpers

    def _seconds(self, load: StepLoad, seconds_left: float | None) -> float:
        """Return the seconds that the batch may take of a step."""
        if not load.decode_rows and not load.prefill_tokens:
            return ALONE_S
        sequences_s = self._cost.predict(load)
        if seconds_left is None:
            return sequences_s
        return max(seconds_left, sequences_s * ENCODER_SHARE / (1 - ENCODER_SHARE))

    def _fill_batch(self, seconds: float, now: float) -> None:
        """Begin a batch: texts in the policy's order, within the rows, and so few that a stage fits the seconds."""
        rows = next_check = 0
        lengths: list[int] = []
        while (request := self._policy.head()) is not None:
            text = request.spec.texts[request.num_taken]
            num_tokens = len(text.token_ids)
            if lengths and (rows + num_tokens > self._limits.max_rows or len(lengths) == self._limits.max_texts):
                break
            if lengths and rows >= next_check:
                next_check = rows + rows // 8 + 1  # predicting takes a pass over all lengths
                if self._limits.stage_seconds([*lengths, num_tokens]) * self._ratio > seconds:
                    break
            rows += num_tokens
            lengths.append(num_tokens)
            self._take(request, text, now)
        self._num_stages_left = self._limits.num_stages
        self._batch_s = 0.0

    def _take(self, request: EncodeRequest, text: EncodedText, now: float) -> None:
        self._batch.append(_Place(request, text))
        num_tokens = len(text.token_ids)
        self._waiting_tokens -= num_tokens
        self._policy.served(request, num_tokens, 0)
        if request.state is State.WAITING:
            request.enter(State.PREFILL, now)
        request.num_taken += 1
        if request.num_taken == len(request.spec.texts):
            self._leave_queue(request)

    def _leave_queue(self, request: EncodeRequest) -> None:
        self._policy.remove(request)
        self._count_waiting(request.spec.tenant, -1)

    def _lengths(self) -> list[int]:
        return [len(place.text.token_ids) for place in self._batch]

    def _learn(self, seconds: float) -> None:
        self._batch_s += seconds
        if self._planned_s > 0 and seconds > 0:
            ratio = min(max(seconds / self._planned_s, 1 / MAX_RATIO), MAX_RATIO)
            self._ratio = math.exp(RATIO_MEMORY * math.log(self._ratio) + (1 - RATIO_MEMORY) * math.log(ratio))

    def _note_rate(self, batch: Sequence[_Place]) -> None:
        if self._batch_s > 0:
            rate = sum(len(place.text.token_ids) for place in batch) / self._batch_s
            self._rate = rate if self._rate is None else RATIO_MEMORY * self._rate + (1 - RATIO_MEMORY) * rate


def _num_tokens(request: EncodeRequest) -> int:
    """Return the tokens of the request's texts that are in no batch yet."""
    return sum(len(text.token_ids) for text in request.spec.texts[request.num_taken :])
