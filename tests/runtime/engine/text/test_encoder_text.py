"""Texts and pairs of texts as encoders take them, compared with sentence-transformers' own tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.engine.text.encoder_text import QWEN3_PAIR, EncoderText
from quire.runtime.model.encoder import read_encoder
from quire.scheduler import EncodedText

FOLDER = Path(__file__).parents[3] / "goldens" / "encoders"
NAMES = sorted(path.name for path in FOLDER.iterdir())


def open_text(folder: Path) -> EncoderText:
    return EncoderText(folder, read_encoder(folder))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_types_are_those_of_sentence_transformers(name: str) -> None:
    golden = json.loads((FOLDER / name / "golden.json").read_text())
    texts, prompts = open_text(FOLDER / name), read_encoder(FOLDER / name).prompts
    for text, ids, types in zip(golden["texts"], golden["token_ids"], golden["type_ids"], strict=True):
        is_pair = isinstance(text, list)
        encoded = texts.encode_pair(*text) if is_pair else texts.encode(text, prompts.get(golden["prompt"], ""))
        assert encoded.token_ids == tuple(ids)
        assert encoded.type_ids == (tuple(types) if name.startswith("bert") and any(types) else None)


@pytest.mark.parametrize("name", NAMES)
def test_truncated_texts_keep_what_closes_them(name: str) -> None:
    texts = open_text(FOLDER / name)
    is_pair = read_encoder(FOLDER / name).num_labels > 0
    whole = texts.encode_pair("owners", "the pool owns") if is_pair else texts.encode("the pool owns the pages")
    count = len(whole.token_ids)
    assert texts.truncated(whole, count) == whole
    closing = 0 if name == "qwen3_scores" else 1
    for left in (count - 2, 3):
        kept = [*range(left - closing), *range(count - closing, count)]
        cut = texts.truncated(whole, left)
        assert cut.token_ids == tuple(whole.token_ids[index] for index in kept)
        types = whole.type_ids
        assert cut.type_ids == (None if types is None else tuple(types[index] for index in kept))
    assert len(texts.truncated(whole, 0).token_ids) == 0


def test_a_file_that_truncates_and_pads_does_neither(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    shutil.copytree(FOLDER / "bert", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    tokenizer["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "[PAD]",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for text in ("a", "a b c d e f g h i j"):
        assert open_text(folder).encode(text) == open_text(FOLDER / "bert").encode(text)


@pytest.mark.parametrize("limit", [{"max_seq_length": 64}, {}], ids=str)
def test_texts_are_lower_cased_where_the_folder_says_so(tmp_path: Path, limit: dict[str, int]) -> None:
    folder = tmp_path / "roberta"
    shutil.copytree(FOLDER / "roberta", folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({**limit, "do_lower_case": True}))
    texts, plain = open_text(folder), open_text(FOLDER / "roberta")
    assert texts.encode("THE POOL") == plain.encode("the pool")
    assert texts.encode("THE POOL", "FIND: ") == plain.encode("find: the pool")
    assert texts.encode_pair("THE POOL", "OWNS PAGES") == plain.encode_pair("the pool", "owns pages")


def test_qwen3_rerankers_without_a_template_for_pairs(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3_answer"
    shutil.copytree(FOLDER / "qwen3_answer", folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")  # has no place for the document
    tokenizer: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    mark = {**tokenizer["added_tokens"][0], "id": 340, "content": "<|im_start|>"}
    tokenizer["added_tokens"].append(mark)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    texts = open_text(folder)
    text = QWEN3_PAIR.format(query="{pages}", document="pool")
    ids = tuple(texts.tokenizer.encode(text, add_special_tokens=False))
    assert texts.encode_pair("{pages}", "pool") == EncodedText(ids)
    assert ids.count(340) == 3
    cut = texts.truncated(EncodedText(ids), len(ids) - 2).token_ids
    assert texts.tokenizer.decode(cut).endswith("<think>\n\n</think>\n\n")
