"""Keyrings: the file of tenants, its errors and its reload, and the comparison with every key."""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from quire.runtime.cli.token import new_key
from quire.runtime.common.errors import ConfigError, Overloaded, Unauthenticated
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.settings import read_toml
from quire.runtime.protocol.frames import MIN_FRAME_BYTES
from quire.runtime.server.memory_limits import MemoryLimits
from quire.runtime.server.tenancy import auth
from quire.runtime.server.tenancy.auth import Keyring, hash_key
from structlog.testing import capture_logs

A, B = hash_key("key a").hex(), hash_key("key b").hex()
Write = Callable[[str], Path]


def accept(num_tenants: int) -> None:
    """Allow any number of tenants."""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "tokens.toml"
        path.write_text(text)
        path.chmod(0o600)
        return path

    return write


def test_each_key_belongs_to_its_tenant(write: Write) -> None:
    keyring = Keyring.load(write(f'[acme]\nkeys = ["{A}"]\nrequests_per_minute = 60\n[lab]\nkeys = ["{B}"]\n'))
    acme = keyring.authenticate("key a")
    lab = keyring.authenticate("key b")
    assert (acme.name, lab.name) == ("acme", "lab")
    assert acme.limits.requests_per_minute == 60
    assert keyring.authenticate("key a") is acme


@pytest.mark.parametrize("token", [None, "", "key", "key A", "key a ", A, "\ud800", "x" * 100_000])
def test_any_other_token_is_refused(write: Write, token: str | None) -> None:
    for keyring in (Keyring.load(write(f'[acme]\nkeys = ["{A}"]')), Keyring.single("key a")):
        with pytest.raises(Unauthenticated):
            keyring.authenticate(token)


def test_one_token_is_one_tenant_without_a_name() -> None:
    assert Keyring.single("t").authenticate("t").name == ""


def test_without_keys_every_connection_is_admitted() -> None:
    assert Keyring.none().authenticate(None).name == ""
    assert Keyring.none().authenticate("t").name == ""


def test_a_token_is_compared_with_every_key(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = Keyring.load(write(f'[a]\nkeys = ["{A}"]\n[b]\nkeys = ["{B}"]'))
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def compare_digest(key_hash: bytes, presented: bytes) -> bool:
        compared.append(key_hash)
        return compare(key_hash, presented)

    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    keyring.authenticate("key a")
    assert [key_hash.hex() for key_hash in compared] == [A, B]


def test_the_settings_choose_the_keyring(write: Write) -> None:
    path = str(write(f'[acme]\nkeys = ["{A}"]'))
    assert Keyring.of(ServerConfig()).authenticate(None).name == ""
    assert Keyring.of(ServerConfig(auth_tokens=path)).authenticate("key a").name == "acme"
    with pytest.raises(Unauthenticated):
        Keyring.of(ServerConfig(token="t")).authenticate(None)
    with pytest.raises(ConfigError, match="exclude each other"):
        Keyring.of(ServerConfig(token="t", auth_tokens=path))
    with pytest.raises(ConfigError, match="token is empty"):
        Keyring.of(ServerConfig(token=""))


BAD_FILES = {
    "": "names no tenant",
    "[acme": "cannot be read: ",
    f'keys = ["{A}"]': "tenant 'keys' in .* must be a table",
    "[acme]": "keys of tenant 'acme' in .*: allowed is a list of sha256 hashes, 64 hex digits each",
    "[acme]\nkeys = []": "64 hex digits",
    f'[acme]\nkeys = "{A}"': "64 hex digits",
    '[acme]\nkeys = ["the key itself"]': "64 hex digits",
    f'[acme]\nkeys = ["{A}", 3]': "64 hex digits",
    f'["a b"]\nkeys = ["{A}"]': "tenant 'a b' in .*: a name is 1 to 64 of",
    f'["{"x" * 65}"]\nkeys = ["{A}"]': "a name is 1 to 64 of",
    f'[a]\nkeys = ["{A}"]\n[b]\nkeys = ["{A}"]': "tenants 'a' and 'b' share a key",
    f'[acme]\nkeys = ["{A}"]\nmax_concurrent_requests = 0': (
        "'max_concurrent_requests' of tenant 'acme' in .* must be a whole number from 1 to 1000000000, not 0"
    ),
    f'[acme]\nkeys = ["{A}"]\nrequests_per_minute = 1.5': "'requests_per_minute' of .* whole number .*, not 1.5",
    f'[acme]\nkeys = ["{A}"]\nrequests_per_minute = true': "must be a whole number .*, not True",
    f'[acme]\nkeys = ["{A}"]\nburst = 3': "burst of tenant 'acme' in .* needs requests_per_minute",
    f'[acme]\nkeys = ["{A}"]\nrequests_per_second = 3': (
        r"'requests_per_second' of tenant 'acme' in .* is not an option \(did you mean 'requests_per_minute'\?\)"
    ),
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_file_says_what_is_allowed(write: Write, text: str) -> None:
    with pytest.raises(ConfigError, match=BAD_FILES[text]) as error:
        Keyring.load(write(text))
    assert "tokens.toml" in str(error.value)
    assert "the key itself" not in str(error.value)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^the file of keys \S+none\.toml cannot be read: No such file or directory$"
    ):
        Keyring.load(tmp_path / "none.toml")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True), (0o620, True)])
def test_a_file_that_other_users_can_read_or_write_is_logged(write: Write, mode: int, warned: bool) -> None:
    path = write(f'[acme]\nkeys = ["{A}"]')
    path.chmod(mode)
    with capture_logs() as logs:
        keyring = Keyring.load(path)
        assert not logs, "a server reads the file more than once"
        keyring.check_permissions()
    assert [entry["event"] for entry in logs] == [
        "auth tokens can be read or changed by other users; run chmod 600"
    ] * warned


def test_a_new_key_is_admitted_by_the_lines_printed_with_it(write: Write) -> None:
    key, lines = new_key("lab-1")
    assert len(key) == len("quire_") + 43
    assert Keyring.load(write(lines)).authenticate(key).name == "lab-1"
    assert new_key("lab-1")[0] != key


def test_no_key_is_made_for_a_bad_name() -> None:
    with pytest.raises(ConfigError, match="a name is 1 to 64"):
        new_key("lab 1")


# Reload


async def test_a_reload_applies_new_keys_and_limits_and_keeps_tenants_and_their_counts(write: Write) -> None:
    keyring = Keyring.load(write(f'[acme]\nkeys = ["{A}"]\nmax_concurrent_requests = 2'))
    acme = keyring.authenticate("key a")
    acme.enter()
    write(f'[acme]\nkeys = ["{B}"]\nmax_concurrent_requests = 1')
    await keyring.reload(accept)
    assert keyring.authenticate("key b") is acme
    with pytest.raises(Unauthenticated):
        keyring.authenticate("key a")
    with pytest.raises(Overloaded):
        acme.enter()


async def test_a_tenant_that_is_gone_is_revoked(write: Write) -> None:
    keyring = Keyring.load(write(f'[acme]\nkeys = ["{A}"]\n[lab]\nkeys = ["{B}"]'))
    acme = keyring.authenticate("key a")
    lab = keyring.authenticate("key b")
    write(f'[lab]\nkeys = ["{B}"]')
    await keyring.reload(accept)
    assert (acme.revoked, lab.revoked) == (True, False)


@pytest.mark.parametrize("text", ["[acme", "", f'[lab]\nkeys = ["{B}"]\n[acme]\nkeys = ["{A}"]\nburst = 0'])
async def test_a_broken_file_changes_nothing_and_is_logged(write: Write, text: str) -> None:
    keyring = Keyring.load(write(f'[acme]\nkeys = ["{A}"]\nrequests_per_minute = 60'))
    acme = keyring.authenticate("key a")
    write(text)
    with capture_logs() as logs:
        await keyring.reload(accept)
    assert [entry["event"] for entry in logs] == ["auth tokens not reloaded"]
    assert "tokens.toml" in logs[0]["reason"]
    assert keyring.authenticate("key a") is acme
    assert acme.limits.requests_per_minute == 60
    acme.enter()


async def test_more_tenants_than_memory_allows_change_nothing(write: Write) -> None:
    keyring = Keyring.load(write(f'[acme]\nkeys = ["{A}"]'))
    write(f'[acme]\nkeys = ["{B}"]\n[lab]\nkeys = ["{A}"]')
    limits = MemoryLimits(ServerConfig(max_text_bytes=MIN_FRAME_BYTES))
    with capture_logs() as logs:
        await keyring.reload(lambda num_tenants: limits.check(num_tenants, 1 << 60))
    assert "max_text_bytes is 65536 bytes; allowed: at least 131072" in logs[0]["reason"]
    assert (keyring.authenticate("key a").name, keyring.num_tenants) == ("acme", 1)


async def test_the_event_loop_goes_on_while_the_file_is_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = Keyring.load(write(f'[acme]\nkeys = ["{A}"]'))
    write(f'[acme]\nkeys = ["{B}"]')
    entered = threading.Event()
    gate = threading.Event()

    def slow_read(path: Path, what: str) -> dict[str, object]:
        entered.set()
        assert gate.wait(60)
        return read_toml(path, what)

    monkeypatch.setattr(auth, "read_toml", slow_read)
    reloading = asyncio.create_task(keyring.reload(accept))
    assert await asyncio.to_thread(entered.wait, 60)
    assert keyring.authenticate("key a").name == "acme"
    gate.set()
    await reloading
    assert keyring.authenticate("key b").name == "acme"


async def test_a_reload_without_a_file_does_nothing() -> None:
    await Keyring.single("t").reload(accept)
