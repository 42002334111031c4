"""The `quire` command. It imports only the module of the chosen subcommand, so that each starts quickly."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from quire.engine import VERSION
from quire.engine.advice import nearest
from quire.engine.errors import QuireError
from quire.server.cli.environment import (
    end_on_signals,
    give_up_closed_stderr,
    open_standard_streams,
    show_threads_on_signal,
)

COMMANDS = {
    "serve": "serve a model behind the OpenAI API",
    "chat": "chat in the terminal, with a running server or an engine of its own",
    "run": "answer a file of OpenAI batch requests offline",
    "batch": "hand such a file to a running server, and fetch the results",
    "models": "models with short names: what fits on this machine, and how fast it can be",
    "pull": "download a model from the hub, or what is new of it",
    "list": "the models that are downloaded, and how large they are",
    "rm": "delete a downloaded model",
    "plan": "what fits on a GPU or this machine, and how fast it can be at most, from config.json alone",
    "quantize": "write a checkpoint in 8 or 4 bits, as compressed-tensors, which other programs read as well",
    "verify": "check that tokens do not depend on what else is running, here and with this model",
    "replay": "compute receipts again, of an answer or of a whole log: equal, or where the first difference is",
    "trace": "record some seconds of a running server's engine, for ui.perfetto.dev",
    "bench": "measure a server, Quire or another: throughput, latencies, time to start",
}

_MODULES = {
    "models": "models.table",
    "pull": "models.pull",
    "list": "models.downloaded",
    "rm": "models.remove",
    "plan": "plan.command",
}
"""Where a command's module is not the one of its name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `quire argv`; the exit status is 0 for success, 1 for a failure and 2 for a mistake in the command."""
    started = time.perf_counter()
    open_standard_streams()
    given = sys.argv[1:] if argv is None else list(argv)
    if given and given[0].startswith("-") and given[0] not in ("-h", "--help", "--version"):
        print(f"quire: flags follow a command: quire serve {shlex.join(given)}", file=sys.stderr)
        return 2
    args = _parser().parse_args(given)
    if args.command is None:
        _parser().print_help()
        return 0
    if args.command not in COMMANDS:
        advice = nearest(args.command, COMMANDS) or "quire --help lists them"
        print(f"quire: no command {args.command!r}; {advice}", file=sys.stderr)
        return 2
    if args.command == "serve":
        end_on_signals()
        show_threads_on_signal()
    try:
        status: int = _module(args.command).main(args.rest, started)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except QuireError as error:
        print(f"quire {args.command}: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # such as a full disk under what is written to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try it again when it exits
        if not isinstance(error, BrokenPipeError):  # the reader of our output has closed it, as `head` does
            where = "" if error.filename is None else f"{error.filename}: "
            print(f"quire {args.command}: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except MemoryError:
        print(f"quire {args.command}: too little memory (ulimit -v, the container's limit)", file=sys.stderr)
        return 1
    finally:
        give_up_closed_stderr()
    return status


def _module(command: str) -> ModuleType:
    return import_module(f"quire.server.cli.{_MODULES.get(command, command)}")


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="quire",
        usage="quire [-h] [--version] COMMAND ...",
        description=f"Quire serves large language models behind the OpenAI API.\n\ncommands:\n{listing}",
        epilog="`quire COMMAND --help` lists a command's flags, the common ones where there are many.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quire {VERSION}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
