"""API keys from flags and a TOML file (docs/deploy/security-and-limits.md)."""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quire.engine.common.errors import ConfigError, InvalidRequest
from quire.server.access.rate_limits import RateLimits
from quire.server.config import ServerConfig

HASH_PREFIX = "sha256:"


class KeyEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    """The key, or HASH_PREFIX and the key's SHA-256 in hexadecimal."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    priority: int | None = Field(default=0, ge=-(2**31), lt=2**31)
    admin: bool = False


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a key; without keys, all callers together."""

    name: str
    digest: bytes
    """SHA-256 of the key; empty without a key."""
    limits: RateLimits
    weight: float = 1.0
    priority: int | None = None
    """The most urgent priority that requests may have (a lower number is more urgent). None allows any."""
    admin: bool = False
    shares_prefixes: bool = False
    """If True, requests may share cached prefixes with other keys' requests."""

    def prefix_cache_salt(self, cache_salt: str) -> str:
        """The salt differs by key, because timing must not reveal other tenants' prompts."""
        return cache_salt if self.shares_prefixes or not self.digest else f"{self.digest.hex()}/{cache_salt}"

    def require_allowed_priority(self, priority: int) -> None:
        """Raises InvalidRequest."""
        if self.priority is not None and priority < self.priority:
            raise InvalidRequest(f"priority must be at least {self.priority} with this API key", param="priority")


class Tenants:
    """The constructor raises ConfigError for unusable keys."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        tenants_by_digest: dict[bytes, Tenant] = {}
        names: set[str] = set()
        for name, entry, source in self._iter_key_entries():
            tenant = self._build_tenant(name, entry, source)
            if tenant.digest in tenants_by_digest:
                raise ConfigError(f"{source}: {name} has the same key as {tenants_by_digest[tenant.digest].name}")
            if name in names:
                raise ConfigError(f"{source}: {name} is already the name of a key given by a flag")
            tenants_by_digest[tenant.digest] = tenant
            names.add(name)
        metrics_tenants = [
            self._build_tenant(f"metrics-{number}", KeyEntry(key=key), "metrics_api_key")
            for number, key in enumerate(config.metrics_api_key, 1)
        ]
        for each in metrics_tenants:
            if each.digest in tenants_by_digest:
                same = tenants_by_digest[each.digest].name
                raise ConfigError(f"metrics_api_key: {each.name} has the same key as {same}", param="metrics_api_key")
        if metrics_tenants and not tenants_by_digest:
            message = "metrics_api_key: needs --api-key or --api-key-file: without them everybody reads /metrics"
            raise ConfigError(message, param="metrics_api_key")
        self._metrics_tenants = metrics_tenants
        self._keyed_tenants = list(tenants_by_digest.values())
        if len(self._keyed_tenants) == 1:  # the owner of the only key is the operator
            self._keyed_tenants = [replace(self._keyed_tenants[0], admin=True)]
        self.requires_key = bool(self._keyed_tenants)
        limits = RateLimits(config.requests_per_minute, config.tokens_per_minute)
        self.anonymous = Tenant("", b"", limits, admin=not self.requires_key)
        """Public paths have this tenant too."""

    @property
    def keyed_tenants(self) -> tuple[Tenant, ...]:
        return tuple(self._keyed_tenants)

    def find_by_key(self, key: str) -> Tenant | None:
        """`key` consists of header bytes decoded as Latin-1. Digests are compared in constant time, to prevent timing
        attacks.
        """
        return _find_by_key(self._keyed_tenants, key)

    def find_by_metrics_key(self, key: str) -> Tenant | None:
        return _find_by_key(self._metrics_tenants, key)

    def find_by_digest(self, digest: str) -> Tenant | None:
        tenants = self._keyed_tenants or [self.anonymous]
        return next((tenant for tenant in tenants if tenant.digest.hex() == digest), None)

    def _iter_key_entries(self) -> Iterator[tuple[str, KeyEntry, str]]:
        config = self._config
        for number, key in enumerate(config.admin_api_key, 1):
            yield f"admin-{number}", KeyEntry(key=key, priority=None, admin=True), "admin_api_key"
        for number, key in enumerate((key for key in config.api_key if key not in config.admin_api_key), 1):
            yield f"key-{number}", KeyEntry(key=key), "api_key"
        if config.api_key_file is not None:
            for name, entry in _read_key_file(config.api_key_file).items():
                yield name, entry, "api_key_file"

    def _build_tenant(self, name: str, entry: KeyEntry, source: str) -> Tenant:
        config = self._config
        limits = RateLimits(
            entry.requests_per_minute or config.requests_per_minute, entry.tokens_per_minute or config.tokens_per_minute
        )
        if not entry.key.strip():
            raise ConfigError(f"{source}: {name} has an empty key")
        if entry.key.startswith(HASH_PREFIX):
            try:
                digest = bytes.fromhex(entry.key.removeprefix(HASH_PREFIX))
            except ValueError:
                digest = b""
            if len(digest) != hashlib.sha256().digest_size:
                raise ConfigError(f"{source}: {name} must have 64 hexadecimal digits after {HASH_PREFIX}")
        elif entry.key != entry.key.strip() or not (entry.key.isascii() and entry.key.isprintable()):
            raise ConfigError(
                f"{source}: {name} has a key that clients cannot send: use ASCII letters, digits and "
                "signs, without white space at either end"
            )
        else:
            digest = _hash_key(entry.key)
        shares = config.share_prefix_cache
        return Tenant(name, digest, limits, entry.weight, entry.priority, entry.admin, shares_prefixes=shares)


def _read_key_file(path: Path) -> dict[str, KeyEntry]:
    """Raises ConfigError; the message contains no key."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"api_key_file: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file: {path} is not TOML: {error}") from None
    entries = {}
    for name, table in tables.items():
        try:
            entries[name] = KeyEntry.model_validate(table)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in (name, *first["loc"]))
            raise ConfigError(f"api_key_file: {field}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    if not entries:
        raise ConfigError(f"api_key_file: {path} has no keys")
    return entries


def _find_by_key(tenants: Sequence[Tenant], key: str) -> Tenant | None:
    digest = _hash_key(key)
    matches = [tenant for tenant in tenants if hmac.compare_digest(digest, tenant.digest)]
    return matches[0] if matches else None


def _hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1")).digest()
