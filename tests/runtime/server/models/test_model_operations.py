"""Operators load, unload and pin models over HTTP."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from quire.runtime.server.models.residency import Residency, Resident
from quire.runtime.server.monitoring.model_operations import ModelOperations


def operations() -> tuple[Residency, ModelOperations]:
    not_opened: Any = None
    residency = Residency([Resident("org/a:q8", 5, not_opened), Resident("b", 7, not_opened)], 10)
    return residency, ModelOperations(residency)


async def test_the_models_are_listed_with_their_states() -> None:
    _, models = operations()
    shown = msgspec.to_builtins(models.status())
    assert (shown["memory_bytes"], shown["used_bytes"]) == (10, 0)
    assert [(each["name"], each["state"], each["memory_bytes"]) for each in shown["models"]] == [
        ("org/a:q8", "unloaded", 5),
        ("b", "unloaded", 7),
    ]


async def test_an_action_changes_the_model_of_its_path() -> None:
    residency, models = operations()
    outcome = models.act("/models/org%2Fa%3Aq8/load", None)
    assert (outcome.status_code, outcome.is_json) == (202, True)
    assert msgspec.json.decode(outcome.content)["models"][0]["state"] == "waiting"
    assert models.act("/models/b/pin", None).status_code == 202
    assert residency.residents["b"].is_pinned
    assert models.act("/models/b/unpin", None).status_code == 202
    assert not residency.residents["b"].is_pinned


@pytest.mark.parametrize(
    ("path", "origin", "status", "text"),
    [
        ("/models/b/drop", None, 404, "not found; the actions are load, unload, pin, unpin"),
        ("/models/b", None, 404, "not found; the actions are"),
        ("/models/c/load", None, 404, "no model 'c'; the models are org/a:q8, b"),
        ("/models/b/load", b"https://example.com", 403, "pages of browsers may not change models"),
    ],
)
async def test_other_requests_change_nothing(path: str, origin: bytes | None, status: int, text: str) -> None:
    residency, models = operations()
    outcome = models.act(path, origin)
    assert (outcome.status_code, outcome.is_json) == (status, False)
    assert text in outcome.content.decode()
    assert {each.state for each in residency.statuses()} == {"unloaded"}
