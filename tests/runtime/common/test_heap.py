"""Freed memory is returned to the system when there is much of it, and no sooner."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from quire.runtime.common import heap
from quire.runtime.common.heap import MAX_UNUSED, MIN_RETURNED, UnusedMemory


def test_memory_is_returned_when_more_is_unused_than_at_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    unused = [100 << 20]
    trims = []
    monkeypatch.setattr(heap, "_unused_bytes", lambda: unused[0])
    monkeypatch.setattr(heap, "_libc", SimpleNamespace(malloc_trim=trims.append))
    memory = UnusedMemory()

    def is_returned_at(num_bytes: int) -> bool:
        unused[0] = num_bytes
        before = len(trims)
        memory.return_excess()
        return len(trims) > before

    most = (100 << 20) + MAX_UNUSED
    assert not is_returned_at(most)
    assert is_returned_at(most + 1)
    assert not is_returned_at(most + 1 + MIN_RETURNED), "it could not be returned: the rest is not the heap's"
    assert is_returned_at(most + 2 + MIN_RETURNED), "what came since can be"
    assert not is_returned_at(50 << 20)
    assert not is_returned_at((50 << 20) + MAX_UNUSED)
    assert is_returned_at((50 << 20) + MAX_UNUSED + 1), "from the least on"
    assert trims == [0, 0, 0]
