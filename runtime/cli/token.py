"""`quire token`: make a key for one tenant and print it once, with the lines that admit it.

The key is written to standard output only; the server's file holds its hash.
"""

from __future__ import annotations

import secrets
from typing import Annotated

from cyclopts import Parameter

from ..server import check_tenant_name, hash_key

KEY_BYTES = 32  # of randomness: too much to try all keys, so the hash need not be slow


def token(tenant: Annotated[str, Parameter(help="Name of the tenant.")], /) -> None:
    """Print a new key. Raises ConfigError if `tenant` is not allowed as a name."""
    print(token_text(tenant))


def token_text(tenant: str) -> str:
    """Return a new key and the lines that admit it. Raises ConfigError if `tenant` is not allowed as a name."""
    check_tenant_name(tenant)
    key = "quire_" + secrets.token_urlsafe(KEY_BYTES)  # a prefix that secret scanners find; never a flag
    return f"""\
key for the client, not shown again:

{key}

lines for the file of --auth-tokens; a further key of the same tenant goes into the list:

[{tenant}]
keys = ["{hash_key(key).hex()}"]"""
