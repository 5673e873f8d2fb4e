"""The requests of each dataset: random prompts, repeated prefixes, recorded traces, ShareGPT and files of prompts.

The same options and seed give the same requests, regardless of their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, cycle, islice
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
import numpy as np

from ...common.errors import ConfigError
from ..traffic import MAX_LENGTH, Arrival, read_azure, read_burstgpt, read_mooncake, text_lines
from .options import MAX_REQUESTS, DatasetOptions, length_bounds
from .records import LoadRequest

TRACE_READERS = {"mooncake": read_mooncake, "azure": read_azure, "burstgpt": read_burstgpt}

CountTokens = Callable[[str], int]


def dataset_requests(
    options: DatasetOptions, tokens: RandomTokens, count_tokens: CountTokens | None, limit: int | None
) -> Iterator[LoadRequest]:
    """Yield the requests of a dataset that is not a trace, endlessly unless `no_oversample` is set.

    At most `limit` different requests are read from a file. Raises ConfigError for a malformed file, and where the
    tokens of ShareGPT's answers have to be counted and `count_tokens` is None.
    """
    if options.dataset_name == "random":
        return _random(
            tokens,
            input_len=options.random_input_len,
            output_len=options.random_output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
        )
    if options.dataset_name == "prefix_repetition":
        return _prefix_repetition(
            tokens,
            prefix_len=options.prefix_repetition_prefix_len,
            suffix_len=options.prefix_repetition_suffix_len,
            num_prefixes=options.prefix_repetition_num_prefixes,
            output_len=options.prefix_repetition_output_len,
            shuffle=not options.disable_shuffle,
        )
    shuffle = None if options.disable_shuffle else Random(options.seed)
    if options.dataset_name == "sharegpt":
        read = _sharegpt(_path(options), options.sharegpt_output_len, count_tokens, shuffle)
    else:
        read = _custom(_path(options), options.custom_output_len, count_tokens, shuffle)
    requests = list(islice(read, limit))
    if not requests:
        raise ConfigError(f"{options.dataset_path} has no usable requests")
    return iter(requests) if options.no_oversample else cycle(requests)


def read_trace(options: DatasetOptions, limit: int | None) -> list[Arrival]:
    """Return the first `limit` requests of a recorded trace, beginning at time 0. Raises ConfigError."""
    return TRACE_READERS[options.dataset_name](_path(options), min(limit or MAX_REQUESTS, MAX_REQUESTS))


def _path(options: DatasetOptions) -> Path:
    assert options.dataset_path is not None, "check_dataset requires it"
    return options.dataset_path


# Synthetic prompts of random token ids

SHARED, LENGTHS, OWN, WARMUP = range(4)  # purposes of a draw, the first part of its name


class RandomTokens:
    """Random token ids below `vocab_size`. A draw depends on the seed and on the draw's name only."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._seed = seed
        self._ids = tuple(range(vocab_size))  # prompts share these objects, which saves memory

    def generator(self, *name: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, *name))

    def draw(self, num_tokens: int, *name: int) -> tuple[int, ...]:
        drawn = self.generator(*name).integers(len(self._ids), size=num_tokens)
        return tuple(map(self._ids.__getitem__, drawn.tolist()))


def _random(
    tokens: RandomTokens, *, input_len: int, output_len: int, range_ratio: float, prefix_len: int
) -> Iterator[LoadRequest]:
    """Yield random prompts without end, all with the same first `prefix_len` tokens."""
    prefix = tokens.draw(prefix_len, SHARED)
    input_bounds = length_bounds(input_len, range_ratio, 0)
    output_bounds = length_bounds(output_len, range_ratio, 1)
    for index in count():
        lengths = tokens.generator(LENGTHS, index)
        own = tokens.draw(int(lengths.integers(*input_bounds, endpoint=True)), OWN, index)
        max_tokens = int(lengths.integers(*output_bounds, endpoint=True))
        yield LoadRequest(prefix + own, len(prefix) + len(own), max_tokens)


def _prefix_repetition(
    tokens: RandomTokens, *, prefix_len: int, suffix_len: int, num_prefixes: int, output_len: int, shuffle: bool
) -> Iterator[LoadRequest]:
    """Yield prompts without end, in rounds that use each prefix once."""
    prefixes = [tokens.draw(prefix_len, SHARED, index) for index in range(num_prefixes)]
    for turn in count():
        order = tokens.generator(LENGTHS, turn).permutation(num_prefixes).tolist() if shuffle else range(num_prefixes)
        for index in order:
            prompt = prefixes[index] + tokens.draw(suffix_len, OWN, turn, index)
            yield LoadRequest(prompt, len(prompt), output_len)


def trace_requests(arrivals: Iterable[Arrival], tokens: RandomTokens) -> Iterator[LoadRequest]:
    """Yield random prompts whose blocks are equal exactly where the blocks of the trace are."""
    for index, arrival in enumerate(arrivals):
        shared = chain.from_iterable(tokens.draw(arrival.block_tokens, SHARED, block) for block in arrival.blocks)
        known = tuple(islice(shared, arrival.prompt_tokens))
        prompt = known + tokens.draw(arrival.prompt_tokens - len(known), OWN, index)
        yield LoadRequest(prompt, len(prompt), arrival.output_tokens)


def warmup_requests(like: LoadRequest, number: int, tokens: RandomTokens) -> list[LoadRequest]:
    """Return `number` requests as long as `like`, with different tokens, which other prompts do not share."""
    return [
        LoadRequest(tokens.draw(len(like.prompt), WARMUP, index), like.prompt_tokens, like.max_tokens)
        for index in range(number)
    ]


# Prompts of text: ShareGPT's conversations, and files with one prompt per line

SHAREGPT_MIN_TOKENS = 4  # vLLM's limits, like the next two
SHAREGPT_MAX_PROMPT = 1024
SHAREGPT_MAX_TOTAL = 2048
CUSTOM_OUTPUT_LEN = 256


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def _sharegpt(
    path: Path, output_len: int | None, count_tokens: CountTokens | None, shuffle: Random | None
) -> Iterator[LoadRequest]:
    """Yield the first turn of each conversation of at least two turns. Raises ConfigError.

    Answers are as long as the recorded ones, unless `output_len` is given. Where tokens can be counted, conversations
    of unusual length are left out, as in vLLM.
    """
    if output_len is None and count_tokens is None:
        raise ConfigError(
            "dataset_name sharegpt takes the lengths of the recorded answers: give `tokenizer` FOLDER to count their "
            "tokens, or sharegpt_output_len"
        )
    pairs = [each.conversations[:2] for each in _conversations(path) if len(each.conversations) >= 2]
    if shuffle is not None:
        shuffle.shuffle(pairs)
    for prompt, answer in pairs:
        prompt_tokens = count_tokens(prompt.value) if count_tokens else 0
        max_tokens = output_len or (count_tokens(answer.value) if count_tokens else 0)
        if count_tokens is None or _has_usual_length(prompt_tokens, max_tokens, any_output=output_len is not None):
            yield LoadRequest(prompt.value, prompt_tokens, max_tokens)


def _conversations(path: Path) -> list[_Conversation]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not ShareGPT's JSON: {error}") from error


def _has_usual_length(prompt_tokens: int, max_tokens: int, *, any_output: bool) -> bool:
    return (
        SHAREGPT_MIN_TOKENS <= prompt_tokens <= SHAREGPT_MAX_PROMPT
        and (any_output or max_tokens >= SHAREGPT_MIN_TOKENS)
        and prompt_tokens + max_tokens <= SHAREGPT_MAX_TOTAL
    )


class _Line(msgspec.Struct):
    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)] | None = None


def _custom(
    path: Path, output_len: int | None, count_tokens: CountTokens | None, shuffle: Random | None
) -> Iterator[LoadRequest]:
    """Yield one request per line: `{"prompt": "…"}`, with an optional `output_tokens`. Raises ConfigError."""
    lines = list(_lines(path))
    if shuffle is not None:
        shuffle.shuffle(lines)
    for line in lines:
        prompt_tokens = count_tokens(line.prompt) if count_tokens else 0
        yield LoadRequest(line.prompt, prompt_tokens, output_len or line.output_tokens or CUSTOM_OUTPUT_LEN)


def _lines(path: Path) -> Iterator[_Line]:
    decode = msgspec.json.Decoder(_Line).decode
    for number, text in text_lines(path):
        try:
            yield decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
