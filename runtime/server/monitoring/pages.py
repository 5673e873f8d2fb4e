"""Pages for browsers: their files, and the headers that restrict a page to its own server."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from typing import NamedTuple

PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


class PageFile(NamedTuple):
    """One file of a page."""

    content: bytes
    media_type: str


def read_page(folder: Traversable, *names: str) -> dict[str, PageFile]:
    """Return the files of a page by their path on the server. The first is the page itself, at `/`."""
    paths = ["/", *(f"/{name}" for name in names[1:])]
    types = [f"{_MEDIA_TYPES[name.rpartition('.')[2]]}; charset=utf-8" for name in names]
    contents = [(folder / name).read_bytes() for name in names]
    return dict(zip(paths, map(PageFile, contents, types), strict=True))
