"""The server: Quire's protocol on a TCP or unix socket, over any `EngineFacade`; metrics and probes over HTTP."""

from .memory_limits import SERVER_PROCESS_BYTES, MemoryLimits
from .server import Server, check_config, check_ports
from .tenancy.auth import check_tenant_name, hash_key

__all__ = [
    "SERVER_PROCESS_BYTES",
    "MemoryLimits",
    "Server",
    "check_config",
    "check_ports",
    "check_tenant_name",
    "hash_key",
]
