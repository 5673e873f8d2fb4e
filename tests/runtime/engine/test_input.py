"""The size of a request's text, which limits what waits to be tokenized."""

from __future__ import annotations

from quire.runtime.engine.facade import MAX_COUNTED, GenerateRequest


def test_the_bytes_of_a_prompt_and_of_messages() -> None:
    assert 1000 < GenerateRequest(prompt="x" * 1000).text_bytes() < 1200
    parts = ({"role": "user", "content": [{"type": "text", "text": "é" * 1000}]},)
    assert 1000 < GenerateRequest(prompt=None, messages=parts).text_bytes() < 3000
    assert GenerateRequest(prompt=(1, 2)).text_bytes() == 0, "nothing is to be tokenized"


def test_counting_the_bytes_of_hostile_messages_is_bounded() -> None:
    """A list of a million numbers is counted by its own size, without a visit to each number."""
    visited = 0

    class Counted(int):
        def __sizeof__(self) -> int:
            nonlocal visited
            visited += 1
            return 32

    messages = ({"role": "user", "content": [Counted()] * 100_000},)
    assert GenerateRequest(prompt=None, messages=messages).text_bytes() > 800_000
    assert visited < MAX_COUNTED
