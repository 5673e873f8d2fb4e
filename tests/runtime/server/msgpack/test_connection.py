"""A whole connection in memory: frames in, frames out, over an engine that the test scripts."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import msgspec
import pytest
from quire.runtime.common.errors import GenerationFailed, Overloaded, Unavailable
from quire.runtime.common.logs import MAX_LINES
from quire.runtime.common.types import ChatOptions, OutputChunk
from quire.runtime.protocol.codec import MAX_ARRAY_LENGTH, encode
from quire.runtime.protocol.frames import (
    MIN_FRAME_BYTES,
    AskStats,
    Cancel,
    Credit,
    Done,
    Error,
    Frame,
    Generate,
    Hello,
    ListModels,
    Ping,
    Pong,
    Progress,
    Resume,
    Stats,
    Tokenize,
    Tokenized,
    Tokens,
    Welcome,
)
from quire.runtime.server.msgpack import frame_writer
from quire.runtime.server.msgpack.request_handler import MAX_TEXTS
from quire.runtime.server.requests import output_log
from quire.runtime.server.requests.output_log import decode_chunk
from quire.runtime.server.requests.output_reader import READER_BYTES
from quire.runtime.server.tenancy.tenants import FRAMES_PER_REQUEST, FRAMES_PER_TURN, Tenant, TenantLimits

from tests.support.server import FakeClock, FakeEngine, FakePeer, FakeServer, chunk, generate, names, settle

Serve = Callable[..., FakeServer]

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "resumable": {"resumable": True},
    "keyed": {"idempotency_key": "k"},
    "resumable and keyed": {"resumable": True, "idempotency_key": "k"},
}
INTERNAL_ERROR = "an internal error ended this request; see the server's log"
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def texts(frames: list[Frame]) -> list[str]:
    return [frame.text for frame in frames if isinstance(frame, Tokens)]


def error(frames: list[Frame]) -> Error:
    """Return the only frame, an ERROR."""
    (frame,) = frames
    assert isinstance(frame, Error), frame
    return frame


# A tenant with one slot: a slot that leaks, or is freed twice, shows at once


@pytest.fixture
def narrow(serve: Serve) -> FakeServer:
    """Make a server whose tenant may have one live request."""
    return serve(tenant=Tenant("ann", TenantLimits(max_concurrent_requests=1)))


async def assert_one_slot_is_free(server: FakeServer) -> None:
    """Check that one request is accepted and the next one refused."""
    peer = await server.connect()
    assert names(await peer.ask(generate(1))) == ["Accepted"]
    refusal = error(await peer.ask(generate(2)))
    assert (refusal.code, "requests of this tenant" in refusal.message) == ("RESOURCE_EXHAUSTED", True)
    await server.engine.last.put(chunk(0, last=True))
    assert names(await peer.received()) == ["Tokens", "Done"]


async def test_a_revoked_tenant_is_refused_every_request_and_its_live_ones_finish(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(generate(1, resumable=True))
    server.tenant.revoked = True
    requests: list[Frame] = [*(generate(2, **kind) for kind in KINDS.values()), Resume(2, 0), Tokenize(2, "x")]
    for request in [*requests, ListModels(2), AskStats(2)]:
        refusal = error(await peer.ask(request))
        assert (refusal.code, refusal.message) == ("UNAUTHENTICATED", "this tenant's keys were revoked")
    assert server.metric('quire_admission_rejections_total{reason="unauthenticated"}') == len(requests) + 2
    await server.engine.last.put(chunk(0, last=True))
    assert names(await peer.received()) == ["Tokens", "Done"]


REFUSALS = [Overloaded, Unavailable, KeyError]


@every_kind
@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("attribute", ["refusal", "late_refusal"])
async def test_a_refused_request_holds_no_slot_of_its_tenant(
    narrow: FakeServer, kind: dict[str, Any], refusal: type[Exception], attribute: str
) -> None:
    peer = await narrow.connect()
    setattr(narrow.engine, attribute, refusal("refused"))
    for _ in range(3):
        message = error(await peer.ask(generate(1, **kind))).message
        assert message == ("refused" if refusal is not KeyError else INTERNAL_ERROR)
    setattr(narrow.engine, attribute, None)
    assert len(narrow.requests) == 0
    await assert_one_slot_is_free(narrow)


@every_kind
async def test_a_request_refused_by_its_tenants_limit_holds_no_slot(narrow: FakeServer, kind: dict[str, Any]) -> None:
    peer = await narrow.connect()
    assert names(await peer.ask(generate(1))) == ["Accepted"]
    for request_id in range(2, 5):
        assert error(await peer.ask(generate(request_id, **kind))).code == "RESOURCE_EXHAUSTED"
    assert narrow.metric('quire_admission_rejections_total{reason="resource_exhausted"}') == 3
    await narrow.engine.last.put(chunk(0, last=True))
    assert names(await peer.received()) == ["Tokens", "Done"]
    await assert_one_slot_is_free(narrow)


async def finish(peer: FakePeer, engine: FakeEngine) -> None:
    await engine.last.put(chunk(0, last=True))


async def fail(peer: FakePeer, engine: FakeEngine) -> None:
    await engine.last.put(GenerationFailed("the logits are NaN"))


async def crash(peer: FakePeer, engine: FakeEngine) -> None:
    await engine.last.put(ZeroDivisionError("a bug"))


async def cancel(peer: FakePeer, engine: FakeEngine) -> None:
    await peer.ask(Cancel(1))
    assert engine.last.is_cancelled


async def leave(peer: FakePeer, engine: FakeEngine) -> None:
    await peer.leave()


async def shut_down(peer: FakePeer, engine: FakeEngine) -> None:
    peer.connection.shut_down(Unavailable("the server is shutting down"))
    await settle()


@pytest.mark.parametrize("kind", [KINDS["plain"], KINDS["keyed"]], ids=["plain", "keyed"])
@pytest.mark.parametrize("end", [finish, fail, crash, cancel, leave, shut_down], ids=lambda end: end.__name__)
async def test_every_kind_of_end_frees_the_slot_once(
    narrow: FakeServer, kind: dict[str, Any], end: Callable[[FakePeer, FakeEngine], Any]
) -> None:
    peer = await narrow.connect()
    assert names(await peer.ask(generate(1, **kind))) == ["Accepted"]
    await end(peer, narrow.engine)
    assert len(narrow.requests) == 0
    await assert_one_slot_is_free(narrow)


async def test_a_resumable_request_holds_its_slot_until_it_expires(serve: Serve, clock: FakeClock) -> None:
    server = serve(tenant=Tenant("ann", TenantLimits(max_concurrent_requests=1)), resume_timeout_ms=1000)
    peer = await server.connect()
    await peer.ask(generate(1, resumable=True))
    await peer.leave()
    assert len(server.requests) == 1
    await clock.advance(1)
    assert server.engine.last.is_cancelled
    await assert_one_slot_is_free(server)


# A request in preparation: its prompt is being tokenized, and the engine has not answered


@every_kind
async def test_a_request_cancelled_in_preparation_is_accepted_and_cancelled(
    server: FakeServer, kind: dict[str, Any]
) -> None:
    server.engine.prepared.clear()
    peer = await server.connect()
    assert await peer.ask(generate(1, **kind), Cancel(1)) == []
    server.engine.prepared.set()
    assert names(await peer.received()) == ["Accepted", "Done"]
    assert server.engine.last.is_cancelled
    assert len(server.requests) == 0
    assert server.metric('quire_cancelled_total{cause="client"}') == 1


@every_kind
async def test_accepted_is_sent_when_preparation_ends(server: FakeServer, kind: dict[str, Any]) -> None:
    server.engine.prepared.clear()
    peer = await server.connect()
    assert await peer.ask(generate(1, **kind)) == []
    server.engine.prepared.set()
    assert names(await peer.received()) == ["Accepted"]


@pytest.mark.parametrize("kind", [KINDS["plain"], KINDS["keyed"]], ids=["plain", "keyed"])
async def test_a_request_whose_connection_is_lost_in_preparation_is_cancelled(
    server: FakeServer, kind: dict[str, Any]
) -> None:
    server.engine.prepared.clear()
    peer = await server.connect()
    await peer.ask(generate(1, **kind))
    await peer.leave()
    server.engine.prepared.set()
    await settle()
    assert server.engine.last.is_cancelled
    assert len(server.requests) == 0
    assert server.metric('quire_cancelled_total{cause="disconnect"}') == 1


@every_kind
async def test_a_request_refused_after_its_cancellation_ends_in_one_error(
    server: FakeServer, kind: dict[str, Any]
) -> None:
    server.engine.prepared.clear()
    peer = await server.connect()
    await peer.ask(generate(1, **kind), Cancel(1))
    server.engine.late_refusal = Overloaded("the queue is full")
    server.engine.prepared.set()
    assert error(await peer.received()).code == "RESOURCE_EXHAUSTED"
    assert names(await peer.ask(Ping(3))) == ["Pong"]


@every_kind
async def test_the_server_ends_a_request_in_preparation(server: FakeServer, kind: dict[str, Any]) -> None:
    server.engine.prepared.clear()
    peer = await server.connect()
    await peer.ask(generate(1, **kind))
    server.replays.fail(Unavailable("too late"))
    peer.connection.fail_requests(Unavailable("too late"))
    assert error(await peer.received()).message == "too late"
    assert (server.engine.num_preparing, len(server.requests)) == (0, 0)
    assert server.metric('quire_cancelled_total{cause="shutdown"}') == 1
    server.engine.prepared.set()
    assert names(await peer.ask(Ping(1))) == ["Pong"]


async def test_texts_of_a_lost_connection_are_given_up(server: FakeServer) -> None:
    server.engine.prepared.clear()
    for _ in range(3):
        lost = await server.connect()
        await lost.ask(*(Tokenize(request_id, "x") for request_id in range(5)))
        assert server.engine.num_preparing == 5
        await lost.leave()
    assert server.engine.num_preparing == 0
    peer = await server.connect()
    await peer.ask(Tokenize(1, "x"))
    server.engine.prepared.set()
    assert await peer.received() == [Tokenized(1, (120,))]


# State of one request that must not reach the next one with its id


@every_kind
async def test_credit_of_an_ended_request_is_not_given_to_the_next(server: FakeServer, kind: dict[str, Any]) -> None:
    peer = await server.connect()
    await peer.ask(generate(1, credit=1000))
    await server.engine.last.put(chunk(0, last=True))
    assert names(await peer.ask(Credit(1, 1000))) == ["Tokens", "Done"]
    await peer.ask(generate(1, credit=1, **kind))
    await server.engine.last.put(chunk(0), chunk(1), chunk(2))
    assert texts(await peer.received()) == ["x"]
    assert texts(await peer.ask(Credit(1, 1))) == ["x"]


@every_kind
async def test_overdrawn_credit_of_an_ended_request_is_not_taken_from_the_next(
    server: FakeServer, kind: dict[str, Any]
) -> None:
    peer = await server.connect()
    await peer.ask(generate(1, credit=1))
    await server.engine.last.put(chunk(0, 50), chunk(50))
    assert names(await peer.ask(Cancel(1))) == ["Tokens", "Done"]
    await peer.ask(generate(1, credit=2, **kind))
    await server.engine.last.put(chunk(0), chunk(1))
    assert len(texts(await peer.received())) == 2


@every_kind
async def test_cancelling_an_ended_request_does_not_cancel_the_next(server: FakeServer, kind: dict[str, Any]) -> None:
    peer = await server.connect()
    await peer.ask(generate(1))
    await server.engine.last.put(chunk(0, last=True))
    await peer.ask(Cancel(1), generate(1, **kind))
    await server.engine.last.put(chunk(0, 2, text="whole", last=True))
    assert texts(await peer.received()) == ["whole"]
    assert not server.engine.last.is_cancelled


async def test_late_progress_of_an_ended_request_is_not_sent(server: FakeServer) -> None:
    peer = await server.connect(features=("progress",))
    await peer.ask(generate(1))
    first = server.engine.last
    await first.put(GenerationFailed("the logits are NaN"))
    await peer.received()
    assert names(await peer.ask(generate(1))) == ["Accepted"]
    first.note_prefill(2)
    assert await peer.received() == []
    server.engine.last.note_prefill(1)
    assert await peer.received() == [Progress(1, 1, 3)]


async def test_progress_is_sent_until_the_first_tokens_of_each_request(server: FakeServer) -> None:
    peer = await server.connect(features=("progress",))
    for _ in range(2):
        await peer.ask(generate(1))
        server.engine.last.note_prefill(1)
        assert await peer.received() == [Progress(1, 1, 3)]
        await server.engine.last.put(chunk(0))
        server.engine.last.note_prefill(2)
        await server.engine.last.put(chunk(1, last=True))
        assert names(await peer.received()) == ["Tokens", "Tokens", "Done"]


async def test_options_of_a_chat_need_their_feature(server: FakeServer) -> None:
    frame = Generate(1, None, messages=({"role": "user", "content": "x"},), chat=ChatOptions())
    old, new = await server.connect(), await server.connect(features=("tools",))
    assert "the feature `tools`" in error(await old.ask(frame)).message
    assert names(await new.ask(frame)) == ["Accepted"]
    assert server.engine.last.request.reads_output


async def test_the_id_of_a_refused_request_is_free(server: FakeServer) -> None:
    peer = await server.connect()
    server.engine.refusal = Overloaded("the queue is full")
    assert error(await peer.ask(generate(1))).code == "RESOURCE_EXHAUSTED"
    server.engine.refusal = None
    assert names(await peer.ask(generate(1))) == ["Accepted"]


async def test_a_refused_request_leaves_no_key_and_nothing_to_resume(server: FakeServer) -> None:
    peer = await server.connect()
    server.engine.refusal = Overloaded("the queue is full")
    await peer.ask(generate(1, resumable=True, idempotency_key="k"))
    server.engine.refusal = None
    assert error(await peer.ask(Resume(1, 0))).code == "NOT_FOUND"
    assert names(await peer.ask(generate(2, "another prompt", idempotency_key="k"))) == ["Accepted"]


async def test_a_new_session_cannot_resume_requests_of_another(server: FakeServer) -> None:
    first = await server.connect()
    await first.ask(generate(1, resumable=True))
    await first.leave()
    second = await server.connect()
    assert error(await second.ask(Resume(1, 0))).code == "NOT_FOUND"
    assert names(await second.ask(generate(1))) == ["Accepted"]


async def test_ended_requests_do_not_raise_the_limit_of_texts(server: FakeServer) -> None:
    peer = await server.connect()
    for request_id in range(5):
        await peer.ask(generate(request_id))
        await server.engine.last.put(chunk(0, last=True))
    await peer.received()
    server.engine.prepared.clear()
    refusal = error(await peer.ask(*(Tokenize(request_id, "x") for request_id in range(MAX_TEXTS + 1))))
    assert (refusal.request_id, refusal.code) == (MAX_TEXTS, "RESOURCE_EXHAUSTED")
    server.engine.prepared.set()
    assert len(await peer.received()) == MAX_TEXTS


# Statistics


@pytest.mark.parametrize("is_operator", [False, True])
async def test_stats_show_a_tenant_its_own_totals_and_an_operator_all(serve: Serve, is_operator: bool) -> None:
    server = serve(tenants=["a", "b"])
    asking, busy = [await server.connect(token=name) for name in ("a", "b")]
    server.context.keyring.authenticate("a").change_limits(TenantLimits(operator=is_operator))
    await busy.ask(generate(1))
    await server.engine.last.put(chunk(0, 5, last=True))
    await asking.ask(generate(1), generate(2))
    await server.engine.last.put(chunk(0, 2, last=True))
    await asking.received()
    (answer,) = await asking.ask(AskStats(3))
    assert isinstance(answer, Stats)
    own = {"live": 1, "requests": 1, "prompt_tokens": 3, "completion_tokens": 2}
    assert answer.stats.get("pages_total") == (10 if is_operator else None)
    assert is_operator or answer.stats == {**own, "cached_tokens": 0, "recomputed_tokens": 0}


# Pending input


async def test_a_tenant_with_too_much_pending_input_loses_its_largest_connection(serve: Serve) -> None:
    """However many connections send frames without an end, the server holds no more than its limit."""
    server = serve(tenants=["a", "b"], max_pending_bytes=300_000)
    bystander = await server.connect(token="b")
    small = await server.connect(token="a")
    bystander.reader.feed_data(encode(generate(1, "x" * 60_000))[:50_000])
    small.reader.feed_data(encode(generate(1, "x" * 60_000))[:10_000])
    refused = 0
    for _ in range(5):
        peer = await server.connect(token="a")
        peer.reader.feed_data(encode(generate(1, "x" * 60_000))[:50_000])
        await settle()
        assert server.context.pending.num_bytes <= 150_000
    for peer in server.peers:
        for frame in await peer.received():
            assert isinstance(frame, Error)
            assert (frame.request_id, frame.code, frame.retryable) == (None, "RESOURCE_EXHAUSTED", True)
            assert (
                "all pending input of this tenant may be 100000 bytes (a share of `max_pending_bytes`)" in frame.message
            )
            refused += 1
    assert refused == 4
    for peer, num_sent in ((bystander, 50_000), (small, 10_000)):
        peer.reader.feed_data(encode(generate(1, "x" * 60_000))[num_sent:])
        assert names(await peer.received()) == ["Accepted"]
    assert server.context.pending.num_bytes == 50_000


@every_kind
async def test_prompts_and_texts_to_tokenize_are_limited_together(serve: Serve, kind: dict[str, Any]) -> None:
    server = serve(tenants=["a", "b"], max_text_bytes=200_000)
    texts = server.context.requests.texts
    server.engine.prepared.clear()
    peer, other, bystander = [await server.connect(token=token) for token in "aab"]
    assert await peer.ask(Tokenize(1, "x" * 60_000)) == []
    assert await other.ask(generate(1, "x" * 30_000, **kind)) == []
    for large in (generate(2, "x" * 60_000, **kind | {"idempotency_key": "2"}), Tokenize(2, "x" * 60_000)):
        refusal = error(await peer.ask(large))
        assert (refusal.request_id, refusal.code, refusal.retryable) == (2, "RESOURCE_EXHAUSTED", True)
    refusal = error(await other.ask(Tokenize(2, "x" * 60_000 + "☃")))
    assert (refusal.request_id, refusal.retryable) == (2, False), "the text takes more than the whole share"
    assert await bystander.ask(generate(1, "x" * 60_000)) == []
    assert 150_000 < texts.num_bytes < 152_000
    server.engine.prepared.set()
    assert names(await peer.received()) == ["Tokenized"]
    for each in (other, bystander):
        assert names(await each.received()) == ["Accepted"]
    assert texts.num_bytes == 0, "a prompt counts until it is tokenized"


async def test_a_refused_or_lost_prompt_does_not_count_any_more(server: FakeServer) -> None:
    texts = server.context.requests.texts
    peer = await server.connect()
    server.engine.refusal = Overloaded("full")
    error(await peer.ask(generate(1, "x" * 1000)))
    assert texts.num_bytes == 0
    server.engine.refusal = None
    server.engine.prepared.clear()
    peer.send(generate(2, "x" * 1000), Tokenize(3, "x" * 1000))
    await settle()
    assert texts.num_bytes > 2000
    peer.connection.fail_requests(Unavailable("shut down"))
    await settle()
    assert texts.num_bytes == 0


async def test_nothing_is_handled_after_a_refusal(serve: Serve) -> None:
    server = serve(max_pending_bytes=200_000)
    peer, other = [await server.connect() for _ in range(2)]
    other.reader.feed_data(encode(generate(1, "x" * 60_000))[:50_000])
    await settle()
    peer.reader.feed_data(encode(generate(1, "x" * 60_000))[:59_000])
    await settle()
    peer.reader.feed_data(encode(generate(1, "x" * 60_000))[59_000:] + encode(generate(2)))
    refusal = error(await peer.received())
    assert (refusal.request_id, refusal.code) == (None, "RESOURCE_EXHAUSTED")
    assert server.engine.generations == []


async def test_a_frame_may_be_no_longer_than_the_tenants_share(serve: Serve) -> None:
    server = serve(tenants=["a", "b", "c"], max_pending_bytes=400_000)
    peer = FakePeer(server.context, Hello((1,), token="a"))
    (welcome,) = await peer.received()
    assert isinstance(welcome, Welcome)
    assert welcome.max_frame_bytes == 100_000
    server.peers.append(peer)


async def test_a_reload_of_keys_changes_the_shares_of_open_connections(serve: Serve) -> None:
    server = serve(tenants=["a"], max_pending_bytes=200_000)
    peer = await server.connect(token="a")
    peer.reader.feed_data(encode(generate(1, "x" * 60_000))[:40_000])
    await settle()
    server.context.keyring._num_tenants = 9
    peer.reader.feed_data(encode(generate(1, "x" * 60_000))[40_000:50_000])
    assert "may be 20000 bytes" in error(await peer.received()).message


# Slow readers


@every_kind
async def test_a_reader_that_grants_no_credit_counts_as_a_slow_reader(
    serve: Serve, clock: FakeClock, kind: dict[str, Any]
) -> None:
    """The timeout begins when tokens wait to be sent, and again with each grant."""
    server = serve(credit_timeout_ms=1000)
    peer = await server.connect()
    await peer.ask(generate(1, credit=1, **kind))
    await clock.advance(5)
    await server.engine.last.put(chunk(0), chunk(1), chunk(2))
    await clock.advance(0.9)
    assert names(await peer.ask(Credit(1, 1))) == ["Tokens", "Tokens"]
    await clock.advance(0.9)
    assert await peer.received() == []
    await clock.advance(0.1)
    assert error(await peer.received()).code == "DEADLINE_EXCEEDED"
    assert server.engine.last.is_cancelled
    assert server.metric('quire_cancelled_total{cause="slow_reader"}') == 1
    assert error(await peer.ask(Resume(1, 0))).code == "NOT_FOUND"


async def test_no_tokens_follow_those_that_a_slow_reader_lost(serve: Serve, clock: FakeClock) -> None:
    server = serve(credit_timeout_ms=1000)
    peer = await server.connect()
    await peer.ask(generate(1, credit=0))
    server.engine.last.cancel = lambda: None  # type: ignore[method-assign]  # the engine computes on for a while
    await server.engine.last.put(chunk(0))
    await clock.advance(1)
    assert await peer.ask(Credit(1, 9)) == []
    await server.engine.last.put(chunk(1), chunk(2, 0, "", last=True, reason="cancelled"))
    assert error(await peer.received()).code == "DEADLINE_EXCEEDED"


@every_kind
async def test_no_tokens_follow_those_that_a_cancelled_request_lost(server: FakeServer, kind: dict[str, Any]) -> None:
    peer = await server.connect()
    await peer.ask(generate(1, credit=1, **kind))
    server.engine.last.cancel = lambda: None  # type: ignore[method-assign]  # the engine computes on for a while
    await server.engine.last.put(chunk(0), chunk(1))
    assert names(await peer.received()) == ["Tokens"]
    assert await peer.ask(Cancel(1)) == [], "the waiting token is dropped"
    assert await peer.ask(Credit(1, 9)) == []
    await server.engine.last.put(chunk(2), chunk(3, 0, "rest", last=True, reason="cancelled"))
    assert names(await peer.received()) == ["Done"]


@every_kind
async def test_a_trickle_of_credit_counts_as_a_slow_reader(
    serve: Serve, clock: FakeClock, kind: dict[str, Any]
) -> None:
    """Within each timeout the client must take one in 32 of the tokens that waited when it began."""
    server = serve(credit_timeout_ms=1000)
    peer = await server.connect()
    await peer.ask(generate(1, credit=0, **kind))
    await server.engine.last.put(*(chunk(index) for index in range(96)))
    for _ in range(8):
        await clock.advance(0.9)
        assert len(texts(await peer.ask(Credit(1, 3)))) == 3
    await clock.advance(0.9)
    assert len(texts(await peer.ask(Credit(1, 1)))) == 1
    await clock.advance(0.1)
    assert error(await peer.received()).code == "DEADLINE_EXCEEDED"
    assert server.metric('quire_cancelled_total{cause="slow_reader"}') == 1


async def test_the_engine_is_read_while_tokens_wait_for_credit(server: FakeServer) -> None:
    """Waiting output is compact, and its bytes are counted."""
    peer = await server.connect()
    await peer.ask(generate(1, credit=1))
    await server.engine.last.put(*(chunk(index) for index in range(101)))
    waiting = server.unsent_bytes() - READER_BYTES
    assert 0 < waiting < 100 * 200
    assert len(texts(await peer.ask(Credit(1, 50)))) == 51
    assert server.unsent_bytes() - READER_BYTES == pytest.approx(waiting / 2, rel=0.1)
    assert len(texts(await peer.ask(Credit(1, 1000)))) == 50
    assert server.unsent_bytes() == 0


@every_kind
async def test_tokens_that_wait_come_before_the_error(server: FakeServer, kind: dict[str, Any]) -> None:
    peer = await server.connect()
    await peer.ask(generate(1, credit=1, **kind))
    await server.engine.last.put(chunk(0), chunk(1), chunk(2), GenerationFailed("the logits are NaN"))
    assert names(await peer.received()) == ["Tokens"]
    assert names(await peer.ask(Credit(1, 5))) == ["Tokens", "Tokens", "Error"]


@every_kind
async def test_a_waiting_frame_that_is_too_long_for_the_client_ends_its_request(
    server: FakeServer, kind: dict[str, Any]
) -> None:
    peer = await server.connect(max_frame_bytes=MIN_FRAME_BYTES)
    await peer.ask(generate(1, credit=0, **kind))
    await server.engine.last.put(chunk(0, text="x" * MIN_FRAME_BYTES), chunk(1))
    assert error(await peer.ask(Credit(1, 5))).code == "INVALID_ARGUMENT"
    assert names(await peer.ask(Ping(1))) == ["Pong"]
    assert server.unsent_bytes() == 0


async def test_the_largest_stream_without_credit_ends_at_the_limit_of_the_connection(server: FakeServer) -> None:
    server.context.config = msgspec.structs.replace(server.config, max_outgoing_bytes=100_000)
    peer = await server.connect()
    await peer.ask(generate(1, credit=0), generate(2, credit=0))
    small, large = server.engine.generations
    await small.put(*(chunk(index, text="x" * 10_000) for index in range(2)))
    await large.put(*(chunk(index, text="x" * 10_000) for index in range(5)))
    assert await peer.received() == []
    await small.put(chunk(2, text="x" * 10_000), chunk(3))
    slow = error(await peer.received())
    assert (slow.request_id, slow.code) == (2, "DEADLINE_EXCEEDED")
    assert "all output of a connection may be 100000 bytes (`max_outgoing_bytes`)" in slow.message
    assert (small.is_cancelled, large.is_cancelled) == (False, True)
    assert len(texts(await peer.ask(Credit(2, 100), Credit(1, 100)))) == 4, "nothing follows the gap"


async def test_a_tenant_without_credit_ends_its_own_largest_stream_only(serve: Serve) -> None:
    """However many connections hold output, the server holds no more than its limit."""
    server = serve(tenants=["a", "b"], max_unsent_bytes=200_000, max_outgoing_bytes=60_000)
    bystander = await server.connect(token="b")
    await bystander.ask(generate(1, credit=0))
    await server.engine.last.put(*(chunk(index, text="x" * 10_000) for index in range(4)))
    peers = [await server.connect(token="a") for _ in range(5)]
    for round_number in range(20):
        for peer in peers:
            peer.send(generate(round_number, credit=0))
            await settle()
            for index in range(3):
                await server.engine.last.put(chunk(index, text="x" * 9000))
                assert server.unsent_bytes() <= 60_000 + 100_000
    ended = [frame for peer in peers for frame in await peer.received() if isinstance(frame, Error)]
    assert len(ended) >= 95
    assert {frame.code for frame in ended} == {"DEADLINE_EXCEEDED"}
    assert any("a share of `max_unsent_bytes`" in frame.message for frame in ended)
    assert len(texts(await bystander.ask(Credit(1, 100)))) == 4


@every_kind
async def test_streams_that_wait_for_credit_count_however_short_they_are(serve: Serve, kind: dict[str, Any]) -> None:
    server = serve(max_outgoing_bytes=10 * READER_BYTES + 10_000)
    peer = await server.connect()
    ended: list[Frame] = []
    for request_id in range(12):
        key = {"idempotency_key": f"k{request_id}"} if "idempotency_key" in kind else {}
        ended += await peer.ask(generate(request_id, credit=0, **kind | key))
        await server.engine.last.put(chunk(0, last=True))
        assert server.unsent_bytes() <= 10 * READER_BYTES + 10_000
    ended += await peer.received()
    assert names(ended) == ["Accepted"] * 11 + ["Error", "Accepted", "Error"]


async def test_a_stream_that_waits_for_credit_does_not_hold_its_prompt(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(generate(1, credit=0))
    await server.engine.last.put(chunk(0, last=True))
    generation = weakref.ref(server.engine.generations.pop())
    await settle()
    gc.collect()
    assert generation() is None
    assert names(await peer.ask(Credit(1, 1))) == ["Tokens", "Done"]


async def test_output_of_connections_that_ended_is_not_counted(server: FakeServer) -> None:
    for how in ("leave", "abort"):
        peer = await server.connect()
        await peer.ask(generate(1, credit=0))
        await server.engine.last.put(*(chunk(index) for index in range(10)))
        peer.writer.stop_reading()
        await server.engine.last.put(chunk(11, 0, "x" * 100_000))
        if how == "leave":
            await peer.leave()
        peer.writer.transport.abort()
        peer.reader.feed_eof()
        await settle()
        assert peer.task.done()
        assert server.unsent_bytes() == 0


@every_kind
async def test_a_reader_that_takes_nothing_in_time_counts_as_a_slow_reader(
    serve: Serve, clock: FakeClock, kind: dict[str, Any]
) -> None:
    server = serve(write_timeout_ms=1000, resume_timeout_ms=1)
    peer = await server.connect()
    await peer.ask(generate(1, **kind))
    peer.writer.stop_reading()
    await server.engine.last.put(*(chunk(index) for index in range(10)))
    await clock.advance(1)
    assert peer.task.done()
    await clock.advance(1)
    assert server.engine.last.is_cancelled
    assert server.metric('quire_cancelled_total{cause="slow_reader"}') == (0 if "resumable" in kind else 1)
    assert server.metric('quire_cancelled_total{cause="disconnect"}') == (1 if "resumable" in kind else 0)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"write_timeout_ms": 1000}, "a write took longer than 1 s (`write_timeout_ms`)"),
        ({"max_outgoing_bytes": 50_000}, "all output of a connection may be 50000 bytes (`max_outgoing_bytes`)"),
        ({"max_unsent_bytes": 50_000}, "all output of this tenant may be 50000 bytes (a share of `max_unsent_bytes`)"),
    ],
    ids=["time", "connection", "tenant"],
)
async def test_a_connection_closed_as_too_slow_is_logged(
    serve: Serve, clock: FakeClock, logs: list[Any], settings: dict[str, int], limit: str
) -> None:
    server = serve(tenants=["ann"], **settings)
    other = await server.connect(token="ann")
    peer = await server.connect(token="ann")
    peer.writer.stop_reading()
    await peer.ask(generate(1))
    await server.engine.last.put(*(chunk(index, text="x" * 9000) for index in range(5)))
    await other.ask(generate(1))
    await server.engine.last.put(chunk(0, text="x" * 9000), chunk(1, last=True))
    for _ in range(10):
        await peer.ask(*(Ping(number) for number in range(500)))
    await clock.advance(1)
    lines = [line for line in logs if line["event"] == "connection closed: the client reads too slowly"]
    assert [(line["limit"], line["tenant"], line["log_level"]) for line in lines] == [(limit, "ann", "warning")]
    assert server.metric('quire_cancelled_total{cause="slow_reader"}') == 1


async def test_a_reader_with_too_many_unsent_bytes_counts_as_a_slow_reader(serve: Serve) -> None:
    server = serve(max_outgoing_bytes=1_000_000)
    peer = await server.connect()
    await peer.ask(generate(1), generate(2))
    peer.writer.stop_reading()
    await server.engine.last.put(*(chunk(index, text="x" * 60_000) for index in range(20)))
    assert [each.is_cancelled for each in server.engine.generations] == [False, True]
    assert server.metric('quire_cancelled_total{cause="slow_reader"}') == 1
    assert server.unsent_bytes() <= 1_000_000
    peer.writer.read_again()
    frames = await peer.received()
    while "Error" not in names(frames):
        frames += await peer.received()
    assert error(frames[-1:]).request_id == 2


async def test_a_reader_that_reads_gets_output_that_comes_at_once(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(generate(1), generate(2))
    await server.engine.last.put(*(chunk(index, text="x" * 60_000) for index in range(100)), chunk(100, last=True))
    frames = await peer.received()
    while "Done" not in names(frames):
        frames += await peer.received()
    assert sum(map(len, texts(frames))) == 100 * 60_000 + 1


@pytest.mark.parametrize("kind", list(KINDS.values())[1:], ids=list(KINDS)[1:])
async def test_a_replay_that_waits_for_its_reader_ends_with_a_lost_connection(
    serve: Serve, clock: FakeClock, kind: dict[str, Any]
) -> None:
    server = serve(resume_timeout_ms=1000)
    peer = await server.connect()
    await peer.ask(generate(1, **kind))
    peer.writer.stop_reading()
    await server.engine.last.put(*(chunk(index, text="x" * 60_000) for index in range(40)))
    await peer.leave()
    peer.writer.transport.abort()
    await settle()
    assert peer.task.done()
    await clock.advance(1)
    assert server.engine.last.is_cancelled
    assert len(server.requests) == 0


@pytest.mark.parametrize("kind", list(KINDS.values())[1:], ids=list(KINDS)[1:])
async def test_a_replay_waits_for_its_reader_and_goes_on(server: FakeServer, kind: dict[str, Any]) -> None:
    peer = await server.connect()
    await peer.ask(generate(1, **kind))
    peer.writer.stop_reading()
    await server.engine.last.put(*(chunk(index, text="x" * 60_000) for index in range(200)))
    await server.engine.last.put(chunk(200, last=True))
    assert not peer.task.done(), "12 MB wait where 8 MB may be unsent"
    peer.writer.read_again()
    frames = []
    while "Done" not in names(frames):
        frames += await peer.received()
    assert sum(map(len, texts(frames))) == 200 * 60_000 + 1


# Frames longer than the client takes


@every_kind
@pytest.mark.parametrize("offers", [{"peer": MIN_FRAME_BYTES}, {"server": MIN_FRAME_BYTES}], ids=["peer", "server"])
async def test_no_frame_is_longer_than_the_smaller_offer(
    serve: Serve, kind: dict[str, Any], offers: dict[str, int]
) -> None:
    server = serve(max_frame_bytes=offers.get("server", 1 << 20))
    peer = await server.connect(max_frame_bytes=offers.get("peer", 1 << 20))
    await peer.ask(generate(1, **kind), generate(2))
    long, other = server.engine.generations
    await long.put(chunk(0, text="x" * (MIN_FRAME_BYTES - 1000)), chunk(1, text="x" * MIN_FRAME_BYTES), chunk(2))
    frames = await peer.received()
    assert names(frames) == ["Tokens", "Error"]
    assert frames[-1].code == "INVALID_ARGUMENT"  # type: ignore[union-attr]
    await other.put(chunk(0, last=True))
    assert names(await peer.received()) == ["Tokens", "Done"], "the other request goes on"


async def test_an_answer_that_is_too_long_becomes_an_error(server: FakeServer) -> None:
    peer = await server.connect(max_frame_bytes=MIN_FRAME_BYTES)
    frame = error(await peer.ask(Tokenize(1, "x" * 60_000 + "é" * 2500)))
    assert (frame.request_id, frame.code) == (1, "INVALID_ARGUMENT")
    assert await peer.ask(Ping(1)) == [Pong(1)]


async def test_a_text_of_more_tokens_than_a_frame_may_hold_is_an_error(server: FakeServer) -> None:
    peer = await server.connect()
    frame = error(await peer.ask(Tokenize(1, "x" * (MAX_ARRAY_LENGTH + 1))))
    assert (frame.request_id, frame.code) == (1, "INVALID_ARGUMENT")
    assert f"a frame holds at most {MAX_ARRAY_LENGTH}" in frame.message


async def test_frames_after_welcome_may_be_longer_than_before(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(generate(1, "p" * 2 * MIN_FRAME_BYTES))
    assert server.engine.last.request.prompt == "p" * 2 * MIN_FRAME_BYTES
    await server.engine.last.put(chunk(0, text="x" * 2 * MIN_FRAME_BYTES, last=True))
    assert texts(await peer.received()) == ["x" * 2 * MIN_FRAME_BYTES]


# The last frame


async def test_the_last_chunk_becomes_tokens_and_done(server: FakeServer) -> None:
    peer = await server.connect()
    await peer.ask(generate(7))
    last = chunk(0, 2, last=True)
    await server.engine.last.put(last)
    tokens, done = await peer.received()
    assert tokens == Tokens(7, 0, (0, 1), "x", last.logprobs)
    assert done == Done(7, "length", msgspec.structs.replace(last.usage))  # type: ignore[arg-type]


# Timeouts, on the test's own clock


async def test_a_connection_whose_text_is_being_tokenized_is_not_idle(serve: Serve, clock: FakeClock) -> None:
    server = serve(idle_timeout_ms=1000)
    peer = await server.connect()
    server.engine.prepared.clear()
    peer.send(Tokenize(1, "x"))
    await clock.advance(5, step=0.5)
    server.engine.prepared.set()
    assert await peer.received() == [Tokenized(1, (120,))]


async def test_a_connection_with_a_live_request_is_not_idle(serve: Serve, clock: FakeClock) -> None:
    server = serve(idle_timeout_ms=1000)
    peer = await server.connect()
    await peer.ask(generate(1))
    await clock.advance(4.5, step=0.5)
    assert not peer.task.done()
    await server.engine.last.put(chunk(0, last=True))
    await clock.advance(0.9, step=0.1)
    assert names(await peer.received()) == ["Tokens", "Done"]
    await clock.advance(0.2)
    assert error(await peer.received()).message == "this connection was idle for 1000 ms; open another one"


async def test_a_reader_without_credit_may_wait_while_there_is_nothing_to_send(serve: Serve, clock: FakeClock) -> None:
    server = serve(credit_timeout_ms=1000)
    peer = await server.connect()
    assert names(await peer.ask(generate(1, credit=0))) == ["Accepted"]
    await clock.advance(5)
    assert await peer.received() == []


async def test_frames_that_end_in_time_may_follow_each_other_without_a_pause(serve: Serve, clock: FakeClock) -> None:
    """Each read ends inside a frame."""
    server = serve(frame_timeout_ms=1000)
    peer = await server.connect()
    data = encode(Ping(1))
    peer.reader.feed_data(data[:4])
    for _ in range(5):
        await clock.advance(0.9)
        peer.reader.feed_data(data[4:] + data[:4])
        assert await peer.received() == [Pong(1)]
    await clock.advance(1)
    assert "complete within 1000 ms" in error(await peer.received()).message


async def test_only_clients_that_negotiated_a_heartbeat_are_pinged(serve: Serve, clock: FakeClock) -> None:
    server = serve(heartbeat_ms=1000)
    with_heartbeat = await server.connect(features=("heartbeat",))
    without = await server.connect()
    await clock.advance(1.5)
    assert names(await with_heartbeat.received()) == ["Ping"]
    await clock.advance(10, step=0.5)
    assert error((await with_heartbeat.received())[-1:]).message == "the client sent nothing for 3000 ms, not even PONG"
    assert await without.ask(Ping(5)) == [Pong(5)]


@pytest.mark.parametrize("hello", [True, False])
async def test_an_ended_connection_has_no_timers(
    serve: Serve, clock: FakeClock, logs: list[MutableMapping[str, Any]], hello: bool
) -> None:
    server = serve(idle_timeout_ms=1000, handshake_timeout_ms=1000)
    if hello:
        peer = await server.connect(features=("heartbeat",))
    else:
        peer = FakePeer(server.context, None)
        server.peers.append(peer)
    await peer.leave()
    assert peer.task.done()
    await clock.advance(60, step=1)
    assert logs == []


async def test_a_connection_with_many_frames_does_not_delay_others(server: FakeServer) -> None:
    busy = await server.connect()
    other = await server.connect()
    welcome_bytes = len(other.writer.transport.taken)
    busy.reader.feed_data(encode(Ping(1)) * 500)
    other.send(Ping(2))
    while len(other.writer.transport.taken) == welcome_bytes:
        await asyncio.sleep(0)
    assert len(busy.writer.transport.taken) < 250 * len(encode(Pong(1)))
    assert await other.received() == [Pong(2)]
    await settle()
    assert await busy.received() == [Pong(1)] * 500


async def test_the_incomplete_frame_of_a_lost_connection_does_not_count(server: FakeServer) -> None:
    peer = await server.connect()
    peer.reader.feed_data(encode(generate(1, "x" * 1000))[:-1])
    await settle()
    assert server.context.pending.num_bytes > 1000
    await peer.leave()
    assert server.context.pending.num_bytes == 0


async def test_http_on_the_protocol_port_is_answered_in_http(
    server: FakeServer, logs: list[MutableMapping[str, Any]]
) -> None:
    peer = FakePeer(server.context, None)
    server.peers.append(peer)
    peer.reader.feed_data(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await settle()
    head, _, body = bytes(peer.writer.transport.waiting).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert body == (
        b"this port speaks Quire's msgpack frames; OpenAI's HTTP API is on 127.0.0.1:8000, "
        b"metrics and probes (HTTP) are on 127.0.0.1:7071\n"
    )
    assert head.endswith(b"content-length: %d" % len(body))
    assert [each["reason"] for each in logs] == [body.decode().strip()]


async def test_tls_on_a_port_without_tls_is_named(server: FakeServer) -> None:
    peer = FakePeer(server.context, None)
    server.peers.append(peer)
    peer.reader.feed_data(b"\x16\x03\x01\x02\x00\x01")
    (refusal,) = await peer.received()
    assert isinstance(refusal, Error)
    assert "began a TLS handshake; this port is served without TLS" in refusal.message


async def test_malformed_frames_are_logged_at_a_bounded_rate(
    server: FakeServer, logs: list[MutableMapping[str, Any]]
) -> None:
    for _ in range(MAX_LINES + 5):
        peer = FakePeer(server.context, None)
        server.peers.append(peer)
        peer.reader.feed_data(b"\x00\x00\x00\x01\xc1")
        await peer.received()
    assert [each["event"] for each in logs] == ["connection refused"] * MAX_LINES


async def test_a_connection_is_pending_until_its_hello(server: FakeServer) -> None:
    peer = FakePeer(server.context, None)
    server.peers.append(peer)
    await settle()
    assert not peer.is_settled
    await peer.ask(Hello((1,)))
    assert peer.is_settled


@pytest.mark.parametrize("kind", [{"idempotency_key": "k"}, {"credit": 0}], ids=["replayed", "held"])
async def test_streams_that_send_what_waited_take_turns(server: FakeServer, kind: dict[str, Any]) -> None:
    """Many streams of one tenant delay others by one turn of one of them, not of all."""
    peers = [await server.connect() for _ in range(16)]
    if "credit" in kind:
        for peer in peers:
            await peer.ask(generate(1, credit=0))
            await server.engine.last.put(*(chunk(index) for index in range(300)))
    else:
        await peers[0].ask(generate(1, **kind))
        await server.engine.last.put(*(chunk(index, last=index == 299) for index in range(300)))
        await peers.pop(0).received()
    for peer in peers:
        peer.send(Credit(1, 300) if "credit" in kind else generate(1, **kind))
    num_sent = [0]
    while num_sent[-1] < 300 * len(peers):
        await asyncio.sleep(0)
        num_sent.append(sum(bytes(peer.writer.transport.taken).count(b"TOKENS") for peer in peers))
    most = max(after - before for before, after in itertools.pairwise(num_sent[3:]))
    assert most <= 2 * FRAMES_PER_TURN


async def test_frames_that_begin_requests_count_as_several(server: FakeServer) -> None:
    busy = await server.connect()
    busy.reader.feed_data(b"".join(encode(generate(request_id)) for request_id in range(64)))
    num_begun = [0]
    while num_begun[-1] < 64:
        await asyncio.sleep(0)
        num_begun.append(len(server.requests))
    most = max(after - before for before, after in itertools.pairwise(num_begun))
    assert most <= FRAMES_PER_TURN / FRAMES_PER_REQUEST


@every_kind
async def test_chunks_are_sent_without_a_task_of_their_request(server: FakeServer, kind: dict[str, Any]) -> None:
    """Output waits only for work that ran before it in its turn of the event loop."""
    peer = await server.connect()
    await peer.ask(generate(1, **kind), generate(2))
    for number in range(3):
        for generation in server.engine.generations:
            generation._put(chunk(number))
        assert not peer.writer.transport.waiting
        await asyncio.sleep(0)
        assert bytes(peer.writer.transport.waiting).count(b"TOKENS") == 2, "both in one write, in the next turn"
        assert names(await peer.received()) == ["Tokens", "Tokens"]


async def test_a_subscriber_without_credit_does_no_work_for_new_chunks(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_decoded = 0

    def decode(data: bytes) -> OutputChunk:
        nonlocal num_decoded
        num_decoded += 1
        return decode_chunk(data)

    monkeypatch.setattr(output_log, "decode_chunk", decode)
    peer = await server.connect()
    await peer.ask(generate(1, credit=1, resumable=True))
    for index in range(100):
        await server.engine.last.put(chunk(index))
    assert num_decoded <= 3
    assert len(texts(await peer.ask(Credit(1, 99)))) == 100


async def test_an_error_of_a_reader_ends_its_request_only(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine calls the readers, so none of them may raise."""
    peer = await server.connect()
    await peer.ask(generate(1), generate(2, resumable=True), generate(3))

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(frame_writer, "tokens_frame", fail)
        await server.engine.generations[0].put(chunk(0))
    with monkeypatch.context() as patch:
        patch.setattr(output_log, "encode_chunk", fail)
        await server.engine.generations[1].put(chunk(0))
    await server.engine.generations[2].put(chunk(0, last=True))
    frames = await peer.received()
    assert [(type(frame).__name__, frame.request_id) for frame in frames] == [  # type: ignore[union-attr]
        ("Error", 1),
        ("Error", 2),
        ("Tokens", 3),
        ("Done", 3),
    ]
    assert [each.is_cancelled for each in server.engine.generations] == [True, True, False]
