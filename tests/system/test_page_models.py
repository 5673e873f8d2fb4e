"""The chat page of a server with several models, in headless Chromium: each conversation has one of them."""

from __future__ import annotations

import pytest
from quire.runtime.engine.facade import AdapterStatus

from tests.support.waiting import until

from .chromium import ALT, OpenTab, Tab, needs_chromium
from .conftest import FakeEngine
from .test_chat_page import IS_DONE, PLACEHOLDERS, ask
from .test_models import loaded, models

pytestmark = needs_chromium

NAMES = "[...document.getElementById('models').options].map((each) => each.text)"
LOOK = "document.dispatchEvent(new Event('visibilitychange'))"
PICKED = "document.getElementById('models').value"


async def pick(tab: Tab, name: str) -> None:
    """Pick a model from the list as the reader does."""
    await tab.until("!document.getElementById('models').hidden")
    await tab.evaluate(f"(document.getElementById('models').value = {name!r}, 0)")
    await tab.evaluate("document.getElementById('models').dispatchEvent(new Event('change'))")


async def test_each_conversation_has_its_model(open_tab: OpenTab) -> None:
    async with models() as system:
        tab = await open_tab(system.server.openai_address)
        await pick(tab, "sql")
        assert await tab.evaluate(NAMES) == ["big", "small", "sql", "gpt-4o-mini"]
        assert not await tab.evaluate("document.getElementById('model').checkVisibility()")
        await ask(tab, "one")
        await tab.until(IS_DONE)
        await tab.press("n", ALT)
        assert await tab.evaluate(PICKED) == "sql", "a new conversation begins with a copy of the settings"
        await pick(tab, "big")
        await ask(tab, "two")
        await tab.until(IS_DONE)
        await tab.press("ArrowDown", ALT)
        assert await tab.evaluate(PICKED) == "sql"
        await tab.reload()
        await tab.until("!document.getElementById('models').hidden")
        assert await tab.evaluate(PICKED) == "big"
        assert [request.lora for request in system.small.requests] == ["sql"]
        assert len(system.big.requests) == 1


async def test_each_model_is_asked_with_its_own_sampling(open_tab: OpenTab) -> None:
    async with models() as system:
        tab = await open_tab(system.server.openai_address)
        shown = []
        for name in ("big", "small"):
            await pick(tab, name)
            shown.append(await tab.evaluate(f"({PLACEHOLDERS})('temperature', 'min_p')"))
            await ask(tab, "one")
            await tab.until(IS_DONE)
        assert shown == [["0.8", "0.05"], ["0.25", ""]]
        params = [engine.requests[0].sampling_params for engine in (system.big, system.small)]
        assert [(each.temperature, each.min_p) for each in params] == [(0.8, 0.05), (0.25, 0.0)]


async def test_an_adapter_that_is_not_in_memory_is_shown_as_unloaded(
    open_tab: OpenTab, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = AdapterStatus(is_loaded=False, is_pinned=False, num_requests=0)
    monkeypatch.setattr(FakeEngine, "adapter_status", lambda self, name: status)
    async with models() as system:
        tab = await open_tab(system.server.openai_address)
        await tab.until("!document.getElementById('models').hidden")
        assert await tab.evaluate(NAMES) == ["big", "small", "sql (unloaded)", "gpt-4o-mini"]


async def test_the_list_follows_the_states_of_the_models(open_tab: OpenTab) -> None:
    async with loaded() as system:
        tab = await open_tab(system.server.openai_address)
        await pick(tab, "b")
        assert await tab.evaluate(NAMES) == ["a (unloaded)", "b (unloaded)"]
        system.may_load.clear()
        await ask(tab, "one")
        await until(lambda: system.residency.statuses()[1].state == "loading")
        await tab.evaluate(LOOK)
        await tab.until(f"({NAMES})[1] === 'b (loading)'")
        system.may_load.set()
        await tab.until(IS_DONE)
        await tab.until(f"({NAMES})[1] === 'b'")
        assert await tab.evaluate(PICKED) == "b"
