from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from quire.engine.common.errors import ConfigError, EngineError, QuireError
from quire.server.cli.server_client import error_from_response


@dataclass
class ChatSession:
    http: httpx.Client
    model: str
    options: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    pending_images: list[str] = field(default_factory=list)
    """data: URLs for the next message."""
    was_truncated: bool = False
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def truncation_notice(self) -> str:
        is_set = "max_tokens" in self.options or "max_completion_tokens" in self.options
        return "cut at max tokens" if is_set else "cut at max tokens: the server's limit, or the end of the context"

    @property
    def answer_status(self) -> int:
        """The exit status: 1 if the last answer was to have a format, but was cut."""
        return int(self.was_truncated and "response_format" in self.options)

    def stream_answer(self, text: str) -> Generator[str, None, None]:
        """Keeps the part of an interrupted answer that was received. If nothing was received, a refusal drops `text`
        and the pending images. Raises QuireError.
        """
        self.was_truncated = False
        image_parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.pending_images]
        self.messages.append(
            {"role": "user", "content": [*image_parts, {"type": "text", "text": text}] if image_parts else text}
        )
        self.pending_images = []
        received: list[str] = []
        try:
            for piece in self._stream_content_deltas():
                received.append(piece)
                yield piece
        except QuireError:
            if not received:
                self.messages.pop()
            raise
        finally:
            if received:
                self.messages.append({"role": "assistant", "content": "".join(received)})

    def undo_last_turn(self) -> str | None:
        """Returns the removed message's text. Its images become pending again."""
        places = [place for place, turn in enumerate(self.messages) if turn["role"] == "user"]
        if not places:
            return None
        content = self.messages[places[-1]]["content"]
        parts = content if isinstance(content, list) else []
        self.pending_images = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        del self.messages[places[-1] :]
        return message_text(content)

    def save_conversation(self, path: Path) -> None:
        """Raises ConfigError, also if the file exists and is not a saved conversation."""
        content = {"model": self.model, "system": self.system, "options": self.options, "messages": self.messages}
        try:
            if _is_foreign_file(path.expanduser(), content.keys()):
                raise ConfigError(f"{path} exists and is not a saved conversation: choose another name")
            path.expanduser().write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def load_conversation(self, path: Path) -> None:
        """Reads a saved conversation or a list of messages. The model does not change. Raises ConfigError."""
        try:
            content = json.loads(path.expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise ConfigError(f"{path} is not a conversation: it is not JSON") from None
        content = {"messages": content} if isinstance(content, list) else content
        turns = content.get("messages") if isinstance(content, dict) else None
        if not isinstance(turns, list) or not all(_is_message(turn) for turn in turns):
            raise ConfigError(f"{path} is not a conversation: it has no list of messages")
        first = [message_text(turn["content"]) for turn in turns if turn["role"] == "system"]
        system, options = content.get("system"), content.get("options")
        self.system = system if isinstance(system, str) else "\n".join(first) or None
        self.options = options if isinstance(options, dict) else self.options
        self.pending_images = []
        self.messages = [
            {"role": turn["role"], "content": turn["content"]} for turn in turns if turn["role"] != "system"
        ]

    def _stream_content_deltas(self) -> Iterator[str]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*system, *self.messages], "stream": True, **self.options}
        try:
            with self.http.stream("POST", "chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise error_from_response(response)
                for line in response.iter_lines():
                    event = line.removeprefix("data:").strip()
                    if line.startswith("data:") and event != "[DONE]":
                        chunk = json.loads(event)
                        self.usage = chunk.get("usage") or self.usage
                        yield from _chunk_content_deltas(chunk)
                        self.was_truncated |= any(
                            choice.get("finish_reason") == "length" for choice in chunk["choices"]
                        )
        except httpx.HTTPError as error:
            raise EngineError(f"the server does not answer: {error}") from None


def _chunk_content_deltas(chunk: dict[str, Any]) -> Iterator[str]:
    if "error" in chunk:
        raise EngineError(chunk["error"]["message"])
    for choice in chunk["choices"]:
        if choice["delta"].get("content"):
            yield choice["delta"]["content"]


def message_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _is_message(turn: object) -> bool:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        return False
    content = turn.get("content")
    return isinstance(content, str) or (isinstance(content, list) and all(map(_is_content_part, content)))


def _is_content_part(part: object) -> bool:
    match part:
        case {"type": "text", "text": str()} | {"type": "image_url", "image_url": {"url": str()}}:
            return True
    return False


def _is_foreign_file(path: Path, names: Collection[str]) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return True
    return not isinstance(content, dict) or content.keys() != set(names)
