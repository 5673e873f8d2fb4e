"""Images in the messages of a chat: their encoded bytes, apart from the messages.

Messages with images have parts `{"type": "image"}` in their content; the images are kept separately, in that order.
Functions raise InvalidRequest, which names the part and what is allowed.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .errors import InvalidRequest
from .prompts import IMAGE, PLACE, shown

MAX_IMAGES = 256  # images of one request, whatever the model
DATA_URL = "data:image/png;base64,…"
DETAILS = ("auto", "low", "high")  # every image gets the resolution that its model was trained for
IMAGE_PART: dict[str, Any] = {"type": IMAGE}


def extract_images(messages: object, place: Callable[[int], str] = PLACE) -> tuple[object, tuple[bytes, ...]]:
    """Return the messages with bare image parts, and the encoded images in order.

    An image is `{"type": "image", "image": bytes}` or OpenAI's `{"type": "image_url", "image_url": {"url": …}}` with a
    data URL. Messages of another form are returned as they are, for `chat_messages` to refuse.
    """
    if not isinstance(messages, list | tuple):
        return messages, ()
    images: list[bytes] = []
    bare = [_extract(each, place(index), images) for index, each in enumerate(messages)]
    return (bare, tuple(images)) if images else (messages, ())


def count_image_parts(messages: Iterable[object]) -> int:
    """Return the number of image parts in messages of any form."""
    return sum(_kind(part) == IMAGE for message in messages for part in _parts(message))


def _extract(message: object, where: str, images: list[bytes]) -> object:
    """Return the message with bare image parts, after their bytes are added to `images`."""
    parts = list(_parts(message))
    if not isinstance(message, Mapping) or not any(_kind(part) in _READERS for part in parts):
        return message
    content = []
    for index, part in enumerate(parts):
        read = _READERS.get(_kind(part))
        if read is not None:
            images.append(read(part, f"{where}: content[{index}]"))
            part = IMAGE_PART
        content.append(part)
    return {**message, "content": content}


def _parts(message: object) -> Iterator[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list | tuple):
        yield from content


def _kind(part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _image_bytes(part: Mapping[str, Any], where: str) -> bytes:
    image = part.get("image")
    if not isinstance(image, bytes | bytearray | memoryview):
        raise InvalidRequest(f"{where}: image must be the bytes of an image file, not {shown(image)}")
    return bytes(image)


def _data_url_bytes(part: Mapping[str, Any], where: str) -> bytes:
    given = part.get("image_url")
    fields = given if isinstance(given, Mapping) else {"url": given}
    detail = fields.get("detail")
    if detail is not None and detail not in DETAILS:
        raise InvalidRequest(f"{where}: detail must be one of {', '.join(DETAILS)}, not {shown(detail)}")
    url = fields.get("url")
    if not isinstance(url, str):
        raise InvalidRequest(f'{where}: image_url must be such as {{"url": "{DATA_URL}"}}, not {shown(given)}')
    if url[:5].lower() != "data:":
        raise InvalidRequest(
            f"{where}: image_url must be a data URL such as {DATA_URL}; images are not fetched from other hosts"
        )
    header, comma, data = url.partition(",")
    if not comma or header[5:11].lower() != "image/" or not header.lower().endswith(";base64"):
        raise InvalidRequest(f"{where}: image_url must begin as {DATA_URL} does, not with {shown(header)}")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{where}: the data of image_url is not base64: {error}") from None


_READERS = {IMAGE: _image_bytes, "image_url": _data_url_bytes}
