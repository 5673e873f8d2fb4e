"""Limits on the bytes that the API server process holds for a tenant's connections, and their use for pending input.

Must not import frames, sockets or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...common.errors import Overloaded, QuotaExceeded


class Holder(Protocol):
    """One connection's part of a `TenantBytes`, which reports each change of `num_bytes` with `add`."""

    num_bytes: int

    def shed(self, limit: str) -> None:
        """Release bytes now, and end their stream or connection in an error that names the limit."""


class TenantBytes:
    """Bytes that one tenant's connections hold. Beyond the tenant's share, the largest holder is shed."""

    def __init__(self, what: str, option: str, share: Callable[[], int]) -> None:
        self.num_bytes = 0
        self._what = what
        self._option = option
        self._share = share  # bytes; changes when keys are reloaded
        self._holders: set[Holder] = set()

    @property
    def limit(self) -> int:
        """The tenant's share in bytes."""
        return self._share()

    def describe_limit(self) -> str:
        return f"all {self._what} of this tenant may be {self.limit} bytes (a share of `{self._option}`)"

    def join(self, holder: Holder) -> None:
        self._holders.add(holder)
        self.add(holder.num_bytes)

    def leave(self, holder: Holder) -> None:
        self._holders.discard(holder)
        self.num_bytes -= holder.num_bytes

    def add(self, num_bytes: int) -> None:
        """Count more bytes of a holder; negative values release bytes."""
        self.num_bytes += num_bytes
        while num_bytes > 0 and self.num_bytes > self.limit:
            max(self._holders, key=lambda holder: holder.num_bytes).shed(self.describe_limit())

    def reserve(self, num_bytes: int) -> Callable[[], None]:
        """Count a text until the returned function is called; calling it again does nothing.

        Raises QuotaExceeded if it never fits, Overloaded if it does not fit now.
        """
        if self.num_bytes + num_bytes > self.limit:
            error = QuotaExceeded if num_bytes > self.limit else Overloaded
            raise error(f"this text takes {num_bytes} bytes, and {self.describe_limit()}")
        self.num_bytes += num_bytes
        held = [num_bytes]

        def release() -> None:
            self.num_bytes -= held.pop() if held else 0

        return release


class EqualShares:
    """A limit in bytes for the connections of all tenants; each tenant has an equal share."""

    def __init__(self, what: str, option: str, share: Callable[[], int]) -> None:
        """`share` returns the bytes of one tenant now; `option` is the name of the limit."""
        self.tenants: dict[str | None, TenantBytes] = {}  # tenant's name -> bytes, for tenants that had a connection
        self._what = what
        self._option = option
        self._share = share

    @property
    def num_bytes(self) -> int:
        return sum(tenant_bytes.num_bytes for tenant_bytes in self.tenants.values())

    def of(self, tenant: str | None) -> TenantBytes:
        """Return the bytes of a tenant, or of all clients before WELCOME, which count as one tenant."""
        if tenant not in self.tenants:
            self.tenants[tenant] = TenantBytes(self._what, self._option, self._share)
        return self.tenants[tenant]


class PendingInput:
    """The pending bytes of one connection: an incomplete frame, or body of an HTTP request."""

    def __init__(self, tenant_bytes: TenantBytes, refuse: Callable[[Overloaded], None]) -> None:
        """Count the bytes for `tenant_bytes`; `refuse` ends the connection in an error."""
        self.num_bytes = 0
        self._refuse = refuse
        self._tenant_bytes: TenantBytes | None = tenant_bytes
        tenant_bytes.join(self)

    @property
    def limit(self) -> int:
        """Bytes that all connections of the tenant may hold."""
        return 0 if self._tenant_bytes is None else self._tenant_bytes.limit

    def move_to(self, tenant_bytes: TenantBytes) -> None:
        """Count for another tenant: the client is known now."""
        if self._tenant_bytes is not None:
            self._tenant_bytes.leave(self)
        self._tenant_bytes = tenant_bytes
        tenant_bytes.join(self)

    def leave(self) -> None:
        """Stop counting, and release the connection: it ends."""
        self._refuse = _ignore
        if self._tenant_bytes is not None:
            self._tenant_bytes.leave(self)
            self._tenant_bytes = None

    def set_frame_bytes(self, num_bytes: int) -> None:
        """Count the received part of a frame or body."""
        added = num_bytes - self.num_bytes
        self.num_bytes = num_bytes
        if added and self._tenant_bytes is not None:
            self._tenant_bytes.add(added)

    def shed(self, limit: str) -> None:
        """End the connection."""
        refuse = self._refuse
        self.leave()
        refuse(Overloaded(f"{self.num_bytes} bytes of this connection are an incomplete frame or body, and {limit}"))


def _ignore(error: Overloaded) -> None:
    """Do nothing: the connection has ended."""
