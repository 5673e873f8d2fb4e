"""What an engine host can say of a request. Anything else ends its link, before it reaches a stream or the token log.

A host knows the secret, but it may have a defect: what it reports of one request must not cost others their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...scheduler import EncodeRequest, QueuedRequest, Request, RequestUpdate, SampledToken, State
from ..common.errors import ProtocolError
from ..engine import CoreInfo
from ..workers.engine_link import AddAnswer
from ..workers.pending_adds import REFUSALS

FLOAT_BYTES = 4


def check_answer(answer: AddAnswer) -> None:
    """Raise ProtocolError for an answer that neither accepts nor refuses."""
    is_refusal = answer.refusal is not None
    if is_refusal and (answer.estimate is None or answer.refusal in REFUSALS):
        return
    if is_refusal or answer.estimate is None:
        raise ProtocolError(f"the answer to request {answer.request_id} neither accepts nor refuses it")


def check_update(update: RequestUpdate, request: QueuedRequest, info: CoreInfo) -> None:
    """Raise ProtocolError for an update that cannot be of `request`, which a core with `info` computes."""
    counters = update.counters
    if update.ended != (counters is not None) or (update.finish_reason is not None and update.error is not None):
        raise _wrong(update, "an end without its counters, or more than one")
    if counters is not None and len(counters.seconds_in) != len(State):
        raise _wrong(update, "counters of other states")
    if isinstance(request, EncodeRequest):
        _check_values(update, request, info)
    elif isinstance(request, Request):
        _check_tokens(update, request, info.vocab_size)


def _check_tokens(update: RequestUpdate, request: Request, vocab_size: int) -> None:
    spec, hypotheses = request.spec, () if update.counters is None else update.counters.hypotheses
    if request.beam is None:
        outputs: Sequence[Sequence[SampledToken]] = (update.tokens,)
        has_outputs = not hypotheses
    else:
        outputs = [each.tokens for each in hypotheses]
        is_complete = update.finish_reason in ("stop", "length")
        has_outputs = not update.tokens and len(outputs) <= request.beam.width and (bool(outputs) or not is_complete)
    room = spec.max_tokens - request.num_output_tokens
    if not has_outputs or any(len(tokens) > room for tokens in outputs):
        raise _wrong(update, f"other outputs than it has, or more than {spec.max_tokens} tokens")
    if any(not 0 <= token.token_id < vocab_size for tokens in outputs for token in tokens):
        raise _wrong(update, "token ids outside the vocabulary")


def _check_values(update: RequestUpdate, request: EncodeRequest, info: CoreInfo) -> None:
    encoder = info.encoder
    width = 0 if encoder is None else FLOAT_BYTES * encoder.dimensions
    num_texts = len(request.spec.texts) if update.finish_reason == "stop" else 0
    if update.tokens or [len(values) for values in update.values] != [width] * num_texts:
        raise _wrong(update, f"other values than those of {num_texts} texts")


def _wrong(update: RequestUpdate, what: str) -> ProtocolError:
    return ProtocolError(f"the host reports of request {update.request_id}: {what}")
