"""Heads that predict further tokens (MTP): the results of transformers with their layers, and entries by step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from quire.kernels.pack import PackedMatrix
from quire.pager import Pager, StatePool, check
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError, ModelError, WrongTensor
from quire.runtime.common.types import SamplingParams
from quire.runtime.model import BUNDLED_MODEL
from quire.runtime.model.runner import HeadRunner, ModelRunner, SamplingSpec, load_head, load_model
from quire.scheduler.plan import DraftTask, SampledToken, ScheduledSequence, StepPlan, StepResult

from tests.support.families import GOLDENS
from tests.support.heads import FAMILIES, HEADS, with_head

GREEDY = SamplingSpec(SamplingParams(temperature=0.0), 0, frozenset())
LIMITS: dict[str, Any] = {
    "num_speculative_tokens": 4,
    "kv_cache_memory": 8 << 20,
    "max_num_seqs": 40,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": False,
    "page_size": 16,
    "threads": 1,
}


class Golden(NamedTuple):
    token_ids: list[int]
    hidden: Any
    logits: Any
    drafts: list[int]


def golden(family: str) -> Golden:
    with np.load(HEADS / family / "golden.npz") as data:
        return Golden(data["token_ids"].tolist(), data["hidden"], data["logits"], data["drafts"].tolist())


@contextmanager
def loaded(folder: Path, **settings: Any) -> Iterator[tuple[ModelRunner, HeadRunner]]:
    exact = {"weights": "f32", "kv_cache_dtype": "f32"}
    config = EngineConfig(model=str(folder), draft_model="mtp", **{**LIMITS, **exact, **settings})
    target = load_model(config)
    head = load_head(config, target)
    try:
        yield target, head
        check(head.pager, [each.table for each in head._sequences.values()])
    finally:
        head.close()
        target.close()


class Reader:
    """Runs one sequence through the model in chunks, and lets the head read each."""

    def __init__(self, target: ModelRunner, head: HeadRunner, token_ids: Sequence[int], request_id: int = 0) -> None:
        self.target = target
        self.head = head
        self.text = list(token_ids)
        self.request_id = request_id
        capacity = target.capacity
        states = capacity.open_states()
        assert isinstance(states, StatePool)
        self.table = Pager(16, capacity.num_pages, states=states, enable_prefix_caching=False).open(())

    def step(
        self, count: int, *, limit: int = 0, samples: int = 0, right: int = 0, is_read: bool = True
    ) -> tuple[int, ...]:
        """Compute `count` more tokens of the text, of which the last `samples` - 1 are drafts, `right` of them right.

        Returns the proposal. With samples, a token is added to the text that stays.
        """
        first = self.table.num_tokens
        self.table.append(count)
        context = self.text[: first + count]
        sequence = ScheduledSequence(
            self.request_id, self.table.pages, first, context[first:], samples, GREEDY, context, 1, state=0
        )
        plan = StepPlan(0, (sequence,), 1, 0)
        result = self.target.execute(plan)
        if samples:
            drafts = context[len(context) - samples + 1 :]
            sampled = [*drafts[:right], result.sampled[right].token_id, *[0] * (samples - 1 - right)]
            if right < len(drafts) and sampled[right] == drafts[right]:
                sampled[right] += 1
            result = StepResult(0, tuple(SampledToken(self.request_id, token) for token in sampled), 0.0)
            self.text = [*context[: len(context) - samples + 1 + right], sampled[right]]
            self.table.rollback(first + count - (samples - 1 - right))
        if not is_read:
            return ()
        task = DraftTask({self.request_id: limit}, {self.request_id: b""}, 1 << 20, ())
        return self.head.propose(plan, task, result).drafting.tokens.get(self.request_id, ())


def distance(found: Any, wanted: Any) -> float:
    return float(np.abs(found - wanted).max() / (wanted.max() - wanted.min()))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_logits_and_drafts_of_transformers(family: str, tmp_path: Path) -> None:
    wanted = golden(family)
    count = len(wanted.token_ids)
    with loaded(with_head(family, tmp_path / "model")) as (target, head):
        table = Pager(16, target.capacity.num_pages, enable_prefix_caching=False).open(())
        table.append(count)
        target.score(wanted.token_ids, 0, table.pages, 1)
        hidden = target.hidden_rows(0, count).copy()
        assert distance(hidden, wanted.hidden) < 2e-4
        head.runner.give_hidden(0, hidden[:-1])
        logits = head.runner.score(wanted.token_ids[1:], 0, table.pages, count - 1)
        assert distance(logits, wanted.logits) < 2e-4
        reader = Reader(target, head, wanted.token_ids)
        assert reader.step(count, samples=1, limit=4) == tuple(wanted.drafts)


@pytest.mark.parametrize("chunks", [(40,), (1, 39), (15, 1, 24), (39, 1)])
def test_the_drafts_are_the_same_for_every_chunking_of_the_text(chunks: Sequence[int], tmp_path: Path) -> None:
    wanted = golden("qwen3_5")
    with loaded(with_head("qwen3_5", tmp_path / "model")) as (target, head):
        reader = Reader(target, head, wanted.token_ids)
        for count in chunks[:-1]:
            assert reader.step(count) == ()
        assert reader.step(chunks[-1], samples=1, limit=4) == tuple(wanted.drafts)


@pytest.mark.parametrize("right", [0, 1, 2])
def test_rejected_drafts_leave_no_entry(right: int, tmp_path: Path) -> None:
    token_ids = golden("qwen3_5").token_ids[:20]
    with loaded(with_head("qwen3_5", tmp_path / "model")) as (target, head):
        reader = Reader(target, head, token_ids)
        drafts = reader.step(20, samples=1, limit=2)
        reader.text += drafts
        proposal = reader.step(3, samples=3, right=right, limit=3)
        reader.head.propose(StepPlan(1, (), 0, 0), DraftTask({}, {}, 1, (0,)), StepResult(1, (), 0.0))
        reader.table.rollback(0)
        again = Reader(target, head, reader.text[:-1], request_id=1)
        assert again.step(len(reader.text) - 1, samples=1, limit=3) == proposal
        assert again.text == reader.text


def test_entries_begin_again_behind_rows_that_were_not_read(tmp_path: Path) -> None:
    token_ids = golden("qwen3_5").token_ids
    with loaded(with_head("qwen3_5", tmp_path / "model")) as (target, head):
        reader = Reader(target, head, token_ids)
        reader.step(10)
        reader.step(10, is_read=False)
        assert len(reader.step(20, samples=1, limit=3)) == 3
        sequence = head._sequences[0]
        assert (sequence.base, sequence.token_ids) == (20, reader.text[21:])


def test_rows_that_are_computed_again_add_no_entries(tmp_path: Path) -> None:
    wanted = golden("qwen3_5")
    with loaded(with_head("qwen3_5", tmp_path / "model")) as (target, head):
        reader = Reader(target, head, wanted.token_ids)
        reader.step(30)
        reader.table.rollback(0)
        reader.step(12)
        assert head._sequences[0].token_ids == wanted.token_ids[1:30]
        reader.step(18)
        assert reader.step(10, samples=1, limit=4) == tuple(wanted.drafts)


def test_entries_of_the_same_text_are_found_in_the_prefix_cache(tmp_path: Path) -> None:
    wanted = golden("qwen3_5")
    with loaded(with_head("qwen3_5", tmp_path / "model"), enable_prefix_caching=True) as (target, head):
        Reader(target, head, wanted.token_ids).step(40)
        reader = Reader(target, head, wanted.token_ids, request_id=1)
        reader.step(30, is_read=False)  # the model finds its prefix, too, so the head sees no rows of it
        assert reader.step(10, samples=1, limit=4) == tuple(wanted.drafts)
        assert head.pager.prefix_hit_tokens == 32
        other = Reader(target, head, [wanted.token_ids[0] ^ 1, *wanted.token_ids[1:]], request_id=2)
        other.step(40)
        assert head.pager.prefix_hit_tokens == 32


def test_a_sequence_that_waits_for_its_image_has_no_rows(tmp_path: Path) -> None:
    wanted = golden("qwen3_5")
    with loaded(with_head("qwen3_5", tmp_path / "model")) as (target, head):
        reader = Reader(target, head, wanted.token_ids)
        reader.table.append(40)
        pages = reader.table.pages
        sequence = ScheduledSequence(0, pages, 0, wanted.token_ids, 1, GREEDY, wanted.token_ids, 1, state=0)
        waiting = ScheduledSequence(1, pages, 0, [5] * 7, 1, GREEDY, [5] * 7, 1, state=1)
        computed = target.execute(StepPlan(0, (sequence,), 1, 0))
        samples = (SampledToken(1, 0, is_deferred=True), *computed.sampled)
        result = StepResult(0, samples, 0.0, deferred=frozenset({1}))
        task = DraftTask({0: 4, 1: 4}, {0: b"", 1: b""}, 1 << 20, ())
        assert head.propose(StepPlan(0, (waiting, sequence), 2, 0), task, result).drafting.tokens == {
            0: tuple(wanted.drafts)
        }


def test_a_sequence_whose_draft_cannot_be_sampled_loses_its_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = golden("qwen3_5").token_ids
    with loaded(with_head("qwen3_5", tmp_path / "model")) as (target, head):
        execute = head.runner.execute

        def fail(plan: StepPlan) -> StepResult:
            samples = tuple(sample._replace(error="NaN") for sample in execute(plan).sampled)
            return StepResult(plan.step_id, samples, 0.0)

        monkeypatch.setattr(head.runner, "execute", fail)
        assert Reader(target, head, token_ids).step(40, samples=1, limit=4) == ()
        assert not head._sequences


def test_a_head_without_free_pages_takes_those_of_other_sequences(tmp_path: Path) -> None:
    token_ids = golden("qwen3_5").token_ids
    with loaded(with_head("qwen3_5", tmp_path / "model")) as (target, head):
        reader = Reader(target, head, token_ids)
        reader.step(20)
        head.pager.pool.reserve(head.pager.pool.num_available)
        assert len(reader.step(8, samples=1, limit=3)) == 3
        assert len(Reader(target, head, token_ids, request_id=1).step(30, samples=1, limit=2)) == 2
        assert [*head._sequences] == [1]
        assert Reader(target, head, token_ids, request_id=2).step(40, samples=1, limit=4) == ()
        assert not head._sequences
        head.pager.pool.reserve(-head.pager.pool.num_reserved)


def edited(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2; it must be 1 for draft_model mtp"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is true; it must be false"),
    ],
)
def test_heads_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = edited(with_head("qwen3_5", tmp_path / "model"), **changes)
    with pytest.raises(ModelError, match=message), loaded(folder):
        pass


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (GOLDENS / "qwen3_5", "has no head that predicts further tokens: no mtp.fc"),
        (BUNDLED_MODEL, "Qwen3NextForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM may have one"),
    ],
)
def test_models_without_a_head(folder: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message), loaded(folder):
        pass


def test_a_head_needs_draft_tokens(tmp_path: Path) -> None:
    folder = with_head("qwen3_5", tmp_path / "model")
    message = "draft_model needs num_speculative_tokens, which is 0"
    with pytest.raises(ConfigError, match=message), loaded(folder, num_speculative_tokens=0):
        pass


def test_a_matrix_of_a_head_in_another_shape(tmp_path: Path) -> None:
    folder = with_head("qwen3_5", tmp_path / "model")
    data = (folder / "model-2.safetensors").read_bytes()
    entry = b'"mtp.fc.weight":{"dtype":"BF16","shape":'
    (folder / "model-2.safetensors").write_bytes(data.replace(entry + b"[72,144]", entry + b"[144,72]"))
    message = r"mtp.fc.weight in .* is \[144, 72\]; config.json implies \[72, 144\]"
    with pytest.raises(WrongTensor, match=message), loaded(folder):
        pass


@pytest.mark.parametrize(("weights", "kv"), [("q8", "int8"), ("q4", "f16"), ("bf16", "bf16")])
def test_planned_memory_is_what_a_head_takes(weights: str, kv: str, tmp_path: Path) -> None:
    with loaded(with_head("qwen3_5_moe", tmp_path / "model"), weights=weights, kv_cache_dtype=kv) as (target, head):
        plan = target.capacity.memory
        assert plan.draft is not None
        weights = [
            weight for op in head.runner.ops for weight in (getattr(op, "weight", None), *getattr(op, "weights", ()))
        ]
        packed = {id(weight): weight.nbytes for weight in weights if isinstance(weight, PackedMatrix)}
        own = sum(packed.values()) - target.model.weights.embedding.nbytes - target.model.weights.lm_head.nbytes
        assert plan.draft.weights_bytes == own
        assert plan.draft.kv_bytes == head.runner.arena.memory.nbytes
        assert plan.draft.program.arena_bytes == plan.draft.arena_bytes
