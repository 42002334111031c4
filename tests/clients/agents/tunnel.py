"""Forwards a WebSocket through a proxy, byte by byte."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler

import httpx


def forward_websocket(handler: BaseHTTPRequestHandler, target: str, observe_answer: Callable[[bytes], None]) -> None:
    """Returns when either side has closed. `observe_answer` gets all bytes from the server before the client does: the
    status line, headers and frames, which are not masked.
    """
    url = httpx.URL(target)
    handler.close_connection = True
    with suppress(OSError), socket.create_connection((url.host, url.port)) as upstream:
        lines = [handler.requestline, *(f"{name}: {value}" for name, value in handler.headers.items()), "", ""]
        upstream.sendall("\r\n".join(lines).encode())
        threading.Thread(target=_forward_requests, args=(handler, upstream), daemon=True).start()
        while part := upstream.recv(65536):
            observe_answer(part)
            handler.connection.sendall(part)
    with suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)


def _forward_requests(handler: BaseHTTPRequestHandler, upstream: socket.socket) -> None:
    with suppress(OSError):
        while part := handler.rfile.read1(65536):  # type: ignore[attr-defined]
            upstream.sendall(part)
    with suppress(OSError):
        upstream.shutdown(socket.SHUT_RDWR)
