"""The files of a model on a hub at one commit: names, sizes and digests.

The answer of a hub is untrusted: a name must stay inside the model's folder, a digest must be one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ..common.errors import CorruptCheckpoint
from .errors import hub_errors

LISTING_TIMEOUT_S = 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # an id in git, or a sha256


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file. `digest` is the sha256 of a large file, or the id of a small one in git; it names the cached bytes."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a model by name."""

    repo: str
    commit: str
    files: dict[str, RemoteFile]


def read_listing(repo: str) -> Listing:
    """Ask the hub for the files of `repo`. Raises ModelNotFound, Unauthenticated, Unavailable or CorruptCheckpoint."""
    from huggingface_hub import HfApi, constants  # imported here: 0.5 s

    try:
        with hub_errors(repo):
            info = HfApi(constants.ENDPOINT).model_info(repo, files_metadata=True, timeout=LISTING_TIMEOUT_S)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"the answer about {repo} is not a hub's; check HF_ENDPOINT, and whether a proxy or a login page answers"
        ) from error
    files = [_file(repo, each) for each in info.siblings or ()]
    if not isinstance(info.sha, str) or _COMMIT.fullmatch(info.sha) is None:
        raise CorruptCheckpoint(f"the hub's answer about {repo} has no commit; check HF_ENDPOINT")
    return Listing(repo, info.sha, {file.name: file for file in files})


def _file(repo: str, sibling: Any) -> RemoteFile:
    name = sibling.rfilename
    digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
    size = sibling.lfs.size if sibling.lfs else sibling.size
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or name != "/".join(parts) or "\0" in name or any(part in ("..", "/") for part in parts):
        raise CorruptCheckpoint(f"{repo} lists a file {name!r}, which is not the name of a file in a folder")
    if not isinstance(size, int) or size < 0 or not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise CorruptCheckpoint(f"{repo} lists {name} without its size and digest; check HF_ENDPOINT")
    return RemoteFile(name, size, digest)
