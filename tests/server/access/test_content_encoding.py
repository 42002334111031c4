"""Request bodies in zstd and gzip, as Codex and other clients send them, within the limits of plain bodies."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from backports import zstd
from starlette.requests import Request
from starlette.types import Message

from quire.engine.common.errors import InvalidRequest
from quire.server.access import content_encoding as encodings_module
from quire.server.access.body_reader import BodyReader
from quire.server.access.content_encoding import STEP_BYTES, BodyDecoder, BodyTooLarge
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, scripted

CHAT = {"messages": [{"role": "user", "content": "Hi " * 100}], "max_tokens": 9}
ENCODE = {"gzip": gzip.compress, "x-gzip": gzip.compress, "zstd": zstd.compress, "identity": bytes}
LARGEST = 1 << 20


def encode(content: bytes, *names: str) -> bytes:
    for name in names:
        content = ENCODE[name](content)
    return content


def server(**options: Any) -> Any:
    engine = FakeEngine(scripted(b"Hello", 258), eos=[258], max_model_len=2048)
    return open_api(engine, max_body_size=LARGEST / 2**20, **options)


async def post(api: Api, content: Any, names: str, path: str = "/v1/chat/completions") -> Any:
    return await api.http.post(path, content=content, headers={"content-encoding": names})


@pytest.mark.parametrize("names", ["zstd", "gzip", "x-gzip", "GZIP", "identity", "gzip, zstd", "zstd,gzip , zstd"])
async def test_encoded_body_gets_same_response_as_plain_body(names: str) -> None:
    async with server() as api:
        plain = await api.post("/v1/chat/completions", CHAT)
        applied = [name.strip().lower() for name in names.split(",")]
        answer = await post(api, encode(json.dumps(CHAT).encode(), *applied), names)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {**CHAT, "max_tokens": 9}),
        ("/v1/responses", {"input": "a"}),
        ("/api/chat", {**CHAT, "stream": False}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
async def test_every_api_decodes_zstd_bodies(path: str, body: dict[str, Any]) -> None:
    async with server() as api:
        answer = await post(api, zstd.compress(json.dumps(body).encode()), "zstd", path)
    assert answer.status_code == 200, answer.text


async def test_chunked_zstd_body_is_decoded() -> None:
    content = zstd.compress(json.dumps(CHAT).encode())

    async def pieces() -> Any:
        for start in range(0, len(content), 3):
            yield content[start : start + 3]

    async with server() as api:
        assert (await post(api, pieces(), "zstd")).status_code == 200


@pytest.mark.parametrize("names", ["br", "deflate", "compress", "gzip, br", "brotli\u00e9"])
async def test_unsupported_encoding_returns_415_with_supported_encodings(names: str) -> None:
    async with server() as api:
        answer = await api.http.post(
            "/v1/chat/completions", content=b"{}", headers=[(b"content-encoding", names.encode("latin-1"))]
        )
    assert answer.status_code == 415
    assert "zstd and gzip" in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "zstd, gzip"


@pytest.mark.parametrize("name", ["zstd", "gzip"])
@pytest.mark.parametrize("damage", ["cut", "garbled", "plain", "more behind", "nothing", "another"])
async def test_invalid_encoded_body_returns_400(name: str, damage: str) -> None:
    whole = encode(json.dumps(CHAT).encode(), name)
    middle = len(whole) // 2
    content = {
        "cut": whole[:-1],
        "garbled": whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :],
        "plain": json.dumps(CHAT).encode(),
        "more behind": whole + b"x",
        "nothing": b"",
        "another": encode(b"{}", {"zstd": "gzip", "gzip": "zstd"}[name]),
    }[damage]
    async with server() as api:
        answer = await post(api, content, name)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert api.app.state.server.body_reader.reserved_bytes == 0
        await api.post("/v1/chat/completions", CHAT)


@pytest.mark.few(2)
@pytest.mark.parametrize("names", ["zstd", "gzip", "gzip,gzip", "zstd,gzip", "gzip,zstd"])
async def test_max_body_size_applies_to_decoded_body(names: str) -> None:
    bomb = encode(b" " * (64 << 20), *names.split(","))
    fits = encode(json.dumps(CHAT).encode().ljust(LARGEST), *names.split(","))
    async with server() as api:
        answer = await post(api, bomb, names)
        assert (answer.status_code, api.app.state.server.body_reader.reserved_bytes) == (413, 0)
        assert "--max-body-size" in answer.json()["error"]["message"]
        assert (await post(api, fits, names)).status_code == 200
        assert api.app.state.server.body_reader.reserved_bytes == 0


async def test_decoded_body_size_is_reserved_in_budget() -> None:
    content = json.dumps(CHAT).encode().ljust(LARGEST // 2)
    compressed = zstd.compress(content)

    async def receive() -> Message:
        return {"type": "http.request", "body": compressed}

    bodies = BodyReader(LARGEST, LARGEST)
    tenant = Tenant("", b"", RateLimits(None, None))
    headers = [(b"content-encoding", b"zstd"), (b"content-length", str(len(compressed)).encode())]
    scope = {"type": "http", "headers": headers, "tenant": tenant}
    async with bodies.hold_request_body(Request(scope, receive)) as body:
        assert b"".join(body.chunks) == content
        assert bodies.reserved_bytes == len(content)
    assert bodies.reserved_bytes == 0


def decode(content: bytes, *names: str, most: int = LARGEST) -> bytes:
    decoder = BodyDecoder(list(names), most)
    parts = [
        part for start in range(0, len(content), 1000) for part in decoder.decode_chunk(content[start : start + 1000])
    ]
    decoder.check_complete()
    assert all(len(part) <= STEP_BYTES for part in parts)
    return b"".join(parts)


@pytest.mark.parametrize("name", ["zstd", "gzip"])
def test_concatenated_members_decode_to_one_body(name: str) -> None:
    content = os.urandom(5000)
    assert decode(encode(content, name) + encode(b"", name) + encode(b"more", name), name) == content + b"more"


def test_decoder_keeps_output_at_step_boundaries() -> None:
    for size in (STEP_BYTES - 1, STEP_BYTES, STEP_BYTES + 1, 3 * STEP_BYTES):
        for name in ("zstd", "gzip"):
            assert len(decode(encode(b"a" * size, name), name)) == size


def test_size_limit_applies_to_each_encoding_layer() -> None:
    with pytest.raises(BodyTooLarge):
        decode(encode(b" " * 4000, "gzip", "zstd"), "gzip", "zstd", most=3999)
    with pytest.raises(BodyTooLarge):  # the content is small, and its encoded form is padded with empty members
        decode(zstd.compress(gzip.compress(b"") * 100), "gzip", "zstd", most=1000)


def test_zstd_window_over_8_mib_is_rejected() -> None:
    stream = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    content = stream.compress(b"a" * 100) + stream.flush()
    with pytest.raises(InvalidRequest, match="zstd"):
        decode(content, "zstd")


def test_too_many_empty_members_and_raw_zlib_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match="members"):
        decode(zstd.compress(b"") * (encodings_module.MAX_MEMBERS + 1), "zstd")
    with pytest.raises(InvalidRequest):
        decode(zlib.compress(b"{}"), "gzip")


UPLOAD = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n%b\r\n--b--\r\n'
)


async def upload(api: Api, content: bytes, name: str) -> Any:
    headers = {"content-type": "multipart/form-data; boundary=b", "content-encoding": name}
    return await api.http.post("/v1/files", content=encode(UPLOAD % content, name), headers=headers)


@pytest.mark.parametrize("name", ["zstd", "gzip"])
async def test_encoded_upload_is_stored_decoded_and_bomb_leaves_no_file(name: str, tmp_path: Path) -> None:
    content = b'{"a": 1}\n' * 1000
    async with server(data_dir=tmp_path, max_stored_size=LARGEST / 2**30) as api:
        stored = await upload(api, content, name)
        assert stored.status_code == 200, stored.text
        assert stored.json()["bytes"] == len(content)
        assert (await api.http.get(f"/v1/files/{stored.json()['id']}/content")).content == content
        for bomb in (bytes(LARGEST + 1), bytes(64 * LARGEST)):
            refused = await upload(api, bomb, name)
            assert refused.status_code == 413, refused.text
            assert refused.json()["error"]["message"]
        damaged = encode(UPLOAD % content, name)[:-9]
        headers = {"content-type": "multipart/form-data; boundary=b", "content-encoding": name}
        assert (await api.http.post("/v1/files", content=damaged, headers=headers)).status_code == 400
        assert [file["id"] for file in (await api.http.get("/v1/files")).json()["data"]] == [stored.json()["id"]]
    assert len(list((tmp_path / "files").iterdir())) == 1
