"""The page of a server with an embedding model, in headless Chromium: a search over texts, with and without a chat."""

from __future__ import annotations

import msgspec
import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.model.runner import load_model

from tests.support.fake_encoder import ENCODER_INFO, FakeEncoder
from tests.support.http_client import HTTPClient

from .chromium import OpenTab, Tab, needs_chromium
from .test_embeddings import embedding_system

pytestmark = needs_chromium

TEXTS = ["A step is full.", "<b>Pages</b>", "A key.", "A key."]
FOUND = """[...document.querySelectorAll("#found li")].map((each) =>
  [each.querySelector("p").textContent, each.querySelector("b").textContent])"""
VISIBLE = """["composer", "conversations", "search", "raw", "show-chat", "show-search", "query"].filter((id) =>
  document.getElementById(id).checkVisibility())"""


async def search(tab: Tab, query: str, texts: list[str]) -> list[list[str]]:
    """Search by keyboard, and return the shown texts and their numbers."""
    await tab.evaluate("(document.getElementById('texts').focus(), document.getElementById('texts').select(), 0)")
    await tab.type("\n".join(texts))
    await tab.evaluate("(document.getElementById('query').focus(), document.getElementById('query').select(), 0)")
    await tab.evaluate("(document.getElementById('found').replaceChildren(), 0)")
    await tab.type(query)
    await tab.press("Enter")
    await tab.until("document.querySelector('#found li')")
    found: list[list[str]] = await tab.evaluate(FOUND)
    return found


async def ranked(address: str, query: str, texts: list[str]) -> list[list[str]]:
    """Return texts and scores as the server ranks them itself."""
    client = await HTTPClient.open(address)
    reply = await client.ask("POST", "/v1/rerank", {"query": query, "documents": texts})
    client.writer.transport.abort()
    return [[each["document"]["text"], f"{each['relevance_score']:.3f}"] for each in reply.json["results"]]


async def test_an_embedding_model_alone_has_a_search_and_no_chat(open_tab: OpenTab) -> None:
    encoder = FakeEncoder()
    async with embedding_system(encoder) as system:
        address = system.server.openai_address
        tab = await open_tab(address)
        await tab.until("!document.getElementById('search').hidden")
        assert await tab.evaluate(VISIBLE) == ["search", "query"]
        assert await tab.text("#num-texts") == "0 texts"
        found = await search(tab, "Is it full?", TEXTS)
        assert found == await ranked(address, "Is it full?", TEXTS[:3])
        assert await tab.text("#num-texts") == "3 texts"
        assert await tab.evaluate("document.querySelectorAll('#found b b').length") == 0
        encoded = sum(map(len, encoder.batches))
        assert await search(tab, "Pages", TEXTS) == await ranked(address, "Pages", TEXTS[:3])
        assert sum(map(len, encoder.batches)) == encoded + 1 + 4, (
            "the page asks for the new query only, and the test for all"
        )
        await tab.reload()
        await tab.until("document.getElementById('query').value === 'Pages'")
        assert await tab.text("#num-texts") == "3 texts"


async def test_the_prompts_of_queries_and_texts_are_used(open_tab: OpenTab) -> None:
    encoder = FakeEncoder()
    async with embedding_system(encoder) as system:
        tab = await open_tab(system.server.openai_address)
        await tab.until("!document.getElementById('search').hidden")
        await search(tab, "a", ["b", "c"])
        texts = sorted("".join(map(chr, text.token_ids)) for batch in encoder.batches for text in batch)
    assert texts == ["d: b", "d: c", "q: a"]


async def test_of_a_long_text_the_model_gets_as_much_as_it_takes(open_tab: OpenTab) -> None:
    encoder = FakeEncoder()
    async with embedding_system(encoder) as system:
        tab = await open_tab(system.server.openai_address)
        await tab.until("!document.getElementById('search').hidden")
        assert [text for text, _ in await search(tab, "q", ["a" * 1000, "b"])] in (["a" * 1000, "b"], ["b", "a" * 1000])
    assert max(len(text.token_ids) for batch in encoder.batches for text in batch) == ENCODER_INFO.max_model_len


async def test_what_is_missing_or_refused_is_said(open_tab: OpenTab) -> None:
    async with embedding_system() as system:
        tab = await open_tab(system.server.openai_address)
        await tab.until("!document.getElementById('search').hidden")
        await tab.click("#run")
        assert await tab.text("#search-problem") == "Write some texts, one per line."
        await tab.evaluate(
            f"(document.getElementById('texts').value = 'a'.repeat({ENCODER_INFO.max_model_len + 1}), 0)"
        )
        await tab.click("#run")
        assert await tab.text("#search-problem") == "Write a query."
        await tab.evaluate("(document.getElementById('query').value = 'q', 0)")
        refusal = "new Response(JSON.stringify({ error: { message: 'the queue is full' } }), { status: 429 })"
        await tab.evaluate(f"(window.fetch = async () => {refusal}, 0)")
        await tab.click("#run")
        await tab.until("document.getElementById('search-problem').textContent === 'the queue is full'")
        assert await tab.evaluate("document.getElementById('found-status').textContent") == ""


async def test_more_texts_than_a_request_has_are_all_ranked(open_tab: OpenTab) -> None:
    texts = [chr(65 + index % 50) * (1 + index // 50) for index in range(150)]
    async with embedding_system() as system:
        address = system.server.openai_address
        tab = await open_tab(address)
        await tab.until("!document.getElementById('search').hidden")
        found = await search(tab, "ABC", texts)
        expected = await ranked(address, "ABC", texts)
        assert "150 texts" in await tab.text("#found-status")
    assert [score for _, score in found] == [score for _, score in expected[:100]]


@pytest.mark.parametrize("num_labels", [1, 3])
async def test_a_reranker_ranks_itself_and_a_classifier_labels(open_tab: OpenTab, num_labels: int) -> None:
    labels = ("up", "down", "flat")[:num_labels]
    info = msgspec.structs.replace(ENCODER_INFO, num_labels=num_labels, labels=labels, prompts={})
    async with embedding_system(FakeEncoder(info)) as system:
        address = system.server.openai_address
        tab = await open_tab(address)
        await tab.until("!document.getElementById('search').hidden")
        if num_labels == 1:
            assert await search(tab, "query", ["a", "bc"]) == await ranked(address, "query", ["a", "bc"])
            return
        assert not await tab.evaluate("document.getElementById('query').checkVisibility()")
        await tab.evaluate("(document.getElementById('texts').value = 'a\\nbc', 0)")
        await tab.click("#run")
        await tab.until("document.querySelectorAll('#found li').length === 2")
        shown = await tab.evaluate(FOUND)
    assert [text for text, _ in shown] == ["a", "bc"]
    assert {label.split()[0] for _, label in shown} <= set(labels)


async def test_a_server_with_both_has_a_chat_and_a_search(open_tab: OpenTab) -> None:
    info = msgspec.structs.replace(ENCODER_INFO, name="small")
    async with embedding_system(FakeEncoder(info), load_model(EngineConfig(kv_cache_memory=1 << 20))) as system:
        address = system.server.openai_address
        tab = await open_tab(address)
        await tab.until("!document.getElementById('send').disabled")
        assert await tab.evaluate(VISIBLE) == ["composer", "conversations", "raw", "show-chat", "show-search"]
        assert await tab.text("#model") == "quire, small"
        await tab.click("#show-search")
        assert await tab.evaluate(VISIBLE) == ["search", "show-chat", "show-search", "query"]
        assert await search(tab, "Is it full?", TEXTS) == await ranked(address, "Is it full?", TEXTS[:3])
        await tab.click("#show-chat")
        assert await tab.evaluate(VISIBLE) == ["composer", "conversations", "raw", "show-chat", "show-search"]
        await tab.click("#show-search")
        assert len(await tab.evaluate(FOUND)) == 3, "the results are still there"


async def test_a_search_asks_for_a_key_too(open_tab: OpenTab) -> None:
    async with embedding_system(token="secret") as system:
        tab = await open_tab(system.server.openai_address)
        await tab.until("document.getElementById('key-dialog').open")
        await tab.type("secret")
        await tab.press("Enter")
        await tab.until("!document.getElementById('search').hidden")
        assert len(await search(tab, "a", ["b", "c"])) == 2
