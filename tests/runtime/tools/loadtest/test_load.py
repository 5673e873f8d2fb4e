"""Datasets and the loads made of them: requests depend on options and seed only, and malformed files are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.engine.text.tokenizer import Tokenizer
from quire.runtime.model import BUNDLED_MODEL
from quire.runtime.tools.loadtest.load import PreparedLoad, PromptVocabulary, make_load
from quire.runtime.tools.loadtest.options import ClientBehavior, DatasetOptions, LoadOptions, Pacing
from quire.runtime.tools.loadtest.records import LoadRequest

DATA = Path(__file__).parents[3] / "data"


def load(
    pacing: Pacing | None = None,
    behavior: ClientBehavior | None = None,
    vocabulary: PromptVocabulary | None = None,
    **dataset: Any,
) -> PreparedLoad:
    options = LoadOptions(
        dataset=DatasetOptions(**dataset), pacing=pacing or Pacing(), behavior=behavior or ClientBehavior()
    )
    return make_load(options, vocabulary or PromptVocabulary(100))


def requests(*arguments: Any, **options: Any) -> list[LoadRequest]:
    return list(load(*arguments, **options).requests)


@pytest.fixture(scope="module")
def text_vocabulary() -> PromptVocabulary:
    tokenizer = Tokenizer(BUNDLED_MODEL)
    return PromptVocabulary(tokenizer.vocab_size, lambda text: len(tokenizer.encode(text)), tokenizer.decode)


# Synthetic datasets


def test_random_prompts_stay_within_lengths_and_vocabulary() -> None:
    found = requests(
        num_prompts=200, random_input_len=10, random_output_len=20, random_range_ratio=0.25, random_prefix_len=3
    )
    assert len({request.prompt[:3] for request in found}) == 1
    assert len({request.prompt for request in found}) == 200
    assert (
        {len(request.prompt) for request in found} == {request.prompt_tokens for request in found} == set(range(10, 17))
    )
    assert {request.max_tokens for request in found} == set(range(15, 26))
    counts = Counter(token for request in found for token in request.prompt[3:])
    assert set(counts) == set(range(100))


def test_requests_depend_on_the_seed_and_not_on_their_number() -> None:
    few = requests(num_prompts=3)
    more = requests(num_prompts=9)
    assert few == more[:3]
    assert few != requests(num_prompts=3, seed=1)


def test_prefixes_are_repeated_equally_often() -> None:
    found = requests(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_prefix_len=8,
        prefix_repetition_suffix_len=4,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_output_len=5,
    )
    assert sorted(Counter(request.prompt[:8] for request in found).values()) == [4, 4, 4]
    assert len({request.prompt[8:] for request in found}) == 12
    assert {(len(request.prompt), request.max_tokens) for request in found} == {(12, 5)}


# Text datasets


def test_sharegpt(text_vocabulary: PromptVocabulary) -> None:
    found = requests(
        None, None, text_vocabulary, dataset_name="sharegpt", dataset_path=DATA / "sharegpt.json", num_prompts=9,
        disable_shuffle=True, no_oversample=True,
    )  # fmt: skip
    assert [request.prompt for request in found] == [
        "How do I sort a list in Python?",
        "Explain what a thread-safe queue is for.",  # `Hi` is too short, as in vLLM
    ]
    assert text_vocabulary.count_tokens is not None
    assert found[0].max_tokens == text_vocabulary.count_tokens("Call its sort method, or sorted() for a new list.")
    assert found[0].prompt_tokens == text_vocabulary.count_tokens("How do I sort a list in Python?")


def test_sharegpt_without_a_tokenizer_needs_an_output_length() -> None:
    with pytest.raises(ConfigError, match="`tokenizer` FOLDER"):
        load(dataset_name="sharegpt", dataset_path=DATA / "sharegpt.json")
    found = requests(dataset_name="sharegpt", dataset_path=DATA / "sharegpt.json", sharegpt_output_len=7, num_prompts=6)
    assert len(found) == 6  # three conversations, twice
    assert {(request.prompt_tokens, request.max_tokens) for request in found} == {(0, 7)}


def test_custom_prompts() -> None:
    path = DATA / "custom.jsonl"
    found = requests(dataset_name="custom", dataset_path=path, num_prompts=3, disable_shuffle=True)
    assert [(request.prompt, request.max_tokens) for request in found] == [
        ("What is the capital of India?", 256),
        ("Name three rivers.", 12),
        ("Why is the sky blue?", 256),
    ]
    shuffled = requests(dataset_name="custom", dataset_path=path, num_prompts=3, custom_output_len=4, seed=3)
    assert {request.prompt for request in shuffled} == {request.prompt for request in found}
    assert {request.max_tokens for request in shuffled} == {4}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("custom", "", "has no usable requests"),
        ("custom", '{"prompt": "a"}\nnonsense\n', "line 2: JSON is malformed"),
        ("custom", '\n{"text": "a"}\n', "line 2: Object missing required field `prompt`"),
        ("custom", '{"prompt": ""}\n', r"line 1: Expected `str` of length >= 1 - at `\$.prompt`"),
        ("custom", '{"prompt": "a", "output_tokens": 0}\n', r"line 1: Expected `int` >= 1 - at `\$.output_tokens`"),
        ("sharegpt", "[]", "has no usable requests"),
        ("sharegpt", '[{"conversations": [{"value": "only"}]}]', "has no usable requests"),
        ("sharegpt", '{"conversations": []}', "is not ShareGPT's JSON: Expected `array`, got `object`"),
        ("sharegpt", '[{"conversations": [{"value": 5}]}]', r"Expected `str`, got `int` - at `\$\[0\].conversations"),
        ("sharegpt", "[" * 100_000, "is not ShareGPT's JSON"),
        ("sharegpt", '[{"conversations"', "is not ShareGPT's JSON: Input data was truncated"),
    ],
)
def test_malformed_files_are_refused(name: Any, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.json.*{message}"):
        load(dataset_name=name, dataset_path=path, sharegpt_output_len=4)


def test_a_missing_file_is_refused() -> None:
    for name in ("custom", "sharegpt", "mooncake", "azure", "burstgpt"):
        with pytest.raises(ConfigError, match="missing cannot be read"):
            load(dataset_name=name, dataset_path=Path("missing"), sharegpt_output_len=4)


def test_a_chat_gets_the_text_of_random_tokens(text_vocabulary: PromptVocabulary) -> None:
    (request,) = requests(None, None, replace(text_vocabulary, only_text=True), num_prompts=1, random_input_len=5)
    assert isinstance(request.prompt, str)
    with pytest.raises(ConfigError, match="`tokenizer` FOLDER"):
        load(None, None, PromptVocabulary(100, only_text=True), num_prompts=1)


# Traces


def test_a_trace_is_sent_at_the_recorded_times() -> None:
    found = load(dataset_name="mooncake", dataset_path=DATA / "mooncake.jsonl")
    first, second, third = found.requests
    assert found.times == [0.0, 0.5, 0.5]
    assert [len(request.prompt) for request in (first, second, third)] == [1024, 1100, 600]
    assert second.prompt[:1024] == first.prompt  # equal hash ids
    assert third.prompt[:512] != first.prompt[:512]
    assert [request.max_tokens for request in (first, second, third)] == [2, 1, 3]


def test_a_trace_can_be_rescaled_cut_off_and_sent_at_other_times() -> None:
    burstgpt = {"dataset_name": "burstgpt", "dataset_path": DATA / "burstgpt.csv"}
    assert load(**burstgpt).times == [0.0, 40.0, 113.5]
    assert load(Pacing(request_rate=2), **burstgpt).times == pytest.approx([0.0, 0.352, 1.0], abs=1e-3)
    assert load(Pacing(duration=100), **burstgpt).times == [0.0, 40.0]
    found = load(Pacing(request_rate=2, self_timed=False), **burstgpt)
    assert found.times is not None
    assert found.times[-1] == pytest.approx(3 / 2)
    assert len(requests(Pacing(self_timed=False), dataset_name="azure", dataset_path=DATA / "azure.csv")) == 3


# Closed loops, behavior, warm-up


def test_a_closed_loop_has_no_times_and_with_a_duration_no_end() -> None:
    counted = load(Pacing(max_concurrency=2), num_prompts=5)
    assert (counted.times, len(list(counted.requests))) == (None, 5)
    endless = load(Pacing(max_concurrency=2, duration=1), random_input_len=4)
    assert len(list(islice(endless.requests, 3000))) == 3000


def test_the_default_is_a_thousand_requests() -> None:
    assert len(requests(random_input_len=1)) == 1000


def test_clients_cancel_and_read_slowly_at_their_rates() -> None:
    found = requests(None, ClientBehavior(cancel_rate=0.3, slow_reader_rate=0.1, slow_reader_ms=50), random_input_len=1)
    cancelled = [request.cancel_after for request in found if request.cancel_after is not None]
    assert len(cancelled) / 1000 == pytest.approx(0.3, abs=0.05)
    assert min(cancelled) >= 1
    assert max(cancelled) < 128
    assert sum(request.pause_s == 0.05 for request in found) / 1000 == pytest.approx(0.1, abs=0.03)


def test_warmups_are_not_part_of_the_load() -> None:
    found = load(Pacing(num_warmups=3), num_prompts=5)
    sent = list(found.requests)
    prompts = {request.prompt for request in found.warmups}
    assert len(prompts) == 3
    assert prompts.isdisjoint(request.prompt for request in sent)
    assert sent == requests(num_prompts=5)
    assert len(load(Pacing(), num_prompts=5).warmups) == 1


def test_a_warmup_of_text_leaves_no_prompt_in_the_prefix_cache() -> None:
    found = load(dataset_name="sharegpt", dataset_path=DATA / "sharegpt.json", sharegpt_output_len=7, num_prompts=2)
    (warmup,) = found.warmups
    (first, *_) = list(found.requests)
    assert warmup.prompt != first.prompt
    assert sorted(warmup.prompt.split()) == sorted(first.prompt.split())
    assert warmup.max_tokens == first.max_tokens


@pytest.mark.parametrize(
    ("pacing", "behavior", "dataset", "message"),
    [
        ({}, {"cancel_rate": 1.5}, {}, "cancel_rate must be between"),
        ({}, {"slow_reader_rate": -1}, {}, "slow_reader_rate must be between"),
        ({}, {"slow_reader_ms": 0}, {}, "slow_reader_ms must be between"),
        ({"self_timed": True}, {}, {}, "self_timed is for recorded traces"),
        ({}, {}, {"num_prompts": 0}, "num_prompts must be between"),
        ({}, {}, {"seed": -1}, "seed must be between"),
        ({}, {}, {"dataset_path": Path("x")}, "is synthetic and reads no file"),
        ({}, {}, {"dataset_name": "custom"}, "needs dataset_path FILE"),
        ({}, {}, {"random_range_ratio": 1}, "random_range_ratio must be from 0 to below 1"),
        ({}, {}, {"random_input_len": 0}, "allow for empty prompts"),
        ({}, {}, {"random_output_len": 0}, "random_output_len must be between"),
        ({"request_rate": 1e-6, "duration": 1}, {}, {}, "is over before the first request"),
    ],
)
def test_invalid_options_are_refused(
    pacing: dict[str, Any], behavior: dict[str, Any], dataset: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(Pacing(**pacing), ClientBehavior(**behavior), **dataset)
