"""The byte layout of KV pages. Pure arithmetic; must not import anything about memory or page ownership.

One page holds `page_size` tokens of one layer group: layers that share an attention window and the shape of their KV
heads. A layer's slot in a page is its index in its group. Pages of all groups have the same size and come from one
pool. If all layers have the same KV heads, the memory is `[slot][page][kv_head]{K, V}`, else
`[page][slot][kv_head]{K, V}` with slots of the group's size. K and V are stored in the layout of weight tiles
(kernels/DESIGN.md, Tiles and pages), so a page is a packed weight of 2 * page_size * padded(head_dim) elements per
head; of latent attention {K} alone, because a value is a part of its key. A layer that reads the keys and values of
another layer has no slot.
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


KVHeads = tuple[int, int]  # number and head_dim of a layer's KV heads


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same attention window and KV heads, whose keys and values share pages."""

    window: int  # tokens; 0: full attention
    heads: KVHeads
    layers: tuple[int, ...]  # ascending; a layer's slot in the page is its index here


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the KV cache of one model. Sizes are bytes unless the name says otherwise.

    `windows` has each layer's attention window in tokens, 0 for full attention; empty if no layer has a window. `heads`
    has each layer's KV heads; empty if all layers have `num_kv_heads` of `head_dim`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype = "bf16"
    page_size: int = 32  # tokens
    windows: tuple[int, ...] = ()
    heads: tuple[KVHeads, ...] = ()
    values_in_keys: int = 0  # leading elements of a key that are also its value; 0: values are stored on their own

    def __post_init__(self) -> None:
        for name in ("windows", "heads"):
            if (count := len(getattr(self, name))) not in (0, self.num_layers):
                raise ValueError(f"{name} must be empty or have {self.num_layers} entries, one per layer, got {count}")

    @property
    def layer_heads(self) -> tuple[KVHeads, ...]:
        """KV heads of each layer."""
        return self.heads or ((self.num_kv_heads, self.head_dim),) * self.num_layers

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Sizes of heads."""
        return tuple({head_dim for _, head_dim in self.layer_heads})

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups: full attention first, then by window; within a window by KV heads, then by layer."""
        return group_layers(self.windows or (0,) * self.num_layers, self.layer_heads)

    @property
    def group_windows(self) -> tuple[int, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def page_layers(self) -> int:
        """Most layers of a group."""
        return max(len(group.layers) for group in self.groups)

    @property
    def planes(self) -> int:
        """Parts of the memory with one slot of every page each; 1 where slots of groups have different sizes."""
        return 1 if len(set(self.layer_heads)) > 1 else self.page_layers

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    def padded(self, head_dim: int) -> int:
        """Return `head_dim` padded as pages store it."""
        multiple = BLOCK if self.dtype == "int8" else LANES
        return -(-head_dim // multiple) * multiple

    def head_bytes(self, head_dim: int) -> int:
        """Return the bytes of K and V of one page, layer and KV head; int8 includes their scales."""
        tiles = self._parts * self.page_size * self.padded(head_dim) * self.itemsize
        scales = self.page_size * self._scale_bytes(head_dim)
        return -(-(tiles + scales) // ALIGNMENT) * ALIGNMENT

    def slot_bytes(self, heads: KVHeads) -> int:
        """Return the bytes of one layer with these KV heads in one page."""
        return heads[0] * self.head_bytes(heads[1])

    @property
    def page_bytes(self) -> int:
        """One page: all layers of its group, for the largest group."""
        return max(len(group.layers) * self.slot_bytes(group.heads) for group in self.groups)

    @property
    def page_stride(self) -> int:
        """Bytes from a slot of one page to the same slot of the next page."""
        return self.page_bytes // self.planes

    def offset(self, group: int, slot: int, num_pages: int) -> int:
        """Return the bytes before a slot of a group's first page in the memory of `num_pages` pages."""
        size = self.slot_bytes(self.groups[group].heads)
        return slot * size * (num_pages if self.planes > 1 else 1)

    @property
    def token_bytes(self) -> int:
        """`2 * layers * kv_heads * head_dim * itemsize`, the usual formula without padding; int8 includes scales.

        Where the value of a token is in its key, the factor 2 is 1.
        """
        return sum(map(self.layer_token_bytes, self.layer_heads))

    def layer_token_bytes(self, heads: KVHeads) -> int:
        """Return the bytes of one token in one layer with these KV heads, without padding."""
        return heads[0] * (self._parts * heads[1] * self.itemsize + self._scale_bytes(heads[1]))

    @property
    def _parts(self) -> int:
        """Vectors of a token: a key and a value, or a key that has the value in it."""
        return 1 if self.values_in_keys else 2

    def _scale_bytes(self, head_dim: int) -> int:
        """Return the bytes of the scales of one token's key and value in one layer and KV head."""
        if self.dtype != "int8":
            return 0
        return self.padded(head_dim) // BLOCK * K_SCALE_BYTES + (0 if self.values_in_keys else V_SCALE_BYTES)

    def pages_for(self, num_tokens: int) -> int:
        """Return the most pages, over all groups, that a sequence holds while it grows to `num_tokens` tokens."""
        return pages_held(num_tokens, self.page_size, self.group_windows)

    def sequence_bytes(self, num_tokens: int) -> int:
        """Return the exact KV bytes of `num_tokens` tokens without padding: each layer holds its window."""
        return sum(
            len(group.layers) * min(num_tokens, group.window or num_tokens) * self.layer_token_bytes(group.heads)
            for group in self.groups
        )

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
def group_layers(windows: tuple[int, ...], heads: tuple[KVHeads, ...]) -> tuple[LayerGroup, ...]:
    """Return the layers with these windows and KV heads in the largest groups that waste at most `MAX_SLOTS`.

    If no size of pages is within the limit, the pages waste as little as possible.
    """
    kinds = list(zip(windows, heads, strict=True))
    layers = {kind: [i for i, other in enumerate(kinds) if other == kind] for kind in sorted(set(kinds))}
    size = _page_elements([(_elements(kind[1]), len(each)) for kind, each in layers.items()])
    return tuple(
        LayerGroup(*kind, tuple(each[first : first + slots]))
        for kind, each in layers.items()
        for slots in [size // _elements(kind[1])]
        for first in range(0, len(each), slots)
    )


def _page_elements(kinds: Sequence[tuple[int, int]]) -> int:
    """Return the elements of one token's keys in a page, for kinds of layers: elements of a layer, number of layers."""
    least = max(elements for elements, _ in kinds)
    sizes = {elements * slots for elements, count in kinds for slots in range(1, count + 1)}
    allocated = {
        size: sum(-(-count // (size // elements)) * size for elements, count in kinds)
        for size in sizes
        if size >= least
    }
    limit = max(MAX_SLOTS * sum(elements * count for elements, count in kinds), min(allocated.values()))
    return max(size for size, total in allocated.items() if total <= limit)


def _elements(heads: KVHeads) -> int:
    return heads[0] * heads[1]


@lru_cache
def place_layers(windows: tuple[int, ...], heads: tuple[KVHeads, ...]) -> tuple[tuple[int, int], ...]:
    """Return, for each layer, the index of its group and its slot in the group's pages."""
    places = {
        layer: (index, slot)
        for index, group in enumerate(group_layers(windows, heads))
        for slot, layer in enumerate(group.layers)
    }
    return tuple(places[layer] for layer in range(len(windows)))
