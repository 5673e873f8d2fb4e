"""Where every key and value of a page lies, in bytes. Pure arithmetic: no memory, no owner.

One page holds `page_size` tokens of every layer. The pool is layer-major outside and head-major inside,
`[layer][page][kv_head]{K, V}`, and K and V are stored in the weight tile's own layout (ARCHITECTURE.md, Tiles
and pages), so a page is a packed weight of 2 * page_size * padded_head_dim elements per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KVDtype = Literal["bf16", "f32"]

ITEMSIZE: dict[str, int] = {"bf16": 2, "f32": 4}
PAGE_SIZES = (16, 32, 64)
LANES = 16  # output columns of one weight tile; head_dim is padded to a multiple of it


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
        return -(-self.head_dim // LANES) * LANES

    @property
    def head_bytes(self) -> int:
        """K and V of one page, one layer, one KV head."""
        return 2 * self.page_size * self.padded_head_dim * self.itemsize

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
        """`2 * layers * kv_heads * head_dim * itemsize`, the field's formula (no padding)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def sequence_bytes(self, num_tokens: int) -> int:
        """KV bytes of `num_tokens` tokens, exactly, by the field's formula."""
        return num_tokens * self.token_bytes

    def pages_in(self, memory_bytes: int) -> int:
        """How many whole pages fit."""
        return memory_bytes // self.page_bytes
