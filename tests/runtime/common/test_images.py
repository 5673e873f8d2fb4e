"""Images in messages: their bytes apart from the messages, and refusals that name the part."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.images import count_image_parts, extract_images
from quire.runtime.common.prompts import chat_messages

URL = f"data:image/png;base64,{base64.b64encode(b'abc').decode()}"
BARE = {"type": "image"}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_images_are_taken_in_order() -> None:
    text = {"type": "text", "text": "and"}
    messages = [
        *user(
            {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, text, {"type": "image", "image": b"x"}
        ),
        {"role": "assistant", "content": "hm"},
        *user({"type": "image_url", "image_url": URL}),
    ]
    bare, images = extract_images(messages)
    assert images == (b"abc", b"x", b"abc")
    assert bare == [*user(BARE, text, BARE), {"role": "assistant", "content": "hm"}, *user(BARE)]
    assert chat_messages(bare)[0]["content"] == [BARE, text, BARE]
    assert count_image_parts(chat_messages(bare)) == 3
    assert messages[0]["content"][2] == {"type": "image", "image": b"x"}, "the caller's messages stay as they are"


def test_the_header_of_a_data_url_has_any_case() -> None:
    url = URL.replace("data:image/png;base64", "DATA:Image/PNG;Base64")
    assert extract_images(user({"type": "image_url", "image_url": url}))[1] == (b"abc",)


@pytest.mark.parametrize(
    "messages", [None, "x", 5, [], [5], [{"role": "user"}], [{"content": 5}], user("x", 5, {"type": 5}, {"type": [1]})]
)
def test_other_forms_are_left_alone(messages: Any) -> None:
    assert extract_images(messages) == (messages, ())


def test_texts_are_joined_without_images() -> None:
    parts = user({"type": "text", "text": "a"}, {"type": "text", "text": "b"})
    assert chat_messages(parts)[0]["content"] == "a\nb"


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_other_roles_have_no_images(role: str) -> None:
    with pytest.raises(InvalidRequest, match=f"messages of the roles user and tool may have images, not '{role}'"):
        chat_messages([{"role": role, "content": [BARE]}])


REFUSED = {
    "a remote URL": ("https://example.org/cat.png", "not fetched from other hosts"),
    "a file": ("file:///etc/passwd", "not fetched from other hosts"),
    "no base64": ("data:image/png,abc", "must begin as data:image/png;base64"),
    "no image": ("data:text/plain;base64,YWJj", "must begin as data:image/png;base64"),
    "no data": ("data:image/png;base64", "must begin as data:image/png;base64"),
    "other characters": ("data:image/png;base64,YW*Jj", "is not base64"),
    "cut": ("data:image/png;base64,YWJ", "is not base64"),
    "not ASCII": ("data:image/png;base64,YWJé", "is not base64"),
    "no text": (5, "image_url must be such as"),
    "absent": (None, "image_url must be such as"),
}


@pytest.mark.parametrize(("url", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_another_url_is_refused(url: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"messages\[0\]: content\[1\].*{reason}"):
        extract_images(user({"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}))


def test_other_details_and_images_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="detail must be one of auto, low, high, not 'huge'"):
        extract_images(user({"type": "image_url", "image_url": {"url": URL, "detail": "huge"}}))
    for image in ("x", None, [1], 5):
        with pytest.raises(InvalidRequest, match="image must be the bytes of an image file"):
            extract_images(user({"type": "image", "image": image}))
