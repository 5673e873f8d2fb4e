"""All engine hosts of an API server as one core: each request belongs to one host at a time and ends once.

When a host is lost, its requests continue at others after their last token, so the bytes of their streams do not
change. Limits do not apply to them again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import structlog

from ...scheduler import (
    AdmissionEstimate,
    EncodeRequest,
    NotAccepting,
    QueuedRequest,
    QueueFull,
    Request,
    SchedulerError,
)
from ..common.errors import InvalidRequest, Quarantined, Unavailable
from ..engine import CoreInfo, EngineStats, HostStatus, LoadedAdapter
from ..workers import EnginePool, HealthTimeouts
from ..workers.engine_pool import total_info
from ..workers.supervised_engine import SupervisedEngine
from ..workers.token_log import MAX_UNBEGUN_HOSTS
from .members import Member, MemberSource
from .remote import LOST_HOSTS_REASON, Credentials, HostLost, HostSource, HostTraits, RemoteHost

CONNECT_POLL_S = 0.02
RESOLVE_AGAIN_S = 0.25  # pause between lookups while there is no host
MAX_SHOWN_PROBLEMS = 8

_log = structlog.get_logger("quire.cluster")


class Cluster(EnginePool):
    """Implements `engine.Core`. Made by `connect`."""

    @classmethod
    async def connect(
        cls,
        members: MemberSource,
        credentials: Credentials,
        models_digest: str,
        *,
        heartbeat_timeout_s: float = 1.0,
        restart_timeout_s: float = 30.0,
    ) -> Cluster:
        """Return a cluster that has tried every host and reached at least one.

        Raises permanent errors, such as a wrong secret, and Unavailable if no host has been reached in
        `restart_timeout_s`.
        """
        timeouts = HealthTimeouts(heartbeat_timeout_s, stall_s=math.inf)  # a host detects its own stalls
        cluster = cls(members, credentials, HostTraits(models_digest), timeouts, restart_timeout_s)
        try:
            async with asyncio.timeout(restart_timeout_s):
                await cluster._connect()
        except BaseException as error:
            await cluster.close()
            if isinstance(error, TimeoutError):
                problems = cluster._problems()
                raise Unavailable(f"no engine host was reached in {restart_timeout_s:g} s: {problems}") from None
            raise
        return cluster

    def __init__(
        self,
        members: MemberSource,
        credentials: Credentials,
        traits: HostTraits,
        timeouts: HealthTimeouts,
        restart_timeout_s: float,
    ) -> None:
        super().__init__({})
        self.hosts: dict[str, RemoteHost] = {}  # address -> host; also hosts that have left, until their requests end
        self._where = members
        self._credentials = credentials
        self._traits = traits
        self._timeouts = timeouts
        self._restart_timeout_s = restart_timeout_s
        self._updating: asyncio.Task[None] | None = None
        self._unresolved: str | None = None  # error of the last lookup of members

    @property
    def info(self) -> CoreInfo:
        """See `Core.info`. It has the sizes at the start."""
        return self._info

    def check_room(self, tenant: str, count: int) -> None:
        if not self.hosts:
            raise NotAccepting("there is no engine host")
        super().check_room(tenant, count)

    async def add(self, requests: Sequence[Request]) -> AdmissionEstimate:
        """Add requests to one host, skipping hosts that refuse for lack of room or are lost before they answer."""
        return await self._add_somewhere(requests[0], len(requests), lambda host: host.add(requests))

    async def add_encoding(self, request: EncodeRequest) -> AdmissionEstimate:
        """Add texts to one host, as `add` does."""
        return await self._add_somewhere(request, 1, lambda host: host.add_encoding(request))

    async def _add_somewhere(
        self,
        request: QueuedRequest,
        count: int,
        add_to: Callable[[SupervisedEngine], Awaitable[AdmissionEstimate]],
    ) -> AdmissionEstimate:
        num_lost = 0
        refusals: dict[SupervisedEngine, SchedulerError] = {}
        while True:
            host = self._choose_except(request, count, refusals)
            try:
                return await add_to(host)
            except HostLost:
                num_lost += 1
                if num_lost >= MAX_UNBEGUN_HOSTS:
                    raise Quarantined(LOST_HOSTS_REASON) from None
            except (NotAccepting, QueueFull) as refusal:
                refusals[host] = refusal

    async def load_adapter(self, name: str, path: str, kept: Sequence[str], leaving: Sequence[str]) -> LoadedAdapter:
        """Refuse: engine hosts load adapters at their start."""
        raise InvalidRequest("engine hosts have the adapters of their start; start them with other ones")

    def stats(self) -> EngineStats:
        if not self.hosts:
            raise Unavailable("there is no engine host")
        return super().stats()

    def host_statuses(self) -> Sequence[HostStatus]:
        return [host.status() for host in self.hosts.values()]

    async def stop(self) -> None:
        self._stop_updating()
        await super().stop()
        self._listener.ended()

    # Changes of hosts

    def _on_member_ended(self) -> None:
        """Do nothing: `stop` reports the end of all hosts."""

    async def _connect(self) -> None:
        """Connect to all hosts. Return when all have been tried and one is ready."""
        while not self.hosts:
            await self._update()
            await asyncio.sleep(0 if self.hosts else RESOLVE_AGAIN_S)
        while True:
            hosts = self.hosts.values()
            for host in hosts:
                if host.problem is not None and not host.problem.retryable:
                    raise host.problem
            tried = [host.state != "down" or host.problem is not None for host in hosts]
            if all(tried) and any(host.is_ready for host in hosts):
                break
            await asyncio.sleep(CONNECT_POLL_S)
        ready = [host.info for host in hosts if host.is_ready]
        self._info = total_info(ready)
        if self._where.may_change:
            self._updating = asyncio.create_task(self._keep_updating(), name="quire-cluster-members")

    def _stop_updating(self) -> None:
        if self._updating is not None:
            self._updating.cancel()

    async def _keep_updating(self) -> None:
        while True:
            await self._where.wait_for_change()
            await self._update()

    async def _update(self) -> None:
        """Connect to new members, and disconnect former members whose requests have ended."""
        try:
            members = await self._where.resolve()
        except OSError as error:
            if str(error) != self._unresolved:
                _log.warning("engine hosts cannot be resolved", reason=str(error))
            self._unresolved = str(error)
            return
        self._unresolved = None
        addresses = {str(member.address) for member in members}
        for address, host in list(self.hosts.items()):
            if address not in addresses:
                host.is_retired = True
                if not host.num_requests:
                    del self.hosts[address]
                    await asyncio.shield(host.close())  # `stop` may end this task meanwhile
        for member in members:
            address = str(member.address)
            if address not in self.hosts:
                self.hosts[address] = self._connect_to(member)
            self.hosts[address].rejoin(member)
        self._set_members(self.hosts)

    def _problems(self) -> str:
        """Return the reasons why no host was reached."""
        problems = [str(host.problem or f"{name}: no answer") for name, host in self.hosts.items()]
        more = [f"and {len(problems) - MAX_SHOWN_PROBLEMS} more"] if len(problems) > MAX_SHOWN_PROBLEMS else []
        return "; ".join(problems[:MAX_SHOWN_PROBLEMS] + more) or self._unresolved or "no name has an address"

    def _connect_to(self, member: Member) -> RemoteHost:
        source = HostSource(member, self._credentials, self._traits)
        host = RemoteHost(source, self._move, self._timeouts, self._restart_timeout_s)
        host.start(self._listener_of(host))
        host.connect()
        return host

    def _choose_except(
        self, request: QueuedRequest, count: int, refusals: Mapping[SupervisedEngine, SchedulerError]
    ) -> SupervisedEngine:
        """Return the host for a request. Raises the last refusal if no other host is left."""
        candidates = [host for host in self._with_room(request.spec.tenant, count) if host not in refusals]
        if candidates:
            return self._route(request, candidates)
        if refusals:
            raise list(refusals.values())[-1]
        if not self.members:
            raise NotAccepting("there is no engine host")
        return self.members[0]
