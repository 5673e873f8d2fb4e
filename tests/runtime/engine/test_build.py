"""The scheduler that a configuration describes."""

from __future__ import annotations

from quire.pager import Pager
from quire.runtime.common.config import EngineConfig
from quire.runtime.engine.build import build_scheduler
from quire.scheduler import Request, RequestSpec, SampledToken, StepResult


def test_the_inter_token_target_is_in_milliseconds() -> None:
    scheduler = build_scheduler(EngineConfig(itl_target_ms=20), Pager(32, 64), max_num_samples=64)
    scheduler.add(Request(RequestSpec(1, (1, 2, 3), max_tokens=400)))
    for _ in range(60):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(StepResult(plan.step_id, (SampledToken(1, 7),), duration_s=0.04))
    assert 1.5 < scheduler.itl_overrun < 2.5
