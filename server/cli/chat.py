"""`quire chat`: talk to a model in the terminal, over a running server or an engine started for it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

from quire.engine.config import EngineConfig
from quire.engine.errors import EngineError, QuireError
from quire.server.cli.settings import add_flags, parse
from quire.server.config import ServerConfig

HELP = """\
/system TEXT  set the system message (no TEXT: remove it) and begin anew
/reset        forget the conversation
/exit         leave (or Ctrl-D)
Ctrl-C stops an answer."""


@dataclass
class Chat:
    """A conversation with one model. `options` are added to every request's body."""

    http: httpx.Client
    model: str
    options: dict[str, Any]
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def answer(self, text: str) -> Generator[str, None, None]:
        """Stream the answer to `text`, piece by piece, and add both to the conversation.

        An answer that is cut short is added as far as it came. If there is none because the server refused the request,
        QuireError is raised and `text` is not added either.
        """
        self.turns.append({"role": "user", "content": text})
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

    def _stream(self) -> Iterator[str]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*system, *self.turns], "stream": True, **self.options}
        try:
            with self.http.stream("POST", "chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    event = line.removeprefix("data:").strip()
                    if line.startswith("data:") and event != "[DONE]":
                        yield from _pieces(json.loads(event))
        except httpx.HTTPError as error:
            raise EngineError(f"the server does not answer: {error}") from None


def _pieces(chunk: dict[str, Any]) -> Iterator[str]:
    if "error" in chunk:
        raise EngineError(chunk["error"]["message"])
    for choice in chunk["choices"]:
        if choice["delta"].get("content"):
            yield choice["delta"]["content"]


def _refusal(response: httpx.Response) -> QuireError:
    """The message of an OpenAI error body, or the status of anything else."""
    try:
        return EngineError(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return EngineError(f"HTTP {response.status_code} from {response.url}")


def converse(chat: Chat, stdin: TextIO, out: TextIO) -> int:
    """Read lines, print answers, until the end of input or /exit. Returns 1 if the last request was refused."""
    status = 0
    for line in _lines(stdin, out):
        command, _, rest = line.partition(" ")
        if command == "/exit":
            break
        if command == "/help":
            print(HELP, file=out)
        elif command in ("/reset", "/system"):
            chat.turns.clear()
            if command == "/system":
                chat.system = rest.strip() or None
        elif command.startswith("/"):
            print(f"{command}: no such command; /help lists them", file=out)
        else:
            status = _say(chat, line, out)
    return status


def _say(chat: Chat, text: str, out: TextIO) -> int:
    answer = chat.answer(text)
    try:
        for piece in answer:
            print(piece, end="", file=out, flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=out)
    except QuireError as error:
        print(f"quire chat: {error}", file=sys.stderr)
        return 1
    finally:
        answer.close()
        print(file=out, flush=True)
    return 0


def _lines(stdin: TextIO, out: TextIO) -> Iterator[str]:
    """The input's non-empty lines. At a terminal there is a prompt with line editing, and Ctrl-C discards the line."""
    if not stdin.isatty():
        yield from (line.strip() for line in stdin if line.strip())
        return
    import readline  # noqa: F401 - gives input() its editing and history

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print(file=out)
            return
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D to leave", file=out)
            continue
        if line:
            yield line


@contextmanager
def connect(url: str | None, config: ServerConfig, key: str | None) -> Iterator[httpx.Client]:
    """An HTTP client whose base is the /v1 of the server at `url`, or of a server that is started for it."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with ExitStack() as stack:
        transport = None
        if url is None:
            from quire.server.cli.hosting import local_server  # imported only when needed: it is slow

            url, transport = "http://quire", httpx.HTTPTransport(uds=stack.enter_context(local_server(config)))
        base, timeout = url.rstrip("/").removesuffix("/v1") + "/v1", httpx.Timeout(10, read=None)
        yield stack.enter_context(httpx.Client(base_url=base, headers=headers, timeout=timeout, transport=transport))


def served_model(http: httpx.Client) -> str:
    """The name of the first model that the server lists. The client's base must be its /v1. Raises EngineError."""
    try:
        response = http.get("models")
        if response.is_error:
            raise _refusal(response)
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise EngineError(f"no server at {http.base_url}: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise EngineError(f"no list of models at {http.base_url}: give the model's name") from None


def main(argv: Sequence[str], started: float) -> int:
    parser = argparse.ArgumentParser(
        prog="quire chat", usage="quire chat [MODEL | --url URL] [flags]", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("name", nargs="?", metavar="MODEL", help="model to load, or to ask for at --url")
    parser.add_argument("--url", help="a running server's API, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, metavar="NUMBER", help="0 is greedy; default: the model's own")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer; default: what the context allows")
    key_help = "key for --url; default: the variable OPENAI_API_KEY"
    parser.add_argument("--api-key", metavar="KEY", dest="bearer", help=key_help)
    add_flags(parser, ServerConfig, {EngineConfig: "the engine, without --url"})
    args, config = parse(parser, argv, ServerConfig, "name")
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    given = {name: value for name, value in options.items() if value is not None}
    with connect(args.url, config, args.bearer or os.environ.get("OPENAI_API_KEY")) as http:
        model = args.name if args.url and args.name else served_model(http)
        if sys.stdin.isatty():
            print(f"{model}; /help lists the commands")
        return converse(Chat(http, model, given, args.system), sys.stdin, sys.stdout)
