"""`SamplingParams` refuses values of other types, and unknown names, when it is made."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from quire import SamplingParams, StructuredOutputs
from quire.runtime.common.errors import InvalidRequest


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"max_tokens": "5"}, "max_tokens must be a whole number, not '5'"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, not 1.5"),
        ({"max_tokens": None}, "max_tokens must be a whole number, not None"),
        ({"n": True}, "n must be a whole number, not True"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"stop": 5}, "stop must be a list of texts, not 5"),
        ({"stop": [5]}, r"stop must be a list of texts, not \[5\]"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids must be a list of whole numbers, not \['a'\]"),
        ({"logit_bias": {"a": 1}}, "logit_bias must be a map of whole numbers to numbers or None, not {'a': 1}"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false, not 'yes'"),
        ({"seed": 0.5}, "seed must be a whole number or None, not 0.5"),
    ],
)
def test_a_value_of_another_type_is_refused(values: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{fault}$"):
        SamplingParams(**values)


def test_lists_and_numpys_types_become_pythons() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop=["a"],  # type: ignore[arg-type]
        stop_token_ids=np.array([5, 6]),  # type: ignore[arg-type]
        logit_bias={np.int32(3): np.float32(1)},  # type: ignore[dict-item]
    )
    assert msgspec.to_builtins(params) == msgspec.to_builtins(
        SamplingParams(max_tokens=3, temperature=0.5, stop=("a",), stop_token_ids=(5, 6), logit_bias={3: 1.0})
    )
    assert type(params.max_tokens) is int
    assert isinstance(params.stop, tuple)


def test_one_stop_text_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]


def test_replacing_a_field_checks_it() -> None:
    with pytest.raises(InvalidRequest, match="n must be a whole number"):
        msgspec.structs.replace(SamplingParams(), n="2")


@pytest.mark.parametrize(
    ("name", "right"), [("max_token", "max_tokens"), ("max_new_tokens", "max_tokens"), ("num_beams", "beam_width")]
)
def test_an_unknown_name_is_a_type_error_that_names_the_right_one(name: str, right: str) -> None:
    with pytest.raises(TypeError, match=rf"no field '{name}' \(did you mean '{right}'\?\); the fields are max_tokens,"):
        SamplingParams(**{name: 3})  # type: ignore[arg-type]


def test_a_list_of_choices_is_kept_as_a_tuple() -> None:
    """Structures are keys of compiled grammars."""
    assert len({StructuredOutputs(choice=["a", "b"]), StructuredOutputs(choice=("a", "b"))}) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"choice": "ab"}, "choice must be a list of texts, not 'ab'"),
        ({"choice": (1,)}, r"choice must be a list of texts, not \(1,\)"),
        ({"choice": []}, "choice must not be empty"),
        ({"regex": 5}, "regex must be a text, not 5"),
        ({"lark": ["start: A"]}, "lark must be a text, not "),
        ({"gbnf": b"root"}, "gbnf must be a text, not "),
        ({"json_object": 1}, "json_object must be true or false, not 1"),
    ],
)
def test_a_structure_of_another_type_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StructuredOutputs(**fields)
