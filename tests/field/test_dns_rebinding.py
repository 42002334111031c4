"""The server rejects foreign Host headers. A user saw: a web page whose name suddenly pointed to 127.0.0.1 listed, read
and deleted files, and chatted (DNS rebinding, issue 56, item 5; Ollama's CVE-2024-28224).
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.engine.common.errors import ConfigError
from quire.server.access.allowed_hosts import AllowedHosts
from quire.server.access.host_addresses import is_local_or_private_host
from quire.server.config import ServerConfig
from quire.server.http.listener import bind_tcp_socket, warn_if_unprotected
from tests.server.fake import FakeEngine, hashed
from tests.server.hosted import Port, serving

LETTERS = hashed(b"abcdefgh")
OWN = (
    *("localhost", "localhost:8000", "LOCALHOST:8000", "localhost.", "localhost.:8000", "app.localhost"),
    *("a.b.localhost", "127.0.0.1", "127.0.0.1:8000", "127.8.9.10", "[::1]", "[::1]:8000", "::1"),
    *("[::ffff:127.0.0.1]:80", "0.0.0.0:80", "192.168.1.5:8000", "10.1.2.3", "172.16.0.1", "172.31.255.255"),
    *("169.254.1.1", "[fd00::1]:8000", "[fe80::1%eth0]", "printer.local", "quire.internal:8000"),
    *("host.docker.internal:8000", "Gateway.Docker.Internal", "x.LOCAL."),
    *("", socket.gethostname(), f"{socket.gethostname().upper()}:8000"),
)
OTHERS = (
    *("evil.example", "evil.example:8000", "EVIL.example.", "localhost.evil.example", "127.0.0.1.evil.example:8000"),
    *("evillocalhost", "notlocal", "local", "internal", "evil.localhost.example", "8.8.8.8", "8.8.8.8:8000"),
    *("[2001:4860:4860::8888]:443", "172.32.0.1", "192.169.0.1", "2130706433", "0x7f000001", "127.1", "203.0.113.5"),
    *("localhost@evil.example", "localhost:8000@evil.example", "evil.example#localhost", "[::1]evil.example"),
    *("localhost:8000:evil.example", "localhost:80a", "[::1", "::1]", "[evil.example]", "localhost,evil.example"),
    *("localhost evil.example", "localhost\tevil", "r1.127.0.0.1.nip.io", "xn--localhost-", "[::ffff:8.8.8.8]", "*"),
    *("127.0.0.1%evil.example", "evil.example/.local", "evil.example#.local", "evil.example .local", "evil@x.local"),
)


@pytest.mark.parametrize("host", OWN)
def test_is_local_or_private_host_accepts_local_names(host: str) -> None:
    assert is_local_or_private_host(host)


@pytest.mark.parametrize("host", OTHERS)
def test_is_local_or_private_host_rejects_public_names(host: str) -> None:
    assert not is_local_or_private_host(host)


@pytest.fixture(scope="module")
async def port(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Port]:
    async with serving(FakeEngine(LETTERS), data_dir=tmp_path_factory.mktemp("data")) as port:
        yield port


async def get(port: Port, *hosts: str, path: str = "/v1/models", version: str = "1.1", more: str = "") -> bytes:
    lines = [f"GET {path} HTTP/{version}", *(f"Host: {host}" for host in hosts), "Connection: close", more]
    return await port.send("\r\n".join([*filter(None, lines), "", ""]).encode("latin-1"))


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


PATHS = ("/", "/web/index.html", "/health", "/metrics", "/v1/files", "/v1/models", "/docs", "/nowhere", "/api/tags")


@pytest.mark.parametrize("path", PATHS)
async def test_every_path_rejects_public_host_header(port: Port, path: str) -> None:
    assert status(await get(port, "evil.example:8000", path=path)) == 403
    assert status(await get(port, "localhost:8000", path=path)) != 403


async def test_host_header_is_checked_when_missing_repeated_or_forwarded(port: Port) -> None:
    assert status(await get(port, version="1.0")) == 200, "programs send none; browsers always do"
    assert status(await get(port)) == 200
    assert status(await get(port, "localhost", "evil.example")) == 403
    assert status(await get(port, "evil.example", "localhost")) == 403
    assert status(await get(port, "evil.example", more="X-Forwarded-Host: localhost")) == 403
    assert status(await get(port, "localhost", more="X-Forwarded-Host: evil.example")) == 200
    assert status(await get(port, "évil.example")) == 403


async def test_host_of_absolute_request_target_is_checked(port: Port) -> None:
    """It replaces the Host header (RFC 9112, 3.2.2)."""
    for target in (
        "http://evil.example/v1/models",
        "http://localhost@evil.example/v1/models",
        "http://evil.example:80/v1/models?a=/",
    ):
        assert status(await get(port, "localhost", path=target)) == 403, target
    assert status(await get(port, "evil.example", path="http://localhost:8000/v1/models")) == 200
    assert status(await get(port, "evil.example", path="http://[::1]:8000/v1/models")) == 200


async def test_host_not_allowed_error_names_flags_and_is_short(port: Port) -> None:
    answer = await get(port, "evil.example:8000")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "host_not_allowed"
    assert all(part in error["message"] for part in ("'evil.example:8000'", "--allowed-hosts", "--api-key"))
    long = await get(port, "e" * 10_000)
    assert status(long) == 403
    assert len(long) < 2000


async def test_foreign_host_is_rejected_for_every_method(port: Port) -> None:
    body = b'{"prompt": "a"}'
    for line in (b"POST /v1/completions", b"POST /v1/files", b"DELETE /v1/files/file-1", b"OPTIONS /v1/files"):
        head = b"%s HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        assert status(await port.send(head % (line, len(body)) + body)) == 403, line


ALLOWED = (
    *((["quire.example.com"], "quire.example.com"), (["quire.example.com"], "Quire.Example.com:443")),
    *((["*.example.com"], "a.b.example.com"), (["*"], "anything"), (["203.0.113.5"], "203.0.113.5:8000")),
    *(
        (["2001:4860:4860::8888"], "[2001:4860:4860:0::8888]"),
        (["Example.com."], "example.com"),
        (["quire"], "quire:80"),
    ),
)
REFUSED = (
    *((["example.com"], "a.example.com"), (["*.example.com"], "example.com"), (["*.example.com"], "badexample.com")),
    *((["example.com"], "example.com.evil"), ([], "quire:8000")),
)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("names", "host", "expected"), [*((*each, 200) for each in ALLOWED), *((*each, 403) for each in REFUSED)]
)
async def test_allowed_hosts_flag_matches_names_and_wildcards(names: list[str], host: str, expected: int) -> None:
    async with serving(FakeEngine(LETTERS), allowed_hosts=names) as port:
        assert status(await get(port, host)) == expected


async def test_any_host_is_allowed_with_api_keys() -> None:
    """A proxy on the same machine passes a public name on; a web page has no key."""
    async with serving(FakeEngine(LETTERS), api_key=["secret"]) as port:
        assert status(await get(port, "evil.example")) == 401
        assert status(await get(port, "quire.example.com", more="Authorization: Bearer secret")) == 200


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
@pytest.mark.parametrize("host", ["quire:8000", "quire.example.com", "10.2.3.4:8000", "my-service.my-namespace.svc"])
def test_any_host_is_allowed_when_bound_to_all_addresses(address: str, host: str) -> None:
    """As in containers, whose callers use names of Compose and Kubernetes."""
    hosts = AllowedHosts(ServerConfig())
    with bind_tcp_socket(address, 0) as listener:
        hosts.enforce_if_loopback_only([listener])
    assert hosts.find_refused_host({"headers": [(b"host", host.encode())]}) is None


@pytest.mark.parametrize(
    ("address", "options", "warns"),
    [
        ("127.0.0.1", {}, False),
        ("::1", {}, False),
        ("localhost", {}, False),
        ("0.0.0.0", {}, True),
        ("::", {}, True),
        ("0.0.0.0", {"api_key": ["secret"]}, False),
        ("0.0.0.0", {"admin_api_key": ["secret"]}, False),
    ],
)
def test_start_warns_when_public_server_has_no_api_keys(
    caplog: pytest.LogCaptureFixture, address: str, options: dict[str, Any], warns: bool
) -> None:
    with bind_tcp_socket(address, 0) as listener:
        warn_if_unprotected(ServerConfig(host=address, **options), listener)
    assert ("--api-key" in caplog.text) == warns


@pytest.mark.parametrize(
    "name", ["http://example.com", "example.com:8000", "a b", "", "*example.com", "user@example.com"]
)
def test_invalid_allowed_hosts_are_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        AllowedHosts(ServerConfig(allowed_hosts=[name]))


async def test_host_rejection_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeEngine(LETTERS)) as port:
        with caplog.at_level(logging.WARNING, "quire.server"):
            for _ in range(3):
                await get(port, "evil.example\\r")
    assert sum("--allowed-hosts" in record.getMessage() for record in caplog.records) == 1
