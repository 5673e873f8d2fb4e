"""The vocabulary in the metadata of a GGUF file: its kind, the text and the type of each token, the ids with a role.

The metadata are untrusted: every count, type and id is checked, and sizes are limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from ...common.errors import CorruptCheckpoint, UnsupportedModel

VOCABULARIES = ("gpt2", "llama", "gemma4", "bert", "t5")  # values of `tokenizer.ggml.model`
DEFAULT_IDS = {"llama": (1, 2, 0), "bert": (101, 102, 100), "t5": (None, 1, 2)}  # bos, eos and unknown
WORD_START = "▁"  # beginning of the pieces that begin a word
MAX_VOCABULARY = 1 << 20
MAX_TOKEN_CHARACTERS = 1 << 10
MAX_VOCABULARY_CHARACTERS = 1 << 23
_MAX_FLOAT = 3.5e38
_NO_ID = (-1, 0xFFFFFFFF)  # ids that converters write for a token that the model does not have

# Tokens that end a turn. A file declares one end token, its Hugging Face folder often several.
END_TEXTS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001
)


class TokenType(IntEnum):
    """The types of tokens, with llama.cpp's numbers."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class VocabularyValues:
    """Typed reads of a metadata mapping. Each raises CorruptCheckpoint, which names the key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def text(self, key: str, *default: Any) -> Any:
        value = self._get(key, *default)
        if not isinstance(value, str) and key in self._metadata:
            raise CorruptCheckpoint(f"{key} must be a text, not {shown(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool | np.bool_):
            raise CorruptCheckpoint(f"{key} must be true or false, not {shown(value)}")
        return bool(value)

    def token_id(self, name: str, count: int, default: int | None = None) -> int | None:
        """Return `tokenizer.ggml.<name>_token_id`; `default` where it is absent and the vocabulary has that id."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self._metadata:
            return default if default is not None and default < count else None
        value = self._metadata[key]
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise CorruptCheckpoint(f"{key} must be a token id, not {shown(value)}")
        if value in _NO_ID:
            return None
        if not 0 <= value < count:
            raise CorruptCheckpoint(f"{key} is {value}; the vocabulary has the ids 0 to {count - 1}")
        return int(value)

    def texts(self, key: str, limit: int) -> Sequence[str]:
        """Return a list of at most `limit` texts. Raises CorruptCheckpoint."""
        values = self._array(key, limit)
        if not set(map(type, values)) <= {str}:
            raise CorruptCheckpoint(f"{key} must hold texts in UTF-8 only")
        return values

    def integers(self, key: str, count: int) -> list[int] | None:
        """Return `count` integers, None if the key is absent."""
        return self._numbers(key, count, {int})

    def floats(self, key: str, count: int) -> list[float] | None:
        """Return `count` finite numbers, None if the key is absent."""
        values = self._numbers(key, count, {int, float})
        if values is None or all(-_MAX_FLOAT <= value <= _MAX_FLOAT for value in values):
            return values
        raise CorruptCheckpoint(f"{key} must hold finite numbers only")

    def octets(self, key: str, limit: int) -> bytes:
        """Return at most `limit` bytes, signed or not; none if the key is absent. Raises CorruptCheckpoint."""
        values = self._array(key, limit) if key in self._metadata else ()
        if not set(map(type, values)) <= {int} or not all(-128 <= value < 256 for value in values):
            raise CorruptCheckpoint(f"{key} must hold bytes only")
        return bytes(value & 255 for value in values)

    def _numbers(self, key: str, count: int, types: set[type]) -> list[Any] | None:
        if key not in self._metadata:
            return None
        values = self._array(key, MAX_VOCABULARY)
        if len(values) != count:
            raise CorruptCheckpoint(f"{key} has {len(values)} values for {count} tokens")
        if not set(map(type, values)) <= types:
            raise CorruptCheckpoint(f"{key} must hold numbers only")
        return list(values)

    def _array(self, key: str, limit: int) -> Sequence[Any]:
        value = self._get(key)
        if isinstance(value, np.ndarray) and value.ndim == 1:
            value = value.tolist() if len(value) <= limit else value
        elif not isinstance(value, list | tuple):
            raise CorruptCheckpoint(f"{key} must be a list, not {shown(value)}")
        if len(value) > limit:
            raise CorruptCheckpoint(f"{key} has {len(value)} entries; at most {limit} are supported")
        found: Sequence[Any] = value
        return found

    def _get(self, key: str, *default: Any) -> Any:
        if key not in self._metadata and not default:
            raise CorruptCheckpoint(f"the file has no {key}, which a tokenizer needs")
        return self._metadata.get(key, *default)


def shown(value: Any) -> str:
    """Return a value as an error message quotes it: a text or number cut to 60 characters, else its type."""
    if isinstance(value, str):
        return repr(value[:60])
    return f"{value!r:.60}" if isinstance(value, int | float | np.generic) else f"a {type(value).__name__}"


@dataclass(frozen=True)
class FileVocabulary:
    """The vocabulary: the text and type of each id, and the ids with a role."""

    texts: Sequence[str]
    types: Sequence[int]
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    ends: frozenset[int]  # declared ids of eos, eot and eom
    trim_after: bool  # a special token absorbs the space after it, as in Phi-3

    def vocabulary(self, *, with_unused: bool) -> dict[str, int]:
        """Return the id of each text. Raises CorruptCheckpoint for a text with two ids."""
        vocabulary = {text: token_id for token_id, text in enumerate(self.texts)}
        is_whole = "" not in vocabulary and (with_unused or int(TokenType.UNUSED) not in self.types)
        if is_whole and len(vocabulary) == len(self.texts):
            return vocabulary
        vocabulary = {}
        for token_id, (text, token_type) in enumerate(zip(self.texts, self.types, strict=True)):
            if (
                text
                and (with_unused or token_type != TokenType.UNUSED)
                and vocabulary.setdefault(text, token_id) != token_id
            ):
                raise CorruptCheckpoint(f"tokens {vocabulary[text]} and {token_id} are both {text!r:.60}")
        return vocabulary


def read_kind(values: VocabularyValues) -> str:
    """Return the kind of the vocabulary. Raises UnsupportedModel."""
    kind: str = values.text("tokenizer.ggml.model")
    if kind not in VOCABULARIES:
        raise UnsupportedModel(f"tokenizer.ggml.model is {shown(kind)}; Quire reads {', '.join(VOCABULARIES)}")
    return kind


def read_vocabulary(values: VocabularyValues, kind: str) -> FileVocabulary:
    """Return a vocabulary of a kind. Raises CorruptCheckpoint."""
    texts = values.texts("tokenizer.ggml.tokens", MAX_VOCABULARY)
    if not texts:
        raise CorruptCheckpoint("tokenizer.ggml.tokens is empty")
    if max(map(len, texts)) > MAX_TOKEN_CHARACTERS or sum(map(len, texts)) > MAX_VOCABULARY_CHARACTERS:
        raise CorruptCheckpoint(
            f"tokenizer.ggml.tokens: a token has at most {MAX_TOKEN_CHARACTERS} characters, "
            f"all together at most {MAX_VOCABULARY_CHARACTERS}"
        )
    count = len(texts)
    names = ("cls", "seperator", "unknown") if kind == "bert" else ("bos", "eos", "unknown")  # llama.cpp's spelling
    defaults = DEFAULT_IDS.get(kind, (None,) * 3)
    if kind == "bert":
        defaults = (values.token_id("bos", count, defaults[0]), *defaults[1:])
    bos, eos, unknown = (values.token_id(name, count, default) for name, default in zip(names, defaults, strict=True))
    declared = eos, values.token_id("eot", count), values.token_id("eom", count)
    ends = frozenset(token_id for token_id in declared if token_id is not None)
    types = values.integers("tokenizer.ggml.token_type", count)
    if types is None:
        types = _guess_types(texts, {bos, unknown} | ends)
    elif not set(types) <= set(TokenType):
        raise CorruptCheckpoint(f"tokenizer.ggml.token_type must hold the types 0 to {max(TokenType)}")
    name = str(values.text("general.name", "")).lower()
    trim_after = kind == "llama" and ("phi-3" in name or "phi3" in name)
    padding = values.token_id("padding", count)
    if kind == "bert":
        texts = [_word_piece(text, token_type) for text, token_type in zip(texts, types, strict=True)]
    return FileVocabulary(texts, types, bos, eos, unknown, padding, ends, trim_after)


def _word_piece(text: str, token_type: int) -> str:
    """Return a piece in BERT's form. llama.cpp marks the pieces that begin a word, BERT the others."""
    if token_type == TokenType.CONTROL:
        return text
    return text.removeprefix(WORD_START) if text.startswith(WORD_START) else f"##{text}"


def _guess_types(texts: Sequence[str], declared: Iterable[int | None]) -> list[int]:
    """Return the types for an old file without types: the declared special tokens, and the tokens that end a turn."""
    types = [int(TokenType.CONTROL if text in END_TEXTS else TokenType.NORMAL) for text in texts]
    for token_id in declared:
        if token_id is not None:
            types[token_id] = int(TokenType.CONTROL)
    return types
