"""Set-up of logging: each server and engine process calls `log_to_stderr` once at its start.

Lines of structlog and of `logging` have the same form. Values under the names in SECRETS are removed, and tracebacks do
not show local variables. Callers bind the subject of a line: `connection`, `tenant` and `request`. The latter is a
`new_id` of the server, because clients' ids are unique on one connection only.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

SECRETS = frozenset(
    {"token", "key", "keys", "api_key", "authorization", "password", "secret", "session", "prompt", "messages", "text"}
)
MAX_LINES = 10  # limits of a BoundedLog without its own
LINES_INTERVAL_S = 10.0
_START = secrets.token_hex(2)
_numbers = itertools.count(1)


def new_id() -> str:
    """Return a short id, unique in this process and most likely different from the ids of earlier processes."""
    return f"{_START}-{next(_numbers)}"


def log_to_stderr(
    form: Literal["console", "json"] = "console", level: str = "info", stream: TextIO | None = None
) -> None:
    """Write events of `level` and above to standard error, one line each; events of other libraries from warnings on.

    `structlog.contextvars.bind_contextvars(engine=1)` adds a value to every line of a process.
    """
    stream = stream or sys.stderr
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
        redact,
    ]
    render = _json() if form == "json" else _console(stream)
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _LossyStream(stream))),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[*shared, remove_meta, render]))
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.WARNING), force=True)


class _LossyStream:
    """A stream for log lines that drops lines which cannot be written.

    A closed terminal, a closed pipe or a full disk must not fail a request, nor the restart of an engine process.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class BoundedLog:
    """A log of at most `max_lines` per `interval_s`; the next line says how many were left out.

    It is for lines that a peer can cause as often as it likes.
    """

    def __init__(
        self,
        log: structlog.typing.FilteringBoundLogger,
        max_lines: int = MAX_LINES,
        interval_s: float = LINES_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._max_lines = max_lines
        self._interval_s = interval_s
        self._clock = clock
        self._began_at = -math.inf  # start of the interval
        self._num_lines = 0  # lines in this interval, including lines left out

    def write(self, level: int, event: str, **fields: object) -> None:
        """Write a line at `level`, a number of `logging`, or count it as left out."""
        now = self._clock()
        if now - self._began_at >= self._interval_s:
            if (left_out := self._num_lines - self._max_lines) > 0:
                fields["lines_left_out"] = left_out
            self._began_at = now
            self._num_lines = 0
        self._num_lines += 1
        if self._num_lines <= self._max_lines:
            self._log.log(level, event, **fields)


def json_event(event: str, **fields: object) -> str:
    """Return a line with the form and the time of a JSON log, for standard output."""
    stamped = structlog.processors.TimeStamper(fmt="iso")(None, "info", {"event": event, "level": "info", **fields})
    return str(_json()(None, "info", stamped))


def redact(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Replace the values of names in SECRETS, also in nested maps; a structlog processor."""
    return {name: _without_secrets(name, value) for name, value in event.items()}


def _without_secrets(name: object, value: Any) -> Any:
    if isinstance(name, str) and name.lower() in SECRETS and value is not None:
        return "[redacted]"
    if isinstance(value, dict):
        return {inner: _without_secrets(inner, item) for inner, item in value.items()}
    return value


def _json() -> Processor:
    return structlog.processors.JSONRenderer(ensure_ascii=False)


def _console(stream: TextIO) -> Processor:
    """Quote text, so that input of a peer can neither begin a line nor control the terminal."""
    return structlog.dev.ConsoleRenderer(
        colors=stream.isatty(),
        repr_native_str=True,
        exception_formatter=structlog.dev.plain_traceback,  # the default prints local variables, such as prompts
    )
