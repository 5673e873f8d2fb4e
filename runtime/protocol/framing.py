"""The length prefix of frames: a u32 in big-endian order, then that many bytes of payload."""

from __future__ import annotations

import struct

from ..common.errors import ProtocolError

_LENGTH = struct.Struct(">I")
PREFIX_BYTES = _LENGTH.size
MAX_PAYLOAD_BYTES = (1 << 32) - 1  # the largest length that the prefix can express


def with_prefix(payload: bytes) -> bytes:
    """Return `payload` after its length."""
    return _LENGTH.pack(len(payload)) + payload


def next_payload(received: bytearray, max_bytes: int = MAX_PAYLOAD_BYTES) -> bytes | None:
    """Take the first frame from `received` and return its payload; None while it is incomplete.

    Raises ProtocolError for a length above `max_bytes`, before the rest of the frame has been received.
    """
    if len(received) < PREFIX_BYTES:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > max_bytes:
        raise ProtocolError(f"a frame declares {length} bytes, the limit is {max_bytes}")
    end = PREFIX_BYTES + length
    if len(received) < end:
        return None
    payload = bytes(received[PREFIX_BYTES:end])
    del received[:end]
    return payload
