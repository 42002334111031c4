"""Fetches images by HTTP from hosts that the operator allows. A URL must not reach what only this machine reaches, so
addresses must be public when connecting, also after redirects. Environment proxies are ignored, because they resolve
names themselves.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpcore

from quire.engine.common.errors import QuireError
from quire.engine.images.image_decoding import MAX_FILE_BYTES, image_error
from quire.server.access.host_addresses import matches_any_host_pattern

FETCH_TIMEOUT = 10.0
MAX_REDIRECTS = 3
MAX_TOTAL_BYTES = 48 << 20
MAX_FETCHING_REQUESTS = 64
_MAX_CONNECTIONS = 4
_NUM_LOOKUP_THREADS = 4
_CONNECT_TIMEOUT = 3.0
"""Seconds to connect to an address of a host. For the last address, the request's own timeout applies."""
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)
_IPV4_EMBEDDING_NETWORKS = tuple(
    ipaddress.ip_network(each) for each in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")
)


LookUpHost = Callable[..., Sequence[tuple[Any, ...]]]


class ForbiddenAddress(Exception):
    """A host has an address that is not allowed, or no address."""


def is_public_address(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public_address(str(ip.ipv4_mapped))
        if any(ip in network for network in _IPV4_EMBEDDING_NETWORKS):
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class GuardedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to a host only if all its addresses are allowed when it connects."""

    def __init__(self, may_reach: Callable[[str], bool], lookups: Executor, look_up: LookUpHost) -> None:
        self._may_reach = may_reach
        self._lookups = lookups
        self._look_up = look_up
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the interface is httpcore's
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        look_up = partial(self._look_up, host.strip("[]"), port, type=socket.SOCK_STREAM)
        address_infos = await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)
        addresses = list(dict.fromkeys(str(each[4][0]) for each in address_infos))
        if not addresses or not all(self._may_reach(each) for each in addresses):
            raise ForbiddenAddress
        *others, last = addresses
        for address in others:
            try:
                return await self._network.connect_tcp(address, port, _CONNECT_TIMEOUT, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._network.connect_tcp(last, port, timeout, local_address, socket_options)

    async def connect_unix_socket(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        raise ForbiddenAddress

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(slots=True)
class _ByteBudget:
    """Counts the bytes of all a request's images as they arrive, because hosts may send more than they announce."""

    charge_bytes: Callable[[int], None]
    bytes_left: int

    def count_bytes(self, size: int) -> None:
        self.bytes_left -= size
        if self.bytes_left < 0:
            raise image_error(
                "messages", f"the images at its addresses have more than {MAX_TOTAL_BYTES >> 20} MiB together"
            )
        self.charge_bytes(size)


class ImageFetcher:
    def __init__(
        self,
        domains: Sequence[str],
        may_reach: Callable[[str], bool] = is_public_address,
        look_up: LookUpHost = socket.getaddrinfo,
    ) -> None:
        """`domains`: see matches_any_host_pattern."""
        self._domains = [each.lower().rstrip(".") for each in domains]
        self._lookups = ThreadPoolExecutor(_NUM_LOOKUP_THREADS, "names")
        self._network = GuardedNetwork(may_reach, self._lookups, look_up)
        self._ssl_context = httpcore.default_ssl_context() if domains else None  # takes 20 ms to load

    def stop_lookup_threads(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def fetch_images(self, urls: Mapping[str, str], charge_bytes: Callable[[int], None]) -> dict[str, bytes]:
        """`urls` maps each URL to the request's field that contains it, which errors name. Raises InvalidRequest and
        the errors of `charge_bytes`.
        """
        contents, budget = dict[str, bytes](), _ByteBudget(charge_bytes, MAX_TOTAL_BYTES)
        async with (
            httpcore.AsyncConnectionPool(
                ssl_context=self._ssl_context,
                network_backend=self._network,
                max_connections=_MAX_CONNECTIONS,
                keepalive_expiry=0,
            ) as pool,
            asyncio.TaskGroup() as tasks,
        ):
            fetch_tasks = {
                url: tasks.create_task(_result_or_error(self._fetch_image(pool, url, where, budget)))
                for url, where in urls.items()
            }
        for url, task in fetch_tasks.items():
            content = task.result()
            if isinstance(content, QuireError):
                raise content
            contents[url] = content
        return contents

    async def _fetch_image(
        self, pool: httpcore.AsyncConnectionPool, url: str, where: str, budget: _ByteBudget
    ) -> bytes:
        try:
            async with asyncio.timeout(FETCH_TIMEOUT):
                for _ in range(MAX_REDIRECTS + 1):
                    content, url = await self._fetch_once(pool, self._validate_url_to_ascii(url, where), where, budget)
                    if content is not None:
                        return content
        except TimeoutError:
            raise image_error(where, f"the image did not arrive within {FETCH_TIMEOUT:g} seconds") from None
        except ForbiddenAddress:
            raise image_error(where, "its host is not on the public network") from None
        except (
            OSError,
            UnicodeError,
            ValueError,
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
        ):
            raise image_error(where, "the image cannot be fetched from its address") from None
        raise image_error(where, f"its address redirects more than {MAX_REDIRECTS} times")

    def _validate_url_to_ascii(self, url: str, where: str) -> str:
        url = _url_to_ascii(url)
        split = urlsplit(url)
        host = (split.hostname or "").rstrip(".")
        if split.scheme not in ("http", "https") or not host or split.username or split.password:
            raise image_error(where, "must be an http or https address of a host, without a user name")
        if not matches_any_host_pattern(host, self._domains):
            raise image_error(
                where, f"this server does not download images from {host[:100]} (--allowed-media-domains)"
            )
        return url

    async def _fetch_once(
        self, pool: httpcore.AsyncConnectionPool, url: str, where: str, budget: _ByteBudget
    ) -> tuple[bytes | None, str]:
        """Returns the content and `url`, or None and the URL of the redirect."""
        pieces, size = [], 0
        headers = [(b"accept", b"image/*"), (b"user-agent", b"quire")]
        async with pool.stream("GET", url, headers=headers) as response:
            if response.status in _REDIRECT_STATUSES:
                location = next((value for name, value in response.headers if name.lower() == b"location"), b"")
                return None, urljoin(url, location.decode("ascii", "replace"))
            if response.status != 200:
                raise image_error(where, f"its address returned status {response.status}")
            async for piece in response.aiter_stream():
                pieces.append(piece)
                size += len(piece)
                if size > MAX_FILE_BYTES:
                    raise image_error(where, f"the image at its address has more than {MAX_FILE_BYTES >> 20} MiB")
                budget.count_bytes(len(piece))
        return b"".join(pieces), url


def _url_to_ascii(url: str) -> str:
    """Applies IDNA, which turns a host's non-ASCII digits into ASCII digits. Raises ValueError."""
    if url.isascii():
        return url
    split = urlsplit(url)
    host = split.netloc.encode("idna").decode("ascii")
    path, query = (quote(each, safe="/%:@!$&'()*+,;=~?") for each in (split.path, split.query))
    return split._replace(netloc=host, path=path, query=query, fragment="").geturl()


async def _result_or_error(fetch: Any) -> bytes | QuireError:
    """Returns an error instead of raising it, so that other fetches continue."""
    try:
        content: bytes = await fetch
    except QuireError as error:
        return error
    return content
