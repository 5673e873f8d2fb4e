"""The fields of a body of the type multipart/form-data (RFC 7578), which uploads of files have."""

from __future__ import annotations

import re
from email.message import Message
from typing import NamedTuple

from .errors import BadRequest

MAX_PARTS = 32
MAX_PART_HEAD = 8 << 10  # bytes of the headers of a part


class FormField(NamedTuple):
    """One field; a file has a name."""

    content: bytes
    filename: str | None

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


def read_form(body: bytes, content_type: bytes) -> dict[str, FormField]:
    """Return the fields of a body by name. Raises BadRequest."""
    kind = Message()
    kind["content-type"] = content_type.decode("latin-1")
    try:
        boundary = kind.get_param("boundary")
    except ValueError:  # a piece of a parameter (RFC 2231) with a huge number
        boundary = None
    if kind.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise BadRequest("content-type must be multipart/form-data with a boundary", status=415)
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1"), MAX_PARTS + 2)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise BadRequest(f"the form does not end with its boundary, or has more than {MAX_PARTS} fields")
    fields: dict[str, FormField] = {}
    for part in parts[1:-1]:
        head, found, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if not found or len(head) > MAX_PART_HEAD:
            raise BadRequest("a field of the form has no headers, or too long ones")
        name, filename = _names(head.decode(errors="replace"))
        if name in fields:
            raise BadRequest(f"the form has the field {name[:80]!r} twice", name[:80])
        fields[name] = FormField(content, filename)
    return fields


def _names(head: str) -> tuple[str, str | None]:
    """Return the name of a field, and of its file. Raises BadRequest."""
    found = re.search(r"^content-disposition:\s*form-data\s*;(.*)$", head, re.IGNORECASE | re.MULTILINE)
    options = Message()
    options["content-disposition"] = f"form-data;{found[1].strip()}" if found else ""
    try:
        name = options.get_param("name", header="content-disposition")
        filename = options.get_filename()
    except ValueError:  # an encoding of RFC 2231 that is not one, or a part with a huge number
        raise BadRequest("the content-disposition of a field of the form cannot be read") from None
    if not isinstance(name, str):
        raise BadRequest("a field of the form has no name")
    return name, filename and filename.encode("utf-8", "replace").decode()  # UTF-7 can have lone surrogates
