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


async def seen(address: str, headers: dict[str, str], **options: Any) -> list[tuple[str, int, str]]:
    """The tenant, priority and cache salt of a request from this address to each path."""
    async with open_api(FakeEngine(hashed(b"ab")), objective_priorities=["urgent=-7", "a=b=3"], **options) as api:
        transport = httpx.ASGITransport(app=api.app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://quire") as http:
            for path, body in PATHS.items():
                assert (await http.post(path, json=body, headers=headers)).status_code == 200
        return [(request.tenant, request.priority, request.cache_salt) for request in api.engine.seen]


@pytest.mark.parametrize("address", ["10.1.2.3", "::1"])
async def test_a_trusted_gateway_names_tenant_and_priority(address: str) -> None:
    found = await seen(address, HEADERS, trusted_gateways=["10.0.0.0/8", "::1"])
    assert found == [("/team-1", -7, "")] * 3


async def test_nobody_else_does() -> None:
    plain = [("", 0, ""), ("", 0, ""), ("", 5, "")]
    assert await seen("11.1.2.3", HEADERS, trusted_gateways=["10.0.0.0/8"]) == plain
    assert await seen("10.1.2.3", HEADERS) == plain
    unknown = {FAIRNESS_HEADER: "no good\tname", OBJECTIVE_HEADER: "unknown"}
    assert await seen("10.1.2.3", unknown, trusted_gateways=["10.1.2.3"]) == plain


async def test_a_part_of_a_key_shares_its_prefixes_and_its_bounds() -> None:
    headers = {**HEADERS, "x-api-key": "b"}
    options: dict[str, Any] = {"trusted_gateways": ["10.0.0.0/8"], "api_key": ["a"], "admin_api_key": ["b"]}
    salts = {salt for _, _, salt in await seen("10.0.0.1", headers, **options)}
    (salt,) = {salt for _, _, salt in await seen("11.0.0.1", headers, **options)}
    assert salts == {salt}


@pytest.mark.parametrize(
    ("field", "value"), [("trusted_gateways", "nowhere"), ("objective_priorities", "x"), ("objective_priorities", "=1")]
)
def test_wrong_settings_are_named(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=field):
        TrustedGateways(ServerConfig.model_validate({field: [value]}))
