"""The state cache: states that were kept where a page of the prefix cache ends, so that a later prompt continues there.

Pages are found by their tokens, but a state is at one position only, so a hit ends at the deepest page with a state.
The cache shares the slot of the sequence that was there; the sequence copies it before it writes on.

**When a state is kept**, always at the end of a full page that the prefix cache has:

1. at these ends, where the scheduler ends a chunk (`next_end`); such a state stays until it is evicted:
   * the last one before the last known token of a prompt;
   * the last one within the first message of a prompt, as its first token of `message_ends` after a page tells:
     conversations with the same system prompt depart there, so the second one continues there;
   * where a prompt departs from another one, so that the third prompt with the same beginning continues there;
   * every multiple of `interval` tokens.
2. at every other such end that a chunk or a decoded token happens to reach. Each replaces the sequence's previous one,
   unless a prompt has used that one, so a sequence that ends leaves the state of its last full page: the next turn of a
   conversation computes less than a page of it again.

**Eviction**: the state of an evicted page goes with it, since no prompt finds it any more. If there are already
`capacity` states, the least recently used one goes. Pages without a state after them are of no use to a prompt, so none
retains them: they become the least recently used pages of the pool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .pool import Content, PagePool
from .states import NO_STATE, StatePool
from .table import PageTable


@dataclass(slots=True)
class CachedState:
    """A kept state: its slot, and whether it stays when its sequence moves on."""

    slot: int
    stays: bool


class NoStateCache:
    """The kept states where there are none, because the model has no states or no prefix cache."""

    capacity = num_kept = num_hits = 0

    def __len__(self) -> int:
        return 0

    def __contains__(self, key: object) -> bool:
        """Return whether a sequence can continue after this page: after any one."""
        return True

    def __iter__(self) -> Iterator[bytes]:
        return iter(())

    def slots(self) -> list[int]:
        """Return no slot."""
        return []

    def first_message_end(self, token_ids: Sequence[int]) -> int:
        """Return 0: no state is kept there."""
        return 0

    def next_end(self, table: PageTable, first: int, num_known: int) -> int:
        """Return the end of the known tokens."""
        return num_known

    def keep(self, table: PageTable) -> None:
        """Do nothing."""

    def continue_from(self, key: bytes, table: PageTable) -> None:
        """Do nothing."""

    def adopt(self, keys: Sequence[bytes]) -> None:
        """Do nothing."""


class StateCache:
    """At most `capacity` kept states by the key of the page before them; each holds a reference on its slot."""

    def __init__(
        self,
        states: StatePool,
        pool: PagePool,
        page_size: int,
        capacity: int,
        interval: int,
        message_ends: Collection[int] = (),
    ) -> None:
        """`interval`, in tokens, is rounded up to whole pages. `message_ends` are ids of tokens that end a message."""
        if capacity < 1 or interval < 1:
            raise ValueError(f"there must be states to keep and tokens between them, got {capacity} and {interval}")
        self.capacity = capacity
        self.num_kept = 0  # states that were kept so far
        self.num_hits = 0  # prompts that continued from a state
        self._states = states
        self._page_size = page_size
        self._interval = -(-interval // page_size) * page_size
        self._message_ends = message_ends
        self._by_key: dict[bytes, CachedState] = {}  # least recently used first
        pool.on_evict.append(self._forget_page)

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the keys of the pages before the kept states."""
        return iter(self._by_key)

    def slots(self) -> list[int]:
        """Return the slot of every kept state, the least recently used one first."""
        return [each.slot for each in self._by_key.values()]

    def first_message_end(self, token_ids: Sequence[int]) -> int:
        """Return the last end of a page within the first message of more than a page; 0 if there is none."""
        ends = []
        for token in self._message_ends:
            with suppress(ValueError):
                ends.append(token_ids.index(token, self._page_size) + 1)
        return min(ends, default=0) // self._page_size * self._page_size

    def next_end(self, table: PageTable, first: int, num_known: int) -> int:
        """Return where a chunk of a table should end that begins at token `first` of `num_known` known tokens.

        This is the next position at which a state stays, or the last token.
        """
        every = (first // self._interval + 1) * self._interval
        ends = [end for end in (self._last_end(num_known), table.shared_end, table.message_end) if end > first]
        return min(every, num_known, *ends)

    def keep(self, table: PageTable) -> None:
        """Keep the state of a table whose full pages are indexed and whose state serves the end of the last of them."""
        key = table.keys[-1]
        end = len(table.keys) * self._page_size
        known_ends = (table.shared_end, table.message_end, self._last_end(table.num_known))
        stays = end % self._interval == 0 or end in known_ends
        known = self._by_key.pop(key, None)
        if known is not None:
            known.stays = known.stays or stays
            self._by_key[key] = known
            return
        self._drop_previous(table)
        if len(self._by_key) == self.capacity:
            self._forget(next(iter(self._by_key)))
        self._by_key[key] = CachedState(table.share_state(), stays)
        self.num_kept += 1
        if not stays:
            table.moving_state = key

    def continue_from(self, key: bytes, table: PageTable) -> None:
        """Give a kept state to the table of a new sequence, which holds the pages up to that state."""
        state = self._by_key.pop(key)
        self._by_key[key] = state
        state.stays = True
        self.num_hits += 1
        self._states.share(state.slot)
        table.continue_from(state.slot)

    def adopt(self, keys: Sequence[bytes]) -> None:
        """Keep the states in the next free slots, which hold one for each key, the least recently used one first."""
        for key in keys:
            self._by_key[key] = CachedState(self._states.own(NO_STATE), stays=True)

    def _last_end(self, num_known: int) -> int:
        """Return the last end of a page before the last known token."""
        return max(0, num_known - 1) // self._page_size * self._page_size

    def _drop_previous(self, table: PageTable) -> None:
        """Forget the state that this table kept last, unless it stays."""
        previous = self._by_key.get(table.moving_state)
        if previous is not None and not previous.stays:
            self._forget(table.moving_state)
        table.moving_state = b""

    def _forget_page(self, content: Content) -> None:
        if content.key in self._by_key:
            self._forget(content.key)

    def _forget(self, key: bytes) -> None:
        self._states.release(self._by_key.pop(key).slot)
