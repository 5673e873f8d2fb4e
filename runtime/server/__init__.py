"""The server: Quire's protocol on a TCP or unix socket, over any `EngineFacade`; metrics and probes over HTTP."""

from .auth import check_tenant_name, hash_key
from .server import Server, check_config

__all__ = ["Server", "check_config", "check_tenant_name", "hash_key"]
