"""`quire bench start`: seconds from a server's command to its first streamed token."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

import uvloop

from quire.engine.common.errors import ConfigError, EngineError
from quire.server.cli.bench.bench_report import REPORT_FLAGS, check_report_paths, write_json
from quire.server.cli.bench.serve import ReceivedStream
from quire.server.cli.bench.stream_client import StreamClient, StreamError
from quire.server.cli.flags import build_parser
from quire.server.cli.settings_flags import bounded_number
from quire.server.cli.unknown_flags import parse_flags

QUIRE_COMMAND = [sys.executable, "-m", "quire", "serve", "--port", "{port}"]
POLL_SECONDS = 0.02
GRACE_SECONDS = 20.0
MAX_TOKENS = 8
LOADING_STATUSES = (None, 404, 429, 502, 503, 504)
"""None means that there was no response."""


def main(argv: Sequence[str]) -> int:
    split = argv.index("--") if "--" in argv else len(argv)
    server_command = list(argv[split + 1 :]) or QUIRE_COMMAND
    parser = build_parser(
        "quire bench start",
        __doc__,
        {
            "--runs": {
                "type": bounded_number(int, 1),
                "default": 3,
                "metavar": "N",
                "help": "number of starts to measure (%(default)s)",
            },
            "--model": {"metavar": "NAME", "help": "model to request, if the server requires a name"},
            "--timeout": {
                "type": bounded_number(float, 0),
                "default": 600.0,
                "metavar": "SECONDS",
                "help": "maximum wait for a start (600)",
            },
            **REPORT_FLAGS,
        },
        usage="quire bench start [flags] [-- COMMAND ... {port} ...]",
        epilog="COMMAND must serve on the port put for {port}; default: quire serve with the embedded model.",
    )
    args = parse_flags(parser, argv[:split])
    check_report_paths(args.json)
    if not any("{port}" in word for word in server_command):
        raise ConfigError("the command must say {port} where its port goes")
    print(f"{args.label or shlex.join(server_command)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, to end the started server too
    seconds = []
    for run in range(args.runs):
        seconds.append(measure_time_to_first_token(server_command, args.model, args.timeout))
        print(f"run {run + 1}: {seconds[-1]:.2f} s", flush=True)
    low = min(seconds)
    high = max(seconds)
    median = statistics.median(seconds)
    print(f"command to first token: median {median:.2f} s, min {low:.2f} s, max {high:.2f} s")
    if args.json:
        figures = {"command": server_command, "seconds": seconds, "median": median, "min": low, "max": high}
        write_json(args.json, args, figures)
    return 0


def measure_time_to_first_token(command: Sequence[str], model: str | None, timeout: float) -> float:
    """Returns seconds from the start of the server's process to its first token. Raises EngineError, and ConfigError if
    `command` cannot be started.
    """
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port = probe_socket.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        with run_process([word.replace("{port}", str(port)) for word in command], log) as process:
            try:
                arrived = uvloop.run(
                    _wait_for_first_token(f"http://127.0.0.1:{port}", model, process, started + timeout)
                )
            except EngineError as error:
                raise EngineError(f"{error}\n{_last_log_lines(log)}") from None
    return arrived - started


@contextmanager
def run_process(command: Sequence[str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"cannot start {command[0]}: {error.strerror}") from None
    try:
        yield process
    finally:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _wait_for_first_token(
    url: str, model: str | None, process: subprocess.Popen[bytes], deadline: float
) -> float:
    """Return time.perf_counter() at the first token."""
    named = {"model": model} if model else {}
    body = {**named, "prompt": "Once upon a time", "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    client = StreamClient(url, keep_alive=False)
    while True:
        stream = ReceivedStream()
        try:
            await client.post_stream("completions", json.dumps(body).encode(), stream.add_event)
            if stream.chunk_times:
                return stream.sent_at + stream.chunk_times[0]
            reason = "an answer without a token"
        except StreamError as error:
            reason = str(error)
            if error.status not in LOADING_STATUSES:
                raise EngineError(f"the server refuses: {reason}") from None
        if process.poll() is not None:
            raise EngineError(f"the command ended with status {process.returncode} before it served")
        if time.perf_counter() > deadline:
            raise EngineError(f"no token in time; last: {reason}")
        await asyncio.sleep(POLL_SECONDS)


def _last_log_lines(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-20:])
