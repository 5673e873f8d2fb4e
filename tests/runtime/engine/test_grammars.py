"""Masks of grammars: which tokens they allow, when they are ready, and what is kept."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.types import SamplingParams, StructuredOutputs
from quire.runtime.engine import grammars
from quire.runtime.engine.grammars import Grammars, StepMasks, check_structure, grammar_of
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
    """Return the masks once all of them are ready."""
    assert step is not None
    for job in step.jobs.values():
        job.result(timeout=60)
    return step.wait()


def allowed(mask: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_masks_follow_the_generated_tokens(masks: Grammars) -> None:
    pair = {token for token in range(VOCAB) if TOKENIZER.token_bytes(token) in (b"aa", b"ab", b"ba", b"bb")}
    for generated, expected in (([], {A, B} | pair), ([A], {A, B}), ([A, B], {EOS})):
        (mask,) = ready(masks.begin([sequence(WORD, generated)]))[1].masks
        assert allowed(mask) == expected


def test_a_sequence_that_starts_in_the_middle_has_the_same_masks(masks: Grammars) -> None:
    (mask,) = ready(masks.begin([sequence(WORD, [B])]))[1].masks
    assert allowed(mask) == {A, B}


def test_a_prefill_in_chunks_after_a_preemption_or_a_crash_knows_the_generated_tokens(masks: Grammars) -> None:
    """The job that a chunk without a sample begins is also that of the last chunk."""
    assert masks.begin([sequence(WORD, [B], samples=False)]) is None
    job = masks._running[1].job
    assert job is not None
    job.result(timeout=60)
    (mask,) = ready(masks.begin([sequence(WORD, [B])]))[1].masks
    assert allowed(mask) == {A, B}


def test_each_draft_token_has_a_mask_and_is_taken_back(masks: Grammars) -> None:
    first, second, third = ready(masks.begin([sequence(WORD, [], (A, B))]))[1].masks
    assert {A, B} <= allowed(first)
    assert allowed(second) == {A, B}
    assert allowed(third) == {EOS}
    (mask,) = ready(masks.begin([sequence(WORD, [B])]))[1].masks
    assert allowed(mask) == {A, B}, "another token than the draft was sampled"


def test_nothing_is_masked_after_a_draft_that_is_not_allowed_or_ends_the_output(masks: Grammars) -> None:
    for drafts in ((C, A), (A, B, EOS, A)):
        *_, last = ready(masks.begin([sequence(WORD, [], drafts)]))[1].masks
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
    compile_it = Grammars._matcher

    def slow(self: Grammars, running: Any) -> Any:
        assert go.wait(60)
        return compile_it(self, running)

    monkeypatch.setattr(Grammars, "_matcher", slow)
    step = masks.begin([sequence(WORD, [])])
    assert step is not None
    assert (step.wait()[1].masks, step.wait()[1].error) == (None, None)
    for generated, drafts in (([], ()), ([], (A,)), ([A], ())):
        again = masks.begin([sequence(WORD, generated, drafts)])
        assert again is not None
        assert again.wait()[1].masks is None, "the job for the first tokens still runs"
    go.set()
    ready(step)
    (mask,) = ready(masks.begin([sequence(WORD, [A])]))[1].masks
    assert allowed(mask) == {A, B}


def test_forced_tokens_follow_the_last_accepted_sample(masks: Grammars) -> None:
    structure = StructuredOutputs(regex="(a|c)bbbbbbbb!")

    def forced(drafts: tuple[int, ...], *samples: SampledToken) -> list[tuple[int, ...]]:
        step = masks.begin([sequence(structure, [], drafts)])
        ready(step)
        assert step is not None
        return [sample.forced for sample in step.with_forced_tokens(StepResult(1, samples, 0.0)).sampled]

    (rest,) = forced((), SampledToken(1, A))
    assert TOKENIZER.decode(rest).startswith("bbbb")
    assert forced((C,), SampledToken(1, A), SampledToken(1, 9)) == [rest, ()], "the draft was wrong"
    wrong, after = forced((A,), SampledToken(1, A), SampledToken(1, B))
    assert wrong == ()
    assert TOKENIZER.decode(after).startswith("bbb")
    assert forced((), SampledToken(1, 0, error="NaN")) == [()]
    assert forced((), SampledToken(1, 0, is_deferred=True)) == [()]


def test_a_tenant_with_many_grammars_evicts_its_own(masks: Grammars) -> None:
    ready(masks.begin([sequence(WORD, [], tenant="quiet")]))
    for number in range(grammars.MAX_COMPILED_PER_TENANT + 5):
        ready(masks.begin([sequence(StructuredOutputs(regex=f"a{number}"), [], request_id=number, tenant="loud")]))
    tenants = [tenant for tenant, _ in masks._compiled]
    assert tenants.count("loud") == grammars.MAX_COMPILED_PER_TENANT
    assert tenants.count("quiet") == 1


def test_grammars_of_all_tenants_are_bounded(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_COMPILED", 3)
    for number in range(5):
        ready(masks.begin([sequence(WORD, [], request_id=number, tenant=str(number))]))
    assert [tenant for tenant, _ in masks._compiled] == ["2", "3", "4"]


def test_a_grammar_is_compiled_once(masks: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    matcher = grammars.LLMatcher

    class Counting:
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            compiled.append(arguments)
            return matcher(*arguments, **options)

        grammar_from_regex = matcher.grammar_from_regex

    monkeypatch.setattr(grammars, "LLMatcher", Counting)
    for request_id in (1, 2, 3):
        ready(masks.begin([sequence(WORD, [], request_id=request_id)]))
    assert len(compiled) == 1


def test_a_model_without_an_end_token_is_an_error_of_the_request(
    masks: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = TextProcessor.load(BUNDLED_MODEL)
    assert endless.tokenizer is not None
    endless.tokenizer.eos_token_ids = frozenset()
    spec = dataclasses.replace(read_spec(BUNDLED_MODEL), eos_token_ids=())
    monkeypatch.setattr(TextProcessor, "load", lambda path: endless)
    monkeypatch.setattr(grammars, "read_spec", lambda path: spec)
    outcome = ready(masks.begin([sequence(WORD, [])]))[1]
    assert outcome.masks is None
    assert "a token that ends the output" in outcome.error


def test_a_client_cannot_switch_off_the_bound_on_whitespace() -> None:
    schema = {"type": "array", "x-guidance": {"whitespace_pattern": ".*", "lenient": True}, "not": {}}
    with pytest.raises(InvalidRequest, match="Unimplemented keys"):
        check_structure(StructuredOutputs(json=schema))
    assert ".*" not in grammar_of(StructuredOutputs(json=schema))
    assert "x-guidance" in schema, "the request's own schema is not changed"
