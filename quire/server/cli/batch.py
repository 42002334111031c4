"""`quire batch`: sends a file of requests to a running server, which answers it at low priority."""

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

from quire.engine.common.errors import ConfigError, EngineError
from quire.server.batches.batch_lines import parse_line, read_nonempty_lines
from quire.server.cli.flags import build_parser
from quire.server.cli.server_client import (
    auth_headers,
    client_ssl_context,
    error_from_response,
    normalize_server_url,
    server_flags,
    unreachable_error,
)
from quire.server.cli.unknown_flags import parse_flags
from quire.server.store.batches import TERMINAL_STATUSES

_POLL_SECONDS = 1.0


def main(argv: Sequence[str], started: float) -> int:
    parser = build_parser(
        "quire batch",
        __doc__,
        {
            "action": {
                "choices": ("submit", "status", "wait", "cancel", "list"),
                "help": "submit a file; print a batch's status; wait until it ends; cancel it; or list all batches",
            },
            "what": {"nargs": "?", "metavar": "FILE|ID", "help": "the file to submit, or the id of a batch"},
            "-o --output": {
                "type": Path,
                "metavar": "OUT.jsonl",
                "help": "wait for the results and write them to this file",
            },
            "--window": {"default": "24h", "help": "completion window, such as 30m, 24h or 7d (default: %(default)s)"},
            **server_flags("http://127.0.0.1:8000"),
        },
        usage="quire batch submit FILE [-o OUT.jsonl] [flags]\n"
        "       quire batch {status,wait,cancel} ID [flags]\n"
        "       quire batch list [flags]",
    )
    args = parse_flags(parser, argv)
    if args.action != "list" and args.what is None:
        parser.error(f"{args.action} needs {'a file' if args.action == 'submit' else 'the id of a batch'}")
    url = normalize_server_url(args.url, tls=args.cacert is not None)
    http = httpx.Client(
        base_url=f"{url}/v1/", headers=auth_headers(args.api_key), timeout=600, verify=client_ssl_context(args.cacert)
    )
    with closing(http):
        try:
            return _run_action(BatchClient(http), args)
        except httpx.HTTPError as error:
            raise unreachable_error(url, error) from None


class BatchClient:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def submit_file(self, file: Path, window: str) -> dict[str, Any]:
        """The endpoint is that of the file's first request."""
        try:
            _, first = next(read_nonempty_lines(file), (0, ""))
            endpoint = parse_line(first).url
            with file.open("rb") as content:
                form: dict[str, Any] = {"purpose": (None, b"batch"), "file": (file.name, content)}
                uploaded = self._parse_response(self._http.post("files", files=form))
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None
        batch_body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
        return self._parse_response(self._http.post("batches", json=batch_body))

    def fetch_batch(self, id: str) -> dict[str, Any]:
        return self._parse_response(self._http.get(f"batches/{id}"))

    def request_cancel(self, id: str) -> dict[str, Any]:
        return self._parse_response(self._http.post(f"batches/{id}/cancel"))

    def list_batches(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._parse_response(self._http.get("batches", params={"limit": 100}))["data"]
        return entries

    def download_results(self, batch: dict[str, Any], output: Path) -> None:
        try:
            with output.open("wb") as file:
                for name in ("output_file_id", "error_file_id"):
                    if batch[name] is None:
                        continue
                    with self._http.stream("GET", f"files/{batch[name]}/content") as content:
                        if content.is_error:
                            content.read()
                            raise error_from_response(content)
                        for piece in content.iter_bytes():
                            file.write(piece)
        except OSError as error:
            raise ConfigError(f"cannot write {output}: {error.strerror}") from None

    def wait_for_end(self, id: str) -> dict[str, Any]:
        """Also polls while the server cannot be reached."""
        batch = self.fetch_batch(id)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task(batch["status"], total=None)
            while True:
                counts = batch["request_counts"]
                description = f"{batch['status']}, {counts['failed']} failed" if counts["failed"] else batch["status"]
                done = counts["completed"] + counts["failed"]
                progress.update(bar, description=description, completed=done, total=counts["total"] or None)
                if batch["status"] in TERMINAL_STATUSES:
                    return batch
                time.sleep(_POLL_SECONDS)
                try:
                    batch = self.fetch_batch(id)
                except httpx.TransportError:
                    progress.update(bar, description="the server does not answer")

    @staticmethod
    def _parse_response(response: httpx.Response) -> dict[str, Any]:
        if response.is_error:
            raise error_from_response(response)
        content: dict[str, Any] = response.json()
        return content


def _run_action(server: BatchClient, args: argparse.Namespace) -> int:
    if args.action == "list":
        for each in server.list_batches():
            print(_format_batch(each))
        return 0
    if args.action == "submit":
        batch = server.submit_file(Path(args.what), args.window)
        print(batch["id"], flush=True)
    elif args.action == "cancel":
        batch = server.request_cancel(args.what)
    else:
        batch = server.fetch_batch(args.what)
    if args.action == "wait" or args.output is not None:
        batch = server.wait_for_end(batch["id"])
    if args.action != "submit" or args.output is not None:
        print(_format_batch(batch), file=sys.stderr if args.action == "submit" else sys.stdout)
    for error in (batch["errors"] or {"data": []})["data"]:
        where = "" if error["line"] is None else f"line {error['line']}: "
        print(f"quire batch: {where}{error['message']}", file=sys.stderr)
    if args.output is not None:
        if batch["status"] == "failed":
            raise EngineError("no request was answered: fix the file, and submit it again")
        server.download_results(batch, args.output)
    return int(batch["status"] in ("failed", "expired") or batch["request_counts"]["failed"] > 0)


def _format_batch(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    return f"{batch['id']}  {batch['status']:12} {json.dumps(counts)}  {batch['endpoint']}"
