"""Saves the prefix cache to a file when the engine drains and loads it at start, so a restart begins warm.

Must not import models or requests: the caller chooses the bytes of `identity`, which identify the model of a snapshot.
Loading checks everything that it will use before it changes anything. The format, little-endian:

    header   magic "QUIREKV\\0" · version u32 · page_size u32 · groups u32 · page_bytes u64 · pages u64
             · sha256 of the identity · sha256 of the layout · crc32 of all this
    page     key · parent (32 bytes each) · depth u32 · group u32 · token ids u32 … · digest of the images (32 bytes, or
             zeros) · crc32 of the memory · crc32 of all this, then `page_bytes` of memory

Pages are in the reverse of their eviction order, so a smaller pool reads the first pages only, and a page comes after
the page it continues. The checksums detect accidents. A forged file can make the model produce wrong tokens, but cannot
corrupt the pager or reveal memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from struct import Struct
from typing import BinaryIO
from zlib import crc32

import numpy as np

from .arena import KVArena
from .exceptions import SnapshotDamaged, SnapshotError, SnapshotForeign, SnapshotMismatch, SnapshotTruncated
from .pager import Pager
from .pool import Content
from .prefix import page_key

MAGIC = b"QUIREKV\0"
VERSION = 2
NO_IMAGES = bytes(32)
HEADER = Struct("<8s3I2Q32s32s")
CHECKSUM = Struct("<I")
HEADER_BYTES = HEADER.size + CHECKSUM.size
SYNC_BYTES = 4 << 20  # written between two flushes to the disk, after which progress is reported


def save_snapshot(
    path: str | os.PathLike[str],
    pager: Pager,
    arena: KVArena,
    identity: bytes,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> int:
    """Write every indexed page, owned or cached, to `path`. Return the number of pages.

    `progress` is called with the bytes that are on disk so far, every SYNC_BYTES. No step may be running. Raises
    SnapshotError if the file cannot be written; `path` then keeps its old content.
    """
    path = Path(path)
    pages = _by_recency(pager)
    page = np.empty(arena.layout.page_bytes, np.uint8)
    record = _record(pager.page_size)
    try:
        with _replacing(path) as file:
            file.write(_with_checksum(_header(pager, arena, identity, len(pages))))
            num_synced = 0
            for page_id, content in pages:
                arena.read_page(page_id, page)
                file.write(_with_checksum(record.pack(*_fields(content), crc32(page.data))))
                file.write(page.data)
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


def load_snapshot(path: str | os.PathLike[str], pager: Pager, arena: KVArena, identity: bytes) -> int:
    """Load as many pages as fit, as cached pages with the same eviction order. Return the number of pages.

    The pager must be new. Raises a SnapshotError, changing nothing, if the file cannot be read, is not a snapshot,
    belongs to another model or layout, is truncated or damaged.
    """
    if pager.prefix is None or pager.pool.num_free != pager.pool.num_pages:
        raise ValueError("a snapshot can only be loaded into an empty pager with prefix caching enabled")
    try:
        with _opened(Path(path)) as file:
            reader = _SnapshotReader(file, pager, arena, identity)
            contents = reader.check()
            page_ids = list(pager.pool.free_pages())[: len(contents)]
            reader.load(page_ids)
    except OSError as error:
        raise SnapshotError(f"cannot read the snapshot {path} ({error.strerror})") from error
    owned = pager.pool.allocate(len(page_ids))
    for page, content in zip(owned, contents, strict=True):
        pager.pool.label(page, content)
    pager.pool.release(owned)
    return len(owned)


class _SnapshotReader:
    """An open snapshot: call `check`, then `load`. Holds one page of memory at a time."""

    def __init__(self, file: int, pager: Pager, arena: KVArena, identity: bytes) -> None:
        self._file = file
        self._pager = pager
        self._arena = arena
        self._identity = identity
        self._record = _record(pager.page_size)
        self._page = np.empty(arena.layout.page_bytes, np.uint8)
        self._stride = self._record.size + CHECKSUM.size + self._page.size
        self._checksums: list[int] = []

    def check(self) -> list[Content]:
        """Check record, memory, key and chain of as many pages as fit. Return their content."""
        count = min(self._check_header(), self._pager.pool.num_free)
        contents: list[Content] = []
        seen: list[dict[bytes, int]] = [{} for _ in self._pager.windows]  # key -> depth, per group
        for index in range(count):
            content, checksum = self._read_record(index)
            self._check_content(index, content, seen)
            self._read_memory(index, checksum)
            contents.append(content)
            self._checksums.append(checksum)
        return contents

    def load(self, page_ids: Sequence[int]) -> None:
        """Copy the memory of the checked pages into `page_ids`, which must be free."""
        for index, page in enumerate(page_ids):
            self._read_memory(index, self._checksums[index])  # checked again: the file may have changed
            self._arena.write_page(page, self._page)

    def _check_header(self) -> int:
        """Check model, layout and length of the file. Return the number of its pages."""
        data = os.pread(self._file, HEADER_BYTES, 0)
        if not MAGIC.startswith(data[: len(MAGIC)]):
            raise SnapshotForeign("the file is not a snapshot of a prefix cache")
        if len(data) < HEADER_BYTES:
            raise SnapshotTruncated("the snapshot ends within its header")
        _, version, _, _, _, num_pages, _, _ = HEADER.unpack_from(data)
        if version != VERSION:
            raise SnapshotForeign(f"the snapshot has version {version}, only {VERSION} can be read")
        self._verified(data, "header")
        expected = _header(self._pager, self._arena, self._identity, num_pages)
        if data[: HEADER.size] != expected:
            raise SnapshotMismatch("the snapshot belongs to another model, build or layout of the KV cache")
        missing = HEADER_BYTES + num_pages * self._stride - os.fstat(self._file).st_size
        if missing > 0:
            raise SnapshotTruncated(f"the snapshot of {num_pages} pages is {missing} bytes too short")
        if missing < 0:
            raise SnapshotDamaged(f"the snapshot of {num_pages} pages is {-missing} bytes too long")
        return int(num_pages)

    def _read_record(self, index: int) -> tuple[Content, int]:
        data = os.pread(self._file, self._record.size + CHECKSUM.size, HEADER_BYTES + index * self._stride)
        fields = self._record.unpack(self._verified(data, f"record of page {index}"))
        key, parent, depth, group, token_ids, images, checksum = fields
        return Content(key, parent, depth, group, token_ids, b"" if images == NO_IMAGES else images), checksum

    def _read_memory(self, index: int, checksum: int) -> None:
        offset = HEADER_BYTES + (index + 1) * self._stride - self._page.size
        if os.preadv(self._file, [self._page.data], offset) != self._page.size:
            raise SnapshotTruncated(f"the snapshot ends within page {index}")
        if crc32(self._page.data) != checksum:
            raise SnapshotDamaged(f"page {index} of the snapshot has the wrong checksum")

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

    def _verified(self, data: bytes, what: str) -> bytes:
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


def _header(pager: Pager, arena: KVArena, identity: bytes, num_pages: int) -> bytes:
    layout = sha256(repr((arena.layout, arena.layout.groups, pager.windows)).encode()).digest()
    page_bytes = arena.layout.page_bytes
    num_groups = len(pager.windows)
    fields = (VERSION, pager.page_size, num_groups, page_bytes, num_pages, sha256(identity).digest(), layout)
    return HEADER.pack(MAGIC, *fields)


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
