"""A proxy between an agent and Quire. It asks for cache diagnostics, kills the server's processes at chosen turns, and
notes what Quire says about each prompt.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import httpx

from benchmarks.agent_loop.killed_server import KilledServer
from tests.clients.agents.recording import NOT_PASSED_ON
from tests.clients.agents.tunnel import pass_websocket

SUMMARY = b"summarize this partial conversation"
"""In aider's requests that shorten its history. It sends some to the weak model and then to the main one."""
PATIENCE = 60.0
"""Seconds."""
MIDDLE = 8
"""Events of a stream before a kill in its middle."""
Process = Literal["engine", "API"]


@dataclass(frozen=True)
class Kill:
    process: Process
    in_stream: bool
    """Else before the request reaches the server."""


@dataclass
class Exchange:
    path: str
    turn: int
    is_side_request: bool
    """Asks for a title, a summary or a warm cache, and is no turn."""
    epoch: int
    """Number of kills before it."""
    kill: Kill | None = None
    answer_id: str = ""
    is_complete: bool = False
    is_open: bool = True
    status: int = 0
    prefix: dict[str, Any] = field(default_factory=dict)
    """From /v1/requests/ID/explain: tokens cached, missed, new, reasons, and the closest earlier prompt."""
    diagnosis: str = ""
    """OpenAI's or Anthropic's cache diagnostics; "": the API has none."""


@dataclass
class AgentProxy:
    server: KilledServer
    kills: dict[int, Kill]
    """By turn; each happens once."""
    uses_tools: bool
    """Else the agent's turns have no tools either."""
    exchanges: list[Exchange] = field(default_factory=list)
    port: int = 0
    epoch: int = 0
    previous_ids: dict[str, str] = field(default_factory=dict)
    """The latest complete turn's answer, by path."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_exchange(self, path: str, content: bytes) -> tuple[Exchange, bytes]:
        """Return it with the body to send."""
        body = json.loads(content)
        turn = next_turn(content.decode())
        side = SUMMARY in content or (self.uses_tools and not body.get("tools"))
        with self.lock:
            exchange = Exchange(path, turn, side, self.epoch)
            self.exchanges.append(exchange)
            previous = self.previous_ids.get(path)
        if not side and path == "/v1/messages":
            body["diagnostics"] = {"previous_message_id": previous}
        if not side and path == "/v1/responses" and previous is not None:
            body["prompt_cache_options"] = {"comparison_response_id": previous}
        return exchange, json.dumps(body).encode()

    def take_kill(self, exchange: Exchange, in_stream: bool) -> None:
        with self.lock:
            kill = self.kills.get(exchange.turn)
            if kill is None or exchange.is_side_request or kill.in_stream != in_stream:
                return
            exchange.kill = self.kills.pop(exchange.turn)
            if not in_stream:  # the turn before is answered, but maybe not explained
                self.wait_for_others(exchange)
            self.epoch += 1
            if not in_stream:
                exchange.epoch = self.epoch
            self.server.kill(kill.process)

    def wait_for_others(self, exchange: Exchange) -> None:
        deadline = time.monotonic() + PATIENCE
        while any(each.is_open for each in self.exchanges if each is not exchange):
            assert time.monotonic() < deadline, "an answer did not end"
            time.sleep(0.01)

    def note_answer_id(self, exchange: Exchange, answer: bytes) -> None:
        """Before the agent can send its next request, which will be compared with this one."""
        if found := re.search(rb'"id": ?"((?:resp|msg|chatcmpl)[-_][^"]+)"', answer):
            exchange.answer_id = found[1].decode()
            if not exchange.is_side_request:
                self.previous_ids[exchange.path] = exchange.answer_id

    def end_exchange(self, exchange: Exchange, answer: bytes) -> None:
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
        if not events:
            with suppress(ValueError):
                events = [json.loads(answer)]
        for event in events:
            whole = event.get("response") or event.get("message") or event
            if isinstance(whole, dict):
                exchange.diagnosis = diagnosis(whole) or exchange.diagnosis
        if exchange.status == 200:
            self.explain(exchange)

    def explain(self, exchange: Exchange) -> None:
        explained = httpx.get(f"{self.server.url}/v1/requests/{exchange.answer_id}/explain", timeout=60).json()
        exchange.prefix = explained["sequences"][0]["prefix"] or {}
        exchange.is_complete = True


@dataclass
class SocketWatcher:
    """Follows the answers on a WebSocket. The requests are masked: their turn is known from the prompts' log."""

    proxy: AgentProxy
    seen: bytes = b""
    exchange: Exchange | None = None

    def see_answer(self, part: bytes) -> None:
        self.seen += part
        if self.exchange is None and (found := re.search(rb'"id": ?"(resp_[^"]+)"', self.seen)):
            answer_id = found[1].decode()
            prompt = self.proxy.server.find_prompt(answer_id)
            self.exchange = Exchange("WebSocket", next_turn(prompt), False, self.proxy.epoch, answer_id=answer_id)
            self.proxy.exchanges.append(self.exchange)
        if self.exchange is None:
            return
        if self.seen.count(b'"type":"response.') >= MIDDLE:
            self.proxy.take_kill(self.exchange, in_stream=True)
        if b'"type":"response.completed"' in self.seen:
            self.proxy.explain(self.exchange)
            self.exchange.is_side_request = b'"type":"response.output_item' not in self.seen  # "generate": false
            self.exchange.is_open = False
            self.seen, self.exchange = b"", None


def next_turn(text: str) -> int:
    return max((int(number) for number in re.findall(r"Turn (\d+) of \d+\.", text)), default=0) + 1


def diagnosis(whole: dict[str, Any]) -> str:
    """What a response object or a message says; "" without diagnostics."""
    if "prompt_cache_diagnostics" in whole:
        found = whole["prompt_cache_diagnostics"]
        return "" if found is None else str(found.get("reason") or found.get("type") or found)
    if "diagnostics" in whole:
        found = whole["diagnostics"]
        return "no change" if found is None else str(found["cache_miss_reason"].get("type", found["cache_miss_reason"]))
    return ""


class Listener(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Agents reset connections."""


@contextmanager
def proxy_to(server: KilledServer, kills: dict[int, Kill], *, uses_tools: bool) -> Iterator[AgentProxy]:
    proxy = AgentProxy(server, kills, uses_tools)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            if self.headers.get("upgrade", "").lower() == "websocket":
                return pass_websocket(self, server.url, SocketWatcher(proxy).see_answer)
            content = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in NOT_PASSED_ON}
            exchange = None
            if self.command == "POST":
                exchange, content = proxy.begin_exchange(self.path.partition("?")[0], content)
                proxy.take_kill(exchange, in_stream=False)
            try:
                with httpx.stream(
                    self.command, server.url + self.path, content=content, headers=headers, timeout=300
                ) as answer:
                    self.pass_answer_on(answer, exchange)
            except (httpx.TransportError, OSError):  # the agent sees what it would see without the proxy
                self.close_connection = True
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
            finally:
                if exchange is not None:
                    exchange.is_open = False

        def pass_answer_on(self, answer: httpx.Response, exchange: Exchange | None) -> None:
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            passed = b""
            for part in answer.iter_bytes():
                passed += part
                if exchange is not None and not exchange.answer_id:
                    proxy.note_answer_id(exchange, passed)
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.flush()
                if exchange is not None and passed.count(b"data: ") >= MIDDLE:
                    proxy.take_kill(exchange, in_stream=True)
            if exchange is not None:
                exchange.status = answer.status_code
                proxy.end_exchange(exchange, passed)
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_HEAD = pass_on

        def log_message(self, *_: object) -> None:
            pass

    listener = Listener(("127.0.0.1", 0), Handler)
    proxy.port = listener.server_address[1]
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        listener.shutdown()
