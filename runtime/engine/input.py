"""From a user's request to the scheduler's requests: token ids, then one or several scheduler requests.

A request becomes one sequence, one for each of its samples, or one beam search. Sample i has, bit for bit, the output
of a separate request with seed + i.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from ...scheduler import BeamSpec, PlacedImage, Request, RequestSpec
from ..common.errors import InvalidRequest
from ..common.prompts import PromptImage, chat_messages
from ..common.types import SamplingParams, StructuredOutputs
from ..model.runner import ReasoningBudget, ReasoningMarkers, SamplingSpec
from .continuation import Continuation
from .facade import GenerateRequest, NewParser
from .structured.grammars import CheckedStructures, may_be_ambiguous
from .structured.tool_calls import ToolCalls
from .text_processor import TextProcessor
from .validator import SEED_LIMIT, Validator

MAX_KEY_TOKENS = 1024  # tokens that identify the conversation of a prompt without messages


class PreparedInput(NamedTuple):
    """The prepared parts of a request beyond its fields."""

    token_ids: tuple[int, ...]  # ids of the prompt
    params: SamplingParams  # parameters with the grammar of the tool calls
    messages: Sequence[Mapping[str, Any]] = ()  # messages of a chat; their content is text, or parts with images
    new_parser: NewParser | None = None
    markup: Mapping[str, int] = {}  # ids of the parser's special tokens
    continuation: Continuation | None = None  # state of a request with `generated`
    images: tuple[PromptImage, ...] = ()  # images that some of the token ids stand for, in order
    has_own_grammar: bool = False  # see `SamplingSpec`


def prepare(
    request: GenerateRequest, text_processor: TextProcessor, validator: Validator, checked: CheckedStructures
) -> PreparedInput:
    """Return the prompt as token ids; a chat is rendered first. The grammar and `generated` are checked.

    All steps take time: call this function in a thread. Raises InvalidRequest, ContextLengthExceeded or
    GenerationFailed.
    """
    if request.generated is not None:
        validator.check_generated(request)
    params = request.sampling_params
    check = partial(checked.check, request.tenant)
    if request.messages is not None:
        return _prepare_chat(request, text_processor, validator, check)
    if params.structured_outputs is not None:
        check(params.structured_outputs)
    if isinstance(request.prompt, tuple):
        return PreparedInput(request.prompt, params, images=request.images)
    return PreparedInput(text_processor.encode(request.prompt or ""), params)


def _prepare_chat(
    request: GenerateRequest,
    text_processor: TextProcessor,
    validator: Validator,
    check: Callable[[StructuredOutputs], None],
) -> PreparedInput:
    messages = chat_messages(request.messages)
    chat = text_processor.render(messages, request.tools, request.template_variables)
    text = chat.text
    validator.check_text(text)
    params = request.sampling_params
    new_parser = None
    has_own_grammar = False
    markup: Mapping[str, int] = {}
    if request.tool_choice is not None:
        calls = ToolCalls(
            text_processor.markup,
            request.tools,
            request.tool_choice,
            check,
            open_arguments=text_processor.open_tool_arguments,
        )
        answer = params.structured_outputs
        structure = calls.structure(text, answer)
        has_own_grammar = structure is not answer and not may_be_ambiguous(answer)
        new_parser = calls.new_parser(text, answer)
        markup = calls.markup.tokens
        params = msgspec.structs.replace(params, structured_outputs=structure)
        validator.check_options(msgspec.structs.replace(request, sampling_params=params))
    if params.structured_outputs is not None:
        check(params.structured_outputs)
    token_ids, images = text_processor.encode_chat(chat, request.image_files)
    return PreparedInput(
        token_ids, params, messages, new_parser, markup, images=images, has_own_grammar=has_own_grammar
    )


def conversation_of(request: GenerateRequest, prepared: PreparedInput) -> bytes:
    """Return a digest of the beginning that all turns of a request's conversation share; the token ids must be valid.

    The beginning is the given `prompt_cache_key`, or the messages up to the user's first one, or else the first tokens
    of the prompt: the largest power of two of them, at most `MAX_KEY_TOKENS`, which changes rarely while a conversation
    grows.
    """
    parts = [request.tenant, f"{request.cache_salt}\0{request.lora}" if request.lora else request.cache_salt]
    if request.prompt_cache_key:
        parts += ["key", request.prompt_cache_key]
    for message in () if request.prompt_cache_key else prepared.messages:
        parts += [message["role"], _text_of(message.get("content", ""))]
        if message["role"] == "user":
            break
    digest = blake2b(msgspec.msgpack.encode([part.encode(errors="surrogatepass") for part in parts]), digest_size=16)
    if len(parts) == 2:
        num_tokens = min(MAX_KEY_TOKENS, 1 << len(prepared.token_ids).bit_length() >> 1)
        digest.update(array("Q", prepared.token_ids[:num_tokens]).tobytes())
    return digest.digest()


def _text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return the text of a message, without its images."""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content or ())


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
    conversation: bytes = b"",
    continuation: Continuation | None = None,
    images: Sequence[PromptImage] = (),
    has_own_grammar: bool = False,
    reasoning: ReasoningMarkers | None = None,
    adapter: str = "",
) -> list[Request]:
    """Return the scheduler's requests, one per sample, or per open output of `continuation`, ids from `first_id` on.

    `submitted` is a time of the scheduler's clock. A request with a budget of reasoning needs `reasoning`.
    `adapter` is the key of the request's adapter.
    """
    params = request.sampling_params
    budget = None
    if params.thinking_token_budget is not None and reasoning is not None:
        budget = ReasoningBudget(reasoning, params.thinking_token_budget, reasoning.begins_in(prompt))
    echoed: tuple[int, ...] = ()
    if request.echo:
        prompt, echoed = prompt[:1], prompt[1:]
        if not echoed and not params.max_tokens:
            raise InvalidRequest("max_tokens must be at least 1 for a prompt of one token, not 0")
    stop_ids = stop_ids_of(params, eos_token_ids)
    begun: Sequence[tuple[int, tuple[int, ...]]]  # index of each sample, and its first tokens
    if continuation is None:
        begun = [(index, ()) for index in range(num_sequences(params))]
    else:
        begun = [(output.choice, output.token_ids) for output in continuation.open]
    sampling_params = _with_ranking_logprobs(params)
    beam = BeamSpec(params.beam_width, params.length_penalty, params.n) if params.beam_width else None
    placed = placed_images(images)
    sampling = SamplingSpec(sampling_params, seed, stop_ids, request.tenant, has_own_grammar, budget, adapter)
    return [
        Request(
            RequestSpec(
                first_id + i,
                prompt,
                max_tokens=len(echoed) + params.max_tokens,
                min_tokens=params.min_tokens,
                stop_token_ids=stop_ids,
                sampling=replace(
                    sampling, seed=(seed + index) % SEED_LIMIT, reasoning=None if budget is None else replace(budget)
                ),
                tenant=request.tenant,
                cache_salt=request.cache_salt,
                adapter=adapter,
                conversation=conversation,
                priority=request.priority,
                deadline=None if request.deadline_ms is None else submitted + request.deadline_ms / 1000,
                pin_s=None if request.pin_ms is None else request.pin_ms / 1000,
                echoed=echoed,
                images=placed,
                beam=beam,
            ),
            generated,
        )
        for i, (index, generated) in enumerate(begun)
    ]


def placed_images(images: Sequence[PromptImage]) -> tuple[PlacedImage, ...]:
    """Return checked images in the scheduler's form."""
    placed = []
    for image in images:
        height, width, _ = image.pixels.shape
        pixels = image.pixels.tobytes()
        placed.append(PlacedImage(image.position, image.tokens, image.digest, height, width, pixels))
    return tuple(placed)


def stop_ids_of(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the ids that end an output."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)


def num_sequences(params: SamplingParams) -> int:
    """Return the number of scheduler requests of a user's request."""
    return 1 if params.beam_width else params.best_of or params.n


def _with_ranking_logprobs(params: SamplingParams) -> SamplingParams:
    """Return `params` with the logprobs that ranking and beam search need, which may be more than requested."""
    if params.beam_width:
        return msgspec.structs.replace(params, logprobs=2 * params.beam_width)
    if params.best_of is not None and params.logprobs is None:
        return msgspec.structs.replace(params, logprobs=0)
    return params
