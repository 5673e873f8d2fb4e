"""Checks of the bytes that a client sends, around h11's parser. This module must not import servers.

h11 takes 2 µs for a line of a head and 5 µs for a chunk of a body. For blanks before an illegal character, its time
grows with the square of their number: 30 KB of blanks take 3 s.

h11 also accepts heads and chunks that another parser, such as a proxy's, reads as other requests: lines that end
without a carriage return, folded lines, a content-length with a chunked body. `check_head`, `check_request` and
`ChunkLines` refuse them.
"""

from __future__ import annotations

import re

import h11

MAX_HEAD_LINES = 256
PIECE_BYTES = 4 << 10  # bytes of a chunked body that one turn of the event loop parses
MAX_KEPT_BYTES = 1 << 10  # bytes of a chunked body that h11 may keep: part of a chunk's line, or the last fields
MAX_SMALL_CHUNKS = 1024  # chunks of a body, in addition to one per `BYTES_PER_CHUNK`
BYTES_PER_CHUNK = 16  # bytes of a body
CRLF = b"\r\n"

# Header fields that a request may have once. h11 checks `host` and `content-length` itself.
SINGLE_FIELDS = (b"authorization", b"content-type", b"content-encoding", b"idempotency-key", b"last-event-id")

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_IN_NO_LINE = re.compile(rb"[\x00\x0b\x0c]|\r(?!\n|\Z)")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_FOLDED = re.compile(rb"\n[ \t]")
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
# RFC 9112, section 7.1.1; blanks at the end are for clients that pad sizes.
_QUOTED = rb'"(?:[^\x00-\x08\x0a-\x1f\x7f"\\]|\\[\t -~])*+"'
_EXTENSION = rb";[ \t]*+%b(?:[ \t]*+=[ \t]*+(?:%b|%b))?+" % (_TOKEN, _TOKEN, _QUOTED)
_CHUNK_LINE = re.compile(rb"(?P<size>[0-9A-Fa-f]{1,20}+)(?:%b)*+[ \t]*+" % _EXTENSION)
_BLANKS = re.compile(rb"(?<![ \t\r\n])[ \t\r\n]{256}")


def can_answer(data: bytearray, max_bytes: int) -> bool:
    """Return whether the first bytes of a connection are a whole head, or bytes that no head begins with."""
    is_no_head = data[0] <= ord(" ")
    return is_no_head or _END_OF_HEAD.search(data) is not None or _fault(data, max_bytes) is not None


def check_head(http: h11.Connection, max_bytes: int) -> None:
    """Raise RemoteProtocolError unless h11 may parse its buffer: a head, or the beginning of one."""
    data = http.trailing_data[0]
    end = _END_OF_HEAD.search(data, 0, max_bytes)
    fault = _fault(data if end is None else data[: end.end()], max_bytes)
    if fault is not None:
        raise h11.RemoteProtocolError(*fault)


def _fault(head: bytes | bytearray, max_bytes: int) -> tuple[str, int] | None:
    """Return why h11 must not parse a head or its beginning, and the status of the answer; None if it may."""
    if len(head) > max_bytes:
        return f"a head has at most {max_bytes} bytes", 431
    if head.count(b"\n") > MAX_HEAD_LINES:
        return f"a head has at most {MAX_HEAD_LINES} lines", 431
    if _IN_NO_LINE.search(head):
        return "a head has characters that no line may have", 400
    if _BARE_LF.search(head):
        return "a line of a head ends with CR LF, not with LF alone", 400
    if _FOLDED.search(head):
        return "a line of a head must not continue on the next line", 400
    return None


def check_request(request: h11.Request) -> None:
    """Raise RemoteProtocolError for a head that another parser may read as another request."""
    if not request.http_version.startswith(b"1."):
        version = request.http_version.decode("ascii")
        raise h11.RemoteProtocolError(f"HTTP/{version} is not supported; use HTTP/1.1", error_status_hint=505)
    names = [name for name, _ in request.headers]
    for name in SINGLE_FIELDS:
        if names.count(name) > 1:
            raise h11.RemoteProtocolError(f"{name.decode()} must not occur twice")
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            raise h11.RemoteProtocolError("content-length and transfer-encoding must not occur together")
        if request.http_version == b"1.0":
            raise h11.RemoteProtocolError("HTTP/1.0 has no transfer-encoding")


class ChunkLines:
    """The lines between the chunks of one body. Call `check` before each call of h11, and `parsed` with its data."""

    def __init__(self, http: h11.Connection, *, in_chunks: bool) -> None:
        """Disable all checks unless the body comes `in_chunks`."""
        self._http = http
        self._expects_line = in_chunks  # the next bytes end the previous chunk, if any, and begin a line
        self._num_end_bytes = 0  # bytes of the previous chunk's end, before that line
        self._in_trailer = False

    def check(self) -> None:
        """Raise RemoteProtocolError for a chunk's line, or trailing fields, that other parsers may read differently."""
        if not self._expects_line:
            return
        data = self._http.trailing_data[0]
        begin = self._num_end_bytes
        if not self._in_trailer:
            end = data.find(b"\r\n", begin)
            if end < 0:
                self._num_end_bytes -= min(begin, len(data))  # h11 takes these before the line is complete
                return
            line = _CHUNK_LINE.fullmatch(data, begin, end)
            if line is None:
                text = data[begin : begin + 40].decode("ascii", "backslashreplace")
                raise h11.RemoteProtocolError(f"a chunk begins with its size and a line's end, not with {text!r}")
            self._expects_line = self._in_trailer = not line["size"].strip(b"0")
            data = data[end + len(CRLF) :]
        if self._in_trailer:
            end_of_body = _END_OF_HEAD.search(CRLF + data)
            fields = CRLF + data if end_of_body is None else (CRLF + data)[: end_of_body.end()]
            if _BARE_LF.search(fields) or _FOLDED.search(fields):
                raise h11.RemoteProtocolError("each field after the last chunk is one line that ends with CR LF")

    def parsed(self, data: h11.Data) -> None:
        """Note data that h11 has returned."""
        self._expects_line = bool(data.chunk_end)
        self._num_end_bytes = len(CRLF)


def check_chunks(http: h11.Connection) -> None:
    """Raise RemoteProtocolError unless h11 may parse its buffered part of a chunked body."""
    data = http.trailing_data[0]
    if _IN_NO_LINE.search(data) and _BLANKS.search(data):
        raise h11.RemoteProtocolError("a body has characters that neither a line nor JSON may have")


def check_kept(http: h11.Connection) -> None:
    """Raise RemoteProtocolError if h11 cannot parse a long buffered part of a chunked body."""
    if len(http.trailing_data[0]) > MAX_KEPT_BYTES:
        raise h11.RemoteProtocolError(f"a chunk's line, or the last fields, have at most {MAX_KEPT_BYTES} bytes")
