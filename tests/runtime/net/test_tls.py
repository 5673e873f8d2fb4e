"""Bad certificates are refused before anything listens. The files in tests/data/tls are for tests only."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.net.tls import TLS
from structlog.testing import capture_logs

FILES = Path(__file__).resolve().parents[2] / "data" / "tls"
CERT = str(FILES / "cert.pem")
KEY = str(FILES / "key.pem")


def test_only_safe_versions_and_options() -> None:
    context = TLS(CERT, KEY).context
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_COMPRESSION


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tls_cert": CERT}, "tls_cert is set without tls_key"),
        ({"tls_key": KEY}, "tls_key is set without tls_cert"),
        ({"tls_cert": CERT, "tls_key": KEY, "uds": "/tmp/x"}, "no use for a unix socket"),
        ({"tls_cert": "/nowhere", "tls_key": KEY}, "tls_cert /nowhere cannot be read: No such file"),
        ({"tls_cert": CERT, "tls_key": "/"}, "tls_key / cannot be read: Is a directory"),
        ({"tls_cert": KEY, "tls_key": KEY}, "are not a PEM certificate and its key"),
        ({"tls_cert": CERT, "tls_key": CERT}, "are not a PEM certificate and its key"),
        ({"tls_cert": CERT, "tls_key": str(FILES / "other_key.pem")}, "is not the key of the certificate"),
        ({"tls_cert": CERT, "tls_key": str(FILES / "encrypted_key.pem")}, "is encrypted"),
    ],
)
def test_a_bad_certificate_or_key_is_a_config_error(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TLS.of(ServerConfig(**settings))  # type: ignore[arg-type]


def test_without_settings_there_is_no_tls() -> None:
    assert TLS.of(ServerConfig()) is None


async def test_broken_files_are_not_reloaded(tmp_path: Path) -> None:
    cert, key = (Path(shutil.copy(path, tmp_path)) for path in (CERT, KEY))
    tls = TLS(str(cert), str(key))
    first = tls.context
    with capture_logs() as logs:
        await tls.reload()
        assert (second := tls.context) is not first
        shutil.copy(FILES / "other_key.pem", key)
        await tls.reload()
    assert tls.context is second
    assert [entry["event"] for entry in logs] == ["certificate reloaded", "certificate not reloaded"]
    assert "is not the key" in logs[1]["reason"]
