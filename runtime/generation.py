"""What a request asks for and what it yields: the vocabulary shared by engine, server, clients and `LLM`.

Plain frozen structs, nothing else: no I/O, no model, no validation beyond types. `SamplingParams` crosses the wire as a
msgpack map, the rest as part of TOKENS and DONE. Limits are checked in one place, `engine/validator.py`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to turn logits into tokens, and when to stop. Names are vLLM's; the default is greedy.

    Order of application: logit_bias, penalties, temperature, min_p, top_k, top_p. `temperature=0` is greedy.
    A seeded request is a pure function of (model, prompt, params): the same tokens under any load. Without a seed
    the engine draws one and reports it in `Usage.seed`.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit
    seed: int | None = None  # u64
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: of the chosen token; n: also the n most likely


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one generated token under the model's raw distribution, and the top alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished request consumed, and where its time went (milliseconds)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    recomputed_tokens: int = 0  # prefilled again after a preemption
    seed: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    stall_ms: float = 0.0  # time spent preempted


class OutputChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of a stream: the tokens that arrived together and the text they completed.

    `text` never ends inside a UTF-8 character nor inside a possible stop string, so it may lag behind `token_ids`.
    The last chunk of a stream, and only that, has `finish_reason` and `usage`.
    """

    first_index: int  # of token_ids[0] among the request's generated tokens
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A whole finished request, as `LLM.generate` returns it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    usage: Usage
