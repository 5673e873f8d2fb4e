"""Requests go where their beginning was computed, unless that engine is too busy."""

from __future__ import annotations

import pytest
from quire.runtime.workers.router import SLACK, Router

PAGE = 16
SYSTEM_PROMPT = tuple(range(100, 100 + 4 * PAGE))


def test_a_known_beginning_draws_to_it() -> None:
    router = Router(3, PAGE)
    assert router.choose("", (*SYSTEM_PROMPT, 1, 2), [5, 0, 3]) == 1
    assert router.choose("", (*SYSTEM_PROMPT, 7, 8), [0, 5, 3]) == 1


def test_strangers_go_to_the_idlest() -> None:
    router = Router(3, PAGE)
    router.choose("", SYSTEM_PROMPT, [0, 0, 0])
    assert router.choose("", tuple(range(64)), [2, 1, 3]) == 1
    assert router.choose("somebody else", SYSTEM_PROMPT, [2, 3, 1]) == 2, "tenants share no pages"
    assert router.choose("", (5,) * (PAGE - 1), [4, 1, 1]) == 1, "less than a page"


def test_not_where_too_much_waits() -> None:
    router = Router(2, PAGE)
    assert router.choose("", SYSTEM_PROMPT, [0, 1]) == 0
    assert router.choose("", SYSTEM_PROMPT, [SLACK, 0]) == 0
    assert router.choose("", SYSTEM_PROMPT, [SLACK + 1, 0]) == 1


def test_a_restarted_engine_knows_nothing() -> None:
    router = Router(2, PAGE)
    router.choose("", SYSTEM_PROMPT, [0, 1])
    router.forget(0)
    assert router.choose("", SYSTEM_PROMPT, [1, 0]) == 1


def test_the_longest_known_part_wins() -> None:
    router = Router(2, PAGE)
    router.choose("", SYSTEM_PROMPT[:PAGE], [0, 1])
    router.choose("", SYSTEM_PROMPT, [9 + SLACK, 1])
    assert router.choose("", SYSTEM_PROMPT, [0, 2]) == 1


def test_the_oldest_entries_are_forgotten_and_the_newest_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runtime.workers.router.REMEMBERED_PAGES", 4)
    router = Router(2, PAGE)
    old, kept, new = [tuple(range(start, start + 2 * PAGE)) for start in (1000, 2000, 3000)]
    for prompt in (old, kept, new):
        assert router.choose("", prompt, [0, 1]) == 0
    assert router.choose("", new, [1, 0]) == 0
    assert router.choose("", kept, [1, 0]) == 0
    assert router.choose("", old, [1, 0]) == 1


def test_a_prompt_that_is_used_again_is_kept_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.runtime.workers.router.REMEMBERED_PAGES", 4)
    router = Router(2, PAGE)
    used, idle, new = [tuple(range(start, start + 2 * PAGE)) for start in (1000, 2000, 3000)]
    for prompt in (used, idle, used, new):
        assert router.choose("", prompt, [0, 1]) == 0
    assert router.choose("", used, [1, 0]) == 0
    assert router.choose("", idle, [1, 0]) == 1
