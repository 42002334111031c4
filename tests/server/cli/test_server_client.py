"""URLs of servers as users type them, trusted certificates, and a first curl request that works when pasted."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from quire.engine.common.errors import ConfigError, EngineError
from quire.engine.common.types import EngineInfo
from quire.server.cli.announcement import curl_command
from quire.server.cli.bench.stream_client import StreamClient
from quire.server.cli.main import main
from quire.server.cli.server_client import (
    client_ssl_context,
    error_message,
    fetch_model_names,
    normalize_server_url,
)
from quire.server.config import ServerConfig
from quire.server.http.server import tls_context
from tests.server.fake import FakeEngine, hashed
from tests.server.hosted import serving


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost"),
        ("https://host/v1/", "https://host"),
        ("http://[::1]:80/proxy/v1", "http://[::1]:80/proxy"),
    ],
)
def test_normalize_server_url_accepts_hosts_and_urls(text: str, url: str) -> None:
    assert normalize_server_url(text) == url


def test_normalize_server_url_uses_https_with_tls() -> None:
    assert normalize_server_url("host:80", tls=True) == "https://host:80"
    assert normalize_server_url("http://host", tls=True) == "http://host"


def model_list_error(url: str, **options: Any) -> str:
    """The error message if no models can be listed."""
    with httpx.Client(base_url=f"{url}/v1", **options) as http, pytest.raises(EngineError) as caught:
        fetch_model_names(http)
    return str(caught.value)


async def test_connection_errors_name_cause_and_remedy(paths: dict[str, Path]) -> None:
    secure = {"ssl_certfile": paths["cert"], "ssl_keyfile": paths["key"], "api_key": ["secret"]}
    async with serving(FakeEngine(hashed(b"abc")), **secure) as port:
        plain = port.url.replace("https", "http")
        assert "a server with TLS is at https://" in await asyncio.to_thread(model_list_error, plain)
        untrusted = await asyncio.to_thread(model_list_error, port.url, verify=client_ssl_context(None))
        assert untrusted.startswith(f"cannot trust {port.url}")
        assert untrusted.endswith("; --cacert PEM names a certificate to trust")
        elsewhere = port.url.replace("127.0.0.1", "localhost")
        mistaken = await asyncio.to_thread(model_list_error, elsewhere, verify=client_ssl_context(paths["ca"]))
        assert mistaken.startswith(f"cannot trust {elsewhere}")
        assert mistaken.endswith("; name the server as its certificate does")
        keyless = await asyncio.to_thread(model_list_error, port.url, verify=client_ssl_context(paths["ca"]))
        assert "--api-key KEY, or the variable OPENAI_API_KEY" in keyless
    async with serving(FakeEngine(hashed(b"abc"))) as port:
        tls = port.url.replace("http", "https")
        assert "a server without TLS is at http://" in await asyncio.to_thread(model_list_error, tls)
    assert "is it started?" in await asyncio.to_thread(model_list_error, port.url)


COMMANDS_WITH_SERVER = (
    "chat",
    "chat quire-demo",
    "run quire-demo Hi",
    "batch list",
    "batch status batch_1",
    "ps",
    "stop quire-demo",
    "show quire-demo",
    "trace",
    "bench serve",
    "bench serve --model quire-demo --output-len 2",
)


@pytest.mark.parametrize("key", [[], ["--api-key", "wrong"]])
async def test_every_command_says_how_to_give_the_servers_key(
    key: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with serving(FakeEngine(hashed(b"abc")), api_key=["secret"]) as port:
        for command in COMMANDS_WITH_SERVER:
            monkeypatch.setattr("sys.stdin", StringIO("" if command.startswith("run") else "Hi"))
            assert await asyncio.to_thread(main, [*command.split(), "--url", port.url, *key]) == 1, command
            error = capsys.readouterr().err
            assert error.startswith(f"quire {command.split()[0]}: "), error
            assert ("Incorrect API key" if key else "provide an API key") in error
            assert error.endswith(" (--api-key KEY, or the variable OPENAI_API_KEY)\n")
            assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no"}}', "no"),
        (b'{"type": "error", "error": {"type": "x", "message": "no"}}', "no"),
        (b'{"id": "1", "message": "no"}', "no"),
        (b'{"error": "no"}', "no"),
        (b'{"error": {"message": 3}}', ""),
        (b'["no"]', ""),
        (b"<html>", ""),
    ],
)
def test_error_message_reads_formats_of_all_apis(body: bytes, message: str) -> None:
    assert error_message(body) == message


@pytest.mark.parametrize("text", ["", "ftp://host", "http://", "host:port", "http://host:99999"])
def test_normalize_server_url_rejects_invalid_urls(text: str) -> None:
    with pytest.raises(ConfigError, match="url: not a server's"):
        normalize_server_url(text)


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """The certificate of a server at 127.0.0.1, its key, and the CA that signed it."""
    authority = trustme.CA()
    server_cert = authority.issue_cert("127.0.0.1")
    server_cert.private_key_pem.write_to_path(tmp_path / "key.pem")
    server_cert.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")}


async def test_clients_trust_only_named_certificate(paths: dict[str, Path]) -> None:
    async with serving(FakeEngine(hashed(b"abc")), ssl_certfile=paths["cert"], ssl_keyfile=paths["key"]) as port:
        for name in ("ca", "cert"):
            async with httpx.AsyncClient(base_url=port.url, verify=client_ssl_context(paths[name])) as http:
                assert (await http.get("/health")).status_code == 200
            events: list[bytes] = []
            client = StreamClient(port.url, trust=client_ssl_context(paths[name]))
            await client.post_stream("completions", b'{"prompt": "x", "max_tokens": 2, "stream": true}', events.append)
            client.close()
            assert events
        async with httpx.AsyncClient(base_url=port.url, verify=client_ssl_context(None)) as http:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await http.get("/health")


def test_unusable_cacert_file_raises_config_error(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not a PEM")
    for path, why in ((tmp_path / "notes", "it is not a PEM"), (tmp_path / "nowhere", "No such file")):
        with pytest.raises(ConfigError, match=f"cacert: cannot use .*{why}"):
            client_ssl_context(path)


def test_certificate_without_private_key_raises_config_error(paths: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"^ssl_certfile: .*cert.pem has no private key; give it with --ssl-keyfile$"):
        tls_context(ServerConfig(ssl_certfile=paths["cert"]))
    paths["key"].write_text("not a PEM")
    with pytest.raises(ConfigError, match="cannot be used with its key"):
        tls_context(ServerConfig(ssl_certfile=paths["key"]))


async def engine_info() -> EngineInfo:
    return await FakeEngine(hashed(b"abc")).start()


async def test_curl_command_includes_key_and_certificates_of_server(paths: dict[str, Path]) -> None:
    plain = curl_command(ServerConfig(), await engine_info(), "http://127.0.0.1:80", None)
    chat = curl_command(ServerConfig(), await engine_info(), "http://127.0.0.1:80", None, has_chat_template=True)
    assert chat.startswith("curl -N http://127.0.0.1:80/v1/chat/completions ")
    assert '"messages": [{"role": "user"' in chat
    assert "Authorization" not in plain
    assert '"model": "quire-demo"' in plain
    keyed = curl_command(ServerConfig(api_key=["secret"]), await engine_info(), "http://127.0.0.1:80", None)
    assert '-H "Authorization: Bearer $OPENAI_API_KEY"' in keyed
    assert "secret" not in keyed
    config = ServerConfig(ssl_certfile=paths["cert"], ssl_keyfile=paths["key"])
    tls = tls_context(config)
    assert f"--cacert {paths['cert']}" in curl_command(config, await engine_info(), "https://127.0.0.1:80", tls)
    assert "--insecure" in curl_command(
        config, await engine_info(), "https://[::1]:80", tls
    )  # the certificate has another name
    demanding = ServerConfig(ssl_certfile=paths["cert"], ssl_keyfile=paths["key"], ssl_ca_certs=paths["ca"])
    mutual_tls = curl_command(demanding, await engine_info(), "https://127.0.0.1:80", tls_context(demanding))
    assert f"--cacert {paths['cert']} --cert YOURS.pem" in mutual_tls


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
async def test_printed_curl_command_receives_stream(paths: dict[str, Path]) -> None:
    """With curl, an API key, and a certificate of a private CA."""
    async with serving(
        FakeEngine(hashed(b"abc")), ssl_certfile=paths["cert"], ssl_keyfile=paths["key"], api_key=["secret"]
    ) as port:
        config = ServerConfig(ssl_certfile=paths["cert"], ssl_keyfile=paths["key"], api_key=["secret"])
        curl = curl_command(config, await engine_info(), port.url, tls_context(config))
        curl = curl.replace('"model": "quire-demo"', '"temperature": 0')
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-c", curl],
            env=os.environ | {"OPENAI_API_KEY": "secret"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("data: [DONE]\n\n"), done.stdout


def test_ssl_context_without_cacert_trusts_system_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    assert client_ssl_context(None).verify_mode is ssl.CERT_REQUIRED
    assert client_ssl_context(None).cert_store_stats()["x509_ca"] > 10
