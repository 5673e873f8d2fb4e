"""One run of a load test: what its figures, its records and its server's metrics have to say together.

It must not know how the run was driven or what is drawn of it. It is written to disk as a whole and read again as it
was, so that a sweep can go on and a report can be made later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ...common.errors import ConfigError
from .record import RequestRecord
from .timeline import Timeline


class Run(msgspec.Struct, frozen=True, kw_only=True):
    label: str  # as in the report's legend
    started_s: float  # zero of every time axis, seconds of perf_counter as all times of the records
    summary: dict[str, Any]
    records: list[RequestRecord]
    timeline: Timeline | None = None

    def save(self, path: Path) -> None:
        """As JSON, whole or not at all. Raises ConfigError where `path` cannot be written."""
        partial = path.with_name(f"{path.name}.partial")
        try:
            partial.write_bytes(msgspec.json.encode(self))
            partial.replace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path) -> Run:
        """Raises ConfigError for what `save` has not written."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is not a saved run: {error}") from error
