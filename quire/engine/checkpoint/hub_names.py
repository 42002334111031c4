"""Names as Ollama, llama.cpp's `-hf` and browsers write them: `OWNER/REPO-GGUF:Q4_K_M`, `hf.co/OWNER/REPO`,
`https://huggingface.co/OWNER/REPO/blob/main/FILE.gguf`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from quire.engine.common.errors import ModelError

ANY_GGUF = "GGUF"
"""Tag for the repository's best GGUF file, as in `-hf OWNER/REPO`."""
_HUB_HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
_NAME_PATTERN = re.compile(r"\w[\w.-]{0,95}", re.ASCII)
_TAG_PATTERN = re.compile(r"[\w.-]{1,128}", re.ASCII)
_REVISION_PATHS = ("tree", "blob", "resolve", "raw")


@dataclass(frozen=True, slots=True)
class HubName:
    repo: str
    tag: str | None = None
    file: str | None = None
    revision: str | None = None

    @property
    def wants_gguf(self) -> bool:
        return self.tag is not None or self.file is not None

    @property
    def display_name(self) -> str:
        if self.file is not None:
            return f"{self.repo}/{self.file}"
        return self.repo if self.tag in (None, ANY_GGUF) else f"{self.repo}:{self.tag}"


def parse_hub_name(name: str) -> HubName | None:
    """None for other names, such as paths. Raises ModelError for a URL that is not a model's."""
    rest = _path_on_hub(name)
    is_address = rest is not None
    rest = name if rest is None else rest
    rest, colon, tag = rest.partition(":")
    parts = rest.rstrip("/").split("/")
    if (
        len(parts) < 2
        or not all(_NAME_PATTERN.fullmatch(part) for part in parts[:2])
        or (colon and not _TAG_PATTERN.fullmatch(tag))
    ):
        if is_address:
            raise ModelError(f"model: {name!r} is not the address of a model: OWNER/REPO or OWNER/REPO:TAG")
        return None
    repo = "/".join(parts[:2])
    subpath = parts[2:]
    revision = None
    if is_address and subpath and subpath[0] in _REVISION_PATHS:
        revision, subpath = (subpath[1] if len(subpath) > 1 else None), subpath[2:]
    if is_address and parts[0] in ("datasets", "spaces"):
        raise ModelError(f"model: {name!r} is one of the hub's {parts[0]}, not a model")
    file = "/".join(subpath) or None
    if file is not None and not file.lower().endswith(".gguf"):
        if is_address:
            raise ModelError(f"model: {name!r}: {file} is not a GGUF file; {repo} names the whole model")
        return None
    if file is not None and (tag or ".." in subpath):
        raise ModelError(
            f"model: {name!r} gives both a file and a tag" if tag else f"model: {name!r} is not a file name"
        )
    return HubName(repo, tag or None, file, revision)


def _path_on_hub(name: str) -> str | None:
    if name.startswith("hf://"):
        return name.removeprefix("hf://").removeprefix("models/")
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/")
    if endpoint and name.startswith(f"{endpoint}/"):
        return unquote(name.removeprefix(f"{endpoint}/").partition("?")[0])
    if "://" in name:
        address = urlsplit(name)
        if address.scheme not in ("http", "https") or address.hostname not in _HUB_HOSTS:
            raise ModelError(f"model: {name!r} is not an address on the hub (https://huggingface.co/OWNER/REPO)")
        return unquote(address.path.lstrip("/"))
    host, _, path = name.partition("/")
    return path if host in _HUB_HOSTS else None
