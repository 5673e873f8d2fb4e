"""From a user's request to what the scheduler runs: token ids, then one or several scheduler requests.

A request becomes one sequence, one for each of its samples, or one beam search. Sample i has, bit for bit, the output
of a request of its own with seed + i.
"""

from __future__ import annotations

import msgspec

from ...scheduler import BeamSpec, Request, RequestSpec
from ..common.errors import InvalidRequest
from ..common.prompts import chat_messages
from ..common.types import SamplingParams
from ..model.runner import SamplingSpec
from .facade import GenerateRequest
from .grammars import check_structure
from .text_processor import TextProcessor
from .validator import SEED_LIMIT, Validator


def prompt_token_ids(request: GenerateRequest, text_processor: TextProcessor, validator: Validator) -> tuple[int, ...]:
    """Return the prompt as token ids; a chat is rendered first. The grammar of a structured output is checked.

    Both take their time: call it in a thread. Raises InvalidRequest, ContextLengthExceeded or GenerationFailed.
    """
    if request.sampling_params.structured_outputs is not None:
        check_structure(request.sampling_params.structured_outputs)
    if isinstance(request.prompt, tuple):
        return request.prompt
    if request.prompt is not None:
        return text_processor.encode(request.prompt)
    text = text_processor.render(chat_messages(request.messages))
    validator.check_text(text)
    return text_processor.encode(text, add_special_tokens=False)  # the template has written them


def fitted(request: GenerateRequest, room: int) -> GenerateRequest:
    """Return the request with `max_tokens` lowered to `room` tokens, but not below `min_tokens` and 1."""
    params = request.sampling_params
    max_tokens = min(params.max_tokens, max(room, params.min_tokens, 1))
    return msgspec.structs.replace(request, sampling_params=msgspec.structs.replace(params, max_tokens=max_tokens))


def scheduled_requests(
    request: GenerateRequest,
    prompt: tuple[int, ...],
    *,
    first_id: int,
    seed: int,
    eos_token_ids: frozenset[int],
    submitted: float,
) -> list[Request]:
    """Return the scheduler's requests, one per sample, with ids from `first_id` on.

    `submitted` is a time of the scheduler's clock.
    """
    params = request.sampling_params
    echoed: tuple[int, ...] = ()
    if request.echo:
        prompt, echoed = prompt[:1], prompt[1:]
        if not echoed and not params.max_tokens:
            raise InvalidRequest("max_tokens must be at least 1 for a prompt of one token, not 0")
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    sampling_params = _with_ranking_logprobs(params)
    beam = BeamSpec(params.beam_width, params.length_penalty, params.n) if params.beam_width else None
    return [
        Request(
            RequestSpec(
                first_id + i,
                prompt,
                max_tokens=len(echoed) + params.max_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=stop_ids,
                sampling=SamplingSpec(sampling_params, (seed + i) % SEED_LIMIT, stop_ids, request.tenant),
                tenant=request.tenant,
                cache_salt=request.cache_salt,
                priority=request.priority,
                deadline=None if request.deadline_ms is None else submitted + request.deadline_ms / 1000,
                pin_s=None if request.pin_ms is None else request.pin_ms / 1000,
                echoed=echoed,
                beam=beam,
            )
        )
        for i in range(num_sequences(params))
    ]


def num_sequences(params: SamplingParams) -> int:
    """Return how many scheduler requests a user's request becomes."""
    return 1 if params.beam_width else params.best_of or params.n


def _with_ranking_logprobs(params: SamplingParams) -> SamplingParams:
    """Return `params` with the logprobs that ranking and beam search need, which may be more than requested."""
    if params.beam_width:
        return msgspec.structs.replace(params, logprobs=2 * params.beam_width)
    if params.best_of is not None and params.logprobs is None:
        return msgspec.structs.replace(params, logprobs=0)
    return params
