"""Images of other hosts: fetching from a listed host over TLS, and all refusals."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.server.http import image_urls
from quire.runtime.server.http.errors import BadRequest
from quire.runtime.server.http.image_urls import ImageFetcher

FILES = Path(__file__).resolve().parents[3] / "data" / "tls"
IMAGE = b"\x89PNG" + bytes(range(96))
PNG = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n"
ANSWERS = {  # path -> bytes
    "/cat.png": PNG + b"content-length: 100\r\n\r\n" + IMAGE,
    "/cat.png?size=1&x=%20": PNG + b"content-length: 3\r\n\r\nabc",
    "/chunked": PNG + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "/endless": PNG + b"transfer-encoding: chunked\r\n\r\n" + b"1000\r\n" + bytes(0x1000) + b"\r\n",
    "/missing": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    "/moved": b"HTTP/1.1 302 Found\r\nlocation: https://localhost/cat.png\r\ncontent-length: 0\r\n\r\n",
    "/text": b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi",
    "/packed": PNG + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\nhi",
    "/cut": PNG + b"content-length: 100\r\n\r\nabc",
    "/head": PNG + b"x: " + b"y" * (20 << 10),
    "/lines": PNG + b"x: y\r\n" * 300 + b"content-length: 3\r\n\r\nabc",
    "/empty": b"",
    "/junk": b"SSH-2.0-x\r\n\r\n",
}


class Host:
    """An https server on 127.0.0.1 with a certificate for localhost."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[bytes] = []
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(FILES / "cert.pem", FILES / "key.pem")

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(await reader.readuntil(b"\r\n\r\n"))
        path = self.requests[-1].split()[1].decode()
        try:
            if path == "/silent":
                await reader.read()
            writer.write(ANSWERS.get(path, b""))
            while path == "/endless":
                writer.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def host(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    monkeypatch.setenv("SSL_CERT_FILE", str(FILES / "cert.pem"))
    host = Host()
    server = await host.start()
    yield host
    server.close()


def fetcher_of(host: Host, *more: str, max_bytes: int = 1 << 20) -> ImageFetcher:
    return ImageFetcher(",".join([f"127.0.0.1:{host.port}", f"localhost:{host.port}", *more]), max_bytes)


def body(*urls: Any, kind: str = "image_url") -> dict[str, Any]:
    parts = [{"type": kind, "image_url": url} for url in urls]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, *parts]}]}


def urls_of(values: dict[str, Any]) -> list[Any]:
    return [part["image_url"] for part in values["messages"][0]["content"][1:]]


async def fetched(fetcher: ImageFetcher, values: dict[str, Any]) -> list[Any]:
    await fetcher.fetch(fetcher.remote_images(values))
    return urls_of(values)


async def refusal(fetcher: ImageFetcher, url: str) -> str:
    with pytest.raises(BadRequest) as error:
        await fetched(fetcher, body(url))
    assert error.value.param == "messages"
    assert str(error.value).startswith("messages[0]: content[1]: image_url: ")
    return str(error.value).removeprefix("messages[0]: content[1]: image_url: ")


async def test_images_of_listed_hosts_become_data_urls(host: Host) -> None:
    base = f"https://127.0.0.1:{host.port}"
    name = f"HTTPS://LocalHost:{host.port}"
    values = body({"url": f"{base}/cat.png", "detail": "low"}, f"{name}/cat.png?size=1&x=%20#part", f"{base}/chunked")
    first, second, third = await fetched(fetcher_of(host), values)
    assert first == {"url": f"data:image/png;base64,{base64.b64encode(IMAGE).decode()}", "detail": "low"}
    assert second == third == "data:image/png;base64,YWJj"
    assert host.requests[0].startswith(b"GET /cat.png HTTP/1.1\r\n")
    assert f"host: localhost:{host.port}\r\n".encode() in host.requests[1].lower()


async def test_images_of_a_responses_input_are_found(host: Host) -> None:
    fetcher = fetcher_of(host)
    url = f"https://127.0.0.1:{host.port}/chunked"
    values = {"input": body(url, kind="input_image")["messages"]}
    (image,) = fetcher.remote_images(values)
    assert (image.where, image.field) == ("input[0]: content[1]", "input")
    await fetcher.fetch([image])
    assert values["input"][0]["content"][1]["image_url"] == "data:image/png;base64,YWJj"


def test_images_in_the_output_of_a_call_are_found() -> None:
    output = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "https://a.example/b"}]
    item = {"type": "function_call_output", "call_id": "1", "output": output}
    (image,) = ImageFetcher("a.example", 1).remote_images({"input": [item]})
    assert (image.where, image.fields, image.key) == ("input[0]: output[1]", output[1], "image_url")


@pytest.mark.parametrize(
    ("listed", "url", "host"),
    [
        ("[FD00::0005]:8443", "https://[fd00::5]:8443/a", "fd00::5"),
        ("[fd00:0:0:0:0:0:0:5]:8443", "https://[fd00::5]:8443/a", "fd00::5"),
        ("a.example", "https://A.Example./b", "a.example"),
        ("A.example.", "https://a.example/b", "a.example"),
    ],
)
def test_a_host_may_be_listed_in_any_form(listed: str, url: str, host: str) -> None:
    fetcher = ImageFetcher(listed, 1)
    (image,) = fetcher.remote_images(body(url))
    assert fetcher._allowed(image)[0].host == host


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"messages": "text", "input": "text"},
        {"messages": [None, "text", {"content": None}, {"content": ["text", {"type": []}, {"type": "image_url"}]}]},
        body({"url": 5}, None, 7, "file:///a", "data:image/png;base64,YWJj", {"url": "ftp://a"}),
    ],
)
def test_other_forms_are_left_to_be_refused(values: dict[str, Any]) -> None:
    assert ImageFetcher("a.example", 1).remote_images(values) == []


def test_without_a_list_nothing_is_fetched() -> None:
    assert ImageFetcher(None, 1).remote_images(body("https://a.example/b.png")) == []
    assert ImageFetcher("", 1).remote_images(body("https://a.example/b.png")) == []


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/missing", "127.0.0.1 sent no image: it answered with status 404"),
        ("/moved", "127.0.0.1 sent no image: it answered with status 302; redirects are not followed"),
        ("/text", "127.0.0.1 sent no image: its content type is 'text/html'"),
        ("/packed", "127.0.0.1 sent no image: its content encoding is not identity"),
        ("/cut", "127.0.0.1 sent no image: the connection failed"),
        ("/head", "127.0.0.1 sent no image: the connection failed"),
        ("/lines", "127.0.0.1 sent no image: the connection failed"),
        ("/empty", "127.0.0.1 sent no image: the connection failed"),
        ("/junk", "127.0.0.1 sent no image: the connection failed"),
        ("/endless", "the images of a request may have 8192 bytes in base64"),
    ],
)
async def test_an_answer_that_is_no_image_is_refused(host: Host, path: str, reason: str) -> None:
    fetcher = fetcher_of(host, max_bytes=8192)
    assert await refusal(fetcher, f"https://127.0.0.1:{host.port}{path}") == reason


async def test_all_images_of_a_request_share_the_limit(host: Host) -> None:
    url = f"https://127.0.0.1:{host.port}/cat.png"
    size = len("data:image/png;base64,") + 136
    assert len(await fetched(fetcher_of(host, max_bytes=2 * size), body(url, url))) == 2
    with pytest.raises(BadRequest, match=r"content\[2\]: image_url: the images of a request may have"):
        await fetched(fetcher_of(host, max_bytes=2 * size - 1), body(url, url))


async def test_a_host_that_says_nothing_is_given_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_urls, "TIMEOUT_S", 0.2)
    reason = await refusal(fetcher_of(host), f"https://127.0.0.1:{host.port}/silent")
    assert reason == "the images of a request must arrive within 0.2 s"


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example/a.png",
        "https://localhost/a.png",
        "https://127.0.0.1:1/a.png",
        "https://2130706433:{port}/a.png",
        "https://0x7f.1:{port}/a.png",
        "https://[::ffff:127.0.0.1]:{port}/a.png",
        "https:///a.png",
        "https://localhost.other.example:{port}/a.png",
        "https://localhost\\@other.example:{port}/a.png",
    ],
)
async def test_other_hosts_are_refused(host: Host, url: str) -> None:
    reason = await refusal(fetcher_of(host), url.replace("{port}", str(host.port)))
    assert reason.startswith(("images are not fetched from", "a URL has at most 2048"))
    assert host.requests == []


async def test_nothing_is_fetched_for_a_request_with_an_image_of_another_host(host: Host) -> None:
    values = body(f"https://127.0.0.1:{host.port}/cat.png", "https://other.example/a.png")
    with pytest.raises(BadRequest, match=r"content\[2\]: image_url: images are not fetched from 'other.example'"):
        await fetched(fetcher_of(host), values)
    assert host.requests == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://localhost:99999/", "is no URL"),
        ("http://localhost:{port}/cat.png", "images are fetched by https only"),
        ("HTTP://169.254.169.254/latest", "images are fetched by https only"),
        ("https://localhost:x/", "is no URL"),
        ("https://[::1/", "is no URL"),
        ("https://user@localhost:{port}/", "a URL has at most 2048 printable ASCII characters and no user"),
        ("https://localhost:{port}/a b", "a URL has at most 2048"),
        ("https://localhost:{port}/a\r\nx: y", "a URL has at most 2048"),
        ("https://localhost:{port}/ä", "a URL has at most 2048"),
        ("https://localhost:{port}/" + "a" * 2048, "a URL has at most 2048"),
    ],
)
async def test_a_bad_url_is_refused(host: Host, url: str, reason: str) -> None:
    assert reason in await refusal(fetcher_of(host), url.replace("{port}", str(host.port)))
    assert host.requests == []


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.0", "224.0.0.1", "100.64.0.1", "::1", "fe80::1%eth0"),
        *("fd00::1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "2002:a00:1::1", "2001:0:a00:1::1", "ff0e::1"),
    ],
)
async def test_a_listed_name_with_an_address_that_is_not_public_is_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """This holds even if another address is public: a changing DNS answer cannot lead into the network."""

    async def resolve(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, host.port)) for each in ("93.184.215.14", address)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
    fetcher = ImageFetcher(f"localhost:{host.port}", 1 << 20)
    reason = await refusal(fetcher, f"https://localhost:{host.port}/cat.png")
    assert reason == "localhost has an address that is not public"
    assert host.requests == []


async def test_a_host_must_prove_its_name(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    reason = await refusal(fetcher_of(host), f"https://127.0.0.1:{host.port}/cat.png")
    assert reason == "127.0.0.1 sent no image: its certificate is not valid"


@pytest.mark.parametrize(
    "hosts", ["a.example,", "https://a.example", "a.example/b", "*.example", "a:0", "a:65536", "a b"]
)
def test_a_bad_list_is_refused(hosts: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_image_hosts: .* is no host; hosts are such as"):
        ImageFetcher(hosts, 1)
