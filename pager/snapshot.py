"""Saves the prefix cache to a file when the engine drains and loads it at start, so a restart begins warm.

Must not import models or requests: the caller chooses the bytes of `identity`, which identify the model of a snapshot.
Loading checks everything that it will use before it changes anything. The format, little-endian:

    header   magic "QUIREKV\\0" · version u32 · page_size u32 · groups u32 · page_bytes u64 · pages u64
             · state_bytes u64 · states u64 · sha256 of the identity · sha256 of the layout · crc32 of all this
    page     key · parent (32 bytes each) · depth u32 · group u32 · token ids u32 … · digest of the images (32 bytes, or
             zeros) · crc32 of the memory · crc32 of all this, then `page_bytes` of memory
    state    key of the page that ends where the state is kept (32 bytes) · crc32 of the memory · crc32 of all this,
             then `state_bytes` of memory

Pages and states are in the reverse of their eviction order, so a smaller pool reads the first ones only, and a page
comes after the page it continues. A state whose page does not fit is left out. The checksums detect accidents. A forged
file can make the model produce wrong tokens, but cannot corrupt the pager or reveal memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from pathlib import Path
from stat import S_ISREG
from struct import Struct
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
import numpy.typing as npt

from .arena import KVArena
from .exceptions import SnapshotDamaged, SnapshotError, SnapshotForeign, SnapshotMismatch, SnapshotTruncated
from .pager import Pager
from .pool import Content
from .prefix import page_key
from .states import NO_MEMORY, StateMemory

MAGIC = b"QUIREKV\0"
VERSION = 3
NO_IMAGES = bytes(32)
HEADER = Struct("<8s3I4Q32s32s")
STATE = Struct("<32sI")
CHECKSUM = Struct("<I")
HEADER_BYTES = HEADER.size + CHECKSUM.size
SYNC_BYTES = 4 << 20  # bytes between two flushes to the disk; each flush is followed by a report of progress


def save_snapshot(
    path: str | os.PathLike[str],
    pager: Pager,
    arena: KVArena,
    identity: bytes,
    progress: Callable[[int], object] = lambda num_bytes: None,
    state_memory: StateMemory = NO_MEMORY,
) -> int:
    """Write every indexed page, owned or cached, and every kept state to `path`. Return the number of pages.

    `progress` is called with the bytes that are on disk so far, every SYNC_BYTES. No step may be running. Raises
    SnapshotError if the file cannot be written; `path` then keeps its old content.
    """
    path = Path(path)
    pages = _by_recency(pager)
    states = _states_by_recency(pager)
    try:
        with _replacing(path) as file:
            header = _header(pager, arena, identity, len(pages), state_memory.shape[1], len(states))
            file.write(_with_checksum(header))
            num_synced = 0
            for record, memory in chain(_page_entries(pager, arena, pages), _state_entries(states, state_memory)):
                file.write(_with_checksum(record))
                file.write(memory)
                if file.tell() - num_synced >= SYNC_BYTES:
                    num_synced = file.tell()
                    _sync(file)
                    progress(num_synced)
    except OSError as error:
        raise SnapshotError(f"cannot write the snapshot {path} ({error.strerror})") from error
    return len(pages)


def prove_writable(path: str | os.PathLike[str]) -> None:
    """Create and remove the temporary file of `save_snapshot`, even if a killed process left one behind.

    Raises SnapshotError.
    """
    path = Path(path)
    try:
        with _temporary(path) as file:
            file.write(MAGIC)
            _sync(file)
            _link(file, path)
    except OSError as error:
        raise SnapshotError(f"cannot create a file in {path.parent} ({error.strerror})") from error


def load_snapshot(
    path: str | os.PathLike[str], pager: Pager, arena: KVArena, identity: bytes, state_memory: StateMemory = NO_MEMORY
) -> int:
    """Load as many pages and states as fit into the cache, in the same eviction order. Return the number of pages.

    The pager must be new. Raises a SnapshotError, changing nothing, if the file cannot be read, is not a snapshot,
    belongs to another model or layout, or is truncated or damaged.
    """
    if pager.prefix is None or pager.pool.num_free != pager.pool.num_pages:
        raise ValueError("a snapshot can only be loaded into an empty pager with prefix caching enabled")
    try:
        with _opened(Path(path)) as file:
            reader = _SnapshotReader(file, pager, arena, identity, state_memory)
            contents, keys = reader.check()
            page_ids = list(pager.pool.free_pages())[: len(contents)]
            reader.load(page_ids, pager.states.free_slots()[: len(keys)])
    except OSError as error:
        raise SnapshotError(f"cannot read the snapshot {path} ({error.strerror})") from error
    owned = pager.pool.allocate(len(page_ids))
    for page, content in zip(owned, contents, strict=True):
        pager.pool.label(page, content)
    pager.pool.release(owned)
    pager.cached_states.adopt(keys)
    return len(owned)


class _SnapshotReader:
    """An open snapshot: call `check`, then `load`. Holds one page and one state of memory at a time."""

    def __init__(self, file: int, pager: Pager, arena: KVArena, identity: bytes, state_memory: StateMemory) -> None:
        self._file = file
        self._pager = pager
        self._arena = arena
        self._identity = identity
        self._state_memory = state_memory
        self._pages = _Entries(file, "page", _record(pager.page_size), arena.layout.page_bytes)
        self._states = _Entries(file, "state", STATE, state_memory.shape[1])
        self._states_used: list[int] = []  # index in the file of each state to load

    def check(self) -> tuple[list[Content], list[bytes]]:
        """Check record, memory, key and chain of as many pages as fit, and of the states that continue them.

        Return the content of the pages and the keys of the states, the least recently used one first.
        """
        num_pages, num_states = self._check_header()
        contents: list[Content] = []
        seen: list[dict[bytes, int]] = [{} for _ in self._pager.windows]  # key -> depth, per group
        for index in range(min(num_pages, self._pager.pool.num_free)):
            key, parent, depth, group, token_ids, images = self._pages.check(index)
            content = Content(key, parent, depth, group, token_ids, b"" if images == NO_IMAGES else images)
            self._check_content(index, content, seen)
            contents.append(content)
        return contents, self._check_states(num_states, seen)

    def load(self, page_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the memory of the checked pages and states into `page_ids` and `slots`, which must be free."""
        for index, page in enumerate(page_ids):
            self._arena.write_page(page, self._pages.memory_of(index))
        for index, slot in zip(self._states_used, slots, strict=True):
            self._state_memory[slot] = self._states.memory_of(index)

    def _check_header(self) -> tuple[int, int]:
        """Check model, layout and length of the file. Return the numbers of its pages and states."""
        data = os.pread(self._file, HEADER_BYTES, 0)
        if not MAGIC.startswith(data[: len(MAGIC)]):
            raise SnapshotForeign("the file is not a snapshot of a prefix cache")
        if len(data) < HEADER_BYTES:
            raise SnapshotTruncated("the snapshot ends within its header")
        _, version, _, _, _, num_pages, _, num_states, _, _ = HEADER.unpack_from(data)
        if version != VERSION:
            raise SnapshotForeign(f"the snapshot has version {version}, only {VERSION} can be read")
        _verified(data, "header")
        state_bytes = self._state_memory.shape[1]
        expected = _header(self._pager, self._arena, self._identity, num_pages, state_bytes, num_states)
        if data[: HEADER.size] != expected:
            raise SnapshotMismatch("the snapshot belongs to another model, build or layout of the KV cache")
        self._pages.start = HEADER_BYTES
        self._states.start = HEADER_BYTES + num_pages * self._pages.stride
        missing = self._states.start + num_states * self._states.stride - os.fstat(self._file).st_size
        entries = f"{num_pages} pages" + (f" and {num_states} states" if num_states else "")
        if missing > 0:
            raise SnapshotTruncated(f"the snapshot of {entries} is {missing} bytes too short")
        if missing < 0:
            raise SnapshotDamaged(f"the snapshot of {entries} is {-missing} bytes too long")
        return int(num_pages), int(num_states)

    def _check_content(self, index: int, content: Content, seen: list[dict[bytes, int]]) -> None:
        """Check that the key matches the tokens, is unique, and in a full group continues an earlier page."""
        key = page_key(content.parent, content.token_ids, content.images)
        sound = content.group < len(seen) and content.key == key
        if sound:
            known = seen[content.group]
            is_chained = content.depth == 0 or known.get(content.parent) == content.depth - 1
            sound = content.key not in known and (is_chained or self._pager.windows[content.group] > 0)
            known[content.key] = content.depth
        if not sound:
            raise SnapshotDamaged(f"page {index} of the snapshot does not continue the pages before it")

    def _check_states(self, num_states: int, pages: list[dict[bytes, int]]) -> list[bytes]:
        """Check as many states as the cache keeps. A state counts if every group has its page. Return the keys."""
        capacity = self._pager.cached_states.capacity
        keys: dict[bytes, int] = {}
        for index in range(num_states):
            if len(keys) == capacity:
                break
            (key,) = self._states.check(index)
            if key in keys:
                raise SnapshotDamaged(f"state {index} of the snapshot is at the same page as an earlier one")
            if all(key in known for known in pages):
                keys[key] = index
        self._states_used = list(keys.values())[::-1]
        return list(keys)[::-1]


class _Entries:
    """The entries of one kind in an open snapshot: each is a record and its checksum, then memory."""

    def __init__(self, file: int, kind: str, record: Struct, memory_bytes: int) -> None:
        self.start = 0  # offset of the first entry
        self.stride = record.size + CHECKSUM.size + memory_bytes
        self._file = file
        self._kind = kind
        self._record = record
        self._memory = np.empty(memory_bytes, np.uint8)
        self._checksums: dict[int, int] = {}

    def check(self, index: int) -> tuple[Any, ...]:
        """Check record and memory of an entry. Return the record's fields without the checksum."""
        data = os.pread(self._file, self._record.size + CHECKSUM.size, self.start + index * self.stride)
        *fields, checksum = self._record.unpack(_verified(data, f"record of {self._kind} {index}"))
        self._checksums[index] = checksum
        self.memory_of(index)
        return tuple(fields)

    def memory_of(self, index: int) -> npt.NDArray[np.uint8]:
        """Return the memory of a checked entry, valid until the next call. Check it again: the file may differ."""
        offset = self.start + (index + 1) * self.stride - self._memory.size
        if os.preadv(self._file, [self._memory.data], offset) != self._memory.size:
            raise SnapshotTruncated(f"the snapshot ends within {self._kind} {index}")
        if crc32(self._memory.data) != self._checksums[index]:
            raise SnapshotDamaged(f"{self._kind} {index} of the snapshot has the wrong checksum")
        return self._memory


def _verified(data: bytes, what: str) -> bytes:
    """Verify the checksum at the end of `data` and return the bytes before it."""
    body = data[: -CHECKSUM.size]
    checksum = data[-CHECKSUM.size :]
    if CHECKSUM.pack(crc32(body)) != checksum:
        raise SnapshotDamaged(f"the {what} of the snapshot has the wrong checksum")
    return body


def _by_recency(pager: Pager) -> list[tuple[int, Content]]:
    """Return the indexed pages, last evicted first: owned pages by depth, then cached pages."""
    pool = pager.pool
    owned = [page for page in range(pool.num_pages) if pool.references(page)]
    contents = [(page, content) for page in owned if (content := pool.content(page))]
    contents.sort(key=lambda each: each[1].depth)
    cached = [(page, content) for page in pool.cached_pages() if (content := pool.content(page))]
    return contents + cached[::-1]


def _states_by_recency(pager: Pager) -> list[tuple[bytes, int]]:
    """Return the key and the slot of each kept state, last evicted first."""
    cached = pager.cached_states
    return list(zip(cached, cached.slots(), strict=True))[::-1]


def _page_entries(
    pager: Pager, arena: KVArena, pages: Sequence[tuple[int, Content]]
) -> Iterator[tuple[bytes, memoryview]]:
    """Yield record and memory of each page; the memory changes with the next one."""
    record = _record(pager.page_size)
    page = np.empty(arena.layout.page_bytes, np.uint8)
    for page_id, content in pages:
        arena.read_page(page_id, page)
        yield record.pack(*_fields(content), crc32(page.data)), page.data


def _state_entries(
    states: Sequence[tuple[bytes, int]], state_memory: StateMemory
) -> Iterator[tuple[bytes, memoryview]]:
    """Yield record and memory of each state."""
    for key, slot in states:
        memory = state_memory[slot].data
        yield STATE.pack(key, crc32(memory)), memory


def _header(pager: Pager, arena: KVArena, identity: bytes, num_pages: int, state_bytes: int, num_states: int) -> bytes:
    parts = (arena.layout, arena.layout.groups, pager.windows, pager.states.rollback)
    sizes = (arena.layout.page_bytes, num_pages, state_bytes, num_states)
    digests = (sha256(identity).digest(), sha256(repr(parts).encode()).digest())
    return HEADER.pack(MAGIC, VERSION, pager.page_size, len(pager.windows), *sizes, *digests)


def _record(page_size: int) -> Struct:
    return Struct(f"<32s32s2I{4 * page_size}s{len(NO_IMAGES)}sI")


def _fields(content: Content) -> tuple[bytes, bytes, int, int, bytes, bytes]:
    return content.key, content.parent, content.depth, content.group, content.token_ids, content.images or NO_IMAGES


def _with_checksum(data: bytes) -> bytes:
    return data + CHECKSUM.pack(crc32(data))


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a private file that replaces `path` once it is complete and on disk; after an error nothing remains."""
    with _temporary(path) as file:
        yield file
        _sync(file)
        _link(file, path)
        os.replace(_temporary_name(path), path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _temporary(path: Path) -> Iterator[BinaryIO]:
    """Yield a new private file in the folder of `path`. It has no name, so it disappears with its process.

    Where the file system has no unnamed files, the file has the temporary name, and the next save replaces it.
    """
    name = _temporary_name(path)
    name.unlink(missing_ok=True)
    try:
        file = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:
        file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "wb") as stream:
            yield stream
    finally:
        name.unlink(missing_ok=True)


def _link(file: BinaryIO, path: Path) -> None:
    """Give the temporary file its name, if it has none yet."""
    if os.fstat(file.fileno()).st_nlink == 0:
        folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
        try:  # a folder descriptor makes Python call linkat, which can follow the link in /proc
            os.link(f"/proc/self/fd/{file.fileno()}", _temporary_name(path).name, dst_dir_fd=folder)
        finally:
            os.close(folder)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading, without blocking on anything else."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not S_ISREG(os.fstat(file).st_mode):
            raise SnapshotForeign(f"{path} is not a regular file")
        yield file
    finally:
        os.close(file)
