"""The send buffer: bounded and in order; sending never waits, and a paced stream can wait until little is unsent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.protocol.codec import Decoder, encode
from quire.runtime.protocol.frames import MAX_FRAME_BYTES, SERVER_FRAMES, Ping, Tokenized, Tokens
from quire.runtime.server.requests.send_buffer import SendBuffer
from quire.runtime.server.tenancy.tenant_bytes import TenantBytes

from tests.support.server import FakeClock, FakeWriter, settle


class Wire:
    """A buffer whose task runs, over a writer in memory."""

    def __init__(self, max_bytes: int = 1 << 20, write_timeout_s: float = 1.0) -> None:
        self.writer = FakeWriter()
        writer: Any = self.writer
        self.buffer = SendBuffer(writer, max_bytes=max_bytes, write_timeout_s=write_timeout_s)
        self.task = asyncio.create_task(self.buffer.run())

    def arrived(self) -> list[Any]:
        return list(Decoder(SERVER_FRAMES, MAX_FRAME_BYTES).feed(bytes(self.writer.transport.taken)))


@pytest.fixture
async def wire(clock: FakeClock) -> AsyncIterator[Callable[..., Wire]]:
    wires: list[Wire] = []

    def make(**limits: Any) -> Wire:
        wires.append(Wire(**limits))
        return wires[-1]

    yield make
    for each in wires:
        each.buffer.close()
        each.writer.transport.abort()
        await settle()
        assert each.task.done()


def text(num_bytes: int) -> Tokens:
    return Tokens(1, 0, (1,), "x" * num_bytes)


async def test_frames_arrive_whole_and_in_order(wire: Callable[..., Wire]) -> None:
    sent = [Ping(index) if index % 3 else text(index * 1000) for index in range(100)]
    one = wire(max_bytes=16 << 20)
    for frame in sent:
        one.buffer.send(frame)
    while one.buffer.unsent_bytes:
        await settle()
    assert one.arrived() == sent


async def test_a_frame_longer_than_the_peer_takes_is_refused_and_nothing_of_it_is_sent(
    wire: Callable[..., Wire],
) -> None:
    one = wire()
    one.buffer.max_frame_bytes = len(encode(text(1000))) - 4
    one.buffer.send(text(1000))
    with pytest.raises(InvalidRequest, match=f"the limit is {one.buffer.max_frame_bytes}"):
        one.buffer.send(text(1001))
    one.buffer.send(Ping(1))
    await settle()
    assert one.arrived() == [text(1000), Ping(1)]


async def test_a_peer_that_lets_too_much_wait_is_cut_and_what_waits_is_dropped(wire: Callable[..., Wire]) -> None:
    one = wire(max_bytes=100_000)
    one.writer.stop_reading()
    one.buffer.send(text(40_000))
    await settle()
    for _ in range(2):
        assert not one.writer.transport.aborted
        one.buffer.send(text(40_000))
    assert one.buffer.num_bytes == 0
    assert (one.buffer.is_stuck, one.writer.transport.aborted) == (True, True)
    await settle()
    assert one.task.done()
    one.buffer.send(text(60_000))
    assert not one.buffer._unsent


async def test_only_frames_that_the_system_does_not_take_at_once_are_counted(wire: Callable[..., Wire]) -> None:
    one = wire()
    output = TenantBytes("output", "max_unsent_bytes", lambda: 1 << 20)
    one.buffer.join(output)
    one.buffer.send(text(1000))
    assert output.num_bytes == one.buffer.num_bytes == 0
    await settle()
    one.writer.stop_reading()
    one.buffer.send(text(2000))
    await settle()
    one.buffer.send(text(3000))
    assert output.num_bytes == one.buffer.num_bytes == len(encode(text(2000)) + encode(text(3000)))
    one.writer.read_again()
    await settle()
    assert output.num_bytes == one.buffer.num_bytes == 0


async def test_a_connection_may_hold_no_more_than_its_tenant(wire: Callable[..., Wire]) -> None:
    one = wire(max_bytes=1000)
    assert one.buffer.max_bytes == 1000
    for share, limit in ((500, 500), (2000, 1000)):
        output = TenantBytes("output", "max_unsent_bytes", lambda share=share: share)
        one.buffer.join(output)
        assert one.buffer.max_bytes == limit
        one.buffer.leave()


async def test_frames_longer_than_one_write_are_counted_before_they_are_written(wire: Callable[..., Wire]) -> None:
    one = wire()
    for _ in range(3):
        one.buffer.send(text(32 << 10))
    assert one.buffer.num_bytes == 3 * len(encode(text(32 << 10)))
    await settle()
    assert one.buffer.num_bytes == 0


async def test_a_peer_that_takes_nothing_of_a_write_in_time_is_cut(wire: Callable[..., Wire], clock: FakeClock) -> None:
    one = wire(write_timeout_s=10)
    one.writer.stop_reading()
    one.buffer.send(Ping(1))
    await settle()
    await clock.advance(9.9)
    assert not one.buffer.is_stuck
    await clock.advance(0.1)
    assert (one.buffer.is_stuck, one.writer.transport.aborted, one.task.done()) == (True, True, True)


async def test_each_write_has_the_whole_time(wire: Callable[..., Wire], clock: FakeClock) -> None:
    one = wire(write_timeout_s=10)
    for index in range(5):
        one.writer.stop_reading()
        one.buffer.send(Ping(index))
        await settle()
        await clock.advance(9)
        one.writer.read_again()
        await settle()
    assert one.arrived() == [Ping(index) for index in range(5)]


async def test_a_closed_buffer_sends_its_rest_and_takes_nothing_more(wire: Callable[..., Wire]) -> None:
    one = wire()
    one.writer.stop_reading()
    one.buffer.send(Ping(1))
    one.buffer.send(Ping(2))
    one.buffer.close()
    one.buffer.send(Ping(3))
    await settle()
    assert one.buffer.unsent_bytes
    one.writer.read_again()
    await settle()
    assert one.task.done()
    assert one.arrived() == [Ping(1), Ping(2)]
    assert not one.buffer.unsent_bytes


async def test_a_lost_connection_ends_the_task_without_an_error(wire: Callable[..., Wire]) -> None:
    one = wire()
    one.writer.stop_reading()
    one.buffer.send(Ping(1))
    await settle()
    one.writer.transport.abort()
    await settle()
    assert one.task.done()
    assert one.task.exception() is None
    assert not one.buffer.is_stuck


# Waiting until little is unsent, as a stream that replays does


async def test_a_paced_stream_waits_while_much_is_unsent(wire: Callable[..., Wire]) -> None:
    one = wire(max_bytes=1 << 20)
    await asyncio.wait_for(one.buffer.wait_until_short(), 1)
    one.writer.stop_reading()
    for _ in range(6):
        one.buffer.send(text(64 << 10))
    waiting = asyncio.create_task(one.buffer.wait_until_short())
    await settle()
    assert not waiting.done()
    one.writer.read_again()
    await settle()
    assert waiting.done()


@pytest.mark.parametrize("end", ["closed", "lost", "stuck"])
async def test_a_paced_stream_does_not_wait_on_a_connection_that_ended(
    wire: Callable[..., Wire], clock: FakeClock, end: str
) -> None:
    one = wire(max_bytes=1 << 20, write_timeout_s=10)
    one.writer.stop_reading()
    for _ in range(6):
        one.buffer.send(text(64 << 10))
    waiting = [asyncio.create_task(one.buffer.wait_until_short()) for _ in range(2)]
    await settle()
    assert not any(each.done() for each in waiting)
    if end == "closed":
        one.buffer.close()
    elif end == "lost":
        one.writer.transport.abort()
    else:
        await clock.advance(10)
    await settle()
    assert all(each.done() for each in waiting)
    await one.buffer.wait_until_short()


async def test_paced_streams_use_half_of_a_small_limit(wire: Callable[..., Wire]) -> None:
    """The other half is for frames that cannot wait."""
    one = wire(max_bytes=100_000)
    one.writer.stop_reading()
    one.buffer.send(Ping(1))
    await settle()
    one.buffer.send(text(51_000))
    waiting = asyncio.create_task(one.buffer.wait_until_short())
    await settle()
    assert not waiting.done()
    one.buffer.send(Tokenized(1, tuple(range(5000))))
    assert not one.buffer.is_stuck
    one.writer.read_again()
    await settle()
    assert waiting.done()
