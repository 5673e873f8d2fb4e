"""Where every key and value of a page lies, in bytes. Pure arithmetic: no memory, no owner.

One page holds `page_size` tokens of every layer. The pool is layer-major outside and head-major inside,
`[layer][page][kv_head]{K, V}`, and K and V are stored in the weight tile's own layout (ARCHITECTURE.md, Tiles
and pages), so a page is a packed weight of 2 * page_size * padded_head_dim elements per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KVDtype = Literal["bf16", "f32", "int8"]

ITEMSIZE: dict[str, int] = {"bf16": 2, "f32": 4, "int8": 1}
PAGE_SIZES = (16, 32, 64)
LANES = 16  # output columns of one weight tile; head_dim is padded to a multiple of it
BLOCK = 32  # dims of an int8 key that share a scale; int8 pads head_dim to a multiple of it
K_SCALE_BYTES, V_SCALE_BYTES = 2, 4  # int8: fp16 per token and block of K, f32 per token of V
ALIGNMENT = 64  # of every head, so that tiles never straddle cache lines


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the KV cache of one model. Sizes are bytes unless the name says otherwise."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype = "bf16"
    page_size: int = 32  # tokens

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
        """One page across all layers: what one allocation costs."""
        return self.num_layers * self.layer_page_bytes

    @property
    def token_bytes(self) -> int:
        """`2 * layers * kv_heads * head_dim * itemsize`, the field's formula (no padding); for int8 and its scales."""
        return self.num_layers * self.num_kv_heads * (2 * self.head_dim * self.itemsize + self._scale_bytes)

    @property
    def _scale_bytes(self) -> int:
        """Of one token's key and value, one layer, one KV head."""
        if self.dtype != "int8":
            return 0
        return self.padded_head_dim // BLOCK * K_SCALE_BYTES + V_SCALE_BYTES

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def sequence_bytes(self, num_tokens: int) -> int:
        """KV bytes of `num_tokens` tokens, exactly, by the field's formula."""
        return num_tokens * self.token_bytes

    def pages_in(self, memory_bytes: int) -> int:
        """How many whole pages fit."""
        return memory_bytes // self.page_bytes
