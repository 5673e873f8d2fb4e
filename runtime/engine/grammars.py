"""Structured output: which tokens a request's grammar allows next, as masks for the sampler.

A mask is a pure function of the grammar and the tokens that the request has generated, so preemption, replay after a
crash and draft tokens do not change what a request generates. Grammars are compiled and masks computed in threads,
while the step's rows are computed. A sample whose mask comes too late is deferred: its row is computed again in the
next step. Must not import the scheduler's state or frames.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import llguidance
import numpy as np
import structlog
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ...scheduler.plan import ScheduledSequence, StepResult
from ..common.errors import GenerationFailed, InvalidRequest, QuireError
from ..common.types import StructuredOutputs
from ..model import read_spec
from ..model.runner import AllowedTokens, SamplingSpec
from .text import Tokenizer, has_tokenizer
from .text_processor import TextProcessor

WAIT_S = 0.002  # for masks, after a step's rows are computed, if other sequences sample in it
WAIT_ALONE_S = 0.02  # if none does
NUM_THREADS = 2  # that compute masks; one more compiles
MAX_COMPILED = 128  # grammars that are kept compiled
MAX_COMPILED_PER_TENANT = 16
JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"  # at most once in each place: no model fills its output with spaces

_log = structlog.get_logger("quire.engine")


def check_structure(structure: StructuredOutputs) -> None:
    """Raise InvalidRequest if the grammar cannot be compiled within the limits. It takes milliseconds: use a thread."""
    message = LLMatcher.validate_grammar(grammar_of(structure), limits=_limits())
    if message and not message.startswith("WARNING"):
        raise InvalidRequest(f"structured_outputs: {message}")


def grammar_of(structure: StructuredOutputs) -> str:
    """Return the grammar in llguidance's form. Raises InvalidRequest if it is not even a grammar of its kind."""
    try:
        if structure.json is not None:
            return _json_grammar(structure.json)
        if structure.json_object:
            return _json_grammar({"type": "object"})
        if structure.regex is not None:
            return LLMatcher.grammar_from_regex(structure.regex)
        if structure.choice is not None:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structure.choice)
            return LLMatcher.grammar_from_lark(f"start: {texts}")
        return llguidance.grammar_from("lark" if structure.lark else "gbnf", structure.lark or structure.gbnf or "")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs: {error}") from error


def _json_grammar(schema: dict[str, Any] | bool | str) -> str:
    parsed = json.loads(schema) if isinstance(schema, str) else schema
    if isinstance(parsed, bool):
        parsed = {} if parsed else {"enum": []}
    if not isinstance(parsed, dict):
        raise ValueError(f"a JSON schema is an object, true or false, not {type(parsed).__name__}")
    # "x-guidance" holds options of the library: a client's own would switch off limits.
    checked = {key: value for key, value in parsed.items() if key != "x-guidance"}
    return LLMatcher.grammar_from_json_schema(checked, overrides={"whitespace_pattern": JSON_WHITESPACE})


def _limits() -> LLParserLimits:
    return LLParserLimits(max_lexer_states=20_000, max_grammar_size=200_000, verbose_errors=False)


@dataclass(slots=True)
class _Running:
    """The matcher of one running sequence, and its job: the computation of its masks, which one thread runs."""

    structure: StructuredOutputs
    tenant: str
    matcher: LLMatcher | None = None
    num_consumed: int = 0  # generated tokens that the matcher has seen
    job: Future[AllowedTokens] | None = None
    job_for: tuple[int, ...] = field(default=())  # length of the context without draft tokens, then the draft tokens


@dataclass(slots=True)
class StepMasks:
    """The masks of one step. The methods are called in the step's thread."""

    jobs: dict[int, Future[AllowedTokens]] = field(default_factory=dict)  # by request id
    sampling: list[tuple[_Running, ScheduledSequence]] = field(default_factory=list)
    others_sample: bool = False  # sequences without a grammar

    def wait(self) -> dict[int, AllowedTokens]:
        """Wait for the masks, but not so long that other sequences notice. What is not ready has no masks."""
        if not self.others_sample:
            wait(self.jobs.values(), WAIT_ALONE_S, FIRST_COMPLETED)
        wait(self.jobs.values(), WAIT_S)
        return {request_id: job.result() if job.done() else AllowedTokens() for request_id, job in self.jobs.items()}

    def with_forced_tokens(self, result: StepResult) -> StepResult:
        """Return the result with the tokens that each grammar forces after the last sample that will be accepted."""
        sampled = list(result.sampled)
        start: dict[int, int] = {}  # index of each request's first sample
        for index, token in enumerate(sampled):
            start.setdefault(token.request_id, index)
        for running, sequence in self.sampling:
            at = start[sequence.request_id]
            drafts = sequence.context[len(sequence.context) - sequence.num_samples + 1 :]
            accepted: list[int] = []
            for token, draft in zip(sampled[at : at + sequence.num_samples], (*drafts, None), strict=True):
                if token.error is not None or token.is_deferred:
                    break
                accepted.append(token.token_id)
                if token.token_id != draft:
                    forced = tuple(_forced_after(running, accepted))
                    sampled[at + len(accepted) - 1] = token._replace(forced=forced)
                    break
        return replace(result, sampled=tuple(sampled))


class Grammars:
    """The grammars of the sequences that run, for the model at `path`.

    All methods but `load` and those of its threads are called on one event loop.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._running: dict[int, _Running] = {}  # by request id: those of the last step
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()  # by tenant and grammar
        self._compiling = ThreadPoolExecutor(1, "quire-compile")
        self._computing = ThreadPoolExecutor(NUM_THREADS, "quire-masks")
        self._tokenizer: LLTokenizer | None = None

    def load(self) -> None:
        """Read the model's tokenizer now, which takes seconds and holds the GIL, instead of with the first grammar.

        Raises CorruptCheckpoint. A model without tokenizer has no grammars.
        """
        if has_tokenizer(self._path):
            self._tokenizer = _load_tables(self._path)

    def begin(self, sequences: Sequence[ScheduledSequence]) -> StepMasks | None:
        """Begin to compute the masks of a step, before its rows; None if no sequence of the step has a grammar."""
        before, self._running = self._running, {}
        step = StepMasks()
        for sequence in sequences:
            sampling = cast(SamplingSpec, sequence.sampling)
            if (structure := sampling.params.structured_outputs) is None:
                step.others_sample |= sequence.num_samples > 0
                continue
            running = before.get(sequence.request_id) or _Running(structure, sampling.tenant)
            self._running[sequence.request_id] = running
            job = self._job(running, sequence)
            if sequence.num_samples:
                step.jobs[sequence.request_id] = job
                step.sampling.append((running, sequence))
        return step if step.jobs else None

    def close(self) -> None:
        """End the threads when what they run has ended."""
        for threads in (self._compiling, self._computing):
            threads.shutdown(wait=False, cancel_futures=True)

    def _job(self, running: _Running, sequence: ScheduledSequence) -> Future[AllowedTokens]:
        """Return the job for the sequence's masks; a job for other tokens that still runs is never ready for these."""
        num_drafts = max(0, sequence.num_samples - 1)
        end = len(sequence.context) - num_drafts
        drafts = tuple(sequence.context[end:])
        if running.job is not None and (not running.job.done() or running.job_for == (end, *drafts)):
            return running.job if running.job_for == (end, *drafts) else Future()
        generated = list(sequence.context[sequence.num_prompt_tokens : end])
        threads = self._compiling if running.matcher is None else self._computing
        running.job = threads.submit(self._allowed, running, generated, drafts)
        running.job_for = (end, *drafts)
        return running.job

    # In the threads

    def _allowed(self, running: _Running, generated: list[int], drafts: tuple[int, ...]) -> AllowedTokens:
        try:
            if running.matcher is None:
                running.matcher = self._matcher(running)
            return AllowedTokens(_masks(running, generated, drafts, (self._tables().vocab_size + 31) // 32))
        except QuireError as error:
            return AllowedTokens(error=str(error))
        except Exception as error:
            _log.exception("computing a mask failed")
            return AllowedTokens(error=f"structured_outputs: {error!r}")

    def _matcher(self, running: _Running) -> LLMatcher:
        """Return a new matcher of the sequence's grammar. Only the compiling thread calls this."""
        key = (running.tenant, grammar_of(running.structure))
        if key not in self._compiled:
            own = [each for each in self._compiled if each[0] == running.tenant]
            if len(own) >= MAX_COMPILED_PER_TENANT:
                del self._compiled[own[0]]
            elif len(self._compiled) >= MAX_COMPILED:
                self._compiled.popitem(last=False)
            self._compiled[key] = LLMatcher(self._tables(), key[1], log_level=0, limits=_limits())
        self._compiled.move_to_end(key)
        return self._compiled[key].deep_copy()

    def _tables(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = _load_tables(self._path)
        return self._tokenizer


def _load_tables(path: Path) -> LLTokenizer:
    """Return llguidance's tables of a model's vocabulary, which keep the tokenizer."""
    spec, tokenizer = read_spec(path), TextProcessor.load(path).tokenizer
    assert tokenizer is not None, "Validator.check_options refuses grammars for a model without tokenizer"
    known = tokenizer.eos_token_ids.union(spec.eos_token_ids)
    ends = sorted(token_id for token_id in known if token_id < spec.vocab_size)
    if not ends:
        raise GenerationFailed("structured_outputs need a token that ends the output; this model has none")
    wrapper = TokenizerWrapper(_Vocabulary(tokenizer, ends[0]))
    return LLTokenizer(wrapper, n_vocab=spec.vocab_size, eos_token=ends)


def _masks(running: _Running, generated: list[int], drafts: tuple[int, ...], num_words: int) -> Any:
    """Return int32 [1 + drafts, words]: the tokens allowed after `generated`, and after each draft token.

    Nothing is masked after a draft token that is not allowed: it is not sampled, so what follows is not used.
    """
    matcher = running.matcher
    assert matcher is not None
    matcher.consume_tokens(generated[running.num_consumed :])
    running.num_consumed = len(generated)
    masks = np.full((1 + len(drafts), num_words), -1, np.int32)
    num_allowed = 0
    for row, draft in zip(masks, (*drafts, None), strict=True):
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error():
            raise GenerationFailed(f"structured_outputs: {matcher.get_error()}")
        if draft is None or matcher.is_stopped() or not matcher.try_consume_tokens([draft]):
            break
        num_allowed += 1
    matcher.rollback(num_allowed)
    return masks


def _forced_after(running: _Running, accepted: list[int]) -> list[int]:
    matcher = running.matcher
    assert matcher is not None
    num_taken = matcher.try_consume_tokens(accepted)
    forced = [] if matcher.is_stopped() else matcher.compute_ff_tokens()
    matcher.rollback(num_taken)
    return forced


class _Vocabulary:
    """A tokenizer in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.tokens = tokenizer.all_bytes()
        self.special_token_ids = sorted(tokenizer.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
