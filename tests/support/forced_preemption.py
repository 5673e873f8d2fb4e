"""Preempts a request of the test's choice, as if pages had run out."""

from __future__ import annotations

from quire.scheduler import Scheduler


def preempt(scheduler: Scheduler, request_id: int) -> bool:
    """Move a running request back to the queue.

    Returns False if it is not running, is protected, or a step is in flight.
    """
    request = scheduler._batch.requests.get(request_id)
    if request is None or scheduler._in_flight is not None or scheduler._batch.is_protected(request):
        return False
    scheduler._planner.preempt(request)
    return True
