"""Get a model by its name: from the cache without a request, or from the hub.

First the hub lists the files. For a GGUF repository, one model is chosen; for a folder, its small files come first, so
that the caller can compare the model's plan with the memory before its weights are downloaded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from ..common.errors import ConfigError, ModelError, ModelNotFound, Unavailable, UnsupportedModel
from ..model.weights.safetensors import INDEX_FILE
from .cache import Record, Repository, cache_folder, cached, unrecorded
from .errors import hub_errors
from .listing import Listing, RemoteFile, read_listing
from .reference import ModelReference
from .selection import (
    GGUFModel,
    by_preference,
    files_before_weights,
    gguf_models,
    is_folder,
    no_weights,
    tagged,
    weight_files,
)
from .skeleton import skeleton
from .transfer import OnBytes, is_intact, receive

SPARE_BYTES = 64 << 20  # disk space that stays free


class MemoryCheck(Protocol):
    """The caller's knowledge of the memory."""

    def fits(self, path: Path) -> bool:
        """Return whether the memory holds the model, whose headers are at `path`."""

    def check(self, path: Path) -> None:
        """Raise ConfigError or ModelError if the model, whose headers are at `path`, cannot be served here."""


class DownloadProgress(Protocol):
    """Where the progress of a download is shown."""

    def note(self, text: str) -> None:
        """Show one line."""

    def download(self, name: str, nbytes: int) -> AbstractContextManager[OnBytes]:
        """Show the download of `nbytes` bytes while the context is entered."""


def fetch(reference: ModelReference, memory: MemoryCheck, progress: DownloadProgress) -> Path:
    """Return the folder or the GGUF file of a model. Downloads what is missing.

    Raises ModelNotFound, Unauthenticated, Unavailable, CorruptCheckpoint or ConfigError, each with what to do.
    """
    if (path := cached(reference)) is not None:
        return path
    try:
        listing = read_listing(reference.repo)
    except (Unavailable, ModelNotFound) as error:
        path = unrecorded(reference)
        if path is None:
            raise
        progress.note(f"{reference} was cached by another program, and its checksums are not known: {error}")
        return path
    return _download(reference, listing, memory, progress)


def pull(reference: ModelReference, memory: MemoryCheck, progress: DownloadProgress) -> Path:
    """Return a model as it is on the hub now; download the files that have changed. Raises as `fetch`."""
    return _download(reference, read_listing(reference.repo), memory, progress)


@contextmanager
def headers(reference: ModelReference, memory: MemoryCheck) -> Iterator[Path]:
    """Yield a model from the cache, or its headers from the hub, without its weights. Raises as `fetch`."""
    if (path := cached(reference)) is not None:
        yield path
        return
    listing = read_listing(reference.repo)
    with skeleton(listing, choose(reference, listing, memory)) as path:
        yield path


def choose(reference: ModelReference, listing: Listing, memory: MemoryCheck) -> GGUFModel | None:
    """Return the GGUF model of a repository that the name means, None for a folder.

    Without a tag, it is Q4_K_M, if the memory holds it, else the largest quantized model that fits.
    """
    models = gguf_models(listing.files.values())
    if reference.tag:
        return tagged(models, reference)
    if is_folder(listing.files):
        return None
    if not models:
        raise no_weights(listing)
    preferred = by_preference(models)
    unsupported: ModelError | None = None
    for model in preferred:
        try:
            with skeleton(listing, model) as path:
                if memory.fits(path):
                    return model
        except UnsupportedModel as error:
            unsupported = unsupported or error
    if unsupported is not None:
        raise unsupported
    smallest = min(preferred, key=lambda model: model.nbytes)
    with skeleton(listing, smallest) as path:
        memory.check(path)
    return smallest


def _download(reference: ModelReference, listing: Listing, memory: MemoryCheck, progress: DownloadProgress) -> Path:
    model = choose(reference, listing, memory)
    download = _Download(reference, listing, progress)
    if model is None:
        small = files_before_weights(listing)
        download.receive(small, shown=False)
        snapshot = download.snapshot
        memory.check(snapshot)
        index = (snapshot / INDEX_FILE).read_bytes() if INDEX_FILE in listing.files else None
        weights: Sequence[RemoteFile] = weight_files(listing, index)
        download.receive(weights)
        return download.finish([*small, *weights], "")
    if reference.tag:
        with skeleton(listing, model) as path:
            memory.check(path)
    download.receive(model.files)
    return download.finish(model.files, model.files[0].name)


class _Download:
    """The files of one model on their way into the cache."""

    def __init__(self, reference: ModelReference, listing: Listing, progress: DownloadProgress) -> None:
        self._reference = reference
        self._listing = listing
        self._progress = progress
        self._repository = Repository(reference.repo)
        self._intact = self._recorded_digests()
        self.snapshot = self._repository.snapshot(listing.commit)

    def receive(self, files: Iterable[RemoteFile], *, shown: bool = True) -> None:
        """Download the files that are missing or damaged. Raises ConfigError if the disk cannot hold them."""
        with hub_errors(self._reference.repo):
            missing = [file for file in files if not self._has(file)]
        if not missing:
            return
        total = sum(file.size for file in missing)
        self._check_disk(missing)
        if shown:
            with self._progress.download(str(self._reference), total) as on_bytes:
                self._receive(missing, on_bytes)
        else:
            self._receive(missing, lambda _: None)

    def finish(self, files: Sequence[RemoteFile], file: str) -> Path:
        """Link all files into the snapshot, record that the model is complete, and return its path."""
        with hub_errors(self._reference.repo):
            for each in files:
                self._repository.link(self._listing.commit, each)
            sizes = {each.name: each.size for each in files}
            record = Record(commit=self._listing.commit, file=file, files=sizes)
            self._repository.write_record(self._reference, record)
        return self.snapshot / file

    def _receive(self, files: Sequence[RemoteFile], on_bytes: OnBytes) -> None:
        for file in files:
            receive(self._listing, file, self._repository.blobs / file.digest, on_bytes)
            with hub_errors(self._reference.repo):
                self._repository.link(self._listing.commit, file)

    def _has(self, file: RemoteFile) -> bool:
        """Return whether the cache has the file's bytes. Removes bytes that are not the file's."""
        blob = self._repository.blobs / file.digest
        if not blob.exists():
            return False
        if file.digest in self._intact or is_intact(file, blob):
            self._repository.link(self._listing.commit, file)
            self._intact.add(file.digest)
            return True
        self._progress.note(f"{file.name} in the cache is damaged; it is downloaded again")
        blob.unlink()
        return False

    def _recorded_digests(self) -> set[str]:
        """Return the digests of the files that were checked when the model was downloaded before."""
        record = self._repository.read_record(self._reference)
        if record is None:
            return set()
        folder = self._repository.snapshot(record.commit)
        return {os.path.basename(os.path.realpath(folder / name)) for name in record.files}

    def _check_disk(self, files: Iterable[RemoteFile]) -> None:
        """Raise ConfigError if the disk lacks space for the bytes that are not there yet."""
        blobs = self._repository.blobs
        partial = (blobs / f"{file.digest}.incomplete" for file in files)
        there = sum(path.stat().st_size for path in partial if path.exists())
        needed = sum(file.size for file in files) - there + SPARE_BYTES
        folder = cache_folder()
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise ConfigError(
                f"{self._reference} needs {needed:,} bytes of disk in {folder}, where {free:,} are free; free space "
                "(`quire list`, `quire rm`), or set HF_HOME to a folder on another disk"
            )
