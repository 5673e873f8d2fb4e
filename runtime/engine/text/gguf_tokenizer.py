"""The tokenizer that the metadata of a GGUF file describes, rebuilt as a `tokenizers` object.

The metadata are untrusted: every count, type and id is checked, and sizes are limited, before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from ...common.errors import CorruptCheckpoint, UnsupportedModel
from ...model.files import is_gguf
from ...model.weights.gguf import open_gguf
from .merges import merges_by_score
from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

VOCABULARIES = ("gpt2", "llama", "gemma4")  # values of `tokenizer.ggml.model`
MAX_VOCABULARY = 1 << 20
MAX_MERGES = 1 << 21
MAX_TOKEN_CHARACTERS = 1 << 10
MAX_VOCABULARY_CHARACTERS = 1 << 23
MAX_MERGE_CHARACTERS = 1 << 25  # characters of the merges found in a vocabulary with scores
MAX_SPECIAL_CHARACTERS = 1 << 22  # characters of all special and user-defined tokens
_MAX_FLOAT = 3.5e38
_NO_ID = (-1, 0xFFFFFFFF)  # ids that converters write for a token that the model does not have

# Tokens that end a turn. A file declares one end token, its Hugging Face folder often several.
_END_TEXTS = (
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
_KEPT_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # special tokens of Phi-3 after which a space is kept


class _TokenType(IntEnum):
    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL = (int(_TokenType.CONTROL), int(_TokenType.UNKNOWN))


def file_vocabulary(path: Path) -> Mapping[str, Any] | None:
    """Return the metadata of a GGUF file that has a vocabulary; None for a folder, and for a file without one.

    Raises CorruptCheckpoint or UnsupportedModel for a file that cannot be read.
    """
    if not is_gguf(path):
        return None
    metadata = open_gguf(path).metadata
    return metadata if metadata.get("tokenizer.ggml.model") not in (None, "none", "no_vocab") else None


def read_tokenizer(metadata: Mapping[str, Any]) -> tuple[FastTokenizer, frozenset[int]]:
    """Build the tokenizer of `metadata`; return it and the ids that end a generation.

    Values are ints, floats, bools, texts, and lists or arrays of them. Raises UnsupportedModel for an unknown kind of
    vocabulary or pre-tokenizer, CorruptCheckpoint if a value is missing, has another type, is out of range or
    contradicts another one.
    """
    values = _Values(metadata)
    kind = _read_kind(values)
    tokens = _read_tokens(values, kind)
    try:
        fast = _sentencepiece(values, tokens) if kind == "llama" else _byte_pairs(values, tokens, kind)
        _add_special_tokens(fast, tokens)
        _add_template(fast, values, tokens, kind)
    except (CorruptCheckpoint, UnsupportedModel):
        raise
    except Exception as error:  # the library raises bare Exception
        raise CorruptCheckpoint(f"the file's vocabulary is not a tokenizer: {error!s:.300}") from error
    return fast, _end_ids(tokens)


def read_chat_templates(metadata: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the sources of the default chat template and of the template for tools, None where the file has none.

    Raises as `read_tokenizer`.
    """
    values = _Values(metadata)
    source, tool_source = (values.text(f"tokenizer.chat_template{name}", None) for name in ("", ".tool_use"))
    return source, tool_source


def read_special_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates may use: bos_token, eos_token, unk_token and pad_token, if they exist.

    Raises as `read_tokenizer`.
    """
    values = _Values(metadata)
    tokens = _read_tokens(values, _read_kind(values))
    names = {"bos_token": tokens.bos, "eos_token": tokens.eos, "unk_token": tokens.unknown, "pad_token": tokens.padding}
    return {name: tokens.texts[token_id] for name, token_id in names.items() if token_id is not None}


class _Values:
    """Typed reads of a metadata mapping. Each raises CorruptCheckpoint, which names the key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def text(self, key: str, *default: Any) -> Any:
        value = self._get(key, *default)
        if not isinstance(value, str) and key in self._metadata:
            raise CorruptCheckpoint(f"{key} must be a text, not {_shown(value)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool | np.bool_):
            raise CorruptCheckpoint(f"{key} must be true or false, not {_shown(value)}")
        return bool(value)

    def token_id(self, name: str, count: int, default: int | None = None) -> int | None:
        """Return `tokenizer.ggml.<name>_token_id`; `default` where it is absent and the vocabulary has that id."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self._metadata:
            return default if default is not None and default < count else None
        value = self._metadata[key]
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise CorruptCheckpoint(f"{key} must be a token id, not {_shown(value)}")
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
            raise CorruptCheckpoint(f"{key} must be a list, not {_shown(value)}")
        if len(value) > limit:
            raise CorruptCheckpoint(f"{key} has {len(value)} entries; at most {limit} are supported")
        found: Sequence[Any] = value
        return found

    def _get(self, key: str, *default: Any) -> Any:
        if key not in self._metadata and not default:
            raise CorruptCheckpoint(f"the file has no {key}, which a tokenizer needs")
        return self._metadata.get(key, *default)


def _shown(value: Any) -> str:
    """Return a value as an error message quotes it: a text or number cut to 60 characters, else its type."""
    if isinstance(value, str):
        return repr(value[:60])
    return f"{value!r:.60}" if isinstance(value, int | float | np.generic) else f"a {type(value).__name__}"


@dataclass(frozen=True)
class _Tokens:
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
        is_whole = "" not in vocabulary and (with_unused or int(_TokenType.UNUSED) not in self.types)
        if is_whole and len(vocabulary) == len(self.texts):
            return vocabulary
        vocabulary = {}
        for token_id, (text, token_type) in enumerate(zip(self.texts, self.types, strict=True)):
            if (
                text
                and (with_unused or token_type != _TokenType.UNUSED)
                and vocabulary.setdefault(text, token_id) != token_id
            ):
                raise CorruptCheckpoint(f"tokens {vocabulary[text]} and {token_id} are both {text!r:.60}")
        return vocabulary


def _read_kind(values: _Values) -> str:
    kind: str = values.text("tokenizer.ggml.model")
    if kind not in VOCABULARIES:
        raise UnsupportedModel(f"tokenizer.ggml.model is {_shown(kind)}; Quire reads {', '.join(VOCABULARIES)}")
    return kind


def _read_tokens(values: _Values, kind: str) -> _Tokens:
    texts = values.texts("tokenizer.ggml.tokens", MAX_VOCABULARY)
    if not texts:
        raise CorruptCheckpoint("tokenizer.ggml.tokens is empty")
    if max(map(len, texts)) > MAX_TOKEN_CHARACTERS or sum(map(len, texts)) > MAX_VOCABULARY_CHARACTERS:
        raise CorruptCheckpoint(
            f"tokenizer.ggml.tokens: a token has at most {MAX_TOKEN_CHARACTERS} characters, "
            f"all together at most {MAX_VOCABULARY_CHARACTERS}"
        )
    count = len(texts)
    bos, eos, unknown = (
        values.token_id(name, count, default if kind == "llama" else None)
        for name, default in (("bos", 1), ("eos", 2), ("unknown", 0))
    )
    declared = eos, values.token_id("eot", count), values.token_id("eom", count)
    ends = frozenset(token_id for token_id in declared if token_id is not None)
    types = values.integers("tokenizer.ggml.token_type", count)
    if types is None:
        types = _guess_types(texts, {bos, unknown} | ends)
    elif not set(types) <= set(_TokenType):
        raise CorruptCheckpoint(f"tokenizer.ggml.token_type must hold the types 0 to {max(_TokenType)}")
    name = str(values.text("general.name", "")).lower()
    trim_after = kind == "llama" and ("phi-3" in name or "phi3" in name)
    padding = values.token_id("padding", count)
    return _Tokens(texts, types, bos, eos, unknown, padding, ends, trim_after)


def _guess_types(texts: Sequence[str], declared: Iterable[int | None]) -> list[int]:
    """Return the types for an old file without types: the declared special tokens, and the tokens that end a turn."""
    types = [int(_TokenType.CONTROL if text in _END_TEXTS else _TokenType.NORMAL) for text in texts]
    for token_id in declared:
        if token_id is not None:
            types[token_id] = int(_TokenType.CONTROL)
    return types


def _end_ids(tokens: _Tokens) -> frozenset[int]:
    """Return the declared end ids and the special tokens that are known to end a turn."""
    control = np.flatnonzero(np.array(tokens.types) == _TokenType.CONTROL).tolist()
    known = {tokens.texts[token_id]: token_id for token_id in control if tokens.texts[token_id] in _END_TEXTS}
    if "<|return|>" in known and "<|call|>" in known:  # <|end|> ends a message in this format, not the turn
        known.pop("<|end|>", None)
    return tokens.ends | frozenset(known.values())


def _byte_pairs(values: _Values, tokens: _Tokens, kind: str) -> FastTokenizer:
    """Build a byte pair encoder with the file's own merges."""
    pre = _pre_tokenizer(values, kind)
    merges = [_pair(merge) for merge in values.texts("tokenizer.ggml.merges", MAX_MERGES)]
    vocabulary = tokens.vocabulary(with_unused=False)
    if not pre.byte_level:
        return _spaces_as_underscores(vocabulary, merges, tokens, prefix=False)
    fast = FastTokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        fast.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    fast.decoder = decoders.ByteLevel()
    return fast


def _pre_tokenizer(values: _Values, kind: str) -> PreTokenizer:
    name = "gemma4" if kind == "gemma4" else values.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(f"tokenizer.ggml.pre is {_shown(name)}; Quire knows {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def _pair(merge: str) -> tuple[str, str]:
    """Split "left right" at the first space that is not the first character."""
    if len(merge) > 2 * MAX_TOKEN_CHARACTERS + 1:
        raise CorruptCheckpoint(f"tokenizer.ggml.merges has an entry of {len(merge)} characters")
    middle = merge.find(" ", 1)
    if middle < 0:
        raise CorruptCheckpoint(f"tokenizer.ggml.merges must hold pairs with a space between them, not {merge!r:.60}")
    return merge[:middle], merge[middle + 1 :]


def _sentencepiece(values: _Values, tokens: _Tokens) -> FastTokenizer:
    """Build the byte pair encoder that merges by the scores of a SentencePiece vocabulary."""
    scores = values.floats("tokenizer.ggml.scores", len(tokens.texts))
    if scores is None:
        raise CorruptCheckpoint("the file has no tokenizer.ggml.scores, which a SentencePiece vocabulary needs")
    vocabulary = tokens.vocabulary(with_unused=True)
    own_scores = [scores[token_id] for token_id in vocabulary.values()]
    limits = {"max_merges": MAX_MERGES, "max_characters": MAX_MERGE_CHARACTERS}
    merges = merges_by_score([*vocabulary], own_scores, **limits)
    if merges is None:
        raise CorruptCheckpoint(
            f"the vocabulary has more than {MAX_MERGES} pairs of tokens that make a token, or these have more than "
            f"{MAX_MERGE_CHARACTERS} characters"
        )
    prefix = values.flag("tokenizer.ggml.add_space_prefix", True)
    fast = _spaces_as_underscores(vocabulary, merges, tokens, prefix=prefix)
    if values.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        trimmed = [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        fast.normalizer = normalizers.Sequence([*trimmed, fast.normalizer])
    return fast


def _spaces_as_underscores(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], tokens: _Tokens, *, prefix: bool
) -> FastTokenizer:
    """Build an encoder of characters with ▁ for a space and <0xNN> for the bytes of an unknown character."""
    unknown = None if tokens.unknown is None else tokens.texts[tokens.unknown]
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not has_bytes and not unknown:
        raise CorruptCheckpoint("the vocabulary has neither the 256 byte tokens <0x00> to <0xFF> nor an unknown token")
    fast = FastTokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown or None, fuse_unk=True, byte_fallback=has_bytes)
    )
    escaped = normalizers.Replace(" ", "▁")
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escaped]) if prefix else escaped
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return fast


def _add_special_tokens(fast: FastTokenizer, tokens: _Tokens) -> None:
    """Add the tokens that are matched in a text before all others. They already have ids."""
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token_id in np.flatnonzero(np.isin(tokens.types, (*_SPECIAL, int(_TokenType.USER_DEFINED)))).tolist():
        text = tokens.texts[token_id]
        is_special = tokens.types[token_id] in _SPECIAL
        if text:
            rstrip = tokens.trim_after and text not in _KEPT_SPACE
            added = AddedToken(text, normalized=False, special=is_special, rstrip=rstrip)
            (special if is_special else plain).append(added)
    if sum(len(added.content) for added in special + plain) > MAX_SPECIAL_CHARACTERS:
        raise CorruptCheckpoint(f"the special tokens have more than {MAX_SPECIAL_CHARACTERS} characters together")
    fast.add_special_tokens(special)
    fast.add_tokens(plain)


def _add_template(fast: FastTokenizer, values: _Values, tokens: _Tokens, kind: str) -> None:
    """Make `fast` add the begin and end tokens that the file requests."""
    adds_by_default = kind == "llama" or _pre_tokenizer(values, kind).add_bos
    single: list[str] = ["$A"]
    named: list[dict[str, Any]] = []
    for name, token_id, default in (("bos", tokens.bos, adds_by_default), ("eos", tokens.eos, False)):
        key = f"tokenizer.ggml.add_{name}_token"
        if values.flag(key, default and token_id is not None):
            if token_id is None or not tokens.texts[token_id]:
                raise CorruptCheckpoint(f"{key} is true, but the file has no token {name}")
            single = ["bos", *single] if name == "bos" else [*single, "eos"]
            named.append({"id": name, "ids": [token_id], "tokens": [tokens.texts[token_id]]})
    if named:
        fast.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
