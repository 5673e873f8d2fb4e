"""Tests of this folder run in virtual time."""

from __future__ import annotations

import pytest

from tests.support.engine_processes import FakeListener, VirtualTimeLoop


def pytest_asyncio_loop_factories() -> dict[str, type[VirtualTimeLoop]]:
    return {"virtual_time": VirtualTimeLoop}


@pytest.fixture
def listener() -> FakeListener:
    return FakeListener()
