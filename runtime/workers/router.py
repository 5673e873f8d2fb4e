"""Which engine process a request goes to: where its prompt's beginning was computed, unless too much is waiting there.

Pure: token ids and loads in, a number out. The keys are the prefix cache's own (`pager/prefix.py`), which every process
computes alike. One invariant: what is remembered is bounded, and a wrong memory costs time, never a result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ...pager import page_keys, root_key

REMEMBERED_PAGES = 1 << 16  # per engine
SLACK = 8  # requests that a familiar engine may have more than the idlest


class Router:
    def __init__(self, num_engines: int, page_size: int) -> None:
        self._page_size = page_size
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_engines)]

    def choose(self, tenant: str, token_ids: Sequence[int], loads: Sequence[int]) -> int:
        """The engine that knows most of the prompt; of equals, the one with the fewest live requests. The choice is
        remembered. `loads`: live requests of each engine.
        """
        keys = self._keys(tenant, token_ids)
        least = min(loads)
        familiar = [self._num_known(engine, keys) for engine in range(len(self._known))]
        near = [engine for engine, load in enumerate(loads) if load <= least + SLACK]
        chosen = min(near, key=lambda engine: (-familiar[engine], loads[engine], engine))
        self._remember(chosen, keys)
        return chosen

    def forget(self, engine: int) -> None:
        """It was restarted, and knows nothing."""
        self._known[engine].clear()

    def _keys(self, tenant: str, token_ids: Sequence[int]) -> list[bytes]:
        """One for each full page."""
        root, size = root_key(tenant.encode()), self._page_size
        return [key for key, _ in page_keys(root, token_ids, size, 0, len(token_ids) // size)]

    def _num_known(self, engine: int, keys: Sequence[bytes]) -> int:
        known = self._known[engine]
        return next((depth for depth, key in enumerate(keys) if key not in known), len(keys))

    def _remember(self, engine: int, keys: Sequence[bytes]) -> None:
        known = self._known[engine]
        for key in keys:
            known[key] = None
            known.move_to_end(key)
        while len(known) > REMEMBERED_PAGES:
            known.popitem(last=False)
