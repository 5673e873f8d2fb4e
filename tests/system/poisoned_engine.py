"""An engine process that dies of computing one token and of taking on another: the real one with one thing added."""

from __future__ import annotations

import os

from quire.runtime.model.runner import ModelRunner
from quire.runtime.workers import engine_main
from quire.runtime.workers.engine_link import Sequence
from quire.scheduler import Request, StepPlan, StepResult

POISON = 3999
INDIGESTIBLE = 3998
_execute, _request_of = ModelRunner.execute, engine_main.request_of


def execute(self: ModelRunner, plan: StepPlan) -> StepResult:
    if any(POISON in sequence.context for sequence in plan.sequences):
        os.abort()
    return _execute(self, plan)


def request_of(sequence: Sequence) -> Request:
    if INDIGESTIBLE in sequence.prompt_token_ids:
        os.abort()
    return _request_of(sequence)


if __name__ == "__main__":
    ModelRunner.execute = execute  # type: ignore[method-assign]
    engine_main.request_of = request_of  # type: ignore[attr-defined]
    engine_main.main()
