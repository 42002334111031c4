"""`quire batch`: hands a file of requests to a running server, which answers it behind everything else."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire.engine.errors import ConfigError, EngineError
from quire.server.batches.lines import lines_of, parse_line
from quire.server.cli.connect import headers, refusal, server_flags, server_url, trusted, unreachable
from quire.server.cli.flags import command
from quire.server.cli.unknown_flags import parse_known
from quire.server.store.batches import ENDED

_POLL_SECONDS = 1.0


def main(argv: Sequence[str], started: float) -> int:
    parser = command(
        "quire batch",
        __doc__,
        {
            "action": {"choices": ("submit", "status", "wait", "cancel", "list")},
            "what": {"nargs": "?", "metavar": "FILE|ID", "help": "the file to submit, or the batch's id"},
            "-o --output": {"type": Path, "metavar": "OUT.jsonl", "help": "wait for the results, and write them there"},
            "--window": {"default": "24h", "help": "how long it may take: 30m, 24h, 7d (default: %(default)s)"},
            **server_flags("http://127.0.0.1:8000"),
        },
    )
    args = parse_known(parser, argv)
    if args.action != "list" and args.what is None:
        parser.error(f"{args.action} needs {'a file' if args.action == 'submit' else 'the id of a batch'}")
    url = server_url(args.url, tls=args.cacert is not None)
    http = httpx.Client(base_url=f"{url}/v1/", headers=headers(args.api_key), timeout=600, verify=trusted(args.cacert))
    with closing(http):
        try:
            return _done(Server(http), args)
        except httpx.HTTPError as error:
            raise unreachable(url, error) from None


class Server:
    """The files and batches of a server. Methods raise EngineError with what it says."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def submit(self, file: Path, window: str) -> dict[str, Any]:
        """A new batch, for the endpoint that the file's first request names."""
        try:
            _, first = next(lines_of(file), (0, ""))
            endpoint = parse_line(first).url
            with file.open("rb") as content:
                form: dict[str, Any] = {"purpose": (None, b"batch"), "file": (file.name, content)}
                uploaded = self._answer(self._http.post("files", files=form))
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None
        asked = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
        return self._answer(self._http.post("batches", json=asked))

    def batch(self, id: str) -> dict[str, Any]:
        return self._answer(self._http.get(f"batches/{id}"))

    def cancel(self, id: str) -> dict[str, Any]:
        return self._answer(self._http.post(f"batches/{id}/cancel"))

    def batches(self) -> list[dict[str, Any]]:
        """The newest hundred."""
        found: list[dict[str, Any]] = self._answer(self._http.get("batches", params={"limit": 100}))["data"]
        return found

    def write(self, batch: dict[str, Any], output: Path) -> None:
        """The answers, and behind them the errors."""
        try:
            with output.open("wb") as file:
                for name in ("output_file_id", "error_file_id"):
                    if batch[name] is None:
                        continue
                    with self._http.stream("GET", f"files/{batch[name]}/content") as content:
                        if content.is_error:
                            content.read()
                            raise refusal(content)
                        for piece in content.iter_bytes():
                            file.write(piece)
        except OSError as error:
            raise ConfigError(f"cannot write {output}: {error.strerror}") from None

    def wait(self, id: str) -> dict[str, Any]:
        """The batch when it has ended. A server that is away for a while is waited for."""
        batch = self.batch(id)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task(batch["status"], total=None)
            while True:
                counts = batch["request_counts"]
                told = f"{batch['status']}, {counts['failed']} failed" if counts["failed"] else batch["status"]
                done = counts["completed"] + counts["failed"]
                progress.update(bar, description=told, completed=done, total=counts["total"] or None)
                if batch["status"] in ENDED:
                    return batch
                time.sleep(_POLL_SECONDS)
                try:
                    batch = self.batch(id)
                except httpx.TransportError:
                    progress.update(bar, description="the server is away")

    @staticmethod
    def _answer(response: httpx.Response) -> dict[str, Any]:
        if response.is_error:
            raise refusal(response)
        found: dict[str, Any] = response.json()
        return found


def _done(server: Server, args: argparse.Namespace) -> int:
    """Do what was asked; the exit status."""
    if args.action == "list":
        for each in server.batches():
            print(_line(each))
        return 0
    if args.action == "submit":
        batch = server.submit(Path(args.what), args.window)
        print(batch["id"], flush=True)
    elif args.action == "cancel":
        batch = server.cancel(args.what)
    else:
        batch = server.batch(args.what)
    if args.action == "wait" or args.output is not None:
        batch = server.wait(batch["id"])
    if args.action != "submit" or args.output is not None:
        print(_line(batch), file=sys.stderr if args.action == "submit" else sys.stdout)
    for error in (batch["errors"] or {"data": []})["data"]:
        where = "" if error["line"] is None else f"line {error['line']}: "
        print(f"quire batch: {where}{error['message']}", file=sys.stderr)
    if args.output is not None:
        if batch["status"] == "failed":
            raise EngineError("no request was answered: mend the file, and submit it again")
        server.write(batch, args.output)
    return int(batch["status"] in ("failed", "expired") or batch["request_counts"]["failed"] > 0)


def _line(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    return f"{batch['id']}  {batch['status']:12} {json.dumps(counts)}  {batch['endpoint']}"
