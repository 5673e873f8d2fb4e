"""The server: Quire's protocol on a TCP or unix socket, over any `EngineFacade`; metrics and probes over HTTP."""

from .memory_limits import SERVER_PROCESS_BYTES, MemoryLimits
from .models.catalog import CatalogModel, ModelCatalog
from .models.managed_engine import ManagedEngine
from .models.residency import Residency, Resident
from .server import Server, check_config, check_ports
from .tenancy.auth import check_tenant_name, hash_key

__all__ = [
    "SERVER_PROCESS_BYTES",
    "CatalogModel",
    "ManagedEngine",
    "MemoryLimits",
    "ModelCatalog",
    "Residency",
    "Resident",
    "Server",
    "check_config",
    "check_ports",
    "check_tenant_name",
    "hash_key",
]
