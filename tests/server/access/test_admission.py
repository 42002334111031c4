"""Admission: limits of queued requests and queued prompt tokens, with one engine and with several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.common.errors import InvalidRequest, Overloaded
from quire.server.access.admission import Admission, AdmissionTicket
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.config import ServerConfig


@pytest.mark.parametrize("engines", [1, 3])
def test_admission_rejects_requests_over_queue_limit_of_all_engines(engines: int) -> None:
    client: Any = SimpleNamespace(refusing=False, queued_tokens=0, num_open=0, num_open_of=lambda name: 0)
    tenant: Any = SimpleNamespace(name="")
    config = ServerConfig(max_num_seqs=4, max_queued_requests=2, data_parallel_size=engines)
    admission = Admission(client, config, 512, has_api_keys=False)
    client.num_open = 4 * engines + 1
    admission.check_availability(tenant)
    client.num_open += 1
    with pytest.raises(Overloaded, match="Too many requests are waiting"):
        admission.check_availability(tenant)


def test_prompt_tokens_count_until_request_usage_is_settled() -> None:
    """A stream whose client does not read holds its prompt after the engine has finished."""
    client: Any = SimpleNamespace(refusing=False, queued_tokens=0, num_open=0, num_open_of=lambda name: 0)
    tenant = Tenant("", b"", RateLimits(None, None))
    config = ServerConfig(max_num_seqs=2, max_queued_tokens=1000)
    admission = Admission(client, config, 500, has_api_keys=False)

    def admit(tokens: int) -> AdmissionTicket:
        return admission.admit_generation(tenant, num_prompts=1, prompt_tokens=tokens, n=1, max_tokens=9, priority=0)

    first, second = admit(1500), admit(500)
    with pytest.raises(Overloaded, match="held already"):
        admit(1)
    first.settle_usage(5)
    first.settle_usage(5)
    admit(1500)
    with pytest.raises(Overloaded):
        admit(1)
    second.settle_usage(5)
    admit(500)


def test_request_over_key_queue_share_is_rejected_without_retry() -> None:
    """A 503 would invite retries of a request that never fits: a key's share is at most what it leaves to others."""
    client: Any = SimpleNamespace(refusing=False, queued_tokens=0, num_open=0, num_open_of=lambda name: 0)
    tenant = Tenant("a", b"", RateLimits(None, None))
    admission = Admission(client, ServerConfig(max_num_seqs=4, max_queued_requests=9), 1000, has_api_keys=True)

    def admit(prompts: int) -> None:
        admission.admit_generation(tenant, num_prompts=prompts, prompt_tokens=prompts, n=1, max_tokens=1, priority=0)

    admit(9)
    with pytest.raises(InvalidRequest, match="10 prompts with n 1 are more than 9 answers"):
        admit(10)
