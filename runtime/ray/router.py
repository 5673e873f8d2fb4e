"""Serve's view of its engine hosts, in each process that has a handle to them."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from . import members


class HostRouter(RequestRouter):
    """Reports the replicas there are whenever Serve's controller reports a change, 0.3 s after it.

    No request of a client passes it: the router of `workers/` chooses hosts.
    """

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return all replicas as equal."""
        return [candidate_replicas]

    def update_replicas(self, replicas: list[Any]) -> None:
        """Note the replicas there are."""
        super().update_replicas(replicas)
        members.report([replica.replica_metadata for replica in replicas])
