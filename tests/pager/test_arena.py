"""The memory of the KV pages."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import numpy as np
import pytest
from quire.pager import KVArena, KVLayout, OutOfMemory

LINUX = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, page_size=16)


def test_memory_is_the_layouts_bytes_aligned_and_zero() -> None:
    arena = KVArena(LAYOUT, 5)
    assert arena.memory.dtype == np.uint8
    assert arena.memory.shape == (5 * LAYOUT.page_bytes,)
    assert arena.memory.ctypes.data % (2 << 20) == 0
    assert arena.memory.flags.writeable
    assert not arena.memory.any()


def test_copying_a_page_copies_all_layers_and_no_other_page() -> None:
    arena = KVArena(LAYOUT, 4)
    pages = arena.memory.reshape(3, 4, LAYOUT.page_stride)  # [layers, pages, bytes]
    for layer in range(3):
        for page in range(4):
            pages[layer, page] = 10 * layer + page
    arena.copy_page(1, 3)
    assert pages[:, :, 0].tolist() == [[0, 1, 2, 1], [10, 11, 12, 11], [20, 21, 22, 21]]
    assert (pages == pages[:, :, :1]).all()


def test_a_view_survives_closing() -> None:
    arena = KVArena(LAYOUT, 1)
    view = arena.memory[:4]
    view[:] = 9
    arena.close()
    arena.close()
    assert arena.memory.size == 0
    assert view.tolist() == [9, 9, 9, 9]


def test_more_memory_than_address_space_raises_a_typed_error() -> None:
    with pytest.raises(OutOfMemory, match="cannot map"):
        KVArena(LAYOUT, 1 << 50)


def test_an_empty_arena_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 page, got 0"):
        KVArena(LAYOUT, 0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_that_is_not_populated_is_taken_as_it_is_written() -> None:
    before = resident_bytes()
    arena = KVArena(KVLayout(4, 2, 64, "bf16", 32), 4096, populate=False)
    assert arena.memory.nbytes == 256 << 20
    assert resident_bytes() - before < 16 << 20
    arena.write_page(7, np.ones(arena.layout.page_bytes, np.uint8))
    assert resident_bytes() - before < 32 << 20
    pages = arena.memory.reshape(4, 4096, -1)  # [layers, pages, bytes]
    assert [pages[0, page].sum() for page in (6, 7, 8)] == [0, arena.layout.page_stride, 0]


@pytest.mark.skipif(LINUX < (5, 14), reason="MADV_POPULATE_WRITE came with Linux 5.14")
def test_the_memory_is_populated_at_start() -> None:
    before = resident_bytes()
    arena = KVArena(KVLayout(4, 2, 64, "bf16", 32), 512)
    assert resident_bytes() - before >= 0.9 * arena.memory.nbytes
