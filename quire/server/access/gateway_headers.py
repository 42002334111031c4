"""Headers of Kubernetes' Gateway API Inference Extension, by which trusted gateways name the user behind a shared key,
and a request's priority.
"""

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


class TrustedGateways:
    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError."""
        try:
            self._networks = [ip_network(entry, strict=False) for entry in config.trusted_gateways]
        except ValueError as error:
            raise ConfigError(f"trusted_gateways: {error}", param="trusted_gateways") from None
        self.trusts_any = bool(self._networks)
        self._priorities: dict[str, int] = {}
        for entry in config.objective_priorities:
            name, _, priority = entry.rpartition("=")
            if not name or not re.fullmatch(r"[+-]?\d{1,9}", priority):
                raise ConfigError(f"objective_priorities: {entry!r} is not NAME=PRIORITY", param="objective_priorities")
            self._priorities[name] = int(priority)

    def tenant_for_fairness_id(self, tenant: Tenant, scope: Scope) -> Tenant:
        """Gives a user that the gateway names a separate share of the engine. Everything else, such as limits and
        stored data, remains the key's.
        """
        name = self._read_trusted_header(scope, FAIRNESS_HEADER)
        if name is None or re.fullmatch(SAFE_ID_PATTERN, name) is None:
            return tenant
        return replace(tenant, name=f"{tenant.name}/{name}")

    def resolve_priority(self, scope: Scope) -> int | None:
        name = self._read_trusted_header(scope, OBJECTIVE_HEADER)
        return None if name is None else self._priorities.get(name)

    def _read_trusted_header(self, scope: Scope, header: str) -> str | None:
        if scope.get("client") is None:
            return None
        try:
            address = ip_address(scope["client"][0])
        except ValueError:  # a Unix socket
            return None
        trusted = any(address in network for network in self._networks)
        return Headers(scope=scope).get(header) if trusted else None
