"""The files of a model: a folder in Hugging Face's format, or a GGUF file; finding, naming and hashing them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from io import BufferedReader
from os import SEEK_END, fsencode
from os.path import abspath, exists, isdir, isfile
from pathlib import Path

from ..common.errors import CorruptCheckpoint, ModelNotFound
from .config_json import CONFIG_FILE
from .links import check_links
from .weights.gguf import PART, GGUFFile
from .weights.safetensors import INDEX_FILE, SINGLE_FILE

SAMPLED_BLOCKS = 64  # blocks of a file, in `sampled_fingerprint`
SAMPLED_BYTES = 4096  # size of a block
BUNDLED_MODEL = Path(__file__).parents[1] / "demo_model"
BUNDLED_EMBEDDING_MODEL = Path(__file__).parents[1] / "demo_embedding"
_SNAPSHOT = re.compile(r"models--(.+?)--(.+)/snapshots/[^/]+")  # a folder in the cache of huggingface_hub


def model_path(model: str | Path | None) -> Path:
    """Return the folder or GGUF file of a model setting; None is the bundled model. Raises ModelNotFound.

    A folder without safetensors that has one GGUF file, or the parts of one, stands for this file. Files for images may
    be next to it; they are not read. The name of a bundled model stands for it if no such file exists. Raises
    CorruptCheckpoint for a link out of the folder.
    """
    if model is None:
        return BUNDLED_MODEL
    if not exists(model):
        for bundled in (BUNDLED_MODEL, BUNDLED_EMBEDDING_MODEL):
            if str(model) == bundled.name:
                return bundled
    if not exists(model) and not is_gguf(model):
        raise ModelNotFound(
            f"{model} does not exist; give a folder or a GGUF file, or download a model with "
            "`quire pull ORGANIZATION/NAME`"
        )
    if not isdir(model):
        if isfile(model) and is_gguf(model):
            check_links(Path(model))
            return Path(model)
        found = "is neither a folder nor a .gguf file" if exists(model) else "does not exist"
        raise ModelNotFound(f"{model} {found}")
    folder = Path(model)
    check_links(folder)
    try:
        return folder if any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)) else _only_gguf(folder)
    except OSError as error:
        raise ModelNotFound(f"{folder} cannot be read: {error}") from error


def projectors(path: Path) -> list[str]:
    """Return the names of the files next to a GGUF file that only images need; they are not read."""
    beside = path.parent.glob("*.gguf") if is_gguf(path) else ()
    return sorted(file.name for file in beside if _is_projector(file) and file != path)


def _is_projector(path: Path) -> bool:
    return "mmproj" in path.name.lower()


def is_gguf(path: str | Path) -> bool:
    """Return whether `path` names a GGUF file, which may not exist."""
    return str(path).endswith(".gguf") and not isdir(path)


def model_name(path: Path) -> str:
    """Return the name of a model: of its folder, its GGUF file without the ending, or its name in a hub's cache.

    Bytes that are not UTF-8 are replaced: the name is sent to clients.
    """
    part = PART.fullmatch(path.name) if is_gguf(path) else None
    name = part[1] if part else path.stem if is_gguf(path) else _folder_name(Path(abspath(path)))
    return fsencode(name).decode(errors="replace")


def _folder_name(folder: Path) -> str:
    """Return the name of a folder; of one in the cache of huggingface_hub, ORGANIZATION/NAME."""
    cached = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
    return f"{cached[1]}/{cached[2]}" if cached else folder.name


def fingerprint(path: Path) -> bytes:
    """Return a sha256 over names and contents of a model's files; takes about a second per GB.

    In a folder, the files are config.json, all safetensors files and the settings of image normalization; otherwise all
    parts of the GGUF file. Models with the same fingerprint compute the same keys and values. Raises CorruptCheckpoint
    for an unreadable file.
    """
    return _digest(path, lambda file: hashlib.file_digest(file, "sha256"))


def sampled_fingerprint(path: Path) -> bytes:
    """Return a sha256 over names, sizes and some blocks of the files that `fingerprint` reads; takes milliseconds."""
    return _digest(path, _sampled)


def files_bytes(path: Path) -> int:
    """Return the size of the files that `fingerprint` reads, 0 if one of them cannot be found."""
    try:
        return sum(each.stat().st_size for each in _files(path))
    except OSError:
        return 0


def _files(path: Path) -> Sequence[Path]:
    return GGUFFile(path).paths if is_gguf(path) else _folder_files(path)


def _digest(path: Path, digest_of: Callable[[BufferedReader], hashlib._Hash]) -> bytes:
    """Return a sha256 over the names of a model's files and the digests of their contents."""
    digest = hashlib.sha256()
    try:
        for file_path in _files(path):
            with file_path.open("rb") as file:
                content = digest_of(file).hexdigest()
            digest.update(fsencode(f"{file_path.name} {content}\n"))
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read completely: {error}") from error
    return digest.digest()


def _folder_files(folder: Path) -> list[Path]:
    """Return the paths of config.json, of all files with weights and of the settings of images, if they exist."""
    patterns = "*.safetensors*", "*processor_config.json"
    found = (path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return [folder / CONFIG_FILE, *sorted(found)]


def _sampled(file: BufferedReader) -> hashlib._Hash:
    """Return a digest of a file's size and of blocks at equal distances."""
    num_bytes = file.seek(0, SEEK_END)
    digest = hashlib.sha256(b"%d\n" % num_bytes)
    for offset in range(0, num_bytes, max(SAMPLED_BYTES, num_bytes // SAMPLED_BLOCKS)):
        file.seek(offset)
        digest.update(file.read(SAMPLED_BYTES))
    return digest


def _only_gguf(folder: Path) -> Path:
    """Return the GGUF file in a folder, or the first part of it; the folder itself if it has none."""
    found = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    files = [path for path in found if not _is_projector(path)] or found
    first = [path for path in files if not (part := PART.fullmatch(path.name)) or int(part[2]) == 1]
    if len(first) > 1:
        raise ModelNotFound(
            f"{folder} has {len(first)} GGUF models; give one of them: {', '.join(path.name for path in first[:20])}"
        )
    return first[0] if first else files[0] if files else folder
