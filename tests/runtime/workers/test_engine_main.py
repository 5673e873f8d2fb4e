"""The messages of an engine process over the link, and their times."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import pytest
from quire.runtime.common.errors import ConfigError, Unavailable
from quire.runtime.engine import CoreInfo, CoreListener, EngineCore, EngineStats, LoadedAdapter, Prefilled
from quire.runtime.workers import engine_main
from quire.runtime.workers.engine_link import (
    STATS_INTERVAL_S,
    AdapterAnswer,
    AddAnswer,
    AddEncoding,
    AddRequests,
    CancelRequest,
    DropRequest,
    EngineReady,
    FromEngine,
    LoadAdapter,
    ReadmitEncoding,
    ReadmitRequest,
    RequestsBegun,
    StatsReport,
    StepReport,
    StopEngine,
    as_read,
)
from quire.runtime.workers.engine_main import CoreServer
from quire.runtime.workers.health import ALIVE, HELD_UP
from quire.runtime.workers.link_end import EngineLink
from quire.scheduler import (
    AdmissionEstimate,
    EncodedText,
    EncodeRequest,
    EncoderStep,
    FinishReason,
    NotAccepting,
    QueueFull,
    Request,
    RequestUpdate,
    SampledToken,
    ScheduledSequence,
    StepPlan,
)

from tests.support.engine_processes import ESTIMATE, STEP_STATS, core_info, engine_stats, new_encoding, new_requests


@dataclass
class FakeCore:
    """A core whose steps the test makes; it is its own engine loop and scheduler."""

    info: CoreInfo = field(default_factory=core_info)
    kv_bytes: int = 9
    listener: CoreListener = field(default_factory=CoreListener)
    added: list[Any] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    refusal: Exception | None = None
    is_broken: bool = False
    num_waiting: int = 3
    num_steps: int = 7
    predicted_wait_s: float | None = None
    on_stop: Callable[[], None] = lambda: None

    @property
    def engine_loop(self) -> FakeCore:
        return self

    @property
    def scheduler(self) -> FakeCore:
        return self

    def start(self, listener: CoreListener) -> None:
        self.listener = listener

    def has_adapter(self, key: str) -> bool:
        return key in ("", "a@1")

    async def load_adapter(self, name: str, path: str, kept: Sequence[str], leaving: Sequence[str]) -> LoadedAdapter:
        self.calls.append(("load", name, path, kept, leaving))
        if self.refusal is not None:
            raise self.refusal
        return LoadedAdapter("b@2", 10, ("a@1",))

    def add(self, *requests: Request) -> AdmissionEstimate:
        if self.refusal is not None:
            raise self.refusal
        self.added += requests
        return ESTIMATE

    def add_encoding(self, request: EncodeRequest) -> AdmissionEstimate:
        self.added.append(request)
        return ESTIMATE

    def readmit(self, request: Request | EncodeRequest) -> None:
        self.added.append(request)

    def cancel(self, request_id: int) -> None:
        self.calls.append(("cancel", request_id))

    def drop(self, request_id: int, reason: FinishReason | None, error: str | None) -> None:
        self.calls.append(("drop", request_id, reason, error))

    def stats(self) -> EngineStats:
        if self.is_broken:
            raise Unavailable("broken")
        return engine_stats(step=self.num_steps)

    async def stop(self) -> None:
        self.on_stop()

    # For tests

    def begin(self, *request_ids: int) -> None:
        rows = [ScheduledSequence(each, (), 2, (5,), 1, None, (5,), 1) for each in request_ids]
        self.listener.begin(StepPlan(1, tuple(rows), len(rows), 0))

    def publish(self, *updates: RequestUpdate) -> None:
        self.listener.publish(updates)

    def observe(self, prefilled: Sequence[Prefilled] = ()) -> None:
        self.listener.observe(STEP_STATS, prefilled)


class FakeLink:
    """A link that keeps sent messages; `receive` is set by the server under test."""

    receive: Callable[[Any], None]

    def __init__(self) -> None:
        self.sent: list[FromEngine] = []

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def take(self, *types: type) -> list[FromEngine]:
        """Return the sent messages of these types, and forget all messages."""
        found = [message for message in self.sent if isinstance(message, types)]
        self.sent.clear()
        return found


class Exited(Exception):
    pass


@dataclass
class Scene:
    core: FakeCore
    link: FakeLink
    stopping: asyncio.Event
    running: asyncio.Task[None]


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    """Run a server, whose exit raises `Exited`."""

    def exit_process() -> NoReturn:
        raise Exited

    monkeypatch.setattr(engine_main, "_exit", exit_process)
    monkeypatch.setattr(engine_main.gc, "freeze", lambda: None)
    core, link, stopping = FakeCore(), FakeLink(), asyncio.Event()
    server = CoreServer(cast(EngineCore, core), cast(EngineLink, link), stopping)
    running = asyncio.create_task(server.run())
    await asyncio.sleep(0.01)
    assert link.take(EngineReady) == [EngineReady(core.info, 9)]
    yield Scene(core, link, stopping, running)
    core.is_broken = False
    stopping.set()
    await running


def token(request_id: int) -> RequestUpdate:
    return RequestUpdate(request_id, (SampledToken(request_id, 5),))


def ended(request_id: int) -> RequestUpdate:
    return RequestUpdate(request_id, (), "length")


async def test_an_added_request_is_answered_under_the_id_of_the_first(scene: Scene) -> None:
    specs = tuple(as_read(request.spec) for request in new_requests(4, 5))
    scene.link.receive(AddRequests(specs))
    assert [request.spec for request in scene.core.added] == list(specs)
    assert scene.link.take(AddAnswer) == [AddAnswer(4, ESTIMATE, 3)]


@pytest.mark.parametrize(
    ("refusal", "estimate"), [(QueueFull("no", ESTIMATE), ESTIMATE), (NotAccepting("no"), None)], ids=["full", "closed"]
)
async def test_a_refusal_is_answered(scene: Scene, refusal: Exception, estimate: AdmissionEstimate | None) -> None:
    scene.core.refusal = refusal
    scene.link.receive(AddRequests((as_read(new_requests(4)[0].spec),)))
    assert scene.link.take(AddAnswer) == [AddAnswer(4, estimate, 3, type(refusal).__name__, "no")]


async def test_requests_of_an_adapter_that_is_not_loaded_are_refused_or_end(scene: Scene) -> None:
    for adapter in ("a@1", "b@2"):
        scene.link.receive(AddRequests((as_read(new_requests(4, adapter=adapter)[0].spec),)))
        scene.link.receive(ReadmitRequest(as_read(new_requests(5, adapter=adapter)[0].spec), (8, 9)))
    assert [request.request_id for request in scene.core.added] == [4, 5]
    await asyncio.sleep(0.01)
    *answers, report = scene.link.take(AddAnswer, StepReport)
    reason = "the adapter b@2 could not be loaded again after the engine was restarted; load it again"
    assert answers == [AddAnswer(4, ESTIMATE, 3), AddAnswer(4, None, 3, "NotAccepting", reason)]
    assert report == StepReport((RequestUpdate(5, error=reason),), 3, 7)


async def test_an_adapter_is_loaded_or_refused_under_its_number(scene: Scene) -> None:
    scene.link.receive(LoadAdapter(7, "b", "path", ("c@3",), ("a@1",)))
    await asyncio.sleep(0.01)
    assert scene.core.calls == [("load", "b", "path", ("c@3",), ("a@1",))]
    assert scene.link.take(AdapterAnswer) == [AdapterAnswer(7, LoadedAdapter("b@2", 10, ("a@1",)))]
    scene.core.refusal = ConfigError("no room")
    scene.link.receive(LoadAdapter(8, "b", "path", (), ()))
    await asyncio.sleep(0.01)
    assert scene.link.take(AdapterAnswer) == [AdapterAnswer(8, None, "ConfigError", "no room")]


async def test_a_readmitted_request_has_its_tokens_and_no_answer(scene: Scene) -> None:
    scene.link.receive(ReadmitRequest(as_read(new_requests(4)[0].spec), (8, 9)))
    assert scene.core.added[0].output_token_ids == [8, 9]
    assert scene.link.sent == []


async def test_texts_are_answered_and_readmitted_without_an_answer(scene: Scene) -> None:
    scene.link.receive(AddEncoding(new_encoding(4).spec))
    assert scene.link.take(AddAnswer) == [AddAnswer(4, ESTIMATE, 3)]
    scene.link.receive(ReadmitEncoding(new_encoding(5).spec))
    assert [request.spec for request in scene.core.added] == [new_encoding(4).spec, new_encoding(5).spec]
    assert scene.link.take(AddAnswer) == []


async def test_texts_are_announced_when_their_batch_begins(scene: Scene) -> None:
    begins = EncoderStep((EncodedText((1,)),) * 3, 1, False, (4, 5))
    scene.core.listener.begin(StepPlan(1, (), 0, 0, (begins,)))
    scene.core.listener.begin(StepPlan(2, (), 0, 0, (EncoderStep((), 1, True, (4, 5)),)))
    assert scene.link.take(RequestsBegun) == [RequestsBegun((Prefilled(4, 0), Prefilled(5, 0)))]


async def test_cancel_and_drop_reach_the_core(scene: Scene) -> None:
    scene.link.receive(CancelRequest(4))
    scene.link.receive(DropRequest(5, "stop", None))
    assert scene.core.calls == [("cancel", 4), ("drop", 5, "stop", None)]


async def test_an_error_in_handling_a_message_ends_the_process(scene: Scene) -> None:
    scene.core.refusal = ZeroDivisionError()
    with pytest.raises(Exited):
        scene.link.receive(AddRequests((as_read(new_requests(4)[0].spec),)))


async def test_requests_are_reported_before_they_are_computed_for_the_first_time(scene: Scene) -> None:
    scene.core.begin(4, 5)
    assert scene.link.take(RequestsBegun) == [RequestsBegun((Prefilled(4, 2), Prefilled(5, 2)))]
    scene.core.begin(4, 5)
    assert scene.link.sent == []
    scene.core.begin(-1, 5, 6)  # negative ids are beams of a request
    assert scene.link.take(RequestsBegun) == [RequestsBegun((Prefilled(6, 2),))]


async def test_an_id_is_reported_again_once_its_request_has_ended_or_was_dropped(scene: Scene) -> None:
    scene.core.begin(4, 5, 6)
    scene.core.publish(ended(4), token(6))
    scene.link.receive(DropRequest(5, None, None))
    scene.link.take()
    scene.core.begin(4, 5, 6)
    assert scene.link.take(RequestsBegun) == [RequestsBegun((Prefilled(4, 2), Prefilled(5, 2)))]


async def test_the_updates_of_a_step_are_sent_with_the_step_in_one_report(scene: Scene) -> None:
    scene.core.publish(token(4))
    scene.core.publish(token(5))
    assert scene.link.sent == []
    scene.core.observe([Prefilled(6, 2)])
    assert scene.link.take(StepReport) == [StepReport((token(4), token(5)), 3, 7, STEP_STATS, (Prefilled(6, 2),))]
    await asyncio.sleep(0.01)
    scene.core.publish(token(4))
    scene.core.observe()
    assert scene.link.take(StepReport) == [StepReport((token(4),), 3, 7, STEP_STATS)], "nothing is sent twice"
    scene.core.publish(ended(5))
    await asyncio.sleep(0.01)
    assert scene.link.take(StepReport) == [StepReport((ended(5),), 3, 7)], "after a step, too"


async def test_updates_between_steps_are_sent_in_the_same_turn_of_the_event_loop(scene: Scene) -> None:
    scene.core.publish(ended(4))
    scene.core.publish(ended(5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert scene.link.take(StepReport) == [StepReport((ended(4), ended(5)), 3, 7)]


async def test_failures_that_a_broken_loop_publishes_are_not_sent(scene: Scene) -> None:
    """The requests can continue in the next process."""
    loop_errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_errors.append(context))
    scene.core.is_broken = True
    scene.core.publish(RequestUpdate(4, (), None, "the engine stopped unexpectedly"))
    await asyncio.sleep(0.01)
    assert [type(context["exception"]) for context in loop_errors] == [Exited]
    assert scene.link.take(StepReport) == []


async def test_stats_are_sent_at_intervals_and_say_when_the_loop_is_broken(scene: Scene) -> None:
    await asyncio.sleep(2 * STATS_INTERVAL_S)
    scene.core.predicted_wait_s = 1.5
    await asyncio.sleep(STATS_INTERVAL_S)
    stats = engine_stats(step=7)
    assert scene.link.take(StatsReport) == [StatsReport(stats), StatsReport(stats), StatsReport(stats, 1.5)]
    scene.core.is_broken = True
    await asyncio.sleep(STATS_INTERVAL_S)
    assert scene.link.take(StatsReport) == [StatsReport(None)]


def test_a_process_whose_server_is_gone_ends_whatever_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exited(BaseException):
        pass

    def exit_with(status: int) -> NoReturn:
        raise Exited(status)

    monkeypatch.setattr(os, "_exit", exit_with)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        with pytest.raises(Exited, match="0"):
            engine_main._Heartbeats(writing).send()
    finally:
        os.close(writing)


@pytest.mark.parametrize("by_message", [True, False], ids=["StopEngine", "server gone"])
async def test_stopping_sends_the_last_updates(scene: Scene, by_message: bool) -> None:
    scene.core.on_stop = lambda: scene.core.publish(ended(4))
    if by_message:
        scene.link.receive(StopEngine())
    else:
        scene.stopping.set()
    await scene.running
    assert scene.link.take(StepReport) == [StepReport((ended(4),), 3, 7)]


def test_heartbeats_tell_when_a_library_may_hold_the_gil() -> None:
    read_fd, write_fd = os.pipe()
    heartbeats = engine_main._Heartbeats(write_fd)
    with heartbeats.held_up():
        assert os.read(read_fd, 9) == HELD_UP
        assert heartbeats.current == HELD_UP, "the thread sends it, too"
    assert os.read(read_fd, 9) == ALIVE
    assert heartbeats.current == ALIVE
    os.close(read_fd)
    os.close(write_fd)
