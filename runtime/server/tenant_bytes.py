"""Limits in bytes on what the API server process holds for the connections of a tenant, and one use: pending input.

Must not import frames, sockets or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..common.errors import Overloaded


class Holder(Protocol):
    """One connection's part of a `TenantBytes`, which reports each change of `num_bytes` with `add`."""

    num_bytes: int

    def shed(self, limit: str) -> None:
        """Hold fewer bytes now, and end what held them in an error that names the limit."""


class TenantBytes:
    """Bytes that one tenant's connections hold. Beyond the tenant's share, the largest holder is shed.

    The share is read when a connection joins, because it changes only when the keys are reloaded.
    """

    def __init__(self, what: str, option: str, share: Callable[[], int]) -> None:
        self.num_bytes = 0
        self._what = what
        self._option = option
        self._share = share  # bytes
        self._limit = 0
        self._holders: set[Holder] = set()

    def join(self, holder: Holder) -> None:
        self._limit = self._share()
        self._holders.add(holder)
        self.add(holder.num_bytes)

    def leave(self, holder: Holder) -> None:
        self._holders.discard(holder)
        self.num_bytes -= holder.num_bytes

    def add(self, num_bytes: int) -> None:
        """Count more bytes of a holder; a negative number of them is not held any more."""
        self.num_bytes += num_bytes
        while self.num_bytes > self._limit and num_bytes > 0:
            largest = max(self._holders, key=lambda holder: holder.num_bytes)
            largest.shed(f"all {self._what} of this tenant may be {self._limit} bytes (a share of `{self._option}`)")


class PendingInput:
    """What one connection sent and the server cannot handle yet: an incomplete frame, and texts to tokenize."""

    def __init__(self, tenant_bytes: TenantBytes, refuse: Callable[[Overloaded], None]) -> None:
        """Count for `tenant_bytes`; `refuse` ends the connection in an error."""
        self.num_bytes = 0
        self._frame_bytes = 0
        self._refuse = refuse
        self._tenant_bytes: TenantBytes | None = tenant_bytes
        tenant_bytes.join(self)

    def move_to(self, tenant_bytes: TenantBytes) -> None:
        """Count for another tenant: the client is known now."""
        self.leave()
        self._tenant_bytes = tenant_bytes
        tenant_bytes.join(self)

    def leave(self) -> None:
        """Stop counting: the connection ends."""
        if self._tenant_bytes is not None:
            self._tenant_bytes.leave(self)
            self._tenant_bytes = None

    def set_frame_bytes(self, num_bytes: int) -> None:
        """Count the received part of a frame."""
        added, self._frame_bytes = num_bytes - self._frame_bytes, num_bytes
        if added:
            self.add(added)

    def add(self, num_bytes: int) -> None:
        """Count bytes of a text; a negative number of them was tokenized."""
        self.num_bytes += num_bytes
        if self._tenant_bytes is not None:
            self._tenant_bytes.add(num_bytes)

    def shed(self, limit: str) -> None:
        """End the connection."""
        self.leave()
        self._refuse(
            Overloaded(
                f"{self.num_bytes} bytes of this connection are an incomplete frame and texts to tokenize, and {limit}"
            )
        )
