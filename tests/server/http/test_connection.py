"""Hostile and broken clients on real sockets get an error or a closed connection, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.engine.common.errors import ConfigError
from quire.server.config import ServerConfig
from quire.server.http.connection import MAX_HEAD_BYTES, MAX_PIPELINED_REQUESTS
from quire.server.http.server import tls_context
from tests.server.fake import FakeEngine, hashed
from tests.server.hosted import Port, idle, serving

LETTERS = hashed(b"abcdefgh")
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def completion(body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return POST + lines + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


MALFORMED = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "noise": bytes(range(256)) * 4,
    "no version": b"GET /nowhere\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a version from the future": b"GET /health HTTP/9.9\r\n\r\n",
    "an unknown method": b"BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a header without a colon": b"GET /health HTTP/1.1\r\nHost x\r\n\r\n",
    "a space before the colon": b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
    "a NUL in the path": b"GET /hea\0lth HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a NUL in a header": b"GET /health HTTP/1.1\r\nHost: x\0y\r\n\r\n",
    "a negative length": POST + b"Content-Length: -1\r\n\r\n{}",
    "a length that is no number": POST + b"Content-Length: ten\r\n\r\n{}",
    "a length beyond 64 bits": POST + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 5\r\n\r\n{}   ",
    "a length and chunks": POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a chunk of negative size": POST + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n",
    "a chunk beyond 64 bits": POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}\r\n",
}
BAD_BODIES = {
    "invalid UTF-8": b'{"prompt": "\xff\xfe\xfa"}',
    "an overlong NUL": b'{"prompt": "\xc0\x80"}',
    "a NUL between tokens": b'{"prompt":\0"x"}',
    "a NUL in a string": b'{"prompt": "a\0b"}',
    "nothing": b"",
    "deep lists": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "deep and open": b"[{" * 50_000,
    "a negative number of tokens": b'{"prompt": "x", "max_tokens": -2}',
    "a number of 4,000 digits": b'{"prompt": "x", "top_k": ' + b"9" * 4000 + b"}",
    "a number of 5,000 digits": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "not a number": b'{"prompt": "x", "temperature": NaN}',
    "too large": b'{"prompt": "' + b"x" * 2**20 + b'"}',
}


async def test_malformed_requests_and_bodies_return_4xx_errors() -> None:
    async with serving(FakeEngine(LETTERS), max_body_size=1) as port, httpx.AsyncClient(base_url=port.url) as http:
        for name, data in MALFORMED.items():
            answer = await port.send(data, end=True)
            assert all(400 <= status < 500 for status in statuses(answer)), (name, answer)
            if answer:
                head, _, body = answer.partition(b"\r\n\r\n")
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, name
                assert b"connection: close" in head
        for name, body in BAD_BODIES.items():
            answer = await port.send(completion(body))
            (status,) = statuses(answer)
            assert 400 <= status < 500, (name, answer)
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert set(error) == {"message", "type", "param", "code"}, name
            assert not any(mark in error["message"] for mark in ("Traceback", ".py", "site-packages")), error
        fine = completion(b'{"prompt": "a\\u0000b"}')  # a NUL escaped in JSON is an ordinary character
        assert statuses(await port.send(fine)) == [200]
        assert (await http.get("/health")).status_code == 200


async def test_no_path_spelling_bypasses_api_keys() -> None:
    async with serving(FakeEngine(LETTERS), api_key=["secret"]) as port:
        for path in (
            b"//health",
            b"/health/../v1/models",
            b"/web/../v1/models",
            b"/web/%2e%2e/v1/models",
            b"/health%00",
        ):
            answer = await port.send(b"GET " + path + b" HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert statuses(answer) in ([401], [404]), path
            assert b"owned_by" not in answer
        for target in (b"http://x/v1/models", b"*", b"/v1/models?api_key=secret", b"/v1/models#/health"):
            answer = await port.send(b"GET " + target + b" HTTP/1.1\r\nConnection: close\r\n\r\n")
            assert statuses(answer) in ([401], [400]), target


async def test_oversized_request_head_returns_431() -> None:
    async with serving(FakeEngine(LETTERS)) as port:
        line = b"X-Filler: " + b"x" * 1000 + b"\r\n"
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + line * 70 + b"\r\n"
        for pieces in ([whole], [b"GET /health HTTP/1.1\r\n", *[line] * 70], [b"GET /" + b"x" * 70_000]):
            answer = await port.send(*pieces)
            assert statuses(answer) in ([431], []), "the error, or a connection that is reset under what is still sent"
            if answer:
                assert str(MAX_HEAD_BYTES) in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert statuses(await port.send(whole)) == [431]
        small = b"GET /health HTTP/1.1\r\nConnection: close\r\n" + line * 60 + b"\r\n"
        assert statuses(await port.send(small)) == [200]


GET = b"GET /health HTTP/1.1\r\n"
SLOW = {
    "nothing": ([b""], [408]),
    "a head that never ends": ([GET, *[b"X-A: b\r\n"] * 100], [408]),
    "blank lines": ([b"\r\n"] * 100, [408]),
    "a body that never ends": ([POST + b"Content-Length: 1000\r\n\r\n", *[b"x"] * 100], [408]),
    "chunks that never end": ([POST + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n"] * 100], [408]),
    "a second request that never ends": ([GET + b"\r\n", GET, *[b"X-A: b\r\n"] * 100], [200, 408]),
    "a second request that is none": ([GET + b"\r\n", b"G", *[b"X"] * 100], [200, 400]),
    "a body that nobody reads": (
        [b"POST /nowhere HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n", *[b"x" * 30_000] * 100],
        [404],
    ),
}
"""What is sent piece by piece, and the statuses of the responses before the connection is closed."""


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SLOW)
async def test_trickling_client_gets_error_and_connection_closes(name: str) -> None:
    pieces, expected = SLOW[name]
    async with serving(FakeEngine(LETTERS), read_timeout=0.3) as port:
        async with asyncio.timeout(20):  # the pieces take much longer
            answer = await port.send(*pieces, pause=0.05 if name != "a body that nobody reads" else 0.02)
        assert statuses(answer) == expected, answer


@pytest.mark.slow
async def test_slow_but_progressing_body_is_served() -> None:
    """The body takes longer in all than the limit for each piece, and so does the response."""
    body = b'{"prompt": "' + b"x" * 300_000 + b'"}'
    head = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    pieces = [body[i : i + 20_000] for i in range(0, len(body), 20_000)]
    engine = FakeEngine(LETTERS, max_model_len=400_000, step_seconds=0.25)
    async with serving(engine, read_timeout=3.0) as port:
        answer = await port.send(head, *pieces, pause=0.25)
        assert statuses(answer) == [200]


async def test_stream_completes_before_unfinished_pipelined_request() -> None:
    """A pipelined head that never ends must not end the response before it."""
    engine = FakeEngine(LETTERS, max_model_len=1000, step_seconds=0.05)
    body = b'{"prompt": "x", "stream": true, "max_tokens": 30}'
    async with serving(engine, read_timeout=0.2) as port:
        answer = await port.send(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET /hea")
        assert answer.count(b"data: {") == 30
        assert b"data: [DONE]" in answer
        assert statuses(answer) == [200, 408]


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(FakeEngine(LETTERS)) as port:
        get = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
        last = b"GET /nowhere HTTP/1.1\r\nConnection: close\r\n\r\n"
        assert statuses(await port.send(get * 50 + last)) == [200] * 50 + [404]


async def test_waiting_requests_are_answered_before_pipelining_limit_closes() -> None:
    get = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with serving(FakeEngine(LETTERS)) as port:
        codes = statuses(await port.send(get * 299 + get.replace(b"Host: localhost", b"Connection: close")))
        assert codes in ([200] * (len(codes) - 1) + [400], [200] * 300), "those that are read later have room again"
        assert len(codes) >= MAX_PIPELINED_REQUESTS + 2


async def test_waiting_requests_are_answered_before_malformed_one() -> None:
    body = b'{"prompt": "x", "max_tokens": 3}'
    post = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with serving(FakeEngine(LETTERS, step_seconds=0.02)) as port:
        assert statuses(await port.send(post * 3 + b"nonsense\r\n\r\n")) == [200, 200, 200, 400]


@pytest.mark.few(1)
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"foo, bar/1"])
@pytest.mark.parametrize("cut", [None, 30, 130, -10])
async def test_unsupported_upgrade_is_served_as_ordinary_request(protocol: bytes, cut: int | None) -> None:
    upgrade = b"Upgrade: " + protocol
    body = b'{"prompt": "Hi", "max_tokens": 3}'
    first = POST + b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n" + upgrade + b"\r\n"
    first += b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunked = POST + b"connection: upgrade\r\n" + upgrade.lower() + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    sent = first + chunked + completion(body)
    async with serving(FakeEngine(LETTERS)) as port:
        answer = await port.send(*([sent] if cut is None else [sent[:cut], sent[cut:]]), pause=0.05)
    assert statuses(answer) == [200, 200, 200]
    assert answer.count(b'"completion_tokens":3') == 3


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_upgrade_with_connection_close_is_answered(protocol: bytes) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 3}'
    head = POST + b"Connection: Upgrade, close\r\nUpgrade: " + protocol + b"\r\n"
    plain = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    async with serving(FakeEngine(LETTERS), read_timeout=2) as port:
        for sent in (plain, chunked):
            answer = await port.send(sent)
            assert statuses(answer) == [200]
            assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (POST + b"Connection: close\r\nContent-Length: 8000000\r\n\r\n", 413),
        (b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 8000000\r\n\r\n", 404),
        (POST + b"X: ", 431),
    ],
)
async def test_rejected_client_receives_error_while_sending(first: bytes, status: int) -> None:
    """Most clients do not stop sending to read the response."""

    def ask(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            for piece in (first, *[b"x" * 100_000] * 80):
                sock.sendall(piece)
            return b"".join(iter(lambda: sock.recv(65536), b""))

    async with serving(FakeEngine(LETTERS), max_body_size=1) as port:
        answer = await asyncio.to_thread(ask, port.number)
        assert statuses(answer) == [status], answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        async with asyncio.timeout(5):
            while port.server.server_state.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def metric(url: str, name: str) -> float:
    async with httpx.AsyncClient(base_url=url) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def leave_unread(port: Port, body: dict[str, Any]) -> socket.socket:
    """A client that sends a request and reads nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port.number))
    data = json.dumps({"prompt": "x", "stream": True, **body}).encode()
    await asyncio.get_running_loop().sock_sendall(sock, POST + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return sock


async def test_write_timeout_aborts_stream_of_client_that_does_not_read(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(LETTERS, max_model_len=10**9)
    async with serving(engine, write_timeout=0.5) as port:
        with await leave_unread(port, {"max_tokens": 10**9 - 10}):
            await idle(engine)
            assert engine.aborted == [engine.seen[0].id]
        assert await metric(port.url, "quire:slow_readers_total") == 1
        assert await metric(port.url, 'vllm:request_success_total{engine="0",finished_reason="abort"') == 1
    assert "did not read its answer for 0.5 s" in caplog.text


async def test_unread_bytes_limit_ends_stream_with_slow_reader_error(caplog: pytest.LogCaptureFixture) -> None:
    """The engine is far faster than the reader: the stream is ended long before the timeout."""
    engine = FakeEngine(LETTERS, max_model_len=10**9, burst=1000)
    async with serving(engine, write_timeout=3600, max_logprobs=200) as port:
        with await leave_unread(port, {"max_tokens": 10**9 - 10, "logprobs": 200}) as sock:
            await idle(engine)
            assert await metric(port.url, "quire:slow_readers_total") == 1
            assert "wait to be read" in caplog.text
            sock.setblocking(True)
            last = await asyncio.to_thread(read_to_end, sock)
            assert b'"code": "slow_reader"' in last


def read_to_end(sock: socket.socket) -> bytes:
    """Read to the end of the response and return its last bytes."""
    sock.settimeout(60)
    tail = b""
    while not tail.endswith(b"\r\n0\r\n\r\n") and (part := sock.recv(1 << 20)):
        tail = (tail + part)[-1000:]
    return tail


async def test_client_that_pauses_reading_receives_whole_stream() -> None:
    engine = FakeEngine(LETTERS, max_model_len=10**6)
    async with serving(engine) as port:
        with await leave_unread(port, {"max_tokens": 30_000, "stream_options": {"include_usage": True}}) as sock:
            await idle(engine)
            sock.setblocking(True)
            tail = await asyncio.to_thread(read_to_end, sock)
            assert b'"completion_tokens":30000' in tail
            assert b"data: [DONE]" in tail
        assert await metric(port.url, "quire:slow_readers_total") == 0


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certificates(authority: trustme.CA, tmp_path: Path) -> dict[str, Path]:
    paths = {"ssl_certfile": tmp_path / "cert.pem", "ssl_keyfile": tmp_path / "key.pem"}
    server_cert = authority.issue_cert("127.0.0.1")
    server_cert.private_key_pem.write_to_path(paths["ssl_keyfile"])
    for blob in server_cert.cert_chain_pems:
        blob.write_to_path(paths["ssl_certfile"], append=True)
    return paths


async def test_tls_server_answers_only_https(authority: trustme.CA, certificates: dict[str, Path]) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with serving(FakeEngine(LETTERS), **certificates) as port:
        async with httpx.AsyncClient(base_url=port.url, verify=trusting) as http:
            answer = await http.post("/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 100})
            assert answer.text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient(base_url=port.url) as http:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await http.get("/health")
        assert statuses(await port.send(b"GET /health HTTP/1.1\r\n\r\n")) == [], "plain HTTP gets no answer"


async def test_tls_server_requires_client_certificate_of_ca(
    authority: trustme.CA, certificates: dict[str, Path], tmp_path: Path
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    known, stranger = ssl.create_default_context(), ssl.create_default_context()
    for context in (known, stranger):
        authority.configure_trust(context)
    authority.issue_cert("client@example.org").configure_cert(known)
    trustme.CA().issue_cert("client@example.org").configure_cert(stranger)
    async with serving(FakeEngine(LETTERS), **certificates, ssl_ca_certs=tmp_path / "ca.pem") as port:
        async with httpx.AsyncClient(base_url=port.url, verify=known) as http:
            assert (await http.get("/health")).status_code == 200
        async with httpx.AsyncClient(base_url=port.url, verify=stranger) as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/health")


def test_unusable_tls_files_raise_config_error(certificates: dict[str, Path], tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    for options, message in (
        ({"ssl_keyfile": certificates["ssl_keyfile"]}, "ssl_certfile: is needed"),
        ({"ssl_certfile": tmp_path / "none"}, "ssl_certfile: cannot read .*No such file"),
        ({**certificates, "ssl_ca_certs": tmp_path / "none"}, "ssl_ca_certs: cannot read"),
        ({**certificates, "ssl_keyfile": junk}, "ssl_certfile: cannot be used"),
        ({"ssl_certfile": junk}, "ssl_certfile: cannot be used"),
        ({**certificates, "ssl_ca_certs": junk}, "ssl_certfile: cannot be used"),
    ):
        with pytest.raises(ConfigError, match=message):
            tls_context(ServerConfig(**options))


async def test_one_byte_chunks_are_passed_on_in_large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_on: list[int] = []
    plain = HttpToolsProtocol.on_body

    def on_body(self: HttpToolsProtocol, body: bytes) -> None:
        passed_on.append(len(body))
        plain(self, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", on_body)
    body = json.dumps({"prompt": "x" * 20_000, "max_tokens": 1}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    async with serving(FakeEngine(LETTERS, max_model_len=100_000)) as port:
        answer = await port.send(POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks)
    assert statuses(answer) == [200]
    assert sum(passed_on) == len(body)
    assert len(passed_on) < 1000


async def test_thousands_of_pipelined_requests_close_connection() -> None:
    async with serving(FakeEngine(LETTERS)) as port:
        few = b"GET /version HTTP/1.1\r\n\r\n" * 50 + b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n"
        assert statuses(await port.send(few)) == [200] * 51
        assert len(statuses(await port.send(few * 100))) <= MAX_PIPELINED_REQUESTS + 2
        assert statuses(await port.send(few)) == [200] * 51


@pytest.mark.parametrize("stream", [True, False])
async def test_http_1_0_response_is_not_chunked(stream: bool) -> None:
    """For nginx with its defaults and for `ab`, a response without a length ends with the connection."""
    body = json.dumps({"prompt": "x", "max_tokens": 5, "seed": 1, "stream": stream}).encode()
    whole = completion(body)
    async with serving(FakeEngine(LETTERS)) as port:
        answer = await port.send(whole.replace(b"HTTP/1.1", b"HTTP/1.0"))
        chunked = await port.send(whole)
        head, _, content = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert (b"content-length" in head) is not stream
        assert content.startswith(b"data: {" if stream else b"{")
        assert content.endswith(b"data: [DONE]\n\n" if stream else b"}")
        assert content.count(b"data: ") == (chunked.count(b"data: ") if stream else 0)
        head, _, content = (await port.send(b"HEAD /metrics HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert content == b""
