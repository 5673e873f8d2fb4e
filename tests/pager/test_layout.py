"""Bytes of the KV cache, against figures anyone can compute."""

from __future__ import annotations

import pytest
from quire.pager import KVLayout


def test_strides_of_a_page() -> None:
    layout = KVLayout(num_layers=28, num_kv_heads=8, head_dim=128, dtype="bf16", page_size=32)
    assert layout.head_bytes == 2 * 32 * 128 * 2
    assert layout.layer_page_bytes == 8 * layout.head_bytes
    assert layout.page_bytes == 28 * layout.layer_page_bytes
    assert layout.page_bytes == 32 * layout.token_bytes


def test_head_dim_is_padded_in_memory_but_not_in_the_fields_formula() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=20, dtype="f32", page_size=16)
    assert layout.padded_head_dim == 32
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
