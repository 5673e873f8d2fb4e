"""Listening sockets, bound with the right permissions before a client can connect.

A unix socket is never reachable by another user, not even between bind and chmod. An existing file is removed only if
it is a socket on which no server answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import resource
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import ConfigError
from .address import Address, TCPAddress, UnixAddress

BACKLOG = 1024


class AddressTaken(ConfigError):
    """Another process listens on the address."""


@dataclass(frozen=True, slots=True)
class ListeningSocket:
    socket: socket.socket
    address: Address  # address for clients; port 0 is resolved
    inode: int | None = None  # inode of the unix socket's file

    def close(self) -> None:
        """Close, and remove the file if it is still this socket's."""
        self.socket.close()
        if isinstance(self.address, UnixAddress):
            with contextlib.suppress(FileNotFoundError):
                if os.lstat(self.address.path).st_ino == self.inode:
                    os.unlink(self.address.path)


async def listen_tcp(host: str, port: int) -> ListeningSocket:
    """Listen on the first address of `host`. Raises ConfigError if it cannot be resolved or bound; see AddressTaken."""
    listening = await _bind_tcp(host, port)
    with _closing_if_it_fails(listening, host, port):
        listening.listen(BACKLOG)
    listening.setblocking(False)
    bound_host, bound_port = listening.getsockname()[:2]
    return ListeningSocket(listening, TCPAddress(bound_host, bound_port))


async def check_tcp(host: str, port: int) -> None:
    """Raise ConfigError if `listen_tcp` would now. The port is bound for a moment, but does not accept connections."""
    (await _bind_tcp(host, port)).close()


async def _bind_tcp(host: str, port: int) -> socket.socket:
    family, sockaddr = (await _resolve(host, port))[0]
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    with _closing_if_it_fails(bound, host, port):
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit this. Without it a small frame may wait 40 ms for the client's acknowledgment.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind(sockaddr)
    return bound


@contextlib.contextmanager
def _closing_if_it_fails(opened: socket.socket, host: str, port: int) -> Iterator[None]:
    """Turn an OSError into the ConfigError that names the address, and close the socket."""
    try:
        yield
    except OSError as error:
        opened.close()
        kind = AddressTaken if error.errno == errno.EADDRINUSE else ConfigError
        raise kind(f"cannot listen on {TCPAddress(host, port)}: {error.strerror}") from error


def listen_unix(path: Path) -> ListeningSocket:
    """Listen on a socket file with mode 0600. Raises ConfigError if `path` is taken or cannot be bound."""
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        path.chmod(0o600)  # no client can connect before listen
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on unix socket {path}: {error.strerror or error}") from error
    listening.setblocking(False)
    return ListeningSocket(listening, UnixAddress(str(path)), path.lstat().st_ino)


def fit_connections(wanted: int, reserved: int) -> int:
    """Return the allowed number of open client connections, at most `wanted`, with room for `reserved` other files.

    Raises this process's soft limit of open files as far as needed, at most to the hard limit. Raises ConfigError if
    there is no room for a client.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = wanted + reserved
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else max(soft, min(needed, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft <= reserved:
        raise ConfigError(
            f"this process may open {soft} files, and {reserved} are reserved for engines, operators and files; "
            f"raise the limit (`ulimit -n {needed}`)"
        )
    return min(wanted, soft - reserved)


async def is_loopback(host: str) -> bool:
    """Return whether every address of `host` is reachable from this machine only."""
    addresses = [sockaddr[0] for _, sockaddr in await _resolve(host, 0)]
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)


async def _resolve(host: str, port: int) -> list[tuple[int, tuple[object, ...]]]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} cannot be resolved: {error}") from error
    return [(family, sockaddr) for family, _, _, _, sockaddr in found]


def _remove_stale(path: Path) -> None:
    """Remove the socket file that a killed server has left behind. Raises ConfigError for any other file."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket; choose another `uds` path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"unix socket {path} is in use, or belongs to another user: {error}") from error
        else:
            raise ConfigError(f"another server is listening on unix socket {path}")
