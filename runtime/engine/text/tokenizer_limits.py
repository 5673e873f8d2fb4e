"""Limits of an untrusted tokenizer.json: the factor by which its parts may lengthen a text.

The limits are checked before the library reads the file, because the library normalizes the added tokens meanwhile. The
parser skips the vocabulary, which is most of the file.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...common.errors import CorruptCheckpoint

MAX_CHARACTER_GROWTH = 128  # characters that encoding or decoding may make of one; 72 for XLM-RoBERTa
MAX_TOKENIZER_PARTS = 64  # parts of each kind
MAX_SEQUENCE_DEPTH = 16  # depth of nested sequences
MAX_INSERTED = 1 << 10  # characters of a text that a part inserts
MAX_WORD_CHARACTERS = 1000  # length of a word that WordPiece divides: its time is quadratic
MARKED = 2.0  # characters of a piece of one character that gets the mark of a word
TOKENIZER_PARTS = ("normalizers", "pretokenizers", "decoders", "processors")
TEMPLATE_TOKENS = 1 << 10  # tokens that a template puts around a text


class _Model(msgspec.Struct):
    """The setting of a model that decides the cost of a word."""

    max_input_chars_per_word: Any = None


class _File(msgspec.Struct):
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    post_processor: Any = None
    model: _Model | None = None


def check_limits(path: Path, data: bytes) -> None:
    """Raise CorruptCheckpoint if the file is not JSON, or if its parts could lengthen a text too much."""
    try:
        file = msgspec.json.decode(data, type=_File)
        _check_growth([*_parts(file.normalizer), *_parts(file.pre_tokenizer)], "normalizer and pre_tokenizer make")
        _check_growth(_parts(file.decoder), "decoder makes")
        _check_template(file.post_processor)
        longest = None if file.model is None else file.model.max_input_chars_per_word
        if isinstance(longest, int) and longest > MAX_WORD_CHARACTERS:
            raise CorruptCheckpoint(
                f"max_input_chars_per_word is {longest}; at most {MAX_WORD_CHARACTERS} is supported"
            )
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"{path} is not a readable tokenizer: {error}") from error
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{path} is not supported: {error}") from None


def check_charsmap(data: bytes) -> None:
    """Raise CorruptCheckpoint if a map of SentencePiece, with marks of words, could lengthen a text too much."""
    if MARKED * _longest_of_charsmap(data) > MAX_CHARACTER_GROWTH:
        raise CorruptCheckpoint(f"its precompiled_charsmap makes more than {MAX_CHARACTER_GROWTH} characters of one")


def _parts(part: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the parts of nested sequences."""
    if depth > MAX_SEQUENCE_DEPTH:
        raise CorruptCheckpoint(f"it has sequences within more than {MAX_SEQUENCE_DEPTH} others")
    if not isinstance(part, dict):
        return
    inner = [each for name in TOKENIZER_PARTS if isinstance(part.get(name), list) for each in part[name]]
    if len(inner) > MAX_TOKENIZER_PARTS:
        raise CorruptCheckpoint(f"a sequence has {len(inner)} parts; at most {MAX_TOKENIZER_PARTS} are supported")
    if not inner:
        yield part
    for each in inner:
        yield from _parts(each, depth + 1)


def _check_growth(parts: Iterable[dict[str, Any]], what: str) -> None:
    growth = 1.0
    for part in parts:
        growth *= _growth(part)
        if growth > MAX_CHARACTER_GROWTH:
            raise CorruptCheckpoint(f"its {what} more than {MAX_CHARACTER_GROWTH} characters of one")


def _growth(part: dict[str, Any]) -> float:
    """Return the number of characters that a part may make of one.

    Unicode normalization counts as 1: repeating it changes nothing.
    """
    match part.get("type"):
        case "Replace":
            pattern = part.get("pattern")
            content = _inserted(part, "content")
            text = pattern.get("String") if isinstance(pattern, dict) else None
            if isinstance(text, str) and text:
                return max(1.0, len(content) / len(text))
            return 1.0 + len(content)  # an expression may match between all characters
        case "ByteLevel":
            return 2.0
        case "Prepend":
            return 1.0 + len(_inserted(part, "prepend")) / MAX_INSERTED
        case "Metaspace":
            return MARKED
        case "BPEDecoder":
            return 1.0 if _inserted(part, "suffix") else 2.0
        case "CTC":
            return 1.0 if _inserted(part, "word_delimiter_token") else 2.0
        case "Precompiled":
            return float(_longest_of_encoded(part.get("precompiled_charsmap")))
        case _:
            return 1.0


def _inserted(part: dict[str, Any], name: str) -> str:
    text = part.get(name)
    if isinstance(text, str) and len(text) > MAX_INSERTED:
        raise CorruptCheckpoint(f"{part.get('type')} has a {name} of {len(text)} characters; at most {MAX_INSERTED}")
    return text if isinstance(text, str) else ""


def _longest_of_encoded(encoded: Any) -> int:
    """Return the characters of the longest text in a map of SentencePiece, in base 64."""
    try:
        data = base64.b64decode(encoded) if isinstance(encoded, str) else b""
    except (binascii.Error, ValueError):
        return 1  # the library refuses it
    return _longest_of_charsmap(data)


def _longest_of_charsmap(data: bytes) -> int:
    """Return the characters of the longest text in a map of SentencePiece: a trie, then texts that end in NUL."""
    end = 4 + int.from_bytes(data[:4], "little")
    if end > len(data):  # the library allocates the declared size
        raise CorruptCheckpoint(f"its precompiled_charsmap declares {end} bytes and has {len(data)}")
    texts = data[end:]
    return max((len(text.decode(errors="replace")) for text in texts.split(b"\0")), default=1) or 1


def _check_template(post_processor: Any) -> None:
    for part in _parts(post_processor):
        ids = 0
        for name in ("single", "pair"):
            pieces = part.get(name)
            ids = max(ids, len(pieces) if isinstance(pieces, list) else 0)
        special = part.get("special_tokens")
        for token in special.values() if isinstance(special, dict) else ():
            found = token.get("ids") if isinstance(token, dict) else None
            ids += len(found) if isinstance(found, list) else 0
        if ids > TEMPLATE_TOKENS:
            raise CorruptCheckpoint(f"its template puts more than {TEMPLATE_TOKENS} tokens around a text")
