"""The sampler's rows for a request's parameters: changed logits, and the position of the random number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quire.kernels.sample import ROW
from quire.runtime.common.types import SamplingParams
from quire.runtime.model.runner import ReasoningBudget
from quire.runtime.model.runner.sampling import PARAMETERS, SamplingSpec, sampling_rows
from quire.scheduler import ScheduledSequence


def sequence(
    prompt: list[int],
    output: list[int],
    stops: tuple[int, ...] = (),
    num_samples: int = 1,
    reasoning: ReasoningBudget | None = None,
    **params: Any,
) -> ScheduledSequence:
    context = prompt + output
    spec = SamplingSpec(SamplingParams(**params), seed=77, stop_token_ids=frozenset(stops), reasoning=reasoning)
    first = len(context) - max(1, num_samples)
    return ScheduledSequence(1, [[0]], first, context[first:], num_samples, spec, context, len(prompt))


def rows_of(sequences: Sequence[ScheduledSequence]) -> tuple[Any, Any]:
    """Return rows and adjustments of sequences without masks."""
    return sampling_rows(sequences, {})


def adjustments(*sequences: ScheduledSequence) -> list[tuple[int, int, int, float]]:
    """Return (token id, count in the output, occurs at all, bias) of every adjustment."""
    return [tuple(row.item()) for row in rows_of(sequences)[1]]


def test_plain_sampling_adjusts_nothing() -> None:
    rows, changes = rows_of([sequence([1, 2], [3], temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)])
    assert len(changes) == 0
    (row,) = rows
    assert (row["seed"], row["position"]) == (77, 3)
    assert (row["temperature"], row["top_p"], row["min_p"], row["top_k"]) == (0.5, 0.25, 0.125, 7)
    assert (row["logprobs"], row["num_adjustments"]) == (-1, 0)


def test_the_random_number_depends_on_the_position_only() -> None:
    """A replayed request draws the same number, although more of its tokens are its prompt."""
    rows, _ = rows_of([sequence([1, 2, 3], []), sequence([1], [2, 3])])
    assert rows[0]["position"] == rows[1]["position"] == 3


def test_each_row_points_at_its_own_adjustments() -> None:
    rows, changes = rows_of(
        [sequence([1], [], logit_bias={5: 1.0, 6: -1.0}), sequence([1], []), sequence([1], [], logit_bias={7: 2.0})]
    )
    assert [(row["first_adjustment"], row["num_adjustments"]) for row in rows] == [(0, 2), (2, 0), (2, 1)]
    assert changes["token_id"].tolist() == [5, 6, 7]


def test_every_sample_is_drawn_as_if_no_draft_token_followed() -> None:
    """Rows that verify draft tokens have the penalties, forbidden tokens and random number of their own prefix."""
    params: dict[str, Any] = {"presence_penalty": 0.5, "repetition_penalty": 1.5, "min_tokens": 3, "stops": (0,)}
    rows, changes = rows_of([sequence([1], [], num_samples=0), sequence([1, 2], [3, 3, 4], num_samples=3, **params)])
    alone = [rows_of([sequence([1, 2], output, **params)]) for output in ([3], [3, 3], [3, 3, 4])]
    assert rows["position"].tolist() == [3, 4, 5]
    for row, (expected, expected_changes) in zip(rows, alone, strict=True):
        own = changes[row["first_adjustment"] : row["first_adjustment"] + row["num_adjustments"]]
        assert own.tolist() == expected_changes.tolist()
        assert (row["position"], row["seed"]) == (expected[0]["position"], expected[0]["seed"])


def test_bias_without_penalties_counts_no_tokens() -> None:
    assert adjustments(sequence([5, 5], [5], logit_bias={5: 1.5})) == [(5, 0, 0, 1.5)]


def test_presence_and_frequency_count_the_output_only() -> None:
    asked = sequence([1, 2], [3, 3, 4], presence_penalty=0.5)
    assert adjustments(asked) == [(3, 2, 1, 0.0), (4, 1, 1, 0.0)]
    assert adjustments(sequence([1, 2], [], frequency_penalty=0.5)) == []


def test_repetition_counts_prompt_and_output() -> None:
    asked = sequence([2, 1, 1], [3, 3], repetition_penalty=1.5)
    assert adjustments(asked) == [(1, 0, 1, 0.0), (2, 0, 1, 0.0), (3, 2, 1, 0.0)]


def test_penalties_and_bias_of_a_token_are_one_adjustment() -> None:
    asked = sequence([1], [3], frequency_penalty=0.1, logit_bias={3: 2.0, 9: -2.0})
    assert adjustments(asked) == [(3, 1, 1, 2.0), (9, 0, 0, -2.0)]


def test_stop_tokens_are_forbidden_until_min_tokens() -> None:
    for output, forbidden in (([], True), ([5], True), ([5, 6], False)):
        changes = adjustments(sequence([1], output, stops=(0,), min_tokens=2))
        assert changes == ([(0, 0, 0, -math.inf)] if forbidden else [])


def test_no_bias_makes_a_forbidden_token_likely() -> None:
    assert adjustments(sequence([1], [], stops=(0,), min_tokens=1, logit_bias={0: 100.0})) == [(0, 0, 0, -math.inf)]


def test_logprobs_asked_for() -> None:
    rows, _ = rows_of([sequence([1], [], logprobs=None), sequence([1], [], logprobs=0), sequence([1], [], logprobs=5)])
    assert rows["logprobs"].tolist() == [-1, 0, 5]


def test_the_row_of_the_kernels_is_the_only_list_of_parameters() -> None:
    assert ROW.names == ("seed", "position", *PARAMETERS, "logprobs", "first_adjustment", "num_adjustments", "mask")
    assert set(PARAMETERS) <= set(SamplingParams.__struct_fields__)
    values = {name: 0.25 + index for index, name in enumerate(PARAMETERS)} | {"top_k": 7}
    rows, _ = rows_of([sequence([1, 2], [3], **values)])
    assert {name: rows[name][0] for name in PARAMETERS} == values


def test_an_echoed_token_is_certain_and_what_follows_is_as_without_echo() -> None:
    params: dict[str, Any] = {
        "temperature": 0.5,
        "presence_penalty": 0.5,
        "min_tokens": 2,
        "stops": (0,),
        "logprobs": 3,
    }
    echo = sequence([1], [8, 9, 4], num_samples=4, **params)._replace(echoed=(8, 9))
    rows, changes = rows_of([echo])
    assert rows["temperature"].tolist() == [0, 0, 0.5, 0.5]
    assert rows["logprobs"].tolist() == [3] * 4
    assert [tuple(row.item())[:3] for row in changes[:2]] == [(8, 0, 0), (9, 0, 0)]
    assert min(changes["bias"][:2]) >= 1e30
    plain_rows, plain_changes = rows_of([sequence([1, 8, 9], [4], num_samples=2, **params)])
    assert changes[2:].tolist() == plain_changes.tolist()
    assert rows["position"][2:].tolist() == plain_rows["position"].tolist()


def test_every_sample_of_a_masked_sequence_has_its_own_mask() -> None:
    """A row with mask 0 has no mask; masks count from 1."""
    masked = sequence([1], [2, 3, 4], num_samples=3)._replace(request_id=7)
    rows, _ = sampling_rows([sequence([1], []), masked], {7: 4})
    assert rows["mask"].tolist() == [0, 5, 6, 7]
