"""Who runs next. Requests in, an immutable StepPlan out; no tensor, no kernel, no socket."""

from .batcher import Batcher, Execute, FinishedStep, Observe, Publish
from .budget import Budget, TokenBudget
from .errors import DuplicateRequest, NotAccepting, QueueFull, SchedulerError, StepMismatch, TooLong
from .plan import SampledToken, ScheduledSequence, StepPlan, StepResult
from .policy import FirstComeFirstServed, Policy
from .request import TRANSITIONS, FinishReason, Request, RequestUpdate, State
from .scheduler import Admission, Scheduler, SchedulerStats

__all__ = [
    "TRANSITIONS",
    "Admission",
    "Batcher",
    "Budget",
    "DuplicateRequest",
    "Execute",
    "FinishReason",
    "FinishedStep",
    "FirstComeFirstServed",
    "NotAccepting",
    "Observe",
    "Policy",
    "Publish",
    "QueueFull",
    "Request",
    "RequestUpdate",
    "SampledToken",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerError",
    "SchedulerStats",
    "State",
    "StepMismatch",
    "StepPlan",
    "StepResult",
    "TokenBudget",
    "TooLong",
]
