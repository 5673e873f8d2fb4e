"""Text of one model: prompts and chats to token ids, and token ids back to text.

Whatever the libraries below raise leaves this module as a `QuireError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.errors import GenerationFailed, UnsupportedModel
from ..common.types import SamplingParams
from .text import ChatTemplate, IncrementalDetokenizer, Tokenizer, has_tokenizer


class TextProcessor:
    """The tokenizer and chat template of one model.

    A model without a tokenizer takes and returns token ids only. Any thread may call its methods.
    """

    def __init__(self, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template

    @classmethod
    def load(cls, path: Path) -> TextProcessor:
        """Read what a model's folder or GGUF file has. Raises CorruptCheckpoint or UnsupportedModel."""
        tokenizer = Tokenizer(path) if has_tokenizer(path) else None
        try:
            template = ChatTemplate.load(path)
        except UnsupportedModel:
            template = None
        return cls(tokenizer, template)

    @property
    def longest_token(self) -> int:
        """Characters of the longest token; 0 without a tokenizer."""
        return self.tokenizer.longest_token if self.tokenizer else 0

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation; empty without a tokenizer."""
        return self.tokenizer.eos_token_ids if self.tokenizer else frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of `text`. Raises GenerationFailed if the tokenizer fails."""
        assert self.tokenizer is not None, "Validator.check_text refuses text for a model without tokenizer"
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:  # the library raises bare Exception
            raise GenerationFailed(f"the prompt could not be tokenized: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a chat as prompt text that includes its special tokens. Raises InvalidRequest."""
        assert self.chat_template is not None, "Validator.check_prompt refuses chats for a model without template"
        return self.chat_template.render(messages)

    def detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer | None:
        """Return a new detokenizer for one sequence; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return IncrementalDetokenizer(self.tokenizer, params.stop, params.include_stop_str_in_output, params.min_tokens)
