"""The serving socket: whoever speaks the protocol, over any engine that keeps the facade's promises."""

from .auth import check_tenant_name, hash_key
from .server import Server, check_config

__all__ = ["Server", "check_config", "check_tenant_name", "hash_key"]
