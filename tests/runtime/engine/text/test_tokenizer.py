"""The tokenizer of a model folder: ids, end ids, and typed errors for invalid folders."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from os import mkfifo
from pathlib import Path

import pytest
from quire.runtime.common.errors import CorruptCheckpoint, GenerationFailed, ModelNotFound
from quire.runtime.engine.text.tokenizer import Token, Tokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models


@pytest.fixture
def folder(demo_folder: Path, tmp_path: Path) -> Path:
    shutil.copy(demo_folder / "tokenizer.json", tmp_path)
    return tmp_path


def test_bundled_tokenizer(byte_level: Tokenizer) -> None:
    assert byte_level.vocab_size == 4096
    assert byte_level.eos_token_ids == frozenset({0})
    text = "def f(x): return 'naïve 日本語 👧'"
    assert byte_level.decode(byte_level.encode(text)) == text


def test_special_tokens_are_parsed_in_text_and_skipped_in_decode(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|endoftext|>b")
    assert 0 in ids
    assert byte_level.decode(ids) == "ab"


@pytest.mark.parametrize(
    ("generation_config", "config", "tokenizer_config", "expected"),
    [
        ({"eos_token_id": [3, 5]}, {"eos_token_id": 7}, {}, {3, 5}),
        ({}, {"eos_token_id": 7}, {}, {7}),
        ({"eos_token_id": 3}, {}, {"eos_token": "<|endoftext|>"}, {0, 3}),
        ({}, {}, {"eos_token": {"content": "<|endoftext|>"}}, {0}),
        ({}, {"eos_token_id": None}, {}, set()),
    ],
)
def test_end_ids(
    folder: Path,
    generation_config: dict[str, object],
    config: dict[str, object],
    tokenizer_config: dict[str, object],
    expected: set[int],
) -> None:
    for name, content in (
        ("generation_config", generation_config),
        ("config", config),
        ("tokenizer_config", tokenizer_config),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    assert Tokenizer(folder).eos_token_ids == expected


def declared(text: str, **flags: bool) -> dict[str, object]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": text, **dict.fromkeys(names, False), **flags}


def folder_with_room(folder: Path, **files: object) -> Path:
    """Remove the last four tokens from the vocabulary, and write JSON files into its folder."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    last = {text for text, token_id in vocab.items() if token_id >= 4092}
    content["model"]["vocab"] = {text: token_id for text, token_id in vocab.items() if text not in last}
    content["model"]["merges"] = [merge for merge in content["model"]["merges"] if "".join(merge) not in last]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    for name, written in files.items():
        (folder / f"{name}.json").write_text(json.dumps(written))
    return folder


X, Y = "<|x|>", "<|y|>"


@pytest.mark.parametrize(
    ("files", "special"),
    [
        (
            {
                "tokenizer_config": {
                    "eos_token": Y,
                    "added_tokens_decoder": {"4093": declared(Y, special=True), "4092": declared(X, special=True)},
                }
            },
            {0, 4092, 4093},
        ),
        (
            {"tokenizer_config": {"eos_token": Y, "added_tokens_decoder": {"4092": declared(X), "4093": declared(Y)}}},
            {0, 4093},
        ),
        ({"added_tokens": {Y: 4093, X: 4092}, "special_tokens_map": {"eos_token": declared(Y)}}, {0, 4093}),
        ({"special_tokens_map": {"bos_token": X, "eos_token": Y}}, {0, 4092, 4093}),
        ({"tokenizer_config": {"eos_token": Y, "additional_special_tokens": [X]}, "added_tokens": {X: 4092, Y: 4093}},
         {0, 4092, 4093}),
        ({"tokenizer_config": {"pad_token": Y, "image_token": "!", "eos_token": X}}, {0, 1, 4092, 4093}),
    ],
    ids=["added_tokens_decoder", "a role", "added_tokens", "special_tokens_map", "additional", "other roles"],
)  # fmt: skip
def test_tokens_of_the_files_beside_it_are_one_id_each(
    folder: Path, files: dict[str, object], special: set[int]
) -> None:
    """Ids and flags equal the ids and flags of transformers 5.24."""
    tokenizer = Tokenizer(folder_with_room(folder, **files))
    ids = tokenizer.encode(f"b{X}c{Y}")
    assert ids == [66, 4092, 67, 4093]
    assert tokenizer.special_token_ids == special
    assert len(tokenizer.eos_token_ids) == 1


def test_an_end_token_of_the_files_beside_it_ends(folder: Path) -> None:
    files = {"added_tokens": {X: 4092, Y: 4093}, "special_tokens_map": {"eos_token": Y}, "tokenizer_config": {}}
    assert Tokenizer(folder_with_room(folder, **files)).eos_token_ids == {4093}
    settings = {"added_tokens_decoder": {"4092": declared(X)}, "eos_token": X}
    files = {"special_tokens_map": {"eos_token": Y}, "tokenizer_config": settings}
    assert Tokenizer(folder_with_room(folder, **files)).eos_token_ids == {4092}, "transformers reads no old file then"


def test_a_token_that_the_model_has_no_logit_for_is_no_token(folder: Path, demo_folder: Path) -> None:
    shutil.copy(demo_folder / "config.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    tokenizer = Tokenizer(folder)
    assert max(tokenizer.encode("a<pad>b")) < 4096
    assert tokenizer.vocab_size == 4096


def test_an_end_token_that_tokenizer_json_does_not_call_special_is_special(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][0]["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer(folder).special_token_ids == set()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    assert Tokenizer(folder).special_token_ids == {0}


def test_flags_of_a_declared_token_are_those_of_tokenizer_config(folder: Path) -> None:
    settings = {"added_tokens_decoder": {"4092": declared(X, rstrip=True), "4093": declared(Y, lstrip=True)}}
    tokenizer = Tokenizer(folder_with_room(folder, tokenizer_config=settings))
    assert tokenizer.encode(f"b{X}  c  {Y}") == [66, 4092, 67, 4093]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config", {"added_tokens_decoder": [X]}),
        ("tokenizer_config", {"added_tokens_decoder": {"a": declared(X)}}),
        ("tokenizer_config", {"added_tokens_decoder": {"9" * 5000: declared(X)}}),
        ("tokenizer_config", {"added_tokens_decoder": {"1": X}}),
        ("tokenizer_config", {"added_tokens_decoder": {"1": declared(X) | {"special": "yes"}}}),
        ("tokenizer_config", {"eos_token": {"content": 5}}),
        ("tokenizer_config", {"additional_special_tokens": [["a"]]}),
        ("special_tokens_map", {"eos_token": "\ud800"}),
        ("special_tokens_map", {"additional_special_tokens": [f"<{index}>" for index in range(70_000)]}),
        ("added_tokens", {X: "1"}),
        ("added_tokens", {"": 5}),
        ("added_tokens", {"x" * 2_000_000: 5}),
    ],
)
def test_a_declaration_of_another_form_is_refused(folder: Path, name: str, content: dict[str, object]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(CorruptCheckpoint, match="token"):
        Tokenizer(folder)


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}


@pytest.mark.parametrize(
    ("template", "settings", "expected"),
    [
        (None, {}, [65]),
        (TEMPLATE, {}, [0, 65]),
        (None, {"add_bos_token": True}, [0, 65]),
        (None, {"add_bos_token": False}, [65]),
        (None, {"add_eos_token": True}, [65, 1]),
        (TEMPLATE, {"add_bos_token": True, "add_eos_token": True}, [0, 65, 1]),
        (TEMPLATE, {"add_eos_token": True, "tokenizer_class": "LlamaTokenizerFast"}, [0, 65, 1]),  # e5-mistral
        (TEMPLATE, {"add_bos_token": False, "tokenizer_class": "LlamaTokenizer"}, [65]),
        (TEMPLATE, {"add_bos_token": False}, [0, 65]),  # another class: transformers never reads it
        (None, {"add_bos_token": True, "bos_token": None}, [65]),
        (None, {"add_bos_token": True, "bos_token": "no such token"}, [0, 65]),
        (None, {"add_bos_token": "!"}, [65]),
        (None, {"unk_token": "", "pad_token": None, "cls_token": {"content": ""}}, [65]),
    ],
)
def test_begin_and_end_tokens_of_the_settings(
    folder: Path, template: object, settings: dict[str, object], expected: list[int]
) -> None:
    content = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": template}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"bos_token": "<|endoftext|>", "eos_token": "!"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(folder)
    if settings["bos_token"] == "no such token":
        expected = [4096, 65]  # the token is added
    assert tokenizer.encode("a") == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [65]
    if settings.get("add_eos_token"):
        assert tokenizer.encode_typed("a", "b")[0][-2:] == [66, 1]


@pytest.mark.parametrize("token_id", [-1, 4096, 10**12])
@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_an_end_token_id_beyond_the_vocabulary_is_refused(
    folder: Path, demo_folder: Path, name: str, token_id: int
) -> None:
    shutil.copy(demo_folder / "config.json", folder)
    content = json.loads((folder / "config.json").read_text()) if name == "config" else {}
    (folder / f"{name}.json").write_text(json.dumps({**content, "eos_token_id": [0, token_id]}))
    with pytest.raises(CorruptCheckpoint, match=rf"eos_token_id is {token_id}; the model's tokens are 0 to 4095"):
        Tokenizer(folder)


def test_truncation_and_padding_left_in_the_file_are_ignored(folder: Path) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text())
    expected = Tokenizer(folder).encode("one two three four")
    saved["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 32}, "direction": "Right", "pad_to_multiple_of": None}
    saved["padding"] = {**padding, "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    assert Tokenizer(folder).encode("one two three four") == expected
    assert 2 < len(expected) < 32


def test_the_longest_token_may_be_an_added_one(folder: Path) -> None:
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_tokens(["<" + "long " * 100 + ">"])
    fast.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    assert tokenizer.longest_token == 502
    assert len(tokenizer.encode("<" + "long " * 100 + ">")) == 1


def test_the_longest_token_may_be_one_beyond_a_gap_of_ids(tmp_path: Path) -> None:
    FastTokenizer(models.WordLevel({"a": 0, "long": 1, "longest": 70}, "a")).save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).longest_token == 7


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path / "absent")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"version": "1.0"}'])
def test_a_broken_tokenizer_is_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"[" * 100_000])
def test_a_broken_config_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=name):
        Tokenizer(folder)


@pytest.mark.parametrize("prefix", ["##", "#######"])
def test_a_tokenizer_that_the_library_panics_at_is_refused(folder: Path, prefix: str) -> None:
    """Merges whose second part is shorter than the prefix of words' later parts. A panic is not an Exception."""
    merges = {"type": "BPE", "continuing_subword_prefix": prefix, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": merges}))
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json is not a readable tokenizer: .*(range|slice)"):
        Tokenizer(folder)


def test_a_tokenizer_that_the_library_panics_at_for_pairs_is_refused(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    unknown = {"SpecialToken": {"id": "[X]", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [first], "pair": [first, unknown, second], "special_tokens": {}}
    (folder / "tokenizer.json").write_text(json.dumps({**content, "post_processor": template}))
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_pipe_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    mkfifo(folder / name)
    with pytest.raises(CorruptCheckpoint, match=rf"{name} cannot be read: it must be a regular file"):
        Tokenizer(folder)


def test_many_threads_may_encode_and_decode(byte_level: Tokenizer) -> None:
    texts = [f"thread {index}: naïve 日本語 👧 " * 5 for index in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: byte_level.decode(byte_level.encode(text)), texts)) == texts


@pytest.mark.parametrize("declared", [{}, [[0]], True, "0", 1.5, [None]])
def test_an_end_token_id_of_another_type_is_refused(folder: Path, declared: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": declared}))
    with pytest.raises(CorruptCheckpoint, match="eos_token_id must be a token id or a list of token ids"):
        Tokenizer(folder)


def test_an_end_token_that_is_half_a_character_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}')
    with pytest.raises(CorruptCheckpoint, match=r"eos_token: .* is not a text"):
        Tokenizer(folder)


@pytest.mark.parametrize("name", ["Bác", "naïve", "<|résumé|>", "đem", "日本", "日", "<Ġ>"])
@pytest.mark.parametrize("is_special", [False, True])
def test_an_added_token_is_text_and_no_name_of_bytes(folder: Path, name: str, is_special: bool) -> None:
    """In a byte-level vocabulary é is the name of the byte E9, but not in a token that is searched for in the text."""
    content = json.loads((folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": is_special}
    content["added_tokens"].append({"id": 4096, "content": name, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(f"a{name}b é")
    assert ids[1] == 4096
    assert tokenizer.token(4096) == Token(name.encode(), is_special)
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{name}b é"
    assert tokenizer.decode(ids) == ("ab é" if is_special else f"a{name}b é")


def test_an_added_token_that_is_the_name_of_a_byte_stays_that_byte(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"].append({"id": content["model"]["vocab"]["©"], "content": "©", **flags})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("déjà")) == "déjà"


def test_entries_of_a_vocabulary_that_drops_a_space(sentencepiece: Tokenizer, word_ends: Tokenizer) -> None:
    vocabulary = sentencepiece._fast.get_vocab()
    assert sentencepiece.token(vocabulary["▁cat"]) == Token(b" cat", False, b"cat")
    assert sentencepiece.token(vocabulary["ca"]) == Token(b"ca", False, b"ca")
    assert sentencepiece.token(vocabulary["<0xE6>"]) == Token(b"\xe6", False)
    assert sentencepiece.token(vocabulary["</s>"]) == Token(b"</s>", True)
    assert [word_ends.token(each).data for each in range(4)] == [b"a", b"b", b"c", b"a"]


def test_entries_of_the_vocabulary(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("日本 naïve")
    assert b"".join(byte_level.token(token_id).data for token_id in ids) == "日本 naïve".encode()
    assert byte_level.token(0) == Token(b"<|endoftext|>", True)
    assert byte_level.token(10**6) == Token(b"", False)


def test_a_panic_of_the_library_is_a_failure_of_its_text(folder: Path) -> None:
    """The regular expression tries too many ways for the library, which panics. A panic is not an Exception."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(folder)
    for encode in (tokenizer.encode, tokenizer.encode_typed):
        with pytest.raises(GenerationFailed, match="the text could not be tokenized: Onig: Regex search error"):
            encode("a" * 40 + "!")
    assert tokenizer.decode(tokenizer.encode("aaa")) == "aaa"


def test_a_failure_to_decode_is_an_error_of_its_tokens(
    sentencepiece: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    class Broken:
        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            raise Panic("index out of bounds\nwith a backtrace")

    monkeypatch.setattr(sentencepiece, "_fast", Broken())
    with pytest.raises(GenerationFailed, match=r"^the tokens could not be turned into text: index out of bounds$"):
        sentencepiece.decode([5])
