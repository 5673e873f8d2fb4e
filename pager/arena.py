"""The memory behind the pages: one anonymous mapping, planned and taken at start, never grown.

It must not know who owns which page. The one invariant: `memory` is `[slot][page][kv_head]{K, V}` bytes exactly as
`KVLayout` says, starts on a 2 MiB boundary and reads as zero until something is written.

Pages are zeroed by the kernel that writes their first slot, so allocating one costs nothing here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .layout import KVLayout
from .memory import map_memory


class KVArena:
    """`num_pages` pages of `layout`, on huge pages where the system gives them. Raises OutOfMemory."""

    def __init__(self, layout: KVLayout, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"an arena needs at least 1 page, got {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        self.memory = map_memory(layout.page_bytes * num_pages)  # [slots * pages * layer_page_bytes] uint8

    def copy_page(self, source: int, destination: int) -> None:
        """All layers of one page."""
        pages = self._pages()
        pages[:, destination] = pages[:, source]

    def read_page(self, page: int, out: npt.NDArray[np.uint8]) -> None:
        """All layers of one page into `out`  # [page_bytes] uint8."""
        out.reshape(self.layout.page_layers, -1)[:] = self._pages()[:, page]

    def write_page(self, page: int, data: npt.NDArray[np.uint8]) -> None:
        """All layers of one page from `data`  # [page_bytes] uint8, as `read_page` gave it."""
        self._pages()[:, page] = data.reshape(self.layout.page_layers, -1)

    def zero_page(self, page: int) -> None:
        """All layers of one page."""
        self._pages()[:, page] = 0

    def close(self) -> None:
        """Let go of the memory; the system has it back once no view of `memory` is left. Idempotent."""
        self.memory = np.empty(0, np.uint8)

    def _pages(self) -> npt.NDArray[np.uint8]:  # [slots, pages, layer_page_bytes]
        return self.memory.reshape(self.layout.page_layers, self.num_pages, self.layout.layer_page_bytes)
