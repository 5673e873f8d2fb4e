"""The user of a listening program, beside sockets of this process."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from quire.runtime.net import listening_user as module
from quire.runtime.net.listening_user import listening_user


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")])
def test_a_listening_socket_belongs_to_its_user(family: int, address: str) -> None:
    with socket.create_server((address, 0), family=family) as listening:
        assert listening_user(listening.getsockname()[1]) == os.getuid()


def test_a_port_without_a_listening_socket_belongs_to_no_one() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert listening_user(bound.getsockname()[1]) is None


def test_sockets_at_one_port_of_several_users_belong_to_no_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = " 0: {}:1F40 00000000:0000 {} 00000000:00000000 00:00000000 00000000 {} 0 1 1 0 100 0 0 10 0\n"
    table = tmp_path / "tcp"
    monkeypatch.setattr(module, "TABLES", (table, tmp_path / "missing"))
    table.write_text("head\n" + row.format("0100007F", "0A", 5) + row.format("0200007F", "0A", 6))
    assert listening_user(8000) == 5
    table.write_text(table.read_text() + row.format("00000000", "01", 7) + row.format("0" * 32, "0A", 8))
    assert listening_user(8000) is None
