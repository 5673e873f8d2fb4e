"""`quire token`: make a key for one tenant and print it once, with the lines that admit it.

The lines are TOML on standard output, for `>> tokens.toml`; the key is on standard error. The server's file holds its
hash only.
"""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

from cyclopts import Parameter

from ..server import check_tenant_name, hash_key

KEY_BYTES = 32  # random bytes: too many for a brute-force search, so the hash need not be slow


def token(tenant: Annotated[str, Parameter(help="Name of the tenant.")], /) -> None:
    """Print a new key. Raises ConfigError if `tenant` is not allowed as a name."""
    key, lines = new_key(tenant)
    print(lines, flush=True)
    print(f"key for the client, not shown again; the lines above admit it: {key}", file=sys.stderr)


def new_key(tenant: str) -> tuple[str, str]:
    """Return a new key and the lines of TOML that admit it. Raises ConfigError if the name is not allowed."""
    check_tenant_name(tenant)
    key = "quire_" + secrets.token_urlsafe(KEY_BYTES)  # a prefix that secret scanners find; never a flag
    return key, f'[{tenant}]\nkeys = ["{hash_key(key).hex()}"]  # a further key of this tenant goes into the list'
