"""What trusted gateways say about a request: to which of several users of one key it belongs, and how urgent it is. The
headers are those of Kubernetes' Gateway API Inference Extension."""

from __future__ import annotations

import re
from dataclasses import replace
from ipaddress import ip_address, ip_network

from starlette.datastructures import Headers
from starlette.types import Scope

from quire.engine.common.errors import ConfigError
from quire.server.access.tenants import Tenant
from quire.server.config import ServerConfig
from quire.server.protocol.request_bodies import SAFE_ID_PATTERN

FAIRNESS_HEADER, OBJECTIVE_HEADER = "x-gateway-inference-fairness-id", "x-gateway-inference-objective"
PRIORITY_SCOPE_KEY = "quire.priority"
"""The scope's key of the priority of what the server asks itself."""


class TrustedGateways:
    """Reads the headers of requests that come from the addresses in `config.trusted_gateways`, and of no others."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError for what is no address, network, or NAME=PRIORITY."""
        try:
            self._networks = [ip_network(entry, strict=False) for entry in config.trusted_gateways]
        except ValueError as error:
            raise ConfigError(f"trusted_gateways: {error}", param="trusted_gateways") from None
        self._priorities: dict[str, int] = {}
        for entry in config.objective_priorities:
            name, _, priority = entry.rpartition("=")
            if not name or not re.fullmatch(r"[+-]?\d{1,9}", priority):
                raise ConfigError(f"objective_priorities: {entry!r} is not NAME=PRIORITY", param="objective_priorities")
            self._priorities[name] = int(priority)

    def tenant_for_fairness_id(self, tenant: Tenant, scope: Scope) -> Tenant:
        """The tenant, or the part of it that the gateway names: it has its own share of the engine, and all else in
        common with the others of its key."""
        name = self._read_trusted_header(scope, FAIRNESS_HEADER)
        if name is None or re.fullmatch(SAFE_ID_PATTERN, name) is None:
            return tenant
        return replace(tenant, name=f"{tenant.name}/{name}")

    def resolve_priority(self, scope: Scope) -> int | None:
        """The priority of the objective that the gateway names, or of what the server asks itself; None where nobody
        names one that is known."""
        if (scope_priority := scope.get(PRIORITY_SCOPE_KEY)) is not None:
            return int(scope_priority)
        name = self._read_trusted_header(scope, OBJECTIVE_HEADER)
        return None if name is None else self._priorities.get(name)

    def _read_trusted_header(self, scope: Scope, header: str) -> str | None:
        if not self._networks or scope.get("client") is None:
            return None
        try:
            address = ip_address(scope["client"][0])
        except ValueError:  # a Unix socket's
            return None
        trusted = any(address in network for network in self._networks)
        return Headers(scope=scope).get(header) if trusted else None
