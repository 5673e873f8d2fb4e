"""The writers of an answer over HTTP: `EventWriter` sends chunks as server-sent events, `BodyWriter` sends one body."""

from __future__ import annotations

from typing import Protocol

from ...common.errors import Cancelled, InvalidRequest, Overloaded, QuireError
from ...common.types import OutputChunk, Usage
from .errors import HTTPAnswer
from .formats import Format
from .request_cycle import RequestCycle

SMALLER_ANSWER = "stream it, or ask for less"
CANCELLED = "the request was cancelled"


class AnswerWriter(Protocol):
    """A writer of an answer from the chunks of its choices: `begin`, `write` for each chunk, `end` unless it fails."""

    form: Format

    def begin(self) -> None:
        """Begin the answer: the engine has accepted every request of the call."""

    def write(self, first: int, chunk: OutputChunk) -> None:
        """Add the next chunk of the prompt whose first choice has the index `first`.

        Raises Cancelled for the last chunk of a cancelled output.
        """

    def end(self, usage: Usage) -> None:
        """End the answer: every request has ended."""

    def close(self) -> None:
        """Release the memory that is counted. Idempotent."""


class EventWriter:
    """Sends each chunk as events. Implements `AnswerWriter`."""

    def __init__(self, cycle: RequestCycle, form: Format) -> None:
        self.form = form
        self._cycle = cycle
        self._memory = AnswerMemory(cycle, SMALLER_ANSWER)

    def begin(self) -> None:
        """Send the head of the stream and the first events."""
        self._cycle.begin_events()
        self._cycle.send_events(self.form.opening())

    def write(self, first: int, chunk: OutputChunk) -> None:
        """Send the chunk."""
        if chunk.finish_reason == "cancelled":
            raise Cancelled(CANCELLED)
        form = self.form
        self._cycle.send_events(form.events(first + chunk.choice, chunk))
        if form.held_bytes:
            self._memory.add(form.held_bytes - self._memory.num_bytes)

    def end(self, usage: Usage) -> None:
        """Send the last events."""
        self._cycle.send_events(self.form.ending(usage))
        self._cycle.end_events()

    def close(self) -> None:
        """See `AnswerWriter.close`."""
        self._memory.release()


class BodyWriter:
    """Sends the whole answer at its end. Implements `AnswerWriter`."""

    def __init__(self, cycle: RequestCycle, form: Format) -> None:
        self.form = form
        self._cycle = cycle
        self._memory = AnswerMemory(cycle, SMALLER_ANSWER)

    def begin(self) -> None:
        """See `AnswerWriter.begin`."""

    def write(self, first: int, chunk: OutputChunk) -> None:
        """Keep the chunk for the body."""
        if chunk.finish_reason == "cancelled":
            raise Cancelled(CANCELLED)
        if not self._memory.is_released:
            self._memory.add(self.form.choices[first + chunk.choice].add(chunk))

    def end(self, usage: Usage) -> None:
        """Send the answer."""
        self.close()
        self._cycle.respond(HTTPAnswer(200, self.form.whole(usage)))

    def close(self) -> None:
        """See `AnswerWriter.close`."""
        self._memory.release()


class AnswerMemory:
    """The bytes that an answer holds, counted as unsent output of the connection.

    Implements `send_buffer.WaitingStream`. `advice` says how a client can ask for less.
    """

    def __init__(self, cycle: RequestCycle, advice: str) -> None:
        self.num_bytes = 0
        self.is_released = False
        self._cycle = cycle
        self._advice = advice

    def add(self, num_bytes: int) -> None:
        """Count more bytes. Does nothing once released."""
        if not self.is_released:
            self.num_bytes += num_bytes
            self._cycle.send_buffer.hold(self, num_bytes)

    def release(self) -> None:
        """Stop counting. Idempotent."""
        self.is_released = True
        self._cycle.send_buffer.hold(self, -self.num_bytes)
        self.num_bytes = 0

    def shed(self, error: QuireError) -> None:
        """End the call: its answer exceeds the limit, alone or with all other answers."""
        held = self.num_bytes
        limit = self._cycle.send_buffer.max_bytes
        self.release()
        text = (
            f"{held} bytes of this answer exceed what may wait to be sent (`max_outgoing_bytes`, `max_unsent_bytes`)"
            f"{'' if held > limit else ' beside other answers; try again later'}; {self._advice}"
        )
        self._cycle.fail(InvalidRequest(text) if held > limit else Overloaded(text), "slow_reader")
