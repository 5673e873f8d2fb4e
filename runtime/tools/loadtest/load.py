"""A load: which requests, when, and how their clients behave, put together out of dataset, pacing and behaviour.

It must not send anything. One invariant: the same options give the same load, prompt for prompt and second for second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from random import Random

from ...common.errors import ConfigError
from ..traffic import check_number, rescale
from .datasets import TRACES, DatasetOptions, check_dataset, dataset_requests, read_trace
from .drawn import RandomTokens, trace_requests, warmup_requests
from .request import Request
from .schedule import Pacing, check_pacing, draw_times
from .texts import CountTokens

DEFAULT_PROMPTS = 1000  # without --duration


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """Of clients, drawn for each request."""

    cancel_rate: float = 0.0
    "Share of requests, 0 to 1, whose client leaves at a random token of the answer."
    slow_reader_rate: float = 0.0
    "Share of requests, 0 to 1, whose client pauses after each chunk it reads."
    slow_reader_ms: float = 100.0
    "How long it pauses."


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    pacing: Pacing = field(default_factory=Pacing)
    behaviour: Behaviour = field(default_factory=Behaviour)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What prompts are made of. None: there is nothing to do it with."""

    size: int
    count_tokens: CountTokens | None = None
    to_text: Callable[[tuple[int, ...]], str] | None = None
    only_text: bool = False  # drawn tokens are sent as their text


@dataclass(frozen=True, slots=True)
class Load:
    requests: Iterator[Request]  # without end in a closed loop that only a duration ends
    times: list[float] | None  # seconds from the start, one a request; None: closed loop
    warmups: list[Request]


def check_load(options: LoadOptions) -> None:
    """Raises ConfigError."""
    check_dataset(options.dataset)
    check_pacing(options.pacing)
    check_number("--cancel-rate", options.behaviour.cancel_rate, 0, 1)
    check_number("--slow-reader-rate", options.behaviour.slow_reader_rate, 0, 1)
    check_number("--slow-reader-ms", options.behaviour.slow_reader_ms, 1, 1e6)
    if options.pacing.self_timed is not None and options.dataset.dataset_name not in TRACES:
        raise ConfigError(f"--self-timed is for recorded traces: {', '.join(TRACES)}")
    if options.pacing.self_timed and options.pacing.ramp_up_strategy is not None:
        raise ConfigError("--self-timed and --ramp-up-strategy each say when requests are sent: leave out one")


def make_load(options: LoadOptions, vocabulary: Vocabulary) -> Load:
    """Raises ConfigError."""
    check_load(options)
    tokens = RandomTokens(vocabulary.size, options.dataset.seed)
    count = options.dataset.num_prompts or (DEFAULT_PROMPTS if options.pacing.duration is None else None)
    if options.dataset.dataset_name in TRACES:
        times, drawn = _recorded(options, tokens, count)
    else:
        times, drawn = _unrecorded(options, tokens, vocabulary.count_tokens, count)
    first = next(drawn, None)
    if first is None:
        raise ConfigError("--duration is over before the first request is due")
    warmups = [_as_text(each, vocabulary) for each in _warmups(first, options.pacing.num_warmups, tokens)]
    requests = (_as_text(each, vocabulary) for each in _behave(chain([first], drawn), options))
    if times is None and count is None:
        return Load(requests, None, warmups)
    prepared = list(requests)
    return Load(iter(prepared), None if times is None else times[: len(prepared)], warmups)


Drawn = tuple[list[float] | None, Iterator[Request]]


def _unrecorded(
    options: LoadOptions, tokens: RandomTokens, count_tokens: CountTokens | None, count: int | None
) -> Drawn:
    times = None if options.pacing.closed_loop else draw_times(options.pacing, count, options.dataset.seed)
    num_requests = count if times is None else len(times)
    requests = dataset_requests(options.dataset, tokens, count_tokens, num_requests)
    return times, islice(requests, num_requests)


def _recorded(options: LoadOptions, tokens: RandomTokens, count: int | None) -> Drawn:
    """As recorded, at a rate stretched or squeezed to that; or, not self-timed, whenever the pacing says."""
    pacing = options.pacing
    arrivals = read_trace(options.dataset, count)
    times: list[float] | None = None
    if pacing.self_timed or (pacing.self_timed is None and pacing.ramp_up_strategy is None):
        if not math.isinf(pacing.request_rate):
            arrivals = rescale(arrivals, pacing.request_rate, "--request-rate")
        limit = math.inf if pacing.duration is None else pacing.duration
        times = [arrival.time_s for arrival in arrivals if arrival.time_s < limit]
    elif not pacing.closed_loop:
        times = draw_times(pacing, None if count is None else len(arrivals), options.dataset.seed)
    arrivals = arrivals if times is None else arrivals[: len(times)]
    return times, trace_requests(arrivals, tokens)


def _warmups(first: Request, number: int, tokens: RandomTokens) -> list[Request]:
    """Like the first request; as vLLM does, it itself where it is text."""
    return [first] * number if isinstance(first.prompt, str) else warmup_requests(first, number, tokens)


def _behave(requests: Iterable[Request], options: LoadOptions) -> Iterator[Request]:
    behaviour, random = options.behaviour, Random(options.dataset.seed)
    for request in requests:
        leaves, is_slow = random.random() < behaviour.cancel_rate, random.random() < behaviour.slow_reader_rate
        leave_after = random.randint(1, max(1, request.max_tokens - 1))
        yield replace(
            request,
            cancel_after=leave_after if leaves else None,
            pause_s=behaviour.slow_reader_ms / 1000 if is_slow else 0.0,
        )


def _as_text(request: Request, vocabulary: Vocabulary) -> Request:
    """Text of drawn tokens is seldom as many tokens again: the server's count is what is reported."""
    if isinstance(request.prompt, str) or not vocabulary.only_text:
        return request
    if vocabulary.to_text is None:
        raise ConfigError("this endpoint takes text: give --tokenizer FOLDER to make text of drawn tokens")
    return replace(request, prompt=vocabulary.to_text(request.prompt))
