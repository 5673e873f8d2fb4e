"""A long prompt arrives among users who are reading along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.runtime.simulation import Arrival

READERS = [Arrival(0.0, 128, 500, "reader") for _ in range(16)]
LONG = Arrival(20.0, 4096, 8, "long")


@pytest.fixture
def alone_s(serve: Callable[..., Any]) -> float:
    return float(serve([Arrival(0.0, 4096, 8)]).ttft())


def test_a_small_token_budget_trades_the_long_prompts_time_for_everybody_elses(
    serve: Callable[..., Any], alone_s: float
) -> None:
    itl, ttft = {}, {}
    for budget in (512, 64):
        served = serve([*READERS, LONG], max_num_batched_tokens=budget, max_num_seqs=32)
        ttft[budget] = served.ttft("long")
        itl[budget] = served.itl("reader", during=(LONG.time_s, LONG.time_s + ttft[budget]))
    assert itl[512] > 1.0
    assert itl[64] < 0.3
    assert ttft[512] < 1.1 * alone_s
    assert ttft[64] < 1.6 * alone_s
