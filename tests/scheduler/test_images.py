"""Images in prompts: which rows have which image, and which pages prompts with images share. Pages hold 4 tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from quire.scheduler import Coefficients, CostModel, LatencyBudget, PlacedImage, StepPlan

PROMPT = [*range(2), 9, 9, 9, 9, *range(6, 8), 9, 9, 9, 9, *range(12, 15), 9, 9, 9, 9, 19]


def image(position: int, name: bytes = b"cat", tokens: int = 4) -> PlacedImage:
    return PlacedImage(position, tokens, name * 10, 1, 1, bytes(3))


CATS = (image(2), image(8), image(15))


def chunks(plan: StepPlan | None) -> list[tuple[int, int, int, list[int]]]:
    """Return id, first position, end and the positions of the images of each sequence."""
    assert plan is not None
    return [
        (row.request_id, row.first_position, row.first_position + len(row.token_ids), [i.position for i in row.images])
        for row in plan.sequences
    ]


def test_a_step_has_tokens_of_one_image_at_most(make_harness: Any) -> None:
    harness = make_harness()
    harness.add(1, PROMPT, max_tokens=2, images=CATS)
    assert chunks(harness.step()) == [(1, 0, 8, [2])]
    assert chunks(harness.step()) == [(1, 8, 15, [8])]
    assert chunks(harness.step()) == [(1, 15, 20, [15])]
    assert chunks(harness.step()) == [(1, 20, 21, [])]
    assert harness.ended == {1: "length"}


def test_requests_share_that_image(make_harness: Any) -> None:
    """While one request computes an image, others stop before theirs; a prompt without images continues."""
    harness = make_harness()
    harness.add(1, PROMPT, max_tokens=1, images=CATS[:1])
    harness.add(2, [3, *PROMPT], max_tokens=1, images=(image(3),))
    harness.add(3, PROMPT[6:8], max_tokens=1)
    assert chunks(harness.step()) == [(1, 0, 20, [2]), (2, 0, 3, []), (3, 0, 2, [])]
    assert chunks(harness.step()) == [(2, 3, 21, [3])]


def test_an_image_across_chunks_is_part_of_each(make_harness: Any) -> None:
    harness = make_harness(max_chunk=3)
    harness.add(1, PROMPT[:9], max_tokens=1, images=CATS[:1], tenant="a", cache_salt="b")
    assert chunks(harness.step()) == [(1, 0, 3, [2])]
    assert chunks(harness.step()) == [(1, 3, 6, [2])]
    assert chunks(plan := harness.step()) == [(1, 6, 9, [])]
    assert [row.salt for row in plan.sequences] == [b""]


def test_rows_with_images_have_the_salt_that_their_pages_have(make_harness: Any) -> None:
    harness = make_harness()
    harness.add(1, PROMPT[:9], max_tokens=1, images=CATS[:1], tenant="a", cache_salt="b")
    assert [row.salt for row in harness.step().sequences] == [b"a\0b"]


def test_a_row_names_all_that_its_computation_depends_on(make_harness: Any) -> None:
    harness = make_harness(max_chunk=6)
    sampling = object()
    harness.add(1, PROMPT[:9], max_tokens=4, images=CATS[:1], tenant="a", sampling=sampling, echoed=(5, 6))
    (row,) = harness.scheduler.schedule().sequences
    assert row._asdict() | {"tables": [list(row.tables[0])]} == {
        "request_id": 1,
        "tables": [[0, 1]],
        "first_position": 0,
        "token_ids": PROMPT[:6],
        "num_samples": 0,
        "sampling": sampling,
        "context": PROMPT[:9],
        "num_prompt_tokens": 9,
        "echoed": (5, 6),
        "images": CATS[:1],
        "salt": b"a",
        "prompt_images": CATS[:1],
        "state": -1,
    }


@pytest.mark.parametrize(
    ("images", "cached"),
    [
        (CATS, 16),
        ((image(2, b"dog"), *CATS[1:]), 0),
        ((CATS[0], image(8, b"dog"), CATS[2]), 8),
        (CATS[:2], 12),
        ((), 0),
    ],
)
def test_prompts_share_the_pages_before_the_first_other_image(make_harness: Any, images: Any, cached: int) -> None:
    harness = make_harness(num_pages=32)
    harness.add(1, PROMPT, max_tokens=1, images=CATS)
    harness.run()
    harness.add(2, PROMPT, max_tokens=1, images=images)
    harness.run()
    assert harness.requests[2].cached_tokens == cached
    assert harness.outputs[1] == harness.outputs[2]


@pytest.mark.parametrize("store_slots", [0, 16])
def test_a_preempted_request_computes_its_images_again_unless_its_pages_are_spilled(
    make_harness: Any, store_slots: int
) -> None:
    harness = make_harness(num_pages=8, store_slots=store_slots, enable_prefix_caching=False)
    harness.add(1, [1, 2, 3], max_tokens=25)
    harness.add(2, PROMPT[:8], max_tokens=20, images=CATS[:1])
    seen = []
    while (plan := harness.step()) is not None:
        seen += [row.images[0].position for row in plan.sequences if row.images]
    assert harness.requests[2].preemptions
    assert seen == ([2] if store_slots else [2] * (1 + harness.requests[2].preemptions))


def test_forks_and_beams_keep_the_images_of_their_parent(make_harness: Any, expected: Any) -> None:
    harness = make_harness(num_pages=64)
    harness.add_forks((1, 2), PROMPT, max_tokens=4, images=CATS)
    harness.run()
    assert harness.outputs[1] == harness.outputs[2] == expected(PROMPT, 4)
    tokens = [*PROMPT, *harness.outputs[1]]
    harness.add(3, tokens, max_tokens=1, images=CATS)
    harness.add(4, tokens, max_tokens=1)
    harness.run()
    assert (harness.requests[3].cached_tokens, harness.requests[4].cached_tokens) == (20, 0)


def test_pins_find_the_pages_of_their_own_images(make_harness: Any) -> None:
    harness = make_harness(num_pages=32)
    harness.add(1, PROMPT, max_tokens=1, images=CATS, pin_s=10.0)
    harness.run()
    assert harness.scheduler.stats().pages_pinned == 5


# Images that take several steps


def step_without(harness: Any, *deferred: int) -> StepPlan:
    """Run a step in which the images of these requests are not done."""
    plan = harness.scheduler.schedule()
    result = replace(harness.execute(plan), deferred=frozenset(deferred))
    harness._noted(harness.scheduler.commit(result))
    return plan


def test_a_sequence_waits_for_its_image_while_others_decode(make_harness: Any, expected: Any) -> None:
    harness = make_harness(num_pages=32)
    harness.add(1, [1, 2, 3], max_tokens=6)
    harness.step()
    harness.add(2, PROMPT[:9], max_tokens=2, images=CATS[:1])
    for end in (4, 5):
        plan = step_without(harness, 2)
        assert chunks(plan) == [(1, end - 1, end, []), (2, 0, 9, [2])]
        assert plan.images_s > 0
        assert harness.requests[2].num_computed_tokens == harness.requests[2].table.num_tokens == 0
    assert chunks(harness.step())[1] == (2, 0, 9, [2])
    assert harness.step().images_s == 0
    harness.run()
    assert (harness.outputs[1], harness.outputs[2]) == (expected([1, 2, 3], 6), expected(PROMPT[:9], 2))


def test_a_chunk_that_samples_is_deferred_too(make_harness: Any, expected: Any) -> None:
    harness = make_harness()
    harness.add(1, PROMPT[:7], max_tokens=2, images=CATS[:1])
    step_without(harness, 1)
    assert (harness.outputs[1], harness.pager.pool.num_owned) == ([], 0)
    harness.run()
    assert harness.outputs[1] == expected(PROMPT[:7], 2)


def test_a_request_may_be_cancelled_while_its_image_is_computed(make_harness: Any) -> None:
    harness = make_harness()
    harness.add(1, PROMPT[:7], max_tokens=2, images=CATS[:1])
    plan = harness.scheduler.schedule()
    assert harness.cancel(1) is None
    harness._noted(harness.scheduler.commit(replace(harness.execute(plan), deferred=frozenset({1}))))
    assert harness.ended == {1: "cancelled"}
    assert harness.pager.pool.num_owned == 0


def test_costs_are_not_learned_from_steps_that_deferred_sequences(make_harness: Any) -> None:
    harness = make_harness(cost=(cost := CostModel()))
    harness.step_s = 9.0
    harness.add(1, PROMPT[:9], max_tokens=2, images=CATS[:1])
    before = cost.coefficients
    step_without(harness, 1)
    assert cost.coefficients == before
    harness.step()
    assert cost.coefficients != before


@pytest.mark.parametrize(("target_s", "allowed"), [(None, 1.0), (10.0, (9 - 1) / 2), (1.12, 1 / 9)])
def test_an_image_gets_the_time_that_decoding_leaves(make_harness: Any, target_s: float | None, allowed: float) -> None:
    """Decoding takes 1 s. Without a target the image gets 1 s, too; with a target, half of the remaining time or a
    tenth of the step."""
    cost = CostModel(Coefficients(1.0, 0, 0, 0, 0))
    budget = None if target_s is None else LatencyBudget(cost, target_s, 32)
    harness = make_harness(num_pages=32, cost=cost, budget=budget)
    harness.add(1, [1, 2, 3], max_tokens=6)
    harness.step()
    harness.add(2, PROMPT[:9], max_tokens=2, images=CATS[:1])
    assert harness.scheduler.schedule().images_s == pytest.approx(allowed)


def test_an_image_alone_leaves_room_for_requests_that_arrive(make_harness: Any) -> None:
    harness = make_harness()
    harness.add(1, PROMPT[:9], max_tokens=2, images=CATS[:1])
    assert harness.scheduler.schedule().images_s == 0.05


def test_restored_pages_are_found_by_prompts_with_the_same_images_only(make_harness: Any) -> None:
    harness = make_harness(num_pages=8, store_slots=16)
    harness.add(1, [1, 2, 3], max_tokens=25)
    harness.add(2, PROMPT[:8], max_tokens=20, images=CATS[:1])
    harness.run()
    assert harness.requests[2].preemptions
    harness.add(3, [*PROMPT[:8], 1], max_tokens=1)
    harness.run()
    assert harness.requests[3].cached_tokens == 0


# Images whose tokens see each other


def test_a_chunk_ends_inside_no_image(make_harness: Any, expected: Any) -> None:
    harness = make_harness(max_chunk=3, whole_images=True)
    harness.add(1, PROMPT, max_tokens=2, images=CATS)
    borders = [0, 2, 6, 8, 12, 15, 19, 20]
    for first, end in pairwise(borders):
        assert [each[:3] for each in chunks(harness.step())] == [(1, first, end)]
    harness.run()
    assert harness.outputs[1] == expected(PROMPT, 2)


def test_an_image_waits_for_rows(make_harness: Any) -> None:
    harness = make_harness(max_num_batched_tokens=8, max_num_seqs=4, whole_images=True)
    harness.add(1, [1] * 6, max_tokens=2)
    harness.add(2, PROMPT[2:8], max_tokens=1, images=(image(0),))
    assert chunks(harness.step()) == [(1, 0, 6, [])]
    assert chunks(harness.step()) == [(1, 6, 7, []), (2, 0, 6, [0])]


def test_the_rest_of_an_image_follows_its_cached_pages(make_harness: Any) -> None:
    harness = make_harness(max_chunk=1, whole_images=True)
    harness.add(1, PROMPT, max_tokens=1, images=CATS)
    harness.run()
    harness.add(2, PROMPT[:7], max_tokens=1, images=CATS[:1])
    assert chunks(harness.step()) == [(2, 4, 6, [2])]
    assert chunks(harness.step()) == [(2, 6, 7, [])]


def test_an_image_may_take_longer_than_the_latency_target(make_harness: Any) -> None:
    """A token takes 1 s, and a step has 16 prefill tokens: the image's 20 tokens are nevertheless computed during
    decoding."""
    cost = CostModel(Coefficients(0, 0, 1.0, 0, 0))
    harness = make_harness(num_pages=32, cost=cost, budget=LatencyBudget(cost, 1.0, 32), whole_images=True)
    harness.add(1, [1, 2, 3], max_tokens=6)
    harness.step()
    harness.add(2, [1, 2, *[9] * 20, 3], max_tokens=1, images=(image(2, tokens=20),))
    assert chunks(harness.step()) == [(1, 3, 4, []), (2, 0, 2, [])]
    assert chunks(harness.step()) == [(1, 4, 5, []), (2, 2, 22, [2])]


def test_the_oldest_request_gets_pages_for_a_whole_image(make_harness: Any, expected: Any) -> None:
    """Other requests decode while its text is computed one token at a time, until no page is left."""
    harness = make_harness(num_pages=12, max_chunk=1, whole_images=True, enable_prefix_caching=False)
    prompt = [*range(12), *[9] * 8, 3]
    harness.add(1, prompt, max_tokens=2, images=(image(12, tokens=8),))
    for other in (2, 3, 4):
        harness.add(other, [other], max_tokens=20)
    for end in range(1, 13):
        assert (1, end - 1, end, []) in chunks(harness.step())
    assert harness.pager.pool.num_available < 2
    assert (1, 12, 20, [12]) in chunks(harness.step())
    harness.run()
    assert harness.outputs[1] == expected(prompt, 2)


@pytest.mark.parametrize("seed", range(12))
def test_images_are_whole_under_any_load(make_harness: Any, expected: Any, seed: int) -> None:
    """Few pages and rows, preempted requests with and without spilled pages, and pages that leave a window."""
    random = Random(seed)
    harness = make_harness(
        num_pages=24,
        max_num_batched_tokens=10,
        max_num_seqs=6,
        max_chunk=random.choice([None, 1, 3]),
        windows=random.choice([(0,), (0, 5)]),
        store_slots=random.choice([0, 16]),
        enable_prefix_caching=random.choice([True, False]),
        whole_images=True,
    )
    prompts = {}
    for number in range(1, 9):
        first = random.randrange(3)
        prompts[number] = PROMPT[first:]
        images = tuple(each._replace(position=each.position - first) for each in CATS)
        harness.add(number, prompts[number], max_tokens=12, images=images)
    while (plan := harness.step()) is not None:
        for row in plan.sequences:
            end = row.first_position + len(row.token_ids)
            assert all(each.end <= end for each in row.images), chunks(plan)
    assert harness.outputs == {number: expected(prompt, 12) for number, prompt in prompts.items()}
