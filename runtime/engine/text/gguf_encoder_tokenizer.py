"""The encoders of the vocabularies that BERT and XLM-RoBERTa have in GGUF files, as `tokenizers` objects."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ...common.errors import CorruptCheckpoint
from .gguf_vocabulary import WORD_START, FileVocabulary, TokenType, VocabularyValues
from .tokenizer_limits import check_charsmap

MAX_WORD = 100  # characters of a word; a longer one is unknown, as in BERT
MAX_CHARSMAP = 1 << 20  # bytes; XLM-RoBERTa has 316,720
LOWERCASE, STRIP_ACCENTS = (f"tokenizer.ggml.normalizer.{name}" for name in ("lowercase", "strip_accents"))


def word_piece(values: VocabularyValues, tokens: FileVocabulary) -> FastTokenizer:
    """Build an encoder that divides words into the longest pieces, as BERT. Raises CorruptCheckpoint."""
    vocabulary = tokens.vocabulary(with_unused=False)
    unknown = tokens.texts[_unknown(tokens)]
    fast = FastTokenizer(models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=MAX_WORD))
    lowercase = values.flag(LOWERCASE, True)
    fast.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=values.flag(STRIP_ACCENTS, lowercase),
        lowercase=lowercase,
    )
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    return fast


def unigram(values: VocabularyValues, tokens: FileVocabulary) -> FastTokenizer:
    """Build an encoder that divides words into the pieces with the highest sum of scores, as XLM-RoBERTa.

    The unused tokens at the end are left out, because the score of an unknown character follows from the lowest score.
    Raises CorruptCheckpoint.
    """
    scores = values.floats("tokenizer.ggml.scores", len(tokens.texts))
    if scores is None:
        raise CorruptCheckpoint("the file has no tokenizer.ggml.scores, which a Unigram vocabulary needs")
    unknown = _unknown(tokens)
    used = np.flatnonzero(np.array(tokens.types) != TokenType.UNUSED)
    count = max(int(used[-1]) if len(used) else 0, unknown) + 1
    pieces = list(zip(tokens.texts[:count], scores[:count], strict=True))
    fast = FastTokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=False))
    if charsmap := values.octets("tokenizer.ggml.precompiled_charsmap", MAX_CHARSMAP):
        check_charsmap(charsmap)
        fast.normalizer = normalizers.Precompiled(charsmap)
    words = pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme="always")
    fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    fast.decoder = decoders.Metaspace(replacement=WORD_START, prepend_scheme="always")
    return fast


def _unknown(tokens: FileVocabulary) -> int:
    if tokens.unknown is None or not tokens.texts[tokens.unknown]:
        raise CorruptCheckpoint("the file has no unknown token, which a vocabulary of pieces needs")
    return tokens.unknown
