"""Serve's view of its engine hosts, in each process that has a handle to them."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from . import members


class HostRouter(RequestRouter):
    """Reports the replicas whenever Serve's controller reports a change, 0.3 s after it.

    Requests of clients do not pass it: the router of `workers/` chooses hosts. It routes the calls of links to the
    replica in their first argument, even while that replica leaves, so that its requests may end.
    """

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the replica that a call names, or all replicas for a call that any may take.

        For a replica that is gone, another one is returned and refuses the call. Otherwise Serve would wait for it,
        with one of the few tasks that route the calls of all links.
        """
        address = pending_request.args[0] if pending_request is not None and pending_request.args else None
        return [[each for each in candidate_replicas if _address_of(each) == address] or candidate_replicas]

    def update_replicas(self, replicas: list[Any]) -> None:
        """Note the present replicas."""
        there = {replica.replica_id for replica in replicas}
        linked = members.linked_addresses()
        others = [replica for replica in self.curr_replicas.values() if replica.replica_id not in there]
        super().update_replicas([*replicas, *(each for each in others if _address_of(each) in linked)])
        members.report([replica.replica_metadata for replica in replicas])


def _address_of(replica: Any) -> object:
    return replica.replica_metadata.get("address")
