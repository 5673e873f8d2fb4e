"""The byte layout of KV pages. Pure arithmetic; must not import anything about memory or page ownership.

One page holds `page_size` tokens of one layer group: up to `page_layers` layers that share an attention window. The
memory is `[slot][page][kv_head]{K, V}`, where a layer's slot is its index in its group. Pages of all groups have the
same size and come from one pool. If all layers share a window there is one group, and a slot is a layer. K and V are
stored in the layout of weight tiles (kernels/DESIGN.md, Tiles and pages), so a page is a packed weight of
2 * page_size * padded_head_dim elements per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

KVDtype = Literal["bf16", "f16", "f32", "int8"]

ITEMSIZE: dict[str, int] = {"bf16": 2, "f16": 2, "f32": 4, "int8": 1}
PAGE_SIZES = (16, 32, 64)
TILE = 64  # tokens that attention reads at once, aligned to position 0; a multiple of every page size
MAX_SLOTS = 1.125  # maximum of allocated slots / layers; the excess is padding that makes all pages equally large
LANES = 16  # output columns of one weight tile; head_dim is padded to a multiple of it
BLOCK = 32  # dims of an int8 key that share a scale; int8 pads head_dim to a multiple of it
K_SCALE_BYTES, V_SCALE_BYTES = 2, 4  # int8: fp16 per token and block of K, f32 per token of V
ALIGNMENT = 64  # bytes; every head starts at a multiple, so tiles never straddle cache lines


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same attention window, whose keys and values share pages."""

    window: int  # tokens; 0: full attention
    layers: tuple[int, ...]  # ascending; a layer's slot in the page is its index here


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the KV cache of one model. Sizes are bytes unless the name says otherwise.

    `windows` has each layer's attention window in tokens, 0 for full attention; empty if no layer has a window.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype = "bf16"
    page_size: int = 32  # tokens
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows must be empty or have {self.num_layers} entries, one per layer, got {len(self.windows)}"
            )

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups: full attention first, then by window; within a window by layer, `page_layers` each."""
        return group_layers(self.windows or (0,) * self.num_layers)

    @property
    def group_windows(self) -> tuple[int, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def page_layers(self) -> int:
        """Layer slots of a page; the same in all groups."""
        return max(len(group.layers) for group in self.groups)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def padded_head_dim(self) -> int:
        multiple = BLOCK if self.dtype == "int8" else LANES
        return -(-self.head_dim // multiple) * multiple

    @property
    def head_bytes(self) -> int:
        """K and V of one page, layer and KV head; int8 includes their scales."""
        tiles = 2 * self.page_size * self.padded_head_dim * self.itemsize
        scales = self.page_size * self._scale_bytes
        return -(-(tiles + scales) // ALIGNMENT) * ALIGNMENT

    @property
    def layer_page_bytes(self) -> int:
        """One layer of one page."""
        return self.num_kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """One page: all layers of its group."""
        return self.page_layers * self.layer_page_bytes

    @property
    def token_bytes(self) -> int:
        """`2 * layers * kv_heads * head_dim * itemsize`, the usual formula without padding; int8 includes scales."""
        return self.num_layers * self._layer_token_bytes

    @property
    def _layer_token_bytes(self) -> int:
        return self.num_kv_heads * (2 * self.head_dim * self.itemsize + self._scale_bytes)

    @property
    def _scale_bytes(self) -> int:
        """Scales of one token's key and value in one layer and KV head."""
        if self.dtype != "int8":
            return 0
        return self.padded_head_dim // BLOCK * K_SCALE_BYTES + V_SCALE_BYTES

    def pages_for(self, num_tokens: int) -> int:
        """Return the most pages, over all groups, that a sequence holds while it grows to `num_tokens` tokens."""
        return pages_held(num_tokens, self.page_size, self.group_windows)

    def sequence_bytes(self, num_tokens: int) -> int:
        """Return the exact KV bytes of `num_tokens` tokens without padding: each layer holds its window."""
        kept = (len(g.layers) * min(num_tokens, g.window or num_tokens) for g in self.groups)
        return sum(kept) * self._layer_token_bytes

    def pages_in(self, memory_bytes: int) -> int:
        """Return how many whole pages fit into `memory_bytes`."""
        return memory_bytes // self.page_bytes


def first_kept_token(num_tokens: int, window: int) -> int:
    """Return the first token that a layer with this window still needs when `num_tokens` are computed.

    The next row sees the last `window` tokens, itself included (all tokens if `window` is 0), and attention reads whole
    tiles, so the result is a multiple of TILE.
    """
    return max(0, num_tokens - window + 1) // TILE * TILE if window else 0


def pages_held(num_tokens: int, page_size: int, windows: Sequence[int]) -> int:
    """Return the most pages that a sequence holds at once while it grows to `num_tokens`, one token at a time.

    `windows` has one entry per layer group. This is the sum of each group's maximum: a little more than all groups hold
    at the same time, because a sliding group peaks just before it releases a tile.
    """
    most = (min(num_tokens, window + TILE - 1) if window else num_tokens for window in windows)
    return sum(-(-tokens // page_size) for tokens in most)


@lru_cache
def group_layers(windows: tuple[int, ...]) -> tuple[LayerGroup, ...]:
    """Return the layers with these windows in the largest groups that waste at most `MAX_SLOTS` of the memory."""
    by_window = {w: [i for i, other in enumerate(windows) if other == w] for w in sorted(set(windows))}
    size = max(
        s
        for s in range(1, len(windows) + 1)
        if sum(-(-len(layers) // s) * s for layers in by_window.values()) <= MAX_SLOTS * len(windows)
    )
    return tuple(
        LayerGroup(window, tuple(layers[first : first + size]))
        for window, layers in by_window.items()
        for first in range(0, len(layers), size)
    )


@lru_cache
def place_layers(windows: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return, for each layer, the index of its group and its slot in the group's pages."""
    places = {
        layer: (index, slot)
        for index, group in enumerate(group_layers(windows))
        for slot, layer in enumerate(group.layers)
    }
    return tuple(places[layer] for layer in range(len(windows)))
