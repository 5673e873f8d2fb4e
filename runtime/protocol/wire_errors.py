"""Converts a QuireError to an ERROR frame and an ERROR frame to the same class of error.

A code and its `retryable` map to one class for requests and one for connections. An unknown code becomes a QuireError
with its message and retry advice.
"""

from __future__ import annotations

from ..common.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    ModelError,
    Overloaded,
    ProtocolError,
    Quarantined,
    QuireError,
    QuotaExceeded,
    RequestNotFound,
    Unauthenticated,
    Unavailable,
    UnsupportedModel,
)
from .frames import Error

MAX_MESSAGE_CHARACTERS = 2000  # messages may quote the request; ERROR frames stay small


class RetryableError(QuireError):
    """An error with an unknown code that the server calls retryable."""

    retryable = True


_CLASSES: tuple[type[QuireError], ...] = (
    InvalidRequest,
    ContextLengthExceeded,
    Unauthenticated,
    Overloaded,
    QuotaExceeded,
    DeadlineExceeded,
    Cancelled,
    Unavailable,
    RequestNotFound,
    Quarantined,
    GenerationFailed,
    ModelError,
    UnsupportedModel,
)
_CLASS_BY_CODE = {(error_class.code, error_class.retryable): error_class for error_class in _CLASSES}


def error_frame(request_id: int | None, error: QuireError) -> Error:
    """Return the ERROR frame that ends a request, or the connection if `request_id` is None."""
    return Error(request_id, error.code, str(error)[:MAX_MESSAGE_CHARACTERS], error.retryable, error.retry_after_ms)


def error_from_frame(frame: Error) -> QuireError:
    """Return the error that a client raises for `frame`."""
    error_class = _CLASS_BY_CODE.get((frame.code, frame.retryable))
    if error_class is None:
        unknown_class = RetryableError if frame.retryable else QuireError
        error = unknown_class(f"{frame.code}: {frame.message}")
    elif frame.request_id is None and error_class is InvalidRequest:
        error = ProtocolError(frame.message)
    else:
        error = error_class(frame.message)
    error.retry_after_ms = frame.retry_after_ms
    return error
