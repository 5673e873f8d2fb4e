"""Structured output with tokenizers that change a text before they encode it: the text matches the grammar."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.types import SamplingParams, StructuredOutputs
from quire.runtime.engine.error_mapping import failure_error, grammar_fault
from quire.runtime.engine.structured.grammar_vocabulary import load_tables
from quire.runtime.engine.structured.grammars import grammar_of
from quire.runtime.engine.text.tokenizer import Tokenizer
from quire.runtime.engine.text_processor import TextProcessor
from quire.runtime.model import BUNDLED_MODEL

from tests.support.changed_tokenizers import CHANGES, model_with


@pytest.fixture(scope="module", params=CHANGES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with(CHANGES[request.param], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tables(folder: Path) -> LLTokenizer:
    return load_tables(folder)


@pytest.fixture(scope="module")
def processor(folder: Path) -> TextProcessor:
    return TextProcessor(Tokenizer(folder), None)


def generated(tables: LLTokenizer, processor: TextProcessor, structure: StructuredOutputs, seed: int) -> str:
    """Return the text of random tokens that the grammar allows; short ones, so that texts end."""
    choose = random.Random(seed)
    matcher = LLMatcher(tables, grammar_of(structure), log_level=0)
    token_ids: list[int] = []
    while not matcher.is_stopped() and len(token_ids) < 300:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()[:200]
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        choices = [each for each in allowed if tables.decode_bytes([each]).strip()] or allowed
        token_ids.append(choose.choice(choices))
        assert matcher.consume_token(token_ids[-1]), matcher.get_error()[:200]
    detokenizer = processor.detokenizer(SamplingParams(structured_outputs=structure))
    assert detokenizer is not None
    return detokenizer.push(token_ids) + detokenizer.finish()


YES_NO = ("yes", "no")
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "boolean", "const": True}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        (StructuredOutputs(choice=YES_NO), "yes|no"),
        (StructuredOutputs(choice=(" yes", " no")), " yes| no"),
        (StructuredOutputs(regex="yes-[0-9]{2}-a"), "yes-[0-9]{2}-a"),
        (StructuredOutputs(json={"enum": ["yes", "no"]}), r'\s*"(yes|no)"\s*'),
        (StructuredOutputs(json=OBJECT), r'\s*\{\s*"a"\s*:\s*true\s*\}\s*'),
        (StructuredOutputs(gbnf='root ::= "yes" | "no" "s"'), "yes|nos"),
        (StructuredOutputs(lark='start: "yes" "s"? | "no"'), "yess?|no"),
    ],
    ids=["choice", "choice with a space", "regex", "enum", "object", "gbnf", "lark"],
)
def test_the_text_is_one_that_the_grammar_allows(
    tables: LLTokenizer, processor: TextProcessor, structure: StructuredOutputs, pattern: str
) -> None:
    for seed in range(2):
        text = generated(tables, processor, structure, seed)
        assert re.fullmatch(pattern, text), ascii(text)


TEXTS = ["cafe\u0301", "\uf900", "\u212b", "ﬁ", "Yes", "NO", " a", "  {", "a ", "\n", "é", "日本", "<|endoftext|>"]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_of_a_forced_text_have_its_bytes(tables: LLTokenizer, text: str) -> None:
    """Where the vocabulary has no token for a byte of the text, the ids end before it."""
    data = text.encode()
    found = tables.decode_bytes(tables.tokenize_str(text))
    assert data.startswith(found)
    known = {tables.decode_bytes([token_id]) for token_id in range(tables.vocab_size)}
    if all(data[at : at + 1] in known for at in range(len(data))):
        assert found == data


def test_a_text_with_a_token_that_the_model_does_not_have_is_read_with_others(
    tmp_path: Path,
) -> None:
    """The tokenizer has more ids than the model has logits."""
    whole = Tokenizer(BUNDLED_MODEL)
    text = "Return the number of queues."
    token_ids = whole.encode(text)
    model_with(dict.copy, tmp_path)
    config = json.loads((BUNDLED_MODEL / "config.json").read_text()) | {"vocab_size": max(token_ids)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_tables(tmp_path).tokenize_str(text)
    assert max(found) < max(token_ids)
    assert whole.decode(found) == text


def test_a_text_that_the_tokenizer_fails_at_is_read_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panic(self: Tokenizer, text: str, **options: bool) -> list[int]:
        raise Panic

    tables = load_tables(BUNDLED_MODEL)
    monkeypatch.setattr(Tokenizer, "encode", panic)
    assert tables.decode_bytes(tables.tokenize_str("return a queue")) == b"return a queue"


def test_an_end_token_that_is_not_called_special_is_no_text(tmp_path: Path) -> None:
    tables = load_tables(model_with(lambda content: content["added_tokens"][0].update(special=False), tmp_path))
    matcher = LLMatcher(tables, grammar_of(StructuredOutputs(choice=("<|endoftext|>",))), log_level=0)
    assert not matcher.compute_bitmask()[0] & 1, "the output would end before its text"
    assert 0 not in tables.tokenize_str("<|endoftext|>")


def test_a_grammar_that_no_token_can_follow_is_the_requests_fault() -> None:
    class OnlyA:
        bos_token_id = None
        eos_token_id = 1
        tokens = (b"a", b"</s>")
        special_token_ids = (1,)

        def __call__(self, text: str) -> list[int]:
            return [0] * text.count("a")

    tables = LLTokenizer(TokenizerWrapper(OnlyA()))
    matcher = LLMatcher(tables, LLMatcher.grammar_from_regex("b"), log_level=0)
    matcher.compute_bitmask()
    reason = grammar_fault(matcher.get_error())
    assert reason == "structured_outputs: no token of the model's vocabulary begins the text that must follow"
    assert type(failure_error(reason, None)) is InvalidRequest
