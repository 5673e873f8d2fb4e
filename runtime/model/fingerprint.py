"""What a model folder holds, as one digest: two folders with the same digest compute the same keys and values.

It must not know formats. One invariant: every byte that decides a key or a value is in it, whatever the files' dates
say.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..common.errors import CorruptCheckpoint
from .config_json import CONFIG_FILE


def fingerprint(folder: Path) -> bytes:
    """sha256 over names and contents of config.json and all safetensors files. Reads them all: seconds per GB or two.

    Raises CorruptCheckpoint if one cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in [folder / CONFIG_FILE, *sorted(folder.glob("*.safetensors*"))]:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.name} {content}\n".encode())
    except OSError as error:
        raise CorruptCheckpoint(f"{folder} cannot be read to its end: {error}") from error
    return digest.digest()
