"""The fleet: all engine processes of a server as one core.

It must not know lives and deaths; each member takes care of itself. One invariant: a request, with all its samples,
belongs to one member from its acceptance to its end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from ...scheduler import AdmissionEstimate, FinishReason, NotAccepting, QueueFull, Request, RequestUpdate
from ..common.config import EngineConfig
from ..common.errors import QuireError, Unavailable
from ..engine import CoreInfo, CoreListener, EngineStats
from ..model.runner import pick_cpus
from .engine_link import LogForm
from .placement import place
from .router import Router
from .supervised_engine import HealthTimeouts, SupervisedEngine


class EnginePool:
    """Implements `engine.Core`. Make one with `launch`."""

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
        self._router = Router(len(members), info.page_size)
        self._owners: dict[int, int] = {}  # of live requests
        self._restarts = [0] * len(members)
        self._num_running = len(members)
        self._listener: CoreListener | None = None

    @classmethod
    async def launch(
        cls,
        config: EngineConfig,
        timeouts: HealthTimeouts | None = None,
        *,
        num_processes: int = 0,
        snapshot: str | None = None,
        log: LogForm | None = None,
    ) -> EnginePool:
        """All processes ready. Memory and threads that are given are for all of them together. Raises as one does."""
        places = place(num_processes)
        launching = [
            asyncio.create_task(
                SupervisedEngine.launch(
                    _share(config, len(places), len(cpus)),
                    timeouts,
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
            member.start(CoreListener(self._publish, self._fail, listener.observe, self._note_end))

    def check_room(self, tenant: str, count: int) -> None:
        """Raises what the last member says, if none has room."""
        refusal: NotAccepting | QueueFull | None = None
        for member in self.members:
            try:
                member.check_room(tenant, count)
            except (NotAccepting, QueueFull) as refused:
                refusal = refused
            else:
                return
        assert refusal is not None, "a fleet has members"
        raise refusal

    async def add(self, requests: Sequence[Request]) -> AdmissionEstimate:
        index = self._choose(requests[0], len(requests))
        self._owners.update((request.request_id, index) for request in requests)
        try:
            return await self.members[index].add(requests)
        except BaseException:  # also of a caller that leaves when it has just been accepted
            for request in requests:
                self.drop(request.request_id, error="it was refused")
            raise

    def cancel(self, request_id: int) -> None:
        if (index := self._owners.get(request_id)) is not None:
            self.members[index].cancel(request_id)

    def drop(self, request_id: int, reason: FinishReason | None = None, error: str | None = None) -> None:
        if (index := self._owners.pop(request_id, None)) is not None:
            self.members[index].drop(request_id, reason, error)

    def stats(self) -> EngineStats:
        """Of all members that compute now, with what the others counted: a counter never falls. Raises Unavailable if
        none computes.
        """
        found: list[EngineStats] = []
        away: list[dict[str, int]] = []
        problem: Unavailable | None = None
        for member in self.members:
            try:
                found.append(member.stats())
            except Unavailable as error:
                problem = error
                away.append(member.counters())
        if not found:
            raise problem or Unavailable("there is no engine process")
        return _sum(found, away)

    async def drain(self) -> None:
        await asyncio.gather(*(member.drain() for member in self.members))

    async def stop(self) -> None:
        await asyncio.gather(*(member.stop() for member in self.members))

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self.members))

    def _choose(self, request: Request, count: int) -> int:
        """Of the members with room, if any has it: which then says itself why not. Rather not one that restarts."""
        open_to = []
        for index, member in enumerate(self.members):
            with suppress(NotAccepting, QueueFull):
                member.check_room(request.spec.tenant, count)
                open_to.append(index)
        if len(self.members) == 1 or not open_to:
            return 0
        open_to = [index for index in open_to if self.members[index].pid is not None] or open_to
        for index, member in enumerate(self.members):
            if member.num_restarts != self._restarts[index]:
                self._restarts[index] = member.num_restarts
                self._router.forget(index)
        loads = [member.num_requests if index in open_to else 1 << 30 for index, member in enumerate(self.members)]
        return self._router.choose(request.spec.tenant, request.spec.prompt_token_ids, loads)

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            if update.ended:
                self._owners.pop(update.request_id, None)
        assert self._listener is not None, "members tell nothing before `start`"
        self._listener.publish(updates)

    def _fail(self, request_id: int, error: QuireError) -> None:
        self._owners.pop(request_id, None)
        assert self._listener is not None, "members tell nothing before `start`"
        self._listener.fail(request_id, error)

    def _note_end(self) -> None:
        self._num_running -= 1
        if not self._num_running and self._listener is not None:
            self._listener.ended()


def _share(config: EngineConfig, count: int, num_cpus: int) -> EngineConfig:
    """What one of so many processes gets, on so many CPUs."""
    if count == 1:
        return config
    sizes = {name: getattr(config, name) for name in ("kv_cache_memory", "kv_spill_size")}
    divided = {name: size // count for name, size in sizes.items() if size}
    threads = max(1, min(num_cpus, pick_cpus(config).threads // count))  # a quota is for all of them
    return msgspec.structs.replace(config, threads=threads, kv_cache_share=config.kv_cache_share / count, **divided)


def _sum(all_stats: Sequence[EngineStats], counters: Sequence[Mapping[str, int]]) -> EngineStats:
    if len(all_stats) == 1 and not counters:
        return all_stats[0]
    reasons: Counter[str] = Counter()
    for stats in all_stats:
        reasons.update(stats.waiting_by_reason)
    numbers = [name for name in EngineStats.__struct_fields__ if name != "waiting_by_reason"]
    sums = {name: sum(getattr(stats, name) for stats in all_stats) for name in numbers}
    for counted in counters:
        for name, count in counted.items():
            sums[name] += count
    return EngineStats(waiting_by_reason=dict(reasons), **sums)
