"""`quire run`: answers a file of requests in OpenAI's batch format offline, with the server's application."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.replicated_client import processes
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, EngineError, InvalidRequest
from quire.server.batches.batch_lines import (
    LineRequest,
    custom_id_or_line_name,
    encode_answer_line,
    encode_error_line,
    find_duplicate_lines,
    parse_line,
    read_line_numbers_by_custom_id,
    read_nonempty_lines,
    rereadable_file,
)
from quire.server.cli.engine_app import PRIVATE_SERVER_SETTINGS, open_engine_app
from quire.server.cli.flags import REQUEST_FILE_FLAGS, build_parser
from quire.server.cli.models.pull import pull_configured_model_if_missing
from quire.server.cli.settings_flags import add_settings_flags, parse_settings
from quire.server.config import ServerConfig

MAX_SHOWN_CHARACTERS = 160
MAX_SHOWN_NAMES = 8
MAX_ATTEMPTS = 5


@dataclass(slots=True)
class RequestTally:
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    failures_by_kind: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    num_refused: int = 0
    ignored_params: Counter[str] = field(default_factory=Counter)


def is_failure(result: dict[str, Any]) -> bool:
    return (result["response"] or {}).get("status_code") != 200


def is_permanent_failure(result: dict[str, Any]) -> bool:
    """True if a retry would fail too."""
    response, error = result["response"], result.get("error") or {}
    if response is None:
        return error.get("code") == "invalid_request"
    return 400 <= response.get("status_code", 0) < 500 and response["status_code"] not in (408, 429)


def failure_kind_and_message(result: dict[str, Any]) -> tuple[str, str]:
    response = result["response"]
    if response is None:
        error = result["error"]
        return f"{error['code']}{' ' + error['param'] if error.get('param') else ''}", error["message"]
    error = response["body"].get("error")
    error = error if isinstance(error, dict) else {}
    named = error.get("param") or error.get("code") or error.get("type")
    return f"{response['status_code']}{f' {named}' if named else ''}", str(error.get("message", ""))


def trim_output_and_read_finished_ids(
    path: Path, requested: Collection[str], *, retry_refused: bool = False
) -> tuple[set[str], set[str]]:
    """Returns the custom_ids that were answered, and those that were permanently refused. Removes an incomplete last
    line, and failures of `requested` ids, so that they are tried again. Permanent failures are removed, and not
    returned, only if `retry_refused`. If the file is not an output of this command, raises ConfigError and changes
    nothing.
    """
    done: set[str] = set()
    refused: set[str] = set()
    retried: set[str] = set()
    with path.open("r+b") as file:
        complete_bytes = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                result = json.loads(line)
                ids = refused if is_permanent_failure(result) and not retry_refused else retried
                (ids if is_failure(result) else done).add(result["custom_id"])
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(f"{path} is not an output of quire run: no result at byte {complete_bytes}") from None
            complete_bytes += len(line)
        file.truncate(complete_bytes)
    if retried := retried & set(requested):
        path = path.resolve()  # a symbolic link must keep pointing to the file
        part = path.with_name(f"{path.name}.part")
        with path.open("rb") as old, part.open("wb") as new:
            entries = ((line, json.loads(line)) for line in old)
            new.writelines(line for line, it in entries if it["custom_id"] not in retried or not is_failure(it))
            new.flush()
            os.fsync(new.fileno())  # before replacing the old file
        shutil.copymode(path, part)
        part.replace(path)
    return done, refused


class ResultFile:
    """Writes unbuffered, so that closing cannot fail. The path `-` means stdout."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(os.dup(1) if str(path) == "-" else path, "ab", buffering=0)  # noqa: SIM115 - `close` does
        self.close = self._file.close

    def write_all(self, remaining: bytes) -> None:
        """Raises ConfigError. A later --resume removes the incomplete line."""
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from None


class RequestFileRunner:
    def __init__(
        self,
        http: httpx.AsyncClient,
        client: EngineClient,
        out: ResultFile,
        tally: RequestTally,
        progress: Progress,
        total: int,
        duplicates: Collection[int],
    ) -> None:
        self._http = http
        self._client = client
        self._out = out
        self._tally = tally
        self._progress = progress
        self._duplicates = duplicates
        self._bar = progress.add_task("requests", total=total)

    async def answer_all(self, lines: Iterator[tuple[int, str]], concurrency: int) -> None:
        """Raises EngineError."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._answer_lines(lines))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _answer_lines(self, lines: Iterator[tuple[int, str]]) -> None:
        for number, line in lines:
            name = custom_id_or_line_name(number, line)
            try:
                if number in self._duplicates:
                    duplicate_id, name = name, f"line-{number}"
                    raise InvalidRequest(
                        f"the custom_id {duplicate_id!r} was used by an earlier line", param="custom_id"
                    )
                response = await self._post_with_retry(parse_line(line))
            except InvalidRequest as error:
                self._write_and_count_result(
                    encode_error_line(name, "invalid_request", f"line {number}: {error}", error.param)
                )
                continue
            self._tally.ignored_params.update(filter(None, response.headers.get("x-ignored-params", "").split(", ")))
            body = response.json()
            usage = body.get("usage") or {}
            self._tally.num_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
            id = response.headers.get("x-request-id", body.get("id", ""))
            self._write_and_count_result(encode_answer_line(name, response.status_code, id, response.content))

    async def _post_with_retry(self, job: LineRequest) -> httpx.Response:
        for attempt in range(MAX_ATTEMPTS):
            response = await self._http.post(job.url, content=job.body, headers={"Content-Type": "application/json"})
            if response.status_code >= 500 and not self._client.alive:
                raise EngineError("the engine has ended")
            if response.status_code not in (429, 503):
                break
            await asyncio.sleep(float(response.headers.get("retry-after", 2**attempt)))
        return response

    def _write_and_count_result(self, line: bytes) -> None:
        self._out.write_all(line + b"\n")
        result = json.loads(line)
        failed = is_failure(result)
        if failed:
            kind, message = failure_kind_and_message(result)
            self._tally.failures_by_kind[kind] += 1
            self._tally.examples.setdefault(kind, f"{result['custom_id']}: {message}")
            self._tally.num_refused += is_permanent_failure(result)
        self._tally.num_failed += failed
        self._tally.num_done += not failed
        self._progress.advance(self._bar)


def main(argv: Sequence[str], started: float) -> int:
    file = {"file": {"metavar": "FILE.jsonl", "type": Path, "help": "file with one request per line; - is stdin"}}
    usage = "quire run FILE.jsonl -o OUT.jsonl [--model MODEL] [--resume] [flags]"
    parser = build_request_file_parser("quire run", usage, {**file, **REQUEST_FILE_FLAGS})
    args, config = parse_settings(parser, argv, ServerConfig)
    return run_request_file(parser, args, config, started)


def build_request_file_parser(program: str, usage: str, flags: Mapping[str, Any]) -> argparse.ArgumentParser:
    """`flags` must set args.file and include REQUEST_FILE_FLAGS."""
    parser = build_parser(
        program,
        "Answer a file of requests in OpenAI's batch format offline; results are written as they finish. "
        "The exit status is 1 if any request failed.",
        flags,
        usage=usage,
        add_help=False,
    )
    add_settings_flags(parser, ServerConfig, {EngineConfig: "engine"})
    return parser


def run_request_file(
    parser: argparse.ArgumentParser, args: argparse.Namespace, config: ServerConfig, started: float
) -> int:
    if args.output is None:
        parser.error("the following arguments are required: -o/--output")
    if args.concurrency is not None and args.concurrency < 1:
        parser.error(f"argument --concurrency: must be at least 1, got {args.concurrency}")
    if str(args.output) == "-" and args.resume:
        parser.error("argument --resume: stdout cannot be read, so it cannot be continued")
    with rereadable_file(args.file) as file:
        return _run_file(args, config, file, started)


def _run_file(args: argparse.Namespace, config: ServerConfig, file: Path, started: float) -> int:
    places = read_line_numbers_by_custom_id(file)
    duplicates = find_duplicate_lines(file, places)
    requested = {*places, *(f"line-{number}" for number in duplicates)}
    answered, refused = _resume_output_and_get_finished_ids(args, requested)
    done = answered | refused
    total = len(requested - done)
    lines = (
        (number, line)
        for number, line in read_nonempty_lines(file)
        if (f"line-{number}" if number in duplicates else custom_id_or_line_name(number, line)) not in done
    )
    if done:
        without = f", {len(refused)} refused for good" if refused else ""
        print(f"{len(answered)} already done{without}, {total} to do", file=sys.stderr)
    if refused:
        print("requests refused for good are retried only with --retry-refused", file=sys.stderr)
    tally = RequestTally()
    try:
        if total:
            pull_configured_model_if_missing(config)
            at_once = args.concurrency or config.max_num_seqs
            uvloop.run(start_engine_and_answer_requests(config, lines, total, args.output, at_once, tally, duplicates))
    finally:
        num_left = total - tally.num_done - tally.num_failed
        counts = (
            f"{tally.num_done} done, {tally.num_failed} failed, {num_left} left, {tally.num_tokens} tokens generated"
        )
        again = "fix them, and continue with --resume --retry-refused" if tally.num_refused or refused else ""
        advice = "continue with --resume" if num_left or tally.num_failed > tally.num_refused else again
        print(f"{counts}, {time.perf_counter() - started:.1f} s{advice and f': {advice}'}", file=sys.stderr)
        for kind, count in tally.failures_by_kind.most_common():
            print(f"  {count} x {kind}, such as {shorten_line(tally.examples[kind])}", file=sys.stderr)
        if tally.ignored_params:
            names = ", ".join(f"{name} ({count})" for name, count in tally.ignored_params.most_common(MAX_SHOWN_NAMES))
            print(f"  without effect, in so many requests: {names}", file=sys.stderr)
    return int(tally.num_failed > 0 or bool(refused))


def shorten_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN_CHARACTERS else f"{line[: MAX_SHOWN_CHARACTERS - 1]}…"


def _resume_output_and_get_finished_ids(args: argparse.Namespace, requested: set[str]) -> tuple[set[str], set[str]]:
    output: Path = args.output
    if str(output) == "-":
        return set(), set()
    try:
        with output.open("ab"):
            pass
        if output.stat().st_size == 0:
            return set(), set()
        if not args.resume:
            raise ConfigError(f"{output} holds results already: continue it with --resume, or choose another")
        answered, refused = trim_output_and_read_finished_ids(output, requested, retry_refused=args.retry_refused)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from None
    return answered & requested, (refused & requested) - answered


async def start_engine_and_answer_requests(
    config: ServerConfig,
    lines: Iterator[tuple[int, str]],
    total: int,
    output: Path,
    concurrency: int,
    tally: RequestTally,
    duplicates: Collection[int],
) -> None:
    config = config.model_copy(update=PRIVATE_SERVER_SETTINGS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with closing(ResultFile(output)) as out:
        client = processes(config)
        client.engine_core.launch()
        async with open_engine_app(config, client) as app:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
                async with httpx.AsyncClient(transport=transport, base_url="http://quire", timeout=None) as http:
                    await RequestFileRunner(http, client, out, tally, progress, total, duplicates).answer_all(
                        lines, concurrency
                    )
