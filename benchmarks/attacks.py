"""Requests with which one caller could block all others, and a client that sends them."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
RESPONSES = "/v1/responses"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/rerank", "/score"
ASKED = [{"role": "user", "content": "hi"}]
PATIENCE = 120.0

Manner = Literal[
    *("plain", "leaves", "slowly", "gzip", "chunked", "HTTP/1.0", "h2c", "pipelined", "bytes"),
    *("trailers", "extension"),
]
"""leaves: hang up after 0.5 s; slowly: 20 pieces, 0.1 s apart; bytes: one-byte chunks; trailers: after the chunks of an
empty object; extension: in a chunk's size line.
"""


@dataclass(frozen=True)
class Attack:
    name: str
    path: str
    body: Callable[[], Any]
    """Bytes, or an object for JSON."""
    statuses: tuple[int, ...] = (400,)
    """Allowed when the server is not overloaded."""
    manner: Manner = "plain"


def _tools(count: int, description: str = "") -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}", "description": description}} for i in range(count)]


def _tool(nested: list[Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"x": nested}}}


def _unused(nested: list[Any]) -> dict[str, Any]:
    return {"type": "text", "schema": {"x": nested}}


def _call(arguments: str) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": arguments}}


def _schema(properties: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


MILLION = 1_000_000
WORN = r"(.*a.{30}|.*b.{30}|.*c.{31})z"
"""Each answer reaches new lexer states."""
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
FULL = "{% set n = namespace(x='a' * 9999) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
ATTACKS = (
    # Validation, item by item
    Attack("stop: 5 M numbers", COMPLETIONS, lambda: {"prompt": "a", "stop": [1] * 5 * MILLION}),
    Attack("messages: 2 M numbers", CHAT, lambda: {"messages": [1] * 2 * MILLION}),
    Attack("messages: 400,000", CHAT, lambda: {"messages": ASKED * 400_000}),
    Attack(
        "content of 200,000 parts",
        CHAT,
        lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 200_000}]},
    ),
    Attack("tools: 60,000", CHAT, lambda: {"messages": ASKED, "tools": _tools(60_000)}),
    Attack("tools: 1,024 of 10 KB", CHAT, lambda: {"messages": ASKED, "tools": _tools(1024, "d" * 10_000)}),
    Attack(
        "tool calls: 100,000",
        CHAT,
        lambda: {"messages": [{"role": "assistant", "tool_calls": [_call("{}")] * 100_000}]},
    ),
    Attack(
        "a call's arguments: 10 MB",
        CHAT,
        lambda: {"messages": [{"role": "assistant", "tool_calls": [_call(json.dumps([[]] * 2 * MILLION))]}]},
        (200, 400),
    ),
    Attack("documents: 500,000", CHAT, lambda: {"messages": ASKED, "documents": [{}] * 500_000}),
    Attack(
        "template variables: 300,000",
        CHAT,
        lambda: {"messages": ASKED, "chat_template_kwargs": {f"k{i}": 1 for i in range(300_000)}},
        (200, 400),
    ),
    Attack(
        "allowed_token_ids: 2 M texts",
        COMPLETIONS,
        lambda: {"prompt": "a", "allowed_token_ids": ["a"] * 2 * MILLION},
    ),
    Attack(
        "logit_bias: 500,000",
        COMPLETIONS,
        lambda: {"prompt": "a", "logit_bias": {f"a{i}": 1 for i in range(500_000)}},
    ),
    Attack("bad_words: 500,000", COMPLETIONS, lambda: {"prompt": "a", "bad_words": ["a"] * 500_000}),
    Attack("unknown fields: 300,000", CHAT, lambda: {"messages": ASKED, **{f"k{i}": 1 for i in range(300_000)}}),
    Attack(
        "unknown field of 15 MB",
        COMPLETIONS,
        lambda: {"prompt": "a", "max_tokens": 2, "user": "u" * 15 * MILLION},
        (200,),
    ),
    Attack("model of 15 MB", COMPLETIONS, lambda: {"prompt": "a", "model": "m" * 15 * MILLION}, (404,)),
    # Prompts
    Attack("prompt: 10 MB of a", COMPLETIONS, lambda: {"prompt": "a" * 10 * MILLION}),
    Attack("prompt: 10 MB of words", COMPLETIONS, lambda: {"prompt": "once upon a time " * 600_000}),
    Attack(
        "prompt: 10 MB, truncated",
        COMPLETIONS,
        lambda: {"prompt": "once upon " * MILLION, "truncate_prompt_tokens": 9},
        (200, 400),
    ),
    Attack("prompt: 10 MB, left", COMPLETIONS, lambda: {"prompt": "once upon " * MILLION}, (), "leaves"),
    Attack("prompt: 2 M ids", COMPLETIONS, lambda: {"prompt": [5] * 2 * MILLION}),
    Attack("prompt: 5 M empty lists", COMPLETIONS, lambda: b'{"prompt":[' + b"[]," * 5 * MILLION + b"[]]}"),
    Attack("prompt: 4 M empty texts", COMPLETIONS, lambda: b'{"prompt":[' + b'"",' * 4 * MILLION + b'""]}'),
    Attack("2,048 prompts", COMPLETIONS, lambda: {"prompt": ["a"] * 2048, "max_tokens": 1}),
    Attack("message of 10 MB", CHAT, lambda: {"messages": [{"role": "user", "content": "hi " * 3 * MILLION}]}),
    Attack("/tokenize: 10 MB of a", TOKENIZE, lambda: {"prompt": "a" * 10 * MILLION}, (200, 400)),
    Attack(
        "/tokenize: 500 KB",
        TOKENIZE,
        lambda: {"prompt": "once upon " * 50_000, "return_token_strs": True},
        (200,),
    ),
    Attack("/detokenize: 3 M ids", DETOKENIZE, lambda: {"tokens": [5] * 3 * MILLION}),
    Attack("/detokenize: 1 M ids", DETOKENIZE, lambda: {"tokens": [5] * MILLION}, (200,)),
    # Structured outputs and templates
    Attack("schema of 350,000 properties", CHAT, lambda: {"messages": ASKED, "response_format": _schema(350_000)}),
    Attack(
        "schema of 2,000 properties",
        CHAT,
        lambda: {"messages": ASKED, "max_tokens": 2, "response_format": _schema(2000)},
        (200, 400),
    ),
    Attack(
        "schema that never ends",
        CHAT,
        lambda: {"messages": ASKED, "guided_json": {"type": "integer", "multipleOf": 99999999}},
    ),
    Attack("regex of a million", CHAT, lambda: {"messages": ASKED, "guided_regex": "((a{1000}){1000}){10}"}),
    Attack("choices: 300,000", CHAT, lambda: {"messages": ASKED, "guided_choice": ["a"] * 300_000}),
    Attack(
        "regex without an end of states",
        COMPLETIONS,
        lambda: {"prompt": "a", "guided_regex": WORN, "n": 8, "max_tokens": 200, "temperature": 1.5},
        (200, 400, 503),
    ),
    Attack("template without an end", CHAT, lambda: {"messages": ASKED, "chat_template": ENDLESS}),
    Attack("template that fills the memory", CHAT, lambda: {"messages": ASKED, "chat_template": FULL}),
    # Echoed in the answer
    Attack("safety_identifier of 14 MB", RESPONSES, lambda: {"input": "hi", "safety_identifier": "u" * 14 * MILLION}),
    Attack(
        "a tool described in 14 MB",
        RESPONSES,
        lambda: {
            "input": "hi",
            "tool_choice": "none",
            "tools": [{"type": "function", "name": "f", "description": "d" * 14 * MILLION}],
        },
    ),
    Attack(
        "text.format described in 14 MB",
        RESPONSES,
        lambda: {"input": "hi", "text": {"format": {"type": "text", "description": "d" * 14 * MILLION}}},
    ),
    Attack(
        "items of 200,000 empty parts",
        RESPONSES,
        lambda: {"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 10_000}] * 20},
        (200, 400),
    ),
    # The most expensive requests within the bounds
    Attack(
        "stop: 64 texts",
        COMPLETIONS,
        lambda: {"prompt": "a", "stop": [f"{i:063}" for i in range(64)], "max_tokens": 200},
        (200,),
    ),
    Attack(
        "logit_bias for 64 answers",
        COMPLETIONS,
        lambda: {"prompt": "a", "max_tokens": 2, "n": 64, "logit_bias": {str(i): 1 for i in range(1024)}},
        (200, 503),
    ),
    Attack(
        "beam search, 64 wide",
        COMPLETIONS,
        lambda: {"prompt": "a", "n": 64, "use_beam_search": True, "max_tokens": 8},
        (200, 400, 503),
    ),
    Attack(
        "log probabilities of a prompt",
        COMPLETIONS,
        lambda: {"prompt": [5] * 2000, "prompt_logprobs": 20, "echo": True, "logprobs": 20, "max_tokens": 1},
        (200, 503),
    ),
    Attack(
        "a million allowed ids for 128 answers",
        COMPLETIONS,
        lambda: {"prompt": "a", "n": 128, "max_tokens": 1, "allowed_token_ids": [5] * MILLION},
    ),
    Attack(
        "bad words for 128 answers",
        COMPLETIONS,
        lambda: {"prompt": "a", "n": 128, "max_tokens": 1, "bad_words": [f"{i:04}" + "qx" * 60 for i in range(1024)]},
    ),
    Attack(
        "a grammar that never ends, left",
        COMPLETIONS,
        lambda: {"prompt": "a", "guided_json": {"type": "integer", "multipleOf": 99999989}},
        (),
        "leaves",
    ),
    Attack(
        "/tokenize: 1 MB with texts", TOKENIZE, lambda: {"prompt": "a b " * 245_000, "return_token_strs": True}, (200,)
    ),
    Attack("2,048 embeddings", EMBEDDINGS, lambda: {"input": ["a"] * 2048}, (200, 400, 503)),
    Attack("embeddings: 4 MB, cut", EMBEDDINGS, lambda: {"input": "a " * 2 * MILLION, "truncate_prompt_tokens": -1}),
    Attack(
        "rerank: 1,000 long",
        RERANK,
        lambda: {"query": "a", "documents": ["once upon a time " * 800] * 1000},
        (200, 400, 503),
    ),
    Attack("score: 2,048 pairs", SCORE, lambda: {"text_1": ["a"] * 1024, "text_2": ["b"] * 1024}, (200, 400, 503)),
    # Bytes
    Attack("16 MB of opening brackets", COMPLETIONS, lambda: b"[" * 16 * MILLION),
    Attack("16 MB of spaces", COMPLETIONS, lambda: b" " * 16 * MILLION),
    Attack("a number of 15 M digits", COMPLETIONS, lambda: b'{"prompt":"a","seed":' + b"9" * 15 * MILLION + b"}"),
    Attack("escapes: 15 MB", COMPLETIONS, lambda: b'{"prompt":"' + b"\\u0041" * 2_500_000 + b'"}'),
    Attack("half surrogates: 15 MB", COMPLETIONS, lambda: b'{"prompt":"' + b"\\ud800" * 2_500_000 + b'"}'),
    Attack(
        "one key a million times",
        COMPLETIONS,
        lambda: b"{" + b'"prompt":"a",' * MILLION + b'"max_tokens":2}',
        (200, 400),
    ),
    Attack("17 MB", COMPLETIONS, lambda: b"x" * 17 * 2**20, (413,)),
    Attack(
        "gzip",
        COMPLETIONS,
        lambda: gzip.compress(b'{"prompt":"' + b"a" * 100 * MILLION + b'"}'),
        (400, 413, 415),
        "gzip",
    ),
    Attack("chunks", COMPLETIONS, lambda: {"prompt": "a" * 10 * MILLION}, (400,), "chunked"),
    Attack("a chunk a byte", COMPLETIONS, lambda: {"prompt": "a" * 300_000}, (400, 431), "bytes"),
    Attack("slowly", COMPLETIONS, lambda: {"prompt": "a" * 10 * MILLION}, (400, 408), "slowly"),
    Attack("HTTP/1.0", COMPLETIONS, lambda: {"prompt": "a" * 10 * MILLION}, (400,), "HTTP/1.0"),
    Attack("curl --http2", COMPLETIONS, lambda: {"prompt": "a" * 10 * MILLION}, (400,), "h2c"),
    Attack("pipelined", COMPLETIONS, lambda: {"prompt": "a" * MILLION}, (400,), "pipelined"),
    # Outside the body
    Attack("trailers: 50 MB", COMPLETIONS, lambda: b"x-filler: 0123456789\r\n" * 2_300_000, (431,), "trailers"),
    Attack("trailers of 5 bytes: 50 MB", COMPLETIONS, lambda: b"a:b\r\n" * 10 * MILLION, (431,), "trailers"),
    Attack("a trailer of 50 MB", COMPLETIONS, lambda: b"a: " + b"b" * 50 * MILLION, (431,), "trailers"),
    Attack("a chunk's extension of 50 MB", COMPLETIONS, lambda: b"a" * 50 * MILLION, (431,), "extension"),
    # Memory that runs out in native code
    Attack("a schema of 2 M lists", RESPONSES, lambda: {"input": "a", "text": {"format": _unused([[]] * 2 * MILLION)}}),
    Attack("parameters of 2 M lists", CHAT, lambda: {"messages": ASKED, "tools": [_tool([[]] * 2 * MILLION)]}),
)


def encoded(attack: Attack) -> bytes:
    body = attack.body()
    return body if isinstance(body, bytes) else json.dumps(body).encode()


async def send(port: int, attack: Attack, body: bytes, key: str | None = None) -> list[int]:
    """Statuses: empty if the client left, 0 if the server hung up. `body`: see `encoded`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = 5 if attack.manner == "pipelined" else 1
    try:
        async with asyncio.timeout(PATIENCE):
            sending = asyncio.create_task(_write(writer, attack, body, key))
            if attack.manner == "leaves":
                await asyncio.wait([sending], timeout=0.5)
                return []
            return [await _status(reader) for _ in range(answers)]
    finally:
        sending.cancel()
        with suppress(Exception, asyncio.CancelledError):
            await sending
        writer.transport.abort()


async def _write(writer: asyncio.StreamWriter, attack: Attack, body: bytes, key: str | None) -> None:
    version = "1.0" if attack.manner == "HTTP/1.0" else "1.1"
    lines = [f"POST {attack.path} HTTP/{version}", "Host: localhost", "Content-Type: application/json"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    if attack.manner == "h2c":
        lines += ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"]
    if attack.manner == "gzip":
        lines.append("Content-Encoding: gzip")
    if attack.manner in ("chunked", "bytes"):
        lines.append("Transfer-Encoding: chunked")
        chunks = _parts(body, 100 if attack.manner == "chunked" else len(body))
        pieces = [b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in chunks) + b"0\r\n\r\n"]
    elif attack.manner in ("trailers", "extension"):
        lines.append("Transfer-Encoding: chunked")
        first = b"2\r\n{}\r\n0\r\n" if attack.manner == "trailers" else b"2;"
        pieces = [first, *_parts(body, 100), b"\r\n\r\n"]
    else:
        lines.append(f"Content-Length: {len(body)}")
        pieces = _parts(body, 20) if attack.manner == "slowly" else [body]
    head = "\r\n".join([*lines, "", ""]).encode()
    for _ in range(5 if attack.manner == "pipelined" else 1):
        writer.write(head)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if attack.manner == "slowly":
                await asyncio.sleep(0.1)


def _parts(body: bytes, count: int) -> list[bytes]:
    size = -(-len(body) // count)
    return [body[at : at + size] for at in range(0, len(body), size)]


async def _status(reader: asyncio.StreamReader) -> int:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():  # a stream, which is Ollama's default
            while size := int(await reader.readline() or b"0", 16):
                await reader.readexactly(size + 2)
            await reader.readline()
        else:
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            while length > 0:
                length -= len(await reader.read(min(length, 1 << 20))) or length
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0
    return int(head.split()[1])
