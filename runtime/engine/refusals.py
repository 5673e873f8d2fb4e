"""What the scheduler refuses, in the words and classes that users meet. Pure.

One invariant: a refusal says how things stand: the place in the queue, pages needed and free, and the predicted wait.
"""

from __future__ import annotations

from ...scheduler import (
    CannotMeetDeadline,
    NotAccepting,
    Outlook,
    QueueFull,
    QuotaExceeded,
    Refused,
    SchedulerError,
    TooLong,
)
from ..common import errors
from .facade import Admission


def translate(error: SchedulerError) -> errors.QuireError:
    """The one place where the scheduler's errors become ours. What is no refusal is a bug, and passed on as it is."""
    if isinstance(error, NotAccepting):
        return errors.Unavailable(str(error))
    if not isinstance(error, Refused):
        raise error
    message = f"{error}; {_stands(error.outlook)}"
    match error:
        case QueueFull():
            return errors.Overloaded(message, _milliseconds(error.outlook.predicted_wait_s))
        case CannotMeetDeadline():
            return errors.DeadlineExceeded(message)
        case TooLong():
            return errors.ContextLengthExceeded(message)
        case QuotaExceeded():
            return errors.QuotaExceeded(message)
    raise error


def admission(outlook: Outlook) -> Admission:
    """What an accepted request is told."""
    wait_s = outlook.predicted_wait_s
    return Admission(
        position=outlook.position,
        pages_needed=outlook.pages_needed,
        pages_free=outlook.pages_free,
        predicted_wait_ms=None if wait_s is None else wait_s * 1000,
    )


def _stands(outlook: Outlook) -> str:
    wait_s = outlook.predicted_wait_s
    needed = f"needed {outlook.pages_needed}, " if outlook.pages_needed else ""  # not known before tokenizing
    wait = "unknown" if wait_s is None else f"{wait_s:.3g} s"
    return f"position {outlook.position} in the queue; pages: {needed}free {outlook.pages_free}; predicted wait {wait}"


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, round(seconds * 1000))
