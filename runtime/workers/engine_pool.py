"""All engine processes of a server as one core. Each request, with all its samples, belongs to one of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec

from ...scheduler import (
    AdmissionEstimate,
    EncodeRequest,
    FinalCounters,
    FinishReason,
    NotAccepting,
    QueuedRequest,
    QueueFull,
    Request,
)
from ..common.config import EngineConfig
from ..common.errors import ConfigError, SnapshotNotSaved, Unavailable
from ..common.settings import Settings
from ..engine import CoreInfo, CoreListener, EngineStats, HostStatus, LoadedAdapter, sum_stats
from ..model.runner import pick_cpus
from ..net.address import MAX_PORT
from .engine_link import LogOptions
from .health import HealthTimeouts
from .placement import place
from .router import Router
from .supervised_engine import SupervisedEngine
from .supervisor import RESTART_TIMEOUT_S
from .token_log import LoggedRequest

# Sizes that are for all processes together, each of which gets an equal part.
DIVIDED_SIZES = ("kv_cache_memory", "kv_spill_size", "state_cache_memory", "image_cache_memory")


class EnginePool:
    """Implements `engine.Core`. Made by `launch`."""

    def __init__(self, members: Mapping[str, SupervisedEngine]) -> None:
        self._set_members(members)
        self._num_running = len(members)
        self._listener = CoreListener()

    @classmethod
    async def launch(
        cls,
        config: EngineConfig,
        timeouts: HealthTimeouts | None = None,
        *,
        restart_timeout_s: float = RESTART_TIMEOUT_S,
        num_processes: int = 0,
        snapshot: str | None = None,
        log: LogOptions | None = None,
        name: str = "engine",
    ) -> EnginePool:
        """Return a pool whose processes are all ready; 0 processes: one for each NUMA node.

        The memory and threads in `config` are for all processes together. Raises as `SupervisedEngine.launch`.
        """
        places = place(num_processes)
        configs = [_share(config, index, len(places), len(cpus)) for index, cpus in enumerate(places)]
        launching = [
            asyncio.create_task(
                SupervisedEngine.launch(
                    configs[index],
                    timeouts,
                    restart_timeout_s=restart_timeout_s,
                    cpus=cpus if len(places) > 1 else None,
                    snapshot=snapshot if snapshot is None or len(places) == 1 else f"{snapshot}.{index}",
                    name=f"{name}-{index}",
                    log=log,
                )
            )
            for index, cpus in enumerate(places)
        ]
        try:
            members = await asyncio.gather(*launching)
            return cls({str(index): member for index, member in enumerate(members)})
        except BaseException:
            for task in launching:
                task.cancel()
            for member in await asyncio.gather(*launching, return_exceptions=True):
                if isinstance(member, SupervisedEngine):
                    await member.close()
            raise

    @property
    def info(self) -> CoreInfo:
        return total_info([member.info for member in self.members])

    def start(self, listener: CoreListener) -> None:
        self._listener = listener
        for member in self.members:
            member.start(self._listener_of(member))

    def check_room(self, tenant: str, count: int) -> None:
        for member in self.members[:-1]:
            with suppress(NotAccepting, QueueFull):
                member.check_room(tenant, count)
                return
        self.members[-1].check_room(tenant, count)

    async def add(self, requests: Sequence[Request]) -> AdmissionEstimate:
        """Add requests to one member. Its process decides whether they have room."""
        member = self.members[0] if len(self.members) == 1 else self._choose(requests[0], len(requests))
        return await member.add(requests)

    async def add_encoding(self, request: EncodeRequest) -> AdmissionEstimate:
        """Add texts to the member with the fewest requests. Its process decides whether they have room."""
        return await self._choose(request, 1).add_encoding(request)

    def readmit(self, entry: LoggedRequest) -> None:
        """Continue a request that was accepted elsewhere after its generated tokens. Limits do not apply."""
        self._route(entry.request, self.members).readmit(entry)

    @property
    def num_waiting(self) -> int:
        return sum(member.num_waiting for member in self.members)

    @property
    def predicted_wait_s(self) -> float:
        """The shortest predicted wait of a new request among members."""
        return min(member.load.predicted_wait_s for member in self.members)

    def cancel(self, request_id: int) -> None:
        for member in self.members:
            member.cancel(request_id)

    def drop(
        self, request_id: int, reason: FinishReason | None = None, error: str | None = None
    ) -> FinalCounters | None:
        found = [member.drop(request_id, reason, error) for member in self.members]
        return next((counters for counters in found if counters is not None), None)

    def stats(self) -> EngineStats:
        """Return the sums over members whose process is ready; counters are summed over all, so they never fall.

        Raises Unavailable while no process is ready.
        """
        ready: list[EngineStats] = []
        counters: list[EngineStats] = []  # counts of members whose process is not ready
        problem: Unavailable | None = None
        for member in self.members:
            try:
                ready.append(member.stats())
            except Unavailable as error:
                problem = error
                counters.append(member.counters())
        if problem is not None and not ready:
            raise problem
        return sum_stats([*ready, *counters])

    async def load_adapter(self, name: str, path: str, kept: Sequence[str], leaving: Sequence[str]) -> LoadedAdapter:
        """See `Core.load_adapter`. All members load it; an adapter that leaves one of them has left."""
        loading = [member.load_adapter(name, path, kept, leaving) for member in self.members]
        outcomes = await asyncio.gather(*loading, return_exceptions=True)
        for error in outcomes:
            if isinstance(error, BaseException):
                raise error
        loaded = [each for each in outcomes if isinstance(each, LoadedAdapter)]
        return loaded[0]._replace(evicted=tuple(dict.fromkeys(key for each in loaded for key in each.evicted)))

    def host_statuses(self) -> Sequence[HostStatus] | None:
        return None

    async def drain(self) -> None:
        """See `Core.drain`. Requests may move between members meanwhile."""
        while True:
            await asyncio.gather(*(member.drain() for member in self.members))
            if not any(member.num_requests for member in self.members):
                return

    async def stop(self) -> None:
        """See `Core.stop`. All members are stopped even if one fails; its error is raised at the end."""
        outcomes = await asyncio.gather(*(member.stop() for member in self.members), return_exceptions=True)
        for error in filter(None, outcomes):
            raise error

    async def close(self) -> None:
        await self.stop()

    # CoreListener of the members

    def _listener_of(self, member: SupervisedEngine) -> CoreListener:
        return dataclasses.replace(
            self._listener,
            ended=self._on_member_ended,
            interrupted=partial(self._on_interrupted, member),
            resumed=self._on_resumed,
        )

    def _on_interrupted(self, member: SupervisedEngine, request_ids: Sequence[int]) -> None:
        """Continue requests at other members; without any, at another core or at the first member that returns."""
        if not self._rehome(member):
            self._listener.interrupted(request_ids)

    def _on_resumed(self) -> None:
        for member in self.members:
            if not member.is_ready:
                self._rehome(member)

    def _on_member_ended(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._listener.ended()

    # Members

    def _rehome(self, lost: SupervisedEngine) -> bool:
        """Continue the requests of a lost member at others. Return False if there are none."""
        has_others = any(member.takes_requests for member in self.members)
        if has_others:
            for entry in lost.give_up():
                self._move(entry)
        return has_others

    def _move(self, entry: LoggedRequest) -> bool:
        """Continue a request at a member that takes requests. Return False if there is none."""
        targets = [member for member in self.members if member.takes_requests]
        if targets:
            self._route(entry.request, targets).readmit(entry)
        return bool(targets)

    def _set_members(self, members: Mapping[str, SupervisedEngine]) -> None:
        self.members = list(members.values())
        self._by_name = dict(members)
        self._router = Router(members)

    def _with_room(self, tenant: str, count: int) -> list[SupervisedEngine]:
        """Return the members that had room in their last report."""
        found = []
        for member in self.members:
            with suppress(NotAccepting, QueueFull):
                member.check_room(tenant, count)
                found.append(member)
        return found

    def _choose(self, request: QueuedRequest, count: int) -> SupervisedEngine:
        """Return the member for a request: one with room and a ready process, if there is one.

        If no member has room, the first one is asked, and its refusal is returned.
        """
        candidates = self._with_room(request.spec.tenant, count)
        return self._route(request, candidates) if candidates else self.members[0]

    def _route(self, request: QueuedRequest, candidates: Sequence[SupervisedEngine]) -> SupervisedEngine:
        """Return one of `candidates`, preferably a member that computes: by conversation; for texts, by load."""
        ready = {member for member in candidates if member.takes_requests} or set(candidates)
        loads = {name: member.load for name, member in self._by_name.items() if member in ready}
        if isinstance(request, Request):
            return self._by_name[self._router.choose(request.spec.conversation, loads)]
        return self._by_name[min(loads, key=lambda name: loads[name].num_requests)]


@asynccontextmanager
async def engine_processes(settings: Settings, name: str = "engine") -> AsyncIterator[EnginePool]:
    """Run engine processes on this machine; log lines have their `name`.

    Raises SnapshotNotSaved at the end if a cache was not saved.
    """
    server = settings.server
    pool = await EnginePool.launch(
        settings.engine,
        HealthTimeouts(server.engine_heartbeat_timeout_ms / 1000, server.stall_timeout_ms / 1000),
        restart_timeout_s=server.engine_restart_timeout_ms / 1000,
        num_processes=server.engine_processes,
        snapshot=server.prefix_snapshot,
        log=(server.log_format, server.log_level),
        name=name,
    )
    try:
        yield pool
    finally:
        await pool.close()
    if lost := [member.lost_snapshot for member in pool.members if member.lost_snapshot is not None]:
        raise SnapshotNotSaved("; ".join(lost))


def total_info(infos: Sequence[CoreInfo]) -> CoreInfo:
    """Return the common description of several cores, with the shortest of their context lengths."""
    return msgspec.structs.replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        num_pages=sum(info.num_pages for info in infos),
        threads=sum(info.threads for info in infos),
        num_processes=sum(info.num_processes for info in infos),
    )


def _share(config: EngineConfig, index: int, count: int, num_cpus: int) -> EngineConfig:
    """Return the configuration of one of `count` processes, which runs on `num_cpus` CPUs. Raises ConfigError."""
    if count == 1:
        return config
    sizes = {name: getattr(config, name) for name in DIVIDED_SIZES}
    divided = {name: size // count for name, size in sizes.items() if size}
    endpoints = {name: _endpoint(name, getattr(config, name), index) for name in ("kv_events", "kv_events_replay")}
    threads = max(1, min(num_cpus, pick_cpus(config).threads // count))  # a CPU quota is for all processes together
    return msgspec.structs.replace(
        config, threads=threads, kv_cache_share=config.kv_cache_share / count, **divided, **endpoints
    )


def _endpoint(option: str, endpoint: str | None, index: int) -> str | None:
    """Return the ZeroMQ endpoint of a process: its index is added to the port or appended to the path."""
    if endpoint is None or not index:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}.{index}"
    address, _, port = endpoint.rpartition(":")
    if not port.isdecimal() or int(port) + index > MAX_PORT:
        raise ConfigError(f"{option}: {endpoint!r} has no port for engine process {index}, such as tcp://*:5557 has")
    return f"{address}:{int(port) + index}"
