"""Structured output: the tokens that a request's grammar allows next, as masks for the sampler.

A mask is a pure function of the grammar and the tokens that the request has generated, so preemption, replay after a
crash and draft tokens do not change what a request generates. Must not import the scheduler's state or frames.

1. After sampling, one llguidance call, the shared job, computes the next masks of all sequences, while the event loop
   commits the samples and plans.
2. New grammars and late sequences get separate jobs, which run at the same time as the rows of the next step. So do
   masks after draft tokens that no grammar forces.
3. A sample without a mask is deferred: its row is computed again in the next step.
4. A job that exceeds its time limit is abandoned. Its sequences restart, each in a job of its own.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

from llguidance import LLMatcher, LLParserLimits

from ....scheduler.plan import ScheduledSequence
from ...common.errors import InvalidRequest
from ...common.heap import UnusedMemory
from ...common.job_threads import JobThreads
from ...common.types import StructuredOutputs
from ...model.runner import SamplingSpec
from ..error_mapping import UNMATCHED
from ..json_schema.references import check_references
from ..json_schema.schema import enforceable_schema, library_options
from .compiled_grammars import CompiledGrammar, CompiledGrammars
from .gbnf_lark import as_lark
from .grammar_vocabulary import ModelTables
from .masks import ITEMS_ERROR, LEXER_ERROR, MaskJob, MaskQueue, RunningGrammar
from .step_masks import StepMasks
from .trials import Trials

WAIT_S = 0.002  # wait for masks, after a step's rows are computed, if other sequences sample in it
WAIT_ALONE_S = 0.02  # wait if no other sequence samples
NUM_MASK_THREADS = 2  # threads for single-sequence masks
MAX_FORCING_BYTES = 16 << 10  # largest grammar whose forced tokens are looked for, which is slow for long texts
SHALLOW_CHARACTERS = 4096  # size of a grammar that any thread may read
DEEP_STACK_BYTES = 256 << 20  # 256 KiB of references, the longest grammar, take 70 MB
MAX_CHECKED = 4096  # structures kept as correct
# Expressions before the first token. The library reads forced text to its end, and each expression takes up to 270
# bytes: a regular expression of 15 characters took 180 MB.
MAX_FIRST_EXPRESSIONS = 200_000
MAX_STEP_EXPRESSIONS = 200_000  # expressions of one mask: 15 ms
MAX_STEP_EXPRESSIONS_ALONE = 20 * MAX_STEP_EXPRESSIONS  # limit for a grammar that shares nothing with other sequences
MAX_LEXER_STATES = 20_000  # lexer states of a compiled grammar
MAX_ITEMS = 20_000  # items of a parser: an object with 500 optional properties has 2,000
MAX_AMBIGUOUS_ITEMS = 350  # items of a client's rules, which may be alternative parses: time is quadratic
PARSER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": MAX_FIRST_EXPRESSIONS,
    "step_lexer_fuel": MAX_STEP_EXPRESSIONS,
    "max_lexer_states": MAX_LEXER_STATES,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# With each mask the library reads the text that a grammar forces to its end: after "aa", (/a+/)* "ab" forces another
# "a" each time. Schemas, regular expressions and choices never force endless text. The last such line counts.
UNFORCED = '\n%llguidance {"no_forcing": true}'
Result = TypeVar("Result")
_stack_size = threading.Lock()  # held while threads start with a larger stack
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*?)\]")  # part of llguidance's message
_SCHEMA_INSIDE = re.compile(r"%json\s*")  # a grammar in Lark's notation


def check_structure(structure: StructuredOutputs, trials: Trials | None = None) -> None:
    """Raise InvalidRequest if the grammar cannot be compiled within the limits. Takes milliseconds: use a thread.

    With `trials`, a separate process tries it first, which is killed if it takes too long or too much memory.
    """
    grammar = grammar_of(structure)
    limits = _limits(structure)
    if trials is not None:
        message = trials.refusal(grammar, limits)
    else:
        validate = partial(LLMatcher.validate_grammar, grammar, limits=LLParserLimits(**limits))
        try:
            message = _call_with_deep_stack(len(grammar), validate)
        except BaseException as error:  # a panic of llguidance
            message = str(error)
    if found := _UNIMPLEMENTED.search(message):
        raise InvalidRequest(f"structured_outputs: keywords of a JSON schema cannot be enforced: {found[1]}")
    if message and not message.startswith("WARNING"):
        raise InvalidRequest(f"structured_outputs: {message.partition('<backtrace>')[0].rstrip()}")


def _call_with_deep_stack(num_characters: int, read: Callable[[], Result]) -> Result:
    """Return the result of `read`, which lets llguidance read a grammar of this length.

    The library calls itself for each reference that leads to another one: 18 KB of references overflow the usual stack
    of 8 MiB. A thread with a deep stack costs a tenth of a millisecond, and memory only for the used part of its stack.
    """
    if num_characters <= SHALLOW_CHARACTERS:
        return read()
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(read())
        except BaseException as error:  # includes panics of llguidance
            done.set_exception(error)

    with _stack_size:
        usual_bytes = threading.stack_size(DEEP_STACK_BYTES)
        try:
            threading.Thread(target=run, name="quire-deep-stack", daemon=True).start()
        finally:
            threading.stack_size(usual_bytes)
    return done.result()


class CheckedStructures:
    """The structures of each tenant that recently passed `check_structure`: most requests repeat one."""

    def __init__(self) -> None:
        self._trials = Trials()
        self._digests: OrderedDict[bytes, None] = OrderedDict()  # most recently used last
        self._unused = UnusedMemory()
        self._lock = threading.Lock()

    def check(self, tenant: str, structure: StructuredOutputs) -> None:
        """Call `check_structure` unless this structure passed it before."""
        digest = blake2b(repr((tenant, structure)).encode(), digest_size=16).digest()
        with self._lock:
            if digest in self._digests:
                self._digests.move_to_end(digest)
                return
            self._unused.return_excess()
        check_structure(structure, self._trials)
        with self._lock:
            self._digests[digest] = None
            if len(self._digests) > MAX_CHECKED:
                self._digests.popitem(last=False)

    def close(self) -> None:
        """End the processes that try grammars. Idempotent."""
        self._trials.close()


def grammar_of(structure: StructuredOutputs) -> str:
    """Return the grammar in llguidance's form. Raises InvalidRequest for a syntax error."""
    try:
        if structure.json is not None:
            return _json_grammar(structure.json)
        if structure.json_object:
            return _json_grammar({"type": "object"})
        if structure.regex is not None:
            return LLMatcher.grammar_from_regex(structure.regex)
        if structure.choice is not None:  # one terminal in total: with one per text, masks take 40 times as long
            return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {' | '.join(map(_lark_text, structure.choice))}")
        return LLMatcher.grammar_from_lark(_client_grammar(structure) + UNFORCED)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs: {error}") from error


def _client_grammar(structure: StructuredOutputs) -> str:
    """Return a client's own grammar in Lark's notation. Raises ValueError or InvalidRequest."""
    if structure.lark is None:
        return as_lark(structure.gbnf or "")
    if structure.lark.lstrip().startswith("{"):  # llguidance would read it as its own form, unchecked
        raise ValueError("a grammar in Lark's notation begins with a rule, not with {")
    _check_schemas_inside(structure.lark)
    return structure.lark


def _lark_text(text: str) -> str:
    """Return a text as a literal in Lark's notation, which has no DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def lark_rule(structure: StructuredOutputs) -> str:
    """Return the grammar as the body of a rule in Lark's notation. Raises InvalidRequest as `grammar_of`."""
    grammar = grammar_of(structure)
    if grammar.startswith("{"):
        only = json.loads(grammar)["grammars"][0]
        if only.get("lark_grammar") is None:
            return f"%json {json.dumps(only['json_schema'])}"
        grammar = only["lark_grammar"]
    return f"%lark {{\n{grammar}\n}}"


def _json_grammar(schema: dict[str, Any] | bool | str) -> str:
    parsed = json.loads(schema) if isinstance(schema, str) else schema
    if isinstance(parsed, bool):
        parsed = {} if parsed else {"enum": []}
    if not isinstance(parsed, dict):
        raise ValueError(f"a JSON schema is an object, true or false, not {type(parsed).__name__}")
    try:
        check_references(parsed)
        enforceable = enforceable_schema(parsed)
    except InvalidRequest as error:
        raise InvalidRequest(f"structured_outputs: {error}") from None
    # "x-guidance" holds options of the library, with which a client could switch off limits.
    checked = {key: value for key, value in enforceable.items() if key != "x-guidance"}
    options: Any = library_options(checked)
    return LLMatcher.grammar_from_json_schema(checked, overrides=options)


def _check_schemas_inside(grammar: str) -> None:
    """Raise InvalidRequest if the grammar contains a JSON schema that cannot be enforced.

    The schema is only checked; the client's text is compiled unchanged.
    """
    for found in _SCHEMA_INSIDE.finditer(grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except ValueError:
            continue  # part of a literal, or malformed: then llguidance names the error
        if isinstance(schema, dict):
            _json_grammar(schema)
            options = schema.pop("x-guidance", None)
            if options is not None and options != library_options(schema):
                raise InvalidRequest("structured_outputs: x-guidance in a JSON schema would switch off limits")


def _limits(structure: StructuredOutputs, *, is_own: bool = False) -> dict[str, Any]:
    """Return the fields of a grammar's `LLParserLimits`; `is_own`: a grammar of tool calls."""
    is_ambiguous = may_be_ambiguous(structure) and not is_own
    return PARSER_LIMITS | {"max_items_in_row": MAX_AMBIGUOUS_ITEMS if is_ambiguous else MAX_ITEMS}


def may_be_ambiguous(structure: StructuredOutputs | None) -> bool:
    """Return whether a text may have several parses, as a client's own rules allow."""
    return structure is not None and (structure.lark is not None or structure.gbnf is not None)


class Grammars:
    """The grammars of the running sequences, for the model at `path`.

    All methods are called on one event loop, except the methods that run in its threads.
    """

    def __init__(self, path: Path) -> None:
        self._running: dict[int, RunningGrammar] = {}  # request id -> grammar, for requests of the last step
        self._beams: dict[tuple[int, tuple[int, ...]], RunningGrammar] = {}  # grammars of beams, likewise
        self._compiled = CompiledGrammars()
        self._compiling = JobThreads(1, "quire-compile")
        self._isolated = JobThreads(NUM_MASK_THREADS, "quire-masks-apart")
        self._shared = JobThreads(1, "quire-masks")
        self._queue = MaskQueue(max(1, len(os.sched_getaffinity(0)) // 2))
        self.tables = ModelTables(path)

    def begin(self, sequences: Sequence[ScheduledSequence]) -> StepMasks | None:
        """Begin to compute the masks that a step lacks, before its rows; None if it samples nothing with a grammar."""
        step, shared = StepMasks(self._queue, WAIT_S, WAIT_ALONE_S), MaskJob()
        for running, sequence, first in self._grammars_of(sequences):
            if running is None:
                step.others_sample |= sequence.num_samples > 0
                continue
            has_next_mask = running.job is not None and running.end == len(sequence.context)
            is_begun = has_next_mask and sequence.num_samples == 1
            if not is_begun and not self._begin_masks(running, sequence, shared):
                step.busy.add(sequence.request_id)
            if sequence.num_samples:
                step.sampling.append((running, sequence, first))
        if shared.parts:
            self._shared.submit(partial(self._queue.run, shared))
        return step if step.sampling else None

    def close(self) -> None:
        """End the threads after their current jobs."""
        for threads in (self._compiling, self._isolated, self._shared):
            threads.close()

    def _grammars_of(
        self, sequences: Sequence[ScheduledSequence]
    ) -> Iterator[tuple[RunningGrammar | None, ScheduledSequence, int]]:
        """Yield each sequence with its grammar, or None, and the index of its first sample.

        The last step's grammar is reused unless it must be restarted or the sequence is new.
        """
        before, self._running = self._running, {}
        beams, self._beams = self._beams, {}
        first = 0
        for sequence in sequences:
            sampling = cast(SamplingSpec, sequence.sampling)
            running: RunningGrammar | None = None
            if sampling.params.structured_outputs is not None:
                if sampling.params.beam_width:
                    running = self._beam(beams, sampling, tuple(sequence.context[sequence.num_prompt_tokens :]))
                else:
                    running = before.get(sequence.request_id) or self._join(sampling)
                    if running.is_overdue():
                        running = self._handle_overdue(running)
                self._running[sequence.request_id] = running
            yield running, sequence, first
            first += sequence.num_samples

    def _begin_masks(self, running: RunningGrammar, sequence: ScheduledSequence, shared: MaskJob) -> bool:
        """Compute the sequence's masks in a separate job, or add them to `shared`, unless it has these masks.

        Returns False if its job still computes masks for other tokens: that job must end first.
        """
        context = sequence.context
        end = len(context) - max(0, sequence.num_samples - 1)
        drafts = tuple(context[end:])
        if running.has_masks(end, drafts):
            return True
        pending = context[sequence.num_prompt_tokens + running.num_consumed : end]
        is_isolated = running.matcher is None or bool(pending) or running.isolated_masks_left > 0
        job = running.job
        if job is not None and not job.is_done and (is_isolated or job.is_late):
            return False  # the two jobs share one thread, one after the other
        running.end = end
        if is_isolated:
            own = MaskJob()
            own.add(running, drafts)
            threads = self._compiling if running.matcher is None else self._isolated
            threads.submit(partial(self._queue.compute, own, partial(self._prepare, own, running, pending)))
        else:
            shared.add(running, drafts)
        return True

    def _join(self, sampling: SamplingSpec) -> RunningGrammar:
        """Return the grammar of a new sequence, with a matcher if it can be copied without waiting for a lexer."""
        running = RunningGrammar(sampling)
        structure = sampling.params.structured_outputs
        assert structure is not None
        if (compiled := self._compiled.kept(sampling.tenant, structure)) is not None:
            _use(compiled, running)
        return running

    def _handle_overdue(self, running: RunningGrammar) -> RunningGrammar:
        """Abandon jobs that take too long. Return the sequence's grammar, restarted if its matcher is lost."""
        for threads in (self._compiling, self._isolated, self._shared):
            threads.replace_slow()
        self._queue.abandon_slow()
        is_lost = running.needs_restart or (running.job is not None and running.job.is_abandoned)
        return running.restarted() if is_lost else running

    def _beam(
        self,
        beams: Mapping[tuple[int, tuple[int, ...]], RunningGrammar],
        sampling: SamplingSpec,
        generated: tuple[int, ...],
    ) -> RunningGrammar:
        """Return the beam's grammar: the last step's if its sample was deferred, or a fork of its parent's."""
        running = beams.get((id(sampling), generated))
        if running is None:
            running = RunningGrammar(sampling, is_beam=True)
            parent = beams.get((id(sampling), generated[:-1]))
            if parent is not None:
                running.fork(parent, generated)
        if running.is_overdue():
            running = self._handle_overdue(running)
        self._beams[id(sampling), generated] = running
        return running

    # Functions that run in the threads

    def _prepare(self, job: MaskJob, running: RunningGrammar, pending: Sequence[int]) -> None:
        """Compile the sequence's grammar if necessary, and pass the newly generated tokens to it."""
        if running.matcher is None:
            job.started = 0.0  # excludes the time to load the vocabulary
            self._queue.num_words = (self.tables.get().vocab_size + 31) // 32
            job.started = time.monotonic()
            self._compile(running)
        matcher = running.matcher
        assert matcher is not None, "its grammar is compiled"
        job.hold_all()
        if job.parts and not running.replay(pending, job.note_progress):
            error = matcher.get_error()
            if running.is_alone and ITEMS_ERROR not in error and LEXER_ERROR not in error:
                raise InvalidRequest(UNMATCHED)

    def _compile(self, running: RunningGrammar) -> None:
        sampling = running.sampling
        structure = sampling.params.structured_outputs
        assert structure is not None
        limits = _limits(structure, is_own=sampling.has_own_grammar)
        if running.is_alone:
            limits["step_lexer_fuel"] = MAX_STEP_EXPRESSIONS_ALONE
        tables = self.tables.get()

        def compile_it(grammar: str) -> LLMatcher:
            read = partial(LLMatcher, tables, grammar, log_level=0, limits=LLParserLimits(**limits))
            return _call_with_deep_stack(len(grammar), read)

        _use(self._compiled.get(sampling.tenant, structure, grammar_of, compile_it, alone=running.is_alone), running)


def _use(compiled: CompiledGrammar, running: RunningGrammar) -> None:
    """Give a sequence its copy of a compiled grammar."""
    structure = running.sampling.params.structured_outputs
    assert structure is not None
    running.compiled = compiled
    running.matcher = compiled.matcher.deep_copy()
    if running.num_late == 0 and compiled.first_mask_s < WAIT_S:
        running.isolated_masks_left = 0
    running.may_force = compiled.num_characters <= MAX_FORCING_BYTES and not may_be_ambiguous(structure)
