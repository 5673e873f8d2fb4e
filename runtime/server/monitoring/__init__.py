"""What operators see of a server: metrics, probes and the status page, on an HTTP port that only reads."""

from .http import OperatorServer, operator_app
from .metrics import CancelCause, PrometheusObserver
from .readiness import Readiness
from .status import RequestState, RequestStatus, StatusCollector
from .vllm_names import VllmNames

__all__ = [
    "CancelCause",
    "OperatorServer",
    "PrometheusObserver",
    "Readiness",
    "RequestState",
    "RequestStatus",
    "StatusCollector",
    "VllmNames",
    "operator_app",
]
