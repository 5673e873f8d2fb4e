"""`VectorStream`: one request to embed or score on one connection; it sends values as frames, as fast as credit allows.

Values are read from the engine only when they may be sent, so a client that grants no credit pauses the work. Must not
import the connection or the request handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator

from ...common.errors import Cancelled, DeadlineExceeded, QuireError
from ...engine.facade import EmbeddedTexts
from ...protocol.frames import Done, Error, Scores, Vectors
from ...protocol.wire_errors import error_frame
from ..monitoring import CancelCause
from ..requests.live_embedding import LiveEmbedding
from ..requests.output_reader import Pace
from ..requests.request_log import quire_error
from .frame_writer import FrameWriter

FRAME_BYTES = 64  # upper bound for a VECTORS frame without its values
VALUE_BYTES = 4
SCORE_BYTES = 9  # bytes of a score in msgpack


class VectorStream:
    """The answer to EMBED, or to SCORE. `run` it in a task."""

    def __init__(self, live: LiveEmbedding, writer: FrameWriter, pace: Pace, *, is_score: bool) -> None:
        live.on_accepted = writer.accept
        self._live = live
        self._request_id = writer.request_id
        self._pace = pace
        self._is_score = is_score
        self._credit = math.inf if pace.credit is None else pace.credit  # texts
        self._cancelled = False
        self._stopped: QuireError | None = None
        self._changed = asyncio.Event()

    async def run(self) -> Done | Error:
        """Send every frame but the last one, which is returned."""
        request_id = self._request_id
        try:
            async with contextlib.aclosing(self._live.chunks()) as chunks:
                async for chunk in chunks:
                    for frame, num_texts in self._frames(chunk):
                        await self._wait_for_credit()
                        self._credit -= num_texts
                        self._pace.send_buffer.send(frame)
        except Cancelled:
            if self._stopped is not None:
                return error_frame(request_id, self._stopped)
            return Done(request_id, "cancelled", self._live.usage)
        except Exception as error:
            return error_frame(request_id, quire_error(error, client_id=request_id).with_traceback(None))
        return Done(request_id, "stop", self._live.usage)

    def grant(self, texts: int) -> None:
        """Add to the credit."""
        self._credit += texts
        self._changed.set()

    def cancel(self, cause: CancelCause) -> None:
        """End soon: the client cancelled the request."""
        self._cancelled = True
        self._live.cancel(cause)
        self._changed.set()

    def leave(self, cause: CancelCause) -> None:
        """End soon: the connection is lost."""
        self.cancel(cause)

    def shut_down(self, error: QuireError) -> None:
        """Cancel the request: its last frame, `error`, is sent by the caller."""
        self._stopped = error
        self.cancel("shutdown")

    def end(self) -> None:
        """Release the request, if its task ended before it began to run."""
        self._live.close()

    def _frames(self, chunk: EmbeddedTexts) -> Iterator[tuple[Vectors | Scores, int]]:
        """Yield the chunk as frames within the client's limit, each with its number of texts."""
        request_id = self._request_id
        (num_texts, size) = chunk.values.shape
        room = self._pace.send_buffer.max_frame_bytes - FRAME_BYTES
        per_frame = max(1, room // (SCORE_BYTES if self._is_score else VALUE_BYTES * size))
        for first in range(0, num_texts, per_frame):
            rows = chunk.values[first : first + per_frame]
            index = chunk.first_index + first
            if self._is_score:
                yield Scores(request_id, index, tuple(rows[:, 0].tolist())), len(rows)
            else:
                yield Vectors(request_id, index, size, rows.astype("<f4").tobytes()), len(rows)

    async def _wait_for_credit(self) -> None:
        """Wait until a frame may be sent. Raises DeadlineExceeded if the client grants no credit, or Cancelled."""
        timeout_ms = self._pace.credit_timeout_ms
        while not self._cancelled and self._credit <= 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    await self._changed.wait()
            except TimeoutError:
                raise DeadlineExceeded(f"the client granted no credit in {timeout_ms} ms; grant CREDIT") from None
        if not self._cancelled:
            await self._pace.send_buffer.wait_until_short()
        if self._cancelled:
            raise Cancelled("the request was cancelled")
