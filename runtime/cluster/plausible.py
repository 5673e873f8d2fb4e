"""Checks of the reports of an engine host about a request. Any other report ends its link, before a stream sees it.

A host knows the secret, but it may have a defect: its report of one request must not harm others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ...scheduler import EncodeRequest, Request, RequestUpdate, SampledToken, State
from ..common.errors import ProtocolError
from ..engine import CoreInfo, Prefilled, StepStats
from ..workers.engine_link import AddAnswer, StatsReport
from ..workers.pending_adds import REFUSALS
from ..workers.token_log import LoggedRequest

FLOAT_BYTES = 4
NO_NUMBER = "a logprob that is not a number"


def check_answer(answer: AddAnswer) -> None:
    """Raise ProtocolError for an answer that neither accepts nor refuses, or whose wait is not finite."""
    is_refusal = answer.refusal is not None
    estimate = answer.estimate
    if estimate is None:
        is_known = is_refusal
    else:
        is_known = not is_refusal or answer.refusal in REFUSALS
        _check_numbers(estimate.predicted_wait_s or 0.0)
    if not is_known:
        raise ProtocolError(f"the answer to request {answer.request_id} neither accepts nor refuses it")


def check_stats(report: StatsReport) -> None:
    """Raise ProtocolError for a wait that is not a finite number."""
    _check_numbers(report.predicted_wait_s)


def check_step(step: StepStats | None, prefilled: Iterable[Prefilled]) -> None:
    """Raise ProtocolError for times that are not finite numbers, or a negative number of tokens."""
    if step is not None:
        _check_numbers(step.duration_s, step.schedule_s, step.commit_s, step.publish_s, step.encoder_s)
        check_counts(step.prefill_tokens, step.decode_tokens)
    check_counts(*[each.num_tokens for each in prefilled])


def check_counts(*counts: int) -> None:
    """Raise ProtocolError for a count below 0."""
    if any(count < 0 for count in counts):
        raise ProtocolError("the host reports a negative number of tokens")


def check_update(update: RequestUpdate, entry: LoggedRequest, info: CoreInfo) -> None:
    """Raise ProtocolError for an impossible update of the logged request, which a core with `info` computes."""
    request = entry.request
    counters = update.counters
    if update.ended != (counters is not None) or (update.finish_reason is not None and update.error is not None):
        raise _wrong(update, "an end without its counters, or more than one")
    if counters is not None:
        if len(counters.seconds_in) != len(State):
            raise _wrong(update, "counters of other states")
        check_counts(counters.cached_tokens, counters.recomputed_tokens)
        _check_numbers(*counters.seconds_in)
    if isinstance(request, EncodeRequest):
        _check_values(update, request, info)
    elif isinstance(request, Request):
        _check_tokens(update, request, len(entry.generated), info.vocab_size)


def _check_tokens(update: RequestUpdate, request: Request, num_generated: int, vocab_size: int) -> None:
    spec = request.spec
    hypotheses = () if update.counters is None else update.counters.hypotheses
    if request.beam is None:
        outputs: Sequence[Sequence[SampledToken]] = (update.tokens,)
        has_outputs = not hypotheses
    else:
        outputs = [each.tokens for each in hypotheses]
        is_complete = update.finish_reason in ("stop", "length")
        has_outputs = not update.tokens and len(outputs) <= request.beam.width and (bool(outputs) or not is_complete)
    room = spec.max_tokens - num_generated
    if not has_outputs or any(len(tokens) > room for tokens in outputs):
        raise _wrong(update, f"other outputs than it has, or more than {spec.max_tokens} tokens")
    for tokens in outputs:
        for token in tokens:
            if not 0 <= token.token_id < vocab_size:
                raise _wrong(update, "token ids outside the vocabulary")
            if token.logprob is not None:
                _check_logprobs(update, token, vocab_size)
    if any(math.isnan(each.cumulative_logprob) for each in hypotheses):
        raise _wrong(update, NO_NUMBER)


def _check_logprobs(update: RequestUpdate, token: SampledToken, vocab_size: int) -> None:
    if not all(0 <= token_id < vocab_size for token_id, _ in token.top_logprobs):
        raise _wrong(update, "alternatives outside the vocabulary")
    if math.isnan(token.logprob or 0.0) or any(math.isnan(logprob) for _, logprob in token.top_logprobs):
        raise _wrong(update, NO_NUMBER)


def _check_values(update: RequestUpdate, request: EncodeRequest, info: CoreInfo) -> None:
    encoder = info.encoder
    width = 0 if encoder is None else FLOAT_BYTES * encoder.dimensions
    num_texts = len(request.spec.texts) if update.finish_reason == "stop" else 0
    if update.tokens or [len(values) for values in update.values] != [width] * num_texts:
        raise _wrong(update, f"other values than those of {num_texts} texts")
    if not all(np.isfinite(np.frombuffer(values, "<f4")).all() for values in update.values):
        raise _wrong(update, "values that are not finite numbers")


def _check_numbers(*values: float) -> None:
    """Raise ProtocolError for NaN, which would remain in sums, and for infinity."""
    if not all(map(math.isfinite, values)):
        raise ProtocolError("the host reports a time that is not a finite number")


def _wrong(update: RequestUpdate, what: str) -> ProtocolError:
    return ProtocolError(f"the host reports of request {update.request_id}: {what}")
