"""Metrics, probes, the status page and the models of a server, on the operator's HTTP port."""

from .collector import ClientLoad
from .http import OperatorServer
from .metrics import CancelCause, PrometheusObserver
from .model_operations import ModelOperations
from .readiness import Readiness
from .status import RequestState, RequestStatus, StatusCollector
from .vllm_names import VllmNames

__all__ = [
    "CancelCause",
    "ClientLoad",
    "ModelOperations",
    "OperatorServer",
    "PrometheusObserver",
    "Readiness",
    "RequestState",
    "RequestStatus",
    "StatusCollector",
    "VllmNames",
]
