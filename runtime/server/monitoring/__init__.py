"""Metrics, probes and the status page of a server, on an HTTP port that changes nothing."""

from .collector import ClientLoad
from .http import OperatorServer
from .metrics import CancelCause, PrometheusObserver
from .readiness import Readiness
from .status import RequestState, RequestStatus, StatusCollector
from .vllm_names import VllmNames

__all__ = [
    "CancelCause",
    "ClientLoad",
    "OperatorServer",
    "PrometheusObserver",
    "Readiness",
    "RequestState",
    "RequestStatus",
    "StatusCollector",
    "VllmNames",
]
