"""`quire token`: a new key for one tenant, shown once, and the lines that admit it.

One invariant: the key itself is written nowhere but to standard output; a server's file holds its hash only.
"""

from __future__ import annotations

import secrets

from ..server import check_tenant_name, hash_key

KEY_BYTES = 32  # of randomness: no number of guesses finds a key, so its hash need not be slow


def token_text(tenant: str) -> str:
    """Raises ConfigError for a name that a tenant cannot have."""
    check_tenant_name(tenant)
    key = "quire_" + secrets.token_urlsafe(KEY_BYTES)  # what scanners for leaked secrets can know, and never a flag
    return f"""\
key, for the client; it is not shown again:

{key}

for the file of --auth-tokens; another key of the same tenant goes into its list:

[{tenant}]
keys = ["{hash_key(key).hex()}"]"""
