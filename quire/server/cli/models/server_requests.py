from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from quire.engine.common.errors import EngineError
from quire.server.cli.server_client import (
    auth_headers,
    client_ssl_context,
    error_from_response,
    normalize_server_url,
    unreachable_error,
)

LOCAL_URL = "http://127.0.0.1:8000"
_TIMEOUT_SECONDS = 30.0


@contextmanager
def open_client(args: argparse.Namespace) -> Iterator[httpx.Client]:
    """The base URL has no /v1. Raises ConfigError."""
    base = normalize_server_url(args.url, tls=args.cacert is not None)
    with httpx.Client(
        base_url=base,
        headers=auth_headers(args.api_key),
        verify=client_ssl_context(args.cacert),
        timeout=_TIMEOUT_SECONDS,
    ) as http:
        yield http


def request_json(http: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Raises EngineError."""
    try:
        response = http.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise unreachable_error(str(http.base_url).rstrip("/"), error) from None
    if response.is_error:
        raise error_from_response(response)
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise EngineError(f"{response.url} did not answer with a JSON object: it is not a Quire server")
    return answer
