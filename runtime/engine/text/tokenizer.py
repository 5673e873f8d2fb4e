"""The tokenizer of a model: text to token ids and back, and the ids that end a generation.

After loading, only a cache of token bytes changes, so any number of threads may use one instance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as FastTokenizer

from ...common.errors import GenerationFailed
from .folder_tokenizer import read_folder
from .gguf_tokenizer import file_vocabulary, read_tokenizer
from .text_files import text_folder

SENTENCEPIECE_SPACE = "\u2581"


class Token(NamedTuple):
    """One entry of a vocabulary."""

    data: bytes  # bytes that the token adds to a text; a special token's name
    is_special: bool  # a special token adds nothing to a text
    first_data: bytes | None = None  # bytes at the start of a text, if they differ: mostly without a space

    def data_after(self, has_text: bool) -> bytes:
        """Return the bytes that the token adds to a text; a special token adds nothing."""
        if self.is_special:
            return b""
        return self.data if has_text or self.first_data is None else self.first_data


class Tokenizer:
    """The vocabulary of a GGUF file, or of `tokenizer.json` in a Hugging Face folder, and the declared end ids.

    A GGUF file without a vocabulary has the vocabulary of its folder. Raises ModelNotFound if the folder or file is
    missing, CorruptCheckpoint if it cannot be read, UnsupportedModel for a vocabulary of an unknown kind.
    `adapt` changes the library's tokenizer before its first use.
    """

    def __init__(self, path: str | Path, adapt: Callable[[FastTokenizer], None] = lambda fast: None) -> None:
        self.eos_token_ids: frozenset[int]
        self._fast, self.eos_token_ids = _load(Path(path))
        adapt(self._fast)
        self.special_token_ids: frozenset[int] = frozenset(
            token_id for token_id, token in self._fast.get_added_tokens_decoder().items() if token.special
        )
        self._added = {token_id: token.content for token_id, token in self._fast.get_added_tokens_decoder().items()}
        decoders = _decoders(self._fast)
        types = {part["type"] for part in decoders}
        self._byte_level = bool(types) and types <= {"ByteLevel", "Fuse"}
        self._byte_fallback = "ByteFallback" in types
        self._is_sentencepiece = bool(decoders) and all(map(_is_of_sentencepiece, decoders))
        self._bytes_by_id: dict[int, bytes | None] = {}

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens, by name."""
        return {self._fast.id_to_token(token_id) or "": token_id for token_id in sorted(self.special_token_ids)}

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that are matched in a text before it is divided, by name: special tokens and others."""
        return {name: token_id for token_id, name in self._added.items()}

    @cached_property
    def has_normalized_markup(self) -> bool:
        """Whether added tokens are matched in a text after its normalization, which may create them."""
        tokens = self._fast.get_added_tokens_decoder().values()
        return self._fast.normalizer is not None and any(token.normalized for token in tokens)

    @property
    def vocab_size(self) -> int:
        """Number of ids, with added tokens; a model's vocabulary may be padded beyond it."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest vocabulary entry: no text of n tokens is longer than n times this."""
        id_to_token = self._fast.id_to_token
        count = self.vocab_size
        texts = [text for text in map(id_to_token, range(count)) if text is not None]
        if len(texts) < count:  # the ids have gaps; all texts take half a second at once
            texts = [*self._fast.get_vocab(with_added_tokens=True)]
        return max(map(len, texts), default=1)

    def first_difference(self, other: Tokenizer) -> tuple[int, str, str] | None:
        """Return the lowest id whose texts in the two vocabularies differ, and both texts; None if there is none."""
        texts = {token_id: text for text, token_id in self._fast.get_vocab(with_added_tokens=True).items()}
        others = {token_id: text for text, token_id in other._fast.get_vocab(with_added_tokens=True).items()}
        different = [token_id for token_id in texts.keys() & others.keys() if texts[token_id] != others[token_id]]
        return min(((each, texts[each], others[each]) for each in different), default=None)

    @cached_property
    def bos_token_id(self) -> int | None:
        """The begin token that `encode` puts before every text, None if it puts none."""
        plain, special = self.encode("a", add_special_tokens=False), self.encode("a")
        return special[0] if special[:1] != plain[:1] else None

    def encode_special_as_text(self) -> None:
        """From now on, encode the names of special tokens in a text as ordinary text."""
        self._fast.encode_special_tokens = True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, the same as transformers returns.

        `encode_batch_fast` releases the GIL; the library's `encode` does not.
        """
        try:
            ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise library_failure("the text could not be tokenized", error) from None
        return ids

    def encode_with_spans(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Return the token ids of a text that contains special tokens, each with the positions of its characters."""
        (encoding,) = self._fast.encode_batch([text], add_special_tokens=False)
        return list(zip(encoding.ids, encoding.offsets, strict=True))

    def encode_as_text(self, text: str) -> list[int]:
        """Return the token ids of a text, without matching added tokens, special or not."""
        ids: list[int] = self._without_added_tokens.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    @cached_property
    def _without_added_tokens(self) -> FastTokenizer:
        """A tokenizer without added tokens that shares the vocabulary in memory."""
        plain = FastTokenizer(self._fast.model)
        if self._fast.normalizer is not None:
            plain.normalizer = self._fast.normalizer
        if self._fast.pre_tokenizer is not None:
            plain.pre_tokenizer = self._fast.pre_tokenizer
        return plain

    def encode_typed(self, text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
        """Return token ids and token types of a text, or of a pair of texts, with special tokens."""
        try:
            (encoding,) = self._fast.encode_batch_fast([text if pair is None else (text, pair)])
        except BaseException as error:
            raise library_failure("the text could not be tokenized", error) from None
        return encoding.ids, encoding.type_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. Unknown ids yield nothing, invalid UTF-8 U+FFFD.

        The library would decode letters of added tokens as GPT-2's names of bytes: "Bác" would get a byte E1.
        """
        if self._byte_level:
            skipped: Collection[int] = self.special_token_ids if skip_special_tokens else ()
            known = [self.token_bytes(token_id) or b"" for token_id in token_ids if token_id not in skipped]
            return b"".join(known).decode(errors="replace")
        try:
            text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise library_failure("the tokens could not be turned into text", error) from None
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the raw bytes of a token, or None if its text depends on its neighbors: then use `decode`.

        Byte-level tokens and `<0xNN>` fallback tokens are bytes; only they can hold part of a UTF-8 character.
        """
        try:
            return self._bytes_by_id[token_id]
        except KeyError:
            found = self._bytes_by_id[token_id] = self._find_bytes(token_id)
            return found

    def all_bytes(self, vocab_size: int) -> list[bytes]:
        """Return `text_bytes` of the tokens 0 to `vocab_size` - 1."""
        return [self.text_bytes(token_id) for token_id in range(vocab_size)]

    def adds_text(self, token_id: int) -> bool:
        """Return whether a token adds text; a special token adds none."""
        return self.token_bytes(token_id) != b"" and token_id not in self.special_token_ids

    def text_bytes(self, token_id: int) -> bytes:
        """Return the raw bytes of a token, or without raw bytes, the bytes of its text inside other text.

        An unknown id has no bytes.
        """
        raw = self.token_bytes(token_id)
        return self._bytes_within(token_id) if raw is None else raw

    def _bytes_within(self, token_id: int) -> bytes:
        token: str = self._fast.id_to_token(token_id) or ""
        if token_id in self.special_token_ids:
            return token.encode()
        if self._is_sentencepiece:
            return token.replace(SENTENCEPIECE_SPACE, " ").encode()
        return self.text_after(self._ordinary_token, token_id).encode()

    def text_after(self, previous: int | None, token_id: int) -> str:
        """Return the text of a token after another one, or at the beginning of a text if there is none."""
        if previous is None:
            return self.decode([token_id])
        before = self.decode([previous])
        return self.decode([previous, token_id])[len(before) :]

    @cached_property
    def _ordinary_token(self) -> int | None:
        """The first token that is a letter or a digit as a whole text; None if no token is."""
        others = (token_id for token_id in range(self.vocab_size) if token_id not in self._added)
        return next((token_id for token_id in others if self.decode([token_id]).isalnum()), None)

    def token(self, token_id: int) -> Token:
        """Return one entry; an unknown id has no bytes.

        If the text depends on its neighbors, it is the text inside other text.
        """
        data = self.text_bytes(token_id)
        if token_id in self.special_token_ids:
            return Token(data, True)
        is_independent = self.token_bytes(token_id) is not None and data != b" "
        return Token(data, False, None if is_independent else self.decode([token_id]).encode())

    def _find_bytes(self, token_id: int) -> bytes | None:
        token: str | None = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:  # an added token is plain text, unless it is one of the 256 bytes
            added = self._added.get(token_id)
            return added.encode() if added is not None and len(added) > 1 else _byte_level_bytes(token)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return _hex_byte(token[3:5])
        return None


def library_failure(what: str, error: BaseException) -> GenerationFailed:
    """Return the error to raise for an error or panic of the library.

    Raises the exceptions that end the process.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return GenerationFailed(f"{what}: {str(error).partition(chr(10))[0]:.200}")


def has_tokenizer(path: Path) -> bool:
    """Return whether a folder or GGUF file has a tokenizer. Raises CorruptCheckpoint or UnsupportedModel."""
    return file_vocabulary(path) is not None or (text_folder(path) / "tokenizer.json").is_file()


def _load(path: Path) -> tuple[FastTokenizer, frozenset[int]]:
    metadata = file_vocabulary(path)
    if metadata is not None:
        return read_tokenizer(metadata)
    return read_folder(text_folder(path))


def _decoders(fast: FastTokenizer) -> list[dict[str, Any]]:
    """Return the settings of the tokenizer's decoders, in order."""
    if fast.decoder is None:
        return []
    state = json.loads(fast.decoder.__getstate__())
    parts: list[dict[str, Any]] = state.get("decoders", [state])
    return parts


def _is_of_sentencepiece(decoder: Mapping[str, Any]) -> bool:
    """Return whether a decoder converts ▁ to spaces or <0xNN> to bytes, or drops a space at the start of a text."""
    match decoder["type"]:
        case "Replace":
            return bool(decoder["pattern"] == {"String": SENTENCEPIECE_SPACE} and decoder["content"] == " ")
        case "Metaspace":
            return bool(decoder["replacement"] == SENTENCEPIECE_SPACE)
        case "Strip":
            return bool(decoder["content"] == " " and decoder["start"] <= 1 and not decoder["stop"])
        case kind:
            return kind in ("ByteFallback", "Fuse")


def _hex_byte(digits: str) -> bytes | None:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return None


def _byte_level_bytes(token: str) -> bytes:
    """Decode GPT-2's alphabet, which has one character per byte; a token outside of it is plain text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()
