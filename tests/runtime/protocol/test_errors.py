"""ERROR frames keep the class, code, message and retry advice of an error."""

from __future__ import annotations

import pytest
from quire.runtime.common.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    ModelError,
    Overloaded,
    ProtocolError,
    QuireError,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
)
from quire.runtime.protocol.frames import Error
from quire.runtime.protocol.wire_errors import error_frame, error_from_frame


@pytest.mark.parametrize(
    "error_class",
    [
        InvalidRequest,
        ContextLengthExceeded,
        Unauthenticated,
        Overloaded,
        QuotaExceeded,
        DeadlineExceeded,
        Cancelled,
        Unavailable,
        GenerationFailed,
        ModelError,
    ],
)
def test_a_request_error_arrives_as_its_class(error_class: type[QuireError]) -> None:
    frame = error_frame(3, error_class("why"))
    assert (frame.request_id, frame.code, frame.retryable) == (3, error_class.code, error_class.retryable)
    arrived = error_from_frame(frame)
    assert type(arrived) is error_class
    assert str(arrived) == "why"


def test_retry_advice_arrives() -> None:
    assert error_from_frame(error_frame(3, Overloaded("full", 250))).retry_after_ms == 250


def test_an_invalid_argument_of_the_connection_is_a_protocol_error() -> None:
    assert type(error_from_frame(error_frame(None, ProtocolError("bad")))) is ProtocolError


def test_an_unknown_code_is_still_a_quire_error() -> None:
    arrived = error_from_frame(Error(1, "FROM_THE_FUTURE", "why"))
    assert type(arrived) is QuireError
    assert str(arrived) == "FROM_THE_FUTURE: why"


def test_an_unknown_code_keeps_its_retry_advice() -> None:
    arrived = error_from_frame(Error(1, "FROM_THE_FUTURE", "why", True, 250))
    assert isinstance(arrived, QuireError)
    assert (str(arrived), arrived.retryable, arrived.retry_after_ms) == ("FROM_THE_FUTURE: why", True, 250)


def test_messages_are_bounded() -> None:
    assert len(error_frame(1, InvalidRequest("x" * 100_000)).message) == 2000
