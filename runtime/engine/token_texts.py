"""`TokenTexts`: conversion of texts to the token ids of one model, and back."""

from __future__ import annotations

from ..common.fair_executor import FairExecutor
from .text import Token
from .text_processor import TextProcessor
from .validator import Validator

MAX_KNOWN_TOKENS = 1 << 14  # an answer with 20 logprobs shows 21 entries per token


class TokenTexts:
    """The texts of one model's tokens. Tenants take turns in the threads of `executor`."""

    def __init__(self, text_processor: TextProcessor, validator: Validator, executor: FairExecutor) -> None:
        self._text_processor = text_processor
        self._validator = validator
        self._executor = executor
        self._tokens: dict[int, Token] = {}  # entries of the vocabulary that answers have shown

    async def tokenize(self, text: str, add_special_tokens: bool, tenant: str) -> tuple[int, ...]:
        """Return the token ids of a text. Raises InvalidRequest or ContextLengthExceeded."""
        self._validator.check_text(text)
        return await self._executor.submit(tenant, self._text_processor.encode, text, add_special_tokens)

    async def detokenize(self, token_ids: tuple[int, ...], skip_special_tokens: bool, tenant: str) -> str:
        """Return the text of token ids. Raises InvalidRequest."""
        self._validator.check_vocabulary(token_ids)
        return await self._executor.submit(tenant, self._text_processor.decode, token_ids, skip_special_tokens)

    def token(self, token_id: int) -> Token:
        """Return one entry of the vocabulary. Raises InvalidRequest."""
        if (token := self._tokens.get(token_id)) is None:
            self._validator.check_vocabulary((token_id,))
            token = self._text_processor.token(token_id)
            if len(self._tokens) < MAX_KNOWN_TOKENS:
                self._tokens[token_id] = token
        return token
