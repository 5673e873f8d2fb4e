"""The cache of huggingface_hub, and the records of complete models in it.

A record names the files that a model has at a commit, with their sizes. It is written after the last file was checked,
so a model with a record is complete, and its start makes no request. It lies in `.quire` in the model's folder of the
cache: `models--ORGANIZATION--NAME/{blobs,snapshots/COMMIT,refs}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from ..common.errors import ModelNotFound
from ..model.weights.safetensors import INDEX_FILE
from .errors import disk_error
from .listing import RemoteFile
from .reference import ModelReference
from .selection import gguf_models, is_folder, tagged

RECORDS = ".quire"
CACHE_PREFIX = "models--"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A complete model in the cache."""

    commit: str
    file: str  # the GGUF file, the first part of a split one; empty for a folder
    files: dict[str, int]  # name -> size


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache, as `quire list` shows it."""

    name: str
    nbytes: int
    modified: float  # seconds since 1970
    is_complete: bool


class Repository:
    """The folder of one model in the cache."""

    def __init__(self, repo: str) -> None:
        self.folder = cache_folder() / f"{CACHE_PREFIX}{repo.replace('/', '--')}"

    @property
    def blobs(self) -> Path:
        return self.folder / "blobs"

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def read_record(self, reference: ModelReference) -> Record | None:
        """Return the record of a model whose files all have their sizes, None without one."""
        try:
            record = msgspec.json.decode(self._record_path(reference).read_bytes(), type=Record)
            sizes = {name: os.stat(self.snapshot(record.commit) / name).st_size for name in record.files}
        except (OSError, msgspec.MsgspecError):
            return None
        return record if sizes == record.files else None

    def write_record(self, reference: ModelReference, record: Record) -> None:
        """Write the record in one step, and let `main` name its commit, as huggingface_hub does."""
        _write(self._record_path(reference), msgspec.json.encode(record))
        _write(self.folder / "refs" / "main", record.commit.encode())

    def main_snapshot(self) -> Path | None:
        """Return the folder of the commit that was downloaded last, by any program."""
        try:
            return self.snapshot((self.folder / "refs" / "main").read_text("ascii").strip())
        except (OSError, ValueError):
            return None

    def link(self, commit: str, file: RemoteFile) -> None:
        """Let the snapshot's file be a link to its bytes in the cache."""
        pointer = self.snapshot(commit) / file.name
        target = os.path.relpath(self.blobs / file.digest, pointer.parent)
        pointer.parent.mkdir(parents=True, exist_ok=True)
        temporary = pointer.with_name(f"{pointer.name}.{os.getpid()}.incomplete")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        temporary.symlink_to(target)
        os.replace(temporary, pointer)

    def _record_path(self, reference: ModelReference) -> Path:
        return self.folder / RECORDS / f"{quote(reference.tag.lower(), safe='') or 'default'}.json"


def cache_folder() -> Path:
    """Return the folder of the cache, by HF_HUB_CACHE, HF_HOME or XDG_CACHE_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached(reference: ModelReference) -> Path | None:
    """Return the folder or the GGUF file of a model whose record says that it is complete, None without one."""
    repository = Repository(reference.repo)
    record = repository.read_record(reference)
    return None if record is None else repository.snapshot(record.commit) / record.file


def unrecorded(reference: ModelReference) -> Path | None:
    """Return a model that another program has downloaded, if all files of its weights are there; for use offline."""
    snapshot = Repository(reference.repo).main_snapshot()
    if snapshot is None or not snapshot.is_dir():
        return None
    files = list(_files_of(snapshot))
    names = {file.name for file in files}
    if is_folder(names) and not reference.tag:
        return snapshot if _shards_exist(snapshot, names) else None
    with contextlib.suppress(ModelNotFound):
        models = gguf_models(files)
        if reference.tag or len(models) == 1:
            chosen = tagged(models, reference) if reference.tag else models[0]
            return snapshot / chosen.files[0].name
    return None


def cached_models() -> list[CachedModel]:
    """Return the models in the cache, by name: each folder, and each GGUF model with its quantization."""
    try:
        folders = sorted(cache_folder().glob(f"{CACHE_PREFIX}*--*"))
    except OSError as error:
        raise disk_error(error) from error
    return [model for folder in folders if folder.is_dir() for model in _models_in(folder)]


def remove(reference: ModelReference) -> int:
    """Remove a model from the cache, or one GGUF model of it; return the bytes that are free now.

    Raises ModelNotFound, and ConfigError if the cache cannot be written.
    """
    repository = Repository(reference.repo)
    if not repository.folder.is_dir():
        raise ModelNotFound(f"{reference.repo} is not in the cache {cache_folder()}; `quire list` shows its models")
    try:
        before = _disk_bytes(repository.folder)
        if reference.tag and not _is_only_model(repository, reference):
            _remove_tagged(repository, reference)
        else:
            shutil.rmtree(repository.folder)
            shutil.rmtree(cache_folder() / ".locks" / repository.folder.name, ignore_errors=True)
        return before - _disk_bytes(repository.folder)
    except OSError as error:
        raise disk_error(error) from error


def _is_only_model(repository: Repository, reference: ModelReference) -> bool:
    """Return whether the GGUF model of the tag is all that the repository has in the cache. Raises ModelNotFound."""
    models = [model for snapshot in _snapshots(repository.folder) for model in gguf_models(_files_of(snapshot))]
    chosen = tagged(list({model.name: model for model in models}.values()), reference)
    folders = any(is_folder(file.name for file in _files_of(each)) for each in _snapshots(repository.folder))
    return not folders and {model.name for model in models} == {chosen.name}


def _remove_tagged(repository: Repository, reference: ModelReference) -> None:
    """Remove the links to a GGUF model's files, the files that no link needs any more, and records that need them."""
    for snapshot in _snapshots(repository.folder):
        with contextlib.suppress(ModelNotFound):
            for file in tagged(gguf_models(_files_of(snapshot)), reference).files:
                (snapshot / file.name).unlink()
    used = {
        os.path.realpath(snapshot / file.name)
        for snapshot in _snapshots(repository.folder)
        for file in _files_of(snapshot)
    }
    for blob in repository.blobs.iterdir():
        if os.path.realpath(blob) not in used:
            blob.unlink()
    for path in (repository.folder / RECORDS).glob("*.json"):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=Record)
            is_needed = all((repository.snapshot(record.commit) / name).exists() for name in record.files)
        except msgspec.MsgspecError:
            is_needed = False
        if not is_needed:
            path.unlink()


def _models_in(folder: Path) -> Iterator[CachedModel]:
    repo = folder.name.removeprefix(CACHE_PREFIX).replace("--", "/", 1)
    latest = Repository(repo).main_snapshot()
    snapshot = latest if latest is not None and latest.is_dir() else next(iter(_snapshots(folder)), None)
    files = [] if snapshot is None else list(_files_of(snapshot))
    names = {file.name for file in files}
    modified = folder.stat().st_mtime if snapshot is None else snapshot.stat().st_mtime
    ggufs = gguf_models(files)
    partial = sum(path.stat().st_size for path in folder.glob("blobs/*.incomplete"))
    if snapshot is not None and (is_folder(names) or not ggufs):
        size = sum(file.size for file in files if not file.name.endswith(".gguf")) + partial
        complete = is_folder(names) and _shards_exist(snapshot, names)
        yield CachedModel(repo, size, modified, complete)
    elif not ggufs:
        yield CachedModel(repo, partial, modified, False)
    for model in ggufs:
        yield CachedModel(f"{repo}:{model.quantization}", model.nbytes, modified, True)


def _snapshots(folder: Path) -> list[Path]:
    return sorted(each for each in (folder / "snapshots").glob("*") if each.is_dir())


def _files_of(snapshot: Path) -> Iterator[RemoteFile]:
    """Yield the files of a snapshot whose bytes are there."""
    for path in sorted(snapshot.rglob("*")):
        if path.is_file() and not path.name.endswith(".incomplete"):
            digest = os.path.basename(os.path.realpath(path))
            yield RemoteFile(path.relative_to(snapshot).as_posix(), path.stat().st_size, digest)


def _shards_exist(snapshot: Path, names: set[str]) -> bool:
    if INDEX_FILE not in names:
        return True
    try:
        index = json.loads((snapshot / INDEX_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    shards = index.get("weight_map") if isinstance(index, Mapping) else None
    return isinstance(shards, Mapping) and all(isinstance(name, str) and name in names for name in shards.values())


def _disk_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.incomplete")
    temporary.write_bytes(content)
    os.replace(temporary, path)
