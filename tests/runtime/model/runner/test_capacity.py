"""The capacity for a configuration, a model and a machine; nothing is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from quire.kernels import CpuBudget
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.model import BUNDLED_MODEL, kv_layout, read_spec
from quire.runtime.model.runner import capacity as capacity_module
from quire.runtime.model.runner import decide_capacity
from quire.runtime.model.runner.capacity import pick_cpus

from tests.support.families import GOLDENS

SPEC = read_spec(BUNDLED_MODEL)  # 4 layers, 2 KV heads of 64, 2,048 positions
TOKEN_BYTES = 2 * 4 * 2 * 64 * 2  # keys and values, bf16
PAGE = 32 * TOKEN_BYTES


def decided(**settings: Any) -> Any:
    return decide_capacity(EngineConfig(**settings), SPEC)


@pytest.mark.parametrize(("page_size", "dtype", "page_bytes"), [(16, "bf16", PAGE // 2), (32, "bf16", PAGE)])
def test_page_sizes(page_size: int, dtype: Any, page_bytes: int) -> None:
    assert decided(page_size=page_size, kv_cache_dtype=dtype).layout.page_bytes == page_bytes


def test_f32_pages_are_twice_as_big() -> None:
    assert decided(page_size=64, kv_cache_dtype="f32").layout.page_bytes == 4 * PAGE


def test_configured_memory_is_rounded_down_to_pages() -> None:
    assert decided(kv_cache_memory=10 * PAGE + PAGE - 1).num_pages == 10
    assert decided(kv_cache_memory=PAGE).num_pages == 1


def test_less_memory_than_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"{PAGE - 1} holds no page; a page of 32 tokens takes {PAGE} bytes"):
        decided(kv_cache_memory=PAGE - 1)


LFM2 = read_spec(GOLDENS / "lfm2")  # 3 layers with 4 taps, hidden 72: a ring has 96 columns as it is stored

STATE = 3 * 5 * 96 * 4  # bytes, without draft tokens


@pytest.mark.parametrize(("drafts", "rows"), [(0, 5), (4, 9)])
def test_the_states_of_all_sequences_are_part_of_the_kv_cache(drafts: int, rows: int) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 7, "num_speculative_tokens": drafts, "state_cache_memory": 0}
    state_bytes = 3 * rows * 96 * 4
    page_bytes = 2 * 32 * 3 * 2 * 16 * 2  # 2 layers with attention
    config = EngineConfig(kv_cache_memory=7 * state_bytes + 5 * page_bytes, **settings)
    capacity = decide_capacity(config, LFM2)
    assert (capacity.layout.page_bytes, capacity.num_pages, capacity.num_states) == (page_bytes, 5, 7)
    assert (capacity.memory.kv_bytes, capacity.memory.state_bytes) == (5 * page_bytes, 7 * state_bytes)
    assert f"{'states':<18}{7 * state_bytes:>18,} B  of sequences" in capacity.memory.describe()
    with pytest.raises(ConfigError, match=rf"{7 * state_bytes} must be more than .* of the states of max_num_seqs 7"):
        decide_capacity(EngineConfig(kv_cache_memory=7 * state_bytes, **settings), LFM2)


@pytest.mark.parametrize(
    ("wanted", "left", "kept"),
    [(None, 8, 2), (None, 7, 1), (None, 100, 12), (0, 100, 0), (STATE, 100, 1), (STATE - 1, 9, 0), (5 * STATE, 9, 5)],
)
def test_cached_states_are_part_of_the_kv_cache(wanted: int | None, left: int, kept: int) -> None:
    config = EngineConfig(kv_cache_memory=(3 + left) * STATE, max_num_seqs=3, state_cache_memory=wanted)
    capacity = decide_capacity(config, LFM2)
    assert (capacity.num_states, capacity.num_cached_states) == (3 + kept, kept)
    assert capacity.memory.state_bytes == (3 + kept) * STATE
    assert capacity.num_pages == (left - kept) * STATE // capacity.layout.page_bytes


@pytest.mark.parametrize(
    ("pages", "kept", "wanted", "interval"),
    [(100, 1, None, 3200), (100, 3, None, 1066), (100, 7, None, 512), (100, 0, None, 3200), (100, 3, 64, 64)],
)
def test_a_prompt_takes_no_larger_share_of_the_cached_states_than_of_the_pages(
    pages: int, kept: int, wanted: int | None, interval: int
) -> None:
    page_bytes = 2 * 32 * 3 * 2 * 16 * 2
    memory = {"kv_cache_memory": (3 + kept) * STATE + pages * page_bytes, "state_cache_memory": kept * STATE}
    capacity = decide_capacity(EngineConfig(max_num_seqs=3, state_interval=wanted, **memory), LFM2)
    assert (capacity.num_pages, capacity.num_cached_states, capacity.state_interval) == (pages, kept, interval)


def test_without_a_prefix_cache_no_states_are_kept() -> None:
    config = EngineConfig(kv_cache_memory=100 * STATE, max_num_seqs=3, enable_prefix_caching=False)
    assert decide_capacity(config, LFM2).num_cached_states == 0


def test_more_cached_states_than_the_kv_cache_holds_are_refused() -> None:
    config = EngineConfig(kv_cache_memory=100 * STATE, max_num_seqs=3, state_cache_memory=97 * STATE)
    with pytest.raises(ConfigError, match="and of state_cache_memory"):
        decide_capacity(config, LFM2)


def test_states_leave_a_page_of_the_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    page_bytes = 2 * 32 * 3 * 2 * 16 * 2  # 2 layers with attention
    config = EngineConfig(kv_cache_share=1.0, max_num_seqs=3, state_cache_memory=0)
    monkeypatch.setattr(capacity_module, "free_memory_bytes", lambda: 3 * STATE + page_bytes)
    assert decide_capacity(config, LFM2).num_pages == 1
    monkeypatch.setattr(capacity_module, "free_memory_bytes", lambda: 3 * STATE + page_bytes - 1)
    message = (
        f"has {3 * STATE + page_bytes - 1} bytes by kv_cache_share 1.0, which must be at least {page_bytes} more than "
        f"the {3 * STATE} bytes of the states of max_num_seqs 3 sequences"
    )
    with pytest.raises(ConfigError, match=message):
        decide_capacity(config, LFM2)


def test_a_model_without_states_plans_none() -> None:
    capacity = decided(kv_cache_memory=PAGE)
    assert (capacity.memory.state_bytes, capacity.open_states()) == (0, None)
    assert "states" not in capacity.memory.describe()


def test_a_small_pool_shortens_requests_unless_their_length_is_configured() -> None:
    assert decided(kv_cache_memory=4 * PAGE).max_model_len == 128
    assert decided(kv_cache_memory=4 * PAGE, max_model_len=128).max_model_len == 128
    with pytest.raises(ConfigError, match=r"max_model_len 129 needs .* raise kv_cache_memory"):
        decided(kv_cache_memory=4 * PAGE, max_model_len=129)


def test_no_request_is_longer_than_the_model_allows() -> None:
    assert decided(kv_cache_memory=1000 * PAGE).max_model_len == 2048
    with pytest.raises(ConfigError, match="max_model_len 2049 is more than the 2048 positions"):
        decided(max_model_len=2049)


def test_by_default_the_pool_holds_every_sequence_at_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "free_memory_bytes", lambda: 1 << 40)
    assert decided(max_num_seqs=3, max_model_len=100).num_pages == 3 * 4


def test_by_default_the_pool_takes_a_share_of_free_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "free_memory_bytes", lambda: 100 * PAGE)
    assert decided().num_pages == 40
    assert decided().max_model_len == 40 * 32
    monkeypatch.setattr(capacity_module, "free_memory_bytes", lambda: 0)
    assert (decided().num_pages, decided().max_model_len) == (1, 32)


HYBRID = replace(SPEC, windows=(0, 100, 0, 100))
SLIDING = replace(SPEC, windows=(100,) * 4)
SLIDING_PAGES = -(-(100 + 63) // 32)  # most pages of a sequence in one layer group


def test_half_the_layers_make_half_a_page() -> None:
    capacity = decide_capacity(EngineConfig(kv_cache_memory=64 * PAGE), HYBRID)
    assert (capacity.num_pages, capacity.layout.page_bytes) == (128, PAGE // 2)
    assert capacity.memory.kv_bytes == 64 * PAGE


def test_with_windows_a_request_may_be_longer_than_the_pool() -> None:
    """Only the pages held at once must fit: all pages of a full layer group, and six of a sliding layer group."""

    def longest(spec: Any, pages: int) -> int:
        return decide_capacity(
            EngineConfig(kv_cache_memory=pages * kv_layout(spec, "bf16", 32).page_bytes), spec
        ).max_model_len

    assert longest(SLIDING, SLIDING_PAGES) == 2048
    assert longest(SLIDING, SLIDING_PAGES - 1) == (SLIDING_PAGES - 1) * 32
    assert longest(HYBRID, 10 + SLIDING_PAGES) == 10 * 32
    assert longest(HYBRID, 3) == 32
    with pytest.raises(ConfigError, match=rf"max_model_len 321 needs {17 * PAGE // 2} bytes"):
        decide_capacity(EngineConfig(kv_cache_memory=8 * PAGE, max_model_len=321), HYBRID)
    with pytest.raises(ConfigError, match="holds 1 of the 2 pages that a sequence needs at least"):
        decide_capacity(EngineConfig(kv_cache_memory=PAGE - 1), HYBRID)


def test_by_default_sliding_layers_have_pages_for_every_window_and_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "free_memory_bytes", lambda: 1 << 40)
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=128)
    assert decide_capacity(config, SLIDING).num_pages == 3 * SLIDING_PAGES + 4
    assert decide_capacity(config, HYBRID).num_pages == 3 * (64 + SLIDING_PAGES) + 4
    monkeypatch.setattr(capacity_module, "free_memory_bytes", lambda: 0)
    assert decide_capacity(config, HYBRID).num_pages == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 24}, "page_size must be one of 16, 32, 64, not 24"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "8 must be at least max_num_seqs 9"),
        ({"threads": 1025}, "threads must be between 1 and 1024, not 1025"),
        ({"isa": "mmx"}, "`isa` or QUIRE_ISA: unknown ISA level 'mmx'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decided(**settings)


@pytest.mark.parametrize(
    ("threads", "reason"), [(None, "a test"), (8, "--threads"), (9, "--threads, more than the 8 CPUs: a test")]
)
def test_more_threads_than_cpus_are_named(monkeypatch: pytest.MonkeyPatch, threads: int | None, reason: str) -> None:
    monkeypatch.setattr(capacity_module, "available_cpus", lambda: CpuBudget(8, "a test"))
    assert pick_cpus(EngineConfig(threads=threads)) == CpuBudget(threads or 8, reason)


def test_the_plan_is_made_for_these_pages_and_threads() -> None:
    one, three = (decided(kv_cache_memory=10 * PAGE, threads=threads).memory for threads in (1, 3))
    assert (one.kv_pages, one.kv_bytes) == (10, 10 * PAGE)
    assert three.scratch_bytes == 3 * one.scratch_bytes
    assert three.total_bytes > one.total_bytes


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        ({"max_num_seqs": 4}, 4),
        ({"max_num_seqs": 4, "num_speculative_tokens": 3}, 4),
        ({"max_num_seqs": 4, "num_speculative_tokens": 7}, 8),
        ({"max_num_seqs": 4, "num_speculative_tokens": 7, "max_num_batched_tokens": 6}, 6),
    ],
)
def test_rows_that_sample(settings: dict[str, Any], samples: int) -> None:
    capacity = decided(kv_cache_memory=10 * PAGE, **settings)
    assert capacity.max_num_samples == samples
    assert capacity.memory.program.logits.rows == samples


@pytest.mark.parametrize("memory", [{"kv_cache_memory": 100 * PAGE}, {"kv_cache_share": 0.01}, {"kv_cache_share": 0.9}])
def test_a_draft_model_has_as_many_tokens_in_the_same_memory(memory: dict[str, Any]) -> None:
    """The draft model has 2,048 positions as the model, or 512."""
    drafting = {"num_speculative_tokens": 4, "max_num_seqs": 4, **memory}
    alone = decided(**drafting)
    itself = decided(draft_model=str(BUNDLED_MODEL), **drafting)
    another = decided(draft_model=str(GOLDENS / "llama"), **drafting)
    for capacity in (itself, another):
        pages = capacity.num_pages * PAGE
        draft = capacity.draft
        draft_pages = draft.num_pages * draft.layout.page_bytes
        assert pages + draft_pages <= alone.num_pages * PAGE or capacity.num_pages == alone.num_pages
        assert capacity.memory.draft_bytes == draft.memory.total_bytes - draft.memory.process_bytes
        assert capacity.memory.draft_kv_bytes == draft_pages
        sequences = capacity.num_pages / capacity.layout.pages_for(capacity.max_model_len)
        length = min(512 if capacity is another else 2048, capacity.max_model_len)
        assert draft.num_pages / draft.layout.pages_for(length) == pytest.approx(sequences, rel=0.1)
    assert itself.draft.num_pages == itself.num_pages
    assert f"draft model  {another.memory.draft_bytes:>23,} B  weights" in another.memory.describe()


@pytest.mark.parametrize(("running", "kept"), [(50, 0), (10, 40)])
def test_a_draft_model_takes_no_share_of_the_states_that_are_asked_for(running: int, kept: int) -> None:
    state_bytes = 3 * 9 * 96 * 4  # bytes, with 4 draft tokens
    settings: dict[str, Any] = {"num_speculative_tokens": 4, "max_num_seqs": running}
    settings["state_cache_memory"] = kept * state_bytes
    config = EngineConfig(kv_cache_memory=1 << 20, draft_model=str(GOLDENS / "llama"), **settings)
    capacity = decide_capacity(config, LFM2)
    assert capacity.draft is not None
    pages = capacity.memory.kv_bytes + capacity.memory.draft_kv_bytes
    rest = (1 << 20) - 50 * 3 * 9 * 96 * 4 - pages
    assert 0 <= rest < capacity.layout.page_bytes + capacity.draft.layout.page_bytes


def test_errors_beside_a_draft_model_name_the_memory_that_was_given() -> None:
    """5 states of 3 layers, in f32 with 9 rows of 96 columns each, and a page of the draft model."""
    states = "the 51840 bytes of the states of max_num_seqs 5 sequences and of state_cache_memory"
    parts = f"{states} and the 8192 bytes of a page of draft_model"
    for memory, message in (
        (60_032, f"kv_cache_memory 60032 must be more than {parts}"),
        (60_033, f"kv_cache_memory 60033, less {parts}, holds no page; a page of 32 tokens takes 12288 bytes"),
    ):
        config = EngineConfig(
            draft_model=str(GOLDENS / "llama"),
            num_speculative_tokens=4,
            max_num_seqs=5,
            kv_cache_memory=memory,
            state_cache_memory=0,
        )
        with pytest.raises(ConfigError) as error:
            decide_capacity(config, LFM2)
        assert str(error.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative_tokens": 0}, "draft_model needs num_speculative_tokens, which is 0; 4 is a good start"),
        ({"draft_model": str(GOLDENS / "lfm2")}, "lfm2 has layers with states; a draft model needs attention in all"),
        ({"kv_cache_memory": PAGE}, "kv_cache_memory 65536 must be more than the 65536 bytes of a page of draft_model"),
    ],
)
def test_a_draft_model_that_cannot_be_used_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decided(**{"draft_model": str(BUNDLED_MODEL), "num_speculative_tokens": 4, **settings})
