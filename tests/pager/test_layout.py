"""Sizes of the KV cache, compared with published figures."""

from __future__ import annotations

import pytest
from quire.pager import PAGE_SIZES, KVLayout
from quire.pager.layout import TILE, first_kept_token, pages_held, place_layers


def test_strides_of_a_page() -> None:
    layout = KVLayout(num_layers=28, num_kv_heads=8, head_dim=128, dtype="bf16", page_size=32)
    assert layout.head_bytes(128) == 2 * 32 * 128 * 2
    assert layout.slot_bytes((8, 128)) == 8 * layout.head_bytes(128)
    assert layout.page_bytes == 28 * layout.slot_bytes((8, 128))
    assert layout.page_bytes == 32 * layout.token_bytes


def test_head_dim_is_padded_in_memory_but_not_in_token_bytes() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=20, dtype="f32", page_size=16)
    assert layout.padded(20) == 32
    assert layout.page_bytes == 2 * 16 * 32 * 4
    assert layout.token_bytes == 2 * 20 * 4


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (32, 1), (33, 2)])
def test_pages_for_tokens(tokens: int, pages: int) -> None:
    assert KVLayout(num_layers=1, num_kv_heads=1, head_dim=16).pages_for(tokens) == pages


def test_pages_in_memory_are_whole_pages() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16)
    assert layout.pages_in(3 * layout.page_bytes + 1) == 3
    assert layout.pages_in(layout.page_bytes - 1) == 0


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "dtype", "tokens", "expected"),
    [
        (28, 8, 128, "f32", 1_024, 234_881_024),  # Qwen3-0.6B
        (28, 8, 128, "bf16", 1_024, 117_440_512),
        (32, 8, 128, "f32", 8_192, 2 << 30),  # Llama-3-8B
        (32, 8, 128, "bf16", 8_192, 1 << 30),
        (80, 8, 128, "f32", 8_192, 5 << 30),  # Llama-3-70B
        (126, 8, 128, "bf16", 131_072, 63 << 30),  # Llama-3-405B
        (28, 4, 128, "bf16", 4_096, 224 << 20),  # Qwen2.5-7B
        (34, 4, 256, "bf16", 4_096, 544 << 20),  # Gemma-3-4B, all layers full
    ],
)
def test_published_sizes(layers: int, kv_heads: int, head_dim: int, dtype: str, tokens: int, expected: int) -> None:
    assert KVLayout(layers, kv_heads, head_dim, dtype).sequence_bytes(tokens) == expected  # type: ignore[arg-type]


def test_layers_of_one_window_are_one_group() -> None:
    for windows in ((), (0,) * 28, (4096,) * 28):
        layout = KVLayout(28, 8, 128, windows=windows)
        (group,) = layout.groups
        assert (group.window, group.layers) == (windows[0] if windows else 0, tuple(range(28)))
        assert layout.page_layers == 28
        assert place_layers(windows or (0,) * 28, ((8, 128),) * 28)[27] == (0, 27)


@pytest.mark.parametrize(
    ("windows", "page_layers", "groups"),
    [
        # Gemma-3-4B: 6 slots for 5 + 29 layers cost 36 slots, 7 would cost 42
        ([0 if i % 6 == 5 else 1024 for i in range(34)], 6, [(0, 5), *[(1024, 6)] * 4, (1024, 5)]),
        ([0, 512] * 14, 14, [(0, 14), (512, 14)]),
        ([0] * 9 + [4096] * 19, 10, [(0, 9), (4096, 10), (4096, 9)]),
        ([64, 0, 32], 1, [(0, 1), (32, 1), (64, 1)]),
        ([0, 0, 128], 1, [(0, 1), (0, 1), (128, 1)]),
    ],
)
def test_layers_are_grouped_by_window_in_equal_pages(
    windows: list[int], page_layers: int, groups: list[tuple[int, int]]
) -> None:
    layout = KVLayout(len(windows), 2, 16, windows=tuple(windows))
    assert layout.page_layers == page_layers
    assert [(group.window, len(group.layers)) for group in layout.groups] == groups
    assert layout.group_windows == tuple(window for window, _ in groups)
    assert layout.page_bytes == page_layers * layout.slot_bytes((2, 16))
    places = place_layers(tuple(windows), ((2, 16),) * len(windows))
    assert len(set(places)) == len(windows), "no two layers share a slot"
    assert all(slot < page_layers for _, slot in places)
    assert all(layout.groups[group].window == window for (group, _), window in zip(places, windows, strict=True))


E2B = tuple(0 if layer % 5 == 4 else 512 for layer in range(15))  # the other 20 of 35 layers store nothing
DENSE_31B = tuple(0 if layer % 6 == 5 else 1024 for layer in range(60))


@pytest.mark.parametrize(
    ("windows", "sliding", "full", "groups", "page_bytes"),
    [
        # 12 sliding layers and 3 full ones of twice the size: all pages are full
        (E2B, (1, 256), (1, 512), [(0, 3), (512, 6), (512, 6)], 6 * 2 * 256 * 2 * 32),
        # 50 sliding layers of 16 x 256, 10 full ones of half the size: one page in six is half empty
        (DENSE_31B, (16, 256), (4, 512), [(0, 10), *[(1024, 10)] * 5], 10 * 16 * 2 * 256 * 2 * 32),
        # sizes that no page fits within an eighth: the page that wastes the least
        ((0, 64, 64), (1, 48), (1, 80), [(0, 1), (64, 2)], 2 * 96 * 2 * 32),
    ],
)
def test_layers_are_grouped_by_heads_in_equal_pages(
    windows: tuple[int, ...],
    sliding: tuple[int, int],
    full: tuple[int, int],
    groups: list[tuple[int, int]],
    page_bytes: int,
) -> None:
    heads = tuple(sliding if window else full for window in windows)
    layout = KVLayout(len(windows), *sliding, windows=windows, heads=heads)
    assert [(group.window, len(group.layers)) for group in layout.groups] == groups
    assert layout.page_bytes == layout.page_stride == page_bytes
    for index, (group, slot) in enumerate(place_layers(windows, heads)):
        size = layout.slot_bytes(heads[index])
        assert layout.groups[group].heads == heads[index]
        assert layout.offset(group, slot, 1000) == slot * size
        assert slot * size + size <= page_bytes


def test_layers_that_read_others_take_no_bytes_of_a_token() -> None:
    """Gemma 4 E2B at 8,192 tokens in bf16: 3 full layers of 512 columns, 12 layers of 256 with a window of 512."""
    heads = tuple((1, 256) if window else (1, 512) for window in E2B)
    layout = KVLayout(15, 1, 256, windows=E2B, heads=heads)
    assert layout.token_bytes == (12 * 256 + 3 * 512) * 2 * 2
    assert layout.sequence_bytes(8192) == (12 * 256 * 512 + 3 * 512 * 8192) * 2 * 2
    assert layout.pages_for(8192) == 8192 // 32 + 2 * (512 + 64) // 32


@pytest.mark.parametrize(("field", "entries"), [("windows", (0, 128)), ("heads", ((2, 16),) * 2)])
def test_all_layers_have_an_entry_or_none(field: str, entries: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=f"{field} must be empty or have 3 entries, one per layer, got 2"):
        KVLayout(3, 2, 16, **{field: entries})  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, 128, 4096])
def test_kept_tokens_are_whole_tiles_and_include_all_that_the_next_row_sees(window: int) -> None:
    kept = [first_kept_token(n, window) for n in range(3 * TILE + window)]
    assert kept == sorted(kept), "what was given back is never needed again"
    for n, first in enumerate(kept):
        oldest_seen = max(0, n - window + 1)
        assert first % TILE == 0
        assert first <= oldest_seen < first + TILE
    assert first_kept_token(10**9, 0) == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("windows", [(0,), (1,), (64,), (100,), (0, 100), (0, 37, 37, 130)])
def test_pages_held_is_the_most_a_growing_sequence_holds(page_size: int, windows: tuple[int, ...]) -> None:
    def held(n: int, window: int) -> int:
        """Return the pages of a table that has just added a slot for its n-th token."""
        return -(-n // page_size) - (first_kept_token(n - 1, window) if n else 0) // page_size

    most = [0] * len(windows)
    for n in range(500):
        most = [max(before, held(n, window)) for before, window in zip(most, windows, strict=True)]
        assert pages_held(n, page_size, windows) == sum(most)


def test_a_sliding_layer_holds_its_window_only() -> None:
    sliding = KVLayout(32, 8, 128, windows=(4096,) * 32)  # Mistral-7B-v0.1
    assert sliding.sequence_bytes(32_768) == sliding.sequence_bytes(4096) == 512 << 20
    assert sliding.pages_for(32_768) == (4096 + TILE) // 32
    gemma = KVLayout(34, 4, 256, windows=tuple(0 if i % 6 == 5 else 1024 for i in range(34)))
    assert gemma.sequence_bytes(8192) == (5 * 8192 + 29 * 1024) * 4 * 2 * 256 * 2
