"""The errors of the pager. An operation that raises one has changed nothing.

PagerError
├── OutOfPages        not enough pages are free or evictable
├── OutOfStates       every slot for the state of a sequence is in use
├── OutOfMemory       the system did not provide the requested memory
├── SpillUnavailable  the spill file could not be created
├── SnapshotError     a snapshot cannot be written or read
│   ├── SnapshotForeign    the file is not a snapshot
│   ├── SnapshotMismatch   it belongs to another model or layout
│   ├── SnapshotTruncated  its end is missing
│   └── SnapshotDamaged    its bytes are not those written
└── InvariantViolated the page counts do not add up: a bug in Quire
"""

from __future__ import annotations


class PagerError(Exception):
    """Base class of the pager's errors."""


class OutOfPages(PagerError):
    """An operation needs `needed` pages, but only `available` are free or evictable."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} pages, {available} are available")
        self.needed = needed
        self.available = available


class OutOfStates(PagerError):
    """More sequences write at the same time than there are slots for states."""


class OutOfMemory(PagerError):
    """Memory could not be mapped."""


class SpillUnavailable(PagerError):
    """The spill file could not be created."""


class SnapshotError(PagerError):
    """A snapshot cannot be written or cannot be used."""


class SnapshotForeign(SnapshotError):
    """The file is not a snapshot, or has an unknown version."""


class SnapshotMismatch(SnapshotError):
    """The snapshot belongs to another model or another layout of the KV cache."""


class SnapshotTruncated(SnapshotError):
    """The end of the snapshot is missing."""


class SnapshotDamaged(SnapshotError):
    """The snapshot's bytes differ from the bytes that were written."""


class InvariantViolated(PagerError):
    """A page is lost, owned twice or unexplained."""
