"""All engine processes of a server as one core. Each request, with all its samples, belongs to one of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import attrgetter

import msgspec

from ...scheduler import AdmissionEstimate, EncodeRequest, FinishReason, NotAccepting, QueueFull, Request
from ..common.config import EngineConfig
from ..common.errors import Unavailable
from ..engine import CoreInfo, CoreListener, EngineStats
from ..model.runner import pick_cpus
from .engine_link import LogOptions
from .health import HealthTimeouts
from .placement import place
from .router import Router
from .supervised_engine import SupervisedEngine
from .supervisor import RESTART_TIMEOUT_S


class EnginePool:
    """Implements `engine.Core`. Made by `launch`."""

    def __init__(self, members: Sequence[SupervisedEngine]) -> None:
        self.members = members
        info = members[0].info
        self._info = msgspec.structs.replace(
            info,
            max_model_len=min(member.info.max_model_len for member in members),
            num_pages=sum(member.info.num_pages for member in members),
            threads=sum(member.info.threads for member in members),
            num_processes=len(members),
        )
        self._router = Router(str(index) for index in range(len(members)))
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
    ) -> EnginePool:
        """Return a pool whose processes are all ready; 0 processes: one for each NUMA node.

        Memory and threads that `config` gives are for all of them together. Raises what `SupervisedEngine.launch` does.
        """
        places = place(num_processes)
        launching = [
            asyncio.create_task(
                SupervisedEngine.launch(
                    _share(config, len(places), len(cpus)),
                    timeouts,
                    restart_timeout_s=restart_timeout_s,
                    cpus=cpus if len(places) > 1 else None,
                    snapshot=snapshot if snapshot is None or len(places) == 1 else f"{snapshot}.{index}",
                    name=f"engine-{index}",
                    log=log,
                )
            )
            for index, cpus in enumerate(places)
        ]
        try:
            return cls(await asyncio.gather(*launching))
        except BaseException:
            for task in launching:
                task.cancel()
            for member in await asyncio.gather(*launching, return_exceptions=True):
                if isinstance(member, SupervisedEngine):
                    await member.close()
            raise

    @property
    def info(self) -> CoreInfo:
        return self._info

    def start(self, listener: CoreListener) -> None:
        self._listener = listener
        for member in self.members:
            member.start(dataclasses.replace(listener, ended=self._on_member_ended))

    def check_room(self, tenant: str, count: int) -> None:
        if not self._with_room(tenant, count):
            self.members[-1].check_room(tenant, count)  # raises

    async def add(self, requests: Sequence[Request]) -> AdmissionEstimate:
        """Add requests to one member. Its process decides whether they have room."""
        member = self.members[0] if len(self.members) == 1 else self._choose(requests[0], len(requests))
        return await member.add(requests)

    async def add_encoding(self, request: EncodeRequest) -> AdmissionEstimate:
        """Add texts to the member with the fewest requests. Its process decides whether they have room."""
        candidates = self._candidates(request.spec.tenant, 1) or [0]
        return await min([self.members[i] for i in candidates], key=attrgetter("num_requests")).add_encoding(request)

    def cancel(self, request_id: int) -> None:
        for member in self.members:
            member.cancel(request_id)

    def drop(self, request_id: int, reason: FinishReason | None = None, error: str | None = None) -> None:
        for member in self.members:
            member.drop(request_id, reason, error)

    def stats(self) -> EngineStats:
        """Return the sums over members whose process is ready; counters are summed over all, so they never fall.

        Raises Unavailable while no process is ready.
        """
        ready: list[EngineStats] = []
        counters: list[Mapping[str, int]] = []  # of members whose process is not ready
        problem: Unavailable | None = None
        for member in self.members:
            try:
                ready.append(member.stats())
            except Unavailable as error:
                problem = error
                counters.append(member.counters())
        if problem is not None and not ready:
            raise problem
        return _sum(ready, counters)

    async def drain(self) -> None:
        await asyncio.gather(*(member.drain() for member in self.members))

    async def stop(self) -> None:
        await asyncio.gather(*(member.stop() for member in self.members))

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self.members))

    def _with_room(self, tenant: str, count: int) -> list[int]:
        """Return the indices of members that have room by what they said last."""
        indices = []
        for index, member in enumerate(self.members):
            with suppress(NotAccepting, QueueFull):
                member.check_room(tenant, count)
                indices.append(index)
        return indices

    def _candidates(self, tenant: str, count: int) -> list[int]:
        """Return the indices of members that have room, those whose process is ready if there are some."""
        with_room = self._with_room(tenant, count)
        return [index for index in with_room if self.members[index].pid is not None] or with_room

    def _choose(self, request: Request, count: int) -> SupervisedEngine:
        """Return the member that a request goes to: one with room and a process that is ready, if there is one.

        Without any room the first member is asked; its refusal is returned.
        """
        candidates = self._candidates(request.spec.tenant, count)
        if not candidates:
            return self.members[0]
        loads = {str(index): self.members[index].load for index in candidates}
        return self.members[int(self._router.choose(request.spec.conversation, loads))]

    def _on_member_ended(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._listener.ended()


def _share(config: EngineConfig, count: int, num_cpus: int) -> EngineConfig:
    """Return the configuration of one of `count` processes, which runs on `num_cpus` CPUs."""
    if count == 1:
        return config
    sizes = {name: getattr(config, name) for name in ("kv_cache_memory", "kv_spill_size")}
    divided = {name: size // count for name, size in sizes.items() if size}
    threads = max(1, min(num_cpus, pick_cpus(config).threads // count))  # a CPU quota is for all processes together
    return msgspec.structs.replace(config, threads=threads, kv_cache_share=config.kv_cache_share / count, **divided)


def _sum(all_stats: Sequence[EngineStats], counters: Sequence[Mapping[str, int]]) -> EngineStats:
    """Add up stats, and the counters of engines that have none."""
    if len(all_stats) == 1 and not counters:
        return all_stats[0]
    reasons: Counter[str] = Counter()
    for stats in all_stats:
        reasons.update(stats.waiting_by_reason)
    names = [name for name in EngineStats.__struct_fields__ if name != "waiting_by_reason"]
    sums = {name: sum(getattr(stats, name) for stats in all_stats) for name in names}
    for counts in counters:
        for name, count in counts.items():
            sums[name] += count
    return EngineStats(waiting_by_reason=dict(reasons), **sums)
