"""A clock that a test moves."""

from __future__ import annotations


class FakeClock:
    """Seconds that only a test moves."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
