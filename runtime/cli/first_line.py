"""The first line of a command that serves, written before the libraries that it needs are imported.

This file must not import slow modules. The line has the form of the later log lines; flags take precedence over
variables, and variables over the file of --config, as for every option.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

SERVING = ("serve", "engine-host")  # the commands that write the line
QUIET = ("warning", "error", "critical")  # levels without it
NO_START = {"--help", "-h", "--version"}
EVENT_WIDTH = 30  # columns, as the log has them


def write_first_line(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ, stream: TextIO | None = None
) -> None:
    """Write the first line if the command line has a serving command."""
    if not arguments or arguments[0] not in SERVING or NO_START & set(arguments):
        return
    if _value("log_level", arguments, environ) in QUIET:
        return
    has_model = len(arguments) > 1 and not arguments[1].startswith("-")
    model = arguments[1] if has_model else environ.get("QUIRE_MODEL")
    form = _line if _value("log_format", arguments, environ) != "json" else _json_line
    print(form(f"starting {arguments[0]}", model, _now()), file=stream or sys.stderr, flush=True)


def _now() -> str:
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1_000_000):06d}Z"


def _line(event: str, model: str | None, timestamp: str) -> str:
    fields = "" if not model else f" model={model!r}"
    return f"{timestamp} [info     ] {event:<{EVENT_WIDTH}}{fields}".rstrip()


def _json_line(event: str, model: str | None, timestamp: str) -> str:
    import json

    fields = {"model": model} if model else {}
    return json.dumps({**fields, "event": event, "level": "info", "timestamp": timestamp}, ensure_ascii=False)


def _value(name: str, arguments: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the value of an option before the command line is parsed, None if it is not set or cannot be read."""
    given = _flag("--" + name.replace("_", "-"), arguments) or environ.get(f"QUIRE_{name.upper()}")
    file = _flag("--config", arguments)
    if given or file is None:
        return given
    import tomllib

    try:
        with open(file, "rb") as content:
            value = tomllib.load(content).get(name)
    except (OSError, ValueError):  # the settings will refuse the file
        return None
    return value if isinstance(value, str) else None


def _flag(flag: str, arguments: Sequence[str]) -> str | None:
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
        if argument == flag:
            return next(iter(arguments[index + 1 :]), None)
    return None
