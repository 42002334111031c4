"""Asks a running server, for the commands that tell of its models."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from quire.engine.errors import EngineError
from quire.server.cli.connect import headers, refusal, server_url, trusted, unreachable

LOCAL = "http://127.0.0.1:8000"
_SECONDS = 30.0


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[httpx.Client]:
    """A client of the server that connect.server_flags name; its base has no /v1. Raises ConfigError."""
    base = server_url(args.url, tls=args.cacert is not None)
    with httpx.Client(
        base_url=base, headers=headers(args.api_key), verify=trusted(args.cacert), timeout=_SECONDS
    ) as http:
        yield http


def ask(http: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object that is answered. Raises EngineError with what the server says, and Unreachable."""
    try:
        response = http.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise unreachable(str(http.base_url).rstrip("/"), error) from None
    if response.is_error:
        raise refusal(response)
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise EngineError(f"{response.url} answers no JSON object: it is no server of Quire's")
    return answer
