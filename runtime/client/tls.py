"""TLS of the clients: the context that `tls=` asks for, and errors that say what to do about a failed handshake."""

from __future__ import annotations

import os
import ssl

from ..common.errors import ConfigError, TLSError
from ..net.address import Address

TLSOption = bool | str | os.PathLike[str] | ssl.SSLContext
OTHER_NAME = (62, 64)  # OpenSSL's codes of a certificate for another host name or IP address
EXPIRED = 10


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


def tls_error(address: Address | str, error: ssl.SSLError) -> TLSError:
    """Return the error of a handshake that cannot succeed by a retry, with advice."""
    reason = getattr(error, "reason", None) or str(error)  # only OpenSSL sets it
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message.rstrip(".")
        advice = "pass the file of its CA, or of the certificate itself, as tls="
        if error.verify_code in OTHER_NAME:
            advice = "connect by a name in the certificate"
        elif error.verify_code == EXPIRED:
            advice = "renew it"
        return TLSError(f"the certificate of {address} is not trusted: {reason}; {advice}")
    advice = "; the server may not use TLS: leave out tls=" if reason == "WRONG_VERSION_NUMBER" else ""
    return TLSError(f"no TLS connection to {address}: {reason}{advice}")
