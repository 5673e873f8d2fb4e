"""Texts and pairs of texts in an encoder's form: prompts, special tokens, token types, templates of rerankers."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, normalizers, pre_tokenizers

from ....scheduler import EncodedText
from ...common.errors import InvalidRequest, UnsupportedModel
from ...model.config_json import ConfigTable
from ...model.encoder import BertSpec, EncoderSpec
from ...model.files import is_gguf
from ..text.chat import ChatTemplate
from ..text.text_files import read_json
from ..text.tokenizer import Tokenizer

QWEN3_MARK = "<|im_start|>"
QWEN3_PAIR = (  # format that Qwen3-Reranker was trained with
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
PROBES = (("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot"))  # pairs that a template must tell apart
PARTS_MARKS = ("content[0]", ".type", "'type'", '"type"', "message.content[")  # marks of templates for lists of parts
TOKENIZER_CONFIG = "tokenizer_config.json"
FAMILY_TOKENIZERS = {  # tokenizer classes for models without one in tokenizer_config.json
    "bert": "BertTokenizer", "distilbert": "BertTokenizer", "mpnet": "MPNetTokenizer", "nomic_bert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
}  # fmt: skip
BERT_TOKENIZERS = ("BertTokenizer", "DistilBertTokenizer", "MPNetTokenizer")
UNTYPED_TOKENIZERS = ("PreTrainedTokenizer", "TokenizersBackend")  # no types unless model_input_names has them


class EncoderText:
    """The texts of one encoder. Any number of threads may use one instance.

    Raises ModelNotFound, CorruptCheckpoint or UnsupportedModel if the tokenizer or the template cannot be read.
    """

    def __init__(self, path: str | Path, spec: EncoderSpec) -> None:
        settings = {} if is_gguf(path) else read_json(Path(path) / TOKENIZER_CONFIG)
        config = ConfigTable(settings, source=TOKENIZER_CONFIG)
        self.tokenizer = Tokenizer(path) if is_gguf(path) else Tokenizer(path, lambda fast: _adapt(fast, config, spec))
        self._spec = spec
        self._has_types = isinstance(spec.body, BertSpec) and spec.body.num_types > 1 and _takes_types(config, spec)
        self._scores = spec.num_labels > 0
        self._prompt = spec.prompts[spec.default_prompt] if self._scores and spec.default_prompt is not None else ""
        self._template = None if spec.messages is None else _load_template(Path(path))
        self._fault = "" if self._template is None else self._pair_fault()
        is_qwen3 = spec.family == "qwen3" and self._scores and QWEN3_MARK in self.tokenizer.special_tokens
        self._is_qwen3 = is_qwen3 and (bool(self._fault) or (self._template is None and spec.messages is not None))
        self._check()

    def encode(self, text: str, prompt: str = "") -> EncodedText:
        """Return a text after a prompt, with the tokenizer's special tokens. Raises InvalidRequest."""
        return self._pooled(self._typed(*self.tokenizer.encode_typed(prompt + text)))

    def encode_pair(self, query: str, document: str) -> EncodedText:
        """Return a query and a document as one text: by the model's template, or joined by the tokenizer.

        The model's default prompt is a system message, or the beginning of the query. Raises InvalidRequest if the
        template refuses them.
        """
        if self._is_qwen3:
            text = QWEN3_PAIR.format(query=query, document=document)
        elif self._template is not None:
            if self._fault:
                raise InvalidRequest(f"this model scores no pairs of texts: {self._fault}")
            text = self._rendered(query, document)
        else:
            return self._pooled(self._typed(*self.tokenizer.encode_typed(self._prompt + query, document)))
        return self._pooled(EncodedText(tuple(self.tokenizer.encode(text, add_special_tokens=False))))

    def truncated(self, text: EncodedText, max_tokens: int) -> EncodedText:
        """Return a text's first tokens and its closing special tokens or template, at most `max_tokens` in total."""
        if len(text.token_ids) <= max_tokens:
            return text
        endings = (len(each) for each in self._endings if text.token_ids[len(text.token_ids) - len(each) :] == each)
        closing = min(max(endings, default=0), max_tokens)

        def cut(values: tuple[int, ...]) -> tuple[int, ...]:
            return values[: max_tokens - closing] + values[len(values) - closing :]

        return self._pooled(EncodedText(cut(text.token_ids), None if text.type_ids is None else cut(text.type_ids)))

    @cached_property
    def _endings(self) -> tuple[tuple[int, ...], ...]:
        """The tokens that end every text of this model, and every pair."""
        texts = [[self.encode(document).token_ids for document in ("a", "b")]]
        if self._scores and (self._is_qwen3 or not self._fault):
            texts.append([self.encode_pair("a", document).token_ids for document in ("a", "b")])
        return tuple(_common_ending(*each) for each in texts)

    def _check(self) -> None:
        """Refuse a model for which sentence-transformers makes other texts than this class."""
        if self._template is not None and not self._scores:
            raise UnsupportedModel(
                "without modules.json, sentence-transformers makes a chat of each text where there is a chat template; "
                "it must be absent"
            )
        if self._fault and self._spec.answer is not None and not self._is_qwen3:
            raise UnsupportedModel(f"a model that answers must have a chat template for pairs: {self._fault}")
        if self._is_qwen3 and self._prompt:
            raise UnsupportedModel("default_prompt_name must be null where the chat template has no place for pairs")

    def _pair_fault(self) -> str:
        """Return the reason why the template cannot make a text of a pair; an empty text if it can."""
        try:
            base, *others = (self._rendered(*pair) for pair in PROBES)
        except InvalidRequest as error:
            return str(error)
        dropped = [name for name, text in zip(("query", "document"), others, strict=True) if text == base]
        return f"the chat template has no place for the {dropped[0]}" if dropped else ""

    def _rendered(self, query: str, document: str) -> str:
        assert self._template is not None, "the caller has checked"
        has_parts = self._spec.messages == "structured"
        if self._spec.messages == "auto":
            has_parts = any(mark in self._template.source for mark in PARTS_MARKS)
        contents = {"system": self._prompt, "query": query, "document": document}
        if not self._prompt:
            del contents["system"]
        messages = [
            {"role": role, "content": [{"type": "text", "text": content}] if has_parts else content}
            for role, content in contents.items()
        ]
        return self._template.render_unchanged(messages, self._spec.template_variables)

    def _typed(self, token_ids: list[int], type_ids: list[int]) -> EncodedText:
        has_types = self._has_types and any(type_ids)
        return EncodedText(tuple(token_ids), tuple(type_ids) if has_types else None)

    def _pooled(self, text: EncodedText) -> EncodedText:
        """Return a text without padding tokens after the token that transformers pools. Raises InvalidRequest.

        Rows of a causal model do not depend on the tokens after them.
        """
        body = self._spec.body
        ids = text.token_ids
        if isinstance(body, BertSpec):
            if body.first_position and body.first_position - 1 in ids:
                self._refuse_padding(body.first_position - 1, "it has no position of its own")
            return text
        if (padding := self._spec.pad_token_id) is None or ids[-1:] != (padding,):
            return text
        if not self._spec.causal:
            self._refuse_padding(padding, "it would not be pooled")
        count = len(ids)
        while count > 1 and ids[count - 1] == padding:
            count -= 1
        return EncodedText(ids[:count])

    def _refuse_padding(self, token_id: int, reason: str) -> None:
        name = next((name for name, each in self.tokenizer.special_tokens.items() if each == token_id), token_id)
        raise InvalidRequest(f"a text must not have the padding token {name!r} in this place: {reason}")


def _common_ending(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    count = 0
    while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return first[len(first) - count :]


def _load_template(path: Path) -> ChatTemplate | None:
    try:
        return ChatTemplate.load(path)
    except UnsupportedModel:
        return None


def _tokenizer_class(config: ConfigTable, spec: EncoderSpec) -> str:
    """Return the class of transformers' tokenizer, without `Fast`."""
    if spec.family == "modernbert":  # transformers ignores the class in its folders
        return UNTYPED_TOKENIZERS[-1]
    name = config.values.get("tokenizer_class")
    return (name if isinstance(name, str) else FAMILY_TOKENIZERS.get(spec.family, "")).removesuffix("Fast")


def _takes_types(config: ConfigTable, spec: EncoderSpec) -> bool:
    """Return whether the tokenizer gives token types to the model; otherwise all are 0."""
    names = config.values.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return _tokenizer_class(config, spec) not in UNTYPED_TOKENIZERS


def _adapt(fast: FastTokenizer, config: ConfigTable, spec: EncoderSpec) -> None:
    """Change a tokenizer as transformers' tokenizer classes and sentence-transformers do.

    For some settings, the classes use tokenizer_config.json or their defaults and ignore tokenizer.json.
    """
    name = _tokenizer_class(config, spec)
    if name in BERT_TOKENIZERS and isinstance(fast.model, models.WordPiece):
        fast.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=config.flag("tokenize_chinese_chars", True),
            strip_accents=config.flag("strip_accents", False) if "strip_accents" in config else None,
            lowercase=config.flag("do_lower_case", True),
        )
        fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif name == "RobertaTokenizer" and isinstance(fast.model, models.BPE):
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.flag("add_prefix_space", False))
    if spec.lower_case:
        parts: list[Any] = [] if fast.normalizer is None else [fast.normalizer]
        if isinstance(sequence := fast.normalizer, normalizers.Sequence):
            parts = [sequence[index] for index in range(len(sequence))]
        if not any(isinstance(part, normalizers.Lowercase) for part in parts):
            fast.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])
