"""The serving socket: whoever speaks the protocol, over any engine that keeps the facade's promises."""

from .auth import check_tenant_name, hash_key
from .server import Server

__all__ = ["Server", "check_tenant_name", "hash_key"]
