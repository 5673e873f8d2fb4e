"""Chooses the engine process for a request: the one that computed most of its prompt, unless it has too many requests.

Pure: token ids and loads in, an index out. The keys are those of the prefix cache (`pager/prefix.py`), which are the
same in every process. A cache may have evicted what the router remembers: that costs time, never a wrong result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ...pager import page_keys, root_key

MAX_KEYS = 1 << 16  # remembered per engine, the latest ones
LOAD_SLACK = 8  # requests that the engine with the prompt may have more than the least loaded one


class Router:
    def __init__(self, num_engines: int, page_size: int) -> None:
        self._page_size = page_size
        self._keys_of: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_engines)]  # oldest first

    def choose(self, tenant: str, token_ids: Sequence[int], loads: Mapping[int, int]) -> int:
        """Choose one of the engines in `loads` (engine -> number of its requests) and remember that.

        Of engines with equally much of the prompt it is the one with the fewest requests, of those the first.
        """
        keys = self._prompt_keys(tenant, token_ids)
        max_load = min(loads.values()) + LOAD_SLACK
        near = [engine for engine, load in loads.items() if load <= max_load]
        chosen = min(near, key=lambda engine: (-self._num_known(engine, keys), loads[engine], engine))
        self._remember(chosen, keys)
        return chosen

    def forget(self, engine: int) -> None:
        """Forget the prompts of an engine whose cache is empty after a restart."""
        self._keys_of[engine].clear()

    def _prompt_keys(self, tenant: str, token_ids: Sequence[int]) -> list[bytes]:
        """Return the key of each full page."""
        root, size = root_key(tenant.encode()), self._page_size
        return [key for key, _ in page_keys(root, token_ids, size, 0, len(token_ids) // size)]

    def _num_known(self, engine: int, keys: Sequence[bytes]) -> int:
        known = self._keys_of[engine]
        return next((depth for depth, key in enumerate(keys) if key not in known), len(keys))

    def _remember(self, engine: int, keys: Sequence[bytes]) -> None:
        known = self._keys_of[engine]
        for key in keys:
            known[key] = None
            known.move_to_end(key)
        while len(known) > MAX_KEYS:
            known.popitem(last=False)
