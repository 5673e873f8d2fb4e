"""Texts and pairs of texts as encoders take them, compared with sentence-transformers' own tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.errors import InvalidRequest, UnsupportedModel
from quire.runtime.engine.embedding.encoder_text import QWEN3_PAIR, EncoderText
from quire.runtime.model.encoder import read_encoder
from quire.scheduler import EncodedText

FOLDER = Path(__file__).parents[3] / "goldens" / "encoders"
NAMES = sorted(path.name for path in FOLDER.iterdir())
PAIR = ("What OWNS it?", "The pool owns the pages.")
TEMPLATE = (FOLDER / "qwen3_answer" / "chat_template.jinja").read_text()
QUERY = (327, 329, 225, 51, 59, 50, 55, 225, 77, 88, 35)  # tokens of PAIR, by the tokenizer of qwen3_answer
DOCUMENT = (326, 275, 83, 83, 80, 311, 267, 316, 18)
POOL = (1, 84, 83, 83, 80, 2)  # "pool", by the tokenizer of modernbert
PROMPT = (42, 77, 269, 225, 77, 88)  # "Find it"


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """Copy a golden folder with a chat template and edits of JSON files: `copied("bert", "{{ x }}", config={…})`."""

    def copy(name: str, template: str | None = None, **files: dict[str, Any] | None) -> Path:
        folder = tmp_path / name
        shutil.copytree(FOLDER / name, folder)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        for stem, edits in files.items():
            path = folder / f"{stem}.json"
            if edits is None:
                path.unlink()
                continue
            content = json.loads(path.read_text()) | edits
            path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
        return folder

    return copy


def open_text(folder: Path) -> EncoderText:
    return EncoderText(folder, read_encoder(folder))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_types_are_those_of_sentence_transformers(name: str) -> None:
    golden = json.loads((FOLDER / name / "golden.json").read_text())
    texts = open_text(FOLDER / name)
    prompts = read_encoder(FOLDER / name).prompts
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
def test_texts_are_lower_cased_where_the_folder_says_so(copied: Callable[..., Path], limit: dict[str, int]) -> None:
    texts = open_text(copied("xlm_roberta", sentence_bert_config={**limit, "do_lower_case": True}))
    plain = open_text(FOLDER / "xlm_roberta")
    assert texts.encode("THE POOL") == plain.encode("the pool")
    assert texts.encode("THE POOL", "FIND: ") == plain.encode("find: the pool")
    assert texts.encode_pair("THE POOL", "OWNS PAGES") == plain.encode_pair("the pool", "owns pages")
    ids = (0, 4, 6, 50, 11, 20, 4, 9, 6, 10, 8, 4, 2, 4, 33, 3, 4, 3, 11, 62, 2)  # </s>, 2, is not lower-cased
    assert texts.encode("What OWNS </s> ÉÀ 中a?").token_ids == ids


def test_without_modules_the_first_ones_settings_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "roberta"
    shutil.copytree(FOLDER / "roberta", folder)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": true}')
    assert read_encoder(folder) == read_encoder(FOLDER / "roberta")


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({}, (2, 132, 48, 49, 112, 1, 1, 34, 1, 21, 48, 1, 17, 16, 3)),
        ({"do_lower_case": False}, (2, 1, 1, 1, 1, 34, 1, 1, 1, 17, 16, 3)),
        ({"strip_accents": False}, (2, 132, 48, 49, 112, 1, 1, 34, 1, 1, 1, 17, 16, 3)),
        ({"tokenize_chinese_chars": False}, (2, 132, 48, 49, 112, 1, 1, 34, 1, 21, 48, 1, 16, 3)),
        (
            {"tokenizer_class": "TokenizersBackend", "do_lower_case": False},
            (2, 132, 48, 49, 112, 1, 1, 34, 1, 21, 48, 1, 17, 16, 3),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["BertTokenizer", "BertTokenizerFast", ...])
def test_settings_of_berts_tokenizer_class_replace_those_of_the_file(
    copied: Callable[..., Path], name: Any, settings: dict[str, Any], ids: tuple[int, ...]
) -> None:
    folder = copied("bert", tokenizer_config={"tokenizer_class": name, **settings})
    assert open_text(folder).encode("What OWNS </s> ÉÀ 中a?").token_ids == ids


def test_a_setting_of_the_tokenizer_class_must_be_a_flag(copied: Callable[..., Path]) -> None:
    folder = copied("bert", tokenizer_config={"tokenizer_class": "BertTokenizer", "do_lower_case": "no"})
    with pytest.raises(
        UnsupportedModel, match=r"tokenizer_config.json: do_lower_case is \"no\"; it must be true or fal"
    ):
        open_text(folder)


@pytest.mark.parametrize("prefix", [True, False, ...])
def test_a_space_before_texts_is_as_robertas_tokenizer_class_says(copied: Callable[..., Path], prefix: Any) -> None:
    names = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": prefix}
    folder = copied("roberta", tokenizer_config=names, config={"pad_token_id": 0})
    shutil.copy(FOLDER / "modernbert" / "tokenizer.json", folder)  # a tokenizer of byte pairs
    assert open_text(folder).encode("pool").token_ids == ((1, 275, 83, 83, 80, 2) if prefix is True else POOL)
    ignored = copied("modernbert", tokenizer_config=names)
    assert open_text(ignored).encode("pool").token_ids == POOL


@pytest.mark.parametrize(
    ("edits", "has_types"),
    [
        ({}, True),
        ({"model_input_names": ["input_ids", "attention_mask"]}, False),
        ({"model_input_names": ...}, False),
        ({"model_input_names": ..., "tokenizer_class": ...}, True),
        ({"model_input_names": ..., "tokenizer_class": "BertTokenizerFast"}, True),
        ({"model_input_names": ..., "tokenizer_class": "PreTrainedTokenizerFast"}, False),
    ],
    ids=str,
)
def test_all_types_are_0_where_the_tokenizer_gives_none_to_the_model(
    copied: Callable[..., Path], edits: dict[str, Any], has_types: bool
) -> None:
    texts = open_text(copied("bert_scores", tokenizer_config=edits))
    ids = (2, 132, 43, 54, 111, 25, 54, 16, 3, 75, 156, 111, 75, 107, 6, 3)
    assert texts.encode_pair(*PAIR) == EncodedText(ids, (0,) * 9 + (1,) * 7 if has_types else None)


# Templates for pairs


def test_the_default_prompt_is_a_system_message(copied: Callable[..., Path]) -> None:
    show = "{{ messages | selectattr('role', 'eq', 'ROLE') | map(attribute='content') | first }}"
    source = "".join(f"<d>{show.replace('ROLE', role)}" for role in ("system", "query", "document"))
    settings = {"prompts": {"web": "Find it"}, "default_prompt_name": "web"}
    texts = open_text(copied("qwen3_answer", source, config_sentence_transformers=settings))
    assert texts.encode_pair(*PAIR) == EncodedText((4, *PROMPT, 4, *QUERY, 4, *DOCUMENT))


def test_the_default_prompt_is_before_a_query_that_the_tokenizer_joins(copied: Callable[..., Path]) -> None:
    settings = {"prompts": {"web": "Find it: "}, "default_prompt_name": "web"}
    texts = open_text(copied("bert_scores", config_sentence_transformers=settings))
    ids = (2, 22, 60, 140, 25, 54, 1, 132, 43, 54, 111, 25, 54, 16, 3, 75, 156, 111, 75, 107, 6, 3)
    assert texts.encode_pair(*PAIR) == EncodedText(ids, (0,) * 15 + (1,) * 7)


@pytest.mark.parametrize(
    ("more", "variables", "ids"),
    [
        ("{% if add_generation_prompt %}<d>{% endif %}", {}, ()),
        ("{% if add_generation_prompt %}<d>{% endif %}", {"add_generation_prompt": True}, (4,)),
        ("{{ x }}", {"x": "pool", "restore_suffix": True}, (84, 83, 83, 80)),
    ],
)
def test_a_template_has_the_variables_of_the_folder(
    copied: Callable[..., Path], more: str, variables: dict[str, Any], ids: tuple[int, ...]
) -> None:
    settings = {"processing_kwargs": {"chat_template": variables}}
    texts = open_text(copied("qwen3_answer", TEMPLATE + more, sentence_bert_config=settings))
    assert texts.encode_pair(*PAIR) == EncodedText((1, *QUERY, 225, 4, 225, *DOCUMENT, 2, *ids))


@pytest.mark.parametrize("form", ["auto", "structured"])
def test_a_template_may_read_parts(copied: Callable[..., Path], form: str) -> None:
    source = "{% for m in messages %}<d>{{ m.content[0].text }}{% endfor %}"
    message = {"method": "forward", "method_output_name": "logits", "format": form}
    texts = open_text(
        copied(
            "qwen3_answer",
            source,
            sentence_bert_config={"modality_config": {"message": message}},
            config_sentence_transformers={"prompts": {"web": "Find it"}, "default_prompt_name": "web"},
        )
    )
    assert texts.encode_pair(*PAIR) == EncodedText((4, *PROMPT, 4, *QUERY, 4, *DOCUMENT))


def test_texts_that_are_not_made_messages_are_joined(copied: Callable[..., Path]) -> None:
    modalities = {"text": {"method": "forward", "method_output_name": ["logits"]}}
    texts = open_text(copied("qwen3_answer", sentence_bert_config={"modality_config": modalities}))
    assert texts.encode_pair(*PAIR) == EncodedText(QUERY + DOCUMENT)


def test_a_template_is_used_for_pairs_of_any_encoder_without_modules(copied: Callable[..., Path]) -> None:
    source = "{% for m in messages %}{{ cls_token }}{{ m.content }}{{ sep_token }}{% endfor %}"
    folder = copied("bert_scores", source)
    with_modules = open_text(folder).encode_pair(*PAIR)
    assert with_modules == open_text(FOLDER / "bert_scores").encode_pair(*PAIR)
    (folder / "modules.json").unlink()
    ids = (2, 132, 43, 54, 111, 25, 54, 16, 3, 2, 75, 156, 111, 75, 107, 6, 3)
    texts = open_text(folder)
    assert texts.encode_pair(*PAIR) == EncodedText(ids)
    assert texts.encode("it").token_ids == (2, 25, 54, 3)  # a text to classify


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages[0].content }}", "the chat template has no place for the document"),
        ("{{ messages[1].content }}", "the chat template has no place for the query"),
        ("{{ raise_exception('no roles') }}", "the chat template refused these messages: no roles"),
    ],
)
def test_a_template_without_a_place_for_pairs(copied: Callable[..., Path], source: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"a model that answers must have a chat template for pairs: {reason}"):
        open_text(copied("qwen3_answer", source))
    texts = open_text(copied("bert_scores", source, modules=None))
    with pytest.raises(InvalidRequest, match=f"this model scores no pairs of texts: {reason}"):
        texts.encode_pair(*PAIR)
    whole = texts.encode("What owns it?")
    assert texts.truncated(whole, 4).token_ids == (*whole.token_ids[:3], 3)


def test_a_vector_model_that_would_make_chats_of_texts_is_refused(copied: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModel, match="makes a chat of each text where there is a chat template"):
        open_text(copied("bert", "{{ messages[0].content }}", modules=None))


# Padding tokens in texts


def test_a_decoders_classifier_pools_the_last_token_that_is_no_padding(copied: Callable[..., Path]) -> None:
    texts = open_text(copied("qwen3_scores", config={"pad_token_id": 2}))
    ids = open_text(FOLDER / "qwen3_scores").encode("What owns it?").token_ids
    assert texts.encode("What owns it?</s></s>").token_ids == ids
    assert texts.encode("</s>a").token_ids == (2, 69)
    assert texts.encode("</s></s>").token_ids == (2,)
    assert texts.truncated(EncodedText((5, 2, 2, 6)), 3).token_ids == (5,)
    texts._spec = replace(texts._spec, causal=False)
    with pytest.raises(InvalidRequest, match="must not have the padding token '</s>' in this place: it would not be p"):
        texts.encode("a</s>")


def test_the_padding_token_of_a_folder_without_one_is_that_of_its_family(copied: Callable[..., Path]) -> None:
    assert read_encoder(FOLDER / "qwen3_scores").pad_token_id == 0
    assert read_encoder(copied("qwen3_scores", config={"pad_token_id": ...})).pad_token_id is None
    assert read_encoder(FOLDER / "qwen3_answer").pad_token_id is None


@pytest.mark.parametrize("name", ["roberta", "mpnet", "xlm_roberta_scores"])
def test_padding_tokens_are_refused_where_they_have_no_position(name: str) -> None:
    texts = open_text(FOLDER / name)
    with pytest.raises(InvalidRequest, match="must not have the padding token '<pad>' in this place: it has no positi"):
        texts.encode("a <pad> b")
    with pytest.raises(InvalidRequest, match="padding token"):
        texts.encode_pair("a", "b<pad>")
    assert open_text(FOLDER / "bert").encode("a [PAD]").token_ids == (2, 17, 0, 3)


def test_qwen3_rerankers_without_a_template_for_pairs(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3_answer"
    shutil.copytree(FOLDER / "qwen3_answer", folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")  # has no place for the document
    tokenizer: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    (folder / "sentence_bert_config.json").unlink()
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
    settings = {"prompts": {"web": "Find it"}, "default_prompt_name": "web"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match="default_prompt_name must be null where the chat template has no place"):
        open_text(folder)
