"""`BatchStore`: the files and batches of tenants, in a folder that outlives the server.

Each tenant has a folder of its own, and names of other folders cannot be made from an id. Objects are written to a
temporary file first and renamed, so they are whole or absent after a crash. Functions block: call them in a thread.
Must not import sockets.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from ...common.errors import ConfigError, QuotaExceeded, RequestNotFound
from .line_files import disk_error

MAX_OBJECTS = 30_000  # files on the disk of one tenant
MAX_FILE_NAME = 255  # characters
_ID = re.compile(r"(file|batch)_[0-9a-f]{32}")

_encode = msgspec.json.encode


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a tenant. Times are in seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of a tenant, with OpenAI's names. Times are in seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: str = "validating"
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    total: int = 0  # lines; known once it is in progress
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    error: tuple[str, str] | None = None  # code and message of a batch that failed
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")


ObjectT = TypeVar("ObjectT", StoredFile, Batch)


class BatchStore:
    """The files and batches of all tenants below one folder. Raises ConfigError for a folder that cannot be used."""

    def __init__(self, folder: Path, max_bytes: int, window_s: float) -> None:
        """Each tenant may have `max_bytes`. A file is kept for `window_s`, unless it says otherwise."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._window_s = window_s
        self._changing = threading.Lock()  # held while a batch is replaced
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / ".writable").write_bytes(b"")
        except OSError as error:
            raise ConfigError(f"batch_folder: {folder} cannot be written: {error.strerror}") from None

    def tenants(self) -> list[str]:
        """Return the names of the tenants that have a folder."""
        return sorted(each.name.removeprefix("tenant-") for each in self._folder.glob("tenant-*"))

    # Files

    def add_file(
        self, tenant: str, content: bytes, filename: str, purpose: str, expires_s: float | None = None
    ) -> StoredFile:
        """Keep a file. Raises QuotaExceeded, or Unavailable if the disk is full."""
        self.check_quota(tenant, len(content))
        return self.add_parts(tenant, (content,), filename, purpose, expires_s)

    def add_parts(
        self, tenant: str, parts: Iterable[bytes], filename: str, purpose: str, expires_s: float | None = None
    ) -> StoredFile:
        """Keep a file of several parts, whatever the quota. Raises Unavailable if the disk is full."""
        file_id = f"file_{secrets.token_hex(16)}"
        now = int(time.time())
        file = StoredFile(
            id=file_id,
            bytes=self._write(self._path(tenant, file_id), parts),
            created_at=now,
            filename=filename[:MAX_FILE_NAME],
            purpose=purpose,
            expires_at=now + int(self._window_s if expires_s is None else expires_s),
        )
        self._write(self._object(tenant, file_id), (_encode(file),))
        return file

    def check_quota(self, tenant: str, num_bytes: int) -> None:
        """Raise QuotaExceeded if a tenant may not keep `num_bytes` more, or has too many files or batches."""
        folder = self._of(tenant)
        sizes = [each.stat().st_size for each in _existing(folder)]
        if len(sizes) >= MAX_OBJECTS:
            raise QuotaExceeded(f"this tenant keeps {len(sizes)} objects; delete some files")
        if sum(sizes) + num_bytes > self._max_bytes:
            raise QuotaExceeded(
                f"files of {sum(sizes)} bytes and {num_bytes} more exceed the {self._max_bytes} bytes that a tenant "
                "may keep (`max_batch_bytes`); delete some files"
            )

    def file(self, tenant: str, file_id: str) -> StoredFile:
        """Return a file. Raises RequestNotFound."""
        return self._read(tenant, file_id, "file", StoredFile)

    def content(self, tenant: str, file_id: str) -> Path:
        """Return the path of a file's content. Raises RequestNotFound."""
        self.file(tenant, file_id)
        return self._path(tenant, file_id)

    def files(self, tenant: str) -> list[StoredFile]:
        """Return the files of a tenant, the newest first."""
        return self._all(tenant, "file", StoredFile)

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises RequestNotFound."""
        self.file(tenant, file_id)
        self._object(tenant, file_id).unlink(missing_ok=True)
        self._path(tenant, file_id).unlink(missing_ok=True)

    # Batches

    def put(self, tenant: str, batch: Batch) -> None:
        """Keep a new batch. Raises Unavailable if the disk is full."""
        self._write(self._object(tenant, batch.id), (_encode(batch),))

    def change(self, tenant: str, batch_id: str, update: Callable[[Batch], Batch]) -> Batch:
        """Replace a batch by the result of `update`, and return it. Raises RequestNotFound or Unavailable."""
        with self._changing:
            batch = update(self.batch(tenant, batch_id))
            self.put(tenant, batch)
        return batch

    def batch(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch. Raises RequestNotFound."""
        return self._read(tenant, batch_id, "batch", Batch)

    def batches(self, tenant: str) -> list[Batch]:
        """Return the batches of a tenant, the newest first."""
        return self._all(tenant, "batch", Batch)

    def answers(self, tenant: str, batch_id: str) -> Path:
        """Return the path of the answers that a batch has so far."""
        return self._of(tenant) / f"{batch_id}.answers"

    def remove_expired(self, tenant: str) -> None:
        """Delete files after their time, files that a crash left, and batches that ended long ago."""
        now = time.time()
        for file in self.files(tenant):
            if file.expires_at is not None and file.expires_at < now:
                self.delete_file(tenant, file.id)
        for batch in self.batches(tenant):
            if batch.has_ended:
                self.answers(tenant, batch.id).unlink(missing_ok=True)
                if batch.created_at + self._window_s < now:
                    self._object(tenant, batch.id).unlink(missing_ok=True)
        for path in _existing(self._of(tenant)):
            is_orphan = path.suffix == ".new" or (path.suffix == ".data" and not path.with_suffix(".json").exists())
            if is_orphan and path.stat().st_mtime + 3600 < now:
                path.unlink(missing_ok=True)

    # Disk

    def _of(self, tenant: str) -> Path:
        return self._folder / f"tenant-{tenant}"

    def _path(self, tenant: str, object_id: str) -> Path:
        return self._of(tenant) / f"{object_id}.data"

    def _object(self, tenant: str, object_id: str) -> Path:
        return self._of(tenant) / f"{object_id}.json"

    def _read(self, tenant: str, object_id: str, kind: str, of: type[ObjectT]) -> ObjectT:
        found = _ID.fullmatch(object_id)
        if found is not None and found[1] == kind:
            try:
                return msgspec.json.decode(self._object(tenant, object_id).read_bytes(), type=of)
            except (OSError, msgspec.DecodeError):
                pass
        raise RequestNotFound(f"there is no {kind} {object_id[:80]!r}")

    def _all(self, tenant: str, kind: str, of: type[ObjectT]) -> list[ObjectT]:
        found = []
        for path in self._of(tenant).glob(f"{kind}_*.json"):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=of))
            except (OSError, msgspec.DecodeError):
                continue
        return sorted(found, key=lambda each: (-each.created_at, each.id))

    def _write(self, path: Path, parts: Iterable[bytes]) -> int:
        """Write a file that is whole or absent after a crash. Return its bytes."""
        new = path.with_suffix(f"{path.suffix}.{secrets.token_hex(4)}.new")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with new.open("xb") as file:
                num_bytes = sum(map(file.write, parts))
                file.flush()
                os.fsync(file.fileno())
            new.rename(path)
            return num_bytes
        except OSError as error:
            new.unlink(missing_ok=True)
            raise disk_error(path, error) from None


def _existing(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder, which may not exist."""
    if folder.is_dir():
        yield from (each for each in folder.iterdir() if each.is_file())
