"""Headers of trusted gateways set tenant and priority; the same headers from other clients are ignored."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from quire.engine.common.errors import ConfigError
from quire.server.access.gateway_headers import FAIRNESS_HEADER, OBJECTIVE_HEADER, TrustedGateways
from quire.server.config import ServerConfig
from tests.server.api import open_api
from tests.server.fake import FakeEngine, hashed

PATHS = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1, "priority": 5},
}
HEADERS = {FAIRNESS_HEADER: "team-1", OBJECTIVE_HEADER: "urgent"}


async def engine_requests(address: str, headers: dict[str, str], **options: Any) -> list[tuple[str, int, str]]:
    """The tenant, priority and cache salt of a request from this address to each path."""
    async with open_api(FakeEngine(hashed(b"ab")), objective_priorities=["urgent=-7", "a=b=3"], **options) as api:
        transport = httpx.ASGITransport(app=api.app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://quire") as http:
            for path, body in PATHS.items():
                assert (await http.post(path, json=body, headers=headers)).status_code == 200
        return [(request.tenant, request.priority, request.cache_salt) for request in api.engine.seen]


@pytest.mark.parametrize("address", ["10.1.2.3", "::1"])
async def test_trusted_gateway_headers_set_tenant_and_priority(address: str) -> None:
    requests = await engine_requests(address, HEADERS, trusted_gateways=["10.0.0.0/8", "::1"])
    assert requests == [("/team-1", -7, "")] * 3


async def test_gateway_headers_from_untrusted_address_are_ignored() -> None:
    plain = [("", 0, ""), ("", 0, ""), ("", 5, "")]
    assert await engine_requests("11.1.2.3", HEADERS, trusted_gateways=["10.0.0.0/8"]) == plain
    assert await engine_requests("10.1.2.3", HEADERS) == plain
    unknown = {FAIRNESS_HEADER: "no good\tname", OBJECTIVE_HEADER: "unknown"}
    assert await engine_requests("10.1.2.3", unknown, trusted_gateways=["10.1.2.3"]) == plain


async def test_gateway_tenants_of_one_key_share_cache_salt() -> None:
    headers = {**HEADERS, "x-api-key": "b"}
    options: dict[str, Any] = {"trusted_gateways": ["10.0.0.0/8"], "api_key": ["a"], "admin_api_key": ["b"]}
    salts = {salt for _, _, salt in await engine_requests("10.0.0.1", headers, **options)}
    (salt,) = {salt for _, _, salt in await engine_requests("11.0.0.1", headers, **options)}
    assert salts == {salt}


@pytest.mark.parametrize(
    ("field", "value"), [("trusted_gateways", "nowhere"), ("objective_priorities", "x"), ("objective_priorities", "=1")]
)
def test_config_error_names_invalid_gateway_setting(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=field):
        TrustedGateways(ServerConfig.model_validate({field: [value]}))
