"""An engine process whose steps take 5 ms, so that a test can end it in the middle of a request on any machine."""

from __future__ import annotations

import time

from quire.runtime.model.runner import Masks, ModelRunner
from quire.runtime.workers import engine_main
from quire.scheduler import StepPlan, StepResult

_execute = ModelRunner.execute


def execute(self: ModelRunner, plan: StepPlan, masks: Masks | None = None) -> StepResult:
    time.sleep(0.005)
    return _execute(self, plan, masks)


if __name__ == "__main__":
    ModelRunner.execute = execute  # type: ignore[method-assign]
    engine_main.main()
