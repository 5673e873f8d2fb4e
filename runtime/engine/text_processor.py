"""The engine's words: a user's text or messages to token ids, and the way back.

It must not know requests or cores. One invariant: whatever the libraries below raise leaves here as a typed error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.errors import GenerationFailed, InvalidRequest, QuireError, UnsupportedModel
from ..common.types import SamplingParams
from .text import ChatTemplate, IncrementalDetokenizer, Tokenizer


class TextProcessor:
    """Of one model folder. A model without tokenizer.json takes and gives token ids only."""

    def __init__(self, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template

    @classmethod
    def load(cls, folder: Path) -> TextProcessor:
        """Raises CorruptCheckpoint for files that are there and cannot be read."""
        tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
        try:
            template = ChatTemplate.load(folder)
        except UnsupportedModel:
            template = None
        return cls(tokenizer, template)

    @property
    def longest_token(self) -> int:
        """Characters; 0 without a tokenizer."""
        return self.tokenizer.longest_token if self.tokenizer else 0

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.tokenizer.eos_token_ids if self.tokenizer else frozenset()

    def require_tokenizer(self) -> Tokenizer:
        """Raises InvalidRequest when there is none."""
        if self.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer.json; give the prompt as token ids")
        return self.tokenizer

    def require_chat_template(self) -> ChatTemplate:
        """Raises InvalidRequest when there is none."""
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template; send a prompt instead of messages")
        return self.chat_template

    async def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """In a thread: a long text takes its time. Raises InvalidRequest without a tokenizer."""
        tokenizer = self.require_tokenizer()
        try:
            return tuple(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens))
        except QuireError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise GenerationFailed(f"the prompt could not be tokenized: {error}") from error

    async def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A chat as prompt text, its special tokens written out. Raises InvalidRequest."""
        return await asyncio.to_thread(self.require_chat_template().render, messages)

    def detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer | None:
        """A new one for one sequence; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return IncrementalDetokenizer(self.tokenizer, params.stop, params.include_stop_str_in_output, params.min_tokens)
