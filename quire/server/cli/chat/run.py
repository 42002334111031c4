"""`quire run MODEL`: a chat, or one answer to a prompt, like Ollama's command. With -o it answers a request file."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import httpx

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.server.cli.chat import open_client_or_start_server, run_chat
from quire.server.cli.chat.chat_session import ChatSession
from quire.server.cli.chat.piped_chat import send_and_print_answer
from quire.server.cli.flags import REQUEST_FILE_FLAGS, FlagGroup, build_parser
from quire.server.cli.models.model_names import equivalent_names
from quire.server.cli.models.pull import pull_configured_model_if_missing
from quire.server.cli.server_client import auth_headers, choose_model, normalize_server_url, server_flags
from quire.server.cli.settings_flags import add_settings_flags, parse_settings
from quire.server.config import ServerConfig

_LOCAL_URL = "http://127.0.0.1:8000"
_PROBE_SECONDS = 1.0
_IGNORED_FLAGS = ("--nowordwrap", "--insecure", "--hidethinking", "--truncate", "--experimental", "--experimental-yolo")
"""Ollama's switches for what Quire does by default."""
_THINK_VALUES = ("true", "false", "low", "medium", "high")


def main(argv: Sequence[str], started: float) -> int:
    parser = _build_run_parser()
    args, config = parse_settings(parser, _close_think_flag(argv), ServerConfig, "name")
    for name in ("output", "resume", "retry_refused", "concurrency", "served_model_name"):
        if getattr(args, name, None) not in (None, False):
            parser.error(f"--{name.replace('_', '-')} is for a file of requests: quire run FILE.jsonl -o OUT.jsonl")
    if args.name is None and "model" not in config.model_fields_set:
        parser.error(
            "give a model: `quire run MODEL`, `quire run MODEL PROMPT`, or `quire run FILE.jsonl -o OUT.jsonl`"
        )
    if args.name is not None and (args.name.endswith(".jsonl") or args.name == "-"):
        parser.error(f"{args.name}: a file of requests needs -o OUT.jsonl for the results")
    prompt = _read_prompt(args.prompt)
    options = _request_options(args)
    url, requested_model = _find_server_and_model(args, config)
    if url is None:
        pull_configured_model_if_missing(config)
    with ExitStack() as stack:
        if prompt is None:
            return run_chat(stack, parser.prog, url, config, args, requested_model, options)
        http = stack.enter_context(open_client_or_start_server(url, config, args.bearer, args.cacert))
        chat = ChatSession(http, choose_model(http, requested_model), options, args.system)
        began = time.perf_counter()
        status = send_and_print_answer(chat, parser.prog, prompt, sys.stdout)
        if args.verbose:
            _print_speed(chat, time.perf_counter() - began)
        return status


def _build_run_parser() -> argparse.ArgumentParser:
    unneeded = {name: {"action": "store_true", "help": argparse.SUPPRESS} for name in _IGNORED_FLAGS}
    parser = build_parser(
        "quire run",
        __doc__,
        {
            "name": {
                "nargs": "?",
                "metavar": "MODEL",
                "help": "model, as for quire serve",
            },
            "prompt": {
                "nargs": "*",
                "metavar": "PROMPT",
                "help": "answer this prompt and exit; text that is piped in goes before it",
            },
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
            "--format": {
                "metavar": "json|SCHEMA",
                "help": "answer in JSON, or according to a JSON schema; the exit status is 1 if the answer is cut",
            },
            "--think": {
                "nargs": "?",
                "const": "true",
                "metavar": "true|false",
                "help": "turn the model's thinking on or off",
            },
            "--keepalive": {"metavar": "TEXT", "help": argparse.SUPPRESS},
            "--verbose": {"action": "store_true", "help": "print timings after each answer"},
            **unneeded,
            "a file of requests (FILE.jsonl -o OUT.jsonl)": FlagGroup(REQUEST_FILE_FLAGS),
        },
        usage="quire run MODEL [PROMPT ...] [flags]\n       quire run FILE.jsonl -o OUT.jsonl [--resume] [flags]",
        epilog="A server on this machine that has the model answers, such as `quire serve --models cache`; else an "
        "engine of its own.",
        add_help=False,
    )
    add_settings_flags(parser, ServerConfig, {EngineConfig: "the engine, where no server has the model"})
    return parser


def _close_think_flag(argv: Sequence[str]) -> list[str]:
    """Keeps `--think` from taking the model or a word of the prompt as its value."""
    arguments = []
    for argument, following in zip(argv, [*argv, ""][1:], strict=True):
        is_switch = argument == "--think" and following.lower() not in _THINK_VALUES
        arguments.append("--think=true" if is_switch else argument)
    return arguments


def _read_prompt(words: Sequence[str]) -> str | None:
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
    whole = "\n".join(part for part in (piped, " ".join(words)) if part)
    return whole or None


def _request_options(args: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError."""
    options: dict[str, Any] = {}
    if args.temperature is not None:
        options["temperature"] = args.temperature
    if args.max_tokens is not None:
        options["max_tokens"] = args.max_tokens
    if args.verbose:
        options["stream_options"] = {"include_usage": True}
    if args.think is not None:
        if args.think.lower() in ("true", "false"):
            options["chat_template_kwargs"] = {"enable_thinking": args.think.lower() == "true"}
        elif args.think in ("low", "medium", "high"):
            options["reasoning_effort"] = args.think
        else:
            raise ConfigError(f"--think: true, false, low, medium or high, not {args.think!r}")
    if args.format == "json":
        options["response_format"] = {"type": "json_object"}
    elif args.format is not None:
        try:
            schema = json.loads(args.format)
        except (ValueError, RecursionError):
            raise ConfigError(f"--format: json, or a JSON schema, not {args.format!r}") from None
        options["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return options


def _find_server_and_model(args: argparse.Namespace, config: ServerConfig) -> tuple[str | None, str | None]:
    """(None, None) means that an engine must be started. With --url, the model may be None."""
    model = args.name or config.model
    if args.url is not None:
        return args.url, model
    if args.bearer == os.environ.get("OPENAI_API_KEY"):
        args.bearer = None  # do not send a key to a server that the user did not name
    with suppress(httpx.HTTPError, ValueError, LookupError, TypeError, ConfigError):
        base = normalize_server_url(_LOCAL_URL if config.port == 8000 else f"http://127.0.0.1:{config.port}")
        answer = httpx.get(f"{base}/v1/models", headers=auth_headers(args.bearer), timeout=_PROBE_SECONDS)
        served = [str(each["id"]) for each in answer.json()["data"]]
        with suppress(ModelError):
            if (name := next((each for each in equivalent_names(model) if each in served), None)) is not None:
                return base, name
    return None, None


def _print_speed(chat: ChatSession, seconds: float) -> None:
    prompt, generated = chat.usage.get("prompt_tokens", 0), chat.usage.get("completion_tokens", 0)
    print(f"\ntotal duration:       {seconds:.3f}s", file=sys.stderr)
    print(f"prompt eval count:    {prompt} token(s)", file=sys.stderr)
    print(f"eval count:           {generated} token(s)", file=sys.stderr)
    print(f"eval rate:            {generated / seconds:.2f} tokens/s (eval count / total duration)", file=sys.stderr)
