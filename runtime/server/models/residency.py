"""`Residency`: which models of a server are loaded, within one size of memory for all.

One task loads and unloads models, one after the other. A request for another model waits for it, or is refused with the
time after which the model is expected. To make room, the task takes the model that was used longest ago: it refuses new
requests, and is unloaded once its streams have ended. No stream is cut. Must not import doors.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Literal

import msgspec
import structlog

from ...common.errors import Overloaded, QuireError, Unavailable
from ...common.tasks import end_tasks
from ...engine.facade import EngineFacade
from .managed_engine import ManagedEngine

LoadPolicy = Literal["start", "first-use", "operator"]
ModelState = Literal["unloaded", "waiting", "loading", "ready", "draining", "failed"]

IDLE_POLL_S = 0.5  # pause between two looks for models that are idle
ROOM_POLL_S = 0.05  # pause between two looks for a model that may be unloaded
PATIENCE_S = 1.0  # time in which an idle model may appear before a busy one is drained
NEXT_LOAD_S = 10.0  # pause after a failed load
FIRST_LOAD_S, LOAD_BYTES_PER_S = 2.0, 300e6  # estimate of a model's first load

_log = structlog.get_logger("quire.server")


class ResidentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one model, for operators and metrics."""

    name: str
    state: ModelState
    pinned: bool
    memory_bytes: int  # size while it is loaded
    ready_in_s: float | None  # estimate for a model that is not ready
    load_s: float | None  # duration of the last load
    problem: str | None  # reason why the last load failed
    loads: int
    evictions: int  # times that it was unloaded for another model
    idle_unloads: int
    waits: int  # requests that waited for the model
    refusals: int  # requests that were refused because the model was not loaded


class Resident:
    """One model and its place in memory. `Residency` alone changes it."""

    def __init__(
        self,
        name: str,
        num_bytes: int,
        open_engine: Callable[[], AbstractAsyncContextManager[EngineFacade]],
        *,
        policy: LoadPolicy = "first-use",
        idle_timeout_s: float | None = None,
        is_pinned: bool = False,
    ) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self.open_engine = open_engine
        self.policy = policy
        self.idle_timeout_s = idle_timeout_s
        self.is_pinned = is_pinned
        self.state: ModelState = "unloaded"
        self.facade: ManagedEngine | None = None  # receives the loaded engine
        self.engine: EngineFacade | None = None
        self.opened = AsyncExitStack()
        self.busy_at = 0.0  # the loop's time at which the model was last seen in use
        self.load_began = 0.0
        self.load_s: float | None = None
        self.problem: str | None = None
        self.retry_at = -math.inf
        self.is_asked_for = False  # an operator has asked for the model
        self.waiters: list[asyncio.Future[None]] = []
        self.num_pending = 0  # requests that wait for the model, or that its engine has not accepted yet
        self.num_loads = self.num_evictions = self.num_idle_unloads = self.num_waits = self.num_refusals = 0

    @property
    def last_used(self) -> float:
        """The loop's time of the last request, or at which the model was last seen in use."""
        return self.busy_at if self.facade is None else max(self.busy_at, self.facade.used_at)

    @property
    def is_wanted(self) -> bool:
        return self.is_asked_for or bool(self.waiters)

    @property
    def expected_load_s(self) -> float:
        return FIRST_LOAD_S + self.num_bytes / LOAD_BYTES_PER_S if self.load_s is None else self.load_s

    @property
    def is_busy(self) -> bool:
        """Whether the engine has requests, as it last reported."""
        if self.num_pending or self.engine is None:
            return True
        with suppress(QuireError):
            stats = self.engine.stats()
            return bool(stats.running + stats.waiting + stats.encoder_running + stats.encoder_waiting)
        return False


class Residency:
    """Loads and unloads the models of one server, from `start` to `close`."""

    def __init__(
        self, residents: Sequence[Resident], memory_bytes: int | None = None, max_wait_s: float = 60.0
    ) -> None:
        self.residents = {resident.name: resident for resident in residents}
        self.memory_bytes = memory_bytes
        self._max_wait_s = max_wait_s
        self._wanted: dict[Resident, None] = {}  # models to load, in order
        self._to_unload: dict[Resident, None] = {}  # models that an operator unloads
        self._wake = asyncio.Event()
        self._drain_s = 0.0  # duration of the last drain of a busy model
        self._task: asyncio.Task[None] | None = None

    @property
    def used_bytes(self) -> int:
        """The memory of all models that are loaded, or being loaded or unloaded."""
        return sum(each.num_bytes for each in self.residents.values() if each.state in ("loading", "ready", "draining"))

    async def start(self) -> None:
        """Load the models whose policy says so. Raises the first error, after unloading the others."""
        try:
            for resident in self.residents.values():
                if resident.policy == "start":
                    await self._open(resident)
        except BaseException:
            await self.close()
            raise
        self._task = asyncio.create_task(self._run(), name="quire-residency")

    async def close(self) -> None:
        """Unload all models, even if one does not stop well, and end the task. Idempotent."""
        if self._task is not None:
            await end_tasks([self._task], "loading of models")
            self._task = None
        async with AsyncExitStack() as all_opened:
            for resident in self.residents.values():
                self._refuse_waiters(resident, Unavailable("the server is shutting down"))
                all_opened.push_async_exit(resident.opened)

    # Requests

    async def ready(self, resident: Resident) -> None:
        """Wait until a model is loaded.

        Raises Overloaded, with a time, if that takes too long, and Unavailable if the model cannot be loaded now.
        """
        resident.busy_at = asyncio.get_running_loop().time()
        if resident.state == "ready":
            return
        self._check_wait(resident)
        resident.num_waits += 1
        loaded = asyncio.get_running_loop().create_future()
        resident.waiters.append(loaded)
        self._want(resident)
        resident.num_pending += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                await loaded
        except TimeoutError:
            raise self._refusal(resident, self.ready_in_s(resident)) from None
        finally:
            resident.num_pending -= 1
            if loaded in resident.waiters:
                resident.waiters.remove(loaded)

    @asynccontextmanager
    async def using(self, resident: Resident) -> AsyncIterator[EngineFacade]:
        """Keep a model loaded while the caller submits a request to its engine. Raises as `ready`."""
        resident.num_pending += 1
        try:
            await self.ready(resident)
            assert resident.engine is not None, "ready"
            yield resident.engine
        finally:
            resident.num_pending -= 1

    def ready_in_s(self, resident: Resident) -> float:
        """Estimate the time until a model is loaded, if a request asks for it now."""
        now = asyncio.get_running_loop().time()
        if resident.state == "ready":
            return 0.0
        ahead = list(self._wanted)
        ahead = ahead[: ahead.index(resident)] if resident in self._wanted else ahead
        seconds = resident.expected_load_s + sum(each.expected_load_s for each in ahead)
        for each in self.residents.values():
            if each.state == "loading":
                seconds -= min(each.expected_load_s, now - each.load_began)
        if not self._has_room(resident) and self._victim(resident, takes_busy=False) is None:
            seconds += self._drain_s
        return seconds

    def _check_wait(self, resident: Resident) -> None:
        """Raise the refusal of a request that cannot wait for its model."""
        now = asyncio.get_running_loop().time()
        if resident.state == "failed" and now < resident.retry_at:
            resident.num_refusals += 1
            raise _unavailable(f"the model {resident.name!r} cannot be loaded: {resident.problem}", resident, now)
        is_leaving = resident.state in ("unloaded", "draining", "failed")
        if resident.policy == "operator" and not resident.is_asked_for and is_leaving:
            resident.num_refusals += 1
            raise Unavailable(f"the model {resident.name!r} is not loaded; an operator of this server loads it")
        seconds = self.ready_in_s(resident)
        if seconds > self._max_wait_s:
            raise self._refusal(resident, seconds)

    def _refusal(self, resident: Resident, seconds: float) -> Overloaded:
        resident.num_refusals += 1
        return Overloaded(
            f"the model {resident.name!r} is not loaded; it is expected in {seconds:.1f} s, and requests wait for "
            f"{self._max_wait_s:g} s at most",
            max(1, math.ceil(seconds * 1000)),
        )

    # Operators

    def load(self, name: str) -> None:
        """Load a model soon."""
        resident = self.residents[name]
        if resident.state != "ready":
            resident.is_asked_for = True
            resident.retry_at = -math.inf
            self._want(resident)

    def unload(self, name: str) -> None:
        """Unload a model once its requests have ended."""
        resident = self.residents[name]
        resident.is_asked_for = False
        if resident.state in ("ready", "loading", "waiting"):
            self._to_unload[resident] = None
            self._wake.set()

    def pin(self, name: str, *, is_pinned: bool) -> None:
        """Keep a model loaded, or let it be unloaded for another one or when it is idle."""
        self.residents[name].is_pinned = is_pinned
        self._wake.set()

    def statuses(self) -> list[ResidentStatus]:
        return [self.status(resident) for resident in self.residents.values()]

    def status(self, resident: Resident) -> ResidentStatus:
        return ResidentStatus(
            name=resident.name,
            state=resident.state,
            pinned=resident.is_pinned,
            memory_bytes=resident.num_bytes,
            ready_in_s=None if resident.state == "ready" else round(self.ready_in_s(resident), 2),
            load_s=resident.load_s,
            problem=resident.problem,
            loads=resident.num_loads,
            evictions=resident.num_evictions,
            idle_unloads=resident.num_idle_unloads,
            waits=resident.num_waits,
            refusals=resident.num_refusals,
        )

    # The task

    def _want(self, resident: Resident) -> None:
        self._wanted.setdefault(resident)
        if resident.state in ("unloaded", "failed"):
            resident.state = "waiting"
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            if self._to_unload:
                await self._unload_asked()
            elif self._wanted:
                await self._load_next(next(iter(self._wanted)))
            elif (idle := self._idle()) is not None:
                idle.num_idle_unloads += 1
                await self._unload(idle)
            else:
                await self._pause(IDLE_POLL_S)

    async def _unload_asked(self) -> None:
        resident = next(iter(self._to_unload))
        del self._to_unload[resident]
        if resident.state == "ready":
            await self._unload(resident)
        elif not resident.is_wanted:
            self._give_up(resident)

    async def _load_next(self, resident: Resident) -> None:
        """Load a model, once there is room for it."""
        if resident.state == "ready" or not resident.is_wanted:
            self._give_up(resident)
            return
        if not await self._make_room(resident):
            return
        try:
            await self._open(resident)
        except Exception as error:  # such as OSError for too many open files; later loads need this task
            is_expected = isinstance(error, QuireError)
            _log.error("a model was not loaded", model=resident.name, reason=str(error), exc_info=not is_expected)
            now = asyncio.get_running_loop().time()
            resident.problem = str(error)
            resident.retry_at = now + NEXT_LOAD_S
            resident.state = "failed"
            refusal = f"the model {resident.name!r} cannot be loaded: {error}"
            self._refuse_waiters(resident, _unavailable(refusal, resident, now))
        resident.is_asked_for = False
        self._give_up(resident)

    def _give_up(self, resident: Resident) -> None:
        """Stop loading a model that is ready or not wanted."""
        self._wanted.pop(resident, None)
        if resident.state == "waiting":
            resident.state = "unloaded"

    async def _make_room(self, resident: Resident) -> bool:
        """Unload models until `resident` fits. Return False if it is not wanted any more, or cannot fit."""
        began = asyncio.get_running_loop().time()
        while not self._has_room(resident):
            if not resident.is_wanted:
                self._give_up(resident)
                return False
            if (held := self._pinned_bytes(resident)) + resident.num_bytes > (self.memory_bytes or 0):
                text = f"the model {resident.name!r} has no room beside pinned models, which hold {held:,} bytes"
                self._refuse_waiters(resident, Unavailable(text))
                resident.is_asked_for = False
                self._give_up(resident)
                return False
            waited = asyncio.get_running_loop().time() - began
            victim = self._victim(resident, takes_busy=waited >= PATIENCE_S)
            if victim is None:
                await self._pause(ROOM_POLL_S)
            else:
                victim.num_evictions += 1
                await self._unload(victim)
        return True

    def _has_room(self, resident: Resident) -> bool:
        return self.memory_bytes is None or self.used_bytes + resident.num_bytes <= self.memory_bytes

    def _pinned_bytes(self, other: Resident) -> int:
        return sum(
            each.num_bytes
            for each in self.residents.values()
            if each.is_pinned and each.state == "ready" and each is not other
        )

    def _victim(self, resident: Resident, *, takes_busy: bool) -> Resident | None:
        """Return the loaded model that was used longest ago, an idle one if there is one."""
        loaded = [
            each
            for each in self.residents.values()
            if each.state == "ready" and not each.is_pinned and not each.num_pending and each is not resident
        ]
        candidates = [each for each in loaded if not each.is_busy] or (loaded if takes_busy else [])
        return min(candidates, key=lambda each: each.last_used, default=None)

    def _idle(self) -> Resident | None:
        """Return a model that has been idle for its time."""
        now = asyncio.get_running_loop().time()
        for each in self.residents.values():
            if each.state != "ready" or each.is_pinned or each.idle_timeout_s is None:
                continue
            if each.is_busy:
                each.busy_at = now
            elif now - each.last_used >= each.idle_timeout_s:
                return each
        return None

    async def _open(self, resident: Resident) -> None:
        """Load a model and let its requests continue. Raises the error of the load."""
        now = asyncio.get_running_loop().time
        assert resident.facade is not None, "the catalog is complete"
        resident.state = "loading"
        resident.load_began = now()
        try:
            resident.engine = await resident.opened.enter_async_context(resident.open_engine())
        except BaseException:
            resident.state = "unloaded"
            raise
        resident.load_s = now() - resident.load_began
        resident.num_loads += 1
        resident.problem = None
        resident.busy_at = now()
        resident.facade.load(resident.engine)
        resident.state = "ready"
        self._wanted.pop(resident, None)
        _log.info("model loaded", model=resident.name, seconds=round(resident.load_s, 2), used_bytes=self.used_bytes)
        for loaded in resident.waiters:
            if not loaded.done():
                loaded.set_result(None)
        resident.waiters.clear()

    async def _unload(self, resident: Resident) -> None:
        """Refuse new requests of a model, wait until its requests have ended, and free its memory."""
        assert resident.engine is not None, "loaded"
        assert resident.facade is not None, "the catalog is complete"
        began = asyncio.get_running_loop().time()
        resident.state = "draining"
        await resident.facade.leave()
        await resident.engine.drain()
        resident.facade.unload()
        self._drain_s = asyncio.get_running_loop().time() - began
        resident.engine = None
        opened = resident.opened
        resident.opened = AsyncExitStack()
        try:
            await opened.aclose()
        except Exception as error:  # later loads need this task
            is_expected = isinstance(error, QuireError)
            _log.error("a model did not stop well", model=resident.name, reason=str(error), exc_info=not is_expected)
        resident.state = "waiting" if resident in self._wanted else "unloaded"
        _log.info("model unloaded", model=resident.name, drain_s=round(self._drain_s, 2), used_bytes=self.used_bytes)

    def _refuse_waiters(self, resident: Resident, error: QuireError) -> None:
        resident.num_refusals += len(resident.waiters)
        for loaded in resident.waiters:
            if not loaded.done():
                loaded.set_exception(error)
        resident.waiters.clear()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()


def _unavailable(message: str, resident: Resident, now: float) -> Unavailable:
    """Return the refusal of a request until the next attempt to load its model."""
    error = Unavailable(message)
    error.retry_after_ms = max(1, math.ceil((resident.retry_at - now) * 1000))
    return error
