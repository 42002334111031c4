"""Requests that the OpenAPI description allows, and requests that it forbids: no 5xx, every 4xx in its API's error
format.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.server.api import describe_api, open_api
from tests.server.fake import FakeEngine, hashed
from tests.server.routes.test_vectors import serving
from tests.texts import pair_tokenizer
from tests.tiny_encoders import save_tiny_encoder

pytestmark = pytest.mark.slow

ENGINE_TOKENS = b"abc "
EXAMPLES = int(os.environ.get("QUIRE_SCHEMATHESIS_EXAMPLES", "10"))
"""Per operation and mode; a long run sets more."""


RECORDS = "/v1/engine/trace"
"""Responds only after the number of seconds in the request."""


GROUP = "/init_weights_group"
"""Waits for the other ranks of a group, in a process of its own, for the number of seconds in the request."""


@cache
def operations() -> tuple[Any, ...]:
    """Return every method of every route, except routes that wait and streams without end. Operations without a body
    are described by their path alone.
    """
    description = schemathesis.openapi.from_dict(describe_api())
    all_operations = [result.ok() for result in description.get_all_operations()]
    waits = (RECORDS, GROUP)
    return tuple(
        each
        for each in all_operations
        if each.path not in waits and "text/event-stream" not in str(each.definition.raw)
    )


def operation_cases() -> list[Any]:
    """Return each operation with requests that the description allows, and those with a body also with requests that it
    forbids.
    """
    return [
        pytest.param(operation, mode, id=f"{operation.label} {mode.value}")
        for operation in operations()
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE or operation.body
    ]


@pytest.mark.parametrize(("operation", "mode"), operation_cases())
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_generated_request_gets_no_5xx_and_valid_error_format(
    operation: Any, mode: GenerationMode, data: st.DataObject
) -> None:
    kwargs = request_options(data.draw(operation.as_strategy(generation_mode=mode)))
    async with open_api(FakeEngine(hashed(ENGINE_TOKENS), max_model_len=64)) as api:
        check_response(await api.http.request(**kwargs), operation.path)


VECTORS = ("/v1/embeddings", "/pooling", "/classify", "/v1/score", "/v1/rerank", "/v2/rerank", "/invocations")


@pytest.fixture(scope="module", params=[None, 1, 3], ids=["embeddings", "scores", "labels"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"), "bert", labels=request.param)


@pytest.mark.parametrize(("operation", "mode"), [each for each in operation_cases() if each.values[0].path in VECTORS])
@settings(max_examples=max(1, EXAMPLES // 6), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_generated_request_to_real_encoder_gets_valid_status(
    encoder: Path, operation: Any, mode: GenerationMode, data: st.DataObject
) -> None:
    kwargs = request_options(data.draw(operation.as_strategy(generation_mode=mode)))
    async with serving(encoder, pair_tokenizer().tokenizer) as api:
        check_response(await api.http.request(**kwargs), operation.path)


def request_options(case: Any) -> dict[str, Any]:
    """Return the HTTP request of a generated case."""
    transport = case.as_transport_kwargs(base_url="http://quire")
    kwargs = {name: transport[name] for name in ("method", "url", "params", "headers", "json") if name in transport}
    if isinstance(transport.get("data"), bytes):
        kwargs["content"] = transport["data"]
    return kwargs


def check_response(response: httpx.Response, path: str) -> None:
    if response.status_code >= 400:
        check_error(response.json(), path)
        in_time = "timeout" not in response.text  # 503 and 504, which the request's own timeout causes
        assert response.status_code < 500 or not in_time, response.text
    elif response.request.method != "HEAD" and response.headers.get("content-type", "").startswith("application/json"):
        assert response.json() is not None


ERROR_TYPES = ("not_found_error", "server_error", "unavailable_error")


def check_error(body: Any, path: str) -> None:
    if path.startswith("/v1/messages"):
        assert (set(body), set(body["error"]), body["type"]) == ({"type", "error"}, {"type", "message"}, "error")
        return
    if path == "/v1/systemone":  # as TypeSafe has them
        assert set(body) == {"detail"}
        details = [set(each) for each in body["detail"]] if isinstance(body["detail"], list) else [set(body["detail"])]
        assert details in ([{"loc", "msg", "type"}], [{"error_type", "message"}])
        return
    assert set(body) == {"error"}
    if path.startswith("/api/"):  # as Ollama has them
        assert isinstance(body["error"], str)
        return
    if path in ("/completion", "/infill", "/slots"):  # llama.cpp's error form
        assert set(body["error"]) - {"n_prompt_tokens", "n_ctx"} == {"code", "message", "type"}
        assert body["error"]["type"] in {"invalid_request_error", "exceed_context_size_error", *ERROR_TYPES}
        return
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["type"] in {"invalid_request_error", "not_found_error", "server_error"}
