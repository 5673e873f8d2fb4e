"""TLS for the clients' TCP port, from two PEM files.

A context is made only from a certificate and a key that match. Clients authenticate with tokens, not with
certificates.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import NoReturn

import structlog

from ..common.errors import ConfigError
from ..common.server_config import ServerConfig

_log = structlog.get_logger("quire.server")


class TLS:
    """A server-side context of TLS 1.2 or later, with the certificate and key of two files; `reload` replaces it."""

    def __init__(self, cert: str, key: str) -> None:
        """Read the files. Raises ConfigError."""
        self._files = cert, key
        self.context = _context(cert, key)

    @classmethod
    def of(cls, config: ServerConfig) -> TLS | None:
        """Return the context of `tls_cert` and `tls_key`, None without them. Raises ConfigError."""
        match config.tls_cert, config.tls_key:
            case None, None:
                return None
            case None, _:
                raise ConfigError("tls_key is set without tls_cert; set both, or none")
            case _, None:
                raise ConfigError("tls_cert is set without tls_key; set both, or none")
        if config.uds is not None:
            raise ConfigError("tls_cert has no use for a unix socket (`uds`); leave one of them out")
        return cls(str(config.tls_cert), str(config.tls_key))

    async def reload(self) -> None:
        """Read the files again in a thread, for later connections. Broken files change nothing but the log."""
        try:
            self.context = await asyncio.to_thread(_context, *self._files)
        except ConfigError as error:
            _log.error("certificate not reloaded", reason=str(error))
            return
        _log.info("certificate reloaded", path=self._files[0])


def _context(cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    for flag, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    try:
        context.load_cert_chain(cert, key, password=_refuse_encrypted)
    except ssl.SSLError as error:
        raise ConfigError(_diagnosis(cert, key, error)) from error
    return context


def _diagnosis(cert: str, key: str, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"tls_key {key} is not the key of the certificate in tls_cert {cert}"
    return (
        f"tls_cert {cert} and tls_key {key} are not a PEM certificate and its key: {error.reason or error}; "
        "allowed: a certificate, then those it is signed by, and an unencrypted private key"
    )


def _refuse_encrypted() -> NoReturn:
    """Raise ConfigError where OpenSSL would ask for a password on the terminal."""
    raise ConfigError("tls_key is encrypted; allowed: an unencrypted private key, readable by the server only")
