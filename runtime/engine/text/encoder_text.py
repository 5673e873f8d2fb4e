"""Texts and pairs of texts as an encoder takes them: prompts, special tokens, token types, templates of rerankers."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from ....scheduler import EncodedText
from ...common.errors import InvalidRequest, UnsupportedModel
from ...model.encoder import BertSpec, EncoderSpec
from .chat import ChatTemplate
from .tokenizer import Tokenizer

QWEN3_MARK = "<|im_start|>"
QWEN3_PAIR = (  # what Qwen3-Reranker was trained with
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n"
    "<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)
PROBES = ("quire query", "quire document")  # found in what a template makes of them, if it has a place for both


class EncoderText:
    """The texts of one encoder. Any number of threads may use one instance.

    Raises ModelNotFound, CorruptCheckpoint or UnsupportedModel if the tokenizer or the template cannot be read.
    """

    def __init__(self, path: str | Path, spec: EncoderSpec) -> None:
        self.tokenizer = Tokenizer(path)
        self._lower_case = spec.lower_case
        self._has_types = isinstance(spec.body, BertSpec) and spec.body.num_types > 1
        self._scores = spec.num_labels > 0
        self._template = None if isinstance(spec.body, BertSpec) else _pair_template(Path(path))
        marks = self.tokenizer.special_tokens
        self._is_qwen3 = self._template is None and spec.family == "qwen3" and self._scores and QWEN3_MARK in marks

    def encode(self, text: str, prompt: str = "") -> EncodedText:
        """Return a text after a prompt, with the tokenizer's special tokens."""
        return self._typed(*self.tokenizer.encode_typed(self._cased(prompt + text)))

    def encode_pair(self, query: str, document: str) -> EncodedText:
        """Return a query and a document as one text: by the model's template, or joined by the tokenizer.

        Raises InvalidRequest if the template refuses them.
        """
        query, document = self._cased(query), self._cased(document)
        if self._template is not None:
            text = _rendered(self._template, query, document)
        elif self._is_qwen3:
            text = QWEN3_PAIR.format(query=query, document=document)
        else:
            return self._typed(*self.tokenizer.encode_typed(query, document))
        return EncodedText(tuple(self.tokenizer.encode(text, add_special_tokens=False)))

    def truncated(self, text: EncodedText, max_tokens: int) -> EncodedText:
        """Return a text's first tokens and its closing special tokens, or template: at most `max_tokens` in all."""
        if len(text.token_ids) <= max_tokens:
            return text
        closing = min(self._closing, max_tokens)

        def cut(values: tuple[int, ...]) -> tuple[int, ...]:
            return values[: max_tokens - closing] + values[len(values) - closing :]

        return EncodedText(cut(text.token_ids), None if text.type_ids is None else cut(text.type_ids))

    @cached_property
    def _closing(self) -> int:
        """The number of tokens that end every text of this model."""
        if self._scores:
            texts = [self.encode_pair("a", document).token_ids for document in ("a", "b")]
        else:
            texts = [self.encode(document).token_ids for document in ("a", "b")]
        count = 0
        while count < min(map(len, texts)) and texts[0][-1 - count] == texts[1][-1 - count]:
            count += 1
        return count

    def _cased(self, text: str) -> str:
        return text.lower() if self._lower_case else text

    def _typed(self, token_ids: list[int], type_ids: list[int]) -> EncodedText:
        has_types = self._has_types and any(type_ids)
        return EncodedText(tuple(token_ids), tuple(type_ids) if has_types else None)


def _pair_template(path: Path) -> ChatTemplate | None:
    """Return the model's chat template if it has places for a query and a document."""
    try:
        template = ChatTemplate.load(path)
        text = _rendered(template, *PROBES)
    except (UnsupportedModel, InvalidRequest):
        return None
    return template if all(probe in text for probe in PROBES) else None


def _rendered(template: ChatTemplate, query: str, document: str) -> str:
    return template.render([{"role": "query", "content": query}, {"role": "document", "content": document}])
