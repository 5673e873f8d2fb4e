"""The files of a model's folder for its text: their location, and the reading of JSON from untrusted files."""

from __future__ import annotations

import json
from pathlib import Path
from stat import S_ISREG
from typing import Any

from ...common.errors import CorruptCheckpoint
from ...model.files import is_gguf

MAX_TEXT_FILE_BYTES = 8 << 20  # size of a file with settings or a template


def text_folder(path: Path) -> Path:
    """Return the folder with the text files of a model: the model's folder, or the folder of its GGUF file."""
    return path.parent if is_gguf(path) else path


def read_file(path: Path, max_bytes: int = MAX_TEXT_FILE_BYTES) -> bytes | None:
    """Return the content of a file, None without one.

    Raises CorruptCheckpoint for a longer file, and for anything except a regular file: opening a pipe blocks until its
    other end is opened, and a device may never end.
    """
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):
            raise CorruptCheckpoint(f"{path} cannot be read: it must be a regular file")
        if status.st_size > max_bytes:
            raise CorruptCheckpoint(f"{path} has {status.st_size} bytes; at most {max_bytes} are supported")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the file's JSON object; an empty one if there is no file."""
    data = read_file(path)
    if data is None:
        return {}
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptCheckpoint(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content
