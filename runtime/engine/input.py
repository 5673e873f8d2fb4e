"""From a validated request to what the scheduler runs: one sequence, one for each sample, or one beam search.

Pure. One invariant: sample i of a request is, bit for bit, what a request of its own with seed + i would be.
"""

from __future__ import annotations

import msgspec

from ...scheduler import BeamSpec, Request, RequestSpec
from ..common.types import SamplingParams
from ..model.runner import SamplingSpec
from .facade import GenerateRequest
from .validator import SEED_LIMIT


def scheduled_requests(
    request: GenerateRequest,
    prompt: tuple[int, ...],
    *,
    first_id: int,
    seed: int,
    eos_token_ids: frozenset[int],
    submitted: float,
) -> list[Request]:
    """In the order of its samples, with ids from `first_id` on. `submitted` is on the scheduler's clock."""
    params = request.sampling_params
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    sampled = _as_sampled(params)
    return [
        Request(
            RequestSpec(
                first_id + i,
                prompt,
                max_tokens=params.max_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=stop_ids,
                sampling=SamplingSpec(sampled, (seed + i) % SEED_LIMIT, stop_ids),
                tenant=request.tenant,
                priority=request.priority,
                deadline=None if request.deadline_ms is None else submitted + request.deadline_ms / 1000,
                pin_s=None if request.pin_ms is None else request.pin_ms / 1000,
                beam=_beam_search(params),
            )
        )
        for i in range(num_sequences(params))
    ]


def num_sequences(params: SamplingParams) -> int:
    """How many requests the scheduler gets for one of a user's."""
    return 1 if params.beam_width else params.best_of or params.n


def _as_sampled(params: SamplingParams) -> SamplingParams:
    """With the logprobs that ranking and searching need, which may be more than were asked for."""
    if params.beam_width:
        return msgspec.structs.replace(params, logprobs=2 * params.beam_width)
    if params.best_of is not None and params.logprobs is None:
        return msgspec.structs.replace(params, logprobs=0)
    return params


def _beam_search(params: SamplingParams) -> BeamSpec | None:
    if not params.beam_width:
        return None
    return BeamSpec(params.beam_width, params.length_penalty, params.n)
