"""A stand-in for the Hugging Face hub on the loopback interface, written from the API's documentation.

It serves model pages (`/api/models/…`), trees, search, and files at `/OWNER/REPO/resolve/REVISION/PATH` with ranges and
the headers that the client reads (ETag, X-Repo-Commit, X-Linked-Size, X-Error-Code).
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LFS = (".gguf", ".safetensors")
"""Files whose checksum is a SHA-256; other files have git's."""


@dataclass
class Repo:
    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    readers: tuple[str, ...] = ("reader",)
    """Tokens that may read a gated or private repository."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Reported size by path, if it differs from the real one."""

    @property
    def commit(self) -> str:
        return hashlib.sha1(b"".join(path.encode() + self.files[path] for path in sorted(self.files))).hexdigest()


@dataclass
class Hub:
    repos: dict[str, Repo] = field(default_factory=dict)
    tokens: tuple[str, ...] = ("reader", "stranger")
    """Tokens that the hub knows."""
    asked: list[str] = field(default_factory=list)
    """Method, path and range of each request."""
    breaks: dict[str, int] = field(default_factory=dict)
    """By a file's path: number of bytes after which its connection is cut, once."""
    wrong: set[str] = field(default_factory=set)
    """Paths of files whose content does not match their checksum."""
    without_ranges: bool = False
    status: int | None = None
    """Status of every answer; None for normal answers."""
    url: str = ""

    def downloads(self, path: str) -> list[str]:
        """Requests for a file's content."""
        return [each for each in self.asked if each.startswith("GET") and f"/{path}" in each and "/resolve/" in each]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server.hub
        address = urlsplit(self.path)
        path = unquote(address.path)
        hub.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        if hub.status is not None:
            self._answer(hub.status, {})
        elif path == "/api/models":
            wanted = parse_qs(address.query)["search"][0].lower()
            self._answer(200, [{"id": name} for name, each in hub.repos.items() if wanted in name.lower()])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._page(match[1], match[2], match[3])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3])
        else:
            self._answer(404, {})

    @property
    def _token(self) -> str | None:
        return self.headers.get("Authorization", "").removeprefix("Bearer ") or None

    def _repo(self, name: str, revision: str | None) -> Repo | None:
        """None if the answer has been sent already."""
        repo, token = self.server.hub.repos.get(name), self._token
        if token is not None and token not in self.server.hub.tokens:
            self._answer(401, {}, {"X-Error-Message": "Invalid credentials in Authorization header"})
            return None
        if repo is None or (repo.private and token not in repo.readers):
            # Without a token, a client does not learn whether the model exists.
            status, code = (401, {}) if token is None else (404, {"X-Error-Code": "RepoNotFound"})
            self._answer(status, {"error": "Repository not found"}, code)
            return None
        if revision not in (None, "main", repo.commit):
            self._answer(404, {}, {"X-Error-Code": "RevisionNotFound"})
            return None
        return repo

    def _page(self, name: str, kind: str | None, revision: str | None) -> None:
        repo = self._repo(name, revision)
        if repo is None:
            return
        if kind == "tree":
            self._answer(200, [{"type": "file", "path": path, **_entry(path, repo)} for path in repo.files])
        else:
            entries = {path: _entry(path, repo) for path in repo.files}
            siblings = [{"rfilename": path, "blobId": each["oid"], **each} for path, each in entries.items()]
            self._answer(200, {"id": name, "sha": repo.commit, "private": repo.private, "siblings": siblings})

    def _file(self, name: str, revision: str, path: str) -> None:
        hub = self.server.hub
        repo = self._repo(name, revision)
        if repo is None:
            return
        if repo.gated and self._token not in repo.readers:
            self._answer(401 if self._token is None else 403, {}, {"X-Error-Code": "GatedRepo"})
            return
        known = {"X-Repo-Commit": repo.commit}
        if path not in repo.files:
            self._answer(404, {}, known | {"X-Error-Code": "EntryNotFound"})
            return
        content = repo.files[path]
        entry = _entry(path, repo)
        etag = entry["lfs"]["sha256"] if "lfs" in entry else entry["oid"]
        known |= {"ETag": f'"{etag}"', "X-Linked-Size": str(len(content)), "Accept-Ranges": "bytes"}
        first, status = 0, 200
        if path in hub.wrong:
            content = bytes(len(content))
        if (wanted := self.headers.get("Range")) and not hub.without_ranges:
            start, _, last = wanted.removeprefix("bytes=").partition("-")
            first, end = int(start), min(int(last or len(content) - 1), len(content) - 1)
            known["Content-Range"] = f"bytes {first}-{end}/{len(content)}"
            content, status = content[first : end + 1], 206
        self._send(status, content, known, cut=hub.breaks.pop(path, None) if self.command == "GET" else None)

    def _answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(body).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


def _entry(path: str, repo: Repo) -> dict[str, Any]:
    content = repo.files[path]
    size = repo.sizes.get(path, len(content))
    entry: dict[str, Any] = {"size": size}
    entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if path.endswith(LFS):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "sha256": digest, "size": size, "pointerSize": 135}
    return entry


@contextmanager
def stand_in_hub() -> Iterator[Hub]:
    """A hub that listens until the context ends."""
    hub = Hub()
    server = _Server(hub)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def used_here(hub: Hub, cache: Path) -> Iterator[None]:
    """Make this process's client, which has already read its variables, use this hub and this cache."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.delenv("HF_TOKEN", raising=False)
        patch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        patch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield


def tiny_gguf(name: str = "", arch: str = "llama", size: int = 2**20) -> bytes:
    """A GGUF file of `size` bytes with a short header: one layer, no tokenizer. The content depends on the name."""
    numbers = {"embedding_length": 64, "block_count": 1, "attention.head_count": 4, "feed_forward_length": 96}
    numbers |= {"context_length": 128}
    keys = [
        _text(key) + struct.pack("<I", 8) + _text(value)
        for key, value in (("general.architecture", arch), ("general.name", name))
    ]
    keys += [_text(f"{arch}.{key}") + struct.pack("<II", 4, value) for key, value in numbers.items()]
    tensor = _text("token_embd.weight") + struct.pack("<I2QIQ", 2, 64, 320, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys)) + b"".join(keys) + tensor
    return head.ljust(size, b"x")


def _text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()
