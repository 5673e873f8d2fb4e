"""Masks of grammars: the tokens that they allow, when they are ready, and which results are kept."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from quire import LLM
from quire.runtime.common import job_threads
from quire.runtime.common.errors import GenerationFailed, InvalidRequest
from quire.runtime.common.heap import allocated_bytes, resident_bytes
from quire.runtime.common.types import SamplingParams, StructuredOutputs
from quire.runtime.engine.structured import compiled_grammars, grammar_vocabulary, grammars
from quire.runtime.engine.structured import masks as masks_module
from quire.runtime.engine.structured.compiled_grammars import MAX_GROWTH, CompiledGrammars
from quire.runtime.engine.structured.grammar_vocabulary import GrammarVocabulary, load_tables
from quire.runtime.engine.structured.grammars import CheckedStructures, Grammars, check_structure, grammar_of
from quire.runtime.engine.structured.masks import MaskJob, MaskQueue, RunningGrammar
from quire.runtime.engine.structured.step_masks import StepMasks
from quire.runtime.engine.text_processor import TextProcessor
from quire.runtime.model import BUNDLED_MODEL, read_spec
from quire.runtime.model.runner import SamplingSpec
from quire.scheduler.plan import SampledToken, ScheduledSequence, StepResult

TEXT = TextProcessor.load(BUNDLED_MODEL)
TOKENIZER = TEXT.tokenizer
assert TOKENIZER is not None
VOCAB = TOKENIZER.vocab_size
EOS = next(iter(TOKENIZER.eos_token_ids))
PROMPT = [5, 6]
SCATTERED_BYTES = 128 << 20
WORD = StructuredOutputs(regex="[ab]{2}")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


A, B, C = (ids(letter)[0] for letter in "abc")


@pytest.fixture
def masks() -> Iterator[Grammars]:
    found = Grammars(BUNDLED_MODEL)
    yield found
    found.close()


def sequence(
    structure: StructuredOutputs | None,
    generated: list[int],
    drafts: tuple[int, ...] = (),
    *,
    request_id: int = 1,
    tenant: str = "",
    samples: bool = True,
) -> ScheduledSequence:
    context = [*PROMPT, *generated, *drafts]
    sampling = SamplingSpec(SamplingParams(structured_outputs=structure), 1, frozenset({EOS}), tenant)
    num_samples = 1 + len(drafts) if samples else 0
    return ScheduledSequence(request_id, [[0]], 0, context, num_samples, sampling, context, len(PROMPT))


def ready(step: StepMasks | None) -> dict[int, Any]:
    """Return the masks of each sequence, or its error, once all are ready."""
    assert step is not None
    jobs = [running.job for running, _, _ in step.sampling]
    with step.queue.changed:
        assert step.queue.changed.wait_for(lambda: all(job is not None and job.is_done for job in jobs), 60)
    return given(step)


def given(step: StepMasks | None) -> dict[int, Any]:
    """Return the masks of each sequence that are ready now, its error, or None."""
    assert step is not None
    found = step.wait()
    outcome: dict[int, Any] = dict(found.missing)
    for _, each, _ in step.sampling:
        if each.request_id in found.first:
            first = found.first[each.request_id]
            outcome[each.request_id] = found.masks[first : first + each.num_samples]
    return outcome


def advance(step: StepMasks | None, *samples: SampledToken, max_forced: int = 64) -> list[tuple[int, ...]]:
    """Give a step its samples; return the tokens that are forced after each."""
    assert step is not None
    result = step.advance(StepResult(1, samples, 0.0), max_forced)
    threading.Thread(target=step.compute_next, daemon=True).start()
    return [sample.forced for sample in result.sampled]


def computed(step: StepMasks | None) -> None:
    """Wait for the masks after a step's samples: until then its matchers are in use."""
    assert step is not None
    with step.queue.changed:
        assert step.queue.changed.wait_for(lambda: step.next.is_done or not step.next.parts, 60)


def allowed(mask: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_masks_follow_the_generated_tokens(masks: Grammars) -> None:
    pair = {token for token in range(VOCAB) if TOKENIZER.token_bytes(token) in (b"aa", b"ab", b"ba", b"bb")}
    for generated, expected in (([], {A, B} | pair), ([A], {A, B}), ([A, B], {EOS})):
        (mask,) = ready(masks.begin([sequence(WORD, generated)]))[1]
        assert allowed(mask) == expected


def test_a_json_object_is_no_other_json(masks: Grammars) -> None:
    (mask,) = ready(masks.begin([sequence(StructuredOutputs(json_object=True), [])]))[1]
    first = {(TOKENIZER.token_bytes(token) or b"").lstrip()[:1] for token in allowed(mask)}
    assert first - {b""} == {b"{"}


def test_the_first_mask_is_computed_once_for_all_requests_with_the_grammar(masks: Grammars) -> None:
    (first,) = ready(masks.begin([sequence(WORD, [])]))[1]
    (compiled,) = masks._compiled._kept.values()
    assert compiled.first_mask is not None
    compiled.first_mask = np.packbits(np.arange(8 * len(compiled.first_mask)) == C, bitorder="little").tobytes()
    second = sequence(WORD, [], request_id=2)
    step = masks.begin([sequence(WORD, []), second])
    assert {A, B} < allowed(first)
    assert [allowed(ready(step)[number][0]) for number in (1, 2)] == [allowed(first), {C}]
    (third,) = ready(masks.begin([sequence(WORD, [A], request_id=3)]))[3]
    assert allowed(third) == {A, B}
    fourth = ready(masks.begin([sequence(WORD, [], (A,), request_id=4)]))[4]
    assert [allowed(mask) for mask in fourth] == [allowed(first), {A, B}], "with draft tokens"


def test_a_sequence_whose_grammar_is_kept_joins_without_a_thread(
    masks: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(masks.begin([sequence(WORD, [])]))
    (compiled,) = masks._compiled._kept.values()
    submitted: list[Any] = []
    shared: list[Any] = []
    monkeypatch.setattr(masks._compiling, "submit", submitted.append)
    monkeypatch.setattr(masks._shared, "submit", shared.append)
    with compiled.lock:  # the lock of a job that computes masks of other sequences
        step = masks.begin([sequence(WORD, [], request_id=number) for number in (2, 3)])
    (job,) = shared
    job()
    found = ready(step)
    assert not submitted
    assert {A, B} < allowed(found[2][0]) == allowed(found[3][0])
    assert compiled.num_users == 3
    masks.begin([sequence(WORD, [], request_id=4, tenant="other")])
    assert len(submitted) == 1


def test_the_heap_is_looked_at_though_all_grammars_are_kept(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(masks.begin([sequence(WORD, [])]))
    looks: list[None] = []
    monkeypatch.setattr(masks._compiled, "_forget_grown", lambda: looks.append(None))
    for number in range(2 * compiled_grammars.LOOKUPS_PER_HEAP_CHECK):
        ready(masks.begin([sequence(WORD, [], request_id=2 + number)]))
    assert len(looks) == 2


@pytest.mark.parametrize(("first_mask_s", "is_isolated"), [(0.0, False), (1.0, True)])
def test_a_grammar_whose_first_mask_was_quick_is_computed_with_others_at_once(
    masks: Grammars, first_mask_s: float, is_isolated: bool
) -> None:
    ready(masks.begin([sequence(WORD, [])]))
    (compiled,) = masks._compiled._kept.values()
    compiled.first_mask_s = first_mask_s
    ready(masks.begin([sequence(WORD, [], request_id=2)]))
    assert (masks._running[2].isolated_masks_left > 0) is is_isolated


@pytest.mark.parametrize("vocab_size", [VOCAB + 100, VOCAB - 100])
def test_masks_have_the_models_tokens_not_the_tokenizers(tmp_path: Path, vocab_size: int) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((BUNDLED_MODEL / name).read_bytes())
    config = json.loads((BUNDLED_MODEL / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": vocab_size}))
    padded = Grammars(tmp_path)
    try:
        (mask,) = ready(padded.begin([sequence(WORD, [A])]))[1]
        (rest,) = ready(padded.begin([sequence(StructuredOutputs(regex="(.|\\n)*"), [])]))[1]
    finally:
        padded.close()
    assert len(mask) == len(rest) == (vocab_size + 31) // 32
    assert allowed(mask) == {A, B}
    assert max(allowed(rest)) < min(vocab_size, VOCAB)


@pytest.mark.parametrize(
    "structure",
    [
        StructuredOutputs(regex="[a-z ]{1,40}!"),
        StructuredOutputs(regex="[a-zA-Z_][a-zA-Z0-9_]{0,33}( = [0-9]+)?"),
        StructuredOutputs(json={"type": "array", "items": {"type": "string", "maxLength": 12}}),
    ],
    ids=["words", "names", "short strings"],
)
def test_tokens_that_are_looked_at_as_one_have_the_same_masks(structure: StructuredOutputs) -> None:
    tables = load_tables(BUNDLED_MODEL)
    grammar = grammar_of(structure)
    choose = random.Random(1)
    sliced, plain = (grammars.LLMatcher(each, grammar) for each in (tables, tables.with_slices([])))
    for _ in range(60):
        mask = sliced.compute_bitmask()
        assert mask == plain.compute_bitmask()
        token_id = choose.choice(sorted(allowed(np.frombuffer(mask, np.int32))))
        assert sliced.consume_token(token_id) == plain.consume_token(token_id)


def test_the_vocabulary_is_loaded_with_the_first_grammar_and_its_time_is_not_the_grammars(
    masks: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = grammar_vocabulary.load_tables
    go_on = threading.Event()
    calls = []

    def slow(path: Path) -> Any:
        calls.append("load")
        assert go_on.wait(60)
        return load(path)

    @contextmanager
    def holding_up() -> Iterator[None]:
        calls.append("begin")
        yield
        calls.append("end")

    monkeypatch.setattr(grammar_vocabulary, "load_tables", slow)
    masks.tables.holding_up = holding_up
    assert masks.begin([sequence(None, [])]) is None
    assert calls == []
    step = masks.begin([sequence(WORD, [])])
    assert step is not None
    running = step.sampling[0][0]
    while calls != ["begin", "load"]:
        time.sleep(0.001)
    assert given(step) == {1: None}, "the sample is deferred"
    assert running.job is not None
    assert not running.job.runs_longer_than(0.0)
    go_on.set()
    (mask,) = ready(step)[1]
    assert {TOKENIZER.token_bytes(token) for token in allowed(mask)} <= {b"a", b"b", b"aa", b"ab", b"ba", b"bb"}
    ready(masks.begin([sequence(StructuredOutputs(regex="c"), [], request_id=2)]))
    assert calls == ["begin", "load", "end"]


def test_a_model_without_a_vocabulary_for_grammars_is_read_once(
    masks: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def refuse(path: Path) -> NoReturn:
        calls.append(path)
        raise GenerationFailed("this model has no end")

    monkeypatch.setattr(grammar_vocabulary, "load_tables", refuse)
    for request_id in (1, 2):
        step = masks.begin([sequence(WORD, [], request_id=request_id)])
        assert ready(step) == {request_id: "this model has no end"}
    assert calls == [BUNDLED_MODEL]


def test_the_tokens_of_forced_texts_are_kept_but_not_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    class Counting:
        special_token_ids = TOKENIZER.special_token_ids
        all_bytes = TOKENIZER.all_bytes

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            encoded.append(text)
            return TOKENIZER.encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(grammar_vocabulary, "MAX_KNOWN_TEXTS", 2)
    vocabulary = GrammarVocabulary(Counting(), VOCAB, [EOS])  # type: ignore[arg-type]
    encoded.clear()
    long = "long " * 50
    for text in ("first", "first", long, long, "second", "third", "first", "third"):
        assert vocabulary(text) == ids(text)
    assert encoded == ["first", long, long, "second", "third", "first"]
    longer = "word " * 20_000
    most = masks_module.MAX_FORCED
    assert vocabulary(longer)[: most + 1] == ids(longer)[: most + 1]
    assert encoded[-1] == longer[: grammar_vocabulary.MAX_FORCED_CHARACTERS], "what follows waits for its turn"


def test_a_sequence_that_starts_in_the_middle_has_the_same_masks(masks: Grammars) -> None:
    (mask,) = ready(masks.begin([sequence(WORD, [B])]))[1]
    assert allowed(mask) == {A, B}


def test_a_prefill_in_chunks_after_a_preemption_or_a_crash_knows_the_generated_tokens(masks: Grammars) -> None:
    """A chunk without a sample begins the job that the last chunk uses."""
    assert masks.begin([sequence(WORD, [B], samples=False)]) is None
    (mask,) = ready(masks.begin([sequence(WORD, [B])]))[1]
    assert allowed(mask) == {A, B}


def test_each_draft_token_has_a_mask_and_is_taken_back(masks: Grammars) -> None:
    first, second, third = ready(masks.begin([sequence(WORD, [], (A, B))]))[1]
    assert {A, B} <= allowed(first)
    assert allowed(second) == {A, B}
    assert allowed(third) == {EOS}
    step = masks.begin([sequence(WORD, [], (A, B))])
    ready(step)
    advance(step, SampledToken(1, B), SampledToken(1, B), SampledToken(1, B))
    (mask,) = ready(masks.begin([sequence(WORD, [B])]))[1]
    assert allowed(mask) == {A, B}, "another token than the draft was sampled"


def test_nothing_is_masked_after_a_draft_that_is_not_allowed_or_ends_the_output(masks: Grammars) -> None:
    for drafts in ((C, A), (A, B, EOS, A)):
        *_, last = ready(masks.begin([sequence(WORD, [], drafts)]))[1]
        assert (last == -1).all()


def test_sequences_without_a_grammar_have_no_masks(masks: Grammars) -> None:
    assert masks.begin([sequence(None, [])]) is None
    step = masks.begin([sequence(None, [], request_id=2), sequence(WORD, [])])
    assert set(ready(step)) == {1}
    assert step is not None
    assert step.others_sample
    assert masks.begin([sequence(WORD, [], samples=False)]) is None, "no sample in this step: it is only compiled"


def test_a_mask_that_is_not_ready_is_said_to_be_and_comes_later(
    masks: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "WAIT_S", 0.0)
    monkeypatch.setattr(grammars, "WAIT_ALONE_S", 0.0)
    go = threading.Event()
    compile_it = Grammars._compile

    def slow(self: Grammars, running: Any) -> Any:
        assert go.wait(60)
        return compile_it(self, running)

    monkeypatch.setattr(Grammars, "_compile", slow)
    step = masks.begin([sequence(WORD, [])])
    assert step is not None
    assert given(step) == {1: None}
    for generated, drafts in (([], ()), ([], (A,)), ([A], ())):
        again = masks.begin([sequence(WORD, generated, drafts)])
        assert again is not None
        assert given(again) == {1: None}, "the job for the first tokens still runs"
    go.set()
    ready(step)
    (mask,) = ready(masks.begin([sequence(WORD, [A])]))[1]
    assert allowed(mask) == {A, B}


def test_forced_tokens_follow_the_last_accepted_sample(masks: Grammars) -> None:
    structure = StructuredOutputs(regex="(a|c)bbbbbbbb!")

    def forced(drafts: tuple[int, ...], *samples: SampledToken) -> list[tuple[int, ...]]:
        masks._running.clear()
        step = masks.begin([sequence(structure, [], drafts)])
        ready(step)
        found = advance(step, *samples)
        computed(step)
        return found

    (rest,) = forced((), SampledToken(1, A))
    assert TOKENIZER.decode(rest).startswith("bbbb")
    assert forced((C,), SampledToken(1, A), SampledToken(1, 9)) == [rest, ()], "the draft was wrong"
    wrong, after = forced((A,), SampledToken(1, A), SampledToken(1, B))
    assert wrong == ()
    assert TOKENIZER.decode(after).startswith("bbb")
    assert forced((), SampledToken(1, 0, error="NaN")) == [()]
    assert forced((), SampledToken(1, 0, is_deferred=True)) == [()]
    assert forced((A,), SampledToken(1, A), SampledToken(1, 0, is_deferred=True)) == [rest, ()]


def test_no_more_forced_tokens_are_looked_for_than_pay_and_their_masks_are_computed_at_once(masks: Grammars) -> None:
    structure = StructuredOutputs(regex="(a|c)b!b!b!b!b!b!b!b!")

    def forced(max_forced: int) -> tuple[int, ...]:
        masks._running.clear()
        step = masks.begin([sequence(structure, [])])
        ready(step)
        (found,) = advance(step, SampledToken(1, A), max_forced=max_forced)
        computed(step)
        return found

    assert forced(0) == ()
    (first,) = forced(1)
    drafts = forced(3)
    assert len(drafts) == 3
    assert drafts[0] == first
    job = masks._running[1].job
    found = ready(masks.begin([sequence(structure, [A], drafts[:2])]))[1]
    assert masks._running[1].job is job, "nothing is computed twice"
    assert [draft in allowed(mask) for draft, mask in zip(drafts, found, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("regex", "is_looked_for"), [("a" + "b!" * 9000, False), ("a(b!){400}", True)], ids=["long grammar", "long text"]
)
def test_a_long_forced_text_is_not_looked_for_again_in_each_step(
    masks: Grammars, regex: str, is_looked_for: bool
) -> None:
    structure = StructuredOutputs(regex=regex)
    step = masks.begin([sequence(structure, [])])
    ready(step)
    (forced,) = advance(step, SampledToken(1, A))
    assert bool(forced) == is_looked_for
    assert len(forced) <= masks_module.MAX_FORCED
    step = masks.begin([sequence(structure, [A])])
    ready(step)
    assert advance(step, SampledToken(1, B)) == [()]
    assert allowed(ready(masks.begin([sequence(structure, [A, B])]))[1][0]) >= set(ids("!"))


def test_the_next_masks_of_all_sequences_are_one_job_that_begins_with_the_samples(masks: Grammars) -> None:
    requests = range(1, 5)
    step = masks.begin([sequence(WORD, [], request_id=number) for number in requests])
    ready(step)
    advance(step, *(SampledToken(number, A) for number in requests))
    jobs = {masks._running[number].job for number in requests}
    assert len(jobs) == 1
    again = masks.begin([sequence(WORD, [A], request_id=number) for number in (2, 1, 4)])
    assert {masks._running[number].job for number in (1, 2, 4)} == jobs, "nothing is computed twice"
    for (mask,) in ready(again).values():
        assert allowed(mask) == {A, B}


def test_a_mask_with_forced_drafts_follows_that_without(masks: Grammars) -> None:
    """The job for the mask without drafts may still run when the draft tokens are known."""
    step = masks.begin([sequence(WORD, [])])
    ready(step)
    advance(step, SampledToken(1, A))
    first, second = ready(masks.begin([sequence(WORD, [A], (B,))]))[1]
    assert (allowed(first), allowed(second)) == ({A, B}, {EOS})
    (mask,) = ready(masks.begin([sequence(WORD, [A])]))[1]
    assert allowed(mask) == {A, B}, "the first of these masks"


def test_draft_tokens_may_come_before_the_job_without_them_runs(
    masks: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = (1, 2)
    step = masks.begin([sequence(WORD, [], request_id=number) for number in requests])
    ready(step)
    go = threading.Event()
    compute = MaskQueue._masks

    def slow(self: MaskQueue, job: Any) -> Any:
        assert go.wait(60)
        return compute(self, job)

    monkeypatch.setattr(MaskQueue, "_masks", slow)
    advance(step, *(SampledToken(number, A) for number in requests))
    again = masks.begin([sequence(WORD, [A], (B,)), sequence(WORD, [A], request_id=2)])
    go.set()
    found = ready(again)
    assert [allowed(mask) for mask in (*found[1], *found[2])] == [{A, B}, {EOS}, {A, B}]


def test_a_sequence_whose_mask_was_late_computes_the_next_ones_in_jobs_of_its_own(
    masks: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "WAIT_S", 0.0)
    monkeypatch.setattr(grammars, "WAIT_ALONE_S", 0.0)
    structure = StructuredOutputs(regex="[ab]{9}")
    generated = [A]
    ready(masks.begin([sequence(structure, [])]))
    go = threading.Event()
    compute = MaskQueue._masks

    def slow(self: MaskQueue, job: Any) -> Any:
        assert go.wait(60)
        return compute(self, job)

    step = masks.begin([sequence(structure, [])])
    monkeypatch.setattr(MaskQueue, "_masks", slow)
    advance(step, SampledToken(1, A))
    late = masks.begin([sequence(structure, generated)])
    assert given(late) == {1: None}
    go.set()
    ready(late)
    isolated = []
    for _ in range(masks_module.ISOLATED_MASKS + 2):
        step = masks.begin([sequence(structure, generated)])
        ready(step)
        isolated.append(masks._running[1].isolated_masks_left > 0)
        advance(step, SampledToken(1, A))
        generated.append(A)
    assert isolated == [True] * (masks_module.ISOLATED_MASKS + 1) + [False]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps wait only briefly, and count each job that has begun as slow."""
    for name in ("WAIT_S", "WAIT_ALONE_S"):
        monkeypatch.setattr(grammars, name, 0.01)
    monkeypatch.setattr(masks_module, "ABANDON_S", 0.0)
    monkeypatch.setattr(job_threads, "SLOW_S", 0.0)


def step_until_ready(masks: Grammars, sequences: list[ScheduledSequence], request_id: int) -> dict[int, Any]:
    """Run steps until a sequence has its masks."""
    found: dict[int, Any] = {}
    return step_until(masks, sequences, lambda: found.get(request_id) is not None, found)


def step_until(
    masks: Grammars,
    sequences: list[ScheduledSequence],
    condition: Callable[[], bool],
    found: dict[int, Any] | None = None,
) -> dict[int, Any]:
    """Run steps, at least one, until a condition is true. Return the result of the last step, which is also in
    `found`."""
    found = {} if found is None else found
    deadline = time.monotonic() + 60
    while True:
        found.update(given(masks.begin(sequences)))
        if condition():
            return found
        assert time.monotonic() < deadline


@pytest.mark.usefixtures("impatient")
def test_masks_that_never_come_end_their_request_and_no_other(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences whose masks are computed in the same call continue, too."""
    guilty = StructuredOutputs(regex="[ab]{2}")
    step = masks.begin([sequence(guilty, []), sequence(WORD, [], request_id=2)])
    ready(step)
    go = threading.Event()
    begun = threading.Event()
    compute = MaskQueue._masks

    def stuck(self: MaskQueue, job: Any) -> Any:
        if any(running.sampling.params.structured_outputs is guilty for running, _, _ in job.parts):
            begun.set()
            assert go.wait(60)
        return compute(self, job)

    monkeypatch.setattr(MaskQueue, "_masks", stuck)
    advance(step, SampledToken(1, A), SampledToken(2, A))
    assert begun.wait(60)
    both = [sequence(guilty, [A]), sequence(WORD, [A], request_id=2)]
    found = step_until_ready(masks, both, 2)
    assert found[1] is None
    assert allowed(found[2][0]) == {A, B}
    monkeypatch.setattr(masks_module, "LIMIT_S", 0.0)
    found = given(masks.begin(both))
    assert "were not known after" in found[1]
    assert allowed(found[2][0]) == {A, B}
    go.set()


def test_a_beam_begins_again_where_others_took_its_grammar_to_a_limit(masks: Grammars) -> None:
    search = SamplingSpec(SamplingParams(structured_outputs=WORD, beam_width=2), 1, frozenset({EOS}), "")
    beam = sequence(WORD, [])._replace(sampling=search)
    step = masks.begin([beam])
    first = allowed(ready(step)[1][0])
    assert step is not None
    ((running, _, _),) = step.sampling
    running.needs_restart = True
    step = masks.begin([beam])
    assert allowed(ready(step)[1][0]) == first
    assert step is not None
    ((again, _, _),) = step.sampling
    assert again is not running


def test_jobs_behind_one_that_never_ends_are_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = MaskQueue(1)
    first = MaskJob()
    behind = MaskJob()
    begun = threading.Event()
    go = threading.Event()
    computed = []

    def compute(job: MaskJob) -> None:
        job.started = time.monotonic()
        computed.append(job)
        begun.set()
        assert go.wait(60)

    monkeypatch.setattr(queue, "compute", compute)
    thread = threading.Thread(target=queue.run, args=(first,))
    thread.start()
    assert begun.wait(60)
    queue.run(behind)
    queue.abandon_slow()
    assert not behind.is_abandoned
    monkeypatch.setattr(masks_module, "ABANDON_S", 0.0)
    executor = queue._executor
    queue.abandon_slow()
    assert queue._executor is not executor, "its threads may never be free"
    assert first.is_abandoned
    assert behind.is_abandoned
    go.set()
    thread.join(60)
    assert computed == [first], "its matchers may be in use elsewhere"


def test_one_mask_waits_for_no_thread_of_the_executor(masks: Grammars) -> None:
    ready(masks.begin([sequence(WORD, [])]))
    masks._queue._executor = None  # type: ignore[assignment]
    masks._running.clear()
    (mask,) = ready(masks.begin([sequence(WORD, [A])]))[1]
    assert allowed(mask) == {A, B}


@pytest.mark.usefixtures("impatient")
def test_a_grammar_that_is_never_compiled_holds_up_no_other(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    guilty = StructuredOutputs(regex="[ab]{2}")
    go = threading.Event()
    compile_it = Grammars._compile

    def stuck(self: Grammars, running: Any) -> Any:
        if running.sampling.params.structured_outputs is guilty:
            assert go.wait(60)
        return compile_it(self, running)

    monkeypatch.setattr(Grammars, "_compile", stuck)
    found = step_until_ready(masks, [sequence(guilty, []), sequence(WORD, [A], request_id=2)], 2)
    assert found[1] is None
    assert allowed(found[2][0]) == {A, B}
    go.set()


def test_a_panic_of_the_library_is_an_error_of_its_sequences(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panic(self: MaskQueue, job: Any) -> Any:
        raise Panic("index out of bounds")

    with monkeypatch.context() as patch:
        patch.setattr(MaskQueue, "_masks", panic)
        assert "index out of bounds" in ready(masks.begin([sequence(WORD, [])]))[1]
    assert allowed(ready(masks.begin([sequence(WORD, [A], request_id=2)]))[2][0]) == {A, B}


def test_a_panic_ends_no_other_sequence_of_the_call(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    guilty = StructuredOutputs(regex="[ab]{2}")
    compute = MaskQueue._masks
    step = masks.begin([sequence(guilty, []), sequence(WORD, [], request_id=2)])
    ready(step)

    def panic(self: MaskQueue, job: Any) -> Any:
        if any(running.sampling.params.structured_outputs is guilty for running, _, _ in job.parts):
            raise IndexError("out of bounds")
        return compute(self, job)

    monkeypatch.setattr(MaskQueue, "_masks", panic)
    advance(step, SampledToken(1, A), SampledToken(2, A))
    both = [sequence(guilty, [A]), sequence(WORD, [A], request_id=2)]
    assert allowed(step_until_ready(masks, both, 2)[2][0]) == {A, B}
    assert step_until_ready(masks, both, 1)[1] == "computing the masks failed: IndexError: out of bounds"


def test_a_sequence_that_is_late_again_is_isolated_for_longer_up_to_a_limit(masks: Grammars) -> None:
    step = masks.begin([sequence(WORD, [])])
    ready(step)
    assert step is not None
    running = step.sampling[0][0]
    running.is_beam = True
    found = []
    for _ in range(20):
        running.note_late()
        found.append(running.isolated_masks_left)
    assert found[:2] == [masks_module.ISOLATED_MASKS, 2 * masks_module.ISOLATED_MASKS]
    assert found[-1] == masks_module.ISOLATED_MASKS << masks_module.MAX_DOUBLINGS
    again = running.restarted()
    assert (again.is_beam, again.isolated_masks_left, again.num_late) == (True, found[-1], masks_module.MAX_DOUBLINGS)


def test_a_step_waits_longer_only_if_no_mask_is_ready(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    monkeypatch.setattr(StepMasks, "_wait_for", lambda self, pending, others_sample: waits.append(others_sample))
    step = masks.begin([sequence(WORD, [], request_id=1)])
    other = masks.begin([sequence(StructuredOutputs(regex="[bc]{2}"), [], request_id=2)])
    ready(step)
    ready(other)
    assert step is not None
    assert other is not None
    waits.clear()
    late = other.sampling[0][0]
    late.job = MaskJob()
    step.sampling.append((late, other.sampling[0][1], 1))
    step.wait()
    step.sampling.pop(0)
    step.wait()
    assert waits == [True, False]


class Clock:
    """Stands for the condition that a step waits on: nothing is ever done, and the time of each wait passes at once."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout: float) -> None:
        if not predicate():
            self.waited_s += timeout


@pytest.mark.parametrize("number", [1, 5])
def test_masks_that_never_come_delay_the_others_by_2_ms_in_one_step_and_not_in_the_next(
    masks: Grammars, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Neither the number of sequences without masks nor their sharing of a job matters."""
    monkeypatch.setattr(MaskQueue, "compute", lambda *_: None)
    slow = [sequence(WORD, [], request_id=each) for each in range(number)]
    waited = []
    for _ in range(3):
        step = masks.begin([*slow, sequence(None, [], request_id=9)])
        assert step is not None
        clock = step.queue.changed = Clock()  # type: ignore[assignment]
        assert step.wait().missing == dict.fromkeys(range(number))
        waited.append(clock.waited_s)
    assert waited == [0.002, 0.0, 0.0]


def test_a_step_of_late_masks_alone_waits_20_ms(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaskQueue, "compute", lambda *_: None)
    for expected in (0.022, 0.02):
        step = masks.begin([sequence(WORD, [])])
        assert step is not None
        clock = step.queue.changed = Clock()  # type: ignore[assignment]
        step.wait()
        assert clock.waited_s == pytest.approx(expected)


@pytest.mark.parametrize(("is_late", "isolated_masks_left"), [(True, 7), (False, 0)])
def test_a_beam_is_computed_apart_if_the_masks_of_its_parent_were_late(
    masks: Grammars, is_late: bool, isolated_masks_left: int
) -> None:
    sampling = SamplingSpec(SamplingParams(structured_outputs=WORD, beam_width=2), 1, frozenset({EOS}), "")

    def begin(*generated: int) -> RunningGrammar:
        context = [*PROMPT, *generated]
        step = masks.begin([ScheduledSequence(1, [[0]], 0, context, 1, sampling, context, len(PROMPT))])
        ready(step)
        assert step is not None
        return step.sampling[0][0]

    parent = begin()
    assert parent.job is not None
    parent.job.is_late = is_late
    parent.isolated_masks_left = 7
    child = begin(A)
    assert child.isolated_masks_left == isolated_masks_left
    assert child.job is not parent.job


def test_a_matcher_whose_lexer_is_in_use_is_not_waited_for(masks: Grammars) -> None:
    """Copies of a compiled grammar share a lexer, for which llguidance waits with the GIL: no thread would continue."""
    step = masks.begin([sequence(WORD, [])])
    ready(step)
    assert step is not None
    running = step.sampling[0][0]
    assert running.compiled is not None
    with running.compiled.lock:
        advance(step, SampledToken(1, A))
        assert running.num_consumed == 0
        for _ in range(3):
            found = step_until(masks, [sequence(WORD, [A])], lambda: masks._running[1].job is None)
            assert found == {1: None}
            assert masks._running[1] is running
            assert running.num_consumed == 0
    found = step_until_ready(masks, [sequence(WORD, [A])], 1)
    assert allowed(found[1][0]) == {A, B}
    assert running.num_consumed == 1
    assert running.blocked_since == 0


@pytest.mark.usefixtures("impatient")
def test_a_matcher_whose_lexer_is_never_free_is_compiled_again(masks: Grammars) -> None:
    step = masks.begin([sequence(WORD, [])])
    ready(step)
    assert step is not None
    old = step.sampling[0][0].compiled
    assert old is not None
    with old.lock:
        for request_id, generated in ((1, [A]), (2, [B])):
            found = step_until_ready(masks, [sequence(WORD, generated, request_id=request_id)], request_id)
            assert allowed(found[request_id][0]) == {A, B}
    assert masks._running[2].compiled is not old


def test_a_call_of_several_sequences_goes_without_those_whose_lexer_is_in_use(masks: Grammars) -> None:
    other = StructuredOutputs(regex="[bc]{2}")
    both = [sequence(WORD, []), sequence(other, [], request_id=2)]
    step = masks.begin(both)
    ready(step)
    advance(step, SampledToken(1, A), SampledToken(2, B))
    drafted = [sequence(WORD, [A], (B,)), sequence(other, [B], (C,), request_id=2)]
    ready(masks.begin([sequence(WORD, [A]), sequence(other, [B], request_id=2)]))
    compiled = masks._running[1].compiled
    assert compiled is not None
    with compiled.lock:
        found = step_until_ready(masks, drafted, 2)
        assert found[1] is None
        assert [allowed(mask) for mask in found[2]] == [{B, C}, {EOS}]
    found = step_until_ready(masks, drafted, 1)
    assert [allowed(mask) for mask in found[1]] == [{A, B}, {EOS}]


@pytest.mark.parametrize("blocked", [1, 2])
@pytest.mark.parametrize("taken", [[], [B]], ids=["first", "second"])
def test_a_call_of_which_one_sequence_is_left_computes_its_own_mask(
    masks: Grammars, monkeypatch: pytest.MonkeyPatch, taken: list[int], blocked: int
) -> None:
    """A mask at a wrong place would let the model sample forbidden tokens."""
    structures = {1: WORD, 2: StructuredOutputs(regex="[bc]{2}")}
    first = ready(masks.begin([sequence(each, [], request_id=number) for number, each in structures.items()]))
    job = MaskJob()
    for number in structures:
        assert masks._running[number].accept(taken)
        job.add(masks._running[number], ())
    compiled = masks._running[blocked].compiled
    left = masks._running[3 - blocked]
    assert compiled is not None
    monkeypatch.setattr(np, "empty", np.zeros)  # earlier masks are overwritten
    with compiled.lock:
        masks._queue.compute(job)
    second = {1: {A, B}, 2: {B, C}}
    assert allowed(job.masks[left.row]) == (second[3 - blocked] if taken else allowed(first[3 - blocked][0]))


def test_a_beam_whose_parent_is_in_use_reads_its_text_again(masks: Grammars) -> None:
    sampling = SamplingSpec(SamplingParams(structured_outputs=WORD, beam_width=2), 1, frozenset({EOS}), "")

    def beam(*generated: int) -> ScheduledSequence:
        context = [*PROMPT, *generated]
        return ScheduledSequence(1, [[0]], 0, context, 1, sampling, context, len(PROMPT))

    ready(masks.begin([beam()]))
    compiled = masks._running[1].compiled
    assert compiled is not None
    with compiled.lock:
        masks.begin([beam(A)])
        assert masks._running[1].num_consumed == 0
    assert allowed(step_until_ready(masks, [beam(A)], 1)[1][0]) == {A, B}


def test_texts_of_other_requests_take_no_request_to_a_limit(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a compiled grammar share the states of its lexer."""
    monkeypatch.setitem(grammars.PARSER_LIMITS, "max_lexer_states", 60)
    structure = StructuredOutputs(regex="(a[ab]{60}|b[bc]{60}|c[ca]{60})")
    texts = {number: ids("abc"[number] * 24) for number in range(3)}
    for number, text in texts.items():
        for length in range(len(text)):
            found = step_until_ready(masks, [sequence(structure, text[:length], request_id=number)], number)
            assert text[length] in allowed(found[number][0])
    found = step_until_ready(masks, [sequence(structure, ids("a" * 59), request_id=4)], 4)
    assert "too many states" in found[4], "a limit that a text reaches by itself"


WORDS = r"^(?:\S+\s+){0,49}\S+$"


@pytest.mark.parametrize(
    ("structure", "limits"),
    [
        ({"json": {"properties": {"a": {"type": "string", "minLength": 1, "maxLength": 500, "pattern": WORDS}}}}, {}),
        ({"json": {"type": "string", "maxLength": 5000, "pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)"}}, {}),
        ({"json": {"type": "string", "maxLength": 900, "pattern": r"^(\w{1,20}\s?){1,50}$"}}, {}),
        ({"json": {"type": "string", "maxLength": 300, "pattern": r"^([a-z]+[0-9]*){2,40}$"}}, {}),
        ({"regex": r"([a-z]+ ?){1,60}"}, {"step_lexer_fuel": 8_000}),
        ({"lark": 'start: (W " ")*\nW: /[a-z]{1,9}( [a-z]{1,9}){0,30}/ & /[a-z ]{1,200}/'}, {"step_lexer_fuel": 8_000}),
        ({"gbnf": "root ::= ([a-z]+ [0-9]? ){1,50}"}, {}),
        ({"regex": "(a[a-d]{60}|b[b-e]{60}|[cde][c-f]{60}){3}"}, {"max_lexer_states": 250}),
        ({"lark": 'start: x*\nx: "a" x | "b" x | "c" | "a" "a" | "b" "b"'}, {}),
    ],
    ids=str,
)
def test_a_replay_reaches_no_limit_that_the_generation_did_not(
    masks: Grammars, structure: dict[str, Any], limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the library counts for one mask and the tokens after it, or for all text that a lexer has read."""
    for name, limit in limits.items():
        monkeypatch.setitem(grammars.PARSER_LIMITS, name, limit)
    grammar = StructuredOutputs(**structure)
    chooser = random.Random(4)
    check_structure(grammar)
    text: list[int] = []
    expected = [allowed(step_until_ready(masks, [sequence(grammar, text)], 1)[1][0])]
    while len(text) < 40 and (choices := sorted(expected[-1] - {EOS})):
        text.append(chooser.choice(choices))
        found = step_until_ready(masks, [sequence(grammar, text)], 1)[1]
        if isinstance(found, str):
            assert "too many states" in found or "items; max is" in found
            break
        expected.append(allowed(found[0]))
    for length in range(1, len(expected), 8):
        replayed = Grammars(BUNDLED_MODEL)
        found = step_until_ready(replayed, [sequence(grammar, text[:length])], 1)[1]
        assert not isinstance(found, str), found
        assert allowed(found[0]) == expected[length]
        replayed.close()


def test_tokens_that_the_grammar_does_not_allow_are_refused_in_a_replay(masks: Grammars) -> None:
    found = step_until_ready(masks, [sequence(WORD, ids("ac"))], 1)
    assert found[1] == "generated: the ids do not match structured_outputs"


def test_beams_continue_the_text_of_their_parents(masks: Grammars) -> None:
    sampling = SamplingSpec(SamplingParams(structured_outputs=WORD, beam_width=2), 1, frozenset({EOS}), "")

    def beam(request_id: int, *generated: int) -> ScheduledSequence:
        context = [*PROMPT, *generated]
        return ScheduledSequence(request_id, [[0]], 0, context, 1, sampling, context, len(PROMPT))

    step = masks.begin([beam(1)])
    ready(step)
    advance(step, SampledToken(1, A))
    found = ready(masks.begin([beam(1, B), beam(-1, A)]))
    assert [allowed(found[number][0]) for number in (1, -1)] == [{A, B}, {A, B}]
    found = ready(masks.begin([beam(1, A, B), beam(-1, A, A)]))
    assert [allowed(found[number][0]) for number in (1, -1)] == [{EOS}, {EOS}]
    found = ready(masks.begin([beam(1, A, A), beam(-1, B, B)]))
    assert allowed(found[1][0]) == {EOS}, "computed again after the other beam's mask was late"
    assert allowed(found[-1][0]) == {EOS}, "its parent is not known: the text is read again"


def test_an_object_may_have_many_optional_properties(masks: Grammars) -> None:
    schema = {"type": "object", "properties": {f"v{number}": {"type": "integer"} for number in range(600)}}
    text = ids('{"v599": 1')
    found = ready(masks.begin([sequence(StructuredOutputs(json=schema), text)]))
    assert ids("}")[0] in allowed(found[1][0])


@pytest.mark.parametrize("rules", ['x: x x | "a" |', 'x: x x x | x "a" | "a" x | "a"'])
def test_a_grammar_with_too_many_ways_to_read_a_text_ends_its_request(masks: Grammars, rules: str) -> None:
    grammar = StructuredOutputs(lark=f"start: x\n{rules}")
    check_structure(grammar)
    found = ready(masks.begin([sequence(grammar, [A] * 520)]))
    assert "items" in found[1]


@pytest.mark.parametrize("is_own", [False, True])
def test_a_grammar_of_tool_calls_may_have_as_many_ways_to_go_on_as_a_schema(masks: Grammars, is_own: bool) -> None:
    names = " | ".join(f'"a{number}"' for number in range(1_000))
    spec = sequence(StructuredOutputs(lark=f"start: {names}"), [A])
    sampling = dataclasses.replace(spec.sampling, has_own_grammar=is_own)
    found = ready(masks.begin([spec._replace(sampling=sampling)]))[1]
    if is_own:
        assert ids("7")[0] in allowed(found[0])
    else:
        assert "items; max is 350" in found


ENDLESS = 'start: (/a+/)* "ab"'  # a terminal takes all it can: after "aa", no "ab" ever follows


@pytest.mark.parametrize(
    "grammar",
    [
        StructuredOutputs(lark=ENDLESS),
        StructuredOutputs(lark=f'{ENDLESS}\n%llguidance {{"no_forcing": false}}'),
        StructuredOutputs(lark=f"start: %lark {{\n{ENDLESS}\n}}"),
        StructuredOutputs(lark='start: "a" start'),
        StructuredOutputs(gbnf='root ::= "a" root'),
    ],
)
def test_text_that_a_grammar_forces_without_end_is_not_looked_at_to_its_end(
    masks: Grammars, grammar: StructuredOutputs
) -> None:
    check_structure(grammar)
    before = allocated_bytes()
    (mask,) = ready(masks.begin([sequence(grammar, [A, A])]))[1]
    assert {A} <= allowed(mask) <= {token for token in range(VOCAB) if not TOKENIZER.token_bytes(token).strip(b"a")}
    assert allocated_bytes() - before < 16 << 20


def test_a_choice_may_have_more_texts_than_a_grammar_ways_to_go_on(masks: Grammars) -> None:
    texts = [f"{number:05} text" for number in range(grammars.MAX_ITEMS + 1_000)]
    grammar = StructuredOutputs(choice=texts)
    check_structure(grammar)
    (mask,) = ready(masks.begin([sequence(grammar, ids("01234 tex"))]))[1]
    assert allowed(mask) == {ids("t")[0]}
    assert masks._compiled._kept["", grammar].num_bytes < 64 << 20


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count one byte per character of a grammar, and nothing else."""
    monkeypatch.setattr(compiled_grammars, "allocated_bytes", lambda: 0)
    monkeypatch.setattr(compiled_grammars, "BYTES_PER_CHARACTER", 1)
    monkeypatch.setattr(compiled_grammars, "MIN_BYTES", 0)


def compiled_sizes(masks: Grammars) -> dict[str, int]:
    """Return the bytes of the grammars that are kept, by tenant."""
    sizes: dict[str, int] = {}
    for each in masks._compiled._kept.values():
        sizes[each.tenant] = sizes.get(each.tenant, 0) + each.num_bytes
    return sizes


@pytest.mark.usefixtures("counted")
def test_a_tenant_with_many_grammars_evicts_its_own(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammars, "MAX_KEPT_PER_TENANT", 5000)
    ready(masks.begin([sequence(WORD, [], tenant="quiet")]))
    quiet = compiled_sizes(masks)["quiet"]
    for number in range(8):
        regex = "a" * 1000 + str(number)
        ready(masks.begin([sequence(StructuredOutputs(regex=regex), [], request_id=number, tenant="loud")]))
    sizes = compiled_sizes(masks)
    assert sizes["quiet"] == quiet
    assert 4000 < sizes["loud"] <= 5000


def test_grammars_of_all_tenants_are_bounded(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammars, "allocated_bytes", lambda: 0)
    monkeypatch.setattr(compiled_grammars, "MAX_KEPT", 3 * compiled_grammars.MIN_BYTES)  # three short ones
    for number, tenant in enumerate("012045"):
        ready(masks.begin([sequence(WORD, [], request_id=number, tenant=tenant)]))
    assert list(compiled_sizes(masks)) == ["0", "4", "5"], "the tenant that came again was used last"


def test_a_grammar_beyond_the_limit_is_used_and_not_kept(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammars, "MAX_KEPT", 10)
    found = ready(masks.begin([sequence(WORD, [])]))
    assert {A, B} < allowed(found[1][0])
    assert not compiled_sizes(masks)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(("limit", "others"), [("MAX_LIVE_PER_TENANT", "allowed"), ("MAX_LIVE", "refused")])
def test_the_grammars_of_running_requests_are_bounded(
    masks: Grammars, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, limit: str, others: str
) -> None:
    monkeypatch.setattr(compiled_grammars, "MAX_KEPT", 0)
    long = [StructuredOutputs(regex=letter * 1000) for letter in "abc"]
    monkeypatch.setattr(compiled_grammars, limit, 2 * len(grammar_of(long[0])))
    gc.disable()
    request.addfinalizer(gc.enable)
    running = [sequence(each, [], request_id=number, tenant="a") for number, each in enumerate(long)]
    for number in (1, 2):
        ready(masks.begin(running[:number]))
    beside = sequence(WORD, [], request_id=9, tenant="b")
    found = ready(masks.begin([*running, beside]))
    assert "MiB of this tenant" in found[2]
    assert ("MiB" in str(found[9])) is (others == "refused")
    assert not isinstance(found[0], str), "those that run go on"
    # A request that has ended does not count, though no garbage was collected.
    masks.begin([running[0]])
    assert not isinstance(ready(masks.begin([running[0], sequence(long[2], [], request_id=5, tenant="a")]))[5], str)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("limit", ["MAX_LIVE_PER_TENANT", "MAX_LIVE"])
def test_kept_grammars_make_room_for_those_of_running_requests(
    masks: Grammars, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    long = [StructuredOutputs(regex=letter * 1000) for letter in "abcd"]
    one = len(grammar_of(long[0]))
    monkeypatch.setattr(compiled_grammars, limit, 2 * one)
    for number, each in enumerate(long):
        tenant = "a" if limit == "MAX_LIVE_PER_TENANT" else f"{number}"
        assert not isinstance(ready(masks.begin([sequence(each, [], request_id=number, tenant=tenant)]))[number], str)
    assert set(compiled_sizes(masks).values()) <= {one, 2 * one}


@pytest.mark.skipif(allocated_bytes() == 0, reason="the C library does not say what it has allocated")
def test_memory_that_is_freed_between_blocks_that_stay_is_returned(masks: Grammars) -> None:
    ready(masks.begin([sequence(WORD, [])]))
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(SCATTERED_BYTES // 2000) for _ in range(2000)]  # 64 KiB: none is mapped apart
    for block in blocks:
        ctypes.memset(block, 1, SCATTERED_BYTES // 2000)
    for block in blocks[1::2]:
        libc.free(block)
    before = resident_bytes()
    ready(masks.begin([sequence(StructuredOutputs(regex="[bc]{2}"), [], request_id=2)]))
    returned = before - resident_bytes()
    for block in blocks[::2]:
        libc.free(block)
    assert returned > SCATTERED_BYTES // 4


def test_a_grammar_counts_for_what_it_takes(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100, 100, 100 + (5 << 20)])
    monkeypatch.setattr(compiled_grammars, "allocated_bytes", lambda: next(sizes))
    ready(masks.begin([sequence(WORD, [])]))
    assert compiled_sizes(masks) == {"": 5 << 20}
    assert allocated_bytes() > 1 << 20


@pytest.mark.parametrize("regex", ["a{1000000}", "(a{2000}){2000}", "ab" * 120_000])
def test_text_that_is_forced_without_end_ends_its_request(masks: Grammars, regex: str) -> None:
    grammar = StructuredOutputs(regex=regex)
    check_structure(grammar)
    before = allocated_bytes()
    ready(masks.begin([sequence(grammar, [])]))
    assert allocated_bytes() - before < 100 << 20
    found = step_until_ready(masks, [sequence(grammar, ids(regex[:2] if regex[1] == "b" else "aa"))], 1)
    assert "too many expressions" in found[1]
    assert allocated_bytes() - before < 100 << 20


def test_a_grammar_is_compiled_once(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    written = []
    matcher = grammars.LLMatcher
    monkeypatch.setattr(grammars, "grammar_of", lambda each: written.append(each) or grammar_of(each))

    class Counting:
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            compiled.append(arguments)
            return matcher(*arguments, **options)

        grammar_from_regex = matcher.grammar_from_regex

    monkeypatch.setattr(grammars, "LLMatcher", Counting)
    for request_id in (1, 2, 3):
        ready(masks.begin([sequence(WORD, [], request_id=request_id)]))
    assert len(compiled) == len(written) == 1


def test_a_structure_is_checked_once_for_a_tenant_unless_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[StructuredOutputs] = []

    def check(structure: StructuredOutputs, trials: Any) -> None:
        checked.append(structure)
        check_structure(structure)

    monkeypatch.setattr(grammars, "check_structure", check)
    monkeypatch.setattr(grammars, "MAX_CHECKED", 2)
    known = CheckedStructures()
    broken = StructuredOutputs(regex="(")
    other = StructuredOutputs(regex="[bc]")
    third = StructuredOutputs(choice=("[ab]{2}",))

    def is_checked(tenant: str, structure: StructuredOutputs) -> bool:
        checked.clear()
        known.check(tenant, structure)
        return bool(checked)

    assert [is_checked("a", WORD) for _ in range(3)] == [True, False, False]
    assert is_checked("b", WORD), "no tenant learns from the time it takes what others have sent"
    checked.clear()
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            known.check("a", broken)
    assert checked == [broken, broken]
    assert not is_checked("a", WORD)
    assert is_checked("a", other), "in the place of b's, which was used before a's"
    assert not is_checked("a", WORD)
    assert [is_checked("a", third) for _ in range(2)] == [True, False]
    assert [is_checked("a", each) for each in (WORD, other)] == [False, True]
    with pytest.raises(InvalidRequest, match="surrogates not allowed"):
        known.check("a", StructuredOutputs(regex="\ud800"))


def test_grammars_are_forgotten_when_the_heap_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = [1 << 30]
    monkeypatch.setattr(compiled_grammars, "allocated_bytes", lambda: heap[0])
    known = CompiledGrammars()
    compiled: list[int] = []

    def compile_it(grammar: str) -> Any:
        compiled.append(heap[0])
        return SimpleNamespace(compute_bitmask=lambda: b"", is_error=lambda: False)

    def is_compiled_at(num_bytes: int) -> bool:
        heap[0], before = num_bytes, len(compiled)
        known.get("", WORD, grammar_of, compile_it)
        return len(compiled) > before

    assert is_compiled_at(1 << 30)
    assert not is_compiled_at((1 << 30) + MAX_GROWTH)
    assert is_compiled_at((1 << 30) + MAX_GROWTH + 1)
    assert not is_compiled_at((1 << 30) + MAX_GROWTH + 1), "no more can be freed"
    assert not is_compiled_at(1 << 29)
    assert is_compiled_at((1 << 29) + MAX_GROWTH + 1), "from the least on"


def test_a_model_without_an_end_token_is_an_error_of_the_request(
    masks: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = TextProcessor.load(BUNDLED_MODEL)
    assert endless.tokenizer is not None
    endless.tokenizer.eos_token_ids = frozenset()
    spec = dataclasses.replace(read_spec(BUNDLED_MODEL), eos_token_ids=())
    monkeypatch.setattr(TextProcessor, "load", lambda path: endless)
    monkeypatch.setattr(grammar_vocabulary, "read_spec", lambda path: spec)
    assert "a token that ends the output" in ready(masks.begin([sequence(WORD, [])]))[1]


def test_each_token_that_ends_an_output_is_allowed_at_the_end(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    several = TextProcessor.load(BUNDLED_MODEL)
    assert several.tokenizer is not None
    several.tokenizer.eos_token_ids = frozenset({EOS, C})
    monkeypatch.setattr(TextProcessor, "load", lambda path: several)
    (mask,) = ready(masks.begin([sequence(WORD, [A, B])]))[1]
    assert allowed(mask) == {EOS, C}


def test_a_client_cannot_switch_off_the_bound_on_whitespace() -> None:
    schema = {"type": "array", "x-guidance": {"whitespace_pattern": ".*", "lenient": True}, "contains": {}}
    with pytest.raises(InvalidRequest, match="keywords of a JSON schema cannot be enforced"):
        check_structure(StructuredOutputs(json=schema))
    assert ".*" not in grammar_of(StructuredOutputs(json=schema))
    assert "x-guidance" in schema, "the request's own schema is not changed"
    with pytest.raises(InvalidRequest, match="switch off limits"):
        check_structure(StructuredOutputs(lark=f"start: %json {json.dumps(schema)}"))


def test_a_schema_in_a_grammar_is_checked_as_any_other() -> None:
    endless = {"type": "integer", "const": -1e300}  # llguidance would recurse until the process crashes
    for grammar in (
        f"start: %json{json.dumps(endless)}",
        f'start: "a" x\nx: %json \n {json.dumps({"items": endless})}',
    ):
        with pytest.raises(InvalidRequest, match="in const cannot be enforced"):
            check_structure(StructuredOutputs(lark=grammar))
    check_structure(StructuredOutputs(lark='start: "%json" /%json x/ %json {"type": "integer"}'))


def test_forced_text_that_spells_a_special_token_ends_no_output() -> None:
    with LLM(threads=1) as llm:
        structure = StructuredOutputs(json={"const": "x<|endoftext|>y"})
        (output,) = llm.generate(["a"], SamplingParams(max_tokens=60, structured_outputs=structure))
    assert (output.text, output.finish_reason) == ('"x<|endoftext|>y"', "stop")


def references(count: int) -> StructuredOutputs:
    definitions = {str(index): {"items": {"$ref": f"#/$defs/{index + 1}"}} for index in range(count)}
    return StructuredOutputs(json={"$ref": "#/$defs/0", "$defs": {**definitions, str(count): {"const": 7}}})


def rules(count: int) -> StructuredOutputs:
    chain = "".join(f"r{index}: r{index + 1}\n" for index in range(count))
    return StructuredOutputs(lark=f'start: r0\n{chain}r{count}: "7"')


@pytest.mark.parametrize("structure", [references(2500), rules(12_000)])
def test_long_chains_of_references_do_not_overflow_the_stack(structure: StructuredOutputs) -> None:
    check_structure(structure)
    with LLM(threads=1) as llm:
        (output,) = llm.generate(["a"], SamplingParams(max_tokens=3, structured_outputs=structure))
    assert output.text


@pytest.mark.parametrize("begin", ["", " \n"])
def test_llguidances_own_form_is_no_grammar_in_larks_notation(begin: str) -> None:
    grammar = begin + json.dumps({"grammars": [{"json_schema": {"x-guidance": {"lenient": True}}}]})
    with pytest.raises(InvalidRequest, match="begins with a rule"):
        check_structure(StructuredOutputs(lark=grammar))


def test_a_grammar_in_llama_cpps_notation_has_a_limit_of_its_own() -> None:
    with pytest.raises(InvalidRequest, match="at most 32768 characters"):
        check_structure(StructuredOutputs(gbnf=f'root ::= "{"a" * 32_768}"'))


def test_a_choice_may_contain_any_ascii_character() -> None:
    check_structure(StructuredOutputs(choice=["".join(map(chr, range(1, 128)))]))
