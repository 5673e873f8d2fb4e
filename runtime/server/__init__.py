"""The serving socket and the operator's HTTP port, over any engine that keeps the facade's promises."""

from .auth import check_tenant_name, hash_key
from .metrics import PrometheusObserver
from .server import Server

__all__ = ["PrometheusObserver", "Server", "check_tenant_name", "hash_key"]
