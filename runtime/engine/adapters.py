"""`AdapterRegistry`: the adapters that requests may name, their places in the core's memory, and their live requests.

An adapter that does not fit any more leaves the memory, the least recently used one first, and comes back with the next
request for it. Adapters of live requests, and pinned ones, stay. Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from ..common.errors import ConfigError, InvalidRequest, ModelError, Overloaded
from .core import Core, LoadedAdapter
from .facade import AdapterStatus, EngineInfo

RETRY_MS = 1000  # time after which a request without a place for its adapter is sent again
_NAME = re.compile(r"[\w.:/+-]{1,128}")

_log = structlog.get_logger("quire.engine")


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter that is in the core's memory, or was."""

    name: str
    path: str
    key: str
    nbytes: int = 0
    is_loaded: bool = True
    is_served: bool = True  # False: requests can no longer name it
    is_pinned: bool = False
    num_requests: int = 0  # live requests, and requests that wait for it


NO_ADAPTER = Adapter("", "", "")  # adapter of requests without one


class AdapterRegistry:
    """The adapters of one engine."""

    def __init__(self, core: Core, info: EngineInfo) -> None:
        """Begin with the adapters that the core has loaded at its start."""
        self.num_loads = self.num_evictions = 0
        self._core = core
        self._info = info
        # Least recently used first.
        self._all = {key: Adapter(name, info.adapter_paths.get(name, ""), key) for name, key in info.adapters.items()}
        self._changing = asyncio.Lock()  # held while the core loads an adapter
        self._unended: set[asyncio.Task[None]] = set()  # changes whose callers may have left
        self._leaving: frozenset[str] = frozenset()  # keys that the load in progress may evict

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may give."""
        return tuple(self._info.adapters)

    def status(self, name: str) -> AdapterStatus:
        """Return the state of an adapter. Raises InvalidRequest for an unknown name."""
        found = self._named(name)
        return AdapterStatus(is_loaded=found.is_loaded, is_pinned=found.is_pinned, num_requests=found.num_requests)

    async def acquire(self, name: str) -> Adapter:
        """Return an adapter in the core's memory, which keeps it until `release`; an empty name is none.

        Raises InvalidRequest for an unknown name, Overloaded if live requests and pinned adapters leave no place, and
        ModelError if its files have changed.
        """
        if not name:
            return NO_ADAPTER
        adapter = self._named(name)
        adapter.num_requests += 1
        try:
            if not adapter.is_loaded or adapter.key in self._leaving:
                await self._to_the_end(self._ensure_loaded(adapter))
        except BaseException:
            self.release(adapter)
            raise
        self._note_used(adapter)
        return adapter

    def release(self, adapter: Adapter) -> None:
        """Note that a request which acquired an adapter has ended."""
        if adapter is not NO_ADAPTER:
            adapter.num_requests -= 1
            self._note_used(adapter)
            self._forget_unreachable(adapter)

    async def load(self, name: str, path: str, *, is_pinned: bool = False, in_place: bool = False) -> None:
        """Serve the adapter at a path under a name; with `in_place`, new requests no longer use a former one's files.

        Raises InvalidRequest for a name that is taken or not allowed, ModelError for wrong files, and Overloaded if
        live requests and pinned adapters leave no place.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"lora_name {name[:80]!r} must be 1 to 128 letters, digits and _ . : / + -")
        if not self._info.max_adapters:
            raise InvalidRequest("no adapters are loaded while this server runs; start it with --max-loras")
        await self._to_the_end(self._serve(name, path, is_pinned=is_pinned, in_place=in_place))

    def unload(self, name: str) -> None:
        """Refuse new requests for an adapter; live requests keep it, and then its place is free for others.

        Raises InvalidRequest for an unknown name.
        """
        adapter = self._named(name)
        adapter.is_served = adapter.is_pinned = False
        del self._info.adapters[name]
        self._forget_unreachable(adapter)
        _log.info("adapter unloaded", adapter=name)

    # Helpers

    async def _to_the_end(self, change: Coroutine[Any, Any, None]) -> None:
        """Wait for a change of the core's memory, which continues if the caller is cancelled: the core cannot stop it.

        The registry would not learn otherwise which adapters have left.
        """
        changing = asyncio.create_task(change)
        self._unended.add(changing)
        changing.add_done_callback(self._unended.discard)
        changing.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, or asyncio logs it
        await asyncio.shield(changing)

    async def _serve(self, name: str, path: str, *, is_pinned: bool, in_place: bool) -> None:
        async with self._changing:
            if name in self._info.adapters and not in_place:
                raise InvalidRequest(f"lora_name {name!r} is loaded already; set load_inplace to replace it")
            loaded = await self._load(name, path)
            former = self._all.get(self._info.adapters.get(name, ""))
            if former is not None and former.key != loaded.key:
                former.is_served = former.is_pinned = False
            adapter = self._all.setdefault(loaded.key, Adapter(name, path, loaded.key))
            adapter.path, adapter.is_served, adapter.is_pinned = path, True, is_pinned
            self._note_loaded(adapter, loaded)
            self._info.adapters[name] = loaded.key
        _log.info("adapter loaded", adapter=name, path=path, bytes=adapter.nbytes)

    async def _ensure_loaded(self, adapter: Adapter) -> None:
        async with self._changing:
            if not adapter.is_loaded:
                await self._reload(adapter)

    def _named(self, name: str) -> Adapter:
        key = self._info.adapters.get(name)
        if key is None:
            names = ", ".join(self.names) or "none"
            raise InvalidRequest(f"lora {name[:80]!r} is no loaded adapter; the adapters are: {names}")
        return self._all[key]

    def _note_used(self, adapter: Adapter) -> None:
        if adapter.key in self._all:
            self._all[adapter.key] = self._all.pop(adapter.key)

    def _note_loaded(self, adapter: Adapter, loaded: LoadedAdapter) -> None:
        adapter.is_loaded = True
        adapter.nbytes = loaded.nbytes
        self._note_used(adapter)

    def _forget_unreachable(self, adapter: Adapter) -> None:
        if not (adapter.is_loaded or adapter.is_served or adapter.num_requests):
            self._all.pop(adapter.key, None)

    async def _reload(self, adapter: Adapter) -> None:
        """Load an evicted adapter. Raises Overloaded, and ModelError if its files are not the same."""
        try:
            loaded = await self._load(adapter.name, adapter.path)
        except ModelError as error:
            _log.error("adapter not loaded again", adapter=adapter.name, reason=str(error))
            raise ModelError(f"the files of adapter {adapter.name!r} can no longer be read; load it again") from None
        if loaded.key != adapter.key:
            changed = Adapter(adapter.name, adapter.path, loaded.key, is_served=False)
            self._note_loaded(self._all.setdefault(loaded.key, changed), loaded)
            raise ModelError(f"the files of adapter {adapter.name!r} have changed; load it again with load_inplace")
        self._note_loaded(adapter, loaded)

    async def _load(self, name: str, path: str) -> LoadedAdapter:
        """Let the core load an adapter, in place of as few others as possible."""
        loaded = [each for each in self._all.values() if each.is_loaded]
        idle = [each.key for each in loaded if not each.num_requests and not each.is_pinned]
        idle.sort(key=lambda key: self._all[key].is_served)  # adapters that no request can name come first
        # New requests for adapters that may leave wait, so at first only the likely number may.
        num_leaving = max(0, len(loaded) + 1 - self._info.max_adapters)
        while True:
            leaving = idle[:num_leaving]
            self._leaving = frozenset(leaving)
            kept = [each.key for each in loaded if each.key not in self._leaving]
            try:
                done = await self._core.load_adapter(name, path, kept, leaving)
            except ConfigError as error:
                if num_leaving < len(idle):
                    num_leaving = 2 * num_leaving + 1
                    # Adapters that were idle before may have requests by now.
                    idle = [key for key in idle if not self._all[key].num_requests or key in self._leaving]
                    continue
                raise Overloaded(f"{error}; live requests and pinned adapters keep theirs", RETRY_MS) from None
            finally:
                self._leaving = frozenset()
            self.num_loads += 1
            self._note_evicted(done.evicted)
            return done

    def _note_evicted(self, keys: Sequence[str]) -> None:
        for adapter in [self._all[key] for key in keys if key in self._all]:
            self.num_evictions += 1
            adapter.is_loaded = False
            self._forget_unreachable(adapter)
