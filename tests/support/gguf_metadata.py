"""Metadata of GGUF files, made from small tokenizers, and hard texts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, normalizers, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CORPUS = [
    "the cat sat on the mat; the dog that the cat saw ran to the other mat",
    "def train(self, x):\n    return [self.step(i) for i in range(x)]\n",
    "schöne Grüße aus Köln, naïve façade, 1234 + 56 = 1290, aaaa bababa abab",
    "日本語の文章 と 中文句子 and русский текст 🙂🙂",
]
PIECES = [
    *(
        "the",
        "cat",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        " \t ",
        "a",
        "aaa",
        "ab",
        "ba",
        "'s",
        "'LL",
        "’ve",
        "I'm",
    ),
    *(
        "1",
        "12",
        "123",
        "1234567",
        "½",
        "²",
        "٣٤",
        "Ⅷ",
        "3.14",
        "x_y",
        "HTTPServer",
        "camelCase",
        "__init__",
        "->",
        "…",
    ),
    *(
        "日本語",
        "の",
        "カタカナ",
        "中文",
        "한국어",
        "ไทย",
        "हिन्दी",
        "العربية",
        "😀",
        "👩‍👩‍👧",
        "🏳️‍🌈",
        "é",
        "e\u0301",
        "ſ",
        "ß",
        "ﬁ",
    ),
    *(
        "\u200b",
        "\u200d",
        "\ufeff",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x00",
        "\x7f",
        "\ufffd",
        "\U0010ffff",
        "\u0378",
        "▁",
        "Ġ",
    ),
    *(
        "<s>",
        "</s>",
        "<|end|>",
        "<|im_start|>",
        "<0x41>",
        "<unk>",
        "{",
        "}",
        "//",
        "#",
        "!!!",
        "?!",
        ",",
        "。",
        "「",
        "$",
        "`",
    ),
]


def hard_text(generator: random.Random) -> str:
    """Return a text of up to 23 pieces: scripts, digits, emoji, marks, spaces, special tokens."""
    return "".join(generator.choice(PIECES) for _ in range(generator.randrange(24)))


def byte_level_metadata(folder: Path, pre: str) -> dict[str, Any]:
    """Return the metadata of a GGUF file with the vocabulary of a folder's tokenizer.json."""
    content = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in content["added_tokens"]}
    ids = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    tokens = sorted(ids, key=lambda text: ids[text])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [added.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
    }


def sentencepiece_metadata() -> dict[str, Any]:
    """Return the metadata of a small vocabulary like Llama-2's: pieces with scores, and a token for each byte."""
    fast = FastTokenizer(models.BPE())
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # no piece spans two words
    fast.train_from_iterator(CORPUS * 4, trainers.BpeTrainer(vocab_size=400, show_progress=False, min_frequency=2))
    content = json.loads(fast.to_str())["model"]
    merged = ["".join(pair) for pair in content["merges"]]
    pieces = list(dict.fromkeys([*merged, *(piece for piece in content["vocab"] if len(piece) == 1)]))
    special = ["<unk>", "<s>", "</s>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + pieces + ["<|end|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1000.0] * 2,
        "tokenizer.ggml.token_type": [
            *(UNKNOWN, CONTROL, CONTROL),
            *[BYTE] * 256,
            *[NORMAL] * len(pieces),
            *(CONTROL, USER_DEFINED),
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
