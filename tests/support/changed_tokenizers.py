"""The bundled model's tokenizer with parts that change texts, as those of well-known models do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.runtime.model import BUNDLED_MODEL

Change = Callable[[dict[str, Any]], object]

SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
BACK = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FALLBACK = [{"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


def sentencepiece(**parts: Any) -> Change:
    """Return a change of the bundled tokenizer to pieces with ▁, <0xNN>, ASCII and a few words."""
    pieces = ["<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    pieces += ["▁yes", "▁no", "▁{", '▁"', "▁▁", "s▁e", "é"]

    def change(content: dict[str, Any]) -> None:
        vocab = {piece: index for index, piece in enumerate(pieces)}
        model = {"type": "BPE", "byte_fallback": True, "ignore_merges": True, "vocab": vocab, "merges": []}
        content.update({"model": model, "pre_tokenizer": None, "post_processor": None, **parts})

    return change


def words(content: dict[str, Any]) -> None:
    """Replace the bundled tokenizer by whole words, which a decoder separates by spaces."""
    names = ["<|endoftext|>", *(f"##{chr(code)}" for code in range(32, 127)), "yes", "no", "true", "a", "{"]
    model = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 99}
    content["model"] = model | {"vocab": {name: index for index, name in enumerate(names)}}
    content |= {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}, "post_processor": None}
    content["pre_tokenizer"] = {"type": "Whitespace"}


CHANGES: dict[str, Change] = {
    "NFC": lambda content: content.update(normalizer={"type": "NFC"}),
    "NFKC": lambda content: content.update(normalizer={"type": "NFKC"}),
    "NFD": lambda content: content.update(normalizer={"type": "NFD"}),
    "lower case": lambda content: content.update(normalizer={"type": "Lowercase"}),
    "strip": lambda content: content.update(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
    "dropped letters": lambda content: content.update(
        normalizer={"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": ""}
    ),
    "prefix space": lambda content: content["pre_tokenizer"].update(add_prefix_space=True),
    "Llama 2": sentencepiece(
        normalizer={"type": "Sequence", "normalizers": [PREPEND, SPACE]},
        decoder={"type": "Sequence", "decoders": [BACK, *FALLBACK, STRIP]},
    ),
    "Gemma": sentencepiece(normalizer=SPACE, decoder={"type": "Sequence", "decoders": [BACK, *FALLBACK]}),
    "Metaspace": sentencepiece(
        normalizer=None,
        pre_tokenizer=METASPACE,
        decoder={"type": "Sequence", "decoders": [{"type": "ByteFallback"}, METASPACE]},
    ),
    "two spaces": sentencepiece(
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁▁"}, SPACE]},
        decoder={"type": "Sequence", "decoders": [BACK, *FALLBACK, STRIP | {"start": 2}]},
    ),
    "words": words,
}


def model_with(change: Change, to: Path, *, weights: bool = False) -> Path:
    """Make `to` a folder with the bundled model, and `change` of its tokenizer.json; return it."""
    left_out = ["*.py", "*.md", "train.json"] if weights else ["*.py", "*.md", "train.json", "*.safetensors"]
    shutil.copytree(BUNDLED_MODEL, to, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True)
    content = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    change(content)
    (to / "tokenizer.json").write_text(json.dumps(content))
    return to
