"""TLS of the clients: the context for the value of `tls=`."""

from __future__ import annotations

import os
import ssl

from ..common.errors import ConfigError

TLSOption = bool | str | os.PathLike[str] | ssl.SSLContext


def tls_context(tls: TLSOption) -> ssl.SSLContext | None:
    """Return the context for True, a CA file in PEM or a context; None for False. Raises ConfigError."""
    match tls:
        case ssl.SSLContext():
            return tls
        case bool():
            return ssl.create_default_context() if tls else None
        case str() | os.PathLike():
            try:
                return ssl.create_default_context(cafile=tls)
            except OSError as error:
                reason = "it has no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
                raise ConfigError(f"tls: the CA file {os.fspath(tls)!r} cannot be read: {reason}") from error
    raise ConfigError(f"tls must be True, the path of a CA file or an ssl.SSLContext, not {tls!r}")
