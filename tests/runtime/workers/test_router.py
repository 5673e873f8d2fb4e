"""Requests go to the engine that computed their prompt's beginning, unless it has too many requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from quire.runtime.workers.router import LOAD_SLACK, Router

PAGE_SIZE = 16
SYSTEM_PROMPT = tuple(range(100, 100 + 4 * PAGE_SIZE))


def choose(router: Router, prompt: Sequence[int], *loads: int, tenant: str = "") -> int:
    """Choose an engine where engine 0 has loads[0] requests, and so on."""
    return router.choose(tenant, prompt, dict(enumerate(loads)))


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    router = Router(3, PAGE_SIZE)
    assert choose(router, (*SYSTEM_PROMPT, 1, 2), 5, 0, 3) == 1
    assert choose(router, (*SYSTEM_PROMPT, 7, 8), 0, 5, 3) == 1


def test_other_prompts_go_to_the_least_loaded_engine() -> None:
    router = Router(3, PAGE_SIZE)
    choose(router, SYSTEM_PROMPT, 0, 0, 0)
    assert choose(router, tuple(range(64)), 2, 1, 3) == 1
    assert choose(router, SYSTEM_PROMPT, 2, 3, 1, tenant="other") == 2, "tenants share no pages"
    assert choose(router, (5,) * (PAGE_SIZE - 1), 4, 1, 1) == 1, "less than a page"


def test_a_prompt_does_not_go_where_too_many_requests_are() -> None:
    router = Router(2, PAGE_SIZE)
    assert choose(router, SYSTEM_PROMPT, 0, 1) == 0
    assert choose(router, SYSTEM_PROMPT, LOAD_SLACK, 0) == 0
    assert choose(router, SYSTEM_PROMPT, LOAD_SLACK + 1, 0) == 1


def test_only_the_engines_that_are_offered_are_chosen() -> None:
    router = Router(3, PAGE_SIZE)
    assert router.choose("", SYSTEM_PROMPT, {1: 9, 2: 5}) == 2
    assert router.choose("", SYSTEM_PROMPT, {0: 5, 1: 9}) == 0


def test_a_restarted_engine_has_no_prompt() -> None:
    router = Router(2, PAGE_SIZE)
    choose(router, SYSTEM_PROMPT, 0, 1)
    router.forget(0)
    assert choose(router, SYSTEM_PROMPT, 1, 0) == 1


def test_the_engine_with_the_longest_part_of_the_prompt_is_chosen() -> None:
    router = Router(2, PAGE_SIZE)
    choose(router, SYSTEM_PROMPT[:PAGE_SIZE], 0, 1)
    choose(router, SYSTEM_PROMPT, 9 + LOAD_SLACK, 1)
    assert choose(router, SYSTEM_PROMPT, 0, 2) == 1


def test_the_oldest_keys_are_forgotten_and_the_newest_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runtime.workers.router.MAX_KEYS", 4)
    router = Router(2, PAGE_SIZE)
    old, kept, new = [tuple(range(start, start + 2 * PAGE_SIZE)) for start in (1000, 2000, 3000)]
    for prompt in (old, kept, new):
        assert choose(router, prompt, 0, 1) == 0
    assert choose(router, new, 1, 0) == 0
    assert choose(router, kept, 1, 0) == 0
    assert choose(router, old, 1, 0) == 1


def test_a_prompt_that_is_used_again_is_kept_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runtime.workers.router.MAX_KEYS", 4)
    router = Router(2, PAGE_SIZE)
    used, idle, new = [tuple(range(start, start + 2 * PAGE_SIZE)) for start in (1000, 2000, 3000)]
    for prompt in (used, idle, used, new):
        assert choose(router, prompt, 0, 1) == 0
    assert choose(router, used, 1, 0) == 0
    assert choose(router, idle, 1, 0) == 1
