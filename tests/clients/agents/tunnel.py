"""Passes a WebSocket through a proxy, byte by byte."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler

import httpx


def pass_websocket(handler: BaseHTTPRequestHandler, target: str, see_answer: Callable[[bytes], None]) -> None:
    """Return when either side has closed. `see_answer` gets what the server sends, before the client does: the status
    line, headers and frames, whose text is not masked.
    """
    url = httpx.URL(target)
    handler.close_connection = True
    with suppress(OSError), socket.create_connection((url.host, url.port)) as upstream:
        lines = [handler.requestline, *(f"{name}: {value}" for name, value in handler.headers.items()), "", ""]
        upstream.sendall("\r\n".join(lines).encode())
        threading.Thread(target=_pass_requests, args=(handler, upstream), daemon=True).start()
        while part := upstream.recv(65536):
            see_answer(part)
            handler.connection.sendall(part)
    with suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)


def _pass_requests(handler: BaseHTTPRequestHandler, upstream: socket.socket) -> None:
    with suppress(OSError):
        while part := handler.rfile.read1(65536):  # type: ignore[attr-defined]
            upstream.sendall(part)
    with suppress(OSError):
        upstream.shutdown(socket.SHUT_RDWR)
