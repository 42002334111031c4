"""`quire bench serve`: measure a server that speaks the OpenAI API, Quire or another, under load."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop

from quire.engine.errors import EngineError
from quire.server.cli.bench.client import StreamClient, StreamError
from quire.server.cli.bench.datasets import read_dataset, tokens_at
from quire.server.cli.bench.report import DRAWN_REPORT_FLAGS, check_report, draw, print_table, write_json
from quire.server.cli.bench.saved import goodput, result, save
from quire.server.cli.bench.stats import Answer, Failure, Summary, arrivals, latencies, summarize
from quire.server.cli.bench.vllm_flags import RATE, VLLM_FLAGS, settle
from quire.server.cli.bench.workload import WORKLOAD_FLAGS, check_workload, lengths, random_prompts, read_prompts
from quire.server.cli.connect import headers, models, server_flags, server_url, trusted
from quire.server.cli.flags import command
from quire.server.cli.settings import number
from quire.server.cli.unknown_flags import parse_known

WARMUP_TOKENS = 4
_WORDS = (  # noqa: SIM905 - a list of words in quotes is harder to read
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many"
).split()


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct):
    delta: Delta | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the chunk stands for tokens.

        Any chunk of /completions does, even if its text is empty. A chunk that only opens a chat answer does not.
        """
        delta = self.delta
        return delta is None or bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """The fields that are read from a chunk; the decoder skips the others."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode
Job = tuple[str, bytes]
"""The path to post to, and the body."""


@dataclass(slots=True)
class Stream:
    """One answer while it is being received."""

    sent: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    """When each chunk with tokens arrived, in seconds since `sent`."""
    usage: Usage | None = None

    def add(self, data: bytes) -> None:
        """Add an event's data. Raises ValueError if it is an error or not a chunk."""
        chunk = _decode(data)
        if chunk.error:
            raise ValueError(str(chunk.error))
        if chunk.usage is not None:
            self.usage = chunk.usage
        if any(choice.has_tokens for choice in chunk.choices):
            self.times.append(time.perf_counter() - self.sent)


async def ask(client: StreamClient, job: Job) -> Answer | Failure:
    stream = Stream()
    try:
        await client.post(*job, stream.add)
    except StreamError as error:
        return Failure(str(error))
    if not stream.times:
        return Failure("an answer without a token")
    usage = stream.usage or Usage(0, len(stream.times))
    return Answer(stream.times, usage.prompt_tokens, usage.completion_tokens)


async def closed_loop(client: StreamClient, jobs: Sequence[Job], concurrency: int) -> list[Answer | Failure]:
    """Send requests so that `concurrency` of them are always open, until none are left."""
    results: list[Answer | Failure] = []
    queue: Iterator[Job] = iter(jobs)

    async def work() -> None:
        for job in queue:
            results.append(await ask(client, job))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return results


async def open_loop(
    client: StreamClient, jobs: Sequence[Job], times: Iterable[float], concurrency: int | None = None
) -> list[Answer | Failure]:
    """Send each request at its time, no matter how many are still open; with `concurrency` later, once fewer are."""
    started = time.perf_counter()
    room = asyncio.Semaphore(concurrency or len(jobs) or 1)

    async def within(job: Job) -> Answer | Failure:
        async with room:
            return await ask(client, job)

    tasks = []
    for job, at in zip(jobs, times, strict=True):
        await asyncio.sleep(started + at - time.perf_counter())
        tasks.append(asyncio.create_task(within(job)))
    return await asyncio.gather(*tasks)


def make_jobs(
    args: argparse.Namespace, model: str, dataset: Sequence[dict[str, Any]] = ()
) -> tuple[list[Job], list[Job]]:
    """The requests to measure, and those to warm up with. `dataset`: what --dataset-path holds."""
    made_up = args.prompts is None and not dataset
    if made_up:
        prompts, others = random_prompts(args, args.vocab)
        measured = [_made_up(ids, chats=args.chats) for ids in prompts]
        warming = [_made_up(ids, chats=args.chats) for ids in others]
        answers = lengths(args, args.output_len, len(measured))
        measured = [{**each, "max_tokens": length} for each, length in zip(measured, answers, strict=True)]
    else:
        given = list(dataset) or read_prompts(args.prompts)
        measured = list(islice(cycle(given), args.num_requests))
        warming = [{**each, "max_tokens": WARMUP_TOKENS} for each in islice(cycle(given), args.warmup)]
    exact = made_up if args.ignore_eos is None else args.ignore_eos

    def job(entry: dict[str, Any], length: int) -> Job:
        body = {"model": model, "max_tokens": length, "temperature": args.temperature, **args.body, **entry}
        if exact:
            body |= {"min_tokens": body["max_tokens"], "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return "chat/completions" if "messages" in body else "completions", json.dumps(body).encode()

    short = min(WARMUP_TOKENS, args.output_len)
    return [job(entry, args.output_len) for entry in measured], [job(entry, short) for entry in warming]


def _made_up(ids: Sequence[int], *, chats: bool) -> dict[str, Any]:
    """A prompt of these ids; a chat, which takes no ids, of as many words that most vocabularies have as a token."""
    if not chats:
        return {"prompt": ids}
    return {"messages": [{"role": "user", "content": " ".join(_WORDS[each % len(_WORDS)] for each in ids)}]}


@dataclass(frozen=True, slots=True)
class Measurement:
    results: list[Answer | Failure]
    seconds: float
    client_seconds: float
    """Processor time of this process, which a server on the same cores did not have."""


async def measure(
    args: argparse.Namespace, client: StreamClient, model: str, dataset: Sequence[dict[str, Any]] = ()
) -> Measurement:
    """Warm up, then measure. Raises EngineError when a request of the warm-up fails."""
    jobs, warming = make_jobs(args, model, dataset)
    try:
        for job in warming:
            result = await ask(client, job)
            if isinstance(result, Failure):
                raise EngineError(f"a request to warm up failed: {result.message}")
        started, client_started = time.perf_counter(), time.process_time()
        if args.request_rate is None:
            results = await closed_loop(client, jobs, args.concurrency)
        else:
            times = arrivals(len(jobs), args.request_rate, args.seed)
            results = await open_loop(client, jobs, times, args.concurrency)
        return Measurement(results, time.perf_counter() - started, time.process_time() - client_started)
    finally:
        client.close()


def make_parser() -> argparse.ArgumentParser:
    return command(
        "quire bench serve",
        __doc__,
        {
            **server_flags("http://127.0.0.1:8000"),
            "--model": {"metavar": "NAME", "help": "the model to ask for; default: the first that it lists"},
            "--no-keepalive": {"action": "store_true", "help": "a new connection for every request"},
            "--concurrency --max-concurrency": {
                "type": number(int, 1),
                "metavar": "N",
                "help": "requests open at any time (8); with --request-rate: at most",
            },
            "--request-rate": RATE,
            **WORKLOAD_FLAGS,
            "--prompts": {
                "type": Path,
                "metavar": "FILE.jsonl",
                "help": 'real prompts, {"prompt": ...} or {"messages": ...} a line, begun again when they run out',
            },
            "--ignore-eos": {
                "action": argparse.BooleanOptionalAction,
                "help": "ask for answers of exactly --output-len (default: not for --prompts; some servers know no "
                "such fields)",
            },
            **DRAWN_REPORT_FLAGS,
            **VLLM_FLAGS,
        },
    )


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    args = parse_known(parser, argv)
    settle(parser, args)
    check_workload(parser, args)
    check_report(args.json, args.png)
    trust = trusted(args.cacert)
    client = StreamClient(args.url, args.api_key, keep_alive=not args.no_keepalive, trust=trust)
    base = server_url(args.url, tls=args.cacert is not None) + "/v1"
    with httpx.Client(base_url=base, headers=headers(args.api_key), verify=trust) as http:
        model = args.model or models(http)[0]
        dataset = [] if args.dataset_path is None else read_dataset(args, partial(tokens_at, http, model))
    measured = uvloop.run(measure(args, client, model, dataset))
    summary = summarize(measured.results, measured.seconds)
    report(args, model, measured, summary)
    return 1 if summary.failed else 0


def report(args: argparse.Namespace, model: str, measured: Measurement, summary: Summary) -> None:
    pace = f"concurrency {args.concurrency}" if args.request_rate is None else f"{args.request_rate:g} requests/s"
    file = args.prompts or args.dataset_path
    prompts = file.name if file else f"{args.input_len}/{args.output_len}"
    shared = f", {args.shared_prefix} shared" if args.shared_prefix else ""
    title = f"{args.label or args.url}: {model}, {pace}, {prompts}{shared}"
    print_table(title, summary)
    cost = 1e6 * measured.client_seconds / max(1, summary.output_tokens)
    print(f"this client took {cost:.0f} us a token of processor")
    if args.goodput:
        answers = [each for each in measured.results if isinstance(each, Answer)]
        print(f"goodput {goodput(answers, args.goodput, measured.seconds):.2f} requests/s")
    if args.save_result or args.save_detailed or args.append_result:
        print(f"written: {save(args, result(args, model, measured.results, summary))}")
    if args.json:
        figures = {"model": model, **asdict(summary), "client_cpu_seconds": measured.client_seconds}
        write_json(args.json, args, figures)
    if args.png:
        rate = f"{summary.output_tokens_per_second:.0f} output tokens/s"
        answers = [result for result in measured.results if isinstance(result, Answer)]
        draw(args.png, f"{title}: {rate}", latencies(answers))
