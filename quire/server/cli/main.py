"""The `quire` command. Imports only the subcommand's module, so that each starts quickly."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from quire.engine import VERSION
from quire.engine.common.errors import QuireError
from quire.server.cli.process_setup import (
    discard_closed_stderr,
    dump_threads_on_signal,
    exit_on_sigterm_or_sighup,
    open_standard_streams,
)

COMMANDS = {
    "serve": "serve a model behind the OpenAI API",
    "chat": "chat in the terminal, with a running server or an engine of its own",
    "run": "chat with a model, or print its answer to a prompt; "
    "with -o, run a file of OpenAI batch requests without a server",
    "batch": "submit a file of OpenAI batch requests to a running server, and fetch the results",
    "models": "list models with short names, whether they fit on this machine, and how fast they can be",
    "pull": "download a model from the hub, or update it",
    "list": "list downloaded models with their sizes",
    "rm": "delete a downloaded model",
    "show": "show a model's parameters, context, chat template and defaults",
    "ps": "list the models that a running server has in memory",
    "stop": "take a model out of a running server's memory",
    "plan": "show what fits on a GPU or this machine, and its speed limits, from config.json alone",
    "quantize": "write an 8-bit or 4-bit checkpoint in compressed-tensors format, which other programs read too",
    "verify": "check on this machine that a model's tokens do not depend on what else is running",
    "replay": "recompute the receipts of an answer or a log, and report the first difference",
    "trace": "record a running server's engine for some seconds, for ui.perfetto.dev",
    "bench": "measure a server, Quire or another: throughput, latencies, start-up time",
    "run-batch": "run a file of requests offline, like quire run FILE -o OUT, with vLLM's flags",
    "collect-env": "print this machine's hardware and versions, for bug reports",
}
_FOREIGN_COMMANDS = {
    **dict.fromkeys(("ls", "ll"), "quire list"),
    **dict.fromkeys(("delete", "remove"), "quire rm"),
    **dict.fromkeys(("download", "fetch", "get"), "quire pull"),
    **dict.fromkeys(("server", "start", "llama-server", "api_server", "up"), "quire serve"),
    **dict.fromkeys(("cli", "llama-cli", "generate"), "quire run MODEL"),
    **dict.fromkeys(("complete", "completion"), "quire run MODEL PROMPT, or POST /v1/completions of a running server"),
    **dict.fromkeys(("batched-bench", "llama-bench"), "quire bench offline"),
    **dict.fromkeys(
        ("create", "cp", "copy"),
        "a table in the TOML file of quire serve --models gives a model another "
        "name, a system message and defaults of its own (docs/guides/multi-model.md)",
    ),
    **dict.fromkeys(("info", "inspect"), "quire show MODEL"),
    **dict.fromkeys(("unload", "kill"), "quire stop MODEL"),
    **dict.fromkeys(("status", "top"), "quire ps"),
    **dict.fromkeys(("push", "upload"), "models are the hub's: hf upload OWNER/REPO FOLDER"),
    **dict.fromkeys(("signin", "signout", "login", "logout"), "the hub's keys are its client's: hf auth login"),
    **dict.fromkeys(("launch", "render"), "quire serve: programs reach it at http://127.0.0.1:8000/v1"),
    **dict.fromkeys(("convert", "export", "quantise"), "quire quantize"),
    **dict.fromkeys(("version",), "quire --version"),
    **dict.fromkeys(("search", "catalog"), "quire models"),
    **dict.fromkeys(("env", "doctor", "check"), "quire collect-env, quire verify"),
}

_COMMAND_MODULES = {
    "models": "models.table",
    "pull": "models.pull",
    "list": "models.downloaded",
    "rm": "models.remove",
    "show": "models.show",
    "ps": "models.ps",
    "stop": "models.stop",
    "run-batch": "run.vllm",
    "collect-env": "collect_env",
    "plan": "plan.command",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 for success, 1 for failure, 2 for a usage error, 130 after Ctrl-C."""
    started = time.perf_counter()
    open_standard_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version"):
        print(f"quire: flags follow a command: quire serve {shlex.join(arguments)}", file=sys.stderr)
        return 2
    args = _build_command_parser().parse_args(arguments)
    if args.command in (None, "help"):
        _build_command_parser().print_help()
        return 0
    if args.command not in COMMANDS:
        from quire.engine.unsupported_options import suggest_nearest  # takes 10 ms

        known = _FOREIGN_COMMANDS.get(args.command)
        advice = f"use {known}" if known and known.startswith("quire ") else known
        advice = advice or suggest_nearest(args.command, COMMANDS) or "quire --help lists them"
        print(f"quire: no command {args.command!r}; {advice}", file=sys.stderr)
        return 2
    if args.command == "serve":
        exit_on_sigterm_or_sighup()
        dump_threads_on_signal()
    try:
        status: int = _import_command_module(args.command, args.rest).main(args.rest, started)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except QuireError as error:
        print(f"quire {args.command}: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # for example, a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python's flush at exit fails again
        if not isinstance(error, BrokenPipeError):  # the reader closed our output, as `head` does
            where = "" if error.filename is None else f"{error.filename}: "
            print(f"quire {args.command}: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except MemoryError:
        print(f"quire {args.command}: too little memory (ulimit -v, the container's limit)", file=sys.stderr)
        return 1
    finally:
        discard_closed_stderr()
    return status


def _import_command_module(command: str, rest: Sequence[str]) -> ModuleType:
    name = _COMMAND_MODULES.get(command, command)
    if command == "run" and not any(re.match(r"-o|--output(=|$)", each) for each in rest):
        name = "chat.run"  # like Ollama's
    return import_module(f"quire.server.cli.{name}")


def _build_command_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="quire",
        usage="quire [-h] [--version] COMMAND ...",
        description=f"Quire serves large language models behind the OpenAI API.\n\ncommands:\n{listing}",
        epilog="`quire COMMAND --help` lists the flags of a command; if there are many, the common ones.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quire {VERSION}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
