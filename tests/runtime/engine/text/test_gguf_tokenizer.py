"""Tokenizers from the metadata of GGUF files: the ids of their references, special tokens, and hostile metadata."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from quire.runtime.engine.text import ChatTemplate, Tokenizer, gguf_tokenizer, gguf_vocabulary, has_tokenizer
from quire.runtime.engine.text.gguf_tokenizer import read_chat_templates, read_special_texts, read_tokenizer
from quire.runtime.engine.text.pre_tokenizers import PRE_TOKENIZERS
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from tests.support.gguf_files import write
from tests.support.gguf_metadata import (
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    byte_level_metadata,
    hard_text,
    sentencepiece_metadata,
)

KEYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
TEXTS = 300  # texts of each comparison
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
REFERENCES = {  # patterns of the tokenizer.json of a model with this name
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "falcon": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            GPT2,
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                    r"\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
            BYTES,
        ]
    ),
    "bloom": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r" ?[^(\s|[.,!?…。，、।۔،])]+"), "isolated"), BYTES],
    ),
}


@pytest.fixture(scope="module")
def byte_level(demo_folder: Path) -> Callable[[str], dict[str, Any]]:
    return lambda pre: byte_level_metadata(demo_folder, pre)


@pytest.fixture(scope="module")
def pieces() -> Mapping[str, Any]:
    return sentencepiece_metadata()


def encode(metadata: Mapping[str, Any], text: str) -> list[int]:
    ids: list[int] = read_tokenizer(metadata)[0].encode(text, add_special_tokens=False).ids
    return ids


def short(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return byte-level metadata with the first 20 merges only."""
    tokens = metadata["tokenizer.ggml.tokens"][:277]
    merges = [merge for merge in metadata["tokenizer.ggml.merges"][:20] if merge.replace(" ", "") in tokens]
    types = metadata["tokenizer.ggml.token_type"][:277]
    return metadata | dict(zip(KEYS, (tokens, types, merges), strict=True))


@pytest.mark.parametrize("pre", REFERENCES)
def test_byte_pairs_give_the_ids_of_the_tokenizer_that_they_come_from(
    byte_level: Callable[[str], dict[str, Any]], demo_folder: Path, pre: str
) -> None:
    expected = FastTokenizer.from_file(str(demo_folder / "tokenizer.json"))
    expected.pre_tokenizer = REFERENCES[pre]
    fast = read_tokenizer(byte_level(pre))[0]
    generator = random.Random(1)
    for _ in range(TEXTS):
        text = hard_text(generator)
        assert fast.encode(text, add_special_tokens=False).ids == expected.encode(text, add_special_tokens=False).ids
        assert fast.decode(fast.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("default", "x=12345!", ["x", "=", "123", "45", "!"]),
        ("gpt-2", "I'm  12345\n\n x", ["I", "'m", " ", " 12345", "\n\n", " x"]),
        ("llama-bpe", "I'M 12345\n x", ["I", "'M", " ", "123", "45", "\n", " x"]),
        ("qwen2", "été 123!\n", ["été", " ", "1", "2", "3", "!\n"]),
        ("qwen35", "हिन्दी 1", ["हिन्दी", " ", "1"]),
        ("gpt-4o", "HTTPServer's 1234/\n", ["HTTPServer's", " ", "123", "4", "/\n"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("deepseek-v3", "1234中文x_y", ["123", "4", "中文", "x", "_y"]),
        ("deepseek-coder", "ab 12\n", ["ab", " ", "1", "2", "\n"]),
        ("starcoder", "ab 12", ["ab", " ", "1", "2"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
        ("bloom", "a, b", ["a", ",", " b"]),
        ("viking", "ab 12", ["ab", " ", "1", "2"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("tiny_aya", "1234a 123456", ["123", "4", "a", " ", "123", "456"]),
        ("afmoe", "x1234", ["x", "1", "234"]),
        ("superbpe", "the cat 12345", ["the cat ", "12", "345"]),
        ("superbpe", "123456 1½", ["123", "456", " ", "1½"]),
        ("kimi-k2", "abc中文def 1234", ["abc", "中文", "def", " ", "123", "4"]),
        ("seed-coder", "!!\n", ["!!", "\n"]),
        ("exaone-moe", "a b c.", ["a b c", "."]),
        ("chameleon", "a    b", ["a", "    ", "b"]),
        ("jais-2", "a" + " " * 9 + "b", ["a", " " * 8, " b"]),
        ("minicpm5", "a 12345", ["a", " ", "123", "45"]),
    ],
)
def test_a_name_splits_a_text(
    byte_level: Callable[[str], dict[str, Any]], pre: str, text: str, pieces: list[str]
) -> None:
    split = read_tokenizer(byte_level(pre))[0].pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in split] == pieces


@pytest.mark.parametrize("pre", ["tiny_aya", "afmoe", "superbpe", "exaone-moe", "bloom"])
@pytest.mark.parametrize("character", ["1", "a ", " "])
def test_long_runs_are_split_in_linear_time(
    byte_level: Callable[[str], dict[str, Any]], pre: str, character: str
) -> None:
    fast = read_tokenizer(short(byte_level(pre)))[0]
    assert fast.pre_tokenizer.pre_tokenize_str(character * 30_000)  # 10 s and more in quadratic time


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_name_keeps_all_characters(byte_level: Callable[[str], dict[str, Any]], pre: str) -> None:
    ids = {"tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.bos_token_id": 0}
    fast = read_tokenizer(short(byte_level(pre)) | ids)[0]
    if not PRE_TOKENIZERS[pre].byte_level:
        return
    generator = random.Random(2)
    for _ in range(20):
        text = hard_text(generator)
        expected = normalizers.NFC().normalize_str(text) if PRE_TOKENIZERS[pre].nfc else text
        assert fast.decode(fast.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("pre", "composes"), [("qwen2", True), ("command-r", True), ("qwen35", False), ("dbrx", False)]
)
def test_some_names_compose_characters(byte_level: Callable[[str], dict[str, Any]], pre: str, composes: bool) -> None:
    fast = read_tokenizer(short(byte_level(pre)))[0]
    assert (fast.encode("e\u0301").ids == fast.encode("\u00e9").ids) is composes


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("dbrx", False), ("qwen2", False)])
def test_with_some_names_a_word_that_is_a_token_is_not_merged(
    byte_level: Callable[[str], dict[str, Any]], pre: str, whole: bool
) -> None:
    metadata = short(byte_level(pre))
    metadata["tokenizer.ggml.tokens"].append("Ġzqx")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    assert (read_tokenizer(metadata)[0].encode("a zqx").tokens[-1] == "Ġzqx") is whole


def test_byte_pairs_without_bytes_write_spaces_as_underscores() -> None:
    tokens = ["<unk>", "<bos>", *BYTE_TOKENS, "▁", "a", "\n", "▁a", "\n\n", "aa", " ", " a"]
    fast = read_tokenizer(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, *[6] * 256, *[1] * 8],
            "tokenizer.ggml.merges": ["▁ a", "\n \n", "a a", "  a"],  # the last one: of a space and a
            "tokenizer.ggml.bos_token_id": 1,
        }
    )[0]
    expected = ["<bos>", "aa", "▁a", "\n\n", "<0xC3>", "<0xA9>"]
    assert fast.encode("aa a\n\n\u00e9").tokens == expected
    assert fast.decode(fast.encode("aa a\n\n\u00e9").ids) == "aa a\n\n\u00e9"


def test_pieces_merge_as_sentencepiece_merges_them(pieces: Mapping[str, Any]) -> None:
    fast = read_tokenizer(pieces)[0]
    generator = random.Random(3)
    for _ in range(TEXTS):
        text = hard_text(generator)
        if not any(special in text for special in ("<s>", "</s>", "<unk>", "<|end|>")):
            assert fast.encode(text, add_special_tokens=False).ids == sentencepiece_ids(pieces, text), text


def test_of_pairs_with_one_score_that_with_the_longer_left_half_merges_first() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTE_TOKENS, "a", "b", "c", "bc", "aab", "aa"],
        "tokenizer.ggml.scores": [0.0] * 262 + [-1.0, -1.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6],
        "tokenizer.ggml.add_space_prefix": False,
    }
    fast = read_tokenizer(metadata)[0]
    assert fast.encode("aabc", add_special_tokens=False).tokens == ["aab", "c"]


def test_of_pairs_with_one_score_and_left_halves_of_one_length_that_with_the_longer_right_half_merges_first() -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTE_TOKENS, "x", "a", "b", "c", "bc", "xa", "abc"],
        "tokenizer.ggml.scores": [0.0] * 264 + [-1.0, -1.0],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 7],
        "tokenizer.ggml.add_space_prefix": False,
    }
    fast = read_tokenizer(metadata)[0]
    assert fast.encode("xabc", add_special_tokens=False).tokens == ["x", "abc"]


def sentencepiece_ids(metadata: Mapping[str, Any], text: str) -> list[int]:
    """Encode as SentencePiece does: merge the neighbors that make the piece of the best score, leftmost first."""
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [left + right for left, right in pairwise(symbols)]
        found = [(-scores[ids[pair]], index) for index, pair in enumerate(pairs) if pair in ids]
        if not found:
            break
        _, index = min(found)
        symbols[index : index + 2] = [pairs[index]]
    return [
        token_id
        for symbol in symbols
        for token_id in ([ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()])
    ]


def test_text_after_a_special_token_begins_with_a_space(pieces: Mapping[str, Any]) -> None:
    fast = read_tokenizer(pieces)[0]
    assert fast.encode("cat</s>cat<|end|>", add_special_tokens=False).tokens == ["▁cat", "</s>", "▁cat", "<|end|>"]
    assert fast.decode(fast.encode(" the cat").ids) == " the cat"
    plain = read_tokenizer({**pieces, "tokenizer.ggml.add_space_prefix": False})[0]
    assert plain.encode("the", add_special_tokens=False).tokens[0] != "▁the"
    assert plain.decode(plain.encode(" the cat").ids) == " the cat"


def test_extra_spaces_are_removed_where_the_file_says_so(pieces: Mapping[str, Any]) -> None:
    trimmed = {**pieces, "tokenizer.ggml.remove_extra_whitespaces": True}
    assert encode(trimmed, "  the   cat ") == encode(pieces, "the cat")


def test_special_tokens_are_found_before_anything_else(byte_level: Callable[[str], dict[str, Any]]) -> None:
    metadata = byte_level("gpt-2")
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<|im_end|>", "<tool>", "<tool>s", "[PAD9]", "", ""]
    metadata["tokenizer.ggml.token_type"] += [CONTROL, USER_DEFINED, USER_DEFINED, UNUSED, NORMAL, NORMAL]
    fast, end_ids = read_tokenizer(metadata)
    assert fast.encode("<|im_end|><tool>s<tool>").ids == [count, count + 2, count + 1]
    assert count + 3 not in fast.encode("[PAD9]").ids
    assert fast.id_to_token(count + 3) is None
    assert fast.decode([count, count + 1]) == "<tool>"
    assert end_ids == {count, metadata["tokenizer.ggml.tokens"].index("<|endoftext|>")}


@pytest.mark.parametrize("name", ["Phi-3-mini", "Phi3 Mini"])
def test_special_tokens_of_phi_3_take_the_space_after_them_along(pieces: Mapping[str, Any], name: str) -> None:
    assert "▁" in "".join(read_tokenizer(pieces)[0].encode("<|end|>\ncat").tokens[2:])
    phi = read_tokenizer({**pieces, "general.name": name})[0]
    tokens = pieces["tokenizer.ggml.tokens"]
    ids = phi.encode("<|end|>  \n cat<s> cat", add_special_tokens=False).ids
    assert ids[:3] == [tokens.index("<|end|>"), tokens.index("▁cat"), 1]
    assert len(ids) > 4  # the text after <s> begins with two spaces


def test_an_old_file_without_types_declares_its_special_tokens(pieces: Mapping[str, Any]) -> None:
    old = {key: value for key, value in pieces.items() if key != "tokenizer.ggml.token_type"}
    assert encode(old, "</s>") == [2]
    assert read_tokenizer(old)[1] == {2, pieces["tokenizer.ggml.tokens"].index("<|end|>")}


def test_begin_and_end_tokens_are_added_as_the_file_says(pieces: Mapping[str, Any]) -> None:
    def around(**flags: bool) -> tuple[int, int]:
        named = {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
        ids = read_tokenizer({**pieces, **named})[0].encode("the cat").ids
        return ids[0], ids[-1]

    cat = pieces["tokenizer.ggml.tokens"].index("▁cat")
    the = encode(pieces, "the")[0]
    assert around() == (1, cat)
    assert around(add_bos_token=False) == (the, cat)
    assert around(add_bos_token=True, add_eos_token=True) == (1, 2)


def test_end_ids_are_the_declared_ones_and_the_known_ends_of_turns(byte_level: Callable[[str], dict[str, Any]]) -> None:
    metadata = byte_level("gpt-4o")
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["<|end|>", "<|return|>", "<|call|>", "<|eot_id|>", "<|tool_response>"]
    metadata["tokenizer.ggml.token_type"] += [CONTROL, CONTROL, CONTROL, NORMAL, CONTROL]
    metadata["tokenizer.ggml.eos_token_id"] = np.uint32(5)
    metadata["tokenizer.ggml.eot_token_id"] = 0xFFFFFFFF
    own = metadata["tokenizer.ggml.tokens"].index("<|endoftext|>")
    assert read_tokenizer(metadata)[1] == {5, own, count + 1, count + 2, count + 4}


def test_numbers_may_be_arrays(pieces: Mapping[str, Any]) -> None:
    arrays = {
        **pieces,
        "tokenizer.ggml.scores": np.array(pieces["tokenizer.ggml.scores"], np.float32),
        "tokenizer.ggml.token_type": np.array(pieces["tokenizer.ggml.token_type"], np.int32),
    }
    assert encode(arrays, "the cat sat 😀") == encode(pieces, "the cat sat 😀")


def test_a_chat_template_is_a_text_or_absent(pieces: Mapping[str, Any]) -> None:
    assert read_special_texts(pieces) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert read_chat_templates(pieces) == (None, None)
    named = {**pieces, "tokenizer.chat_template": "{{ 1 }}"}
    assert read_chat_templates(named) == ("{{ 1 }}", None)
    assert read_chat_templates({**named, "tokenizer.chat_template.tool_use": "{{ 2 }}"}) == ("{{ 1 }}", "{{ 2 }}")
    for key in ("tokenizer.chat_template", "tokenizer.chat_template.tool_use"):
        with pytest.raises(CorruptCheckpoint, match=f"{key} must be a text, not 3"):
            read_chat_templates({**named, key: 3})


def test_a_template_for_tools_is_used_for_chats_with_tools(pieces: Mapping[str, Any], tmp_path: Path) -> None:
    templates = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "{{ tools[0].function.name }}",
        "tokenizer.chat_template.rag": "documents",
        "tokenizer.chat_templates": ["tool_use", "rag"],
    }
    template = ChatTemplate.load(write(tmp_path / "a.gguf", {**pieces, **templates}, {}))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = [{"role": "user", "content": "hi"}]
    assert (template.render(chat), template.render(chat, [tool])) == ("plain", "f")


def test_a_file_is_a_tokenizer_and_a_template(
    byte_level: Callable[[str], dict[str, Any]], demo_folder: Path, tmp_path: Path
) -> None:
    metadata = byte_level("gpt-2")
    metadata |= {
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content + eos_token }}",
    }
    path = write(tmp_path / "alone.gguf", metadata, {})
    tokenizer = Tokenizer(path)
    folder = Tokenizer(demo_folder)
    for text in ("I'm 12 日本 😀\n<|endoftext|>", ""):
        assert tokenizer.encode(text) == folder.encode(text)
    ids = folder.encode("naïve 😀")
    assert [tokenizer.token_bytes(each) for each in ids] == [folder.token_bytes(each) for each in ids]
    assert (tokenizer.special_token_ids, tokenizer.vocab_size) == (folder.special_token_ids, folder.vocab_size)
    assert tokenizer.eos_token_ids == {0}
    assert ChatTemplate.load(path).render([{"role": "user", "content": "hi"}]) == "hi<|endoftext|>"


def test_a_file_without_a_vocabulary_has_that_of_its_folder(demo_folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "weights.gguf", {"general.architecture": "llama"}, {})
    assert not has_tokenizer(path)
    with pytest.raises(ModelNotFound, match=r"has no tokenizer\.json"):
        Tokenizer(path)
    with pytest.raises(UnsupportedModel, match="has no chat template"):
        ChatTemplate.load(path)
    shutil.copy(demo_folder / "tokenizer.json", tmp_path)
    assert has_tokenizer(path)
    assert Tokenizer(path).encode("the cat") == Tokenizer(demo_folder).encode("the cat")


def test_the_begin_token_is_known(pieces: Mapping[str, Any], tmp_path: Path, demo_folder: Path) -> None:
    assert Tokenizer(write(tmp_path / "a.gguf", pieces, {})).bos_token_id == 1
    plain = {**pieces, "tokenizer.ggml.add_bos_token": False}
    assert Tokenizer(write(tmp_path / "b.gguf", plain, {})).bos_token_id is None
    assert Tokenizer(demo_folder).bos_token_id is None


def test_unknown_kinds_and_names_are_refused_with_what_is_allowed(pieces: Mapping[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer.ggml.model is 'rwkv'; Quire reads gpt2, llama, gemma4"):
        read_tokenizer({**pieces, "tokenizer.ggml.model": "rwkv"})
    with pytest.raises(UnsupportedModel, match=r"tokenizer.ggml.pre is 'new'; Quire knows .*qwen2"):
        read_tokenizer({**pieces, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "new"})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", None, "must be a text"),
        ("tokenizer.ggml.tokens", "abc", "must be a list"),
        ("tokenizer.ggml.tokens", [], "is empty"),
        ("tokenizer.ggml.tokens", [b"a"], "texts in UTF-8 only"),
        ("tokenizer.ggml.tokens", [["a"]], "texts in UTF-8 only"),
        ("tokenizer.ggml.tokens", ["x" * 2000], "at most 1024 characters"),
        ("tokenizer.ggml.tokens", ["a", "b", "c"], "values for 3 tokens"),
        ("tokenizer.ggml.scores", [1.0], "has 1 values for"),
        ("tokenizer.ggml.scores", 7, "must be a list"),
        ("tokenizer.ggml.token_type", [1], "has 1 values for"),
        ("tokenizer.ggml.bos_token_id", 10**6, "the vocabulary has the ids 0 to"),
        ("tokenizer.ggml.eos_token_id", -2, "the vocabulary has the ids 0 to"),
        ("tokenizer.ggml.eos_token_id", True, "must be a token id"),
        ("tokenizer.ggml.eos_token_id", 1.0, "must be a token id"),
        ("tokenizer.ggml.add_bos_token", 1, "must be true or false"),
        ("general.name", 3, "must be a text"),
    ],
)
def test_hostile_values_are_refused(pieces: Mapping[str, Any], key: str, value: object, message: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=message) as raised:
        read_tokenizer({**pieces, key: value})
    assert key in str(raised.value) or "token_type" in str(raised.value)


def test_a_token_that_is_to_be_added_must_exist(pieces: Mapping[str, Any]) -> None:
    absent = {**pieces, "tokenizer.ggml.bos_token_id": -1}
    assert read_tokenizer(absent)[0].encode("the").ids == encode(pieces, "the")
    with pytest.raises(CorruptCheckpoint, match="add_bos_token is true, but the file has no token bos"):
        read_tokenizer({**absent, "tokenizer.ggml.add_bos_token": True})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "x", 10**400, [1], -1.0, 7])
@pytest.mark.parametrize("key", ["tokenizer.ggml.scores", "tokenizer.ggml.token_type"])
def test_hostile_numbers_are_refused_or_are_numbers(pieces: Mapping[str, Any], key: str, value: object) -> None:
    if key == "tokenizer.ggml.scores" and value in (-1.0, 7):
        return
    hostile = {**pieces, key: [value, *pieces[key][1:]]}
    with pytest.raises(CorruptCheckpoint, match=key):
        read_tokenizer(hostile)


def test_a_lacking_key_is_named(pieces: Mapping[str, Any], byte_level: Callable[[str], dict[str, Any]]) -> None:
    for metadata, names in (
        (pieces, ("model", "tokens", "scores")),
        (byte_level("gpt-2"), ("model", "tokens", "merges")),
    ):
        for name in names:
            key = f"tokenizer.ggml.{name}"
            with pytest.raises(CorruptCheckpoint, match=f"the file has no {key}"):
                read_tokenizer({other: value for other, value in metadata.items() if other != key})


def test_a_token_has_one_id(pieces: Mapping[str, Any]) -> None:
    tokens = list(pieces["tokenizer.ggml.tokens"])
    tokens[-1] = tokens[300]
    with pytest.raises(CorruptCheckpoint, match=f"tokens 300 and {len(tokens) - 1} are both"):
        read_tokenizer({**pieces, "tokenizer.ggml.tokens": tokens})


def test_a_vocabulary_must_be_able_to_encode_any_character(pieces: Mapping[str, Any]) -> None:
    tokens = list(pieces["tokenizer.ggml.tokens"])
    tokens[3:259] = [f"piece {index}" for index in range(256)]
    unknown = {**pieces, "tokenizer.ggml.tokens": tokens}
    assert encode(unknown, "😀")[-1] == 0
    with pytest.raises(CorruptCheckpoint, match="neither the 256 byte tokens"):
        read_tokenizer({**unknown, "tokenizer.ggml.unknown_token_id": -1})


@pytest.mark.parametrize("merge", ["ab", "", "a", "zz qq\n", "x" * 5000, "a ", " "])
def test_merges_of_unknown_tokens_are_refused(byte_level: Callable[[str], dict[str, Any]], merge: str) -> None:
    metadata = byte_level("gpt-2")
    metadata["tokenizer.ggml.merges"].append(merge)
    with pytest.raises(CorruptCheckpoint):
        read_tokenizer(metadata)


def test_sizes_are_limited(pieces: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value, message in (
        (gguf_vocabulary, "MAX_VOCABULARY", 400, "at most 400 are supported"),
        (gguf_vocabulary, "MAX_VOCABULARY_CHARACTERS", 1000, "all together at most 1000"),
        (gguf_tokenizer, "MAX_MERGES", 20, "more than 20 pairs"),
        (gguf_tokenizer, "MAX_MERGE_CHARACTERS", 50, "more than 50 characters"),
        (gguf_tokenizer, "MAX_SPECIAL_CHARACTERS", 20, "the special tokens have more than 20 characters"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            with pytest.raises(CorruptCheckpoint, match=message):
                read_tokenizer(pieces)


HOSTILE: list[Any] = [
    *(None, True, -1, 0, 2**40, 1.5, float("nan"), "", "a b", "\ud800", b"x", [], ["a"], ["", ""], [0], [[]], {}),
    *(np.zeros(3), np.zeros((2, 2)), np.array(["a"]), np.array([], np.int8)),
]


@pytest.mark.parametrize("seed", range(4))
def test_any_other_metadata_are_refused_or_make_a_tokenizer(
    pieces: Mapping[str, Any], byte_level: Callable[[str], dict[str, Any]], seed: int
) -> None:
    generator = random.Random(seed)
    base = dict(pieces if seed % 2 else byte_level("qwen2"))
    if seed % 2 == 0:  # a short vocabulary is read faster
        base = short(base)
    for _ in range(50):
        metadata = {key: value[:] if isinstance(value, list) else value for key, value in base.items()}
        for _ in range(generator.randrange(1, 4)):
            mutate(metadata, generator)
        try:
            fast = read_tokenizer(metadata)[0]
        except (CorruptCheckpoint, UnsupportedModel):
            continue
        assert isinstance(fast.encode("the cat 😀 12").ids, list)


def mutate(metadata: dict[str, Any], generator: random.Random) -> None:
    key = generator.choice([*metadata, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.add_eos_token", "general.name"])
    value = metadata.get(key)
    if isinstance(value, list) and value and generator.random() < 0.7:
        index = generator.randrange(len(value))
        match generator.randrange(4):
            case 0:
                value[index] = generator.choice(HOSTILE)
            case 1:
                value[index] = generator.choice(value)
            case 2:
                del value[index:]
            case 3:
                value.insert(index, generator.choice(value))
    elif generator.random() < 0.2:
        metadata.pop(key, None)
    else:
        metadata[key] = generator.choice(HOSTILE)
