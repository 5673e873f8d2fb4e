"""A model with its headers only: enough to plan its memory and to print its facts before its weights are downloaded.

Each file of weights is as long as the real one, but has only the bytes of its header; the rest takes no disk space.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..common.errors import CorruptCheckpoint, ModelError
from ..model.weights.gguf import StoredTensor, header_tensors
from ..model.weights.safetensors import INDEX_FILE
from .cache import CACHE_PREFIX
from .listing import Listing, RemoteFile
from .selection import GGUFModel, files_before_weights, weight_files
from .transfer import read_range

FIRST_BYTES = 1 << 20  # bytes of a GGUF file that are read first
MAX_HEADER_BYTES = 256 << 20
ROTARY_TENSORS = "rope_"  # beginning of the names of vectors in GGUF files
_LENGTH = struct.Struct("<Q")  # length of a safetensors header


@contextmanager
def skeleton(listing: Listing, model: GGUFModel | None) -> Iterator[Path]:
    """Yield the folder or the GGUF file of a model with its headers; the folder is removed afterwards.

    Raises QuireError as a download does, and CorruptCheckpoint for a header that cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="quire-") as root:
        folder = Path(root) / f"{CACHE_PREFIX}{listing.repo.replace('/', '--')}" / "snapshots" / listing.commit
        folder.mkdir(parents=True)
        if model is None:
            _write_folder(listing, folder)
            yield folder
        else:
            for file in model.files:
                _write_gguf_header(listing, file, folder / Path(file.name).name)
            yield folder / Path(model.files[0].name).name


def _write_folder(listing: Listing, folder: Path) -> None:
    small = files_before_weights(listing)
    for file in small:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_range(listing, file, 0, file.size))
    index = (folder / INDEX_FILE).read_bytes() if INDEX_FILE in listing.files else None
    for file in weight_files(listing, index):
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        length = read_range(listing, file, 0, _LENGTH.size)
        header_bytes = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else MAX_HEADER_BYTES
        if header_bytes >= MAX_HEADER_BYTES:
            raise CorruptCheckpoint(f"{listing.repo}: {file.name} is not a safetensors file")
        header = read_range(listing, file, _LENGTH.size, _LENGTH.size + header_bytes)
        _write_sparse(path, length + header, file.size)


def _write_gguf_header(listing: Listing, file: RemoteFile, path: Path) -> None:
    """Write the header of one GGUF file; its length shows only when it can be read."""
    data = b""
    while True:
        data += read_range(listing, file, len(data), max(FIRST_BYTES, 2 * len(data)))
        _write_sparse(path, data, file.size)
        try:
            tensors = header_tensors(path)
        except ModelError:
            if len(data) >= min(file.size, MAX_HEADER_BYTES):
                raise
        else:
            if len(data) >= min((tensor.begin for tensor in tensors.values()), default=0):
                _write_vectors(listing, file, path, tensors)
                return


def _write_vectors(listing: Listing, file: RemoteFile, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write the vectors of rotary embeddings, which are read as a part of the model's configuration."""
    with path.open("r+b") as out:
        for name, tensor in tensors.items():
            if name.startswith(ROTARY_TENSORS) and tensor.end - tensor.begin <= FIRST_BYTES:
                out.seek(tensor.begin)
                out.write(read_range(listing, file, tensor.begin, tensor.end))


def _write_sparse(path: Path, header: bytes, size: int) -> None:
    path.write_bytes(header)
    os.truncate(path, max(size, len(header)))
