"""Snapshots of the prefix cache. Pages hold 16 tokens of two layers, tiles 64."""

from __future__ import annotations

import errno
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.pager import (
    KVArena,
    KVLayout,
    Pager,
    PageTable,
    SnapshotDamaged,
    SnapshotError,
    SnapshotForeign,
    SnapshotMismatch,
    SnapshotTruncated,
    StatePool,
    check,
    load_snapshot,
    prove_writable,
    save_snapshot,
    snapshot,
)

MODEL = b"a model"
FULL = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, page_size=16)
HYBRID = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, page_size=16, windows=(0, 40))
PROMPT = list(range(1000, 1100))


class SnapshotHarness:
    """A pager and its memory; the bytes of a page depend only on its tokens and group."""

    def __init__(self, num_pages: int = 16, layout: KVLayout = FULL) -> None:
        self.arena = KVArena(layout, num_pages)
        self.pager = Pager(layout.page_size, num_pages, windows=layout.group_windows)

    def compute(self, token_ids: list[int], salt: bytes = b"") -> PageTable:
        table = self.pager.open(token_ids, salt)
        cached = table.num_tokens
        table.append(len(token_ids) - cached)
        for group, pages in enumerate(table.pages):
            for depth in range(cached // 16, len(pages)):
                self.arena.write_page(pages[depth], self.memory(token_ids, depth, group))
        self.pager.commit(table, token_ids)
        return table

    def memory(self, token_ids: list[int], depth: int, group: int) -> Any:
        seed = [*token_ids[: 16 * (depth + 1)], group]
        return np.random.default_rng(seed).integers(0, 256, self.arena.layout.page_bytes, np.uint8)

    def holds(self, table: PageTable, token_ids: list[int]) -> bool:
        """Return whether each listed page has the bytes of its tokens."""
        out = np.empty(self.arena.layout.page_bytes, np.uint8)
        for group, pages in enumerate(table.pages):
            for depth, page in enumerate(pages):
                if page >= 0:
                    self.arena.read_page(page, out)
                    if not np.array_equal(out, self.memory(token_ids, depth, group)):
                        return False
        return True

    def state(self) -> Any:
        """Return everything that loading could change."""
        pool = self.pager.pool
        return (
            list(pool.free_pages()),
            list(pool.cached_pages()),
            [pool.indexed_pages(group) for group in range(len(self.pager.windows))],
            self.arena.memory.tobytes(),
        )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prefix.snapshot"


def saved(path: Path, layout: KVLayout = FULL) -> SnapshotHarness:
    """Save two prompts that share a page and one of another tenant; the first is still open."""
    harness = SnapshotHarness(layout=layout)
    harness.compute(PROMPT[:50])
    harness.compute([*PROMPT[:20], *range(30)]).release()
    harness.compute(PROMPT[:40], b"other").release()
    assert save_snapshot(path, harness.pager, harness.arena, MODEL) == 3 + 2 + 2
    return harness


def test_a_restart_is_warm(path: Path) -> None:
    saved(path)
    harness = SnapshotHarness()
    assert load_snapshot(path, harness.pager, harness.arena, MODEL) == 7
    assert (harness.pager.pool.num_cached, harness.pager.pool.num_owned, harness.pager.pool.num_free) == (7, 0, 9)
    check(harness.pager, [])
    tables = []
    for tokens, salt, expected in (
        (PROMPT[:50], b"", 48),
        ([*PROMPT[:20], *range(30)], b"", 48),
        (PROMPT[:40], b"other", 32),
        (PROMPT[:40], b"third", 0),
    ):
        table = harness.pager.open(tokens, salt)
        cached = table.num_tokens
        assert cached == expected
        assert harness.holds(table, tokens)
        tables.append(table)
    check(harness.pager, tables)


class Image(NamedTuple):
    position: int
    tokens: int
    digest: bytes


def test_pages_of_images_are_found_by_their_images(path: Path) -> None:
    """The second of three pages has tokens of an image; the third page, after it, has none."""
    before = SnapshotHarness()
    image = Image(20, 5, b"sha256 of an image".ljust(32))
    table = before.pager.open(PROMPT[:50], images=(image,))
    table.append(50)
    before.pager.commit(table, PROMPT)
    table.release()
    save_snapshot(path, before.pager, before.arena, MODEL)
    after = SnapshotHarness()
    assert load_snapshot(path, after.pager, after.arena, MODEL) == 3
    assert after.pager.open(PROMPT[:50], images=(image,)).num_tokens == 48
    assert after.pager.open(PROMPT[:50]).num_tokens == 16
    assert after.pager.open(PROMPT[:50], images=(image._replace(digest=bytes(32)),)).num_tokens == 16


def test_pages_are_loaded_in_their_eviction_order(path: Path) -> None:
    before = SnapshotHarness()
    for prompt in (PROMPT[:33], PROMPT[50:83]):
        before.compute(prompt).release()
    before.pager.open(PROMPT[:33]).release()
    save_snapshot(path, before.pager, before.arena, MODEL)
    after = SnapshotHarness()
    load_snapshot(path, after.pager, after.arena, MODEL)
    orders = [
        [harness.pager.pool.content(page) for page in harness.pager.pool.cached_pages()] for harness in (before, after)
    ]
    assert orders[0] == orders[1]
    assert [content.depth for content in orders[1]] == [1, 0, 1, 0]


def test_a_smaller_pool_loads_the_pages_that_would_be_evicted_last(path: Path) -> None:
    saved(path)
    harness = SnapshotHarness(num_pages=4)
    assert load_snapshot(path, harness.pager, harness.arena, MODEL) == 4
    check(harness.pager, [])
    table = harness.pager.open(PROMPT[:50])
    cached = table.num_tokens
    assert cached == 48
    assert harness.holds(table, PROMPT[:50])


def test_pages_of_sliding_groups_are_loaded(path: Path) -> None:
    before = SnapshotHarness(26, HYBRID)
    before.compute(PROMPT * 2).release()
    save_snapshot(path, before.pager, before.arena, MODEL)
    after = SnapshotHarness(26, HYBRID)
    load_snapshot(path, after.pager, after.arena, MODEL)
    check(after.pager, [])
    table = after.pager.open([*PROMPT, *PROMPT])
    cached = table.num_tokens
    assert cached == 192
    assert after.holds(table, PROMPT * 2)


def test_an_empty_cache_can_be_saved_and_loaded(path: Path) -> None:
    harness = SnapshotHarness()
    assert save_snapshot(path, harness.pager, harness.arena, MODEL) == 0
    assert load_snapshot(path, harness.pager, harness.arena, MODEL) == 0


def test_the_file_is_private_and_no_temporary_file_remains(path: Path) -> None:
    path.write_bytes(b"an older one")
    saved(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"an older one")

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SnapshotError, match=r"cannot write the snapshot .* \(No space left on device\)"):
        saved(path)
    assert path.read_bytes() == b"an older one"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("unnamed", [True, False], ids=["unnamed", "named"])
def test_a_process_killed_while_it_writes_leaves_no_file(
    path: Path, unnamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a system without unnamed files, a file remains, and the next start removes it."""
    path.write_bytes(b"an older one")
    if not unnamed:
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_RDWR)
    child = os.fork()
    if not child:
        monkeypatch.setattr(snapshot, "_sync", lambda file: os.kill(os.getpid(), signal.SIGKILL))
        saved(path)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert path.read_bytes() == b"an older one"
    assert len(list(path.parent.iterdir())) == (1 if unnamed else 2)
    prove_writable(path)
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.undo()
    saved(path)
    assert path.read_bytes() != b"an older one"
    assert list(path.parent.iterdir()) == [path]


def test_progress_is_reported_in_bytes_on_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "SYNC_BYTES", 1)
    harness = SnapshotHarness()
    harness.compute(PROMPT).release()
    seen: list[int] = []
    assert save_snapshot(path, harness.pager, harness.arena, MODEL, seen.append) == len(seen) == 6
    assert seen == sorted(set(seen))
    assert seen[-1] == path.stat().st_size


@pytest.mark.parametrize("folder", ["absent", "a file"])
def test_a_path_that_cannot_be_written_is_found_before_there_is_anything_to_write(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(SnapshotError, match="cannot create a file in"):
        prove_writable(tmp_path / folder / "cache.quire")


def test_proving_a_path_changes_nothing(path: Path) -> None:
    path.write_bytes(b"an older one")
    prove_writable(path)
    assert path.read_bytes() == b"an older one"
    assert list(path.parent.iterdir()) == [path]


def refused(path: Path, error: type[SnapshotError], match: str, identity: bytes = MODEL, **options: Any) -> None:
    harness = SnapshotHarness(**options)
    before = harness.state()
    with pytest.raises(error, match=match) as caught:
        load_snapshot(path, harness.pager, harness.arena, identity)
    assert caught.type is error
    assert harness.state() == before


def test_each_kind_of_wrong_file_has_its_own_error(path: Path) -> None:
    saved(path)
    data = path.read_bytes()
    refused(path, SnapshotMismatch, "another model", identity=b"another model")
    refused(path, SnapshotMismatch, "layout", layout=HYBRID)
    other = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, page_size=16, dtype="f32")
    refused(path, SnapshotMismatch, "layout", layout=other)
    path.write_bytes(data[:-1])
    refused(path, SnapshotTruncated, "7 pages is 1 bytes too short")
    path.write_bytes(data[:50])
    refused(path, SnapshotTruncated, "ends within its header")
    path.write_bytes(b"")
    refused(path, SnapshotTruncated, "ends within its header")
    path.write_bytes(data + b"\0")
    refused(path, SnapshotDamaged, "1 bytes too long")
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused(path, SnapshotDamaged, "page 6 of the snapshot has the wrong checksum")
    path.write_bytes(b"\x7fELF" + data)
    refused(path, SnapshotForeign, "not a snapshot")
    path.write_bytes(data[:8] + struct.pack("<I", 4) + data[12:])
    refused(path, SnapshotForeign, "version 4, only 3 can be read")
    refused(path.parent, SnapshotForeign, "not a regular file")
    os.unlink(path)
    refused(path, SnapshotError, "No such file")
    os.mkfifo(path)
    refused(path, SnapshotForeign, "not a regular file")


@pytest.mark.parametrize("num_pages", [8, 1 << 20, (1 << 64) - 1])
def test_a_wrong_page_count_allocates_no_memory(path: Path, num_pages: int) -> None:
    saved(path)
    harness = SnapshotHarness()
    header = snapshot._header(harness.pager, harness.arena, MODEL, num_pages, 0, 0)
    data = header + struct.pack("<I", crc32(header))
    path.write_bytes(data)
    refused(path, SnapshotTruncated, "bytes too short")
    stride = snapshot._record(16).size + 4 + FULL.page_bytes
    if num_pages * stride < 1 << 40:
        os.truncate(path, len(data) + num_pages * stride)  # the length that the header states, all zeros
        refused(path, SnapshotDamaged, "record of page 0")


@pytest.mark.parametrize(
    "forge",
    [
        lambda key, parent, depth, group, *held: (key, parent, depth, 1, *held),
        lambda key, parent, depth, group, *held: (key, parent, depth + 1, group, *held),
        lambda key, parent, depth, group, tokens, images: (key, parent, depth, group, tokens[::-1], images),
        lambda key, parent, depth, group, tokens, images: (key, parent, depth, group, tokens, b"image" * 6),
        lambda key, parent, depth, group, *held: (key, bytes(32), depth, group, *held),
        lambda key, parent, depth, group, *held: (bytes(32), parent, depth, group, *held),
    ],
)
def test_a_forged_chain_with_valid_checksums_is_found(path: Path, forge: Callable[..., Any]) -> None:
    saved(path)
    data = bytearray(path.read_bytes())
    start = snapshot.HEADER_BYTES
    record = snapshot._record(16)
    *fields, checksum = record.unpack_from(data, start)
    forged = record.pack(*forge(*fields), checksum)
    data[start : start + len(forged) + 4] = forged + struct.pack("<I", crc32(forged))
    path.write_bytes(data)
    refused(path, SnapshotDamaged, "page 0 of the snapshot does not continue")


def test_the_same_page_twice_is_found(path: Path) -> None:
    saved(path)
    data = path.read_bytes()
    start = snapshot.HEADER_BYTES
    stride = (len(data) - start) // 7
    path.write_bytes(data[: start + stride] + data[start : start + stride] + data[start + 2 * stride :])
    refused(path, SnapshotDamaged, "page 1 of the snapshot does not continue")


def test_a_file_that_changes_while_it_is_read_indexes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(path)
    harness = SnapshotHarness()
    passed = snapshot._SnapshotReader.check

    def check_then_change(reader: Any) -> Any:
        contents = passed(reader)
        os.truncate(path, path.stat().st_size - 1)
        return contents

    monkeypatch.setattr(snapshot._SnapshotReader, "check", check_then_change)
    with pytest.raises(SnapshotTruncated, match="ends within page 6"):
        load_snapshot(path, harness.pager, harness.arena, MODEL)
    assert (harness.pager.pool.num_free, harness.pager.pool.indexed_pages()) == (16, {})


def test_only_a_new_pager_can_load_a_snapshot(path: Path) -> None:
    harness = saved(path)
    with pytest.raises(ValueError, match="empty pager with prefix caching"):
        load_snapshot(path, harness.pager, harness.arena, MODEL)


@pytest.mark.parametrize("layout", [FULL, HYBRID])
def test_any_flipped_or_missing_bytes_change_nothing(path: Path, layout: KVLayout) -> None:
    harness = SnapshotHarness(layout=layout)
    harness.compute(PROMPT[:50]).release()
    save_snapshot(path, harness.pager, harness.arena, MODEL)
    data = path.read_bytes()
    fresh = SnapshotHarness(layout=layout)
    before = fresh.state()
    within = st.integers(0, len(data) - 1)
    heads = st.integers(0, 400)  # header and first record more often than by chance

    @settings(max_examples=150, database=None)
    @given(
        flips=st.lists(st.tuples(within | heads, st.integers(1, 255)), max_size=4), length=st.none() | within | heads
    )
    def damaged(flips: list[tuple[int, int]], length: int | None) -> None:
        other = bytearray(data)
        for at, bits in flips:
            other[at] ^= bits
        del other[length:]
        if other == data:
            return
        path.write_bytes(other)
        with pytest.raises(SnapshotError):
            load_snapshot(path, fresh.pager, fresh.arena, MODEL)
        assert fresh.state() == before

    damaged()


# States


STATE_BYTES = 24


class HarnessOfStates(SnapshotHarness):
    """A pager of a model with states; the bytes of a state depend only on the tokens before it."""

    def __init__(self, capacity: int = 4, rollback: int = 2, num_pages: int = 16, layout: KVLayout = FULL) -> None:
        super().__init__(num_pages, layout)
        self.states = np.zeros((capacity + 2, STATE_BYTES), np.uint8)
        self.pager = Pager(
            layout.page_size,
            num_pages,
            windows=layout.group_windows,
            states=StatePool(len(self.states), rollback, self.copy_state),
            num_cached_states=capacity,
        )

    def copy_state(self, source: int, destination: int) -> None:
        self.states[destination] = self.states[source]

    def compute(self, token_ids: list[int], salt: bytes = b"") -> PageTable:
        """Compute the tokens in chunks, as the scheduler does."""
        table = self.pager.open(token_ids, salt)
        while (first := table.num_tokens) < len(token_ids):
            end = self.pager.next_end(table, first, len(token_ids))
            table.append(end - first)
            for group, pages in enumerate(table.pages):
                for depth in range(first // 16, len(pages)):
                    self.arena.write_page(pages[depth], self.memory(token_ids, depth, group))
            self.states[table.state] = state_of(token_ids[:end])
            self.pager.commit(table, token_ids)
        return table

    def save(self, path: Path) -> None:
        save_snapshot(path, self.pager, self.arena, MODEL, state_memory=self.states)

    def load(self, path: Path) -> int:
        return load_snapshot(path, self.pager, self.arena, MODEL, self.states)

    def hit(self, token_ids: list[int], salt: bytes = b"") -> int:
        """Return the tokens of a hit, whose pages and state are right."""
        table = self.pager.open([*token_ids, 7], salt)
        assert self.holds(table, token_ids)
        assert not table.num_tokens or np.array_equal(self.states[table.state], state_of(token_ids[: table.num_tokens]))
        length = table.num_tokens
        table.release()
        check(self.pager, [])
        return length


def state_of(token_ids: list[int]) -> Any:
    return np.random.default_rng(token_ids).integers(0, 256, STATE_BYTES, np.uint8)


@pytest.mark.parametrize("layout", [FULL, HYBRID])
def test_states_are_warm_after_a_restart(path: Path, layout: KVLayout) -> None:
    before = HarnessOfStates(layout=layout)
    running = before.compute(PROMPT[:50])
    before.compute(PROMPT[:40], b"other").release()
    before.save(path)
    running.release()
    after = HarnessOfStates(layout=layout)
    assert after.load(path) == (5 if layout is FULL else 10)
    check(after.pager, [])
    assert [after.hit(PROMPT[:50]), after.hit(PROMPT[:40], b"other")] == [48, 32]
    assert after.pager.states.num_owned == 2
    assert before.pager.states.num_owned == 2


def test_a_smaller_cache_loads_the_most_recently_used_states(path: Path) -> None:
    before = HarnessOfStates()
    prompts = [PROMPT[start : start + 20] for start in (0, 30, 60)]
    for tokens in prompts:
        before.compute(tokens).release()
    before.hit(prompts[0])
    before.save(path)
    after = HarnessOfStates(capacity=2)
    assert after.load(path) == 3
    assert [after.hit(tokens) for tokens in prompts] == [16, 0, 16]
    after = HarnessOfStates()
    after.load(path)
    for start in (200, 300):  # The order of eviction is the same, too.
        after.compute([*range(start, start + 20)]).release()
    assert [after.hit(tokens) for tokens in prompts] == [16, 0, 16]


def test_a_state_without_its_page_is_left_out(path: Path) -> None:
    before = HarnessOfStates()
    before.compute(PROMPT[:50]).release()
    before.save(path)
    after = HarnessOfStates(num_pages=2)
    assert after.load(path) == 2
    assert (after.hit(PROMPT[:50]), after.pager.states.num_owned) == (0, 0)


def test_a_state_without_the_page_of_one_group_is_left_out(path: Path) -> None:
    before = HarnessOfStates(layout=HYBRID)
    before.compute(PROMPT[:50]).release()
    before.save(path)
    found = []
    for num_pages in range(2, 7):
        after = HarnessOfStates(num_pages=num_pages, layout=HYBRID)
        after.load(path)
        found.append((after.hit(PROMPT[:50]), after.pager.states.num_owned))
    assert found == [(0, 0)] * 4 + [(48, 1)]


def test_states_of_another_size_or_reach_are_of_another_layout(path: Path) -> None:
    before = HarnessOfStates()
    before.compute(PROMPT[:50]).release()
    before.save(path)
    with pytest.raises(SnapshotMismatch):
        HarnessOfStates(rollback=3).load(path)
    refused(path, SnapshotMismatch, "layout")
    other = HarnessOfStates()
    other.states = np.zeros((6, STATE_BYTES + 1), np.uint8)
    with pytest.raises(SnapshotMismatch):
        other.load(path)


def test_damaged_states_change_nothing(path: Path) -> None:
    before = HarnessOfStates()
    before.compute(PROMPT[:20]).release()
    before.compute(PROMPT[30:50]).release()
    before.save(path)
    data = path.read_bytes()
    stride = snapshot.STATE.size + 4 + STATE_BYTES
    first = len(data) - 2 * stride
    twice = data[: first + stride] + data[first : first + stride]
    for at in range(first, len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        states_refused(path, SnapshotDamaged)
    for wrong, error in [(data[:-1], SnapshotTruncated), (data + b"0", SnapshotDamaged), (twice, SnapshotDamaged)]:
        path.write_bytes(wrong)
        states_refused(path, error)


def states_refused(path: Path, error: type[SnapshotError]) -> None:
    after = HarnessOfStates()
    with pytest.raises(error):
        after.load(path)
    assert (after.pager.pool.num_free, after.pager.states.num_owned) == (16, 0)
    assert not after.states.any()


@settings(max_examples=100, database=None)
@given(data=st.binary(max_size=400), headed=st.booleans())
def test_any_other_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes, headed: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(snapshot.MAGIC + data if headed else data)
    harness = SnapshotHarness(2)
    with pytest.raises(SnapshotError):
        load_snapshot(path, harness.pager, harness.arena, MODEL)
