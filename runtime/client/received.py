"""The part of an output that a client has received, and the request for the rest.

Must not import connections.
"""

from __future__ import annotations

import itertools

import msgspec

from ..common.errors import ProtocolError
from ..common.types import OutputChunk
from ..protocol.frames import Done, Generate, Tokens


class ReceivedOutputs:
    """The token ids of each output of a request, and which outputs have ended; DONE names neither."""

    def __init__(self) -> None:
        self.seed: int | None = None  # seed from ACCEPTED
        self._token_ids: dict[int, list[int]] = {}
        self._ended: set[int] = set()
        self._without_tokens: set[int] = set()  # outputs that were ended by TOKENS without ids

    def receive(self, answer: Tokens | Done) -> OutputChunk | None:
        """Return the answer as a chunk of its output; None if it was received before.

        Raises ProtocolError for a gap before its tokens.
        """
        if isinstance(answer, Done):
            return self._end(answer)
        if self._has_seen(answer):
            return None
        if answer.first_index > self._num_tokens(answer.choice):
            raise ProtocolError(
                f"TOKENS begins at {answer.first_index}, after {self._num_tokens(answer.choice)} tokens"
            )
        self._token_ids.setdefault(answer.choice, []).extend(answer.token_ids)
        if answer.finish_reason is not None:
            self._ended.add(answer.choice)
        return OutputChunk(
            first_index=answer.first_index,
            token_ids=answer.token_ids,
            text=answer.text,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            choice=answer.choice,
            cumulative_logprob=answer.cumulative_logprob,
            deltas=answer.deltas,
        )

    def rest_of(self, frame: Generate) -> Generate | None:
        """Return the request for the missing part, for any server with the same bits; None if none can answer it.

        The outputs of `best_of` and of a beam search come at the end, one frame each: the request is sent again, and
        the received part is skipped.
        """
        if not self._ended and not self._token_ids:
            return frame
        if self.seed is None:  # the server is of an earlier release
            return None
        params = msgspec.structs.replace(frame.params, seed=self.seed)
        frame = msgspec.structs.replace(frame, params=params, idempotency_key=None)
        if params.best_of is not None or params.beam_width:
            return frame
        generated = tuple(tuple(self._token_ids.get(choice, ())) for choice in range(params.n))
        return msgspec.structs.replace(frame, generated=generated, ended=tuple(sorted(self._ended)))

    def _has_seen(self, answer: Tokens) -> bool:
        """Return whether the answer repeats an earlier one.

        RESUME, which counts tokens, repeats TOKENS without ids. A request that was sent again repeats whole outputs.
        """
        if answer.token_ids:
            return answer.first_index < self._num_tokens(answer.choice)
        seen = answer.choice in self._without_tokens or answer.choice in self._ended
        self._without_tokens.add(answer.choice)
        return seen

    def _end(self, answer: Done) -> OutputChunk:
        """Return the end of the first output that has not ended."""
        choice = next(choice for choice in itertools.count() if choice not in self._ended)
        return OutputChunk(
            first_index=self._num_tokens(choice),
            token_ids=(),
            text="",
            finish_reason=answer.finish_reason,
            usage=answer.usage,
            choice=choice,
        )

    def _num_tokens(self, choice: int) -> int:
        return len(self._token_ids.get(choice, ()))
