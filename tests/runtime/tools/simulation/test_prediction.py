"""The predicted speed of a shape: which steps are counted."""

from __future__ import annotations

import pytest
from quire.runtime.tools.bench import Shape
from quire.runtime.tools.simulation import predict_speed
from quire.runtime.tools.simulation.cost import SEQUENCE_S
from quire.scheduler import StepPlan

Chunks = list[tuple[int, int, int]]  # rows of one step: first position, rows, samples


@pytest.mark.parametrize(
    ("shape", "prefill"),
    [
        (Shape(1, 64), [[(0, 64, 1)]]),
        (Shape(1, 65), [[(0, 64, 0)], [(64, 1, 1)]]),
        (Shape(3, 40), [[(0, 40, 1), (0, 24, 0)], [(24, 16, 1), (0, 40, 1)]]),
    ],
)
def test_prompts_share_steps_and_all_users_decode(shape: Shape, prefill: list[Chunks]) -> None:
    steps: list[Chunks] = []

    def cost(plan: StepPlan) -> float:
        steps.append([(each.first_position, len(each.token_ids), each.num_samples) for each in plan.sequences])
        return 1.0

    speed = predict_speed(cost, shape, 64)
    assert steps == [*prefill, [(shape.prompt_tokens + 16, 1, 1)] * shape.batch]
    assert speed.first_token_s == pytest.approx(len(prefill) + sum(map(len, prefill)) * SEQUENCE_S)
    assert speed.tokens_per_s == pytest.approx(shape.batch / (1 + shape.batch * SEQUENCE_S))
