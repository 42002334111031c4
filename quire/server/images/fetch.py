"""Fetches images from addresses that the operator allows, by HTTP.

A caller's address must not reach what only this machine reaches: a host must be one of the operator's, and after its
name is resolved, at the moment of the connection, its address must be a public one; redirections are looked at in the
same way. Proxies of the environment are not asked, as they would resolve names themselves.
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

from quire.engine.errors import QuireError
from quire.engine.images.decode import MOST_BYTES, refused
from quire.server.access.addresses import matches

SECONDS = 10.0
"""For one image, redirections included."""
MOST_REDIRECTS = 3
MOST_IN_ALL = 48 << 20
"""Bytes of all images of a request."""
MOST_FETCHING = 64
"""Requests whose images are fetched at the same time."""
_CONNECTIONS = 4
"""Of a request."""
_LOOKUPS = 4
"""Threads that look up names, and nothing else: a name server that does not answer keeps them for a while."""
_CONNECTING = 3.0
"""Seconds for each address of a host but the last."""
_REDIRECTS = (301, 302, 303, 307, 308)
_EMBEDDING = tuple(ipaddress.ip_network(each) for each in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
"""Networks of IPv6 whose addresses stand for others of IPv4."""


LookUp = Callable[..., Sequence[tuple[Any, ...]]]


class Forbidden(Exception):
    """A host has no address that the server may connect to."""


def is_public(address: str) -> bool:
    """Whether an address is one of the public network: not private, loopback, link-local, multicast or reserved."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if any(found in network for network in _EMBEDDING):
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved


class GuardedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to addresses that may be reached, and to no others, whatever a name stands for."""

    def __init__(self, may_reach: Callable[[str], bool], lookups: Executor, look_up: LookUp) -> None:
        self._may_reach, self._lookups, self._look_up = may_reach, lookups, look_up
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
        found = await asyncio.get_running_loop().run_in_executor(self._lookups, look_up)
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        if not addresses or not all(self._may_reach(each) for each in addresses):
            raise Forbidden
        *others, last = addresses
        for address in others:
            try:
                return await self._network.connect_tcp(address, port, _CONNECTING, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._network.connect_tcp(last, port, timeout, local_address, socket_options)

    async def connect_unix_socket(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        raise Forbidden

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(slots=True)
class _Room:
    """What is left of a request's bytes. A host sends what it likes, so each piece counts when it comes."""

    hold: Callable[[int], None]
    left: int

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise refused("messages", f"the images at its addresses have more than {MOST_IN_ALL >> 20} MiB together")
        self.hold(size)


class Fetcher:
    """Fetches for all requests of a model."""

    def __init__(
        self,
        domains: Sequence[str],
        may_reach: Callable[[str], bool] = is_public,
        look_up: LookUp = socket.getaddrinfo,
    ) -> None:
        """`domains`: hosts that may be asked; *.example.com: all below it; *: any. `look_up`: finds a name's addresses,
        as getaddrinfo."""
        self._domains = [each.lower().rstrip(".") for each in domains]
        self._lookups = ThreadPoolExecutor(_LOOKUPS, "names")
        self._network = GuardedNetwork(may_reach, self._lookups, look_up)
        self._trusted = httpcore.default_ssl_context() if domains else None  # which takes 20 ms to read

    def close(self) -> None:
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def all(self, urls: Mapping[str, str], hold: Callable[[int], None]) -> dict[str, bytes]:
        """What is at these addresses, each with the field that names it. hold: is told of so many bytes more. Raises
        InvalidRequest, naming the field, and what `hold` raises."""
        found, room = dict[str, bytes](), _Room(hold, MOST_IN_ALL)
        async with (
            httpcore.AsyncConnectionPool(
                ssl_context=self._trusted,
                network_backend=self._network,
                max_connections=_CONNECTIONS,
                keepalive_expiry=0,
            ) as pool,
            asyncio.TaskGroup() as tasks,
        ):
            asked = {url: tasks.create_task(_kept(self._one(pool, url, where, room))) for url, where in urls.items()}
        for url, task in asked.items():
            content = task.result()
            if isinstance(content, QuireError):
                raise content
            found[url] = content
        return found

    async def _one(self, pool: httpcore.AsyncConnectionPool, url: str, where: str, room: _Room) -> bytes:
        try:
            async with asyncio.timeout(SECONDS):
                for _ in range(MOST_REDIRECTS + 1):
                    content, url = await self._answer(pool, self._allowed(url, where), where, room)
                    if content is not None:
                        return content
        except TimeoutError:
            raise refused(where, f"the image did not come within {SECONDS:g} seconds") from None
        except Forbidden:
            raise refused(where, "its host is not of the public network") from None
        except (
            OSError,
            UnicodeError,
            ValueError,
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
        ):
            raise refused(where, "the image cannot be fetched from its address") from None
        raise refused(where, f"its address leads on more than {MOST_REDIRECTS} times")

    def _allowed(self, url: str, where: str) -> str:
        """The address in ASCII. Raises InvalidRequest for one that may not be asked."""
        url = _ascii(url)
        split = urlsplit(url)
        host = (split.hostname or "").rstrip(".")
        if split.scheme not in ("http", "https") or not host or split.username or split.password:
            raise refused(where, "must be an http or https address of a host, without a user's name")
        if not matches(host, self._domains):
            raise refused(where, f"images are not fetched from {host[:100]} here (--allowed-media-domains)")
        return url

    async def _answer(
        self, pool: httpcore.AsyncConnectionPool, url: str, where: str, room: _Room
    ) -> tuple[bytes | None, str]:
        """The content, or None and the address that it leads on to."""
        kept, size = [], 0
        headers = [(b"accept", b"image/*"), (b"user-agent", b"quire")]
        async with pool.stream("GET", url, headers=headers) as response:
            if response.status in _REDIRECTS:
                location = next((value for name, value in response.headers if name.lower() == b"location"), b"")
                return None, urljoin(url, location.decode("ascii", "replace"))
            if response.status != 200:
                raise refused(where, f"its address answered with status {response.status}")
            async for piece in response.aiter_stream():
                kept.append(piece)
                size += len(piece)
                if size > MOST_BYTES:
                    raise refused(where, f"the image at its address has more than {MOST_BYTES >> 20} MiB")
                room.take(len(piece))
        return b"".join(kept), url


def _ascii(url: str) -> str:
    """An address as HTTP takes it: the host's letters by IDNA, under which digits of other kinds are digits, and the
    rest by their bytes. Raises ValueError."""
    if url.isascii():
        return url
    split = urlsplit(url)
    host = split.netloc.encode("idna").decode("ascii")
    path, query = (quote(each, safe="/%:@!$&'()*+,;=~?") for each in (split.path, split.query))
    return split._replace(netloc=host, path=path, query=query, fragment="").geturl()


async def _kept(work: Any) -> bytes | QuireError:
    """The result, or the error: the others are not cut off by it."""
    try:
        content: bytes = await work
    except QuireError as error:
        return error
    return content
