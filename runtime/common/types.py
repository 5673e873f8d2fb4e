"""What a request asks for and what it yields: the vocabulary shared by engine, server, clients and `LLM`.

Plain frozen structs and how chunks join: no I/O, no model, no validation beyond types. `SamplingParams` crosses the
wire as a msgpack map, the rest as part of TOKENS and DONE. Limits are checked in one place, `engine/validator.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ...scheduler import FinishReason as FinishReason  # exported: the runtime uses the type from here
from .errors import GenerationFailed


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to turn logits into tokens, and when to stop. Names are vLLM's; the default is greedy.

    Order of application: logit_bias, penalties, temperature, min_p, top_k, top_p. `temperature=0` is greedy.
    A seeded request is a pure function of (model, prompt, params): the same tokens under any load. Without a seed
    the engine draws one and reports it in `Usage.seed`.

    A request may yield several choices. `n`: so many samples; choice i is what a request with seed + i (mod 2^64)
    yields alone. `best_of`: so many are drawn, the `n` with the highest cumulative logprob come back, best first.
    `beam_width`: the `n` best of a beam search, best first. The latter two come at the end, not as a stream.
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
    n: int = 1
    best_of: int | None = None
    beam_width: int = 0  # 0: no beam search
    length_penalty: float = 1.0  # of beams: score = cumulative logprob / length ** length_penalty


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one generated token under the model's raw distribution, and the top alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished request consumed, all its choices together, and where its time went (milliseconds)."""

    prompt_tokens: int  # once, however many choices
    completion_tokens: int  # of all that was drawn, with best_of also what is not returned
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    recomputed_tokens: int = 0  # prefilled again after a preemption
    seed: int = 0  # of choice 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0  # of the choice that took longest
    stall_ms: float = 0.0  # time spent preempted, likewise


class OutputChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of a stream: the tokens of one choice that arrived together and the text they completed.

    `text` never ends inside a UTF-8 character nor inside a possible stop string, so it may lag behind `token_ids`.
    A chunk with `finish_reason` is its choice's last. The last chunk of a stream, and only that, has `usage`.
    """

    first_index: int  # of token_ids[0] among its choice's generated tokens
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    choice: int = 0
    cumulative_logprob: float | None = None  # of the whole choice; where choices were ranked by it


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One finished continuation of a prompt."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    cumulative_logprob: float | None  # known with logprobs, best_of or beam_width


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request. Token ids, text, logprobs and finish reason are those of its first output."""

    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    prompt_token_ids: tuple[int, ...] | None = None  # None from a client: servers do not send them

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason


def join_chunks(chunks: Iterable[OutputChunk]) -> tuple[CompletionOutput, ...]:
    """Return the outputs of one finished stream, in order. Raises GenerationFailed if one has not ended."""
    by_choice: dict[int, list[OutputChunk]] = {}
    for chunk in chunks:
        by_choice.setdefault(chunk.choice, []).append(chunk)
    return tuple(_join(by_choice[choice]) for choice in sorted(by_choice))


def _join(chunks: list[OutputChunk]) -> CompletionOutput:
    reason = chunks[-1].finish_reason
    if reason is None:
        raise GenerationFailed("the stream ended without a finish reason")
    logprobs = None
    if any(chunk.logprobs is not None for chunk in chunks):
        logprobs = tuple(entry for chunk in chunks for entry in chunk.logprobs or ())
    ranked_by = [chunk.cumulative_logprob for chunk in chunks if chunk.cumulative_logprob is not None]
    total = None if logprobs is None else sum(entry.logprob for entry in logprobs)
    return CompletionOutput(
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        text="".join(chunk.text for chunk in chunks),
        logprobs=logprobs,
        finish_reason=reason,
        cumulative_logprob=ranked_by[0] if ranked_by else total,
    )
