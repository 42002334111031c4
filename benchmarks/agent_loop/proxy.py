"""A proxy between an agent and Quire. It asks for cache diagnostics, kills the server's processes at chosen turns, and
reads how Quire explains each prompt's cache misses.
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
from tests.clients.agents.tunnel import forward_websocket

SUMMARY = b"summarize this partial conversation"
"""Text of aider's requests to shorten its history. Aider sends some to the weak model, and then again to the
main one.
"""
ANSWER_TIMEOUT_SECONDS = 60.0
EVENTS_BEFORE_KILL = 8
"""Events of a stream that precede the kill."""
Process = Literal["engine", "API"]


@dataclass(frozen=True)
class Kill:
    process: Process
    in_stream: bool
    """False: before the request reaches the server."""


@dataclass
class Exchange:
    path: str
    turn: int
    is_side_request: bool
    """True if it asks for a title, a summary or a warm cache, and is not a turn."""
    epoch: int
    """Number of kills before the exchange, so exchanges of one epoch met the same engine process."""
    kill: Kill | None = None
    answer_id: str = ""
    is_complete: bool = False
    is_open: bool = True
    status: int = 0
    prefix: dict[str, Any] = field(default_factory=dict)
    """From /v1/requests/ID/explain: tokens cached, missed, new, reasons, and the closest earlier prompt."""
    diagnosis: str = ""
    """OpenAI's or Anthropic's cache diagnostics. Empty if the API has none."""


@dataclass
class AgentProxy:
    server: KilledServer
    kills: dict[int, Kill]
    """By turn. Each happens once."""
    uses_tools: bool
    """If True, requests without tools are side requests."""
    exchanges: list[Exchange] = field(default_factory=list)
    port: int = 0
    epoch: int = 0
    previous_ids: dict[str, str] = field(default_factory=dict)
    """Id of the latest answer to a turn, by path."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_exchange(self, path: str, content: bytes) -> tuple[Exchange, bytes]:
        """Returns the exchange, and the body to send."""
        body = json.loads(content)
        turn = next_turn(content.decode())
        is_side = SUMMARY in content or (self.uses_tools and not body.get("tools"))
        with self.lock:
            exchange = Exchange(path, turn, is_side, self.epoch)
            self.exchanges.append(exchange)
            previous = self.previous_ids.get(path)
        if not is_side and path == "/v1/messages":
            body["diagnostics"] = {"previous_message_id": previous}
        if not is_side and path == "/v1/responses" and previous is not None:
            body["prompt_cache_options"] = {"comparison_response_id": previous}
        return exchange, json.dumps(body).encode()

    def kill_if_due(self, exchange: Exchange, in_stream: bool) -> None:
        """Raises ConnectionAbortedError if the stream's API process was killed: what the process has sent but the agent
        not received is lost, as if it had died at this event.
        """
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
        if in_stream and kill.process == "API":
            raise ConnectionAbortedError

    def wait_for_others(self, exchange: Exchange) -> None:
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
        while any(each.is_open for each in self.exchanges if each is not exchange):
            assert time.monotonic() < deadline, "an answer did not end"
            time.sleep(0.01)

    def note_answer_id(self, exchange: Exchange, answer: bytes) -> None:
        """Must be called before the agent sends its next request, which asks for a comparison with this one."""
        if match := re.search(rb'"id": ?"((?:resp|msg|chatcmpl)[-_][^"]+)"', answer):
            exchange.answer_id = match[1].decode()
            if not exchange.is_side_request:
                self.previous_ids[exchange.path] = exchange.answer_id

    def end_exchange(self, exchange: Exchange, answer: bytes) -> None:
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
        if not events:
            with suppress(ValueError):
                events = [json.loads(answer)]
        for event in events:
            response = event.get("response") or event.get("message") or event
            if isinstance(response, dict):
                exchange.diagnosis = read_diagnosis(response) or exchange.diagnosis
        if exchange.status == 200:
            self.explain(exchange)

    def explain(self, exchange: Exchange) -> None:
        explained = httpx.get(f"{self.server.url}/v1/requests/{exchange.answer_id}/explain", timeout=60).json()
        exchange.prefix = explained["sequences"][0]["prefix"] or {}
        exchange.is_complete = True


@dataclass
class WebSocketWatcher:
    """Follows the answers on a WebSocket. Requests there are masked, so the turn is read from the log of prompts."""

    proxy: AgentProxy
    received: bytes = b""
    """What came of the open answer."""
    exchange: Exchange | None = None

    def observe_answer(self, part: bytes) -> None:
        self.received += part
        if self.exchange is None and (match := re.search(rb'"id": ?"(resp_[^"]+)"', self.received)):
            answer_id = match[1].decode()
            prompt = self.proxy.server.find_prompt(answer_id)
            self.exchange = Exchange("WebSocket", next_turn(prompt), False, self.proxy.epoch, answer_id=answer_id)
            self.proxy.exchanges.append(self.exchange)
        if self.exchange is None:
            return
        if self.received.count(b'"type":"response.') >= EVENTS_BEFORE_KILL:
            self.proxy.kill_if_due(self.exchange, in_stream=True)
        if b'"type":"response.completed"' in self.received:
            self.proxy.explain(self.exchange)
            self.exchange.is_side_request = b'"type":"response.output_item' not in self.received  # "generate": false
            self.exchange.is_open = False
            self.received, self.exchange = b"", None


def next_turn(text: str) -> int:
    return max((int(number) for number in re.findall(r"Turn (\d+) of \d+\.", text)), default=0) + 1


def read_diagnosis(response: dict[str, Any]) -> str:
    """Reads the diagnostics of a response object or a message. Empty without diagnostics."""
    if "prompt_cache_diagnostics" in response:
        diagnostics = response["prompt_cache_diagnostics"]
        if diagnostics is None:
            return ""
        return str(diagnostics.get("reason") or diagnostics.get("type") or diagnostics)
    if "diagnostics" in response:
        if response["diagnostics"] is None:
            return "no change"
        reason = response["diagnostics"]["cache_miss_reason"]
        return str(reason.get("type", reason))
    return ""


class ProxyListener(ThreadingHTTPServer):
    def __init__(self, proxy: AgentProxy) -> None:
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.proxy = proxy

    def handle_error(self, *_: object) -> None:
        """Prints nothing, because agents reset connections."""


class ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ProxyListener

    def forward_request(self) -> None:
        proxy = self.server.proxy
        if self.headers.get("upgrade", "").lower() == "websocket":
            return forward_websocket(self, proxy.server.url, WebSocketWatcher(proxy).observe_answer)
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in NOT_PASSED_ON}
        exchange = None
        if self.command == "POST":
            exchange, content = proxy.begin_exchange(self.path.partition("?")[0], content)
            proxy.kill_if_due(exchange, in_stream=False)
        try:
            url = proxy.server.url + self.path
            with httpx.stream(self.command, url, content=content, headers=headers, timeout=300) as answer:
                self.forward_answer(answer, exchange)
        except (httpx.TransportError, OSError):  # the agent sees what it would see without the proxy
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        finally:
            if exchange is not None:
                exchange.is_open = False

    def forward_answer(self, answer: httpx.Response, exchange: Exchange | None) -> None:
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        sent = b""
        for part in answer.iter_bytes():
            sent += part
            if exchange is not None and not exchange.answer_id:
                self.server.proxy.note_answer_id(exchange, sent)
            if exchange is not None and sent.count(b"data: ") >= EVENTS_BEFORE_KILL:
                self.server.proxy.kill_if_due(exchange, in_stream=True)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()
        if exchange is not None:
            exchange.status = answer.status_code
            self.server.proxy.end_exchange(exchange, sent)
        self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = do_HEAD = forward_request

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def proxy_to(server: KilledServer, kills: dict[int, Kill], *, uses_tools: bool) -> Iterator[AgentProxy]:
    proxy = AgentProxy(server, kills, uses_tools)
    listener = ProxyListener(proxy)
    proxy.port = listener.server_address[1]
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        listener.shutdown()
