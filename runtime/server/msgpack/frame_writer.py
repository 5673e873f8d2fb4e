"""`FrameWriter`: the frames that answer one request, from ACCEPTED to DONE or ERROR. Must not import the connection."""

from __future__ import annotations

from collections.abc import Collection

from ....scheduler import AdmissionEstimate
from ...common.types import OutputChunk
from ...protocol.codec import encode
from ...protocol.frames import Done, Error, Progress
from ...protocol.wire_errors import error_frame
from ..requests.output_reader import OutputReader
from ..requests.send_buffer import SendBuffer
from .convert import accepted_frame, done_frame, tokens_frame


class FrameWriter:
    """Sends the frames of one request id."""

    def __init__(self, request_id: int, send_buffer: SendBuffer, features: Collection[str]) -> None:
        """Create the writer of one request; the connection has negotiated `features`."""
        self.request_id = request_id
        self.send_buffer = send_buffer
        self._features = features
        self._done: Done | None = None

    async def play(self, reader: OutputReader) -> Done | Error:
        """Send every frame of an output except the last one, which is returned."""
        log = reader.log
        if (refusal := await reader.accepted()) is not None:
            return error_frame(self.request_id, refusal)
        self.accept(log.admission, log.seed)

        def show_progress(computed_tokens: int, prompt_tokens: int) -> None:
            if reader.shows_progress:
                self.send_buffer.send(Progress(self.request_id, computed_tokens, prompt_tokens))

        if "progress" in self._features:
            log.request.prefill_watchers.add(show_progress)
        try:
            failure = await reader.play(self.write)
        finally:
            log.request.prefill_watchers.discard(show_progress)  # nothing follows the last frame
        if failure is not None:
            return error_frame(self.request_id, failure)
        assert self._done is not None, "an output ends with an error or its last chunk"
        return self._done

    def accept(self, admission: AdmissionEstimate, seed: int | None = None) -> None:
        """Send ACCEPTED."""
        self.send_buffer.send(accepted_frame(self.request_id, admission, self._features, seed))

    def write(self, chunk: OutputChunk) -> None:
        """Send a chunk as TOKENS; keep DONE until the id is free. Raises InvalidRequest for too long a frame."""
        if (tokens := tokens_frame(self.request_id, chunk)) is not None:
            self.send_buffer.send_bytes(encode(tokens, self.send_buffer.max_frame_bytes))
        if chunk.usage is not None:
            self._done = done_frame(self.request_id, chunk)
