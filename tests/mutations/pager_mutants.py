"""Bugs in `pager/`."""

from mutant import Mutant

TESTS = "tests/pager"
POOL = "pager/pool.py"
TABLE = "pager/table.py"
PREFIX = "pager/prefix.py"
PAGER = "pager/pager.py"
SPILL = "pager/spill.py"
SNAPSHOT = "pager/snapshot.py"
LAYOUT = "pager/layout.py"
STATES = "pager/states.py"
STATE_CACHE = "pager/state_cache.py"

MUTANTS = [
    Mutant(
        POOL,
        "for page in reversed(page_ids):\n            self._references[page] -= 1",
        "for page in page_ids:\n            self._references[page] -= 1",
        "the head of a prefix is evicted before its tail, so the cache keeps pages that can never be hit",
    ),
    Mutant(
        POOL,
        "            self._contents[page] = None\n            if page in self._pins:\n                self._unpin(page)",
        "            self._contents[page] = None",
        "an evicted page keeps its pin, and its next content is protected without being pinned",
    ),
    Mutant(
        POOL,
        "self.num_reserved -= min(count, reserved)",
        "self.num_reserved -= reserved",
        "pages that are still reserved can be taken by other sequences",
    ),
    Mutant(
        POOL,
        "available = self.num_available + reserved",
        "available = self.num_free + self.num_cached",
        "reserved pages are given to sequences without a reservation",
    ),
    Mutant(
        POOL,
        "pin = Pin(max(until, previous.until) if previous else until, self._num_pins, holder)",
        "pin = Pin(until, self._num_pins, holder)",
        "a second request with a short pin ends the long pin of the first",
    ),
    Mutant(
        POOL,
        "self._link_last(self._pinned if page in self._pins else self._cached, page)",
        "self._link_last(self._cached, page)",
        "a pinned page loses its protection when its request ends",
    ),
    Mutant(
        POOL,
        "            if self._pins.get(page) == pin:",
        "            if page in self._pins:",
        "a renewed pin expires at the time of the old one",
    ),
    Mutant(
        TABLE,
        "        return [group for group, pages in enumerate(self.pages) if not self._pool.is_private(pages[-1])]",
        "        return [group for group, pages in enumerate(self.pages) if self._pool.references(pages[-1]) > 1]",
        "a sequence writes to a page that the prefix cache indexes: wrong tokens for a later hit",
    ),
    Mutant(
        TABLE,
        "        self._writable = self.num_tokens\n        return twin",
        "        return twin",
        "after a fork the parent writes to the shared last page: samples mix",
    ),
    Mutant(
        TABLE,
        "        twin._shortest = self._shortest\n",
        "",
        "a fork may roll back to tokens whose pages left the window",
    ),
    Mutant(
        TABLE,
        "        twin._num_null = self._num_null[:]",
        "        twin._num_null = self._num_null",
        "pages that leave one fork's window are counted for the other fork",
    ),
    Mutant(
        TABLE,
        "        self.pages[group][-1] = page\n        self._pool.release((shared,))",
        "        self.pages[group][-1] = page",
        "the copied page is never released: the pool leaks a page per sample",
    ),
    Mutant(
        TABLE,
        "        self.reserved -= min(count, self.reserved)\n",
        "",
        "a table spends its reservation twice",
    ),
    Mutant(
        TABLE,
        "        self.reserve(0)\n        self._num_null",
        "        self._num_null",
        "the reservation of an ended request is lost for ever",
    ),
    Mutant(
        TABLE,
        "            del self.keys[num_tokens // self._page_size :]\n            self.commit_at = 0",
        "            self.commit_at = 0",
        "after a rollback the old keys stay: a page is found under tokens that it does not hold",
    ),
    Mutant(
        TABLE,
        "            del self.keys[num_tokens // self._page_size :]\n            self.commit_at = 0",
        "            del self.keys[num_tokens // self._page_size :]",
        "pages that are filled again after a rollback are not indexed",
    ),
    Mutant(
        TABLE,
        "kept = first_kept_token(self.num_tokens, window)\n                self.commit_at",
        "kept = first_kept_token(self.num_tokens + TILE, window)\n                self.commit_at",
        "a page is released one tile before the window has left it",
    ),
    Mutant(
        PREFIX,
        "if page is not None and self._pool.content(page) == content else NULL_PAGE",
        "if page is not None else NULL_PAGE",
        "a hash collision gives a request another prompt's pages",
    ),
    Mutant(
        PREFIX,
        'sha256(b"quire prefix v1\\0" + tenant_salt)',
        'sha256(b"quire prefix v1\\0")',
        "tenants share cached pages",
    ),
    Mutant(
        PREFIX,
        "            elif self._pool.references(own) > 1:\n                return False\n",
        "",
        "the page of a fork is substituted under it",
    ),
    Mutant(
        PREFIX,
        "all(hole < first for hole",
        "all(hole <= first for hole",
        "a hit lacks one page that the next row's window still sees",
    ),
    Mutant(
        PAGER,
        "(len(token_ids) - 1) // self.page_size, images, self.cached_states)",
        "len(token_ids) // self.page_size, images, self.cached_states)",
        "a prompt of whole pages hits completely, and no token is left to compute",
    ),
    Mutant(
        PAGER,
        "            needed = max(needed, self._pages_taken(len(token_ids), hit)) + spare_pages",
        "            needed = max(needed, self._pages_taken(len(token_ids), hit))",
        "admission ignores the pages that running requests are about to need",
    ),
    Mutant(
        PAGER,
        "        if not intact:\n            self.pool.release(listed_pages(pages))\n",
        "        if not intact:\n",
        "a damaged spill file leaks the pages of each restored request",
    ),
    Mutant(
        PAGER,
        "self.pool.require(len(missing) + self._num_unowned(found) + spare_pages)",
        "self.pool.require(len(missing) + spare_pages)",
        "a restore raises in the middle, after it has taken pages",
    ),
    Mutant(
        PAGER,
        "            self._handles.remove(spilled)\n            self.num_spilled -= spilled.num_pages",
        "            self.num_spilled -= spilled.num_pages",
        "a second discard frees slots that hold another request's pages",
    ),
    Mutant(
        PAGER,
        "            self.states.release(state)\n            return None",
        "            return None",
        "a damaged spill file leaks the state of each restored request",
    ),
    Mutant(
        PAGER,
        "state = table.state if num_tokens else NO_STATE",
        "state = NO_STATE",
        "a restored sequence continues from an empty state",
    ),
    Mutant(
        PAGER,
        "if len(token_ids) < table.num_tokens:",
        "if len(token_ids) + 1 < table.num_tokens:",
        "pages are indexed under too few tokens",
    ),
    Mutant(
        SPILL,
        "        except OSError:\n            self.free(slots)\n            self._pause()",
        "        except OSError:\n            self._pause()",
        "a full disk leaks slots of the spill file",
    ),
    Mutant(
        SPILL,
        "        except OSError:\n            self._pause()\n            return False",
        "        except OSError:\n            return False",
        "a broken disk is asked again for every request",
    ),
    Mutant(
        SPILL,
        "if crc32(data) != self._checksums[slot]:",
        "if False:",
        "damaged pages are restored",
    ),
    Mutant(
        SPILL,
        "slot * self._page_bytes) != len(data):\n            raise OSError(errno.ENOSPC",
        "slot * self._page_bytes) < 0:\n            raise OSError(errno.ENOSPC",
        "a short write counts as a success",
    ),
    Mutant(
        SNAPSHOT,
        "            yield stream\n    finally:\n        name.unlink(missing_ok=True)",
        "            yield stream\n    finally:\n        pass",
        "a failed snapshot leaves its temporary file",
    ),
    Mutant(
        SNAPSHOT,
        "        if data[: HEADER.size] != expected:",
        "        if data[: HEADER.size - 64] != expected[:-64]:",
        "the snapshot of another model is loaded",
    ),
    Mutant(
        SNAPSHOT,
        "sound = content.key not in known and (is_chained",
        "sound = (is_chained",
        "a snapshot with a page twice breaks the pool",
    ),
    Mutant(
        SNAPSHOT,
        "    return contents + cached[::-1]",
        "    return contents + cached",
        "after a restart the oldest pages are kept and the newest evicted",
    ),
    Mutant(
        LAYOUT,
        "return max(0, num_tokens - window + 1) // TILE * TILE if window else 0",
        "return max(0, num_tokens - window) // TILE * TILE if window else 0",
        "each sliding sequence holds a tile for one token longer than its page budget says",
    ),
    Mutant(
        LAYOUT,
        "min(num_tokens, window + TILE - 1)",
        "min(num_tokens, window)",
        "the page budget of a sliding group is too small at its peak",
    ),
    Mutant(
        POOL,
        "            self._num_held[holder] += previous is None\n",
        "            self._num_held[holder] += 1\n",
        "a tenant that pins one prompt again and again is refused further pins",
    ),
    Mutant(
        POOL,
        "        self._num_held[holder] -= 1\n",
        "",
        "pins that expired count for their tenant for ever",
    ),
    Mutant(
        "pager/pool.py",
        "self._expiries[0][0].until <= self._clock()",
        "self._expiries[0][0].until < self._clock()",
        "a pin outlives its time",
    ),
    Mutant(
        TABLE,
        "        twin._shortest = self._shortest\n",
        "",
        "a fork may roll back to tokens that its parent has released",
    ),
    Mutant(
        "pager/pager.py",
        "            self.num_spilled -= spilled.num_pages\n",
        "",
        "pages that were restored count as spilled for ever",
    ),
    Mutant(
        PREFIX,
        "_SPAN.pack(image.position - start, image.tokens) + image.digest",
        "_SPAN.pack(image.position, image.tokens) + image.digest",
        "the keys of pages with images are not those that other processes compute",
    ),
    Mutant(
        STATES,
        "if slot != NO_STATE and self._references[slot] == 1:",
        "if slot != NO_STATE:",
        "two forks of a sequence write to one state",
    ),
    Mutant(
        STATES,
        "                self._copy(slot, own)\n",
        "                pass\n",
        "a fork continues with the state of another sequence",
    ),
    Mutant(
        TABLE,
        "        self._states.release(self.state)\n",
        "",
        "the states of sequences that have ended are lost, until none is left",
    ),
    Mutant(
        TABLE,
        "num_tokens >= self._state_start and ahead <= self._states.rollback",
        "num_tokens >= self._state_start",
        "a sequence continues with a state from which the inputs that it needs are gone",
    ),
    Mutant(
        TABLE,
        "        self._states.share(self.state)\n        twin",
        "        twin",
        "a fork's state is given to another sequence while the fork uses it",
    ),
    Mutant(
        STATE_CACHE,
        "known.stays = known.stays or stays",
        "known.stays = stays",
        "a state that prompts continue from is forgotten when its sequence moves on",
    ),
    Mutant(
        STATE_CACHE,
        "            known.stays = known.stays or stays\n            self._by_key[key] = known\n",
        "            known.stays = known.stays or stays\n            self._by_key = {key: known, **self._by_key}\n",
        "the state that a sequence has just reached is the first one to be evicted",
    ),
    Mutant(
        TABLE,
        "        twin._state_start = self._state_start\n",
        "",
        "a fork continues with a state from which the inputs that it needs are gone",
    ),
    Mutant(
        SNAPSHOT,
        "if all(key in known for known in pages):",
        "if any(key in known for known in pages):",
        "a snapshot loads a state that no prompt can continue from",
    ),
]
