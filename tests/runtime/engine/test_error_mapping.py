"""The errors that users get for the scheduler's refusals: class, message, and when to retry."""

from __future__ import annotations

import pytest
from quire.runtime.common import errors
from quire.runtime.engine.error_mapping import failure_error, grammar_fault, refusal_error
from quire.scheduler import (
    AdmissionEstimate,
    CannotMeetDeadline,
    NotAccepting,
    PageQuotaExceeded,
    QueueFull,
    SchedulerError,
    StepMismatch,
    TooLong,
)

ESTIMATE = AdmissionEstimate(position=3, pages_needed=7, pages_free=2, predicted_wait_s=1.25)


@pytest.mark.parametrize(
    ("refusal", "error_class", "retryable"),
    [
        (QueueFull, errors.Overloaded, True),
        (CannotMeetDeadline, errors.DeadlineExceeded, False),
        (TooLong, errors.ContextLengthExceeded, False),
        (PageQuotaExceeded, errors.QuotaExceeded, False),
    ],
)
def test_a_refusal_includes_the_estimate(refusal: type, error_class: type[errors.QuireError], retryable: bool) -> None:
    error = refusal_error(refusal("refused", ESTIMATE))
    assert type(error) is error_class
    assert error.retryable is retryable
    assert str(error) == "refused; position 3 in the queue; pages: needed 7, free 2; predicted wait 1.25 s"


def test_retry_after_is_the_predicted_wait() -> None:
    assert refusal_error(QueueFull("full", ESTIMATE)).retry_after_ms == 1250
    error = refusal_error(QueueFull("full", AdmissionEstimate(3, 0, 2)))
    assert error.retry_after_ms is None
    assert str(error) == "full; position 3 in the queue; pages: free 2; predicted wait unknown"


def test_not_accepting_is_unavailable() -> None:
    assert type(refusal_error(NotAccepting("draining"))) is errors.Unavailable


def test_other_scheduler_errors_are_raised_again() -> None:
    bug: SchedulerError = StepMismatch("step 3 is not in flight")
    with pytest.raises(StepMismatch):
        refusal_error(bug)


@pytest.mark.parametrize(
    "message",
    [
        "panic: called `Result::unwrap()` on an `Err` value\n<backtrace>\n   0: <unknown>\n",
        "Parser Error: token \" \" doesn't satisfy the grammar; forced bytes: got 'e'; applying ' '\n<state>\n",
    ],
)
def test_a_failure_of_the_grammar_library_is_not_the_requests_fault(message: str) -> None:
    error = failure_error(grammar_fault(message), None)
    assert type(error) is errors.GenerationFailed
    assert str(error) == "the server failed to follow the grammar of structured_outputs"


def test_a_limit_of_a_grammar_is_the_requests_fault_in_one_line() -> None:
    error = failure_error(grammar_fault("Current row has 351 items; max is 350; make it smaller\n<non-verbose/>"), None)
    assert type(error) is errors.InvalidRequest
    assert str(error) == "structured_outputs: Current row has 351 items; max is 350; make it smaller"
