"""Prompts on their way to token ids: what waits for what."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from quire.runtime.common.fair_executor import NUM_THREADS
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import preparing
from quire.runtime.engine.facade import GenerateRequest
from quire.runtime.engine.input import PreparedInput
from quire.runtime.engine.preparing import PromptPreparer


async def test_images_of_prompts_are_decoded_one_after_the_other_beside_texts() -> None:
    """Each decoded image takes much memory."""
    decoding: list[str] = []
    started, release = threading.Event(), threading.Event()

    class Texts:
        """Renders and encodes chats; an image is being decoded until the test releases it."""

        def render(self, messages: Any, tools: Any, variables: Any) -> Any:
            return SimpleNamespace(text=messages[0]["content"])

        def encode_chat(self, chat: Any, files: tuple[bytes, ...]) -> tuple[tuple[int, ...], tuple[()]]:
            if files:
                decoding.append(chat.text)
                started.set()
                release.wait(10)
            return (1, 2), ()

    def prepare(content: str, *files: bytes) -> asyncio.Future[Any]:
        messages = ({"role": "user", "content": content},)
        request = GenerateRequest(prompt=None, messages=messages, image_files=files, sampling_params=SamplingParams())
        prepared = preparer.prepare(request, 1)
        assert isinstance(prepared, asyncio.Future)
        return prepared

    texts: Any = Texts()
    preparer = PromptPreparer(texts, MagicMock(), frozenset())
    images = [prepare("first", b"file"), prepare("second", b"file")]
    await asyncio.to_thread(started.wait, 10)
    for _ in range(2 * NUM_THREADS):
        assert (await prepare("text")).token_ids == (1, 2)
    assert decoding == ["first"]
    release.set()
    await asyncio.gather(*images)
    assert decoding == ["first", "second"]
    preparer.close()


@pytest.mark.parametrize("reads_output", [True, False])
async def test_the_parser_of_a_continued_output_has_read_its_beginning(
    monkeypatch: pytest.MonkeyPatch, reads_output: bool
) -> None:
    """If the engine reads the output at all; otherwise its reader has the parser."""
    params = SamplingParams(max_tokens=4)
    read: list[str] = []
    parser = SimpleNamespace(feed=read.append)
    prepared = PreparedInput((1, 2), params, new_parser=lambda: parser)
    monkeypatch.setattr(preparing, "prepare", lambda *_, **__: prepared)
    texts: Any = SimpleNamespace(
        detokenizer=lambda *_, **__: SimpleNamespace(push=lambda ids: f"<{ids[0]}>", stop_string=None)
    )
    preparer = PromptPreparer(texts, MagicMock(), frozenset())
    request = GenerateRequest(prompt="a", sampling_params=params, generated=((5, 6),), reads_output=reads_output)
    continuation = (await preparer.prepare(request, 1)).continuation  # type: ignore[misc]
    assert continuation is not None
    (output,) = continuation.open
    assert (output.parser, read) == ((parser, ["<5>", "<6>"]) if reads_output else (None, []))
    preparer.close()
