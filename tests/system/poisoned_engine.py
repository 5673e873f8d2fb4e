"""An engine process that dies of computing a certain token: `quire.runtime.supervision.child` with one thing added."""

from __future__ import annotations

import os

from quire.runtime.execution import Executor
from quire.runtime.supervision import child
from quire.scheduler import StepPlan, StepResult

POISON = 3999
_execute = Executor.execute


def execute(self: Executor, plan: StepPlan) -> StepResult:
    if any(POISON in sequence.context for sequence in plan.sequences):
        os.abort()
    return _execute(self, plan)


if __name__ == "__main__":
    Executor.execute = execute  # type: ignore[method-assign]
    child.main()
