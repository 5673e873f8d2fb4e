"""The limits of a request, each from both sides."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from quire.runtime.common.errors import ContextLengthExceeded, InvalidRequest
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine.validator import RequestLimits, Validator

VALIDATOR = Validator(RequestLimits(vocab_size=100, max_model_len=50, max_prompt_characters=200, max_num_seqs=16))

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
    ("stop", ["a"], "a"),
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
    VALIDATOR.check_params(msgspec.structs.replace(base, **{name: allowed}))
    with pytest.raises(InvalidRequest, match=name.split("_")[0]):
        VALIDATOR.check_params(msgspec.structs.replace(base, **{name: refused}))


def test_a_request_has_at_most_128_outputs() -> None:
    roomy = Validator(RequestLimits(vocab_size=100, max_model_len=50, max_prompt_characters=200, max_num_seqs=100_000))
    roomy.check_params(SamplingParams(max_tokens=1, n=128))
    for name in ("n", "best_of", "beam_width"):
        with pytest.raises(InvalidRequest, match=name):
            roomy.check_params(SamplingParams(max_tokens=1, **{name: 10**9}))


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
        VALIDATOR.check_params(SamplingParams(**{"max_tokens": 4, "beam_width": 2, **params}))


def test_the_message_names_parameter_value_and_limits() -> None:
    with pytest.raises(InvalidRequest, match="top_p must be between 1e-06 and 1, not nan"):
        VALIDATOR.check_params(SamplingParams(max_tokens=1, top_p=float("nan")))


def test_prompts() -> None:
    params = SamplingParams(max_tokens=10)
    VALIDATOR.check_prompt((99,) * 40, params)
    for token_ids, error in (((1,) * 41, ContextLengthExceeded), ((), InvalidRequest), ((100,), InvalidRequest)):
        with pytest.raises(error):
            VALIDATOR.check_prompt(token_ids, params)


def test_texts_are_refused_before_they_are_tokenized() -> None:
    VALIDATOR.check_text("x" * 200)
    for text, error in (("x" * 201, ContextLengthExceeded), ("", InvalidRequest), ("\ud800", InvalidRequest)):
        with pytest.raises(error):
            VALIDATOR.check_text(text)


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
def test_schedules(priority: int, deadline_ms: int | None, pin_ms: int | None) -> None:
    VALIDATOR.check_schedule(-(10**6), 7 * 24 * 3600 * 1000, 24 * 3600 * 1000)
    with pytest.raises(InvalidRequest):
        VALIDATOR.check_schedule(priority, deadline_ms, pin_ms)
