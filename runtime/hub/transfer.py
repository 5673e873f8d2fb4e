"""Bytes from the hub: whole files, resumed and checked against their digests, and ranges of files.

A file arrives in `blobs/DIGEST.incomplete`, which a later command continues, and gets its name only after all of its
bytes have the digest that the hub states. A lock lets one process download a file while others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from ..common.errors import CorruptCheckpoint
from .errors import hub_errors
from .listing import Listing, RemoteFile

RETRIES = 5  # failures in a row without a new byte
LONGEST_PAUSE_S = 60  # longest wait that a hub may ask for
BLOCK_READ_BYTES = 1 << 20
BUSY = (408, 429, 500, 502, 503, 504)
SHA256_DIGITS = 64
OnBytes = Callable[[int], None]  # called with the number of bytes that arrived, negative if they must come again


def receive(listing: Listing, file: RemoteFile, blob: Path, on_bytes: OnBytes) -> None:
    """Download one file to `blob`, unless it is there.

    Raises QuireError; the part that arrived stays for the next try.
    """
    with hub_errors(listing.repo):
        blob.parent.mkdir(parents=True, exist_ok=True)
        partial = blob.with_name(f"{blob.name}.incomplete")
        with _locked(partial) as out:
            if blob.exists():
                on_bytes(file.size)
                return
            digest = _resume(listing, file, out, on_bytes)
            if digest != file.digest:
                partial.unlink()
                raise CorruptCheckpoint(
                    f"{listing.repo}: {file.name} arrived with another checksum than the hub states; nothing of it is "
                    "kept; repeat the command"
                )
            out.flush()
            os.fsync(out.fileno())
            os.replace(partial, blob)


def is_intact(file: RemoteFile, blob: Path) -> bool:
    """Return whether the bytes in the cache have the file's size and digest."""
    if blob.stat().st_size != file.size:
        return False
    digest = _new_digest(file)
    with blob.open("rb") as content:
        while chunk := content.read(BLOCK_READ_BYTES):
            digest.update(chunk)
    return bool(digest.hexdigest() == file.digest)


def read_range(listing: Listing, file: RemoteFile, begin: int, end: int) -> bytes:
    """Return bytes begin..end of a file, without the rest."""
    with hub_errors(listing.repo):
        found = b""
        for chunk in _chunks(listing, file, begin, min(end, file.size)):
            found += chunk
        return found


def _resume(listing: Listing, file: RemoteFile, out: BinaryIO, on_bytes: OnBytes) -> str:
    """Append the missing bytes to `out`; return the digest of all."""
    digest = _new_digest(file)
    out.seek(0)
    while chunk := out.read(BLOCK_READ_BYTES):
        digest.update(chunk)
    if out.tell() > file.size:
        out.truncate(0)
        out.seek(0)
        digest = _new_digest(file)
    on_bytes(out.tell())
    for chunk in _chunks(listing, file, out.tell(), file.size):
        out.write(chunk)
        digest.update(chunk)
        on_bytes(len(chunk))
    return str(digest.hexdigest())


def _chunks(listing: Listing, file: RemoteFile, begin: int, end: int) -> Iterator[bytes]:
    """Yield bytes begin..end of a file. After a cut, the connection is made again where it ended."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    at = begin
    failures = 0
    while at < end:
        before = at
        try:
            for chunk in _one_answer(listing, file, at, end):
                at += len(chunk)
                yield chunk
            if at == before:
                raise httpx2.RemoteProtocolError("the answer has no bytes")
        except (httpx2.TransportError, HfHubHTTPError) as error:
            failures = 1 if at > before else failures + 1
            wait = _wait_s(error, failures)
            if wait is None or failures > RETRIES:
                raise
            time.sleep(wait)


def _one_answer(listing: Listing, file: RemoteFile, begin: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of one answer, which may end early."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import hf_raise_for_status

    headers = {**build_hf_headers(library_name="quire"), "Accept-Encoding": "identity"}
    if begin or end < file.size:
        headers["Range"] = f"bytes={begin}-{end - 1}"
    url = f"{constants.ENDPOINT}/{listing.repo}/resolve/{listing.commit}/{quote(file.name)}"
    with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        hf_raise_for_status(response)
        skip = 0 if response.status_code == 206 else begin  # a server without ranges sends all bytes
        left = end - begin
        # The raw pieces: with chunks of a fixed size, a cut would lose the chunk that is not full yet.
        for chunk in response.iter_raw():
            kept = chunk[skip:][:left]
            skip -= min(skip, len(chunk))
            left -= len(kept)
            if kept:
                yield kept
            if not left:
                return


def _wait_s(error: Any, failures: int) -> float | None:
    """Return the seconds before the next try, None if trying again is useless."""
    response = getattr(error, "response", None)
    pause = min(2.0 ** (failures - 1), 8.0)
    if response is None:
        return pause
    if response.status_code not in BUSY:
        return None
    asked = response.headers.get("Retry-After", "")
    wait = float(asked) if asked.isdecimal() else pause
    return wait if wait <= LONGEST_PAUSE_S else None


@contextmanager
def _locked(partial: Path) -> Iterator[BinaryIO]:
    """Open the incomplete file once no other process writes it."""
    while True:
        out = open(partial, "a+b")  # noqa: SIM115
        fcntl.flock(out, fcntl.LOCK_EX)
        if partial.exists() and os.path.samestat(os.fstat(out.fileno()), partial.stat()):
            break
        out.close()  # another process has finished the file meanwhile
    try:
        with out:
            yield out
    finally:
        if partial.exists() and not partial.stat().st_size:
            partial.unlink()


def _new_digest(file: RemoteFile) -> Any:
    """Return an empty sha256, or the beginning of the id that git gives a file of this size."""
    if len(file.digest) == SHA256_DIGITS:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
