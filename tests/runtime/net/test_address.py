"""The three forms of an address; other texts are refused."""

from __future__ import annotations

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.net.address import Address, TCPAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7070", TCPAddress("127.0.0.1", 7070)),
        ("example.org:1", TCPAddress("example.org", 1)),
        ("[::1]:65535", TCPAddress("::1", 65535)),
        ("unix:/run/quire.sock", UnixAddress("/run/quire.sock")),
        ("unix:relative.sock", UnixAddress("relative.sock")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "localhost", ":7070", "host:", "host:0", "host:65536", "host:-1", "host:+1", "host:1e3", "host:٣",
        "::1:7070", "[::1]", "[]:7070", "[host]:7070", "unix:", "unix:\0", "host:70 ",
        "a..b:7070", ".example.org:7070", "x" * 64 + ".org:7070", "\ud800:7070", "a\0b:7070",
    ],
)  # fmt: skip
def test_other_texts_are_refused_with_the_allowed_forms(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write host:port, \[v6\]:port or unix:/path"):
        parse_address(text)
