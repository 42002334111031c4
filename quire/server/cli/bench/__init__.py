"""`quire bench`: measures a server over HTTP, the engine in process, or the time from command to first token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from quire.engine.unsupported_options import suggest_nearest

SUBCOMMANDS = {
    "serve": "a running server, any that speaks the OpenAI API: throughput and latencies under load",
    "offline": "an engine in this process: tokens per second",
    "throughput": "the same with vLLM's flags, and its datasets",
    "latency": "seconds of a batch of prompts, as vLLM measures it",
    "start": "a server's start: seconds from the command to the first streamed token",
}


def main(argv: Sequence[str], started: float) -> int:
    if argv and argv[0] in SUBCOMMANDS:
        part = import_module(f"quire.server.cli.bench.{argv[0]}")
        status: int = part.main(argv[1:])
        return status
    listing = "\n".join(f"  {name:<10}  {text}" for name, text in SUBCOMMANDS.items())
    usage = f"usage: quire bench {{{','.join(SUBCOMMANDS)}}} [flags]\n\n{__doc__}\n\n{listing}"
    wants_help = bool(argv) and argv[0] in ("-h", "--help")
    if argv and (near := suggest_nearest(argv[0], SUBCOMMANDS)):
        print(f"quire bench: no {argv[0]!r}; {near}", file=sys.stderr)
        return 2
    print(usage, file=sys.stdout if wants_help else sys.stderr)
    return 0 if wants_help else 2
