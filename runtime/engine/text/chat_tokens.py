"""A rendered chat as token ids: the markup of the template as special tokens, and the content as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache

from .chat import ChatTemplate
from .content_marks import ContentMarks, RenderedChat
from .tokenizer import Tokenizer

MAX_KEPT_NAMES = 256  # names whose ids are kept while a chat is encoded
ANCHORS = ("\n", " ", ".", "a")  # texts before an encoded text, so that the tokenizer puts no space before it


class ChatTokens:
    """The token ids of the chats of one tokenizer and one template. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @cached_property
    def marks(self) -> ContentMarks:
        """The marks of content in chats."""
        return ContentMarks(self._tokenizer.special_tokens, self._written, self._template.literals)

    @cached_property
    def _written(self) -> frozenset[str]:
        """Names of added tokens that the template writes, and that are not special."""
        others = self._tokenizer.added_tokens.keys() - self._tokenizer.special_tokens.keys()
        return frozenset(name for name in others if name.strip() and name in self._template.source)

    @cached_property
    def _markup_ids(self) -> frozenset[int]:
        written = (self._tokenizer.added_tokens[name] for name in self._written)
        return self._tokenizer.special_token_ids.union(written)

    def encode(self, chat: RenderedChat, encode: Callable[[str], Sequence[int]]) -> Sequence[int]:
        """Return the token ids of `chat`. The function `encode` returns the ids of a text with special tokens."""
        token_ids = encode(chat.text)
        is_normalized = self._tokenizer.has_normalized_markup  # text that resembles a special token may become one
        if chat.marked == chat.text and not is_normalized:
            return token_ids
        written = len(self.marks.names.findall(chat.marked))
        if is_normalized:
            found = sum(token_id in self._markup_ids for token_id in token_ids)
        else:
            found = len(self.marks.names.findall(chat.text))
        return token_ids if found == written else tuple(self._without_forged(chat))

    def _without_forged(self, chat: RenderedChat) -> Iterator[int]:
        """Yield the token ids; a special token that the template did not write is encoded as text."""
        written = {
            span
            for token_id, span in self._tokenizer.encode_with_spans(chat.marked)
            if token_id in self._markup_ids and self.marks.names.search(chat.marked, *span)
        }
        as_text = lru_cache(MAX_KEPT_NAMES)(self._as_text)  # a text may repeat a name many times
        for token_id, span in self._tokenizer.encode_with_spans(chat.text):
            if token_id in self._markup_ids and span not in written:
                yield from as_text(chat.text[slice(*span)])
            else:
                yield token_id

    def _as_text(self, name: str) -> list[int]:
        """Return the token ids of a special token's name as a text."""
        token_ids = self._tokenizer.encode_as_text(name)
        for anchor in ANCHORS:
            before = self._tokenizer.encode_as_text(anchor)
            both = self._tokenizer.encode_as_text(anchor + name)
            if both[: len(before)] == before:
                token_ids = both[len(before) :]
                break
        if len(name) > 1 and not self._markup_ids.isdisjoint(token_ids):  # the model's own vocabulary has the name
            return [token_id for character in name for token_id in self._as_text(character)]
        return token_ids
