"""What the pager can refuse, as one small tree.

It must not know users, gRPC codes or the errors of the runtime, which translates these once, at its Engine facade.
The one invariant: whatever the pager refuses, it refuses before it has changed anything.

    PagerError
    ├── OutOfPages        not enough pages are free or evictable
    ├── OutOfMemory       the system did not give the memory asked for
    ├── SpillUnavailable  no file to spill to could be made
    ├── SnapshotError     a snapshot cannot be written or read
    │   ├── SnapshotForeign    the file is something else
    │   ├── SnapshotMismatch   of another model or layout
    │   ├── SnapshotTruncated  its end is missing
    │   └── SnapshotDamaged    its bytes are not those written
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


class SnapshotError(PagerError):
    """A snapshot cannot be written, or must not be used."""


class SnapshotForeign(SnapshotError):
    """The file is no snapshot, or one of a version that is not known here."""


class SnapshotMismatch(SnapshotError):
    """The snapshot is of another model or another layout of the KV cache."""


class SnapshotTruncated(SnapshotError):
    """The end of the snapshot is missing."""


class SnapshotDamaged(SnapshotError):
    """The snapshot's bytes are not those that were written."""


class InvariantViolated(PagerError):
    """A page is lost, owned twice or unexplained."""
