"""The tokenizer that the metadata of a GGUF file describes, rebuilt as a `tokenizers` object.

The metadata are untrusted: every count, type and id is checked, and sizes are limited, before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from ...common.errors import CorruptCheckpoint, UnsupportedModel
from ...model.files import is_gguf
from ...model.weights.gguf import open_gguf
from .gguf_encoder_tokenizer import unigram, word_piece
from .gguf_vocabulary import (
    END_TEXTS,
    MAX_TOKEN_CHARACTERS,
    FileVocabulary,
    TokenType,
    VocabularyValues,
    read_kind,
    read_vocabulary,
    shown,
)
from .merges import merges_by_score
from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

MAX_MERGES = 1 << 21
MAX_MERGE_CHARACTERS = 1 << 25  # characters of the merges found in a vocabulary with scores
MAX_SPECIAL_CHARACTERS = 1 << 22  # characters of all special and user-defined tokens
_KEPT_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # special tokens of Phi-3 after which a space is kept
_SPECIAL = (int(TokenType.CONTROL), int(TokenType.UNKNOWN))


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
    values = VocabularyValues(metadata)
    kind = read_kind(values)
    tokens = read_vocabulary(values, kind)
    try:
        fast = _build(values, tokens, kind)
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
    values = VocabularyValues(metadata)
    source, tool_source = (values.text(f"tokenizer.chat_template{name}", None) for name in ("", ".tool_use"))
    return source, tool_source


def read_special_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates may use: bos_token, eos_token, unk_token and pad_token, if they exist.

    Raises as `read_tokenizer`.
    """
    values = VocabularyValues(metadata)
    tokens = read_vocabulary(values, read_kind(values))
    names = {"bos_token": tokens.bos, "eos_token": tokens.eos, "unk_token": tokens.unknown, "pad_token": tokens.padding}
    return {name: tokens.texts[token_id] for name, token_id in names.items() if token_id is not None}


def _end_ids(tokens: FileVocabulary) -> frozenset[int]:
    """Return the declared end ids and the special tokens that are known to end a turn."""
    control = np.flatnonzero(np.array(tokens.types) == TokenType.CONTROL).tolist()
    known = {tokens.texts[token_id]: token_id for token_id in control if tokens.texts[token_id] in END_TEXTS}
    if "<|return|>" in known and "<|call|>" in known:  # <|end|> ends a message in this format, not the turn
        known.pop("<|end|>", None)
    return tokens.ends | frozenset(known.values())


def _build(values: VocabularyValues, tokens: FileVocabulary, kind: str) -> FastTokenizer:
    """Build the encoder, without special tokens."""
    match kind:
        case "bert":
            return word_piece(values, tokens)
        case "t5":
            return unigram(values, tokens)
        case "llama":
            return _sentencepiece(values, tokens)
        case _:
            return _byte_pairs(values, tokens, kind)


def _byte_pairs(values: VocabularyValues, tokens: FileVocabulary, kind: str) -> FastTokenizer:
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


def _pre_tokenizer(values: VocabularyValues, kind: str) -> PreTokenizer:
    name = "gemma4" if kind == "gemma4" else values.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(f"tokenizer.ggml.pre is {shown(name)}; Quire knows {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def _pair(merge: str) -> tuple[str, str]:
    """Split "left right" at the first space that is not the first character."""
    if len(merge) > 2 * MAX_TOKEN_CHARACTERS + 1:
        raise CorruptCheckpoint(f"tokenizer.ggml.merges has an entry of {len(merge)} characters")
    middle = merge.find(" ", 1)
    if middle < 0:
        raise CorruptCheckpoint(f"tokenizer.ggml.merges must hold pairs with a space between them, not {merge!r:.60}")
    return merge[:middle], merge[middle + 1 :]


def _sentencepiece(values: VocabularyValues, tokens: FileVocabulary) -> FastTokenizer:
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
    vocabulary: dict[str, int], merges: list[tuple[str, str]], tokens: FileVocabulary, *, prefix: bool
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


def _add_special_tokens(fast: FastTokenizer, tokens: FileVocabulary) -> None:
    """Add the tokens that are matched in a text before all others. They already have ids."""
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token_id in np.flatnonzero(np.isin(tokens.types, (*_SPECIAL, int(TokenType.USER_DEFINED)))).tolist():
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


def _add_template(fast: FastTokenizer, values: VocabularyValues, tokens: FileVocabulary, kind: str) -> None:
    """Make `fast` add the tokens that begin and end a text, or a pair of texts, as the file requests.

    BERT's pairs have a token type for each text. The texts of others are apart by two end tokens, as in RoBERTa.
    """
    defaults = {
        "bos": kind in ("llama", "bert") or (kind != "t5" and _pre_tokenizer(values, kind).add_bos),
        "eos": kind in ("bert", "t5"),
    }
    added: dict[str, int] = {}
    for name, token_id in (("bos", tokens.bos), ("eos", tokens.eos)):
        key = f"tokenizer.ggml.add_{name}_token"
        if values.flag(key, defaults[name] and token_id is not None):
            if token_id is None or not tokens.texts[token_id]:
                raise CorruptCheckpoint(f"{key} is true, but the file has no token {name}")
            added[name] = token_id
    begin, end = ([name] if name in added else [] for name in ("bos", "eos"))
    second = ["$B:1", *(f"{name}:1" for name in end)] if kind == "bert" else [*end, "$B:0", *end]
    if added:
        fast.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=[*begin, "$A", *end, *second],
            special_tokens=[
                {"id": name, "ids": [token_id], "tokens": [tokens.texts[token_id]]} for name, token_id in added.items()
            ],
        )
