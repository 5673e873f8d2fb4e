"""Addresses of servers: `host:port`, `[v6]:port` or `unix:/path`.

Parsing an address that was formatted with `str` gives the same value.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.errors import ConfigError

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class TCPAddress:
    """A host, by name or IP address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """The path of a unix socket."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


Address = TCPAddress | UnixAddress


def parse_tcp_address(option: str, text: str, forms: str, lowest_port: int = 1) -> TCPAddress:
    """Return the host and port that an option names. Raises ConfigError that names the option and its `forms`."""
    try:
        address = parse_address(text, lowest_port)
    except ConfigError:
        address = None
    if not isinstance(address, TCPAddress):
        raise ConfigError(f"{option}: {text!r} is not allowed; write {forms}, port {lowest_port} to {MAX_PORT}")
    return address


def parse_address(text: str, lowest_port: int = 1) -> Address:
    """Return the address that `text` names. Raises ConfigError if it has none of the three forms."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path and "\0" not in path:
            return UnixAddress(path)
    else:
        host, _, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        bare_host = host[1:-1] if bracketed else host
        if _is_host(bare_host) and (":" in bare_host) == bracketed and _is_port(port, lowest_port):
            return TCPAddress(bare_host, int(port))
    allowed = f"host:port, [v6]:port or unix:/path, port {lowest_port} to {MAX_PORT}"
    raise ConfigError(f"address {text!r} is not allowed; write {allowed}")


def _is_host(text: str) -> bool:
    """Return whether the system can look up a name: it raises UnicodeError or ValueError for others."""
    try:
        return bool(text.encode("idna")) and "\0" not in text
    except UnicodeError:
        return False


def _is_port(text: str, lowest: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and lowest <= int(text) <= MAX_PORT
