"""Checks of what a client sends, before h11 parses it. Must not import what serves.

h11 takes 2 µs for a line of a head and 5 µs for a chunk of a body. For blanks before a character that no line may have,
its time grows with the square of their number: 30 KB of them take 3 s.
"""

from __future__ import annotations

import re

import h11

MAX_HEAD_LINES = 256
PIECE_BYTES = 4 << 10  # of a body in chunks, parsed in one turn of the event loop
MAX_KEPT_BYTES = 1 << 10  # that h11 keeps of such a body: the beginning of a chunk's line, or the last fields
MAX_SMALL_CHUNKS = 1024  # of a body; one more for each `BYTES_PER_CHUNK`
BYTES_PER_CHUNK = 16

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_IN_NO_LINE = re.compile(rb"[\x00\x0b\x0c]|\r(?!\n|\Z)")
_BLANKS = re.compile(rb"(?<![ \t\r\n])[ \t\r\n]{256}")


def can_answer(data: bytearray, max_bytes: int) -> bool:
    """Return whether the first bytes of a connection are a whole head, or bytes that no head begins with."""
    is_no_head = data[0] <= ord(" ")
    return is_no_head or _END_OF_HEAD.search(data) is not None or _fault(data, max_bytes) is not None


def check_head(http: h11.Connection, max_bytes: int) -> None:
    """Raise RemoteProtocolError unless h11 may parse what it has: a head, or the beginning of one."""
    data = http.trailing_data[0]
    end = _END_OF_HEAD.search(data, 0, max_bytes)
    fault = _fault(data if end is None else data[: end.end()], max_bytes)
    if fault is not None:
        raise h11.RemoteProtocolError(*fault)


def _fault(head: bytes | bytearray, max_bytes: int) -> tuple[str, int] | None:
    """Return why h11 may not parse a head, or the beginning of one, and the status of the answer."""
    if len(head) > max_bytes:
        return f"a head has at most {max_bytes} bytes", 431
    if head.count(b"\n") > MAX_HEAD_LINES:
        return f"a head has at most {MAX_HEAD_LINES} lines", 431
    if _IN_NO_LINE.search(head):
        return "a head has characters that no line may have", 400
    return None


def check_chunks(http: h11.Connection) -> None:
    """Raise RemoteProtocolError unless h11 may parse what it has of a body in chunks."""
    data = http.trailing_data[0]
    if _IN_NO_LINE.search(data) and _BLANKS.search(data):
        raise h11.RemoteProtocolError("a body has characters that neither a line nor JSON may have")


def check_kept(http: h11.Connection) -> None:
    """Raise RemoteProtocolError if h11 has parsed what it can of a body in chunks, and keeps a long rest."""
    if len(http.trailing_data[0]) > MAX_KEPT_BYTES:
        raise h11.RemoteProtocolError(f"a chunk's line, or the last fields, have at most {MAX_KEPT_BYTES} bytes")
