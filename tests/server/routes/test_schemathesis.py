"""Requests that the OpenAPI description allows, and ones that it does not: no 5xx, every 4xx in OpenAI's shape."""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.server.api import make_app, open_api
from tests.server.fake import FakeEngine, hashed

pytestmark = pytest.mark.slow

ENGINE_TOKENS = b"abc "
EXAMPLES = int(os.environ.get("QUIRE_SCHEMATHESIS_EXAMPLES", "30"))
"""Per kind; a long run asks for more."""


RECORDS = "/v1/engine/trace"
"""Answers after as many seconds as it is asked for."""


def operations() -> list[Any]:
    """Every method of every route but recordings and streams without end; those without a body are described by their
    path alone."""
    description = make_app(FakeEngine(hashed(ENGINE_TOKENS))).openapi()
    found = [result.ok() for result in schemathesis.openapi.from_dict(description).get_all_operations()]
    return [each for each in found if each.path != RECORDS and "text/event-stream" not in str(each.definition.raw)]


def kinds() -> list[Any]:
    """Each operation with requests as described, and those with a body with requests that are not."""
    return [
        pytest.param(operation, mode, id=f"{operation.label} {mode.value}")
        for operation in operations()
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or operation.body
    ]


@pytest.mark.parametrize(("operation", "mode"), kinds())
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_every_answer_has_a_status_and_a_shape(operation: Any, mode: GenerationMode, data: st.DataObject) -> None:
    case = data.draw(operation.as_strategy(generation_mode=mode))
    sent = case.as_transport_kwargs(base_url="http://quire")
    kept = {name: sent[name] for name in ("method", "url", "params", "headers", "json") if name in sent}
    if isinstance(sent.get("data"), bytes):
        kept["content"] = sent["data"]
    async with open_api(FakeEngine(hashed(ENGINE_TOKENS), max_model_len=64)) as api:
        response = await api.http.request(**kept)
    if response.status_code >= 400:
        check_error(response.json())
        in_time = response.json()["error"]["code"] != "queue_timeout"  # 503, by the request's own wish
        assert response.status_code < 500 or not in_time, response.text
    elif response.headers.get("content-type", "").startswith("application/json"):
        assert response.json() is not None


def check_error(body: Any) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["type"] in {"invalid_request_error", "not_found_error", "server_error"}
