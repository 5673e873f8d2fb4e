"""The limits of a request, each from both sides."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from quire.runtime.common.errors import ContextLengthExceeded, InvalidRequest
from quire.runtime.common.prompts import PromptImage
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import GenerateRequest
from quire.runtime.engine.validator import Validator, check_num_images

from tests.support import samples

INFO = msgspec.structs.replace(
    samples.INFO, max_model_len=50, max_num_seqs=16, page_size=16, num_pages=8, has_chat_template=True
)
VALIDATOR = Validator(INFO, max_prompt_characters=200)
IMAGES = (PromptImage(0, 1, np.zeros((1, 1, 3), np.uint8), b""),)


def check(params: SamplingParams, validator: Validator = VALIDATOR, **options: Any) -> None:
    validator.check_options(GenerateRequest(prompt=(1,), sampling_params=params, **options))


EDGES: list[tuple[str, Any, Any]] = [  # parameter, the last allowed value, the first that is not
    ("max_tokens", 1, 0),
    ("max_tokens", 50, 51),
    ("min_tokens", 0, -1),
    ("min_tokens", 20, 21),
    ("temperature", 0, -1e-9),
    ("temperature", 100, 100.001),
    ("top_k", -1, -2),
    ("top_k", 2**31 - 1, 2**31),
    ("top_p", 1e-6, 0),
    ("top_p", 1, 1.0001),
    ("min_p", 0, -0.1),
    ("min_p", 1, 1.1),
    ("repetition_penalty", 1e-6, 1e-7),
    ("repetition_penalty", 100, 101),
    ("presence_penalty", -2, -2.1),
    ("frequency_penalty", 2, 2.1),
    ("seed", 0, -1),
    ("seed", 2**64 - 1, 2**64),
    ("logprobs", 0, -1),
    ("logprobs", 20, 21),
    ("logit_bias", {99: 100.0}, {100: 1.0}),
    ("logit_bias", {0: -100.0}, {0: -100.1}),
    ("logit_bias", {}, {-1: 0.0}),
    ("stop", ("x" * 256,) * 16, ("x",) * 17),
    ("stop", (), ("",)),
    ("stop", "a", 5),
    ("stop_token_ids", (99,) * 1024, (99,) * 1025),
    ("stop_token_ids", (0,), (100,)),
    ("n", 1, 0),
    ("n", 16, 17),
    ("best_of", 1, 0),
    ("best_of", 16, 17),
    ("beam_width", 0, -1),
    ("beam_width", 16, 17),
    ("length_penalty", 10, 10.1),
    ("length_penalty", -10, float("nan")),
]


@pytest.mark.parametrize(("name", "allowed", "refused"), EDGES, ids=[f"{edge[0]}-{edge[2]!s:.12}" for edge in EDGES])
def test_limits_of_each_parameter(name: str, allowed: Any, refused: Any) -> None:
    base = SamplingParams(max_tokens=20)
    check(msgspec.structs.replace(base, **{name: allowed}))
    with pytest.raises(InvalidRequest, match=name.split("_")[0]):
        check(msgspec.structs.replace(base, **{name: refused}))


def test_a_request_has_at_most_128_outputs() -> None:
    many = Validator(msgspec.structs.replace(INFO, max_num_seqs=100_000), max_prompt_characters=200)
    check(SamplingParams(max_tokens=1, n=128), many)
    for name in ("n", "best_of", "beam_width"):
        with pytest.raises(InvalidRequest, match=name):
            check(SamplingParams(max_tokens=1, **{name: 10**9}), many)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 3, "best_of": 2, "beam_width": 0}, "best_of must be between 3 and 16, not 2"),
        ({"n": 3, "beam_width": 2}, "n must be at most beam_width 2, not 3"),
        ({"temperature": 0.5}, "temperature cannot be used with beam_width: leave it at 0, not 0.5"),
        ({"best_of": 2}, "best_of cannot be used with beam_width"),
        ({"stop": ("a",)}, "stop cannot be used with beam_width"),
        ({"logit_bias": {1: 1.0}}, "logit_bias cannot be used with beam_width"),
        ({"repetition_penalty": 1.1}, "repetition_penalty cannot be used with beam_width"),
        ({"logprobs": 1}, "logprobs must be None or 0 with beam_width, not 1"),
    ],
)
def test_parameters_that_exclude_each_other(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check(SamplingParams(**{"max_tokens": 4, "beam_width": 2, **params}))


def test_the_message_names_parameter_value_and_limits() -> None:
    with pytest.raises(InvalidRequest, match="top_p must be between 1e-06 and 1, not nan"):
        check(SamplingParams(max_tokens=1, top_p=float("nan")))


def test_max_tokens_beyond_the_context_do_not_fit() -> None:
    with pytest.raises(ContextLengthExceeded, match="max_tokens must be between 1 and 50, not 51"):
        check(SamplingParams(max_tokens=51))


def test_token_ids() -> None:
    VALIDATOR.check_token_ids((99,) * 40, max_tokens=10)
    VALIDATOR.check_token_ids((0,) * 50)
    bad = ((), (100,), (1, 100, 1), (1, -1, 1))
    for token_ids, error in (((1,) * 41, ContextLengthExceeded), *((each, InvalidRequest) for each in bad)):
        with pytest.raises(error):
            VALIDATOR.check_token_ids(token_ids, max_tokens=10)


def test_texts() -> None:
    VALIDATOR.check_text("x" * 200)
    for text, error in (("x" * 201, ContextLengthExceeded), ("", InvalidRequest), ("\ud800", InvalidRequest)):
        with pytest.raises(error):
            VALIDATOR.check_text(text)


CHAT = ({"role": "user", "content": "hi"},)


def test_a_core_without_a_tower_takes_no_images() -> None:
    """The images are refused even if the model's folder has an image processor."""
    with pytest.raises(InvalidRequest, match="this model takes no images; leave them out"):
        VALIDATOR.check_images((1,), IMAGES)
    parts = ({"role": "user", "content": [{"type": "image"}]},)
    with pytest.raises(InvalidRequest, match="messages: this model takes no images; send text parts only"):
        check_num_images(1, INFO)
    request = GenerateRequest(prompt=None, messages=parts, image_files=(b"file",))
    with pytest.raises(InvalidRequest, match="this model takes no images"):
        VALIDATOR.check_prompt(request)


@pytest.mark.parametrize(
    ("request_", "has_tokenizer", "has_chat_template", "message"),
    [
        (GenerateRequest(prompt=None), True, True, "give a prompt or messages, and not both"),
        (GenerateRequest(prompt="hi", messages=CHAT), True, True, "give a prompt or messages, and not both"),
        (GenerateRequest(prompt=""), True, True, "the prompt is empty"),
        (GenerateRequest(prompt="hi"), False, True, "no tokenizer.json; give the prompt as token ids"),
        (GenerateRequest(prompt=(1,), images=IMAGES, echo=True), True, True, "echo cannot be used with images"),
        (GenerateRequest(prompt=None, messages=CHAT), True, False, "no chat template; send a prompt"),
        (GenerateRequest(prompt=None, messages=CHAT), False, True, "no tokenizer.json; give the prompt as token ids"),
        (
            GenerateRequest(prompt=(1,), sampling_params=SamplingParams(stop=("x",))),
            False,
            False,
            "stop: strings cannot be found without a tokenizer.json; use stop_token_ids",
        ),
    ],
)
def test_prompts(request_: GenerateRequest, has_tokenizer: bool, has_chat_template: bool, message: str) -> None:
    info = msgspec.structs.replace(INFO, has_tokenizer=has_tokenizer, has_chat_template=has_chat_template)
    with pytest.raises(InvalidRequest, match=message):
        Validator(info, max_prompt_characters=200).check_prompt(request_)
    for fine in (GenerateRequest(prompt="hi"), GenerateRequest(prompt=None, messages=CHAT)):
        VALIDATOR.check_prompt(fine)
    Validator(info, max_prompt_characters=0).check_prompt(GenerateRequest(prompt=(1,)))


@pytest.mark.parametrize(
    ("priority", "deadline_ms", "pin_ms"),
    [
        (10**6 + 1, None, None),
        (0, 0, None),
        (0, 7 * 24 * 3600 * 1000 + 1, None),
        (0, None, -1),
        (0, None, 24 * 3600 * 1000 + 1),
    ],
)
def test_priority_deadline_and_pin(priority: int, deadline_ms: int | None, pin_ms: int | None) -> None:
    params = SamplingParams(max_tokens=1)
    check(params, priority=-(10**6), deadline_ms=7 * 24 * 3600 * 1000, pin_ms=24 * 3600 * 1000)
    with pytest.raises(InvalidRequest):
        check(params, priority=priority, deadline_ms=deadline_ms, pin_ms=pin_ms)
