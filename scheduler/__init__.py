"""Who runs next. Requests in, an immutable StepPlan out; no tensor, no kernel, no socket."""

from .admission import (
    AdmissionEstimate,
    CannotMeetDeadline,
    DuplicateRequest,
    NotAccepting,
    PageQuotaExceeded,
    QueueFull,
    Refused,
    SchedulerError,
    StepMismatch,
    TooLong,
)
from .beam import BeamSearch, BeamSpec, Hypothesis
from .budget import LEAST_PREFILL, Budget, LatencyBudget, StepBudget, TokenBudget
from .cost import Coefficients, CostModel, StepLoad, chunk_pairs
from .engine_loop import EngineLoop, Execute, FinishedStep, Observe, Publish
from .plan import SampledToken, ScheduledSequence, StepPlan, StepResult
from .policy import Fair, FirstComeFirstServed, Policy, Priority
from .request import TRANSITIONS, FinalCounters, FinishReason, Request, RequestSpec, RequestUpdate, State
from .running_batch import MAX_PREEMPTIONS
from .scheduler import DEADLINE_PASSED, Scheduler
from .stats import SchedulerStats
from .tenants import QueueLimits

__all__ = [
    "DEADLINE_PASSED",
    "LEAST_PREFILL",
    "MAX_PREEMPTIONS",
    "TRANSITIONS",
    "AdmissionEstimate",
    "BeamSearch",
    "BeamSpec",
    "Budget",
    "CannotMeetDeadline",
    "Coefficients",
    "CostModel",
    "DuplicateRequest",
    "EngineLoop",
    "Execute",
    "Fair",
    "FinalCounters",
    "FinishReason",
    "FinishedStep",
    "FirstComeFirstServed",
    "Hypothesis",
    "LatencyBudget",
    "NotAccepting",
    "Observe",
    "PageQuotaExceeded",
    "Policy",
    "Priority",
    "Publish",
    "QueueFull",
    "QueueLimits",
    "Refused",
    "Request",
    "RequestSpec",
    "RequestUpdate",
    "SampledToken",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerError",
    "SchedulerStats",
    "State",
    "StepBudget",
    "StepLoad",
    "StepMismatch",
    "StepPlan",
    "StepResult",
    "TokenBudget",
    "TooLong",
    "chunk_pairs",
]
