from __future__ import annotations

from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.access.gateway_headers import TrustedGateways
from quire.server.access.path_rules import ADMIN_PATHS, ADMIN_PREFIX, LOCAL_ONLY_PATHS, METRICS_PATH, is_public_path
from quire.server.access.tenants import Tenant, Tenants
from quire.server.error_responses import ErrorInfo, error_response


class AuthenticationMiddleware:
    """Sets the scope's tenant. With API keys, answers 401 without a valid key, and 403 for ADMIN_PREFIX and ADMIN_PATHS
    if the key is not an admin's. Without API keys, answers 403 for LOCAL_ONLY_PATHS unless a program on this machine
    sends the request.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants, gateways: TrustedGateways) -> None:
        self._app = app
        self._tenants = tenants
        self._gateways = gateways if gateways.trusts_any else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if "tenant" in scope:  # the server's own request
            return await self._app(scope, receive, send)
        if not self._tenants.requires_key and scope["path"] in LOCAL_ONLY_PATHS and not is_local_program(scope):
            message = "Without API keys only programs on this machine may use this route: see --admin-api-key"
            failure = ErrorInfo(403, message, "permission_error", None, "admin_key_needed")
            return await error_response(scope["path"], failure, {})(scope, receive, send)
        if not self._tenants.requires_key or is_public_path(scope["path"]):
            scope["tenant"] = self._resolve_tenant(self._tenants.anonymous, scope)
            return await self._app(scope, receive, send)
        key = read_api_key(Headers(scope=scope))
        tenant = self._tenants.find_by_key(key)
        if tenant is None and scope["path"] == METRICS_PATH:
            tenant = self._tenants.find_by_metrics_key(key)
        if not key or tenant is None:
            missing = "You didn't provide an API key: Authorization: Bearer KEY, or x-api-key: KEY"
            message = "Incorrect API key provided" if key else missing
            failure = ErrorInfo(401, message, "authentication_error", None, "invalid_api_key")
        elif (scope["path"].startswith(ADMIN_PREFIX) or scope["path"] in ADMIN_PATHS) and not tenant.admin:
            message = "This route needs an admin's API key: see --admin-api-key"
            failure = ErrorInfo(403, message, "permission_error", None, "admin_key_needed")
        else:
            scope["tenant"] = self._resolve_tenant(tenant, scope)
            return await self._app(scope, receive, send)
        headers = {"WWW-Authenticate": "Bearer"} if failure.status == 401 else {}
        return await error_response(scope["path"], failure, headers)(scope, receive, send)

    def _resolve_tenant(self, tenant: Tenant, scope: Scope) -> Tenant:
        return tenant if self._gateways is None else self._gateways.tenant_for_fairness_id(tenant, scope)


def is_local_program(scope: Scope) -> bool:
    """Web pages, which send the header Origin, do not count, because browsers let any page send a POST without a body
    to a loopback server.
    """
    if "origin" in Headers(scope=scope):
        return False
    client = scope.get("client")
    try:
        return client is None or not client[0] or ip_address(client[0]).is_loopback
    except ValueError:
        return False


def read_api_key(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else headers.get("x-api-key", "").strip()


def tenant_of(scope: Scope) -> Tenant:
    tenant = scope["tenant"]
    assert isinstance(tenant, Tenant)
    return tenant


def owner_of(request: Request) -> str:
    """Returns "" without keys. A key's name would not identify the owner, because the name may later be given to
    another key.
    """
    return tenant_of(request.scope).digest.hex()
