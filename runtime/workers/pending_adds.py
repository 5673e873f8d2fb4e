"""Requests that an engine process has not answered yet, and their fate when it exits.

Pure, except for the futures of callers. Every caller gets one answer or one error.

A request whose process crashed before it answered is sent to the next process alone: if that crashes too, the request
is the cause.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...scheduler import (
    AdmissionEstimate,
    CannotMeetDeadline,
    NotAccepting,
    PageQuotaExceeded,
    QueuedRequest,
    QueueFull,
    TooLong,
)
from ..common.errors import DeadlineExceeded, Quarantined
from .engine_link import AddAnswer

REFUSALS = {refusal.__name__: refusal for refusal in (QueueFull, CannotMeetDeadline, TooLong, PageQuotaExceeded)}
UNESTIMATED_REFUSALS: dict[str, type[Exception]] = {  # refusals by a host; others are NotAccepting
    refusal.__name__: refusal for refusal in (DeadlineExceeded, Quarantined)
}


@dataclass(slots=True, eq=False)
class PendingAdd:
    """A request, its samples, or texts to encode."""

    requests: Sequence[QueuedRequest]
    answer: asyncio.Future[AddAnswer]
    crash_suspect: bool = False  # the request had been sent to a process that crashed

    @property
    def first_id(self) -> int:
        """The id in the answer."""
        return self.requests[0].request_id


class PendingAdds:
    def __init__(self) -> None:
        self._waiting: deque[PendingAdd] = deque()
        self._sent: dict[int, PendingAdd] = {}  # first_id -> pending add

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sent)

    @property
    def num_sequences(self) -> int:
        return sum(len(pending.requests) for pending in self._all())

    def add(self, requests: Sequence[QueuedRequest]) -> PendingAdd:
        pending = PendingAdd(requests, asyncio.get_running_loop().create_future())
        self._waiting.append(pending)
        return pending

    def send(self) -> Iterator[PendingAdd]:
        """Yield the requests that may be sent now, in order: everything, or one crash suspect alone."""
        while self._waiting and not any(pending.crash_suspect for pending in self._sent.values()):
            pending = self._waiting.popleft()
            self._sent[pending.first_id] = pending
            yield pending

    def answered(self, first_id: int) -> PendingAdd | None:
        """Remove and return the entry of an answer; None if its caller has left."""
        pending = self._sent.get(first_id)
        if pending is None or pending.answer.done():
            return None
        return self._sent.pop(first_id)

    def remove(self, pending: PendingAdd) -> bool:
        """Remove an entry whose caller left. Return whether it may have reached the process."""
        if pending in self._waiting:
            self._waiting.remove(pending)
            return False
        return self._sent.pop(pending.first_id, None) is not None

    def on_process_exit(self, from_outside: bool) -> int:
        """Put back the sent requests, in order, before the waiting ones. Return the number of quarantined requests.

        `from_outside`: the process was killed or stopped by another one.
        """
        num_quarantined = 0
        for pending in reversed(self._sent.values()):
            if pending.answer.done():
                continue
            if pending.crash_suspect and not from_outside:
                num_quarantined += 1
                error = "the engine crashed twice while it accepted this request; it is not tried again"
                pending.answer.set_exception(Quarantined(error))
            else:
                pending.crash_suspect = pending.crash_suspect or not from_outside
                self._waiting.appendleft(pending)
        self._sent.clear()
        return num_quarantined

    def refuse_all(self, refusal: NotAccepting) -> list[PendingAdd]:
        """Answer every caller with a refusal. Return the entries that may have reached the process."""
        sent = list(self._sent.values())
        for pending in self._all():
            if not pending.answer.done():
                pending.answer.set_exception(refusal)
        self._waiting.clear()
        self._sent.clear()
        return sent

    def _all(self) -> list[PendingAdd]:
        return [*self._sent.values(), *self._waiting]


def admission_of(answer: AddAnswer) -> AdmissionEstimate:
    """Return the estimate of an accepted request, or raise the refusal."""
    if answer.refusal is None:
        assert answer.estimate is not None, "an accepted request has one"
        return answer.estimate
    if answer.estimate is None:
        raise UNESTIMATED_REFUSALS.get(answer.refusal, NotAccepting)(answer.message)
    raise REFUSALS[answer.refusal](answer.message, answer.estimate)
