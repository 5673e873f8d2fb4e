"""Serve's view of its engine hosts, in each process that has a handle to them."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from . import members


class HostRouter(RequestRouter):
    """Reports the replicas whenever Serve's controller reports a change, 0.3 s after it.

    Clients' requests do not pass through it: the router of `workers/` chooses their hosts. This router sends each call
    of a link to the replica in its first argument, even while that replica leaves, so that running requests may end.
    """

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the replica that a call names, or all replicas for a call without a name.

        If the named replica is gone, another one is returned, which refuses the call. Otherwise Serve would wait for
        it, with one of the few tasks that route the calls of all links.
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
