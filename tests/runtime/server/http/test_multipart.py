"""Forms with fields whose headers are hostile: each is read, or refused with its fault."""

from __future__ import annotations

import pytest
from quire.runtime.server.http.errors import BadRequest
from quire.runtime.server.http.multipart import FormField, read_form

TYPE = b"multipart/form-data; boundary=B"


def form(parameters: bytes) -> bytes:
    """Return a form with one field."""
    return b"--B\r\ncontent-disposition: form-data; " + parameters + b"\r\n\r\nabc\r\n--B--\r\n"


def test_a_field_has_its_content_and_the_name_of_its_file() -> None:
    assert read_form(form(b'name="file"; filename="a.jsonl"'), TYPE) == {"file": FormField(b"abc", "a.jsonl")}


@pytest.mark.parametrize("given", [b"punycode''%ff%ff", b"idna''xn--%ff", b"undefined''a", b"\0''a"])
def test_a_file_name_that_its_encoding_cannot_read_is_refused(given: bytes) -> None:
    with pytest.raises(BadRequest, match="content-disposition"):
        read_form(form(b"name=file; filename*=" + given), TYPE)


@pytest.mark.parametrize("given", [b"utf-7''+2AA-", b"unicode_escape''%5cud800"])
def test_a_lone_surrogate_in_a_file_name_is_a_question_mark(given: bytes) -> None:
    assert read_form(form(b"name=file; filename*=" + given), TYPE)["file"].filename == "?"


def test_a_parameter_with_a_huge_number_is_refused() -> None:
    with pytest.raises(BadRequest, match="content-disposition"):
        read_form(form(b"name=file; filename*" + b"9" * 5000 + b"=a"), TYPE)
    with pytest.raises(BadRequest, match="boundary"):
        read_form(form(b"name=file"), b"multipart/form-data; boundary*" + b"9" * 5000 + b"=B")
