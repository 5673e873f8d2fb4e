"""Tools on the chat page, in headless Chromium: they are entered as JSON, and the reader gives the results of calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.scripted_model import write_scripted_model

from .chromium import ALT, OpenTab, needs_chromium
from .test_chat_page import IS_DONE, ask, set_field

pytestmark = needs_chromium

TOOLS = json.dumps([{"type": "function", "function": {"name": "weather"}}])
TEMPLATE = (
    "{# <tool_call> </tool_call> #}{{ tools }}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}{% endfor %}"
)


async def test_calls_of_tools_are_shown_and_get_the_results_of_the_reader(
    serving: Callable[..., Any], open_tab: OpenTab, tmp_path: Path
) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    scripts = {"<|0|>": call, "<|1|>": "It rains there."}
    model = write_scripted_model(tmp_path / "model", scripts, template=TEMPLATE, added=["<tool_call>", "</tool_call>"])
    async with serving(model=str(model)) as real:
        tab = await open_tab(real.server.openai_address)
        await set_field(tab, "temperature", "0")
        await set_field(tab, "tools", TOOLS)
        await ask(tab, "Rome? <|0|>")
        await tab.until(IS_DONE)
        assert json.loads((await tab.text(".call")).removeprefix("weather ")) == {"city": "Rome"}
        await tab.evaluate("document.querySelector('.results textarea').focus()")
        await tab.type("rain <|1|>")
        await tab.click(".results button")
        await tab.until(f"document.querySelectorAll('article').length === 2 && {IS_DONE}")
        assert await tab.text("article:last-child .question") == "weather: rain <|1|>"
        assert await tab.text("article:last-child .answer") == "It rains there."
        assert await tab.evaluate("document.querySelectorAll('.results').length") == 0
        await tab.reload()
        await tab.until("document.querySelectorAll('article').length === 2")
        await tab.press("e", ALT)
        await tab.until("document.querySelector('.results textarea')")
        assert await tab.text("article:last-child .call") == 'weather {"city": "Rome"}'


async def test_tools_that_are_no_json_are_a_problem_of_their_answer(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await set_field(tab, "tools", "weather")
    await ask(tab, "one")
    await tab.until("document.querySelector('article.failed')")
    assert (await tab.text("article .problem")).startswith("Tools: Unexpected token")
    assert system.engine.requests == []


async def test_calls_without_results_are_left_out_of_the_history(
    serving: Callable[..., Any], open_tab: OpenTab, tmp_path: Path
) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    model = write_scripted_model(
        tmp_path / "model",
        {"<|0|>": call, "<|1|>": "Yes."},
        template=TEMPLATE,
        added=["<tool_call>", "</tool_call>"],
    )
    async with serving(model=str(model)) as real:
        tab = await open_tab(real.server.openai_address)
        await tab.evaluate("(window.bodies = [], window.asked = fetch, 0)")
        await tab.evaluate("(window.fetch = (path, given) => (bodies.push(given.body), asked(path, given)), 0)")
        await set_field(tab, "temperature", "0")
        await set_field(tab, "tools", TOOLS)
        await ask(tab, "Rome? <|0|>")
        await tab.until(IS_DONE)
        await ask(tab, "Well? <|1|>")
        await tab.until(f"document.querySelectorAll('article').length === 2 && {IS_DONE}")
        body = json.loads(await tab.evaluate("bodies.at(-1)"))
    assert body["messages"] == [{"role": "user", "content": "Well? <|1|>"}]
    assert body["tools"] == json.loads(TOOLS)


async def test_a_continued_text_has_no_tools(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await set_field(tab, "tools", "weather")
    await set_field(tab, "mode", "text")
    await ask(tab, "one")
    await tab.until(IS_DONE)
    assert system.engine.requests[0].prompt == "one"
