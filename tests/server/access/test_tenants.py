"""API keys from flags and from a key file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.errors import ConfigError
from quire.server.access.tenants import Tenants
from quire.server.config import ServerConfig

FILE = """
[alice]
key = "sk-alice"
weight = 2
requests_per_minute = 5

[bob]
key = "sha256:{}"
tokens_per_minute = 1_000
priority = -3
admin = true
"""


def tenants(tmp_path: Path, text: str | None = None, **options: Any) -> Tenants:
    if text is not None:
        options["api_key_file"] = tmp_path / "keys.toml"
        options["api_key_file"].write_text(text, encoding="utf-8")
    return Tenants(ServerConfig(**options))


def test_key_file_sets_tenant_limits_priority_and_admin(tmp_path: Path) -> None:
    text = FILE.format(hashlib.sha256(b"sk-bob").hexdigest())
    loaded = tenants(tmp_path, text, api_key=["one"], requests_per_minute=60, tokens_per_minute=70)
    alice, bob, one = (loaded.find_by_key(key) for key in ("sk-alice", "sk-bob", "one"))
    assert None not in (alice, bob, one)
    assert [(each.name, each.weight, each.priority, each.admin) for each in (alice, bob, one)] == [
        ("alice", 2.0, 0, False),
        ("bob", 1.0, -3, True),
        ("key-1", 1.0, 0, False),
    ]
    limits = [each.limits.ratelimit_headers() for each in (alice, bob, one)]
    assert [each["x-ratelimit-limit-requests"] for each in limits] == ["5", "60", "60"]
    assert [each["x-ratelimit-limit-tokens"] for each in limits] == ["70", "1000", "70"]
    assert len({each.prefix_cache_salt("s") for each in (alice, bob, one)}) == 3
    assert loaded.requires_key
    for wrong in ("", "sk-alic", "sha256:" + hashlib.sha256(b"sk-bob").hexdigest(), "alice", "\xff"):
        assert loaded.find_by_key(wrong) is None
    assert "sk-alice" not in repr(alice)


def test_hashed_api_key_may_have_any_bytes(tmp_path: Path) -> None:
    key = "ключ-é".encode()
    loaded = tenants(tmp_path, FILE.format(hashlib.sha256(key).hexdigest()))
    assert loaded.find_by_key(key.decode("latin-1")).name == "bob"  # as Starlette reads a header


def test_admin_key_or_missing_keys_grant_admin(tmp_path: Path) -> None:
    loaded = tenants(tmp_path, admin_api_key=["root"], api_key=["root", "user"])
    assert loaded.find_by_key("root").admin
    assert not loaded.find_by_key("user").admin
    without_keys = tenants(tmp_path)
    assert not without_keys.requires_key
    assert without_keys.anonymous.admin
    assert without_keys.anonymous.prefix_cache_salt("s") == "s"
    without_keys.anonymous.require_allowed_priority(-(2**31))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys"),
        ("[a", "is not TOML"),
        ("[a]\nkey = ''", "a has an empty key"),
        ("[a]\nweight = 2", "a.key: field required"),
        ("[a]\nkey = 'secret'\nweight = 0", "a.weight: input should be greater than 0"),
        ("[a]\nkey = 'secret'\nwait = 1", "a.wait: extra inputs are not permitted"),
        ("[a]\nkey = 'secret'\nrequests_per_minute = 0", "a.requests_per_minute: input should be greater"),
        ("[a]\nkey = 'secr\u00e9t'", "a has a key that clients cannot send"),
        ("[a]\nkey = 'secret '", "a has a key that clients cannot send"),
        ('[a]\nkey = "sec\\tret"', "a has a key that clients cannot send"),
        ("[a]\nkey = 'sha256:secret'", "64 hexadecimal digits"),
        ("[a]\nkey = 'sha256:\u2026'", "64 hexadecimal digits"),
        ("[a]\nkey = 'secret'\n[b]\nkey = 'secret'", "b has the same key as a"),
        ("key = 'secret'", "key: input should be a valid dictionary"),
        ("[key-1]\nkey = 'secret'", "key-1 is already the name of a key given by a flag"),
    ],
)
def test_invalid_key_file_raises_config_error_without_secret(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        tenants(tmp_path, text, api_key=["one"])
    assert "secret" not in str(error.value)


def test_missing_key_file_or_bad_key_flag_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_key_file: cannot read"):
        Tenants(ServerConfig(api_key_file=tmp_path / "none"))
    for keys in ([""], [" "], ["same", "same"]):
        with pytest.raises(ConfigError, match="api_key: key-"):
            Tenants(ServerConfig(api_key=keys))


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({}, "metrics_api_key: needs --api-key or --api-key-file"),
        ({"api_key": ["a"], "metrics_api_key": ["a"]}, "metrics-1 has the same key as key-1"),
        ({"api_key": ["a"], "metrics_api_key": [" "]}, "metrics_api_key: metrics-1 has an empty key"),
    ],
)
def test_metrics_key_without_other_api_key_is_rejected(tmp_path: Path, options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        tenants(tmp_path, **{"metrics_api_key": ["m"]} | options)


def test_metrics_key_can_be_a_hash_and_has_no_tenant(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"scraper").hexdigest()
    found = tenants(tmp_path, api_key=["only"], metrics_api_key=[f"sha256:{digest}"])
    assert found.find_by_metrics_key("scraper") is not None
    assert found.find_by_metrics_key("only") is None
    assert found.find_by_key("scraper") is None
    only = found.find_by_key("only")
    assert only is not None
    assert only.admin, "still the only key"
