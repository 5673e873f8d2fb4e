"""What the pager can refuse, as one small tree.

It must not know users, gRPC codes or the errors of the runtime, which translates these once, at its Engine facade.
The one invariant: whatever the pager refuses, it refuses before it has changed anything.

    PagerError
    ├── OutOfPages        not enough pages are free or evictable
    ├── OutOfMemory       the system did not give the memory asked for
    ├── SpillUnavailable  no file to spill to could be made
    └── InvariantViolated the books do not balance: a bug in Quire, never a user's fault
"""

from __future__ import annotations


class PagerError(Exception):
    """Base of the tree."""


class OutOfPages(PagerError):
    """`needed` pages were asked for and only `available` (free or evictable) are left."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} pages, {available} are available")
        self.needed = needed
        self.available = available


class OutOfMemory(PagerError):
    """Memory could not be mapped."""


class SpillUnavailable(PagerError):
    """The spill file could not be made."""


class InvariantViolated(PagerError):
    """A page is lost, owned twice or unexplained."""
