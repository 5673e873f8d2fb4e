"""A pool too small for all running requests: work is computed again or spilled, and every request finishes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quire.runtime.tools.simulation import Workload, make_arrivals
from quire.scheduler import MAX_PREEMPTIONS


def crowd(serve: Callable[..., Any], **options: Any) -> Any:
    """Serve requests that grow to twice their prompts; four of them fit at their longest."""
    workload = Workload(request_rate=3, num_prompts=60, prompt_tokens="512", output_tokens="512")
    return serve(make_arrivals(workload), num_tokens=4096, max_num_seqs=16, itl_target_s=0.2, **options)


@pytest.fixture(scope="module")
def recomputed(serve: Callable[..., Any]) -> Any:
    return crowd(serve)


def test_every_request_finishes_and_preemptions_are_limited(recomputed: Any) -> None:
    assert recomputed.report.finished == 60
    assert recomputed.report.preemptions > 10
    assert 0 < recomputed.report.wasted_share < 0.3
    assert max(outcome.preemptions for outcome in recomputed.outcomes) <= MAX_PREEMPTIONS


def test_spilled_pages_are_not_computed_again(serve: Callable[..., Any], recomputed: Any) -> None:
    spilled = crowd(serve, spill_bytes=1 << 30).report
    assert spilled.spilled == spilled.preemptions > 10
    assert spilled.wasted_share == 0
    assert spilled.request_throughput > 1.03 * recomputed.report.request_throughput


def test_pages_that_do_not_fit_the_store_are_computed_again(serve: Callable[..., Any]) -> None:
    report = crowd(serve, spill_bytes=64 << 20).report
    assert 0 < report.spilled < report.preemptions
    assert report.wasted_share > 0
