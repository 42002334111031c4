"""`quire run`: answers a file of requests in OpenAI's batch format offline, with the server's application."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from quire.engine.client.client import EngineClient
from quire.engine.client.supervisor import ProcessClient
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, EngineError, InvalidRequest
from quire.server.cli.hosting import PRIVATE_SERVER, running_app
from quire.server.cli.settings import add_flags, parse
from quire.server.config import ServerConfig

URLS = ("/v1/chat/completions", "/v1/completions")
RETRIES = 5
"""Attempts for a request that is answered with 429 or 503."""


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(slots=True)
class Tally:
    """What has become of the requests so far."""

    done: int = 0
    """Answered with status 200."""
    failed: int = 0
    tokens: int = 0


def parse_line(line: str) -> Job:
    """Parse a line of the input. Raises InvalidRequest."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("custom_id"), str):
        raise InvalidRequest("custom_id must be a string", param="custom_id")
    if entry.get("method", "POST") != "POST":
        raise InvalidRequest(f"method must be POST, got {entry['method']!r}", param="method")
    if entry.get("url") not in URLS:
        raise InvalidRequest(f"url must be {' or '.join(URLS)}, got {entry.get('url')!r}", param="url")
    body = entry.get("body")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be an object", param="body")
    if body.get("stream"):
        raise InvalidRequest("stream has no meaning in a batch", param="stream")
    return Job(entry["custom_id"], entry["url"], body)


def custom_id(number: int, line: str) -> str:
    """The line's custom_id; made from its number in the file if it has none."""
    try:
        given = json.loads(line)["custom_id"]
    except (ValueError, KeyError, TypeError):
        given = None
    return given if isinstance(given, str) else f"line-{number}"


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The numbers and texts of a file's non-empty lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def ids_in(path: Path) -> set[str]:
    """All custom_ids of an input file. Raises ConfigError when two lines have the same one."""
    places: dict[str, int] = {}
    try:
        for number, line in lines_of(path):
            name = custom_id(number, line)
            if name in places:
                raise ConfigError(f"{path}: lines {places[name]} and {number} have the same custom_id {name!r}")
            places[name] = number
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return set(places)


def is_failure(result: dict[str, Any]) -> bool:
    """Whether a line of the output has an error instead of an answer."""
    return (result["response"] or {}).get("status_code") != 200


def resume_from(path: Path, wanted: set[str]) -> set[str]:
    """Prepare an output file to be continued; returns the custom_ids that it has answers for.

    Failures of `wanted` ids are removed from the file, so that they are tried again, and so is a last line that was not
    written completely. Raises ConfigError, and leaves the file as it is, when it is not an output of this command.
    """
    done: set[str] = set()
    again: set[str] = set()
    with path.open("r+b") as file:
        whole = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                result = json.loads(line)
                (again if is_failure(result) else done).add(result["custom_id"])
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(f"{path} is no output of quire run: no result at byte {whole}") from None
            whole += len(line)
        file.truncate(whole)
    if again := again & wanted:
        path = path.resolve()  # a symbolic link must keep pointing to the file
        kept = path.with_name(f"{path.name}.part")
        with path.open("rb") as old, kept.open("wb") as new:
            entries = ((line, json.loads(line)) for line in old)
            new.writelines(line for line, it in entries if it["custom_id"] not in again or not is_failure(it))
            new.flush()
            os.fsync(new.fileno())  # the content must be on disk before the file replaces the old one
        shutil.copymode(path, kept)
        kept.replace(path)
    return done


class Batch:
    """Answers requests, several at a time, and writes each result as soon as it is there."""

    def __init__(
        self, http: httpx.AsyncClient, client: EngineClient, out: TextIO, tally: Tally, progress: Progress, total: int
    ) -> None:
        self._http = http
        self._client = client
        self._out = out
        self._tally = tally
        self._progress = progress
        self._bar = progress.add_task("requests", total=total)

    async def run(self, lines: Iterator[tuple[int, str]], at_once: int) -> None:
        """Answer all lines, `at_once` at a time. Raises EngineError when the engine is gone; written results stay."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(self._work(lines))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _work(self, lines: Iterator[tuple[int, str]]) -> None:
        for number, line in lines:
            name = custom_id(number, line)
            try:
                response = await self._answer(parse_line(line))
            except InvalidRequest as error:
                self._write(name, None, {"code": "invalid_request", "message": f"line {number}: {error}"})
                continue
            body = response.json()
            self._tally.tokens += (body.get("usage") or {}).get("completion_tokens", 0)
            self._write(
                name,
                {
                    "status_code": response.status_code,
                    "request_id": response.headers.get("x-request-id", body.get("id", "")),
                    "body": body,
                },
                None,
            )

    async def _answer(self, job: Job) -> httpx.Response:
        for attempt in range(RETRIES):
            response = await self._http.post(job.url, json=job.body)
            if response.status_code >= 500 and not self._client.alive:
                raise EngineError("the engine is gone")
            if response.status_code not in (429, 503):
                break
            await asyncio.sleep(float(response.headers.get("retry-after", 2**attempt)))
        return response

    def _write(self, name: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> None:
        """One line of OpenAI's batch output."""
        result = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": name, "response": response, "error": error}
        self._out.write(json.dumps(result, ensure_ascii=False) + "\n")
        self._out.flush()
        failed = is_failure(result)
        self._tally.failed += failed
        self._tally.done += not failed
        self._progress.advance(self._bar)


def main(argv: Sequence[str], started: float) -> int:
    parser = argparse.ArgumentParser(
        prog="quire run",
        usage="quire run FILE.jsonl -o OUT.jsonl [--model MODEL] [--resume] [flags]",
        description="Answer a file of requests in OpenAI's batch format offline; results are written as they finish. "
        "The exit status is 1 if any request failed.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE.jsonl", type=Path, help="one request a line")
    parser.add_argument("-o", "--output", metavar="OUT.jsonl", type=Path, required=True, help="one result a line")
    parser.add_argument(
        "--resume", action="store_true", help="keep the answers in OUT.jsonl and do the rest, failures too"
    )
    parser.add_argument("--concurrency", type=int, metavar="N", help="requests at once (default: --max-num-seqs)")
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="names that the requests call the model by",
    )
    add_flags(parser, ServerConfig, {EngineConfig: "engine"})
    args, config = parse(parser, argv, ServerConfig)
    if args.concurrency is not None and args.concurrency < 1:
        parser.error(f"argument --concurrency: must be at least 1, got {args.concurrency}")
    wanted = ids_in(args.file)
    done = _done(args.output, wanted, args.resume)
    total = len(wanted - done)
    lines = ((number, line) for number, line in lines_of(args.file) if custom_id(number, line) not in done)
    if done:
        print(f"{len(done)} already done, {total} to do", file=sys.stderr)
    tally = Tally()
    try:
        if total:
            uvloop.run(answer(config, lines, total, args.output, args.concurrency or config.max_num_seqs, tally))
    finally:
        left = total - tally.done - tally.failed
        counts = f"{tally.done} done, {tally.failed} failed, {left} left, {tally.tokens} tokens generated"
        advice = ": continue with --resume" if tally.failed or left else ""
        print(f"{counts}, {time.perf_counter() - started:.1f} s{advice}", file=sys.stderr)
    return int(tally.failed > 0)


def _done(output: Path, wanted: set[str], resume: bool) -> set[str]:
    """The custom_ids that the output already answers.

    Raises ConfigError when the output has results but `resume` is not set, so that they are not overwritten, and when
    the file cannot be written, so that this is noticed at the start.
    """
    try:
        with output.open("ab"):
            pass
        if output.stat().st_size == 0:
            return set()
        if not resume:
            raise ConfigError(f"{output} holds results already: continue it with --resume, or choose another")
        return resume_from(output, wanted)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from None


async def answer(
    config: ServerConfig, lines: Iterator[tuple[int, str]], total: int, output: Path, at_once: int, tally: Tally
) -> None:
    """Start an engine and append the results of `lines` to `output`. The application is called without a socket."""
    config = config.model_copy(update=PRIVATE_SERVER)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with output.open("a", encoding="utf-8", errors="backslashreplace") as out:
        client = ProcessClient(config)
        client.launch()
        async with running_app(config, client) as app:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
                async with httpx.AsyncClient(transport=transport, base_url="http://quire", timeout=None) as http:
                    await Batch(http, client, out, tally, progress, total).run(lines, at_once)
