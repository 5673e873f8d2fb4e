"""The reactions of an engine host to the messages of its API servers, and its own messages. The engines are fakes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from quire.runtime.cluster import host as host_module
from quire.runtime.cluster.host import SESSION_IDS, EngineHost, ServerSession
from quire.runtime.cluster.host_link import (
    Heartbeat,
    HostRequestFailed,
    HostRestarting,
)
from quire.runtime.common.errors import ProtocolError, Quarantined, Unavailable
from quire.runtime.engine import CoreListener, EncoderInfo, EngineStats, Prefilled
from quire.runtime.engine.facade import ImageInfo
from quire.runtime.workers.engine_link import (
    AddAnswer,
    AddEncoding,
    AddRequests,
    CancelRequest,
    DropRequest,
    ImagePixels,
    ReadmitEncoding,
    ReadmitRequest,
    RequestsBegun,
    StatsReport,
    StepReport,
    as_read,
    without_pixels,
)
from quire.runtime.workers.token_log import LoggedRequest
from quire.scheduler import (
    EncodedText,
    EncodeSpec,
    FinalCounters,
    PlacedImage,
    QueueFull,
    Request,
    RequestUpdate,
    SampledToken,
    State,
)

from tests.support.engine_processes import ESTIMATE, STEP_STATS, core_info, engine_stats, new_requests

MAX_IMAGE_MEMORY = 1000
OTHERS = FinalCounters((9.0,) * len(State), 9, 9, ())


class FakePool:
    """Engine processes whose answers the test gives."""

    def __init__(self) -> None:
        self.info = core_info()
        self.is_ready = True
        self.num_waiting = 3
        self.predicted_wait_s = 0.5
        self.members = [self]
        self.counts: dict[str, Any] = {"step": 10, "restarts": 2, "drafted_by_source": {"prompt": 2}}
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.problem: Exception | None = None

    def start(self, listener: CoreListener) -> None:
        self.listener = listener

    async def add(self, requests: Sequence[Request]) -> Any:
        answer = self.answers[requests[0].request_id] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        except asyncio.CancelledError:
            self.calls.append(("withdrawn", requests[0].request_id))
            raise

    def readmit(self, entry: LoggedRequest) -> None:
        self.calls.append(("readmit", entry.request))

    def cancel(self, request_id: int) -> None:
        self.calls.append(("cancel", request_id))

    def drop(self, request_id: int, reason: Any = None, error: str | None = None) -> None:
        self.calls.append(("drop", request_id))

    def counters(self) -> EngineStats:
        return engine_stats(**self.counts)

    def stats(self) -> Any:
        if self.problem is not None:
            raise self.problem
        return engine_stats(**self.counts, running=4)


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_closed = False

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


@asynccontextmanager
async def host_of(pool: FakePool, count: int) -> AsyncIterator[tuple[EngineHost, list[ServerSession]]]:
    """Run a host with sessions of `count` API servers."""
    host = EngineHost(pool, b"secret", "digest", 8, MAX_IMAGE_MEMORY)  # type: ignore[arg-type]
    refuse = host._refuse_images
    sessions = [ServerSession(number, FakeLink(), pool, refuse) for number in range(count)]  # type: ignore[arg-type]
    host._sessions.update((session.number, session) for session in sessions)
    try:
        yield host, sessions
    finally:
        await host.close()


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
async def sessions(pool: FakePool) -> AsyncIterator[list[ServerSession]]:
    async with host_of(pool, 2) as (_, sessions):
        yield sessions


def sent(session: ServerSession, kind: type) -> list[Any]:
    return session.link.of(kind)  # type: ignore[attr-defined, no-any-return]


async def accepted(session: ServerSession, pool: FakePool, request_id: int) -> int:
    """Add a request that is accepted; return its id at the host."""
    (request,) = new_requests(request_id)
    session.receive(AddRequests((as_read(request.spec),)))
    await asyncio.sleep(0)
    here = session.number * SESSION_IDS + request_id
    pool.answers[here].set_result(ESTIMATE)
    await asyncio.sleep(0.01)
    return here


def token(request_id: int, token_id: int) -> RequestUpdate:
    return RequestUpdate(request_id, (SampledToken(request_id, token_id),))


async def test_api_servers_have_ids_of_their_own(pool: FakePool, sessions: list[ServerSession]) -> None:
    ids = [await accepted(session, pool, 7) for session in sessions]
    assert len(set(ids)) == 2
    assert [sent(session, AddAnswer) for session in sessions] == [[AddAnswer(7, ESTIMATE, 3)]] * 2
    pool.listener.publish([token(ids[1], 5)])
    await asyncio.sleep(0.01)
    assert sent(sessions[0], StepReport) == []
    assert sent(sessions[1], StepReport) == [StepReport((token(7, 5)._replace(tokens=token(ids[1], 5).tokens),), 3, 0)]


async def test_a_step_is_one_message_to_each_api_server_that_it_concerns(
    pool: FakePool, sessions: list[ServerSession]
) -> None:
    ids = [await accepted(session, pool, number) for session in sessions for number in (1, 2)]
    pool.listener.publish([token(each, 5) for each in ids[:2]])
    pool.listener.observe(STEP_STATS, [Prefilled(ids[1], 4)])
    assert [len(sent(session, StepReport)) for session in sessions] == [1, 0]
    (report,) = sent(sessions[0], StepReport)
    assert [update.request_id for update in report.updates] == [1, 2]
    assert (report.step, report.prefilled) == (STEP_STATS, (Prefilled(2, 4),))
    await asyncio.sleep(0.01)
    assert len(sent(sessions[0], StepReport)) == 1


async def test_nothing_of_a_request_is_sent_before_its_answer(pool: FakePool, sessions: list[ServerSession]) -> None:
    (request,) = new_requests(1)
    sessions[0].receive(AddRequests((as_read(request.spec),)))
    await asyncio.sleep(0)
    pool.answers[1].set_result(ESTIMATE)
    pool.listener.begun([Prefilled(1, 0)])  # all in one turn of the event loop
    pool.listener.publish([token(1, 5)])
    pool.listener.observe(STEP_STATS, [])
    await asyncio.sleep(0.01)
    messages = [type(each) for each in sessions[0].link.sent if not (isinstance(each, StepReport) and not each.updates)]  # type: ignore[attr-defined]
    assert messages == [AddAnswer, RequestsBegun, StepReport]


async def test_refusals_and_failures_are_named(pool: FakePool, sessions: list[ServerSession]) -> None:
    for number, error in enumerate((QueueFull("full", ESTIMATE), Quarantined("twice"))):
        (request,) = new_requests(number)
        sessions[0].receive(AddRequests((as_read(request.spec),)))
        await asyncio.sleep(0)
        pool.answers[number].set_exception(error)
        await asyncio.sleep(0.01)
    assert sent(sessions[0], AddAnswer) == [
        AddAnswer(0, ESTIMATE, 3, "QueueFull", "full"), AddAnswer(1, None, 3, "Quarantined", "twice")
    ]  # fmt: skip
    assert sessions[0].num_requests == 0
    here = await accepted(sessions[1], pool, 5)
    pool.listener.fail(here, Quarantined("it crashed"), OTHERS)
    await asyncio.sleep(0.01)
    assert sent(sessions[1], HostRequestFailed) == [HostRequestFailed(5, "Quarantined", "it crashed")]
    assert sessions[1].num_requests == 0


async def test_a_request_goes_on_after_its_tokens_and_its_last_update_has_the_counters_of_the_pool(
    pool: FakePool, sessions: list[ServerSession]
) -> None:
    (request,) = new_requests(3, max_tokens=9)
    sessions[0].receive(ReadmitRequest(as_read(request.spec), (4, 5)))
    ((_, readmitted),) = pool.calls
    assert (readmitted.output_token_ids, readmitted.request_id) == ([4, 5], 3)
    pool.listener.publish([RequestUpdate(3, (), "length", None, OTHERS)])
    await asyncio.sleep(0.01)
    (report,) = sent(sessions[0], StepReport)
    assert report.updates[0].counters == OTHERS


async def test_the_end_of_an_api_server_drops_its_own_requests_only(
    pool: FakePool, sessions: list[ServerSession]
) -> None:
    mine, other = [await accepted(session, pool, 1) for session in sessions]
    (request,) = new_requests(2)
    sessions[0].receive(AddRequests((as_read(request.spec),)))
    await asyncio.sleep(0)
    assert sessions[0].end() == 2
    await asyncio.sleep(0.01)
    assert ("drop", mine) in pool.calls
    assert ("withdrawn", 2) in pool.calls
    assert not any(other in call for call in pool.calls)


async def test_cancel_and_drop_name_the_servers_own_request(pool: FakePool, sessions: list[ServerSession]) -> None:
    here = await accepted(sessions[1], pool, 4)
    sessions[1].receive(CancelRequest(4))
    sessions[1].receive(DropRequest(4, None, "left"))
    assert pool.calls == [("cancel", here), ("drop", here)]
    assert sessions[1].num_requests == 0
    (request,) = new_requests(5)
    sessions[1].receive(AddRequests((as_read(request.spec),)))
    await asyncio.sleep(0)
    sessions[1].receive(DropRequest(5, None, "left"))
    await asyncio.sleep(0.01)
    assert ("withdrawn", SESSION_IDS + 5) in pool.calls


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": -1},
        {"request_id": SESSION_IDS},
        {"prompt": (1, 100)},
        {"prompt": (-1,)},
        {"echoed": (100,)},
        {"max_tokens": 63},
        {"deadline": math.nan},
        {"pin_s": math.inf},
        {"prompt": ()},
        {"max_tokens": 0},
    ],
)
async def test_requests_that_cannot_be_end_the_link(
    changes: dict[str, Any], pool: FakePool, sessions: list[ServerSession]
) -> None:
    (request,) = new_requests(1)
    names = {"prompt": "prompt_token_ids"}
    spec = as_read(request.spec)
    for name, value in changes.items():
        object.__setattr__(spec, names.get(name, name), value)
    with pytest.raises((ProtocolError, ValueError)):
        sessions[0].receive(AddRequests((spec,)))
    with pytest.raises((ProtocolError, ValueError)):
        sessions[0].receive(ReadmitRequest(spec, ()))
    assert sessions[0].num_requests == 0


async def test_tokens_after_which_a_request_goes_on_must_be_known(sessions: list[ServerSession]) -> None:
    (request,) = new_requests(1)
    spec = as_read(request.spec)
    for generated in ((100,), (-1,), (5, 100, 5), (5, -1, 5), (100, 5), (5, -1)):
        for message in (AddRequests((spec,), (generated,)), ReadmitRequest(spec, generated)):
            with pytest.raises(ProtocolError, match="vocabulary"):
                sessions[0].receive(message)
    specs = [as_read(each.spec) for each in new_requests(1, 2)]
    with pytest.raises(ProtocolError, match="vocabulary"):
        sessions[0].receive(AddRequests(tuple(specs), ((5,), (5, 100, 5))))


async def test_a_request_may_have_as_many_tokens_as_the_context(pool: FakePool, sessions: list[ServerSession]) -> None:
    whole, moved = new_requests(1, 2, prompt=(7,) * 60, max_tokens=4)
    sessions[0].receive(AddRequests((as_read(whole.spec),)))
    sessions[0].receive(ReadmitRequest(as_read(moved.spec), (5,) * 3))
    pool.info = core_info(encoder=EncoderInfo(vocab_size=50, max_model_len=8, dimensions=4))
    sessions[0].receive(ReadmitEncoding(EncodeSpec(3, (EncodedText((1,) * 8),))))
    assert sessions[0].num_requests == 3


@pytest.mark.parametrize(
    ("token_ids", "deadline", "problem"),
    [
        ((1,) * 9, None, "a text of more than 8 tokens"),
        ((50,), None, "vocabulary"),
        ((1,), math.nan, "not a number"),
    ],
)
async def test_texts_that_cannot_be_end_the_link(
    token_ids: tuple[int, ...], deadline: float | None, problem: str, pool: FakePool, sessions: list[ServerSession]
) -> None:
    pool.info = core_info(encoder=EncoderInfo(vocab_size=50, max_model_len=8, dimensions=4))
    spec = EncodeSpec(1, (EncodedText((1,)), EncodedText(token_ids)), deadline=deadline)
    for message in (AddEncoding(spec), ReadmitEncoding(spec)):
        with pytest.raises(ProtocolError, match=problem):
            sessions[0].receive(message)


PIXELS = bytes(range(48)) * 8
IMAGE = PlacedImage(1, 2, b"a sha256".ljust(32), 8, 16, PIXELS)
TOWER = ImageInfo(token_id=9, num_tokens=4, block=8)


def send_with_image(
    session: ServerSession, request_id: int, image: PlacedImage = IMAGE, prompt: tuple[int, ...] = (1, 9, 9)
) -> None:
    (request,) = new_requests(request_id, prompt=prompt, images=(image,))
    for begin in range(0, len(image.pixels), 100):
        session.receive(ImagePixels(memoryview(image.pixels)[begin : begin + 100]))
    session.receive(AddRequests((without_pixels(as_read(request.spec)),)))


async def test_a_request_gets_the_pixels_that_came_before_it(pool: FakePool, sessions: list[ServerSession]) -> None:
    pool.info = core_info(images=TOWER)
    send_with_image(sessions[1], 1)
    (request,) = sessions[1]._requests.values()
    assert isinstance(request, Request)
    assert request.spec.images == (IMAGE,)
    (second,) = new_requests(2, prompt=(1, 9, 9), images=(IMAGE,))
    sessions[1].receive(ReadmitRequest(without_pixels(as_read(second.spec)), (5,)))
    ((_, readmitted),) = [call for call in pool.calls if call[0] == "readmit"]
    assert readmitted.spec.images == (IMAGE,)
    assert sessions[1].image_bytes == len(PIXELS), "one copy"


@pytest.mark.parametrize(
    ("image", "prompt", "problem"),
    [
        (IMAGE._replace(pixels=PIXELS[1:]), (1, 9, 9), "pixels of other images"),
        (IMAGE._replace(height=-8), (1, 9, 9), "an image without pixels"),
        (IMAGE._replace(height=16, width=8), (1, 9), "position must be from 0 to 0"),
        (IMAGE._replace(height=1, width=128), (1, 9, 9), "multiples of 8"),
        (IMAGE._replace(tokens=3), (1, 9, 9, 9), "tokens must be 2"),
        (IMAGE._replace(position=-1), (1, 9, 9), "position must be"),
        (IMAGE, (1, 9, 8), "must have the token 9"),
        (IMAGE._replace(digest=b"short"), (1, 9, 9), "without its digest"),
    ],
)
async def test_images_that_cannot_be_end_the_link(
    image: PlacedImage, prompt: tuple[int, ...], problem: str, pool: FakePool, sessions: list[ServerSession]
) -> None:
    pool.info = core_info(images=TOWER)
    with pytest.raises(ProtocolError, match=problem):
        send_with_image(sessions[0], 1, image, prompt)
    assert sessions[0].num_requests == 0


async def test_images_of_a_model_that_takes_none_end_the_link(sessions: list[ServerSession]) -> None:
    with pytest.raises(ProtocolError, match="takes none"):
        send_with_image(sessions[0], 1)


async def test_images_of_live_requests_take_limited_memory(pool: FakePool, sessions: list[ServerSession]) -> None:
    pool.info = core_info(images=TOWER)
    for number, session in enumerate([*sessions, sessions[0]]):
        send_with_image(session, number, IMAGE._replace(digest=bytes([number]) * 32))
    await asyncio.sleep(0.01)
    (refused,) = sent(sessions[0], AddAnswer)
    assert (refused.request_id, refused.refusal) == (2, "QueueFull")
    assert "this request take 384 bytes, those of others 768, and all may take 1000" in refused.message
    assert sorted(pool.answers) == [0, SESSION_IDS + 1]
    assert [session.image_bytes for session in sessions] == [384, 384], "what is refused does not count"
    pool.answers[0].set_result(ESTIMATE)
    await asyncio.sleep(0.01)
    sessions[0].receive(DropRequest(0, None, "left"))
    send_with_image(sessions[0], 3, IMAGE._replace(digest=bytes(32)))
    await asyncio.sleep(0.01)
    assert 3 in pool.answers


async def test_a_second_image_without_its_digest_ends_the_link(pool: FakePool, sessions: list[ServerSession]) -> None:
    pool.info = core_info(images=TOWER)
    second = IMAGE._replace(position=4, digest=b"")
    (request,) = new_requests(1, prompt=(1, 9, 9, 1, 9, 9), images=(IMAGE, second))
    for image in request.spec.images:
        sessions[0].receive(ImagePixels(memoryview(image.pixels)))
    with pytest.raises(ProtocolError, match="an image without its digest"):
        sessions[0].receive(AddRequests((without_pixels(as_read(request.spec)),)))


async def test_samples_of_one_request_take_the_memory_of_its_images_once(
    pool: FakePool, sessions: list[ServerSession]
) -> None:
    pool.info = core_info(images=TOWER)
    send_with_image(sessions[1], 1)
    specs = [request.spec for request in new_requests(1, 2, prompt=(1, 9, 9), images=(IMAGE,))]
    sessions[0].receive(ImagePixels(memoryview(PIXELS)))
    message = AddRequests.of([without_pixels(spec) for spec in specs])
    sessions[0].receive(message)
    await asyncio.sleep(0.01)
    assert not sent(sessions[0], AddAnswer)
    assert sorted(pool.answers) == [1, SESSION_IDS + 1]
    assert sessions[0].image_bytes == 384


async def test_texts_need_no_memory_of_images(pool: FakePool, sessions: list[ServerSession]) -> None:
    """Requests that move to a host may take more than the limit."""
    pool.info = core_info(images=TOWER)
    for number in range(3):
        (request,) = new_requests(number, prompt=(1, 9, 9), images=(IMAGE._replace(digest=bytes([number]) * 32),))
        sessions[0].receive(ImagePixels(memoryview(PIXELS)))
        sessions[0].receive(ReadmitRequest(without_pixels(as_read(request.spec)), ()))
    assert sessions[0].image_bytes > MAX_IMAGE_MEMORY
    await accepted(sessions[1], pool, 1)
    (answer,) = sent(sessions[1], AddAnswer)
    assert answer.refusal is None


async def test_what_is_held_is_sent_after_each_turn_of_the_loop(pool: FakePool, sessions: list[ServerSession]) -> None:
    here = await accepted(sessions[1], pool, 1)
    pool.listener.begun([Prefilled(here, 3)])
    await asyncio.sleep(0.01)
    assert sent(sessions[1], RequestsBegun) == [RequestsBegun((Prefilled(1, 3),))]
    pool.listener.publish([token(here, 5)])
    pool.listener.observe(STEP_STATS, [])
    pool.listener.publish([token(here, 6)])
    await asyncio.sleep(0.01)
    assert [
        token.token_id for report in sent(sessions[1], StepReport) for each in report.updates for token in each.tokens
    ] == [5, 6]
    pool.listener.publish([token(here, 7)])
    sessions[1].end()
    await asyncio.sleep(0.01)
    assert len(sent(sessions[1], StepReport)) == 2, "nothing is sent on a link that has ended"


async def test_an_id_that_is_in_use_and_an_empty_list_are_refused(
    pool: FakePool, sessions: list[ServerSession]
) -> None:
    await accepted(sessions[0], pool, 1)
    (request,) = new_requests(1)
    (unused,) = new_requests(2)
    for message in (
        AddRequests((as_read(request.spec),)),
        ReadmitRequest(as_read(request.spec), ()),
        AddRequests(()),
        AddRequests.of([unused.spec, unused.spec]),
    ):
        with pytest.raises(ProtocolError):
            sessions[0].receive(message)


async def test_samples_get_the_prompt_of_the_first(pool: FakePool, sessions: list[ServerSession]) -> None:
    specs = [request.spec for request in new_requests(1, 2, prompt=(7, 8))]
    sessions[0].receive(AddRequests.of(specs))
    await asyncio.sleep(0)
    assert [request.spec for request in sessions[0]._requests.values()] == specs
    too_long = [request.spec for request in new_requests(3, 4, prompt=(7,) * 60, max_tokens=5)]
    with pytest.raises(ProtocolError, match="more than 64 tokens"):
        sessions[0].receive(AddRequests.of(too_long))


async def test_deadlines_are_set_on_this_machines_clock(
    pool: FakePool, sessions: list[ServerSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module.time, "monotonic", lambda: 5000.0)
    (request,) = new_requests(1, deadline=2.5)
    sessions[0].receive(ReadmitRequest(as_read(request.spec), ()))
    assert pool.calls[0][1].spec.deadline == 5002.5


async def test_counters_begin_with_the_session(pool: FakePool) -> None:
    async with host_of(pool, 1) as (_, (session,)):
        pool.counts = {"step": 15, "restarts": 2, "drafted_by_source": {"prompt": 5, "forced": 1}}
        session.tick(pool.stats())
        (report,) = sent(session, StatsReport)
        assert (report.stats.step, report.stats.restarts, report.stats.running) == (5, 0, 4)
        assert report.stats.drafted_by_source == {"prompt": 3, "forced": 1}
        assert report.predicted_wait_s == 0.5


async def test_an_api_server_that_is_silent_loses_its_link_and_others_do_not(pool: FakePool) -> None:
    async with host_of(pool, 2) as (_, (silent, other)):
        for _ in range(50):
            await asyncio.sleep(0.25)
            other.receive(Heartbeat())
        assert silent.link.is_closed  # type: ignore[attr-defined]
        assert not other.link.is_closed  # type: ignore[attr-defined]


async def test_an_api_server_that_is_silent_while_engines_restart_loses_its_link(pool: FakePool) -> None:
    pool.problem = Unavailable("restarting")
    async with host_of(pool, 1) as (_, (silent,)):
        await asyncio.sleep(9)
        assert not silent.link.is_closed  # type: ignore[attr-defined]
        await asyncio.sleep(2)
        assert silent.link.is_closed  # type: ignore[attr-defined]


async def test_each_api_server_learns_which_of_its_requests_wait_for_an_engine(
    pool: FakePool, sessions: list[ServerSession]
) -> None:
    ids = [await accepted(session, pool, number) for session in sessions for number in (1, 2)]
    (request,) = new_requests(3)
    sessions[0].receive(AddRequests((as_read(request.spec),)))  # no answer yet: the API server tries another host
    pool.listener.publish([token(ids[0], 5)])
    pool.listener.interrupted([*ids[:3], 3])
    assert [sent(session, HostRestarting) for session in sessions] == [
        [HostRestarting((1, 2))], [HostRestarting((1,))]
    ]  # fmt: skip
    messages = [type(each) for each in sessions[0].link.sent]  # type: ignore[attr-defined]
    assert messages[-2:] == [StepReport, HostRestarting], "what was generated comes first"


async def test_a_host_that_leaves_waits_for_its_requests(pool: FakePool) -> None:
    async with host_of(pool, 1) as (host, (session,)):
        here = await accepted(session, pool, 1)
        leaving = asyncio.create_task(host.leave(60.0))
        await asyncio.sleep(1)
        assert not leaving.done()
        pool.listener.publish([RequestUpdate(here, (), "length", None, OTHERS)])
        await asyncio.sleep(1)
        assert leaving.done()


async def test_a_closed_host_sends_nothing_more(pool: FakePool) -> None:
    async with host_of(pool, 1) as (host, (session,)):
        await host.close()
        await asyncio.sleep(1.1)
        assert session.link.sent == []  # type: ignore[attr-defined]


async def test_heartbeats_are_sent_while_engines_restart(pool: FakePool) -> None:
    pool.problem = Unavailable("restarting")
    async with host_of(pool, 1) as (_, (session,)):
        await asyncio.sleep(1.1)
        assert len(sent(session, Heartbeat)) == 4
        assert not sent(session, StatsReport)
