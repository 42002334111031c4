"""`quire chat`: talk to a model in the terminal, over a running server or an engine started for it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from quire.engine.config import EngineConfig
from quire.server.cli.chat.conversation import Chat
from quire.server.cli.chat.plain import converse
from quire.server.cli.connect import chosen_model, headers, server_flags, server_url, trusted
from quire.server.cli.flags import command
from quire.server.cli.models.pull import pull_missing
from quire.server.cli.settings import add_flags, parse
from quire.server.config import ServerConfig


@contextmanager
def connect(url: str | None, config: ServerConfig, key: str | None, cacert: Path | None) -> Iterator[httpx.Client]:
    """An HTTP client whose base is the /v1 of the server at `url`, or of a server that is started for it."""
    with ExitStack() as stack:
        if url is None:
            from quire.server.cli.hosting import local_server  # imported only when needed: it is slow

            transport = httpx.HTTPTransport(uds=stack.enter_context(local_server(config)))
            base = "http://quire"
        else:
            base, transport = server_url(url, tls=cacert is not None), httpx.HTTPTransport(verify=trusted(cacert))
        timeout = httpx.Timeout(10, read=None)
        yield stack.enter_context(
            httpx.Client(base_url=f"{base}/v1", headers=headers(key), timeout=timeout, transport=transport)
        )


def main(argv: Sequence[str], started: float) -> int:
    parser = command(
        "quire chat",
        __doc__,
        {
            "name": {"nargs": "?", "metavar": "MODEL", "help": "model to load, or to ask for at --url"},
            **server_flags(None, key="bearer"),
            "--system": {"metavar": "TEXT", "help": "system message"},
            "--temperature": {"type": float, "metavar": "NUMBER", "help": "0 is greedy; default: the model's own"},
            "--max-tokens": {"type": int, "metavar": "N", "help": "longest answer; default: what the context allows"},
        },
        usage="quire chat [MODEL | --url URL] [flags]",
        add_help=False,
    )
    add_flags(parser, ServerConfig, {EngineConfig: "the engine, without --url"})
    args, config = parse(parser, argv, ServerConfig, "name")
    asked = args.name or getattr(args, "model", None) if args.url else None  # else it is what is loaded
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    given = {name: value for name, value in options.items() if value is not None}
    if not args.url:
        pull_missing(config)
    with ExitStack() as stack:
        return converse_with(stack, args.url, config, args, asked, given)


def converse_with(
    stack: ExitStack,
    url: str | None,
    config: ServerConfig,
    args: argparse.Namespace,
    asked: str | None,
    options: dict[str, Any],
) -> int:
    """A conversation with the server at `url`, or one that is started for it: at a terminal, or through pipes.
    `asked`: the model; None: the first. Returns the exit status."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        http = stack.enter_context(connect(url, config, args.bearer, args.cacert))
        return converse(Chat(http, chosen_model(http, asked), options, args.system), sys.stdin, sys.stdout)
    from rich.console import Console

    from quire.server.cli.chat import terminal

    console = Console(highlight=False)
    with terminal.unseen_keys(), console.status("connecting" if url else f"loading {config.model_names[0]}"):
        http = stack.enter_context(connect(url, config, args.bearer, args.cacert))
        model = chosen_model(http, asked)
    console.print(f"[bold]{model}[/]; /help lists the commands")
    return terminal.converse(Chat(http, model, options, args.system), console)
