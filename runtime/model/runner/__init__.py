"""Steps on the kernels: from a configuration to a `Machine`, from a `StepPlan` to a `StepResult`. Knows no request."""

from .capacity import Capacity, decide_capacity, pick_cpus, pick_isa
from .executor import Executor, Rows
from .model_runner import Machine, assemble
from .sampling import SamplingSpec

__all__ = [
    "Capacity",
    "Executor",
    "Machine",
    "Rows",
    "SamplingSpec",
    "assemble",
    "decide_capacity",
    "pick_cpus",
    "pick_isa",
]
