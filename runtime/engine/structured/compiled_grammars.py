"""Compiled grammars: kept for the next request, within a limit on the memory of all of them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakSet

from llguidance import LLMatcher

from ...common.errors import GenerationFailed
from ...common.heap import UnusedMemory, allocated_bytes
from ...common.types import StructuredOutputs

MAX_KEPT = 128 << 20  # bytes of the grammars that are kept
MAX_KEPT_PER_TENANT = MAX_KEPT // 2
MAX_GROWTH = 128 << 20  # growth of the process's heap after which no grammar is kept: grammars grow while they are used
MAX_LIVE = 512 << 20  # bytes of the grammars that are kept or used by running requests
MAX_LIVE_PER_TENANT = 192 << 20
BYTES_PER_CHARACTER = 150  # approximate memory of a grammar; text that it forces takes 500 per byte
LOOKUPS_PER_HEAP_CHECK = 16  # one of 16 look-ups of kept grammars goes to `get`, which checks the heap
MIN_BYTES = 512 << 10  # least memory counted for a grammar, however short: it grows while it is used


class CompiledGrammar:
    """A matcher to copy, its first mask, and the approximate bytes of the matcher and its copies.

    The copies share the states of the lexer, so the text of each copy counts against the limits of all.
    """

    def __init__(self, tenant: str, matcher: LLMatcher, num_characters: int, num_bytes: int) -> None:
        self.tenant = tenant
        self.matcher = matcher
        self.num_characters = num_characters  # length of the grammar in llguidance's form
        self.num_bytes = num_bytes
        self.first_mask: bytes | None = None  # first mask of every copy; None if it cannot be computed
        self.first_mask_s = 0.0  # time that computing the first mask took
        self.num_users = 0  # sequences that have had a copy
        self.lock = threading.Lock()  # held by the job that uses copies

    def compute_first_mask(self) -> None:
        """Compute the mask before the first token, once for all copies."""
        started = time.monotonic()
        mask = self.matcher.compute_bitmask()
        self.first_mask_s = time.monotonic() - started
        if not self.matcher.is_error():
            self.first_mask = mask


class CompiledGrammars:
    """The grammars of all tenants.

    Any thread may call `get`. A grammar that is neither kept nor used does not count.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, StructuredOutputs], CompiledGrammar] = OrderedDict()  # per tenant
        self._live: WeakSet[CompiledGrammar] = WeakSet()
        self._least_heap = allocated_bytes()  # least heap since the kept grammars were last forgotten for their growth
        self._unused = UnusedMemory()
        self._num_lookups = 0  # calls of `kept`
        self._lock = threading.Lock()

    def kept(self, tenant: str, structure: StructuredOutputs) -> CompiledGrammar | None:
        """Return the compiled grammar for one more sequence, without waiting; None if the caller must use `get`."""
        self._num_lookups += 1
        if self._num_lookups % LOOKUPS_PER_HEAP_CHECK == 0 or not self._lock.acquire(blocking=False):
            return None
        try:
            compiled = self._kept.get((tenant, structure))
            if compiled is not None:
                compiled.num_users += 1
                self._kept.move_to_end((tenant, structure))
            return compiled
        finally:
            self._lock.release()

    def get(
        self,
        tenant: str,
        structure: StructuredOutputs,
        grammar_of: Callable[[StructuredOutputs], str],
        compile_it: Callable[[str], LLMatcher],
        *,
        alone: bool = False,
    ) -> CompiledGrammar:
        """Return the compiled grammar: the kept one, or a new one from the result of `grammar_of`.

        With `alone`, forget the kept grammar, and return one that no other sequence will use. Raises GenerationFailed
        and the errors of `grammar_of`.
        """
        key = (tenant, structure)
        with self._lock:
            if alone:
                self._kept.pop(key, None)
            self._forget_grown()
            compiled = self._kept.get(key)
        if compiled is None:
            compiled = self._compile(tenant, grammar_of(structure), compile_it)
        with self._lock:
            compiled.num_users += 1
            self._live.add(compiled)
            if alone:
                return compiled
            self._kept[key] = compiled
            self._kept.move_to_end(key)
            self._forget([each for each in self._kept if each[0] == tenant], MAX_KEPT_PER_TENANT)
            self._forget(list(self._kept), MAX_KEPT)
        return compiled

    def _compile(self, tenant: str, grammar: str, compile_it: Callable[[str], LLMatcher]) -> CompiledGrammar:
        least = max(MIN_BYTES, BYTES_PER_CHARACTER * len(grammar))
        with self._lock:
            self._unused.return_excess()
            self._make_room(tenant, least)
        before = allocated_bytes()
        compiled = CompiledGrammar(tenant, compile_it(grammar), len(grammar), least)
        compiled.compute_first_mask()
        compiled.num_bytes = max(least, allocated_bytes() - before)
        return compiled

    def _make_room(self, tenant: str, num_bytes: int) -> None:
        """Forget grammars until there is room for this size. Raises GenerationFailed if there still is not enough."""
        if self._lacks_room(tenant, num_bytes):
            self._forget([each for each in self._kept if each[0] == tenant], 0)
        if self._lacks_room(tenant, num_bytes):
            self._forget(list(self._kept), 0)
        if self._lacks_room(tenant, num_bytes):
            own, total = self._live_bytes(tenant)
            raise GenerationFailed(
                f"structured_outputs: the grammars of running requests take {own >> 20} MiB of this tenant and "
                f"{total >> 20} of all; {MAX_LIVE_PER_TENANT >> 20} and {MAX_LIVE >> 20} are allowed"
            )

    def _lacks_room(self, tenant: str, num_bytes: int) -> bool:
        own, total = self._live_bytes(tenant)
        return own + num_bytes > MAX_LIVE_PER_TENANT or total + num_bytes > MAX_LIVE

    def _live_bytes(self, tenant: str) -> tuple[int, int]:
        own = sum(each.num_bytes for each in self._live if each.tenant == tenant)
        return own, sum(each.num_bytes for each in self._live)

    def _forget_grown(self) -> None:
        """Forget all grammars if the heap has grown too much: the library does not report the memory of each."""
        heap = allocated_bytes()
        if heap > self._least_heap + MAX_GROWTH:
            self._forget(list(self._kept), 0)
            self._least_heap = allocated_bytes()  # heap including running grammars and other allocations
        self._least_heap = min(self._least_heap, heap)

    def _forget(self, keys: list[tuple[str, StructuredOutputs]], limit: int) -> None:
        """Keep the most recently used grammars among these keys, up to `limit` bytes.

        The others are freed one by one: the library holds the GIL while it frees one, for up to 5 ms.
        """
        size = sum(self._kept[key].num_bytes for key in keys)
        for key in keys:
            if size <= limit:
                break
            size -= self._kept.pop(key).num_bytes
