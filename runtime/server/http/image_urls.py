"""Images of other hosts in requests of OpenAI's HTTP API: they become data URLs before a request is read.

Without a list of hosts no image is fetched. Only https is used, to hosts that prove their name with a certificate, and
redirects are not followed. A host with an address that is not public is refused, so that a listed name cannot lead into
the server's own network, unless the list has that address.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import h11

from ...common.errors import ConfigError
from ...common.prompts import shown
from ...net.http_input import check_head
from .errors import BadRequest

WEB = ("https://", "http://")
PORT = 443
MAX_URL = 2048  # characters
MAX_HEAD = 16 << 10  # bytes of an answer before its body
READ_BYTES = 64 << 10
TIMEOUT_S = 10.0  # limit for all images of a request
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_KINDS = ("image_url", "input_image", "image")  # types of parts; the last one has a `source`
_MEDIA_TYPE = re.compile(r"image/[a-z0-9.+-]{1,40}")
_HOST = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?")


class Source(NamedTuple):
    """A host and a port, from an entry of the list or from a URL."""

    host: str  # lower-case host; an IPv6 address in its shortest form, without brackets
    port: int


class RemoteImage(NamedTuple):
    """An https URL in a part of a message, `fields[key]`."""

    field: str  # field of the request's body
    where: str
    fields: dict[str, Any]
    key: str


class ImageFetcher:
    """Fetches the images of requests from listed hosts."""

    def __init__(self, hosts: str | None, max_bytes: int) -> None:
        """Take hosts separated by commas, and the most bytes of the images of a request. Raises ConfigError."""
        self.max_bytes = max_bytes
        self._sources = {_listed(entry.strip()) for entry in hosts.split(",")} if hosts else set()
        self._tls = ssl.create_default_context() if self._sources else None

    def remote_images(self, body: Mapping[str, Any]) -> list[RemoteImage]:
        """Return the web URLs in a body's messages, or in the items of its input; none without a list of hosts."""
        return [*_remote_images(body, "messages"), *_remote_images(body, "input")] if self._sources else []

    async def fetch(self, images: list[RemoteImage]) -> int:
        """Replace URLs by data URLs, in place; return their bytes. Raises BadRequest that names the part."""
        left = self.max_bytes
        allowed = [self._allowed(image) for image in images]  # all are checked before one is fetched
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for image, (source, target) in zip(images, allowed, strict=True):
                    url = await self._data_url(image, source, target, left)
                    left -= len(url)
                    if left < 0:
                        raise _refused(image, f"the images of a request may have {self.max_bytes} bytes in base64")
                    image.fields[image.key] = url
        except TimeoutError:
            raise _refused(image, f"the images of a request must arrive within {TIMEOUT_S:g} s") from None
        return self.max_bytes - left

    def _allowed(self, image: RemoteImage) -> tuple[Source, str]:
        """Return the source of an image and the target of the request to it. Raises BadRequest."""
        url = image.fields[image.key]
        try:
            parts = urlsplit(url)
            source = Source(_host(parts.hostname or ""), PORT if parts.port is None else parts.port)
        except ValueError:
            raise _refused(image, f"{shown(url)} is no URL") from None
        if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url or "@" in parts.netloc:
            raise _refused(
                image, f"a URL has at most {MAX_URL} printable ASCII characters and no user, unlike {shown(url)}"
            )
        if parts.scheme != "https":
            raise _refused(image, "images are fetched by https only")
        if source not in self._sources:
            raise _refused(image, f"images are not fetched from {shown(parts.netloc)}; send a data URL")
        return source, f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"

    async def _data_url(self, image: RemoteImage, source: Source, target: str, max_bytes: int) -> str:
        """Return an image as a data URL, cut after `max_bytes` or more. Raises BadRequest or TimeoutError."""
        writer = None
        try:
            address = await self._address(image, source)
            reader, writer = await asyncio.open_connection(
                address, source.port, ssl=self._tls, server_hostname=source.host, ssl_handshake_timeout=TIMEOUT_S
            )
            return await _get(image, source, target, reader, writer, max_bytes)
        except (OSError, UnicodeError, h11.RemoteProtocolError) as error:
            if isinstance(error, TimeoutError):
                raise
            kind = "its certificate is not valid" if isinstance(error, ssl.SSLError) else "the connection failed"
            raise _refused(image, f"{source.host} sent no image: {kind}") from None
        finally:
            if writer is not None:
                writer.transport.abort()

    async def _address(self, image: RemoteImage, source: Source) -> str:
        """Return the first address of a host, all of which are public or listed. Raises BadRequest or OSError."""
        found = await asyncio.get_running_loop().getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in found]
        for address in addresses:
            if not (_is_public(address) or any(address == listed.host for listed in self._sources)):
                raise _refused(image, f"{source.host} has an address that is not public")
        return addresses[0]


async def _get(
    image: RemoteImage,
    source: Source,
    target: str,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    max_bytes: int,
) -> str:
    """Return a host's image as a data URL. Raises BadRequest, OSError or RemoteProtocolError."""
    http = h11.Connection(h11.CLIENT, MAX_HEAD)
    host = f"[{source.host}]" if ":" in source.host else source.host
    headers = [("host", host if source.port == PORT else f"{host}:{source.port}"), ("accept", "image/*")]
    headers += [("accept-encoding", "identity"), ("connection", "close"), ("user-agent", "quire")]
    writer.write(http.send(h11.Request(method="GET", target=target, headers=headers)) or b"")
    http.send(h11.EndOfMessage())
    content = bytearray()
    media_type = ""
    while True:
        if not media_type:
            check_head(http, MAX_HEAD)
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Response):
            media_type = _media_type(image, source, event)
        elif isinstance(event, h11.Data):
            content += event.data
            if len(content) > max_bytes:  # more than the base64 may have
                return _data_url(media_type, content)
        elif isinstance(event, h11.EndOfMessage):
            return _data_url(media_type, content)
        elif not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("the connection ended before the image")


def _data_url(media_type: str, content: bytearray) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _media_type(image: RemoteImage, source: Source, answer: h11.Response) -> str:
    """Return the media type of an answer. Raises BadRequest if it is not an image."""
    if answer.status_code != 200:
        redirects = "; redirects are not followed" if 300 <= answer.status_code < 400 else ""
        raise _refused(image, f"{source.host} sent no image: it answered with status {answer.status_code}{redirects}")
    headers = dict(answer.headers)
    media_type = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise _refused(image, f"{source.host} sent no image: its content encoding is not identity")
    if not _MEDIA_TYPE.fullmatch(media_type):
        raise _refused(image, f"{source.host} sent no image: its content type is {shown(media_type)}")
    return media_type


def _remote_images(body: Mapping[str, Any], field: str) -> Iterator[RemoteImage]:
    """Yield the web URLs in the parts of messages and of outputs of calls."""
    messages = body.get(field)
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        yield from _images_in(message, field, f"{field}[{number}]: ")


def _images_in(holder: object, field: str, where: str) -> Iterator[RemoteImage]:
    """Yield the web URLs in the parts of a message, or of a result within it."""
    for name in ("content", "output"):
        parts = holder.get(name) if isinstance(holder, dict) else None
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            if not isinstance(part, dict):
                continue
            place = f"{where}{name}[{index}]"
            if part.get("type") == "tool_result":
                yield from _images_in(part, field, f"{place}.")
            if part.get("type") not in _KINDS:
                continue
            url = part.get("source" if part["type"] == "image" else "image_url")
            fields, key = (url, "url") if isinstance(url, dict) else (part, "image_url")
            if isinstance(fields.get(key), str) and fields[key][:8].lower().startswith(WEB):
                yield RemoteImage(field, place, fields, key)


def _listed(entry: str) -> Source:
    """Return the source that an entry of the list names. Raises ConfigError."""
    found = _HOST.fullmatch(entry)
    port = int(found["port"] or PORT) if found is not None else 0
    if found is None or not 1 <= port <= 65_535:
        raise ConfigError(
            f"allowed_image_hosts: {entry!r} is no host; hosts are such as images.example.com, example.com:8443, "
            "10.0.0.5 or [fd00::5], separated by commas"
        )
    return Source(_host(found["host"].strip("[]")), port)


def _host(name: str) -> str:
    """Return a host as `Source` has it; an address in the form in which a resolver returns it."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name.lower().rstrip(".")


def _is_public(address: str) -> bool:
    """Return whether an address is public; an IPv6 address that embeds an IPv4 address is judged by the latter."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.teredo is not None:
            return False
        nat64 = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF) if parsed in NAT64 else None
        parsed = parsed.ipv4_mapped or parsed.sixtofour or nat64 or parsed
    return parsed.is_global and not parsed.is_multicast


def _refused(image: RemoteImage, reason: str) -> BadRequest:
    return BadRequest(f"{image.where}: image_url: {reason}", image.field)
