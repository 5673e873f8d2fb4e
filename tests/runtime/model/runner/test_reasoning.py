"""Reasoning in token ids, and the tokens that a budget forces or forbids. 1 opens it, 2 closes it, 9 is white space."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from quire.runtime.model.runner import ReasoningBudget, ReasoningMarkers, find_reasoning
from quire.runtime.model.runner.reasoning import CERTAIN

from .test_sampling import rows_of, sequence

THINK = ReasoningMarkers((1,), 2, (9,))
CHANNELS = ReasoningMarkers((3, 4, 1), 2, repeats=True)  # 3 begins every message, 4 is the channel of reasoning


@pytest.mark.parametrize(
    ("markers", "output", "begun", "expected"),
    [
        (THINK, [], False, (0, False)),
        (THINK, [5, 6], False, (0, False)),
        (THINK, [1], False, (0, True)),
        (THINK, [1, 5, 6], False, (2, True)),
        (THINK, [9, 9, 1, 5], False, (1, True)),
        (THINK, [7, 1, 5, 6], False, (0, False)),  # the answer has begun
        (THINK, [1, 5, 2, 6, 1, 6, 6], False, (1, False)),
        (THINK, [], True, (0, True)),
        (THINK, [5, 9, 6], True, (3, True)),
        (THINK, [5, 2, 1, 6], True, (1, False)),
        (CHANNELS, [3, 4], False, (0, False)),
        (CHANNELS, [3, 4, 1, 5, 6], False, (2, True)),
        (CHANNELS, [3, 4, 1, 5, 2, 3, 5, 1, 6, 3, 4, 1, 8, 8], False, (3, True)),
        (CHANNELS, [3, 4, 1, 5, 2, 3, 4, 1, 8, 2], True, (5, False)),  # the open message has tokens like a beginning
    ],
)
def test_where_reasoning_is(
    markers: ReasoningMarkers, output: list[int], begun: bool, expected: tuple[int, bool]
) -> None:
    prompt = [1, 5]
    context = prompt + output
    found = find_reasoning(markers, context, 2, len(context), begun=begun)
    assert (found.num_tokens, found.is_open) == expected


@pytest.mark.parametrize(
    ("markers", "prompt", "expected"),
    [
        (THINK, (5, 1), True),
        (THINK, (5, 1, 9, 9), True),
        (THINK, (1, 2), False),
        (THINK, (1, 9, 2, 9), False),
        (THINK, (9,), False),
        (CHANNELS, (5, 3, 4, 1), True),
        (CHANNELS, (4, 1), False),
    ],
)
def test_whether_the_prompt_begins_the_reasoning(
    markers: ReasoningMarkers, prompt: tuple[int, ...], expected: bool
) -> None:
    assert markers.begins_in(prompt) is expected


@pytest.mark.parametrize(
    ("markers", "begun", "num_tokens", "output", "expected"),
    [
        (THINK, True, 0, [], {2: CERTAIN}),
        (THINK, True, 0, [2], {}),
        (THINK, True, 1, [], {}),
        (THINK, True, 1, [5], {2: CERTAIN}),
        (THINK, True, 3, [5, 6, 7, 8], {2: CERTAIN}),  # a grammar did not allow the end after three tokens
        (THINK, True, 3, [5, 2, 7, 8], {}),
        (THINK, False, 0, [], {}),
        (THINK, False, 0, [1], {2: CERTAIN}),
        (THINK, False, 2, [1, 5], {}),
        (THINK, False, 2, [9, 1, 5, 5], {2: CERTAIN}),
        (THINK, False, 2, [6, 1, 5, 5], {}),
        (CHANNELS, False, 1, [3, 4, 1, 5], {2: CERTAIN}),
        (CHANNELS, False, 1, [3, 4, 1, 5, 2, 3], {4: -inf}),
        (CHANNELS, False, 2, [3, 4, 1, 5, 2, 3], {}),
        (CHANNELS, False, 1, [3, 4, 1, 5, 2, 6], {}),
        (CHANNELS, False, 0, [3], {4: -inf}),
        (CHANNELS, False, 0, [], {}),
    ],
)
def test_what_a_budget_forces_and_forbids(
    markers: ReasoningMarkers, begun: bool, num_tokens: int, output: list[int], expected: dict[int, float]
) -> None:
    budget = ReasoningBudget(markers, num_tokens, begun)
    context = [3, 4, 1, *output, 99, 99]  # later tokens, which are draft tokens, do not count
    for settled in range(3, 4 + len(output)):  # the budget remembers what it read of the output
        assert budget.bias(context, 3, 3 + len(output), settled) == expected


def test_a_forced_end_is_drawn_without_the_other_parameters() -> None:
    """The certain token must not become infinite at a temperature near 0, nor lose to another bias."""
    params: dict[str, Any] = {
        "temperature": 1e-3,
        "top_k": 3,
        "presence_penalty": 2.0,
        "logit_bias": {2: -100.0, 8: 1.0},
    }
    budget = ReasoningBudget(THINK, 2, begun=True)
    thinking = sequence([1], [5, 6, 7], num_samples=2, reasoning=budget, **params)
    rows, changes = rows_of([thinking])
    assert [(row["temperature"], row["top_k"], row["presence_penalty"]) for row in rows] == [(0, 0, 0)] * 2
    assert {each["bias"] for each in changes if each["token_id"] == 2} == {np.float32(CERTAIN)}
    before = rows_of([sequence([1], [5], reasoning=budget, **params)])[0]
    assert [row["temperature"] for row in before] == [pytest.approx(1e-3)]
