"""Vocabularies of encoders in GGUF files: the ids of BERT's and XLM-RoBERTa's tokenizers, and hostile metadata."""

from __future__ import annotations

import base64
import json
import random
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.errors import CorruptCheckpoint
from quire.runtime.engine.text.gguf_tokenizer import read_tokenizer
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from tests.support.gguf_encoders import word_piece_metadata
from tests.support.gguf_metadata import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, hard_text

BERT = Path(__file__).parents[3] / "goldens" / "encoders" / "bert" / "tokenizer.json"
TEXTS = 200  # texts of each comparison
# A map of SentencePiece, made by its trainer from the rules: "ﬁ" is "fi", "　" is a space, "\u0007" is nothing.
CHARSMAP = zlib.decompress(
    base64.b64decode(
        "eNol0wXMF0QYB+D7EAaT7u6QlO7uNEhRFKS7G4mPDoNUQEJJpSSUUgEJBaW7e8DoUECa5w+3PXt/e++22+32hpghhFQhxI4fIis6Ol2MEB0rhC"
        "h5aYgRhpYN4Q05js24vEnkaDwSkoDEJCIpSUhOMlKSgtSvrwhpSUN60pGRDGQmE1nJQnay8RY5yEVO8pCbfOQlP29TkAIUphBFKUJxilGSEpSm"
        "FJ4UylCeclSkApWpRFWqUJ1q1KQGtanFO9ThPd6lLu9Tn3o0pAEf0IgPaUwTPuITPqYZTWnOp7SkBa1pRVva0J52dKQDnelEV7rQnW70pAe96U"
        "Vf+tCffnzGAAYxkCEMZmjk4xnOMEYygtGMYixj+JxxfMkXjOcrJjKByUzia6YwlW+YzjRm8C2zmMl3zGYO3zOPuSxgPj+wkEX8yBIWs4ylLOcn"
        "VrKCn1nFan5hLWtYzzp+41c28Dub2Mhm/mArW/iTbWznL/5mBzv5h93sYi972M8+DnKAwxziKEc4zjFOcoLTnOIsZzjPOS5ygUuRPC0qXFEvc5"
        "Xb8aLCdfUaN7kR6XGLu9zhX+5xn/94yAMe8T9PeMwznvKC5+HV8LVpH14CQOGFOg=="
    )
)
PIECES = [
    ("<s>", 0.0, CONTROL), ("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN),
    *((piece, -3.0 - 0.1 * rank, NORMAL) for rank, piece in enumerate(
        ["▁", "the", "▁the", "a", "b", "▁a", "aa", "ab", "ba", "c", "t", "h", "e", "f", "i", "fi", ".", ",", "12", "1",
         "2", "文", "の"]
    )),
    ("<d>", 0.0, USER_DEFINED), ("[PAD28]", -10000.0, UNUSED), ("[PAD29]", -10000.0, UNUSED),
]  # fmt: skip


def word_piece(**changed: Any) -> dict[str, Any]:
    """Return the metadata of the golden BERT."""
    content = json.loads(BERT.read_text())
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    return {**word_piece_metadata(content["model"]["vocab"], special), **changed}


def unigram(**changed: Any) -> dict[str, Any]:
    """Return the metadata of `PIECES`; keys of `changed` follow "tokenizer.ggml."."""
    values = {
        "model": "t5",
        "tokens": [text for text, _, _ in PIECES],
        "scores": [score for _, score, _ in PIECES],
        "token_type": [kind for _, _, kind in PIECES],
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "add_bos_token": True,
        "precompiled_charsmap": list(CHARSMAP),
        **changed,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def like_xlm_roberta() -> FastTokenizer:
    """Return `PIECES` as transformers' class of XLM-RoBERTa builds a tokenizer."""
    fast = FastTokenizer(models.Unigram([(text, score) for text, score, kind in PIECES if kind != UNUSED], 3, False))
    fast.normalizer = normalizers.Precompiled(CHARSMAP)
    words = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    fast.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "<pad>", "</s>", "<unk>")])
    fast.add_tokens([AddedToken("<d>", normalized=False)])
    return fast


def hard_texts() -> list[str]:
    generator = random.Random(1)
    return [
        "",
        " ",
        "the ﬁ　a\u0007b [PAD28]",
        "Ça Été [CLS] [MASK] ## x",
        f"{'e' * 100} {'e' * 101}",
        *(hard_text(generator) for _ in range(TEXTS)),
    ]


def test_word_pieces_give_the_ids_and_types_of_berts_tokenizer() -> None:
    expected = FastTokenizer.from_file(str(BERT))
    fast, _ = read_tokenizer(word_piece())
    texts = hard_texts()
    for text, other in pairwise(texts):
        for content in ((text,), (text, other)):
            found, like = fast.encode(*content), expected.encode(*content)
            assert (found.ids, found.type_ids) == (like.ids, like.type_ids)


@pytest.mark.parametrize(
    ("settings", "text", "pieces"),
    [
        ({}, "Été", ["et", "##e"]),
        ({"lowercase": False}, "Été été", ["[UNK]", "été"]),
        ({"lowercase": False, "strip_accents": True}, "Eté Eté", ["Ete", "Ete"]),
        ({"strip_accents": False}, "ÉTÉ", ["été"]),
    ],
)
def test_letters_are_changed_as_the_normalizer_of_the_file(
    settings: dict[str, bool], text: str, pieces: list[str]
) -> None:
    special = {name: index for index, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])}
    vocabulary = special | {"et": 4, "##e": 5, "été": 6, "Ete": 7}
    flags = {f"tokenizer.ggml.normalizer.{name}": value for name, value in settings.items()}
    fast, _ = read_tokenizer(word_piece_metadata(vocabulary, special) | flags)
    assert fast.encode(text).tokens == ["[CLS]", *pieces, "[SEP]"]


def test_unigrams_give_the_ids_of_xlm_robertas_tokenizer() -> None:
    expected = like_xlm_roberta()
    fast, _ = read_tokenizer(unigram())
    texts = hard_texts()
    for text, other in pairwise(texts):
        assert fast.encode(text).ids == expected.encode(text).ids
        assert fast.encode(text, other).ids == expected.encode(text, other).ids


def test_without_a_map_characters_stay_as_they_are() -> None:
    fast, _ = read_tokenizer(unigram(precompiled_charsmap=None))
    assert [fast.encode(text).ids for text in ("fi", "ﬁ")] == [[0, 4, 19, 2], [0, 4, 3, 2]]


LONG_TEXT = (0).to_bytes(4, "little") + b"x" * 65 + b"\0"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (unigram(scores=None), "the file has no tokenizer.ggml.scores, which a Unigram vocabulary needs"),
        (unigram(unknown_token_id=-1), "the file has no unknown token"),
        (word_piece(**{"tokenizer.ggml.unknown_token_id": -1}), "the file has no unknown token"),
        (unigram(precompiled_charsmap=[300]), "precompiled_charsmap must hold bytes only"),
        (unigram(precompiled_charsmap=["a"]), "precompiled_charsmap must hold bytes only"),
        (unigram(precompiled_charsmap=[255] * 8), "declares 4294967299 bytes and has 8"),
        (unigram(precompiled_charsmap=list(LONG_TEXT)), "makes more than 128 characters of one"),
        (unigram(add_eos_token=True, eos_token_id=-1), "add_eos_token is true, but the file has no token eos"),
    ],
)
def test_broken_metadata_are_typed_errors(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        read_tokenizer(metadata)
