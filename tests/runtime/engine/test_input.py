"""The size of a request's text, which limits what waits to be tokenized."""

from __future__ import annotations

import pytest
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine.facade import MAX_COUNTED, GenerateRequest
from quire.runtime.engine.input import fitted, scheduled_requests
from quire.scheduler import RequestSpec


def test_the_bytes_of_a_prompt_and_of_messages() -> None:
    assert 1000 < GenerateRequest(prompt="x" * 1000).text_bytes() < 1200
    parts = ({"role": "user", "content": [{"type": "text", "text": "é" * 1000}]},)
    assert 1000 < GenerateRequest(prompt=None, messages=parts).text_bytes() < 3000
    assert GenerateRequest(prompt=(1, 2)).text_bytes() == 0, "nothing is to be tokenized"


def test_counting_the_bytes_of_hostile_messages_is_bounded() -> None:
    """A list of a million numbers is counted by its own size, without a visit to each number."""
    visited = 0

    class Counted(int):
        def __sizeof__(self) -> int:
            nonlocal visited
            visited += 1
            return 32

    messages = ({"role": "user", "content": [Counted()] * 100_000},)
    assert GenerateRequest(prompt=None, messages=messages).text_bytes() > 800_000
    assert visited < MAX_COUNTED


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "room", "fitted_tokens"), [(9, 0, 20, 9), (9, 0, 5, 5), (9, 7, 5, 7), (9, 0, -3, 1)]
)
def test_max_tokens_fit_the_context(max_tokens: int, min_tokens: int, room: int, fitted_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    request = fitted(GenerateRequest(prompt="x", sampling_params=params), room)
    assert request.sampling_params.max_tokens == fitted_tokens


def test_an_echoed_prompt_is_output_after_its_first_token() -> None:
    def scheduled(prompt: tuple[int, ...], max_tokens: int) -> RequestSpec:
        request = GenerateRequest(prompt=prompt, sampling_params=SamplingParams(max_tokens=max_tokens), echo=True)
        (made,) = scheduled_requests(request, prompt, first_id=1, seed=0, eos_token_ids=frozenset({0}), submitted=0.0)
        return made.spec

    spec = scheduled((5, 6, 7), 4)
    assert (spec.prompt_token_ids, spec.echoed, spec.max_tokens) == ((5,), (6, 7), 6)
    assert scheduled((5, 6), 0).max_tokens == 1
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1"):
        scheduled((5,), 0)
