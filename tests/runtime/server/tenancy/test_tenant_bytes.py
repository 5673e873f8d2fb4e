"""A tenant's share of a limit in bytes: a reservation counts exactly once, until it is released."""

from __future__ import annotations

import pytest
from quire.runtime.common.errors import Overloaded, QuotaExceeded
from quire.runtime.server.tenancy.tenant_bytes import PendingInput, TenantBytes


def test_texts_fill_a_share_exactly_and_free_it_once() -> None:
    texts = TenantBytes("texts", "max_text_bytes", lambda: 100)
    first = texts.reserve(60)
    second = texts.reserve(40)
    with pytest.raises(Overloaded, match="this text takes 1 bytes, and all texts of this tenant may be 100 bytes"):
        texts.reserve(1)
    for _ in range(2):
        first()
    assert texts.num_bytes == 40
    with pytest.raises(QuotaExceeded):
        texts.reserve(101)
    second()
    texts.reserve(100)


def test_pending_input_counts_for_one_tenant_at_a_time() -> None:
    unknown, known = [TenantBytes("input", "max_pending_bytes", lambda: 100) for _ in range(2)]
    refusals: list[Overloaded] = []
    pending = PendingInput(unknown, refusals.append)
    pending.set_frame_bytes(60)
    pending.move_to(known)
    assert (unknown.num_bytes, known.num_bytes) == (0, 60)
    pending.set_frame_bytes(40)
    assert (unknown.num_bytes, known.num_bytes) == (0, 40)
    pending.set_frame_bytes(101)
    assert (unknown.num_bytes, known.num_bytes) == (0, 0)
    assert "101 bytes of this connection" in str(refusals[0])
