"""Turn the options into a load: the requests to send, the time of each, and how their clients behave.

The same options give the same load, prompt for prompt and second for second. As in vLLM, the random intervals of a
fixed number of requests are stretched to end exactly at number / rate, so that every seed gives the same mean rate; a
ramp rises over the requests, not over the seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, repeat, takewhile
from random import Random

from ...common.errors import ConfigError
from ..traffic import draw_interval, rescale
from .datasets import CountTokens, RandomTokens, dataset_requests, read_trace, trace_requests, warmup_requests
from .options import TRACES, LoadOptions, Pacing, check_load
from .records import LoadRequest

DEFAULT_PROMPTS = 1000  # prompts of a run without a duration


@dataclass(frozen=True, slots=True)
class PromptVocabulary:
    """The sources of prompts. None: not available for this server."""

    size: int
    count_tokens: CountTokens | None = None
    to_text: Callable[[tuple[int, ...]], str] | None = None
    only_text: bool = False  # the server takes no token ids: random tokens are sent as their text


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    requests: Iterator[LoadRequest]  # endless in a closed loop that only a duration ends
    times: list[float] | None  # seconds from the start, one per request; None: closed loop
    warmups: list[LoadRequest]


def make_load(options: LoadOptions, vocabulary: PromptVocabulary) -> PreparedLoad:
    """Prepare the requests of a run. Raises ConfigError."""
    check_load(options)
    tokens = RandomTokens(vocabulary.size, options.dataset.seed)
    count = options.dataset.num_prompts or (DEFAULT_PROMPTS if options.pacing.duration is None else None)
    if options.dataset.dataset_name in TRACES:
        times, drawn = _trace(options, tokens, count)
    else:
        times, drawn = _dataset(options, tokens, vocabulary.count_tokens, count)
    first = next(drawn, None)
    if first is None:
        raise ConfigError("duration is over before the first request is due")
    warmups = [_as_text(each, vocabulary) for each in _warmups(first, options.pacing.num_warmups, tokens)]
    requests = (_as_text(each, vocabulary) for each in _with_behavior(chain([first], drawn), options))
    if times is None and count is None:
        return PreparedLoad(requests, None, warmups)
    prepared = list(requests)
    return PreparedLoad(iter(prepared), None if times is None else times[: len(prepared)], warmups)


TimesAndRequests = tuple[list[float] | None, Iterator[LoadRequest]]


def _dataset(
    options: LoadOptions, tokens: RandomTokens, count_tokens: CountTokens | None, count: int | None
) -> TimesAndRequests:
    times = None if options.pacing.closed_loop else draw_times(options.pacing, count, options.dataset.seed)
    num_requests = count if times is None else len(times)
    requests = dataset_requests(options.dataset, tokens, count_tokens, num_requests)
    return times, islice(requests, num_requests)


def _trace(options: LoadOptions, tokens: RandomTokens, count: int | None) -> TimesAndRequests:
    """Use the recorded times, rescaled to the request rate; without `self_timed`, the times of the pacing."""
    pacing = options.pacing
    arrivals = read_trace(options.dataset, count)
    times: list[float] | None = None
    if pacing.self_timed or (pacing.self_timed is None and pacing.ramp_up_strategy is None):
        if not math.isinf(pacing.request_rate):
            arrivals = rescale(arrivals, pacing.request_rate, "request_rate")
        limit = math.inf if pacing.duration is None else pacing.duration
        times = [arrival.time_s for arrival in arrivals if arrival.time_s < limit]
    elif not pacing.closed_loop:
        times = draw_times(pacing, None if count is None else len(arrivals), options.dataset.seed)
    arrivals = arrivals if times is None else arrivals[: len(times)]
    return times, trace_requests(arrivals, tokens)


def _warmups(first: LoadRequest, number: int, tokens: RandomTokens) -> list[LoadRequest]:
    """Return warm-up requests like the first one; where it is text, with its words in reverse order.

    They must not leave the first request's prompt in the prefix cache.
    """
    if isinstance(first.prompt, str):
        return [replace(first, prompt=" ".join(reversed(first.prompt.split())) or first.prompt)] * number
    return warmup_requests(first, number, tokens)


def _with_behavior(requests: Iterable[LoadRequest], options: LoadOptions) -> Iterator[LoadRequest]:
    """Choose for each request whether and when its client cancels, and whether it reads slowly."""
    behavior = options.behavior
    random = Random(options.dataset.seed)
    for request in requests:
        cancels = random.random() < behavior.cancel_rate
        is_slow = random.random() < behavior.slow_reader_rate
        cancel_after = random.randint(1, max(1, request.max_tokens - 1))
        yield replace(
            request,
            cancel_after=cancel_after if cancels else None,
            pause_s=behavior.slow_reader_ms / 1000 if is_slow else 0.0,
        )


def _as_text(request: LoadRequest, vocabulary: PromptVocabulary) -> LoadRequest:
    """Convert random tokens to text for a server that takes only text.

    The text may have a different number of tokens; the result reports the server's count.
    """
    if isinstance(request.prompt, str) or not vocabulary.only_text:
        return request
    if vocabulary.to_text is None:
        raise ConfigError("this endpoint takes text: give `tokenizer` FOLDER to make text of random tokens")
    return replace(request, prompt=vocabulary.to_text(request.prompt))


# Times of requests


def draw_times(pacing: Pacing, count: int | None, seed: int) -> list[float]:
    """Return the seconds from the start of `count` requests, or of all before the duration. Raises ConfigError."""
    random = Random(seed)
    limit = math.inf if pacing.duration is None else pacing.duration
    if count is not None:
        return [time_s for time_s in _counted(pacing, count, random) if time_s < limit]
    if math.isinf(limit) or math.isinf(pacing.request_rate):
        raise ConfigError("without num_prompts, `duration` needs a request_rate or max_concurrency")
    return list(takewhile(lambda time_s: time_s < limit, _times(repeat(pacing.request_rate), pacing, random)))


def ramp_rate(pacing: Pacing, index: int, count: int) -> float:
    """Return the request rate at request `index` of `count`."""
    start, end = pacing.ramp_up_start_rps, pacing.ramp_up_end_rps
    if pacing.ramp_up_strategy is None or start is None or end is None:
        return pacing.request_rate
    progress = index / max(1, count - 1)
    if pacing.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return float(start * (end / start) ** progress)


def _counted(pacing: Pacing, count: int, random: Random) -> list[float]:
    rates = (ramp_rate(pacing, index, count) for index in range(count))
    if pacing.ramp_up_strategy is not None:
        return list(_times(rates, pacing, random))
    if math.isinf(pacing.request_rate):
        return [0.0] * count
    times = list(_times(rates, pacing, random))
    stretch = count / pacing.request_rate / times[-1]
    return [time_s * stretch for time_s in times]


def _times(rates: Iterable[float], pacing: Pacing, random: Random) -> Iterator[float]:
    return accumulate(draw_interval(rate, pacing.burstiness, random) for rate in rates)
