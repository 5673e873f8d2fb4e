"""The files of a batch: its lines, and the answers so far, after which a run that was killed continues.

The answers are in the order of the lines, so their number is the whole state of a run. Must not import sockets.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from ...common.errors import ConfigError, Unavailable
from .lines import MAX_LINE_BYTES, line_name

BLANK = b" \t\r\n"

_decode = msgspec.json.decode


class _Answer(msgspec.Struct):
    """The part of an answer line that a later run reads."""

    id: str
    error: msgspec.Raw = msgspec.Raw(b"null")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its number. A line that is too long is cut."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            is_long = len(line) > MAX_LINE_BYTES and not line.endswith(b"\n")
            while is_long and (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            if line.strip(BLANK):
                yield number, line
            number += 1


def count_lines(path: Path) -> int:
    """Return the number of lines that are not blank."""
    return sum(1 for _ in read_lines(path))


class AnswerFile:
    """A file of answers that grows by whole lines. One process at a time may have it open.

    Raises ConfigError for a file that cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lines = 0  # answers in the file
        self.num_errors = 0
        try:
            self._file: BinaryIO = path.open("ab+", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"{path} is being written by another process") from None

    def resume(self, lines: Iterator[tuple[int, bytes]]) -> None:
        """Take one line for each answer in the file, and remove an answer that is not whole.

        Raises ConfigError if the answers are not those of the lines.
        """
        end = 0
        self._file.seek(0)
        with open(os.dup(self._file.fileno()), "rb") as reading:
            while (answer := reading.readline()).endswith(b"\n"):
                number, line = next(lines, (-1, b""))
                found = _read(answer)
                if found is None or number < 0 or found.id != f"batch_req_{line_name(number, line)}":
                    raise ConfigError(
                        f"{self.path} has other content than the answers to these lines: its line "
                        f"{self.num_lines + 1} does not belong to them; remove the file, or name another one"
                    )
                end += len(answer)
                self.num_lines += 1
                self.num_errors += bytes(found.error) != b"null"
        self._file.truncate(end)

    def write(self, line: bytes, *, is_error: bool) -> None:
        """Append an answer. Raises Unavailable if the disk is full or broken; then the file ends with a whole line."""
        end = self._file.seek(0, os.SEEK_END)
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._file.truncate(end)
            raise disk_error(self.path, error) from None
        self.num_lines += 1
        self.num_errors += is_error

    def sync(self) -> None:
        """Wait until the answers are on the disk. Raises Unavailable."""
        try:
            os.fdatasync(self._file.fileno())
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EROFS):  # a pipe or a device
                raise disk_error(self.path, error) from None

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def disk_error(path: Path, error: OSError) -> Unavailable:
    """Return the error for a file that cannot be written now."""
    reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
    return Unavailable(f"{path} cannot be written: {reason}")


def _read(answer: bytes) -> _Answer | None:
    try:
        return _decode(answer, type=_Answer)
    except msgspec.DecodeError:
        return None
