"""Prompts of text: ShareGPT's conversations and files of one prompt a line.

It must not know a tokenizer, only how many tokens a text has. One invariant: a file is read as it is meant or refused
with a ConfigError that names file, place and what is wrong there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from ...common.errors import ConfigError
from ..traffic import MAX_LENGTH, text_lines
from .request import Request

SHAREGPT_LEAST, SHAREGPT_MAX_PROMPT, SHAREGPT_MAX_TOTAL = 4, 1024, 2048  # tokens, as vLLM prunes it
CUSTOM_OUTPUT_LEN = 256

CountTokens = Callable[[str], int]


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def sharegpt_requests(
    path: Path, output_len: int | None, count_tokens: CountTokens | None, shuffle: Random | None
) -> Iterator[Request]:
    """First turns of conversations of at least two, answered as long as recorded unless `output_len` is given. Where
    tokens can be counted, those of unusual length are left out, as vLLM does. Raises ConfigError.
    """
    if output_len is None and count_tokens is None:
        raise ConfigError(
            "--dataset-name sharegpt takes the lengths of the recorded answers: give --tokenizer FOLDER to count their "
            "tokens, or --sharegpt-output-len"
        )
    pairs = [each.conversations[:2] for each in _conversations(path) if len(each.conversations) >= 2]
    if shuffle is not None:
        shuffle.shuffle(pairs)
    for prompt, answer in pairs:
        prompt_tokens = count_tokens(prompt.value) if count_tokens else 0
        max_tokens = output_len or (count_tokens(answer.value) if count_tokens else 0)
        if count_tokens is None or _is_usual(prompt_tokens, max_tokens, any_output=output_len is not None):
            yield Request(prompt.value, prompt_tokens, max_tokens)


def _conversations(path: Path) -> list[_Conversation]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not ShareGPT's JSON: {error}") from error


def _is_usual(prompt_tokens: int, max_tokens: int, *, any_output: bool) -> bool:
    return (
        SHAREGPT_LEAST <= prompt_tokens <= SHAREGPT_MAX_PROMPT
        and (any_output or max_tokens >= SHAREGPT_LEAST)
        and prompt_tokens + max_tokens <= SHAREGPT_MAX_TOTAL
    )


class _Line(msgspec.Struct):
    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)] | None = None


def custom_requests(
    path: Path, output_len: int | None, count_tokens: CountTokens | None, shuffle: Random | None
) -> Iterator[Request]:
    """A `{"prompt": "…"}` a line, and where wanted its `output_tokens`. Raises ConfigError."""
    lines = list(_lines(path))
    if shuffle is not None:
        shuffle.shuffle(lines)
    for line in lines:
        prompt_tokens = count_tokens(line.prompt) if count_tokens else 0
        yield Request(line.prompt, prompt_tokens, output_len or line.output_tokens or CUSTOM_OUTPUT_LEN)


def _lines(path: Path) -> Iterator[_Line]:
    decode = msgspec.json.Decoder(_Line).decode
    for number, text in text_lines(path):
        try:
            yield decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
