"""Models are loaded when they are needed, within one size of memory, and no request is lost or cut."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from quire.runtime.common.errors import CorruptCheckpoint, DeadlineExceeded, Overloaded, Unavailable
from quire.runtime.engine.facade import GenerateRequest
from quire.runtime.server.models import residency as module
from quire.runtime.server.models.managed_engine import ManagedEngine
from quire.runtime.server.models.residency import Residency, Resident

from tests.support.samples import BYTES_INFO, STATS

REQUEST = GenerateRequest(prompt="x")


class FakeEngine:
    """An engine whose requests end when a test says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.info = msgspec.structs.replace(BYTES_INFO, fingerprint=name)
        self.live: list[str] = []
        self.num_accepted = 0
        self.deadline_ms: int | None = None  # deadline of the last request
        self.may_answer = asyncio.Event()  # a slow request waits for it
        self.is_draining = self.is_closed = False
        self._changed = asyncio.Event()

    async def submit(self, request: GenerateRequest) -> Any:
        await asyncio.sleep(0)
        assert not self.is_closed, "a request reached a closed engine"
        if self.is_draining:
            raise Unavailable("draining")
        self.num_accepted += 1
        if request.prompt == "hold":
            self.live.append("hold")
        if request.prompt == "slow":
            await self.may_answer.wait()
            assert not self.is_draining, "a request was cut while it was submitted"
        self.deadline_ms = request.deadline_ms
        return self.name

    def end(self) -> None:
        self.live.clear()
        self._changed.set()

    def stats(self) -> Any:
        return msgspec.structs.replace(STATS, step=self.num_accepted, running=len(self.live), waiting=0)

    def set_observer(self, observer: object) -> None: ...

    async def drain(self) -> None:
        self.is_draining = True
        while self.live:
            self._changed.clear()
            await self._changed.wait()


class Models:
    """The models of one residency, whose loads a test may hold or fail."""

    def __init__(self, sizes: dict[str, int], memory_bytes: int | None, max_wait_s: float, **options: Any) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.loads: list[str] = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.failures: dict[str, Exception] = {}
        self.peak_bytes = 0
        self.residents = {
            name: Resident(name, size, lambda name=name: self._open(name), **options.get(name, {}))  # type: ignore[misc]
            for name, size in sizes.items()
        }
        self.residency = Residency(list(self.residents.values()), memory_bytes, max_wait_s)
        self.facades: dict[str, Any] = {}
        for name, resident in self.residents.items():
            facade = ManagedEngine(BYTES_INFO, lambda resident=resident: self.residency.using(resident))  # type: ignore[misc]
            resident.facade = self.facades[name] = facade

    @asynccontextmanager
    async def _open(self, name: str) -> AsyncIterator[Any]:
        self.loads.append(name)
        await self.may_load.wait()
        if name in self.failures:
            raise self.failures[name]
        engine = self.engines[name] = FakeEngine(name)
        open_bytes = [self.residents[each].num_bytes for each, it in self.engines.items() if not it.is_closed]
        self.peak_bytes = max(self.peak_bytes, sum(open_bytes))
        try:
            yield engine
        finally:
            assert not engine.live, "a stream was cut"
            engine.is_closed = True
            if name in self.failures:
                raise self.failures[name]

    def states(self) -> list[str]:
        return [resident.state for resident in self.residents.values()]

    async def until(self, name: str, state: str) -> None:
        async with asyncio.timeout(30):
            while self.residents[name].state != state:
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IDLE_POLL_S", "ROOM_POLL_S", "PATIENCE_S"):
        monkeypatch.setattr(module, name, 0.002)


@asynccontextmanager
async def models(
    sizes: dict[str, int], memory_bytes: int | None = None, max_wait_s: float = 60.0, **options: Any
) -> AsyncIterator[Models]:
    system = Models(sizes, memory_bytes, max_wait_s, **options)
    await system.residency.start()
    try:
        yield system
    finally:
        for engine in system.engines.values():
            engine.end()
        await system.residency.close()
        assert all(engine.is_closed for engine in system.engines.values())


async def test_a_model_is_loaded_at_start_on_first_use_or_by_an_operator() -> None:
    policies = {"a": {"policy": "start"}, "b": {}, "c": {"policy": "operator"}}
    async with models({"a": 1, "b": 1, "c": 1}, **policies) as system:
        assert system.states() == ["ready", "unloaded", "unloaded"]
        assert await system.facades["b"].submit(REQUEST) == "b"
        with pytest.raises(Unavailable, match="'c' is not loaded; an operator of this server loads it"):
            await system.facades["c"].submit(REQUEST)
        system.residency.load("c")
        assert await system.facades["c"].submit(REQUEST) == "c"
        assert system.states() == ["ready"] * 3


async def test_an_error_at_start_unloads_the_other_models() -> None:
    system = Models({"a": 1, "b": 1}, None, 60, a={"policy": "start"}, b={"policy": "start"})
    system.failures["b"] = CorruptCheckpoint("broken")
    with pytest.raises(CorruptCheckpoint, match="broken"):
        await system.residency.start()
    assert system.engines["a"].is_closed


async def test_requests_wait_for_one_load_together() -> None:
    async with models({"a": 1}) as system:
        system.may_load.clear()
        waiting = [asyncio.create_task(system.facades["a"].submit(REQUEST)) for _ in range(5)]
        await system.until("a", "loading")
        system.may_load.set()
        assert await asyncio.gather(*waiting) == ["a"] * 5
        assert system.loads == ["a"]
        (status,) = system.residency.statuses()
        assert (status.loads, status.waits, status.ready_in_s) == (1, 5, None)


async def test_the_model_that_was_used_longest_ago_makes_room() -> None:
    async with models({"a": 2, "b": 2, "c": 2}, 4) as system:
        for name in ("a", "b", "a", "c"):
            await system.facades[name].submit(REQUEST)
        assert system.states() == ["ready", "unloaded", "ready"]
        assert [status.evictions for status in system.residency.statuses()] == [0, 1, 0]
        assert system.peak_bytes == 4


async def test_an_idle_model_makes_room_before_a_busy_one() -> None:
    async with models({"a": 2, "b": 2, "c": 2}, 4) as system:
        await system.facades["a"].submit(GenerateRequest(prompt="hold"))
        await system.facades["b"].submit(REQUEST)
        await system.facades["c"].submit(REQUEST)
        assert system.states() == ["ready", "unloaded", "ready"]


async def test_a_busy_model_makes_room_once_its_streams_have_ended() -> None:
    async with models({"a": 2, "b": 2}, 2) as system:
        await system.facades["a"].submit(GenerateRequest(prompt="hold"))
        waiting = asyncio.create_task(system.facades["b"].submit(REQUEST))
        await system.until("a", "draining")
        again = asyncio.create_task(system.facades["a"].submit(REQUEST))
        await asyncio.sleep(0.01)
        assert system.loads == ["a"]
        system.engines["a"].end()
        assert await waiting == "b"
        assert await again == "a"
        assert system.loads == ["a", "b", "a"]


async def test_a_model_stays_while_it_answers_the_request_that_loaded_it() -> None:
    async with models({"a": 2, "b": 2}, 2) as system:
        first = asyncio.create_task(system.facades["a"].submit(GenerateRequest(prompt="slow")))
        await system.until("a", "ready")
        second = asyncio.create_task(system.facades["b"].submit(REQUEST))
        await asyncio.sleep(0.02)
        assert system.states() == ["ready", "waiting"]
        system.engines["a"].may_answer.set()
        assert await asyncio.gather(first, second) == ["a", "b"]


async def test_a_pinned_model_stays() -> None:
    async with models({"a": 2, "b": 2, "c": 2}, 4, a={"is_pinned": True, "idle_timeout_s": 0}) as system:
        for name in ("a", "b", "c", "b", "c"):
            await system.facades[name].submit(REQUEST)
        assert system.loads == ["a", "b", "c", "b", "c"]
        system.residency.pin("c", is_pinned=True)
        with pytest.raises(Unavailable, match="'b' has no room beside pinned models, which hold 4 bytes"):
            await system.facades["b"].submit(REQUEST)
        system.residency.pin("c", is_pinned=False)
        assert await system.facades["b"].submit(REQUEST) == "b"


async def test_an_operator_unloads_a_model_once_its_streams_have_ended() -> None:
    async with models({"a": 1}, a={"policy": "operator"}) as system:
        system.residency.load("a")
        await system.until("a", "ready")
        await system.facades["a"].submit(GenerateRequest(prompt="hold"))
        system.residency.unload("a")
        await system.until("a", "draining")
        with pytest.raises(Unavailable, match="'a' is not loaded; an operator of this server loads it"):
            await system.facades["a"].submit(REQUEST)
        system.engines["a"].end()
        await system.until("a", "unloaded")
        assert system.engines["a"].is_closed


async def test_a_model_is_unloaded_when_it_was_idle_for_its_time() -> None:
    async with models({"a": 1}, a={"idle_timeout_s": 0.02}) as system:
        await system.facades["a"].submit(GenerateRequest(prompt="hold"))
        await asyncio.sleep(0.06)
        assert system.states() == ["ready"]
        system.engines["a"].end()
        await system.until("a", "unloaded")
        assert system.residency.statuses()[0].idle_unloads == 1
        assert await system.facades["a"].submit(REQUEST) == "a"


async def test_the_time_of_an_idle_model_begins_at_the_end_of_its_last_stream() -> None:
    async with models({"a": 1}, a={"idle_timeout_s": 1000.0}) as system:
        await system.facades["a"].submit(GenerateRequest(prompt="hold"))
        system.residents["a"].busy_at = system.facades["a"].used_at = -5000.0
        async with asyncio.timeout(30):
            while system.residents["a"].last_used < 0:
                await asyncio.sleep(0.001)
        system.engines["a"].end()
        await asyncio.sleep(0.02)
        assert system.states() == ["ready"]


async def test_a_model_of_an_operator_is_not_loaded_by_requests_once_it_was_unloaded() -> None:
    async with models({"a": 1, "b": 1}, 1, a={"policy": "operator"}) as system:
        system.residency.load("a")
        assert await system.facades["a"].submit(REQUEST) == "a"
        assert await system.facades["b"].submit(REQUEST) == "b"
        with pytest.raises(Unavailable, match="an operator of this server loads it"):
            await system.facades["a"].submit(REQUEST)


async def test_an_operator_takes_back_a_load_that_has_no_room_yet() -> None:
    async with models({"a": 1, "b": 1}, 1) as system:
        await system.facades["a"].submit(GenerateRequest(prompt="hold"))
        system.residents["a"].num_pending += 1  # a request in submission prevents the drain
        system.residency.load("b")
        await system.until("b", "waiting")
        system.residency.unload("b")
        await system.until("b", "unloaded")
        system.residents["a"].num_pending -= 1
        system.engines["a"].end()
        await asyncio.sleep(0.02)
        assert (system.states(), system.loads) == (["ready", "unloaded"], ["a"])


async def test_requests_that_wait_when_the_server_closes_are_refused() -> None:
    async with models({"a": 1}) as system:
        system.may_load.clear()
        waiting = asyncio.create_task(system.facades["a"].submit(REQUEST))
        await system.until("a", "loading")
        await system.residency.close()
        async with asyncio.timeout(30):
            with pytest.raises(Unavailable, match="the server is shutting down"):
                await waiting


async def test_a_request_is_refused_with_the_time_after_which_its_model_is_expected() -> None:
    async with models({"a": 300_000_000 * 98}, max_wait_s=60.0) as system:
        with pytest.raises(Overloaded, match=r"expected in 100\.0 s, and requests wait for 60 s at most") as caught:
            await system.facades["a"].submit(REQUEST)
        assert caught.value.retry_after_ms == 100_000
        assert (system.loads, system.residency.statuses()[0].refusals) == ([], 1)


async def test_a_request_that_waited_too_long_is_refused_with_a_time() -> None:
    async with models({"a": 1}, max_wait_s=2.5) as system:
        system.may_load.clear()
        system.residents["a"].load_s = 0.01
        system.residency._max_wait_s = 0.05
        with pytest.raises(Overloaded, match=r"requests wait for 0\.05 s at most") as caught:
            await system.facades["a"].submit(REQUEST)
        assert caught.value.retry_after_ms == 1
        system.may_load.set()
        await system.until("a", "ready")


async def test_the_estimate_counts_the_models_ahead() -> None:
    async with models({"a": 1, "b": 1, "c": 1}) as system:
        for resident, seconds in zip(system.residents.values(), (1.0, 10.0, 100.0), strict=True):
            resident.load_s = seconds
        assert system.residency.ready_in_s(system.residents["c"]) == 100.0
        system.may_load.clear()
        waiting = [asyncio.create_task(system.facades[name].submit(REQUEST)) for name in "ab"]
        await system.until("a", "loading")
        assert 110 < system.residency.ready_in_s(system.residents["c"]) <= 111
        assert 10 < system.residency.ready_in_s(system.residents["b"]) <= 11
        system.may_load.set()
        await asyncio.gather(*waiting)


async def test_the_estimate_counts_the_drain_of_a_busy_model() -> None:
    async with models({"a": 2, "b": 2}, 2) as system:
        await system.facades["a"].submit(GenerateRequest(prompt="hold"))
        system.residents["b"].load_s, system.residency._drain_s = 1.0, 7.0
        assert system.residency.ready_in_s(system.residents["b"]) == 8.0
        system.engines["a"].end()
        assert system.residency.ready_in_s(system.residents["b"]) == 1.0


async def test_the_time_that_a_request_waited_counts_against_its_deadline() -> None:
    async with models({"a": 1}) as system:
        system.may_load.clear()
        waiting = asyncio.create_task(system.facades["a"].submit(GenerateRequest(prompt="x", deadline_ms=60_000)))
        await system.until("a", "loading")
        await asyncio.sleep(0.05)
        system.may_load.set()
        assert await waiting == "a"
        assert (system.engines["a"].deadline_ms or 0) <= 59_960


async def test_a_deadline_ends_the_wait() -> None:
    async with models({"a": 1}) as system:
        system.may_load.clear()
        with pytest.raises(DeadlineExceeded, match="the deadline of 5 ms passed before the model was loaded"):
            await system.facades["a"].submit(GenerateRequest(prompt="x", deadline_ms=5))
        system.may_load.set()


async def test_a_model_that_cannot_be_loaded_is_tried_again_later() -> None:
    async with models({"a": 1}) as system:
        system.failures["a"] = CorruptCheckpoint("broken")
        for _ in range(2):
            with pytest.raises(Unavailable, match="the model 'a' cannot be loaded: broken") as caught:
                await system.facades["a"].submit(REQUEST)
            assert 9_000 < (caught.value.retry_after_ms or 0) <= 10_000
        assert system.loads == ["a"]
        assert system.residency.statuses()[0].problem == "broken"
        system.failures.clear()
        system.residency.load("a")
        await system.until("a", "ready")
        assert await system.facades["a"].submit(REQUEST) == "a"


async def test_an_error_of_the_machine_while_a_model_is_loaded_ends_only_that_load() -> None:
    async with models({"a": 1, "b": 1}) as system:
        system.failures["a"] = OSError("too many open files")
        with pytest.raises(Unavailable, match="the model 'a' cannot be loaded: too many open files"):
            await system.facades["a"].submit(REQUEST)
        assert await system.facades["b"].submit(REQUEST) == "b"


async def test_all_models_are_closed_even_if_one_does_not_stop_well() -> None:
    system = Models({"a": 1, "b": 1, "c": 1}, None, 60.0)
    await system.residency.start()
    for name in system.facades:
        await system.facades[name].submit(REQUEST)
    system.failures["b"] = OSError("its socket is lost")
    with pytest.raises(OSError, match="its socket is lost"):
        await system.residency.close()
    assert [engine.is_closed for engine in system.engines.values()] == [True] * 3


async def test_counters_never_fall_when_a_model_is_unloaded() -> None:
    async with models({"a": 1}, a={"idle_timeout_s": 0.0}) as system:
        for count in (1, 2, 3):
            await system.facades["a"].submit(REQUEST)
            await system.until("a", "unloaded")
            assert system.facades["a"].stats().step == count
        assert system.facades["a"].stats().running == 0


async def test_random_requests_are_all_answered_within_the_memory() -> None:
    sizes = {"a": 3, "b": 2, "c": 2, "d": 1}
    random.seed(5)
    async with models(sizes, 5, c={"idle_timeout_s": 0.003}) as system:
        answers: Counter[str] = Counter()

        async def ask(name: str) -> None:
            await asyncio.sleep(random.random() * 0.3)
            kind = random.choice(("hold", "x"))
            assert await system.facades[name].submit(GenerateRequest(prompt=kind)) == name
            answers[name] += 1

        async def end_streams() -> None:
            while True:
                await asyncio.sleep(0.003)
                for engine in system.engines.values():
                    engine.end()

        ending = asyncio.create_task(end_streams())
        names = random.choices(list(sizes), [8, 4, 2, 1], k=200)
        async with asyncio.timeout(60):
            await asyncio.gather(*map(ask, names))
        ending.cancel()
        with suppress(asyncio.CancelledError):
            await ending
        assert answers == Counter(names)
        assert system.peak_bytes <= 5
