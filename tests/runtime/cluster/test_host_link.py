"""The ends of the link between an API server and an engine host."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from quire.runtime.cluster.host_link import FROM_HOST, TO_HOST, Heartbeat, HostLink, arrived, with_time_left
from quire.runtime.common.errors import ProtocolError
from quire.runtime.protocol.framing import next_payload, with_prefix
from quire.runtime.workers.engine_link import AddRequests, ImagePixels, PixelReceiver, ReadmitRequest, as_read
from quire.scheduler import PlacedImage

from tests.support.engine_processes import new_requests


class FakeTransport:
    """A transport to a peer that reads nothing."""

    def __init__(self) -> None:
        self.num_unsent = 0
        self.written = bytearray()
        self.is_aborted = False
        self.is_reading = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def write(self, data: bytes) -> None:
        self.num_unsent += len(data)
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def abort(self) -> None:
        self.is_aborted = True

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        """Take the bytes of a test."""

    def pause_reading(self) -> None:
        self.is_reading = False


def link_to(transport: Any, received: bytes = b"", max_unsent_bytes: int = 100) -> HostLink:
    reader = asyncio.StreamReader()
    reader.feed_data(received)
    reader.feed_eof()
    return HostLink(reader, SimpleNamespace(transport=transport), FROM_HOST, max_unsent_bytes)  # type: ignore[arg-type]


async def test_a_peer_that_does_not_read_loses_the_link() -> None:
    transport = FakeTransport()
    link = link_to(transport)
    for _ in range(100):
        link.send(Heartbeat())
    assert transport.is_aborted
    assert transport.num_unsent < 200


async def test_a_link_that_is_given_up_does_not_wait_for_its_peer_to_read() -> None:
    transport = FakeTransport()
    link = link_to(transport)
    link.send(Heartbeat())
    assert transport.num_unsent
    link.abort()
    assert transport.is_aborted


async def test_bytes_after_the_greeting_and_later_ones_are_messages() -> None:
    received: list[object] = []
    first, second = (with_prefix(msgspec.msgpack.encode(Heartbeat())) for _ in range(2))
    link = link_to(FakeTransport(), first + second[:3])
    receiving = asyncio.create_task(link.receive_all(received.append))
    await asyncio.sleep(0)
    link.data_received(second[3:] + second)
    link.connection_lost(None)
    await receiving
    assert received == [Heartbeat()] * 3


async def test_a_link_that_has_ended_receives_nothing() -> None:
    link = link_to(FakeTransport())
    await link.receive_all(lambda message: None)


async def test_nothing_is_received_after_a_message_that_fails() -> None:
    received: list[object] = []

    def receive(message: object) -> None:
        received.append(message)
        raise ZeroDivisionError

    heartbeat = with_prefix(msgspec.msgpack.encode(Heartbeat()))
    link = link_to(FakeTransport(), heartbeat * 2)
    with pytest.raises(ZeroDivisionError):
        await link.receive_all(receive)
    link.data_received(heartbeat)
    assert len(received) == 1
    assert not link._transport.is_reading  # type: ignore[attr-defined]


async def test_a_deeply_nested_message_is_an_error_of_the_peer() -> None:
    nested = b"\x92" + msgspec.msgpack.encode("HEARTBEAT") + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(ProtocolError, match="cannot be read"):
        await link_to(FakeTransport(), with_prefix(nested)).receive_all(lambda message: None)


def messages_in(written: bytearray) -> list[Any]:
    return [TO_HOST.decode(payload) for payload in iter(lambda: next_payload(written, 3 << 19), None)]


async def test_pixels_travel_in_pieces_before_their_request_and_once_for_all_samples() -> None:
    images = (
        PlacedImage(1, 2, b"a", 700, 800, bytes([1, 2, 3]) * 560_000),
        PlacedImage(5, 2, b"b", 1, 2, bytes(range(6))),
    )
    first, second = (as_read(request.spec) for request in new_requests(1, 2, images=images))
    (other,) = new_requests(3, images=images[1:])
    transport = FakeTransport()
    pixels = PixelReceiver()
    link = link_to(transport, max_unsent_bytes=1 << 30)
    link.send(AddRequests.of([first, second]))
    *pieces, added = messages_in(transport.written)
    assert [len(each.pixels) for each in pieces] == [1 << 20, 1_680_000 - (1 << 20), 6]
    assert not any(image.pixels for spec in added.requests for image in spec.images)
    for piece in pieces:
        pixels.add(piece.pixels)
    assert pixels.with_pixels(added.requests[0].images) == images
    link.send(ReadmitRequest(second, (7,)))
    (readmitted,) = messages_in(transport.written)
    assert pixels.with_pixels(readmitted.request.images) == images
    link.send(ReadmitRequest(as_read(other.spec), ()))
    piece, readmitted = messages_in(transport.written)
    assert isinstance(piece, ImagePixels)
    pixels.add(piece.pixels)
    assert pixels.with_pixels(readmitted.request.images) == images[1:]
    assert pixels.with_pixels(()) == ()
    link.send(ReadmitRequest(as_read(other.spec), ()))
    (readmitted,) = messages_in(transport.written)
    assert pixels.with_pixels(readmitted.request.images) == images[1:], "a request without images came between"


@pytest.mark.parametrize("deadline", [None, 12.5, 7.0, 5.0])
def test_a_deadline_keeps_its_distance_also_when_it_has_passed(deadline: float | None) -> None:
    (request,) = new_requests(1, deadline=deadline)
    traveling = with_time_left(request.spec, 7.0)
    assert traveling.deadline == {None: None, 12.5: 5.5, 7.0: 0.0, 5.0: -2.0}[deadline]
    assert arrived(traveling, 1, 107.0).deadline == (None if deadline is None else deadline + 100)
