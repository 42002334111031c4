"""What quire/server/http overrides of uvicorn and sse-starlette was reviewed in the pinned versions."""

from __future__ import annotations

import hashlib
import inspect
from importlib import metadata
from types import FunctionType

import pytest
import uvicorn
from sse_starlette import EventSourceResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from quire.server.http.connection import HttpConnection
from quire.server.http.server import HttpServer
from quire.server.http.sse import EventStream
from quire.server.http.websocket import WebSocketConnection
from tests.tree import ROOT

BASES: dict[type, tuple[type, str]] = {
    HttpConnection: (HttpToolsProtocol, "uvicorn"),
    WebSocketConnection: (WSProtocol, "uvicorn"),
    HttpServer: (uvicorn.Server, "uvicorn"),
    EventStream: (EventSourceResponse, "sse-starlette"),
}
"""Our classes, with the class and the package that each extends."""
READ_VERSIONS = {
    (HttpConnection, "0.54.0"): "fa8af68c0ec27305",
    (WebSocketConnection, "0.54.0"): "31c2cab11aad10bf",
    (HttpServer, "0.54.0"): "e64e39f2b876b719",
    (EventStream, "3.7.0"): "218f8d8c9bca7a94",
}
"""Digests of the overridden base methods, by reviewed version."""


def overridden_methods(ours: type, base: type) -> dict[str, FunctionType]:
    """The methods of the base that our class defines too, by name."""
    names = [name for name, value in vars(ours).items() if isinstance(value, FunctionType)]
    return {name: method for name in names if isinstance(method := getattr(base, name, None), FunctionType)}


def source_digest(methods: dict[str, FunctionType]) -> str:
    sources = "".join(inspect.getsource(methods[name]) for name in sorted(methods))
    return hashlib.blake2b(sources.encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize("ours", BASES)
def test_overridden_base_methods_equal_reviewed_version(ours: type) -> None:
    base, package = BASES[ours]
    version = metadata.version(package)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if f"{package}=={version}" not in pins:
        pytest.skip(f"{package} {version} is not the pinned one")
    methods = overridden_methods(ours, base)
    advice = f"read what changed in {package} {version}: {', '.join(sorted(methods))}, and note the new digest"
    assert READ_VERSIONS.get((ours, version)) == source_digest(methods), advice


@pytest.mark.parametrize("ours", BASES)
def test_overrides_accept_parameters_of_base_methods(ours: type) -> None:
    """Any installed version calls them."""
    base, _ = BASES[ours]
    for name, base_method in overridden_methods(ours, base).items():
        if name != "__init__":
            expected = inspect.signature(base_method).parameters
            assert expected.keys() <= inspect.signature(getattr(ours, name)).parameters.keys(), name
