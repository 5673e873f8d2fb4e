"""Checks of option values that several tools share. They raise ConfigError."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from ..common.errors import ConfigError


def check_number(option: str, value: float | None, low: float, high: float) -> None:
    """Raise ConfigError unless `value` is None (not given) or between `low` and `high`."""
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{option} must be between {low:g} and {high:g}, not {value:g}")


def parse_goodput(texts: Sequence[str], metrics: Collection[str]) -> dict[str, float]:
    """Parse objectives such as `ttft:2000 e2el:9000`: metric -> most milliseconds that a good request takes."""
    objectives: dict[str, float] = {}
    for text in texts:
        found = re.fullmatch(r"([a-z0-9]+):(\d{1,9}(?:\.\d{1,9})?)", text)
        if not found or found[1] not in metrics or found[1] in objectives:
            raise ConfigError(
                f"goodput: {text!r} is not allowed; write each of {', '.join(metrics)} at most once with its "
                "milliseconds, as in ttft:2000 tpot:200"
            )
        objectives[found[1]] = float(found[2])
    return objectives
