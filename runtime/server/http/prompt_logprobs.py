"""`prompt_logprobs`: separates the engine's echo of the prompt from the rest of an output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from encodings.utf_8 import IncrementalDecoder
from typing import Any

import msgspec

from ...common.types import OutputChunk, TokenLogprobs
from ...engine.text import Token
from .logprobs import LEAST

_encode = msgspec.json.encode


class PromptPart:
    """The prompt at the start of one output: its logprobs in vLLM's form, and the chunks after it."""

    def __init__(
        self, token_ids: Sequence[int], token_of: Callable[[int], Token], num_shown: int, num_logprobs: int | None
    ) -> None:
        """Show `num_shown` alternatives of each prompt token, `num_logprobs` of each output token (None: nothing)."""
        self.num_logprobs = num_logprobs
        self._token_of = token_of
        self._num_shown = num_shown
        self.num_bytes = 0  # bytes of the entries
        self._entries = [b"null"]  # the first token has no probability
        self._tokens_left = len(token_ids) - 1
        self._characters_left = _num_characters(token_ids, token_of) - _num_characters(token_ids[:1], token_of)

    def split(self, chunk: OutputChunk) -> OutputChunk:
        """Note the prompt's part of the chunk, and return the output's part."""
        num_tokens = min(self._tokens_left, len(chunk.token_ids))
        num_characters = min(self._characters_left, len(chunk.text))
        self._tokens_left -= num_tokens
        self._characters_left -= num_characters
        logprobs = chunk.logprobs or ()
        entries = [_encode(self._entry(each)) for each in logprobs[:num_tokens]]
        self._entries += entries
        self.num_bytes += sum(map(len, entries))
        shown = None
        if self.num_logprobs is not None:
            shown = tuple(
                msgspec.structs.replace(each, top=each.top[: self.num_logprobs]) for each in logprobs[num_tokens:]
            )
        return msgspec.structs.replace(
            chunk, token_ids=chunk.token_ids[num_tokens:], text=chunk.text[num_characters:], logprobs=shown
        )

    def json(self) -> bytes:
        """Return the value of the field."""
        return b"[%b]" % b",".join(self._entries)

    def _entry(self, of: TokenLogprobs) -> dict[str, Any]:
        """Return the token and the alternatives by id; a token that is not among the alternatives has no rank."""
        ranked = {token_id: rank for rank, (token_id, _) in enumerate(of.top, 1)}
        shown = {of.token_id: of.logprob} | dict(of.top[: self._num_shown])
        return {
            str(token_id): {
                "logprob": max(logprob, LEAST),
                "rank": ranked.get(token_id),
                "decoded_token": self._token_of(token_id).data.decode(errors="replace"),
            }
            for token_id, logprob in shown.items()
        }


def _num_characters(token_ids: Sequence[int], token_of: Callable[[int], Token]) -> int:
    """Return the number of a prompt's characters. A character that the output completes belongs to the output."""
    tokens = [token for token in map(token_of, token_ids) if not token.is_special and token.data]
    data = b"".join(token.data_after(has_text=index > 0) for index, token in enumerate(tokens))
    return len(IncrementalDecoder("replace").decode(data))
