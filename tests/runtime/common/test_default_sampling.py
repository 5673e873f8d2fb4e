"""Defaults of sampling: how a model's recommendation and the way of a request decide them."""

from __future__ import annotations

import pytest
from quire import SamplingParams
from quire.runtime.common.default_sampling import http_sampling, page_sampling


def test_a_native_request_takes_the_most_likely_token_unless_it_asks_for_another() -> None:
    assert SamplingParams().temperature == 0.0


@pytest.mark.parametrize(
    ("recommended", "http", "page"),
    [
        ({}, {"temperature": 1.0}, {"temperature": 0.8, "min_p": 0.05}),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}, {}),
        ({"top_p": 0.95}, {"temperature": 1.0, "top_p": 0.95}, {}),
        ({"min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}, {}),
        (
            {"repetition_penalty": 1.1},
            {"temperature": 1.0, "repetition_penalty": 1.1},
            {"temperature": 0.8, "min_p": 0.05},
        ),
    ],
    ids=["nothing", "temperature", "top p alone", "min p alone", "a penalty alone"],
)
def test_a_recommendation_has_precedence_over_the_defaults(
    recommended: dict[str, float], http: dict[str, float], page: dict[str, float]
) -> None:
    assert http_sampling(recommended) == http
    assert page_sampling(recommended) == page
