"""Log lines: one per event, in both forms, without secrets and local variables."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from quire.runtime.common.logs import LINES_INTERVAL_S, MAX_LINES, BoundedLog, log_to_stderr, new_id


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Yield a stream for log lines, and restore the process's logging afterwards."""
    root = logging.getLogger()
    before = (logging.getLogger().handlers[:], logging.getLogger().level)
    yield io.StringIO()
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()
    root.handlers[:], root.level = before


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_the_bound_values(stream: io.StringIO) -> None:
    log_to_stderr("json", stream=stream)
    structlog.contextvars.bind_contextvars(connection="c")
    structlog.get_logger("quire.server").bind(tenant="é").info("request ended", tokens=3)
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "request ended", "level": "info", "connection": "c", "tenant": "é", "tokens": 3}


@pytest.mark.parametrize("form", ["console", "json"])
def test_secrets_and_local_variables_are_not_logged(stream: io.StringIO, form: Any) -> None:
    log_to_stderr(form, stream=stream)
    log = structlog.get_logger("quire.server")
    password_of_a_caller = "hunter2"
    log.info("hello", token="hunter2", Authorization="hunter2", frame={"key": "hunter2", "session": "hunter2"})
    log.info("asked", prompt="hunter2", messages=["hunter2"], text="hunter2")
    try:
        raise ValueError(len(password_of_a_caller))
    except ValueError as error:
        log.error("failed", exc_info=error)
        logging.getLogger("asyncio").error("failed", exc_info=error)
    assert "hunter2" not in stream.getvalue()
    assert stream.getvalue().count("[redacted]") == 7
    assert stream.getvalue().count("ValueError: 7") == 2


@pytest.mark.parametrize("form", ["console", "json"])
def test_input_of_a_peer_neither_begins_a_line_nor_controls_the_terminal(stream: io.StringIO, form: Any) -> None:
    log_to_stderr(form, stream=stream)
    structlog.get_logger("quire.server").warning("refused", reason="a\nquire ready \x1b[31m")
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()


def test_other_libraries_log_only_warnings(stream: io.StringIO) -> None:
    log_to_stderr("json", "debug", stream)
    structlog.get_logger("quire.server").debug("quire")
    logging.getLogger("library").info("library")
    logging.getLogger("library").warning("%s", "library")
    log_to_stderr("json", "warning", stream)
    structlog.get_logger("quire.server").info("below the level")
    assert [(line["event"], line["level"]) for line in lines(stream)] == [("quire", "debug"), ("library", "warning")]


def test_ids_are_short_and_unique() -> None:
    ids = [new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert max(map(len, ids)) <= 12


def test_a_bounded_log_says_how_many_lines_it_left_out(stream: io.StringIO) -> None:
    log_to_stderr("json", stream=stream)
    now = 0.0
    log = BoundedLog(structlog.get_logger("quire.server"), clock=lambda: now)
    for _ in range(MAX_LINES + 3):
        log.write(logging.WARNING, "refused", peer="x")
    assert len(lines(stream)) == MAX_LINES
    now += LINES_INTERVAL_S
    log.write(logging.WARNING, "refused", peer="x")
    now += LINES_INTERVAL_S
    log.write(logging.WARNING, "refused", peer="x")
    written = lines(stream)
    assert {line["level"] for line in written} == {"warning"}
    assert [line.get("lines_left_out") for line in written[MAX_LINES:]] == [3, None]


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("form", ["console", "json"])
def test_a_line_that_cannot_be_written_is_dropped(form: Any) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    closed = os.fdopen(writing, "w", buffering=1)
    log_to_stderr(form, stream=closed)
    structlog.get_logger("quire.server").info("request ended")
    structlog.get_logger("quire.server").error("engine process ended")
    with pytest.raises(BrokenPipeError):
        closed.close()
