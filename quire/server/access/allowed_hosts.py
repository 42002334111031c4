"""Prevents DNS rebinding, which only the Host header reveals."""

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
    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError."""
        self._allowed = [_parse_host_pattern(name) for name in config.allowed_hosts]
        self._has_api_keys = config.has_api_keys
        self._is_enforced = False

    def enforce_if_loopback_only(self, listeners: Sequence[socket.socket]) -> None:
        self._is_enforced = not self._has_api_keys and all(map(is_loopback_listener, listeners))

    def find_refused_host(self, scope: Scope) -> str | None:
        """Requests without the header Host are accepted, because browsers always send it and HTTP/1.0 programs do not.
        X-Forwarded-Host is ignored.
        """
        if not self._is_enforced:
            return None
        return next((host for host in host_header_values(scope) if not self._is_allowed(host)), None)

    def _is_allowed(self, host: str) -> bool:
        if is_local_or_private_host(host):
            return True
        name = normalize_host(host)
        return name is not None and matches_any_host_pattern(name, self._allowed)


class AllowedHostsMiddleware:
    def __init__(self, app: ASGIApp, hosts: AllowedHosts) -> None:
        self._app = app
        self._hosts = hosts
        self._has_warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = self._hosts.find_refused_host(scope) if scope["type"] != "lifespan" else None
        if host is None:
            return await self._app(scope, receive, send)
        host = host[:_MAX_SHOWN_CHARACTERS]
        if not self._has_warned:
            self._has_warned = True
            log.warning("a request to the host %r was refused: --allowed-hosts lists the hosts that are accepted", host)
        message = (
            f"This server listens only on this machine and needs no API key, so it refuses requests to {host!r}:"
            " start it with --allowed-hosts and that name, or with --api-key"
        )
        failure = ErrorInfo(403, message, "permission_error", None, "host_not_allowed")
        await error_response(scope["path"], failure, {})(scope, receive, send)


def host_header_values(scope: Scope) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]


def _parse_host_pattern(name: str) -> str:
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
