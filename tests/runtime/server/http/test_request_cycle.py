"""Cycles of the HTTP API, without sockets: the end of a stream, bytes of an answer that was shed, slow clients."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import h11
from quire.runtime.common.errors import DeadlineExceeded
from quire.runtime.common.types import OutputChunk, SamplingParams
from quire.runtime.engine.facade import GenerateRequest
from quire.runtime.server.http.answer_writers import AnswerMemory
from quire.runtime.server.http.playback import log_reader
from quire.runtime.server.http.request_cycle import RequestCycle
from quire.runtime.server.openai.api import OPENAI_FORM
from quire.runtime.server.requests.output_log import OutputLog

from tests.support.server import FakeServer, chunk

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"


def cycle_over(send_buffer: Any) -> RequestCycle:
    http = h11.Connection(h11.SERVER)
    http.receive_data(HEAD)
    head = http.next_event()
    assert isinstance(head, h11.Request)
    return RequestCycle(http, send_buffer, head, 1, OPENAI_FORM)


async def test_no_timer_holds_a_stream_that_has_ended() -> None:
    cycle = cycle_over(SimpleNamespace(send_bytes=lambda data: None))
    cycle.begin_events()
    cycle.end_events()
    ended = weakref.ref(cycle)
    del cycle
    assert ended() is None


async def test_an_answer_that_was_shed_counts_no_more_bytes() -> None:
    held: list[int] = []
    sent: list[bytes] = []
    send_buffer = SimpleNamespace(hold=lambda _, num: held.append(num), send_bytes=sent.append, max_bytes=4)
    memory = AnswerMemory(cycle_over(send_buffer), "ask for less")
    memory.add(5)
    memory.shed(DeadlineExceeded("the connection holds too much"))
    assert b"5 bytes of this answer exceed what may wait to be sent" in b"".join(sent)
    memory.add(7)
    assert (sum(held), memory.num_bytes) == (0, 0)
    memory.release()
    assert (sum(held), memory.num_bytes) == (0, 0)


async def test_a_stream_over_http_that_is_not_kept_is_written_however_much_is_unsent(server: FakeServer) -> None:
    """Output that waited would be held as well, and the limit of the connection ends a slow client."""
    peer = await server.connect()
    peer.writer.stop_reading()
    cycle = cycle_over(peer.connection._send_buffer)
    cycle.tenant = server.tenant
    request = GenerateRequest(prompt="hi", sampling_params=SamplingParams())
    reader = log_reader(cycle, OutputLog(server.requests.submit(server.tenant, 1, request)))
    assert await reader.accepted() is None
    written: list[OutputChunk] = []
    reader.start(written.append, lambda: None)
    cycle.send_buffer.send_bytes(bytes(1 << 20))
    cycle.send_buffer.send_bytes(bytes(1 << 20))
    assert cycle.send_buffer.is_long
    await server.engine.last.put(chunk(0), chunk(1, last=True))
    assert written == [chunk(0), chunk(1, last=True)]
    reader.end()
    peer.writer.read_again()
