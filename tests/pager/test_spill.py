"""Spilling pages to a file and restoring them. Pages hold 4 tokens, tiles 8."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.pager import KVArena, KVLayout, OutOfPages, Pager, SpillFile, SpillUnavailable, check

from tests.pager.conftest import MakeHarness
from tests.support.clock import FakeClock

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, page_size=16)
TOKENS = list(range(100, 140))


# SpillFile


@pytest.fixture
def arena() -> KVArena:
    """Eight pages of random bytes."""
    arena = KVArena(LAYOUT, 8)
    arena.memory[:] = np.random.default_rng(1).integers(0, 256, arena.memory.size, np.uint8)
    return arena


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def file(arena: KVArena, clock: FakeClock, tmp_path: Path) -> Iterator[SpillFile]:
    """Yield a spill file of four pages and 5 bytes."""
    file = SpillFile(arena, 4 * LAYOUT.page_bytes + 5, tmp_path, clock)
    yield file
    file.close()


def num_used(file: SpillFile) -> int:
    return file.num_slots - file.num_free


def page_of(arena: KVArena, page: int) -> bytes:
    out = np.empty(LAYOUT.page_bytes, np.uint8)
    arena.read_page(page, out)
    return out.tobytes()


def test_saved_pages_can_be_loaded_into_other_pages(arena: KVArena, file: SpillFile) -> None:
    before = [page_of(arena, page) for page in range(8)]
    slots = file.save([2, 5, 0])
    assert (slots, num_used(file)) == ([0, 1, 2], 3)
    arena.memory[:] = 0
    assert file.load(slots, [7, 1, 3])
    assert [page_of(arena, page) for page in (7, 1, 3)] == [before[2], before[5], before[0]]
    assert not any(page_of(arena, page).strip(b"\0") for page in (0, 2, 4, 5, 6))


def test_a_huge_limit_takes_no_memory_until_it_is_used(arena: KVArena, tmp_path: Path) -> None:
    file = SpillFile(arena, 1 << 50, tmp_path)
    assert file.num_free == file.num_slots > 1 << 30
    assert file.save([0, 1]) == [0, 1]
    file.close()


def test_the_file_is_bounded_and_slots_are_used_again(file: SpillFile) -> None:
    assert file.num_slots == 4
    slots = file.save([0, 1, 2])
    assert file.save([3, 4]) is None
    assert num_used(file) == 3
    file.free(slots[:2])
    assert file.save([3, 4, 5]) == [0, 1, 3]


def test_the_file_has_no_name_and_is_private(file: SpillFile, tmp_path: Path) -> None:
    file.save([0])
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(file._file)
    assert (status.st_nlink, status.st_mode & 0o777) == (0, 0o600)


def test_without_o_tmpfile_the_file_is_unlinked_at_once(
    arena: KVArena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    file = SpillFile(arena, LAYOUT.page_bytes, tmp_path)
    assert file.save([3]) == [0]
    assert list(tmp_path.iterdir()) == []
    file.close()


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_after_a_disk_failure_the_store_pauses_for_a_minute(
    file: SpillFile, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    calls = []

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(failure, os.strerror(failure))
        return len(data)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert file.save([0, 1, 2]) is None
    assert (num_used(file), len(calls)) == (0, 2)
    clock.now += 59
    assert (file.save([0]), file.seconds(1), len(calls)) == (None, None, 2)
    clock.now += 1
    assert file.save([0]) == [0]


def test_a_short_write_is_a_failure(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: len(data) - 1)
    assert file.save([0]) is None
    assert file.seconds(1) is None


@pytest.mark.parametrize("at", [0, LAYOUT.page_bytes - 1])
def test_a_flipped_bit_is_found(arena: KVArena, file: SpillFile, at: int) -> None:
    slots = file.save([0, 1])
    offset = slots[1] * LAYOUT.page_bytes + at
    byte = os.pread(file._file, 1, offset)[0]
    os.pwrite(file._file, bytes([byte ^ 4]), offset)
    assert file.load(slots[:1], [2])
    assert not file.load(slots, [2, 3])


def test_a_short_or_failing_read_is_a_failure(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = file.save([0, 1])
    os.ftruncate(file._file, 2 * LAYOUT.page_bytes - 1)
    assert file.load(slots[:1], [2])
    assert not file.load(slots, [2, 3])

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "preadv", preadv)
    assert not file.load(slots[:1], [2])


def test_after_a_failing_read_the_store_pauses_for_a_minute(
    file: SpillFile, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = file.save([0])
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    assert not file.load(slots, [1])
    assert file.seconds(1) is None
    clock.now += 60
    assert file.seconds(1) is not None


def test_a_real_full_disk(arena: KVArena, tmp_path: Path) -> None:
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={3 * LAYOUT.page_bytes}", "tmpfs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mount.returncode:
        pytest.skip(f"no right to mount a small file system: {mount.stderr.strip()}")
    try:
        file = SpillFile(arena, 100 * LAYOUT.page_bytes, tmp_path)
        kept = file.save([0, 1])
        assert file.save([2, 3, 4, 5]) is None
        before = page_of(arena, 1)
        assert file.load(kept, [6, 7])
        assert page_of(arena, 7) == before
        file.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_predicted_seconds_follow_measured_speeds(
    arena: KVArena, file: SpillFile, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file.seconds(2) == pytest.approx(2 * LAYOUT.page_bytes * (1 / 1e9 + 1 / 2e9))
    read_page = arena.read_page
    write_page = arena.write_page

    def slowly(move: Callable[..., None], seconds: float) -> Callable[..., None]:
        def moved(*arguments: Any) -> None:
            move(*arguments)
            clock.now += seconds

        return moved

    monkeypatch.setattr(arena, "read_page", slowly(read_page, 0.2))
    monkeypatch.setattr(arena, "write_page", slowly(write_page, 0.1))
    for _ in range(40):
        slots = file.save([0, 1])
        file.load(slots, [0, 1])
        file.free(slots)
    assert file.seconds(2) == pytest.approx(0.6, rel=1e-3)
    assert file.seconds(0) == 0
    assert file.seconds(5) is None


def test_a_closed_file_saves_and_loads_nothing(file: SpillFile) -> None:
    slots = file.save([0])
    file.close()
    file.close()
    assert not file.load(slots, [1])
    assert file.save([0]) is None


def test_a_file_that_cannot_be_created_raises_a_typed_error(arena: KVArena, tmp_path: Path) -> None:
    with pytest.raises(SpillUnavailable, match=r"cannot create a spill file in .*missing \(No such file"):
        SpillFile(arena, LAYOUT.page_bytes, tmp_path / "missing")
    with pytest.raises(ValueError, match=r"a spill file needs at least a page of 6,144 bytes, got 6,143"):
        SpillFile(arena, LAYOUT.page_bytes - 1, tmp_path)


# SpillFile with states


@pytest.fixture
def state_memory() -> np.ndarray:
    """Three states of random bytes, each of a page and 7 bytes."""
    return np.random.default_rng(2).integers(0, 256, (3, LAYOUT.page_bytes + 7), np.uint8)


@pytest.fixture
def state_file(arena: KVArena, state_memory: np.ndarray, clock: FakeClock, tmp_path: Path) -> Iterator[SpillFile]:
    """Yield a spill file of five slots."""
    file = SpillFile(arena, 5 * LAYOUT.page_bytes, tmp_path, clock, state_memory)
    yield file
    file.close()


def test_a_saved_state_can_be_loaded_into_another_slot(
    arena: KVArena, state_file: SpillFile, state_memory: np.ndarray
) -> None:
    wanted, untouched = state_memory[1].copy(), state_memory[0].copy()
    page = page_of(arena, 4)
    slots = state_file.save([4], 1)
    assert (slots, num_used(state_file)) == ([0, 1, 2], 3)
    assert state_file.save([5], 0) is None  # two slots are left
    arena.memory[:] = 0
    state_memory[1:] = 0
    assert state_file.load(slots, [6], 2)
    assert page_of(arena, 6) == page
    assert [row.tobytes() for row in state_memory] == [untouched.tobytes(), bytes(wanted.size), wanted.tobytes()]
    state_file.free(slots)
    assert num_used(state_file) == 0
    assert state_file.save([1, 2, 3], 0) == [0, 1, 2, 3, 4]


def test_a_state_without_pages_and_pages_without_a_state(arena: KVArena, state_file: SpillFile) -> None:
    wanted = page_of(arena, 1)
    assert state_file.save([], 0) == [0, 1]
    assert state_file.save([0, 1], -1) == [2, 3]
    assert state_file.load([0, 1], [], 1)
    assert state_file.load([3], [7], -1)
    assert page_of(arena, 7) == wanted


@pytest.mark.parametrize("at", [0, LAYOUT.page_bytes - 1, LAYOUT.page_bytes, LAYOUT.page_bytes + 6])
def test_a_flipped_bit_of_a_state_is_found(state_file: SpillFile, at: int) -> None:
    slots = state_file.save([0], 0)
    offset = slots[1] * LAYOUT.page_bytes + at
    byte = os.pread(state_file._file, 1, offset)[0]
    os.pwrite(state_file._file, bytes([byte ^ 4]), offset)
    assert state_file.load(slots[:1], [2], -1)
    assert not state_file.load(slots, [2], 1)


def test_a_disk_that_fails_within_a_state_leaves_no_slot_in_use(
    state_file: SpillFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        return len(data) if len(sizes) < 3 else len(data) - 1

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert state_file.save([0], 0) is None
    assert (sizes, num_used(state_file)) == ([LAYOUT.page_bytes, LAYOUT.page_bytes, 7], 0)
    assert state_file.seconds(1, 0) is None


def test_predicted_seconds_and_the_least_size_count_the_slots_of_a_state(
    arena: KVArena, state_file: SpillFile, state_memory: np.ndarray, tmp_path: Path
) -> None:
    assert state_file.seconds(1, 1) == pytest.approx(3 * LAYOUT.page_bytes * (1 / 1e9 + 1 / 2e9))
    assert [state_file.seconds(pages, 1) is None for pages in (3, 4)] == [False, True]
    least = "a page of 6,144 bytes and a state of 6,151 bytes, in 3 slots of a page's size, got 18,431"
    with pytest.raises(ValueError, match=f"a spill file needs at least {least}"):
        SpillFile(arena, 3 * LAYOUT.page_bytes - 1, tmp_path, state_memory=state_memory)


# Pager with a SpillFile


@pytest.mark.parametrize("damaged", [False, True])
def test_a_sequence_is_restored_unless_its_bytes_in_the_file_changed(
    arena: KVArena, file: SpillFile, damaged: bool
) -> None:
    pager = Pager(16, 8, copy_page=arena.copy_page, store=file, enable_prefix_caching=False)
    table = pager.open([])
    table.append(40)
    before = [page_of(arena, page) for page in table.pages[0]]
    spilled = pager.spill(table, 40)
    arena.memory[:] = 0
    if damaged:
        os.pwrite(file._file, bytes(9), LAYOUT.page_bytes + 100)
    table = pager.restore(spilled, TOKENS[:40])
    assert (table is None, num_used(file), pager.num_spilled) == (damaged, 0, 0)
    check(pager, [table] if table else [])
    if table:
        assert [page_of(arena, page) for page in table.pages[0]] == before


# Pager with a fake store


def test_a_spilled_sequence_is_restored(make_harness: MakeHarness) -> None:
    harness = make_harness(4, enable_prefix_caching=False, store_pages=4)
    pager = harness.pager
    table, _ = harness.compute(TOKENS[:10])
    table.reserve(1)
    spilled = pager.spill(table, 10)
    assert (spilled.num_tokens, spilled.num_pages, pager.num_spilled) == (10, 3, 3)
    assert (pager.pool.num_free, pager.pool.num_reserved, table.num_tokens) == (4, 0, 0)
    other, _ = harness.compute(TOKENS[20:36])
    with pytest.raises(OutOfPages, match="needs 3 pages, 0 are available"):
        pager.restore(spilled, TOKENS)
    other.release()
    table = pager.restore(spilled, TOKENS)
    assert harness.memory.read(table) == TOKENS[:10]
    assert (pager.num_spilled, harness.store.num_used, harness.store.num_loaded) == (0, 0, 3)
    harness.extend(table, TOKENS[10:13])
    assert harness.memory.read(table) == TOKENS[:13]
    check(pager, [table])


def test_pages_still_cached_are_not_read_back(make_harness: MakeHarness) -> None:
    harness = make_harness(4, store_pages=4)
    pager = harness.pager
    table, _ = harness.compute(TOKENS[:14])
    spilled = pager.spill(table, 14)
    harness.compute([1, 2, 3, 4, 5])[0].release()  # allocates the free page and evicts the leaf
    table = pager.restore(spilled, TOKENS)
    assert harness.memory.read(table) == TOKENS[:14]
    assert (harness.store.num_loaded, table.num_committed) == (2, 3)
    check(pager, [table])


def test_restored_cached_pages_count_as_allocated(make_harness: MakeHarness) -> None:
    harness = make_harness(4, store_pages=4)
    table, _ = harness.compute(TOKENS[:14])
    spilled = harness.pager.spill(table, 14)
    other, _ = harness.compute([1])  # the only page that was not cached
    with pytest.raises(OutOfPages, match="needs 4 pages, 3 are available"):
        harness.pager.restore(spilled, TOKENS)
    assert (harness.pager.pool.num_cached, harness.pager.num_spilled) == (3, 4)
    check(harness.pager, [other])


def test_only_computed_tokens_are_spilled(make_harness: MakeHarness) -> None:
    harness = make_harness(8, store_pages=4)
    table, _ = harness.compute(TOKENS[:6])
    table.append(6)
    spilled = harness.pager.spill(table, 6)
    assert (spilled.num_tokens, spilled.num_pages) == (6, 2)
    with pytest.raises(ValueError, match="cannot roll back to 1 tokens, the table holds 0"):
        harness.pager.spill(table, 1)


@pytest.mark.usefixtures("small_tiles")
def test_a_sliding_group_spills_what_its_window_reaches(make_harness: MakeHarness) -> None:
    harness = make_harness(20, windows=(0, 8), store_pages=20)
    table, _ = harness.compute(TOKENS[:18])
    spilled = harness.pager.spill(table, 18)
    assert spilled.num_pages == 5 + 3
    blocker = harness.pager.open([])
    blocker.append(40)
    blocker.release()
    table = harness.pager.restore(spilled, TOKENS)
    assert [pages.count(-1) for pages in table.pages] == [0, 2]
    assert harness.memory.read(table, 0) == TOKENS[:18]
    assert harness.memory.read(table, 1, 8) == TOKENS[8:18]
    assert [table.can_roll_back(to) for to in (14, 15)] == [False, True]
    check(harness.pager, [table])


def test_without_a_store_or_free_slots_spill_changes_nothing(
    make_harness: MakeHarness,
) -> None:
    for options in ({}, {"store_pages": 2}):
        harness = make_harness(8, **options)
        table, _ = harness.compute(TOKENS[:10])
        assert harness.pager.spill(table, 10) is None
        assert (table.num_tokens, harness.pager.num_spilled) == (10, 0)
        assert harness.pager.spill_seconds(3) is None
        check(harness.pager, [table])
    assert harness.pager.spill_seconds(2) == 2.0


def test_damaged_pages_are_not_restored(make_harness: MakeHarness) -> None:
    harness = make_harness(6, store_pages=4)
    table, _ = harness.compute(TOKENS[:10])
    twin = table.fork()
    spilled = harness.pager.spill(table, 10)
    harness.store.damaged = True
    assert harness.pager.restore(spilled, TOKENS) is None
    assert (harness.pager.num_spilled, harness.store.num_used, harness.store.num_loaded) == (0, 0, 0)
    check(harness.pager, [twin])
    with pytest.raises(ValueError, match="this handle is used up"):
        harness.pager.restore(spilled, TOKENS)


def test_discarding_frees_the_store_once(make_harness: MakeHarness) -> None:
    harness = make_harness(6, store_pages=4)
    spilled = harness.pager.spill(harness.compute(TOKENS[:10])[0], 10)
    harness.pager.discard(spilled)
    harness.pager.discard(spilled)
    assert (harness.pager.num_spilled, harness.store.num_used) == (0, 0)


def test_restore_leaves_spare_pages_for_others(make_harness: MakeHarness) -> None:
    harness = make_harness(6, enable_prefix_caching=False, store_pages=4)
    pager = harness.pager
    spilled = pager.spill(harness.compute(TOKENS[:10])[0], 10)
    with pytest.raises(OutOfPages, match="needs 7 pages, 6 are available"):
        pager.restore(spilled, TOKENS, spare_pages=4)
    table = pager.restore(spilled, TOKENS, spare_pages=3)
    assert pager.pool.num_available == 3
    check(pager, [table])


def test_an_empty_sequence_spills_nothing(make_harness: MakeHarness) -> None:
    harness = make_harness(6, store_pages=4)
    spilled = harness.pager.spill(harness.pager.open([]), 0)
    assert spilled.num_pages == 0
    assert harness.pager.restore(spilled, []).num_tokens == 0


def test_a_handle_needs_the_tokens_it_holds(make_harness: MakeHarness) -> None:
    harness = make_harness(6, store_pages=4)
    spilled = harness.pager.spill(harness.compute(TOKENS[:10])[0], 10)
    with pytest.raises(ValueError, match="10 tokens were spilled, token_ids has only 9"):
        harness.pager.restore(spilled, TOKENS[:9])
