"""An engine process that aborts when it computes one token or takes on a request with another one."""

from __future__ import annotations

import os

from quire.runtime.model.runner import Masks, ModelRunner
from quire.runtime.workers import engine_main
from quire.scheduler import AdmissionEstimate, EngineLoop, Request, StepPlan, StepResult

FATAL_TO_COMPUTE = 3999
FATAL_TO_ADD = 3998
_execute = ModelRunner.execute
_add = EngineLoop.add


def execute(self: ModelRunner, plan: StepPlan, masks: Masks | None = None) -> StepResult:
    if any(FATAL_TO_COMPUTE in sequence.context for sequence in plan.sequences):
        os.abort()
    return _execute(self, plan, masks)


def add(self: EngineLoop, *requests: Request) -> AdmissionEstimate:
    if any(FATAL_TO_ADD in request.spec.prompt_token_ids for request in requests):
        os.abort()
    return _add(self, *requests)


if __name__ == "__main__":
    ModelRunner.execute = execute  # type: ignore[method-assign]
    EngineLoop.add = add  # type: ignore[method-assign]
    engine_main.main()
