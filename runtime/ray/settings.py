"""Quire's options as arguments of a Serve application."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from hashlib import blake2b
from importlib.metadata import version

from ..common.errors import ConfigError
from ..common.settings import Settings, resolve_settings
from ..net.address import TCPAddress, parse_address
from .members import HostLinkKind

REPLACED = ("engine_hosts", "secret_file", "in_process", "uds")  # Serve reports hosts and their secrets
HOST_LINKS = "host_links"  # an argument for Ray only
OF_TCP_LINKS = ("listen", "engine_hosts_ca")
RAY_DEFAULTS = {  # defaults that differ from those of the commands
    "QUIRE_LISTEN": "0.0.0.0:0",  # Serve reports the port
    "QUIRE_OPENAI_PORT": "8001",  # Serve's own proxy has 8000
}


def settings_of(args: Mapping[str, object]) -> Settings:
    """Return the settings of a replica: `args` before QUIRE_* variables before defaults. Raises ConfigError."""
    for name in REPLACED:
        if args.get(name) is not None:
            raise ConfigError(f"{name} cannot be an argument on Ray; leave it out")
    if host_links_of(args) == "handles":
        for name in OF_TCP_LINKS:
            if args.get(name) is not None:
                raise ConfigError(f"{name} has no effect with {HOST_LINKS}=handles; leave it out")
    return resolve_settings({name: args[name] for name in args if name != HOST_LINKS}, RAY_DEFAULTS | os.environ)


def host_links_of(args: Mapping[str, object]) -> HostLinkKind:
    """Return the carrier of the links between API servers and hosts, from its own argument. Raises ConfigError."""
    match args.get(HOST_LINKS):
        case None | "tcp":
            return "tcp"
        case "handles":
            return "handles"
        case other:
            raise ConfigError(f"{HOST_LINKS} {other} is not allowed; write tcp or handles")


def release_of(args: Mapping[str, object]) -> str:
    """Return the key that replicas of one update have in common: a digest of the arguments and of Quire's version."""
    text = json.dumps([version("quire"), args], sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def reachable(address: str) -> str:
    """Return `address`, or the machine's in Ray's network if it means all addresses, as 0.0.0.0 does."""
    parsed = parse_address(address)
    if isinstance(parsed, TCPAddress) and ipaddress.ip_address(parsed.host).is_unspecified:
        return str(TCPAddress(node_address(), parsed.port))
    return address


def node_address() -> str:
    """Return the IP address of this machine in Ray's network."""
    import ray  # imported here, because only a server on all addresses needs Ray

    return str(ray.util.get_node_ip_address())
