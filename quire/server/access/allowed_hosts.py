"""Which names a server may be asked by that is this machine's alone.

A web page may let its own name point to 127.0.0.1 (DNS rebinding). Browsers then take the server for a part of the
page's site, and let the page read and delete what is there. Only the header Host tells.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.common.errors import ConfigError
from quire.server.access.host_addresses import (
    is_local_or_private_host,
    is_loopback_listener,
    matches_any_host_pattern,
    normalize_host,
)
from quire.server.config import ServerConfig
from quire.server.error_responses import ErrorInfo, error_response

_HOST_PATTERN = re.compile(r"\*|(?:\*\.)?[^\s*/:@]+")
_MAX_SHOWN_CHARACTERS = 100
log = logging.getLogger("quire.server")


class AllowedHosts:
    """The names of a server. They are checked if it needs no API keys and listens on the loopback interface alone."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError for allowed hosts that are no names."""
        self._allowed = [_parse_host_pattern(name) for name in config.allowed_hosts]
        self._has_api_keys = config.has_api_keys
        self._is_enforced = False

    def enforce_if_loopback_only(self, listeners: Sequence[socket.socket]) -> None:
        """The server listens on these sockets."""
        self._is_enforced = not self._has_api_keys and all(map(is_loopback_listener, listeners))

    def find_refused_host(self, scope: Scope) -> str | None:
        """The host that a request may not ask for. One without a header Host passes, as programs with HTTP/1.0 send it
        and browsers never do. Of X-Forwarded-Host nothing is read."""
        if not self._is_enforced:
            return None
        return next((host for host in host_header_values(scope) if not self._is_allowed(host)), None)

    def _is_allowed(self, host: str) -> bool:
        if is_local_or_private_host(host):
            return True
        name = normalize_host(host)
        return name is not None and matches_any_host_pattern(name, self._allowed)


class AllowedHostsMiddleware:
    """Answers requests for other hosts with 403, on whatever path."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self._app = app
        self._hosts = hosts
        self._has_warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = self._hosts.find_refused_host(scope) if scope["type"] == "http" else None
        if host is None:
            return await self._app(scope, receive, send)
        host = host[:_MAX_SHOWN_CHARACTERS]
        if not self._has_warned:
            self._has_warned = True
            log.warning("a request to the host %r was refused: --allowed-hosts names those that may be asked", host)
        message = (
            f"This server listens on this machine alone and asks for no API key, so it is not for requests to {host!r}:"
            " start it with --allowed-hosts and that name, or with --api-key"
        )
        failure = ErrorInfo(403, message, "permission_error", None, "host_not_allowed")
        await error_response(scope["path"], failure, {})(scope, receive, send)


def host_header_values(scope: Scope) -> list[str]:
    """All that the headers Host say."""
    return [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]


def _parse_host_pattern(name: str) -> str:
    """An allowed host's name in lower case. Raises ConfigError."""
    lowered = name.strip().lower().removesuffix(".")
    try:
        return str(ip_address(lowered.strip("[]")))
    except ValueError:
        pass
    if _HOST_PATTERN.fullmatch(lowered) is None:
        raise ConfigError(
            f"allowed_hosts: {name!r} is not the name of a host, without scheme and port", param="allowed_hosts"
        )
    return lowered
