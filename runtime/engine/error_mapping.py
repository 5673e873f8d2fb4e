"""Translation of the scheduler's errors into the errors that users receive."""

from __future__ import annotations

import structlog

from ...scheduler import (
    DEADLINE_PASSED,
    AdmissionEstimate,
    CannotMeetDeadline,
    NotAccepting,
    PageQuotaExceeded,
    QueueFull,
    Refused,
    SchedulerError,
    TooLong,
)
from ..common import errors

_log = structlog.get_logger("quire.engine")


def refusal_error(error: SchedulerError) -> errors.QuireError:
    """Return the error to raise for a refused request; its message includes the queue, the pages and the wait.

    An error that is not a refusal is a bug in Quire and is raised again.
    """
    if isinstance(error, NotAccepting):
        return errors.Unavailable(str(error))
    if not isinstance(error, Refused):
        raise error
    message = f"{error}; {_estimate_text(error.estimate)}"
    match error:
        case QueueFull():
            return errors.Overloaded(message, _milliseconds(error.estimate.predicted_wait_s))
        case CannotMeetDeadline():
            return errors.DeadlineExceeded(message)
        case TooLong():
            return errors.ContextLengthExceeded(message)
        case PageQuotaExceeded():
            return errors.QuotaExceeded(message)
    raise error


GRAMMAR_FAULT = "structured_outputs: "  # beginning of errors about a grammar, which may reach a limit at any token
UNMATCHED = "generated: the ids do not match structured_outputs"  # error of a request that another server began

# Beginnings of llguidance's messages: about a failure of llguidance or of the tokenizer, and about a grammar that no
# token of the vocabulary can follow.
_FAILURES = ("panic: ", "Parser Error: token ")
_NO_TOKEN = "NoExtensionBias"


def grammar_fault(message: str) -> str:
    """Return the reason of a request's end for an error of llguidance: a fault of the request, or a failure.

    The reason is one line, without llguidance's state and backtrace. A failure is logged.
    """
    first_line = message.partition("\n")[0].strip()[:300]
    if first_line.startswith(_FAILURES):
        _log.error("structured output failed", error=first_line)
        return "the server failed to follow the grammar of structured_outputs"
    if first_line.startswith(_NO_TOKEN):
        first_line = "no token of the model's vocabulary begins the text that must follow"
    return GRAMMAR_FAULT + first_line


def failure_error(reason: str, deadline_ms: int | None) -> errors.QuireError:
    """Return the error to raise for a request that the scheduler ended with the error `reason`."""
    if reason == DEADLINE_PASSED:
        return errors.DeadlineExceeded(f"the request's deadline of {deadline_ms} ms passed")
    is_invalid = reason == UNMATCHED or reason.startswith(GRAMMAR_FAULT)
    return errors.InvalidRequest(reason) if is_invalid else errors.GenerationFailed(reason)


def _estimate_text(estimate: AdmissionEstimate) -> str:
    wait_s = estimate.predicted_wait_s
    needed = f"needed {estimate.pages_needed}, " if estimate.pages_needed else ""  # not known before tokenizing
    pages = f"{needed}free {estimate.pages_free}"
    wait = "unknown" if wait_s is None else f"{wait_s:.3g} s"
    return f"position {estimate.position} in the queue; pages: {pages}; predicted wait {wait}"


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, round(seconds * 1000))
