"""Pages kept outside the pool while their sequence does not run."""

from __future__ import annotations


class Spilled:
    """A sequence's pages in the store."""
