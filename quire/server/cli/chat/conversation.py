"""A conversation with one model of a server: what was said, and the next answer as a stream."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from quire.engine.errors import ConfigError, EngineError, QuireError
from quire.server.cli.connect import refusal


@dataclass
class Chat:
    """`options` are added to every request's body."""

    http: httpx.Client
    """Its base is the server's /v1."""
    model: str
    options: dict[str, Any]
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Messages in the API's form."""
    images: list[str] = field(default_factory=list)
    """data: URLs of the pictures that go with the next message."""
    cut: bool = False
    """Whether the last answer ended because it was as long as it might be."""
    usage: dict[str, Any] = field(default_factory=dict)
    """Of the last answer, where its stream says it."""

    def answer(self, text: str) -> Generator[str, None, None]:
        """Stream the answer to `text`, piece by piece, and add both to the conversation.

        An answer that is cut short is added as far as it came. If there is none because the server refused the request,
        QuireError is raised and `text` is not added either, nor are the pictures that went with it.
        """
        self.cut = False
        shown = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        self.turns.append({"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text})
        self.images = []
        received: list[str] = []
        try:
            for piece in self._stream():
                received.append(piece)
                yield piece
        except QuireError:
            if not received:
                self.turns.pop()
            raise
        finally:
            if received:
                self.turns.append({"role": "assistant", "content": "".join(received)})

    def take_back(self) -> str | None:
        """Remove the last message of the user and what followed; returns its text, or None where there is none. Its
        pictures go with the next message."""
        places = [place for place, turn in enumerate(self.turns) if turn["role"] == "user"]
        if not places:
            return None
        content = self.turns[places[-1]]["content"]
        parts = content if isinstance(content, list) else []
        self.images = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        del self.turns[places[-1] :]
        return text_of(content)

    def save(self, path: Path) -> None:
        """Raises ConfigError, also for a file that is no saved conversation: it is not overwritten."""
        said = {"model": self.model, "system": self.system, "options": self.options, "messages": self.turns}
        try:
            if _is_something_else(path.expanduser(), said.keys()):
                raise ConfigError(f"{path} is there already, and is no saved conversation: choose another name")
            path.expanduser().write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Go on with what `save` wrote, or a list of messages, with the model that is asked now. Raises ConfigError."""
        try:
            said = json.loads(path.expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise ConfigError(f"{path} is no conversation: it is not JSON") from None
        said = {"messages": said} if isinstance(said, list) else said
        turns = said.get("messages") if isinstance(said, dict) else None
        if not isinstance(turns, list) or not all(_is_message(turn) for turn in turns):
            raise ConfigError(f"{path} is no conversation: it has no list of messages")
        first = [text_of(turn["content"]) for turn in turns if turn["role"] == "system"]
        system, options = said.get("system"), said.get("options")
        self.system = system if isinstance(system, str) else "\n".join(first) or None
        self.options = options if isinstance(options, dict) else self.options
        self.images = []
        self.turns = [{"role": turn["role"], "content": turn["content"]} for turn in turns if turn["role"] != "system"]

    def _stream(self) -> Iterator[str]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*system, *self.turns], "stream": True, **self.options}
        try:
            with self.http.stream("POST", "chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise refusal(response)
                for line in response.iter_lines():
                    event = line.removeprefix("data:").strip()
                    if line.startswith("data:") and event != "[DONE]":
                        chunk = json.loads(event)
                        self.usage = chunk.get("usage") or self.usage
                        yield from _pieces(chunk)
                        self.cut |= any(choice.get("finish_reason") == "length" for choice in chunk["choices"])
        except httpx.HTTPError as error:
            raise EngineError(f"the server does not answer: {error}") from None


def _pieces(chunk: dict[str, Any]) -> Iterator[str]:
    if "error" in chunk:
        raise EngineError(chunk["error"]["message"])
    for choice in chunk["choices"]:
        if choice["delta"].get("content"):
            yield choice["delta"]["content"]


def text_of(content: str | list[dict[str, Any]]) -> str:
    """The texts of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _is_message(turn: object) -> bool:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        return False
    content = turn.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content)))


def _is_part(part: object) -> bool:
    match part:
        case {"type": "text", "text": str()} | {"type": "image_url", "image_url": {"url": str()}}:
            return True
    return False


def _is_something_else(path: Path, names: Collection[str]) -> bool:
    """Whether a file has content that is not an object of these names."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return True
    return not isinstance(there, dict) or there.keys() != set(names)
