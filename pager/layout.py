"""Where every key and value of a page lies, in bytes. Pure arithmetic: no memory, no owner.

One page holds `page_size` tokens of one layer group: of up to `page_layers` layers that share an attention window. The
pool is layer-major outside and head-major inside, `[slot][page][kv_head]{K, V}`, where a layer's slot is its place in
its group, so pages of all groups are equal and come from one pool; where all layers share a window there is one group
and a slot is a layer. K and V are stored in the weight tile's own layout (ARCHITECTURE.md, Tiles and pages), so a page
is a packed weight of 2 * page_size * padded_head_dim elements per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

KVDtype = Literal["bf16", "f32", "int8"]

ITEMSIZE: dict[str, int] = {"bf16": 2, "f32": 4, "int8": 1}
PAGE_SIZES = (16, 32, 64)
TILE = 64  # tokens attention reads at once, counted from position 0; whole pages at every page size
MAX_SLOTS = 1.125  # layer slots in one page of every group, per layer: what may be lost to make pages equal
LANES = 16  # output columns of one weight tile; head_dim is padded to a multiple of it
BLOCK = 32  # dims of an int8 key that share a scale; int8 pads head_dim to a multiple of it
K_SCALE_BYTES, V_SCALE_BYTES = 2, 4  # int8: fp16 per token and block of K, f32 per token of V
ALIGNMENT = 64  # of every head, so that tiles never straddle cache lines


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose keys share pages, because they see, and may forget, the same tokens."""

    window: int  # tokens; 0: everything
    layers: tuple[int, ...]  # ascending; a layer's slot in the page is its index here


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the KV cache of one model. Sizes are bytes unless the name says otherwise.

    `windows` is each layer's attention window in tokens, 0 for everything; empty: no layer has one.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype = "bf16"
    page_size: int = 32  # tokens
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{self.num_layers} layers have {len(self.windows)} windows")

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Full ones first, then by window; within a window by layer, `page_layers` at a time."""
        return group_layers(self._layer_windows)

    @property
    def group_windows(self) -> tuple[int, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def page_layers(self) -> int:
        """Layer slots of a page, the same for all groups."""
        return max(len(group.layers) for group in self.groups)

    def place(self, layer: int) -> tuple[int, int]:
        """The index of a layer's group, and its slot in the group's pages."""
        return place_layers(self._layer_windows)[layer]

    @property
    def _layer_windows(self) -> tuple[int, ...]:
        return self.windows or (0,) * self.num_layers

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def padded_head_dim(self) -> int:
        multiple = BLOCK if self.dtype == "int8" else LANES
        return -(-self.head_dim // multiple) * multiple

    @property
    def head_bytes(self) -> int:
        """K and V of one page, one layer, one KV head; for int8 with the scales of both."""
        tiles = 2 * self.page_size * self.padded_head_dim * self.itemsize
        scales = self.page_size * self._scale_bytes
        return -(-(tiles + scales) // ALIGNMENT) * ALIGNMENT

    @property
    def layer_page_bytes(self) -> int:
        """One page of one layer."""
        return self.num_kv_heads * self.head_bytes

    @property
    def page_bytes(self) -> int:
        """One page across the layers of a group: what one allocation costs."""
        return self.page_layers * self.layer_page_bytes

    @property
    def token_bytes(self) -> int:
        """`2 * layers * kv_heads * head_dim * itemsize`, the field's formula (no padding); for int8 and its scales."""
        return self.num_layers * self._layer_token_bytes

    @property
    def _layer_token_bytes(self) -> int:
        return self.num_kv_heads * (2 * self.head_dim * self.itemsize + self._scale_bytes)

    @property
    def _scale_bytes(self) -> int:
        """Of one token's key and value, one layer, one KV head."""
        if self.dtype != "int8":
            return 0
        return self.padded_head_dim // BLOCK * K_SCALE_BYTES + V_SCALE_BYTES

    def pages_for(self, num_tokens: int) -> int:
        """The most pages, over all groups, that a sequence needs on its way to `num_tokens`: see `pages_held`."""
        return pages_held(num_tokens, self.page_size, self.group_windows)

    def sequence_bytes(self, num_tokens: int) -> int:
        """KV bytes of `num_tokens` tokens, exactly, by the field's formula: a layer holds what is in its window."""
        kept = (len(g.layers) * min(num_tokens, g.window or num_tokens) for g in self.groups)
        return sum(kept) * self._layer_token_bytes

    def pages_in(self, memory_bytes: int) -> int:
        """How many whole pages fit."""
        return memory_bytes // self.page_bytes


def first_kept_token(num_tokens: int, window: int) -> int:
    """The first token that a layer of this window still needs once `num_tokens` are computed: a multiple of TILE.

    The next row sees the last `window` tokens, itself among them, and attention reads whole tiles. 0 sees everything.
    """
    return max(0, num_tokens - window + 1) // TILE * TILE if window else 0


def pages_held(num_tokens: int, page_size: int, windows: Sequence[int]) -> int:
    """The most pages a sequence that grows by one token at a time holds at once, up to `num_tokens` of them.

    `windows` has one entry per layer group. The sum of each group's exact figure, so a little more than all groups hold
    at one moment: a sliding group peaks just before it gives back a tile.
    """
    most = (min(num_tokens, window + TILE - 1) if window else num_tokens for window in windows)
    return sum(-(-tokens // page_size) for tokens in most)


@lru_cache
def group_layers(windows: tuple[int, ...]) -> tuple[LayerGroup, ...]:
    """Layers with these windows in groups of as many as fill pages well: the fewer groups, the fewer page tables."""
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
    """Of each layer: the index of its group, and its slot in the group's pages."""
    places = {
        layer: (index, slot)
        for index, group in enumerate(group_layers(windows))
        for slot, layer in enumerate(group.layers)
    }
    return tuple(places[layer] for layer in range(len(windows)))
