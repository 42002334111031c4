"""`quire chat`: talk to a model in the terminal, on a running server or an engine started for it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from quire.engine.common.config import EngineConfig
from quire.server.cli.chat.chat_session import ChatSession
from quire.server.cli.chat.piped_chat import chat_over_pipes
from quire.server.cli.flags import build_parser
from quire.server.cli.models.pull import pull_configured_model_if_missing
from quire.server.cli.server_client import (
    auth_headers,
    choose_model,
    client_ssl_context,
    normalize_server_url,
    server_flags,
)
from quire.server.cli.settings_flags import add_settings_flags, parse_settings
from quire.server.config import ServerConfig


@contextmanager
def open_client_or_start_server(
    url: str | None, config: ServerConfig, key: str | None, cacert: Path | None
) -> Iterator[httpx.Client]:
    with ExitStack() as stack:
        if url is None:
            from quire.server.cli.engine_app import (
                run_server_on_private_socket,  # slow to import
            )

            transport = httpx.HTTPTransport(uds=stack.enter_context(run_server_on_private_socket(config)))
            base = "http://quire"
        elif url.startswith("unix:"):
            base, transport = "http://localhost", httpx.HTTPTransport(uds=url.removeprefix("unix:").removeprefix("//"))
        else:
            base, transport = (
                normalize_server_url(url, tls=cacert is not None),
                httpx.HTTPTransport(verify=client_ssl_context(cacert)),
            )
        timeout = httpx.Timeout(10, read=None)
        yield stack.enter_context(
            httpx.Client(base_url=f"{base}/v1", headers=auth_headers(key), timeout=timeout, transport=transport)
        )


def main(argv: Sequence[str], started: float) -> int:
    parser = build_parser(
        "quire chat",
        __doc__,
        {
            "name": {"nargs": "?", "metavar": "MODEL", "help": "model to load, or to request from --url"},
            **server_flags(None, key="bearer"),
            "--system": {"metavar": "TEXT", "help": "system message"},
            "--temperature": {
                "type": float,
                "metavar": "NUMBER",
                "help": "sampling temperature; 0 is greedy; default: the model's own",
            },
            "--max-tokens": {
                "type": int,
                "metavar": "N",
                "help": "maximum tokens per answer; default: as many as the context allows",
            },
        },
        usage="quire chat [MODEL | --url URL] [flags]",
        add_help=False,
    )
    add_settings_flags(parser, ServerConfig, {EngineConfig: "the engine, without --url"})
    args, config = parse_settings(parser, argv, ServerConfig, "name")
    requested_model = args.name or getattr(args, "model", None) if args.url else None
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    given_options = {name: value for name, value in options.items() if value is not None}
    if not args.url:
        pull_configured_model_if_missing(config)
    with ExitStack() as stack:
        return run_chat(stack, parser.prog, args.url, config, args, requested_model, given_options)


def run_chat(
    stack: ExitStack,
    program: str,
    url: str | None,
    config: ServerConfig,
    args: argparse.Namespace,
    requested_model: str | None,
    options: dict[str, Any],
) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        http = stack.enter_context(open_client_or_start_server(url, config, args.bearer, args.cacert))
        chat = ChatSession(http, choose_model(http, requested_model), options, args.system)
        return chat_over_pipes(chat, program, sys.stdin, sys.stdout)
    from rich.console import Console

    from quire.server.cli.chat import terminal

    console = Console(highlight=False)
    with terminal.hide_typed_keys(), console.status("connecting" if url else f"loading {config.model_names[0]}"):
        http = stack.enter_context(open_client_or_start_server(url, config, args.bearer, args.cacert))
        model = choose_model(http, requested_model)
    console.print(f"[bold]{model}[/]; /help lists the commands")
    return terminal.chat_in_terminal(ChatSession(http, model, options, args.system), console)
