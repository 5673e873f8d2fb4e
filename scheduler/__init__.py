"""The scheduler: which requests run in the next step. Imports the pager, and no tensors, kernels or sockets."""

from .admission import (
    AdmissionEstimate,
    CannotMeetDeadline,
    DuplicateRequest,
    NotAccepting,
    PageQuotaExceeded,
    QueueFull,
    Refused,
    SchedulerConfig,
    SchedulerError,
    StepMismatch,
    TooLong,
)
from .beam import BeamSearch, BeamSpec, Hypothesis
from .budget import LEAST_PREFILL, PREFILL_SHARE, Budget, LatencyBudget, StepBudget, TokenBudget
from .cost import Coefficients, CostModel, StepLoad, chunk_pairs
from .encoding import EncoderLimits, EncoderStats
from .engine_loop import EngineLoop, FinishedStep
from .plan import EncodedText, EncoderResult, EncoderStep, SampledToken, ScheduledSequence, StepPlan, StepResult
from .policy import Fair, FirstComeFirstServed, Policy, Priority
from .request import (
    TRANSITIONS,
    EncodeRequest,
    EncodeSpec,
    FinalCounters,
    FinishReason,
    QueuedRequest,
    Request,
    RequestSpec,
    RequestUpdate,
    State,
)
from .running_batch import MAX_PREEMPTIONS
from .scheduler import DEADLINE_PASSED, Scheduler, SchedulerStats

__all__ = [
    "DEADLINE_PASSED",
    "LEAST_PREFILL",
    "MAX_PREEMPTIONS",
    "PREFILL_SHARE",
    "TRANSITIONS",
    "AdmissionEstimate",
    "BeamSearch",
    "BeamSpec",
    "Budget",
    "CannotMeetDeadline",
    "Coefficients",
    "CostModel",
    "DuplicateRequest",
    "EncodeRequest",
    "EncodeSpec",
    "EncodedText",
    "EncoderLimits",
    "EncoderResult",
    "EncoderStats",
    "EncoderStep",
    "EngineLoop",
    "Fair",
    "FinalCounters",
    "FinishReason",
    "FinishedStep",
    "FirstComeFirstServed",
    "Hypothesis",
    "LatencyBudget",
    "NotAccepting",
    "PageQuotaExceeded",
    "Policy",
    "Priority",
    "QueueFull",
    "QueuedRequest",
    "Refused",
    "Request",
    "RequestSpec",
    "RequestUpdate",
    "SampledToken",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
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
