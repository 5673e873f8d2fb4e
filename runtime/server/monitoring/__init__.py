"""Metrics, probes, the status page and the models of a server, on the operator's HTTP port."""

from .collector import ClientLoad
from .http import OperatorServer
from .metrics import CancelCause, PrometheusObserver
from .model_operations import ModelOperations
from .open_tracer import open_tracer
from .readiness import Readiness
from .status import RequestState, RequestStatus, StatusCollector
from .traces import TRACEPARENT, TRACESTATE, RequestTrace, SilentTracer, Tracer, note_caller
from .vllm_names import VllmNames

__all__ = [
    "TRACEPARENT",
    "TRACESTATE",
    "CancelCause",
    "ClientLoad",
    "ModelOperations",
    "OperatorServer",
    "PrometheusObserver",
    "Readiness",
    "RequestState",
    "RequestStatus",
    "RequestTrace",
    "SilentTracer",
    "StatusCollector",
    "Tracer",
    "VllmNames",
    "note_caller",
    "open_tracer",
]
