"""Limits of an untrusted tokenizer.json: texts that would grow without end, and settings that are switched off."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.errors import CorruptCheckpoint
from quire.runtime.engine.text.tokenizer import Tokenizer

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
EMPTY = {"type": "Replace", "pattern": {"Regex": ""}, "content": "ab"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
LETTERS = {"type": "BPEDecoder", "suffix": ""}
DELIMITER = {"type": "CTC", "pad_token": "x", "word_delimiter_token": "", "cleanup": False}
MANY = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}


def charsmap(text: bytes) -> dict[str, str]:
    data = (1024).to_bytes(4, "little") + bytes(1024) + text + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def sequence(name: str, part: object, count: int) -> dict[str, Any]:
    return {"type": "Sequence", name: [part] * count}


@pytest.fixture
def folder(demo_folder: Path, tmp_path: Path) -> Path:
    shutil.copy(demo_folder / "tokenizer.json", tmp_path)
    return tmp_path


def write(folder: Path, **changes: object) -> Path:
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": sequence("normalizers", DOUBLE, 40)}, "normalizer and pre_tokenizer make more than 128"),
        (
            {"normalizer": sequence("normalizers", DOUBLE | {"content": "a" * 500}, 1)},
            "more than 128 characters of one",
        ),
        ({"normalizer": sequence("normalizers", sequence("normalizers", EMPTY, 3), 3)}, "more than 128 characters"),
        ({"normalizer": sequence("normalizers", {"type": "ByteLevel"}, 30)}, "more than 128 characters of one"),
        ({"normalizer": charsmap(b"a" * 200)}, "more than 128 characters of one"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "//////////8="}},
            "precompiled_charsmap declares 4294967299 bytes and has 8",
        ),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 5000}}, "a prepend of 5000 characters; at most 1024"),
        ({"normalizer": sequence("normalizers", {"type": "NFC"}, 65)}, "a sequence has 65 parts; at most 64"),
        ({"pre_tokenizer": sequence("pretokenizers", BYTES, 30)}, "more than 128 characters of one"),
        ({"pre_tokenizer": sequence("pretokenizers", MANY, 30)}, "more than 128 characters of one"),
        (
            {
                "normalizer": sequence("normalizers", DOUBLE, 6),
                "pre_tokenizer": sequence("pretokenizers", BYTES, 6),
            },
            "more than 128 characters of one",
        ),
        ({"decoder": sequence("decoders", DOUBLE, 40)}, "decoder makes more than 128 characters of one"),
        ({"decoder": sequence("decoders", LETTERS, 40)}, "decoder makes more than 128 characters of one"),
        ({"decoder": sequence("decoders", DELIMITER, 40)}, "decoder makes more than 128 characters of one"),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": ["$A"],
                    "pair": [],
                    "special_tokens": {"x": {"id": "x", "ids": [0] * 2000, "tokens": ["x"] * 2000}},
                }
            },
            "more than 1024 tokens around a text",
        ),
        (
            {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "max_input_chars_per_word": 10**9}},
            "max_input_chars_per_word is 1000000000",
        ),
    ],
)
def test_a_part_that_makes_long_texts_of_short_ones_is_refused(
    folder: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(CorruptCheckpoint, match=rf"tokenizer\.json is not supported: .*{reason}"):
        Tokenizer(write(folder, **changes))


def test_sequences_within_many_sequences_are_refused(folder: Path) -> None:
    part: dict[str, Any] = {"type": "NFC"}
    for _ in range(20):
        part = {"type": "Sequence", "normalizers": [part]}
    with pytest.raises(CorruptCheckpoint, match="sequences within more than 16 others"):
        Tokenizer(write(folder, normalizer=part))


def test_a_long_file_is_refused_unread(folder: Path) -> None:
    for name, size in (("tokenizer.json", 129 << 20), ("tokenizer_config.json", 9 << 20)):
        before = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
        with (folder / name).open("r+b" if (folder / name).exists() else "w+b") as file:
            file.truncate(size)  # takes no room on the disk
        with pytest.raises(CorruptCheckpoint, match=rf"{name} has {size} bytes; at most"):
            Tokenizer(folder)
        (folder / name).write_bytes(before)


def test_a_text_has_the_same_tokens_each_time(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    expected = Tokenizer(folder).encode("the module provides a queue" * 4)
    tokenizer = Tokenizer(write(folder, model=content["model"] | {"dropout": 0.9}))
    assert [tokenizer.encode("the module provides a queue" * 4) for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": charsmap("ﷺ".encode())},
        {"normalizer": sequence("normalizers", DOUBLE | {"content": "b"}, 20)},
        {
            "decoder": {
                "type": "Sequence",
                "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}] * 9,
            }
        },
        {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    ],
)
def test_usual_parts_are_no_bombs(folder: Path, changes: dict[str, object]) -> None:
    Tokenizer(write(folder, **changes))
