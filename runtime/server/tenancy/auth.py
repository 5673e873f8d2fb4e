"""`Keyring`: finds the tenant of the token in a HELLO.

Only hashes of keys are held. Keys are random (`quire token` makes them), so sha256 is as good as a slow hash.
`authenticate` takes the same time for every key. Must not import connections.

A file of `auth_tokens` has one table per tenant, in which only `keys` is required:

    [acme]
    keys = ["<sha256 of a key, 64 hex digits>"]
    max_concurrent_requests = 32
    requests_per_minute = 600
    burst = 60
    operator = false
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import structlog

from ...common.errors import ConfigError, Unauthenticated
from ...common.server_config import ServerConfig
from ...common.settings import convert_table, read_toml
from .tenants import Tenant, TenantLimits

_TENANT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")

_log = structlog.get_logger("quire.server")


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def check_tenant_name(name: str, where: str = "") -> None:
    """Raise ConfigError unless `name` can stand in logs and metrics, and as a bare key of TOML."""
    if not _TENANT_NAME.fullmatch(name):
        raise ConfigError(f"tenant {name!r}{where}: a name is 1 to 64 of A-Z a-z 0-9 _ -")


class Keyring:
    """The keys of one server's clients. Made by `of`, `load`, `single` or `none`."""

    def __init__(
        self, keys: Mapping[bytes, Tenant], default_tenant: Tenant | None = None, path: Path | None = None
    ) -> None:
        self._keys = dict(keys)  # sha256 -> its tenant
        self._default_tenant = default_tenant
        self._path = path
        self._num_tenants = _num_tenants(self._keys)

    @classmethod
    def of(cls, config: ServerConfig) -> Keyring:
        """Return the keyring of the settings. Raises ConfigError."""
        if config.token is not None and config.auth_tokens is not None:
            raise ConfigError("`token` and `auth_tokens` exclude each other; put the token's hash in the file")
        if config.auth_tokens is not None:
            return cls.load(Path(config.auth_tokens))
        return cls.none() if config.token is None else cls.single(config.token)

    @classmethod
    def load(cls, path: Path) -> Keyring:
        """Read a file of tenants. The ConfigError names the file, the tenant and what is allowed."""
        return cls(_read_keys(path).tenants_by_key({}), path=path)

    @classmethod
    def single(cls, token: str) -> Keyring:
        """Return a keyring with one key of a tenant without name or limits. Raises ConfigError for an empty token."""
        if not token:
            raise ConfigError("token is empty; allowed: any other text, better a long random one")
        return cls({hash_key(token): Tenant("")})

    @classmethod
    def none(cls) -> Keyring:
        """Return a keyring that admits every connection, with or without a token."""
        return cls({}, default_tenant=Tenant(""))

    @property
    def num_tenants(self) -> int:
        return self._num_tenants

    def authenticate(self, token: str | None) -> Tenant:
        """Return the tenant of `token`. Raises Unauthenticated."""
        if self._default_tenant is not None:
            return self._default_tenant
        if token is None:
            raise Unauthenticated("a valid token is required")
        presented = hash_key(token)
        found = None
        for key_hash, tenant in self._keys.items():  # all are compared, so that the time does not reveal a match
            if hmac.compare_digest(key_hash, presented):
                found = tenant
        if found is None:
            raise Unauthenticated("the token is not valid")
        return found

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant with a name; None if no key is its."""
        known = [*self._keys.values(), *([self._default_tenant] if self._default_tenant is not None else [])]
        return next((each for each in known if each.name == name), None)

    def check_permissions(self) -> None:
        """Log a warning if other users can read or change the file."""
        mode = 0 if self._path is None else self._path.stat().st_mode
        if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
            _log.warning(
                "auth tokens can be read or changed by other users; run chmod 600",
                path=str(self._path),
                mode=stat.filemode(mode),
            )

    async def reload(self, check: Callable[[int], None]) -> None:
        """Read the file again, if there is one, in a thread. A broken file changes nothing but the log.

        The same holds for a file whose number of tenants `check` refuses with a ConfigError.
        Tenants keep their connections and counts, and new limits apply from the next request on. Every further request
        of a removed tenant, and every further connection with a removed key, is refused.
        """
        if self._path is None:
            return
        try:
            content = await asyncio.to_thread(_read_keys, self._path)
            check(len(content.limits))
        except ConfigError as error:
            _log.error("auth tokens not reloaded", reason=str(error))
            return
        before = {tenant.name: tenant for tenant in self._keys.values()}
        self._keys = content.tenants_by_key(before)
        self._num_tenants = _num_tenants(self._keys)
        present = {tenant.name for tenant in self._keys.values()}
        for name, tenant in before.items():
            tenant.revoked = name not in present
        self.check_permissions()
        _log.info("auth tokens reloaded", tenants=len(present), keys=len(self._keys))


def _num_tenants(keys: Mapping[bytes, Tenant]) -> int:
    return max(len(set(keys.values())), 1)  # one tenant has all connections if there are no keys


class _KeyFile(NamedTuple):
    """The valid content of a file of tenants."""

    owners: dict[bytes, str]  # key hash -> tenant's name
    limits: dict[str, TenantLimits]  # tenant's name -> limits

    def tenants_by_key(self, known: Mapping[str, Tenant]) -> dict[bytes, Tenant]:
        """Return key hash -> tenant. Known tenants get their new limits, and stay the same objects."""
        tenants = {name: known.get(name) or Tenant(name) for name in self.limits}
        for name, limits in self.limits.items():
            tenants[name].change_limits(limits)
        return {key_hash: tenants[name] for key_hash, name in self.owners.items()}


def _read_keys(path: Path) -> _KeyFile:
    """Read and check the file. Raises ConfigError."""
    content = read_toml(path, "the file of keys")
    tables = {name: _tenant_table(name, table, path) for name, table in content.items()}
    return _KeyFile(_owners(path, tables), {name: limits for name, (_, limits) in tables.items()})


def _tenant_table(name: str, table: object, path: Path) -> tuple[list[str], TenantLimits]:
    """Return the keys and limits of one table. Raises ConfigError."""
    where = f"tenant {name!r} in {path}"
    check_tenant_name(name, f" in {path}")
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table: [{name}] and below it its keys and limits")
    keys = table.get("keys")
    if not (isinstance(keys, list) and keys and all(isinstance(key, str) and _HASH.fullmatch(key) for key in keys)):
        raise ConfigError(f"keys of {where}: allowed is a list of sha256 hashes, 64 hex digits each; see `quire token`")
    limits = convert_table(TenantLimits, {key: value for key, value in table.items() if key != "keys"}, where)
    if limits.burst is not None and limits.requests_per_minute is None:
        raise ConfigError(f"burst of {where} needs requests_per_minute")
    return keys, limits


def _owners(path: Path, tables: Mapping[str, tuple[list[str], TenantLimits]]) -> dict[bytes, str]:
    """Return key hash -> tenant's name. Raises ConfigError for a key of two tenants, and for a file without keys."""
    owners: dict[bytes, str] = {}
    for name, (keys, _) in tables.items():
        for key in keys:
            if (owner := owners.setdefault(bytes.fromhex(key), name)) != name:
                raise ConfigError(f"{path}: tenants {owner!r} and {name!r} share a key; a key belongs to one tenant")
    if not owners:
        raise ConfigError(f"{path} names no tenant; `quire token NAME` makes a key and the lines for the file")
    return owners
