"""Images at URLs: only from allowed hosts, only from public addresses, within bounds of time and size."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.engine.common.errors import InvalidRequest, Overloaded
from quire.server.images import image_fetcher
from quire.server.images.image_fetcher import ImageFetcher, is_public_address

WHERE = "messages[0].content[0].image_url.url"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        host = f"http://localhost:{self.server.server_address[1]}"
        moved = {"/once": f"{host}/image", "/on": f"{host}/on", "/inside": "http://169.254.169.254/latest/meta-data"}
        if self.path in moved or self.path == "/file":
            self.send_response(302)
            self.send_header("Location", moved.get(self.path, "file:///etc/passwd"))
            self.end_headers()
        elif self.path in ("/image", "/%C3%A4/image", "/image?%C3%BC=%C3%B6"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"pixels")
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"x" * 2**20)
            except OSError:
                pass
        else:
            self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://localhost:{http.server_address[1]}"
        http.shutdown()


async def fetch_image(url: str, *domains: str, anywhere: bool = False, look_up: Any = socket.getaddrinfo) -> bytes:
    fetcher = ImageFetcher(domains or ["*"], (lambda address: True) if anywhere else is_public_address, look_up)
    return (await fetcher.fetch_images({url: WHERE}, lambda size: None))[url]


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0"),
        *("fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
        *("2001:0:7f00:1::", "2001:db8::1"),
    ],
)
def test_is_public_address_rejects_internal_addresses(address: str) -> None:
    assert not is_public_address(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_is_public_address_accepts_public_addresses(address: str) -> None:
    assert is_public_address(address)


@pytest.mark.parametrize("path", ["/image", "/once"])
async def test_fetcher_returns_image_directly_and_after_redirect(server: str, path: str) -> None:
    assert await fetch_image(f"{server}{path}", "localhost", anywhere=True) == b"pixels"


@pytest.mark.parametrize(
    ("path", "said"),
    [("/none", "status 404"), ("/on", "redirects more than 3 times"), ("/endless", "MiB"), ("/file", "http or https")],
)
async def test_fetcher_rejects_errors_endless_bodies_and_bad_redirects(server: str, path: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        await fetch_image(f"{server}{path}", anywhere=True)
    assert caught.value.message.startswith(f"{WHERE}: ")


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "[::1]", "2130706433", "0x7f.1", "127.1", "①②⑦.0.0.1", "127。0。0。1", "ｌocalhost"],
)
async def test_fetcher_rejects_every_spelling_of_localhost(server: str, host: str) -> None:
    """The address that a connection would reach decides, whatever the host is called."""
    with pytest.raises(InvalidRequest, match=r"not on the public network|cannot be fetched"):
        await fetch_image(f"http://{host}:{server.rpartition(':')[2]}/image")


@pytest.mark.parametrize("path", ["/ä/image", "/image?ü=ö"])
async def test_fetcher_percent_encodes_non_ascii_urls(server: str, path: str) -> None:
    """As browsers do."""
    assert await fetch_image(f"{server}{path}", anywhere=True) == b"pixels"


async def test_fetcher_rejects_redirect_to_internal_host(server: str) -> None:
    public = ImageFetcher(["*"], lambda address: address == "127.0.0.1")
    with pytest.raises(InvalidRequest, match="not on the public network"):
        await public.fetch_images({f"{server}/inside": WHERE}, lambda size: None)
    limited = ImageFetcher(["localhost"], lambda address: True)
    with pytest.raises(InvalidRequest, match=r"does not download images from 169\.254\.169\.254"):
        await limited.fetch_images({f"{server}/inside": WHERE}, lambda size: None)


async def test_fetcher_rejects_host_with_any_private_address() -> None:
    """A host with several addresses must not pass because its first one is public."""

    def resolve(*args: object, **options: object) -> list[tuple[object, ...]]:
        kinds = socket.AF_INET, socket.SOCK_STREAM, 6, ""
        return [(*kinds, ("93.184.215.14", 80)), (*kinds, ("127.0.0.1", 80))]

    with pytest.raises(InvalidRequest, match="not on the public network"):
        await fetch_image("http://example.com/a.png", look_up=resolve)


@pytest.mark.parametrize(
    ("url", "domains", "said"),
    [
        ("http://evil.example/a.png", ["example.com"], "does not download images from evil.example"),
        ("http://example.com.evil.example/a.png", ["*.example.com", "example.com"], "does not download images from"),
        ("http://notexample.com/a.png", ["*.example.com"], "does not download images from"),
        ("http://user:pw@example.com/a.png", ["*"], "without a user name"),
        ("http:///a.png", ["*"], "of a host"),
        ("gopher://example.com/", ["*"], "http or https"),
    ],
)
async def test_fetcher_rejects_disallowed_urls(url: str, domains: list[str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        await fetch_image(url, *domains)


async def test_fetcher_times_out_on_silent_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetcher, "FETCH_TIMEOUT", 0.2)
    late = pytest.raises(InvalidRequest, match=r"did not arrive within 0\.2 seconds")
    with socket.create_server(("127.0.0.1", 0)) as silent, late:
        await fetch_image(f"http://127.0.0.1:{silent.getsockname()[1]}/", anywhere=True)


async def test_domain_wildcard_includes_nested_subdomains() -> None:
    fetcher = ImageFetcher(["*.localhost"], lambda address: False)
    with pytest.raises(InvalidRequest, match=r"not on the public network|cannot be fetched"):
        await fetcher.fetch_images({"http://a.b.localhost:1/": WHERE}, lambda size: None)


async def test_fetcher_reserves_bytes_during_download_and_bounds_total(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes count before a host has sent them all, and over all images of a request."""
    monkeypatch.setattr(image_fetcher, "MAX_TOTAL_BYTES", 4 << 20)
    reserved, fetcher = list[int](), ImageFetcher(["*"], lambda address: True)

    def hold(size: int) -> None:
        reserved.append(size)
        if sum(reserved) > 1 << 20:
            raise Overloaded("full")

    with pytest.raises(Overloaded):
        await fetcher.fetch_images({f"{server}/endless": WHERE}, hold)
    assert sum(reserved) < 2 << 20
    many, held = {f"{server}/endless#{index}": WHERE for index in range(4)}, list[int]()
    with pytest.raises(InvalidRequest, match="MiB"):
        await fetcher.fetch_images(many, held.append)
    assert sum(held) <= image_fetcher.MAX_TOTAL_BYTES


async def test_fetcher_tries_every_address_of_host(server: str) -> None:
    """Some hosts have an IPv6 address that is unreachable from here."""
    port = int(server.rpartition(":")[2])

    def resolve(*args: object, **options: object) -> list[tuple[object, ...]]:
        kinds = socket.AF_INET, socket.SOCK_STREAM, 6, ""
        return [(*kinds, ("127.0.0.2", 1)), (*kinds, ("127.0.0.1", port))]

    assert await fetch_image(f"{server}/image", anywhere=True, look_up=resolve) == b"pixels"
