"""Quire's options as arguments of a Serve application. Without Ray."""

from __future__ import annotations

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.ray import settings
from quire.runtime.ray.settings import host_links_of, reachable, release_of, settings_of


def test_arguments_are_options_as_text_or_as_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("QUIRE_THREADS", "9")
    found = settings_of({"weights": "q8", "kv_cache_memory": "16M", "threads": 1, "port": "0", "model": None})
    assert (found.engine.weights, found.engine.kv_cache_memory, found.engine.threads) == ("q8", 16_000_000, 1)
    assert (found.engine.max_num_seqs, found.server.port) == (7, 0)
    assert (found.server.listen, found.server.openai_port) == ("0.0.0.0:0", 8001)
    assert settings_of({"listen": "0.0.0.0:7072", "openai_port": 80}).server.openai_port == 80


def test_variables_win_over_the_defaults_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LISTEN", "10.1.2.3:7072")
    monkeypatch.setenv("QUIRE_OPENAI_PORT", "8005")
    found = settings_of({}).server
    assert (found.listen, found.openai_port) == ("10.1.2.3:7072", 8005)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"engine_hosts": "a:1"}, "engine_hosts cannot be an argument on Ray"),
        ({"secret_file": "secret"}, "secret_file cannot be an argument on Ray"),
        ({"in_process": True}, "in_process cannot be an argument on Ray"),
        ({"uds": "/tmp/socket"}, "uds cannot be an argument on Ray"),
        ({"weight": "q8"}, "did you mean"),
        ({"weights": "q9"}, "q9"),
        ({"threads": [1]}, "threads"),
        ({"host_links": "udp"}, "write tcp or handles"),
        ({"host_links": "handles", "listen": "0.0.0.0:7072"}, "listen has no effect with host_links=handles"),
        ({"host_links": "handles", "engine_hosts_ca": "ca.pem"}, "engine_hosts_ca has no effect"),
    ],
)
def test_wrong_arguments_are_refused(args: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings_of(args)


def test_handles_carry_links_only_where_an_argument_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HOST_LINKS", "handles")
    assert [host_links_of(args) for args in ({}, {"host_links": "tcp"}, {"host_links": "handles"})] == [
        *("tcp", "tcp", "handles")
    ]
    assert settings_of({"host_links": "handles", "threads": 3}).engine.threads == 3


def test_a_release_is_the_arguments_in_any_order() -> None:
    assert release_of({"a": 1, "b": [2]}) == release_of({"b": [2], "a": 1})
    assert release_of({"a": 1}) != release_of({"a": 2})


def test_another_version_of_quire_is_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    releases = set()
    for version in ("1.0", "1.1"):
        monkeypatch.setattr(settings, "version", lambda _, version=version: version)
        releases.add(release_of({"a": 1}))
    assert len(releases) == 2


def test_an_address_of_all_interfaces_becomes_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "node_address", lambda: "10.1.2.3")
    assert reachable("0.0.0.0:5") == "10.1.2.3:5"
    assert reachable("[::]:5") == "10.1.2.3:5"
    assert reachable("127.0.0.1:5") == "127.0.0.1:5"
