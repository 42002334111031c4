"""URLs of servers as users type them, trusted certificates, and a first curl request that works when pasted."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from quire.engine.common.errors import ConfigError, EngineError
from quire.engine.common.types import EngineInfo
from quire.server.cli.announcement import curl_command
from quire.server.cli.bench.stream_client import StreamClient
from quire.server.cli.server_client import client_ssl_context, fetch_model_names, normalize_server_url
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
def test_a_server_is_named_as_people_type_it(text: str, url: str) -> None:
    assert normalize_server_url(text) == url


def test_one_whose_certificate_is_named_is_reached_by_https() -> None:
    assert normalize_server_url("host:80", tls=True) == "https://host:80"
    assert normalize_server_url("http://host", tls=True) == "http://host"


def listed(url: str, **options: Any) -> str:
    """The error message if no models can be listed."""
    with httpx.Client(base_url=f"{url}/v1", **options) as http, pytest.raises(EngineError) as caught:
        fetch_model_names(http)
    return str(caught.value)


async def test_what_keeps_a_client_from_a_server_comes_with_the_way_out(paths: dict[str, Path]) -> None:
    secure = {"ssl_certfile": paths["cert"], "ssl_keyfile": paths["key"], "api_key": ["secret"]}
    async with serving(FakeEngine(hashed(b"abc")), **secure) as port:
        plain = port.url.replace("https", "http")
        assert "a server with TLS is at https://" in await asyncio.to_thread(listed, plain)
        untrusted = await asyncio.to_thread(listed, port.url, verify=client_ssl_context(None))
        assert untrusted.startswith(f"cannot trust {port.url}")
        assert untrusted.endswith("; --cacert PEM names a certificate to trust")
        elsewhere = port.url.replace("127.0.0.1", "localhost")
        mistaken = await asyncio.to_thread(listed, elsewhere, verify=client_ssl_context(paths["ca"]))
        assert mistaken.startswith(f"cannot trust {elsewhere}")
        assert mistaken.endswith("; name the server as its certificate does")
        keyless = await asyncio.to_thread(listed, port.url, verify=client_ssl_context(paths["ca"]))
        assert "--api-key KEY, or the variable OPENAI_API_KEY" in keyless
    async with serving(FakeEngine(hashed(b"abc"))) as port:
        tls = port.url.replace("http", "https")
        assert "a server without TLS is at http://" in await asyncio.to_thread(listed, tls)
    assert "is it started?" in await asyncio.to_thread(listed, port.url)


@pytest.mark.parametrize("text", ["", "ftp://host", "http://", "host:port", "http://host:99999"])
def test_what_is_no_server_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="url: not a server's"):
        normalize_server_url(text)


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """The certificate of a server at 127.0.0.1, its key, and the CA that signed it."""
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    own.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return {name: tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")}


async def test_a_certificate_is_trusted_where_it_is_named(paths: dict[str, Path]) -> None:
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


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("not a PEM")
    for path, why in ((tmp_path / "notes", "it is not a PEM"), (tmp_path / "nowhere", "No such file")):
        with pytest.raises(ConfigError, match=f"cacert: cannot use .*{why}"):
            client_ssl_context(path)


def test_a_certificate_without_its_key_is_said_so(paths: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"^ssl_certfile: .*cert.pem has no private key; give it with --ssl-keyfile$"):
        tls_context(ServerConfig(ssl_certfile=paths["cert"]))
    paths["key"].write_text("not a PEM")
    with pytest.raises(ConfigError, match="cannot be used with its key"):
        tls_context(ServerConfig(ssl_certfile=paths["key"]))


async def info() -> EngineInfo:
    return await FakeEngine(hashed(b"abc")).start()


async def test_the_first_request_has_what_the_server_asks_for(paths: dict[str, Path]) -> None:
    plain = curl_command(ServerConfig(), await info(), "http://127.0.0.1:80", None)
    talk = curl_command(ServerConfig(), await info(), "http://127.0.0.1:80", None, has_chat_template=True)
    assert talk.startswith("curl -N http://127.0.0.1:80/v1/chat/completions ")
    assert '"messages": [{"role": "user"' in talk
    assert "Authorization" not in plain
    assert '"model": "quire-demo"' in plain
    keyed = curl_command(ServerConfig(api_key=["secret"]), await info(), "http://127.0.0.1:80", None)
    assert '-H "Authorization: Bearer $OPENAI_API_KEY"' in keyed
    assert "secret" not in keyed
    config = ServerConfig(ssl_certfile=paths["cert"], ssl_keyfile=paths["key"])
    tls = tls_context(config)
    assert f"--cacert {paths['cert']}" in curl_command(config, await info(), "https://127.0.0.1:80", tls)
    assert "--insecure" in curl_command(
        config, await info(), "https://[::1]:80", tls
    )  # the certificate has another name
    demanding = ServerConfig(ssl_certfile=paths["cert"], ssl_keyfile=paths["key"], ssl_ca_certs=paths["ca"])
    asked = curl_command(demanding, await info(), "https://127.0.0.1:80", tls_context(demanding))
    assert f"--cacert {paths['cert']} --cert YOURS.pem" in asked


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
async def test_the_first_request_is_answered(paths: dict[str, Path]) -> None:
    """With curl, an API key, and a certificate of a private CA."""
    async with serving(
        FakeEngine(hashed(b"abc")), ssl_certfile=paths["cert"], ssl_keyfile=paths["key"], api_key=["secret"]
    ) as port:
        config = ServerConfig(ssl_certfile=paths["cert"], ssl_keyfile=paths["key"], api_key=["secret"])
        asked = curl_command(config, await info(), port.url, tls_context(config))
        asked = asked.replace('"model": "quire-demo"', '"temperature": 0')
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-c", asked],
            env=os.environ | {"OPENAI_API_KEY": "secret"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("data: [DONE]\n\n"), done.stdout


def test_a_context_without_a_file_trusts_the_system() -> None:
    assert client_ssl_context(None).verify_mode is ssl.CERT_REQUIRED
    assert client_ssl_context(None).cert_store_stats()["x509_ca"] > 0
