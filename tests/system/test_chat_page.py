"""The page to chat, in headless Chromium: over a fake engine with scripted answers, and over a real one."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire.runtime.common.types import StructuredOutputs
from quire.runtime.server.openai.api import PAGE

from tests.support.http_client import HTTPClient, Reply
from tests.support.image_folder import write_image_folder
from tests.support.scripted_model import write_scripted_model

from .chromium import ALT, SHIFT, OpenTab, Tab, needs_chromium

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]

FOLDER = files("quire.runtime.server.openai") / "page"
TEXTS = {name: (FOLDER / name).read_text("utf-8") for name in PAGE}
SCRIPTS = "\n".join(text for name, text in TEXTS.items() if name.endswith(".js"))
HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>&lt;'
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
PLACEHOLDERS = """(...names) =>
  names.map((name) => document.querySelector(`#fields [name=${name}]`).placeholder)"""
IS_DONE = "document.querySelector('article:last-child')?.className === 'done'"


async def ask(tab: Tab, question: str) -> None:
    await tab.until("!document.getElementById('send').disabled")
    await tab.evaluate("document.getElementById('question').focus()")
    await tab.type(question)
    await tab.press("Enter")


async def answer_of(tab: Tab) -> str:
    """Return the text of the first answer, as the tab's storage keeps it for a page that is loaded again."""
    stored = await tab.evaluate("JSON.parse(sessionStorage['quire.conversations'])[0].turns[0].answer.text")
    return str(stored)


async def set_field(tab: Tab, name: str, value: object) -> None:
    """Set a field of the settings as its reader does."""
    field = "checked" if isinstance(value, bool) else "value"
    script = f"""(() => {{
      const input = document.querySelector('#fields [name={name}]');
      input.{field} = {json.dumps(value)};
      input.dispatchEvent(new Event('input'));
      return true;
    }})()"""
    await tab.until(script)


async def give_files(tab: Tab, how: str, *names: str) -> None:
    """Choose files of one pixel, paste them or drop them. Files whose name ends in .txt are texts."""
    event = {
        "choose": "Object.assign(document.getElementById('files'), {files}).dispatchEvent(new Event('change'))",
        "paste": "document.activeElement.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data}))",
        "drop": "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: data, cancelable: true}))",
    }[how]
    script = f"""(() => {{
      const data = new DataTransfer();
      const bytes = Uint8Array.from(atob({PIXEL!r}), (character) => character.charCodeAt(0));
      for (const name of {json.dumps(names)}) {{
        data.items.add(new File([bytes], name, {{type: name.endsWith('.txt') ? 'text/plain' : 'image/png'}}));
      }}
      const files = data.files;
      {event};
      return true;
    }})()"""
    await tab.until(script)


async def get(address: str, path: str, method: str = "GET") -> Reply:
    client = await HTTPClient.open(address)
    try:
        return await client.ask(method, path)
    finally:
        client.writer.transport.abort()


# Without a browser


async def test_the_page_may_load_only_its_own_files_and_needs_no_key(serve: Callable[..., Any]) -> None:
    system = await serve(token="secret")
    for path, name in {"/": "chat.html", **{f"/{name}": name for name in PAGE[1:]}}.items():
        reply = await get(system.server.openai_address, path)
        assert (reply.status, reply.content.decode()) == (200, TEXTS[name])
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["x-content-type-options"] == "nosniff"
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "trusted-types 'none'" in policy
        assert not re.search(r"unsafe|http|\*", policy)
        assert (await get(system.server.openai_address, path, "HEAD")).content == b""
    assert (await get(system.server.openai_address, "/", "POST")).status == 405


def test_nothing_is_loaded_from_another_host_and_no_text_becomes_markup() -> None:
    assert not re.search(r"@import|url\(", TEXTS["chat.css"])
    assert not re.search(r"<style|style=|\son\w+=|<script>", TEXTS["chat.html"]), "the policy would block it"
    assert "://" not in SCRIPTS
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", SCRIPTS)
    links = re.findall(r'(?:src|href)="([^"]+)"', TEXTS["chat.html"])
    assert {link for link in links if not link.startswith("data:")} == {"chat.css", "chat.js"}
    assert set(re.findall(r'from "\./([\w.]+)"', SCRIPTS)) | {"chat.css", "chat.js", "chat.html"} == set(PAGE)
    assert set(re.findall(r'\$\("([\w-]+)"\)', SCRIPTS)) <= set(re.findall(r'id="([\w-]+)"', TEXTS["chat.html"]))


# In a browser


@needs_chromium
async def test_a_chat_by_keyboard_shows_what_the_api_answers(serving: Callable[..., Any], open_tab: OpenTab) -> None:
    async with serving() as real:
        address = real.server.openai_address
        tab = await open_tab(address)
        await set_field(tab, "seed", "7")
        await set_field(tab, "max_tokens", "40")
        await ask(tab, "What is a queue?")
        await tab.until(IS_DONE)
        shown = await answer_of(tab)
        await ask(tab, "And a stack?")
        await tab.until(f"document.querySelectorAll('article').length === 2 && {IS_DONE}")
        facts = await tab.text("article:last-child .facts")
        legend = await tab.text("article:last-child .times .legend")
        client = await HTTPClient.open(address)
        messages = [{"role": "user", "content": "What is a queue?"}]
        body = {"messages": messages, "seed": 7, "max_tokens": 40, "temperature": 0.8, "min_p": 0.05}
        reply = await client.ask("POST", "/v1/chat/completions", body)
        client.writer.transport.abort()
    assert shown == reply.json["choices"][0]["message"]["content"]
    assert re.search(
        r"40 tokens · [\d.]+ tokens/s · first text after .*s · [1-9]\d* of \d+ prompt tokens cached", facts
    )
    assert facts.endswith("temperature 0.8 · min p 0.05 · seed 7")
    assert "prefill" in legend
    assert "decode" in legend


@needs_chromium
async def test_escape_stops_and_cancels_the_request(system: Any, open_tab: OpenTab, eventually: Eventually) -> None:
    tab = await open_tab(system.server.openai_address)
    await ask(tab, "hold")
    await tab.until("document.querySelector('article.streaming .answer')?.textContent.includes('hold:0')")
    assert len(system.engine.live) == 1
    await tab.press("Escape")
    await tab.until("document.querySelector('article.stopped')")
    await eventually(lambda: not system.engine.live)
    assert await tab.text(".answer") == "hold:0é日"


@needs_chromium
async def test_several_conversations_stream_at_once(system: Any, open_tab: OpenTab, eventually: Eventually) -> None:
    tab = await open_tab(system.server.openai_address)
    await ask(tab, "hold")
    await tab.until("document.querySelector('article.streaming')")
    await tab.press("n", ALT)
    await tab.until("document.querySelector('.prompts')")
    await ask(tab, "short")
    await tab.until(IS_DONE)
    assert len(system.engine.live) == 1
    await tab.until("document.querySelectorAll('#list li.live').length === 1")
    await tab.press("ArrowDown", ALT)
    await tab.until("document.querySelector('article.streaming .question')?.textContent === 'hold'")
    await tab.click("#list li.live .close")
    await eventually(lambda: not system.engine.live)
    assert await tab.text("article .question") == "short"


@needs_chromium
async def test_retry_and_edit_replace_the_last_turn(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await ask(tab, "one")
    await tab.until(IS_DONE)
    await ask(tab, "two")
    await tab.until(f"document.querySelectorAll('article').length === 2 && {IS_DONE}")
    assert await tab.evaluate("document.querySelectorAll('article .retry').length") == 1
    facts = await tab.text("article:last-child .facts")
    await tab.press("r", ALT)
    await tab.until(f"document.querySelector('article:last-child .facts').innerText !== {facts!r} && {IS_DONE}")
    await tab.press("e", ALT)
    await tab.until("document.querySelectorAll('article').length === 1")
    assert await tab.evaluate("document.getElementById('question').value") == "two"
    await tab.type(" b")
    await tab.press("Enter")
    await tab.until(f"document.querySelectorAll('article').length === 2 && {IS_DONE}")
    requests = system.engine.requests
    asked = [[each["content"] for each in request.messages if each["role"] == "user"] for request in requests]
    assert asked == [["one"], ["one", "two"], ["one", "two"], ["one", "two b"]]
    assert requests[1].messages == requests[2].messages
    assert len({request.sampling_params.seed for request in requests}) == 4


@needs_chromium
async def test_settings_reach_the_request_of_their_conversation(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await tab.press("s", ALT)
    assert await tab.until("!document.getElementById('settings').hidden")
    given = {"system": "Be short.", "temperature": "0.5", "top_k": "7", "seed": "3", "max_tokens": "4"}
    given["stop"] = "a\n\nb\n"
    for name, value in {**given, "logprobs": False}.items():
        await set_field(tab, name, value)
    await ask(tab, "one")
    await tab.until(IS_DONE)
    first = system.engine.requests[0]
    params = first.sampling_params
    assert first.messages[0] == {"role": "system", "content": "Be short."}
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 7, 3, 4)
    assert (list(params.stop), params.logprobs) == (["a", "b"], None)
    await tab.press("n", ALT)  # begins with the same settings, which are its own
    await set_field(tab, "mode", "text")
    await set_field(tab, "temperature", "")
    await ask(tab, "two")
    await tab.until(IS_DONE)
    second = system.engine.requests[1]
    assert (second.prompt, second.messages) == ("two", None)
    assert (second.sampling_params.temperature, second.sampling_params.max_tokens) == (0.8, 4)
    await set_field(tab, "max_tokens", "")
    await ask(tab, "three")
    await tab.until(f"document.querySelectorAll('article').length === 2 && {IS_DONE}")
    assert system.engine.requests[2].sampling_params.max_tokens == 200
    await tab.press("ArrowDown", ALT)
    assert await tab.until("document.querySelector('#fields [name=mode]').value") == "chat"


@needs_chromium
async def test_an_answer_may_have_to_be_a_json_object(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await set_field(tab, "format", "JSON object")
    await ask(tab, "one")
    await tab.until(IS_DONE)
    assert system.engine.requests[0].sampling_params.structured_outputs == StructuredOutputs(json_object=True)


@needs_chromium
async def test_the_page_filters_where_the_model_recommends_nothing_and_shows_it(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await ask(tab, "one")
    await tab.until(IS_DONE)
    await set_field(tab, "min_p", "0")
    await ask(tab, "two")
    await tab.until(f"document.querySelectorAll('article').length === 2 && {IS_DONE}")
    sent = [(each.sampling_params.temperature, each.sampling_params.min_p) for each in system.engine.requests]
    assert sent == [(0.8, 0.05), (0.8, 0.0)]
    shown = await tab.evaluate("[...document.querySelectorAll('.facts')].map((each) => each.textContent)")
    assert [re.search(r"temperature .* · seed", each)[0] for each in shown] == [  # type: ignore[index]
        "temperature 0.8 · min p 0.05 · seed",
        "temperature 0.8 · min p 0 · seed",
    ]
    placeholders = f"({PLACEHOLDERS})('temperature', 'top_p', 'min_p')"
    assert await tab.evaluate(placeholders) == ["0.8", "", "0.05"]
    note = await tab.evaluate("document.getElementById('defaults-note').textContent")
    assert note == (
        "The model recommends no sampling: where the fields are empty, this page sends temperature 0.8 and min p 0.05."
    )


@needs_chromium
async def test_the_page_leaves_the_sampling_to_a_model_that_recommends_one(system: Any, open_tab: OpenTab) -> None:
    system.engine.default_sampling = {"temperature": 0.6, "top_k": 20}
    tab = await open_tab(system.server.openai_address)
    await ask(tab, "one")
    await tab.until(IS_DONE)
    params = system.engine.requests[0].sampling_params
    assert (params.temperature, params.top_k, params.min_p) == (0.6, 20, 0.0)
    assert "temperature 0.6 · top k 20 · seed" in await tab.text("article .facts")
    assert await tab.evaluate(f"({PLACEHOLDERS})('temperature', 'top_k', 'min_p')") == ["0.6", "20", ""]


@needs_chromium
async def test_a_text_and_json_are_shown_as_they_are(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await set_field(tab, "max_tokens", "2")
    await set_field(tab, "mode", "text")
    await ask(tab, "*a*")
    await tab.until(IS_DONE)
    assert "*a*" in await tab.text(".answer")
    await tab.press("n", ALT)
    await set_field(tab, "mode", "chat")
    await set_field(tab, "format", "JSON object")
    await ask(tab, "*b*")
    await tab.until(IS_DONE)
    assert "*b*" in await tab.text(".answer")


@needs_chromium
async def test_a_model_without_a_chat_template_continues_texts(
    system: Any, open_tab: OpenTab, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = msgspec.structs.replace(system.engine.info, has_chat_template=False)
    monkeypatch.setattr(type(system.engine), "info", info)
    tab = await open_tab(system.server.openai_address)
    await ask(tab, "one")
    await tab.until(IS_DONE)
    assert system.engine.requests[0].prompt == "one"


@needs_chromium
async def test_an_answer_says_that_it_is_cut(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await set_field(tab, "max_tokens", "4")
    await ask(tab, "one")
    await tab.until(IS_DONE)
    assert (await tab.text("article .facts")).startswith("cut at the maximum of tokens · 4 tokens")


@needs_chromium
async def test_the_time_of_the_first_text_stays(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    script = """import("./conversations.js").then(({ Answer }) => {
      let now = 0;
      performance.now = () => (now += 1);
      const answer = new Answer();
      for (const text of ["", "a", "b"]) answer.take({ choices: [{ text, logprobs: null }] });
      return [answer.firstMs, answer.pieces, answer.text];
    })"""
    assert await tab.evaluate(script) == [1, 2, "ab"]


@needs_chromium
async def test_shift_enter_begins_a_new_line(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await tab.until("!document.getElementById('send').disabled")
    await tab.evaluate("document.getElementById('question').focus()")
    await tab.type("one")
    await tab.press("Enter", SHIFT)
    await tab.type("two")
    assert await tab.evaluate("document.getElementById('question').value") == "one\ntwo"
    await tab.press("Enter")
    await tab.until(IS_DONE)
    assert [request.messages[0]["content"] for request in system.engine.requests] == ["one\ntwo"]


@needs_chromium
@pytest.mark.parametrize("mode", ["chat", "text"])
async def test_tokens_show_their_probabilities(system: Any, open_tab: OpenTab, mode: str) -> None:
    tab = await open_tab(system.server.openai_address)
    await set_field(tab, "mode", mode)
    await set_field(tab, "max_tokens", "6")
    await ask(tab, "one")
    await tab.until(IS_DONE)
    await tab.press("v", ALT)
    await tab.until("document.querySelectorAll('.tokens .token').length === 6")
    assert await tab.evaluate("document.querySelector('.tokens .token').classList.contains('p50')")  # e^-0.5 is 61 %
    await tab.evaluate("document.querySelector('.tokens').focus()")
    await tab.press("ArrowRight")
    assert await tab.text(".detail .chosen") == '"\\u0000"\n61 %'


@needs_chromium
async def test_a_key_is_asked_for_until_it_is_right(serve: Callable[..., Any], open_tab: OpenTab) -> None:
    system = await serve(token="secret")
    tab = await open_tab(system.server.openai_address)
    await tab.until("document.getElementById('key-dialog').open")
    await tab.type("wrong")
    await tab.press("Enter")
    await tab.until("document.getElementById('key-problem').textContent")
    await tab.type("secret")
    await tab.press("Enter")
    await tab.until("!document.getElementById('key-dialog').open")
    await ask(tab, "one")
    await tab.until(IS_DONE)
    await tab.reload()
    await tab.until("document.getElementById('model').textContent === 'quire'")
    assert await tab.text("article .question") == "one"


@needs_chromium
async def test_problems_are_shown_and_end_only_their_answer(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    for question, problem in (("full", "the queue is full; try again in 1 s"), ("fail", "the logits are NaN")):
        await ask(tab, question)
        await tab.until(f"document.querySelector('article:last-child .problem')?.textContent === {problem!r}")
    await ask(tab, "three")
    await tab.until(IS_DONE)
    asked = [each["content"] for each in system.engine.requests[-1].messages if each["role"] == "user"]
    assert asked == ["fail", "three"]
    await tab.evaluate("(window.fetch = async () => new Response('data: {\"choices\": []}\\n\\n'), 0)")  # no [DONE]
    await ask(tab, "four")
    await tab.until("document.querySelector('article:last-child .problem')?.textContent === 'the connection was lost'")


@needs_chromium
async def test_a_draft_stays_with_its_conversation_and_a_dialog_takes_the_keys(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await tab.until("!document.getElementById('send').disabled")
    await tab.evaluate("document.getElementById('question').focus()")
    await tab.type("draft")
    enter = "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, cancelable: true})"
    is_left = await tab.evaluate(f"document.getElementById('question').dispatchEvent({enter})")
    assert is_left, "it chooses a character of an input method"
    await tab.press("n", ALT)
    await tab.until("document.getElementById('question').value === ''")
    await tab.press("ArrowDown", ALT)
    await tab.until("document.getElementById('question').value === 'draft'")
    await tab.press("/", ALT)
    await tab.until("document.getElementById('help').open")
    await tab.press("n", ALT)
    assert await tab.evaluate("document.querySelectorAll('#list li').length") == 2


@needs_chromium
async def test_a_page_that_was_left_shows_its_conversations_again(
    system: Any, open_tab: OpenTab, eventually: Eventually
) -> None:
    tab = await open_tab(system.server.openai_address)
    await ask(tab, "one")
    await tab.until(IS_DONE)
    await ask(tab, "hold")
    await tab.until("document.querySelector('article.streaming .answer')?.textContent.includes('hold:0')")
    await tab.reload()
    await tab.until("document.querySelectorAll('article').length === 2")
    shown = await tab.evaluate("[...document.querySelectorAll('article')].map(each => each.className)")
    assert shown == ["done", "stopped"]
    await eventually(lambda: not system.engine.live)
    kept = await tab.evaluate("JSON.parse(sessionStorage['quire.conversations'])")
    assert kept[0]["turns"][0]["answer"]["tokens"] == [], "probabilities would fill the tab's storage"
    kept[0]["turns"][1]["answer"]["state"] = "streaming"  # state after a crash of the browser
    kept_json = json.dumps(json.dumps(kept))
    await tab.evaluate(f"(window.onpagehide = null, sessionStorage['quire.conversations'] = {kept_json}, 0)")
    await tab.reload()
    await tab.until("document.querySelector('article.stopped .retry')")


@needs_chromium
async def test_markup_of_users_and_models_is_text(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await ask(tab, HOSTILE)
    await tab.until(IS_DONE)
    assert await tab.evaluate("document.querySelectorAll('img, article script').length") == 0
    assert HOSTILE in await tab.text(".answer")
    assert await tab.text("#list .title") == HOSTILE


@needs_chromium
async def test_images_are_chosen_pasted_and_dropped(
    serving: Callable[..., Any], open_tab: OpenTab, tmp_path: Path
) -> None:
    attached = "[...document.querySelectorAll('#attached img')].map((image) => image.alt).join()"
    async with serving(model=str(write_image_folder(tmp_path)), weights="f32", max_num_seqs=4) as real:
        tab = await open_tab(real.server.openai_address)
        await tab.until("!document.getElementById('attach').hidden")
        for name, value in {"temperature": "0", "max_tokens": "6", "logprobs": False}.items():
            await set_field(tab, name, value)
        await give_files(tab, "choose", "a.png", "b.txt")
        await tab.until(f"{attached} === 'a.png'")
        assert await tab.text("#image-problem") == "b.txt: images are PNG, JPEG, WebP or GIF files"
        await give_files(tab, "paste", "c.png")
        await give_files(tab, "drop", "d.png")
        await tab.until(f"{attached} === 'a.png,c.png,d.png'")
        await tab.evaluate("document.querySelector('[aria-label=\"Remove: c.png\"]').focus()")
        await tab.press("Enter")
        await tab.until(f"{attached} === 'a.png,d.png'")
        await ask(tab, "What is this?")
        await tab.until(IS_DONE)
        assert await tab.evaluate(attached) == ""
        assert await tab.evaluate("document.getElementById('image-problem').textContent") == ""
        shown = await answer_of(tab)
        await tab.reload()
        await tab.until("document.querySelectorAll('.question img').length === 2")
        assert await tab.evaluate("document.querySelector('.question img').naturalWidth") == 1
        await tab.press("e", ALT)
        await tab.until(f"{attached} === 'a.png,d.png'")
        await tab.until("!document.getElementById('send').disabled")
        await tab.press("Enter")
        await tab.until(IS_DONE)
        assert await answer_of(tab) == shown
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        content = [image, image, {"type": "text", "text": "What is this?"}]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 6}
        client = await HTTPClient.open(real.server.openai_address)
        reply = await client.ask("POST", "/v1/chat/completions", body)
        client.writer.transport.abort()
    assert shown == reply.json["choices"][0]["message"]["content"]


@needs_chromium
async def test_a_model_without_images_gets_none(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await tab.until("!document.getElementById('send').disabled")
    assert await tab.evaluate("document.getElementById('attach').hidden")
    await give_files(tab, "paste", "a.png")
    await ask(tab, "one")
    await tab.until(IS_DONE)
    assert system.engine.requests[0].messages == ({"role": "user", "content": "one"},)


@needs_chromium
async def test_reasoning_is_set_apart(serving: Callable[..., Any], open_tab: OpenTab, tmp_path: Path) -> None:
    template = "{# <think></think> #}{% for message in messages %}{{ message.content }}{% endfor %}"
    scripts = {"<|0|>": "<think>\nHm.\n</think>\n\nHello."}
    model = write_scripted_model(tmp_path / "model", scripts, template=template, added=["<think>"])
    async with serving(model=str(model)) as real:
        tab = await open_tab(real.server.openai_address)
        await set_field(tab, "temperature", "0")
        await ask(tab, "Hi <|0|>")
        await tab.until(IS_DONE)
        assert await tab.evaluate("document.querySelector('.reasoning').lastChild.textContent.trim()") == "Hm."
        assert await tab.text(".answer") == "Hello."
        assert not await tab.evaluate("document.querySelector('.reasoning').open")


@needs_chromium
async def test_code_blocks_are_set_apart(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await set_field(tab, "max_tokens", "2")
    await tab.evaluate("document.getElementById('question').value = 'a\\n```python\\nb = 1\\n```\\nc'")
    await ask(tab, "")
    await tab.until(IS_DONE)
    assert await tab.evaluate("document.querySelector('.answer pre').textContent") == "b = 1"


@needs_chromium
async def test_the_page_is_dark_if_its_reader_prefers_that(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    grounds = []
    for scheme in ("light", "dark"):
        await tab.prefer(scheme)
        grounds.append(await tab.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(245, 246, 248)", "rgb(17, 20, 24)"]


@needs_chromium
async def test_everything_is_reached_with_the_tab_key(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await tab.until("!document.getElementById('send').disabled")
    reached = []
    for _ in range(24):
        await tab.press("Tab")
        reached.append(await tab.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"raw", "open-settings", "open-help", "new", "open", "close", "question"} <= set(reached)
    await tab.press("/", ALT)
    await tab.until("document.getElementById('help').open")
    await tab.press("Escape")
    await tab.until("!document.getElementById('help').open")
