"""A proxy between an agent and a server that passes every request on and records it with its answer."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from tests.clients.agents.tunnel import forward_websocket

LONG = 40
"""Characters; a text with more, and with spaces, is prose."""
KEPT = 160
"""Maximum number of characters of prose in a record; no text of the agent itself is longer."""
GRAMMAR = """\
start: "*** Begin Patch" LF file+ "*** End Patch" LF?
file: "*** Update File: " name LF line+
    | "*** Add File: " name LF ("+" text LF)+
    | "*** Delete File: " name LF
line: ("@@" | "+" | "-" | " ") text LF
name: /.+/
text: /.*/
%import common.LF
"""
"""What stands for a grammar of patches."""
OURS = ("NAME", "LIMIT", "x-anthropic-billing-header", "session_id")
"""What is in texts that stay as they are: the task's, what the agent changes with every request, and ids."""
NOT_PASSED_ON = ("host", "content-length", "transfer-encoding", "content-encoding", "accept-encoding", "connection")


@dataclass(frozen=True)
class Exchange:
    path: str
    """With its query."""
    headers: dict[str, str]
    body: Any
    status: int
    answer: str


@dataclass
class Recorder:
    port: int = 0
    seen: list[Exchange] = field(default_factory=list)
    """POST requests, in the order of their answers' ends."""
    websockets: int = 0


@contextmanager
def recording(target: str) -> Iterator[Recorder]:
    """A recorder whose port stands for `target`."""
    recorder = Recorder()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            if headers.get("upgrade", "").lower() == "websocket":
                recorder.websockets += 1
                return forward_websocket(self, target, lambda _: None)
            kept = {name: value for name, value in headers.items() if name not in NOT_PASSED_ON}
            answer = httpx.request(self.command, target + self.path, content=body, headers=kept, timeout=120)
            if self.command == "POST":
                recorder.seen.append(Exchange(self.path, kept, json.loads(body), answer.status_code, answer.text))
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.content)

        do_GET = do_POST = do_HEAD = pass_on

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    recorder.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield recorder
    finally:
        server.shutdown()


def shape(given: Any, folder: str, name: str = "") -> Any:
    """What a request is made of, without the agent's own prose, which becomes filler, the same for the same text. The
    working `folder` and what says who ran the agent are replaced. `name`: of the field that it is."""
    if isinstance(given, dict):
        return {key: shape(value, folder, key) for key, value in given.items()}
    if isinstance(given, list):
        return [shape(value, folder) for value in given]
    if not isinstance(given, str):
        return given
    if name == "definition":
        return GRAMMAR
    text = anonymous(given, folder)
    prose = name == "description" or (len(text) > LONG and " " in text)
    if not prose or any(mark in text for mark in OURS):
        return text
    filler = f"Text {hashlib.sha1(text.encode()).hexdigest()[:8]} "
    return (filler + "and more " * KEPT)[: min(len(text), KEPT)]


def anonymous(text: str, folder: str) -> str:
    return re.sub(r"[0-9a-f]{64}", "0" * 64, text.replace(folder, "/home/me/project"))
