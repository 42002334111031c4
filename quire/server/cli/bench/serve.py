"""`quire bench serve`: measures a server with the OpenAI API, Quire or another, under load."""

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

from quire.engine.common.errors import EngineError
from quire.server.cli.bench.bench_report import (
    DRAWN_REPORT_FLAGS,
    check_report_paths,
    print_table,
    save_latency_plot,
    write_json,
)
from quire.server.cli.bench.datasets import count_tokens_by_server, read_dataset
from quire.server.cli.bench.latency_stats import (
    BenchAnswer,
    BenchFailure,
    BenchSummary,
    arrival_times,
    latency_samples,
    summarize,
)
from quire.server.cli.bench.stream_client import StreamClient, StreamError
from quire.server.cli.bench.vllm_flags import RATE_FLAG, VLLM_FLAGS, apply_vllm_flags
from quire.server.cli.bench.vllm_result import build_result, goodput, save_result
from quire.server.cli.bench.workload import (
    WORKLOAD_FLAGS,
    check_shared_prefix_length,
    random_lengths,
    random_prompts_and_warmup,
    read_jsonl_prompts,
)
from quire.server.cli.flags import build_parser
from quire.server.cli.server_client import (
    auth_headers,
    client_ssl_context,
    fetch_model_names,
    normalize_server_url,
    server_flags,
)
from quire.server.cli.settings_flags import bounded_number
from quire.server.cli.unknown_flags import parse_flags

WARMUP_TOKENS = 4
_COMMON_WORDS = (  # noqa: SIM905 - a list of words in quotes is harder to read
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many"
).split()


class ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class ChunkChoice(msgspec.Struct):
    delta: ChunkDelta | None = None

    @property
    def has_tokens(self) -> bool:
        """False for a chat chunk that only opens the answer."""
        delta = self.delta
        return delta is None or bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


class ChunkUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class StreamChunk(msgspec.Struct):
    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(StreamChunk).decode
BenchJob = tuple[str, bytes]


@dataclass(slots=True)
class ReceivedStream:
    sent_at: float = field(default_factory=time.perf_counter)
    chunk_times: list[float] = field(default_factory=list)
    """Arrival times of chunks with tokens, in seconds since `sent_at`."""
    usage: ChunkUsage | None = None

    def add_event(self, data: bytes) -> None:
        """Raises ValueError for an error or a malformed chunk."""
        chunk = _decode_chunk(data)
        if chunk.error:
            raise ValueError(str(chunk.error))
        if chunk.usage is not None:
            self.usage = chunk.usage
        if any(choice.has_tokens for choice in chunk.choices):
            self.chunk_times.append(time.perf_counter() - self.sent_at)


async def send_request(client: StreamClient, job: BenchJob) -> BenchAnswer | BenchFailure:
    stream = ReceivedStream()
    try:
        await client.post_stream(*job, stream.add_event)
    except StreamError as error:
        return BenchFailure(str(error))
    if not stream.chunk_times:
        return BenchFailure("an answer without a token")
    usage = stream.usage or ChunkUsage(0, len(stream.chunk_times))
    return BenchAnswer(stream.chunk_times, usage.prompt_tokens, usage.completion_tokens)


async def run_closed_loop(
    client: StreamClient, jobs: Sequence[BenchJob], concurrency: int
) -> list[BenchAnswer | BenchFailure]:
    results: list[BenchAnswer | BenchFailure] = []
    queue: Iterator[BenchJob] = iter(jobs)

    async def send_jobs() -> None:
        for job in queue:
            results.append(await send_request(client, job))

    await asyncio.gather(*(send_jobs() for _ in range(concurrency)))
    return results


async def run_open_loop(
    client: StreamClient, jobs: Sequence[BenchJob], times: Iterable[float], concurrency: int | None = None
) -> list[BenchAnswer | BenchFailure]:
    started = time.perf_counter()
    free_slots = asyncio.Semaphore(concurrency or len(jobs) or 1)

    async def send_when_free(job: BenchJob) -> BenchAnswer | BenchFailure:
        async with free_slots:
            return await send_request(client, job)

    tasks = []
    for job, at in zip(jobs, times, strict=True):
        await asyncio.sleep(started + at - time.perf_counter())
        tasks.append(asyncio.create_task(send_when_free(job)))
    return await asyncio.gather(*tasks)


def build_measured_and_warmup_jobs(
    args: argparse.Namespace, model: str, dataset: Sequence[dict[str, Any]] = ()
) -> tuple[list[BenchJob], list[BenchJob]]:
    uses_random_prompts = args.prompts is None and not dataset
    if uses_random_prompts:
        prompts, warmup_prompts = random_prompts_and_warmup(args, args.vocab)
        measured = [_prompt_ids_to_body(ids, chats=args.chats) for ids in prompts]
        warming = [_prompt_ids_to_body(ids, chats=args.chats) for ids in warmup_prompts]
        answers = random_lengths(args, args.output_len, len(measured))
        measured = [{**each, "max_tokens": length} for each, length in zip(measured, answers, strict=True)]
    else:
        entries = list(dataset) or read_jsonl_prompts(args.prompts)
        measured = list(islice(cycle(entries), args.num_requests))
        warming = [{**each, "max_tokens": WARMUP_TOKENS} for each in islice(cycle(entries), args.warmup)]
    exact = uses_random_prompts if args.ignore_eos is None else args.ignore_eos

    def build_job(entry: dict[str, Any], length: int) -> BenchJob:
        body = {"model": model, "max_tokens": length, "temperature": args.temperature, **args.body, **entry}
        if exact:
            body |= {"min_tokens": body["max_tokens"], "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return "chat/completions" if "messages" in body else "completions", json.dumps(body).encode()

    short = min(WARMUP_TOKENS, args.output_len)
    return [build_job(entry, args.output_len) for entry in measured], [build_job(entry, short) for entry in warming]


def _prompt_ids_to_body(ids: Sequence[int], *, chats: bool) -> dict[str, Any]:
    """Chat requests cannot contain token ids, so each id becomes a word that is a single token in most vocabularies."""
    if not chats:
        return {"prompt": ids}
    return {
        "messages": [{"role": "user", "content": " ".join(_COMMON_WORDS[each % len(_COMMON_WORDS)] for each in ids)}]
    }


@dataclass(frozen=True, slots=True)
class Measurement:
    results: list[BenchAnswer | BenchFailure]
    seconds: float
    client_seconds: float
    """CPU time of this process."""


async def measure_server(
    args: argparse.Namespace, client: StreamClient, model: str, dataset: Sequence[dict[str, Any]] = ()
) -> Measurement:
    """Raises EngineError if a warm-up request fails."""
    jobs, warming = build_measured_and_warmup_jobs(args, model, dataset)
    try:
        for job in warming:
            result = await send_request(client, job)
            if isinstance(result, BenchFailure):
                raise EngineError(f"a request to warm up failed: {result.message}")
        started, client_started = time.perf_counter(), time.process_time()
        if args.request_rate is None:
            results = await run_closed_loop(client, jobs, args.concurrency)
        else:
            times = arrival_times(len(jobs), args.request_rate, args.seed)
            results = await run_open_loop(client, jobs, times, args.concurrency)
        return Measurement(results, time.perf_counter() - started, time.process_time() - client_started)
    finally:
        client.close()


def build_serve_bench_parser() -> argparse.ArgumentParser:
    return build_parser(
        "quire bench serve",
        __doc__,
        {
            **server_flags("http://127.0.0.1:8000"),
            "--model": {"metavar": "NAME", "help": "model to request; default: the first one that the server lists"},
            "--no-keepalive": {"action": "store_true", "help": "open a new connection for every request"},
            "--concurrency --max-concurrency": {
                "type": bounded_number(int, 1),
                "metavar": "N",
                "help": "requests open at any time (8); with --request-rate, the maximum",
            },
            "--request-rate": RATE_FLAG,
            **WORKLOAD_FLAGS,
            "--prompts": {
                "type": Path,
                "metavar": "FILE.jsonl",
                "help": 'real prompts, one {"prompt": ...} or {"messages": ...} per line, repeated if they run out',
            },
            "--ignore-eos": {
                "action": argparse.BooleanOptionalAction,
                "help": "request answers of exactly --output-len (default: not with --prompts; some servers lack "
                "the fields)",
            },
            **DRAWN_REPORT_FLAGS,
            **VLLM_FLAGS,
        },
    )


def main(argv: Sequence[str]) -> int:
    parser = build_serve_bench_parser()
    args = parse_flags(parser, argv)
    apply_vllm_flags(parser, args)
    check_shared_prefix_length(parser, args)
    check_report_paths(args.json, args.png)
    ssl_context = client_ssl_context(args.cacert)
    client = StreamClient(args.url, args.api_key, keep_alive=not args.no_keepalive, trust=ssl_context)
    base = normalize_server_url(args.url, tls=args.cacert is not None) + "/v1"
    with httpx.Client(base_url=base, headers=auth_headers(args.api_key), verify=ssl_context) as http:
        model = args.model or fetch_model_names(http)[0]
        dataset = [] if args.dataset_path is None else read_dataset(args, partial(count_tokens_by_server, http, model))
    measured = uvloop.run(measure_server(args, client, model, dataset))
    summary = summarize(measured.results, measured.seconds)
    report_measurement(args, model, measured, summary)
    return 1 if summary.failed else 0


def report_measurement(args: argparse.Namespace, model: str, measured: Measurement, summary: BenchSummary) -> None:
    pace = f"concurrency {args.concurrency}" if args.request_rate is None else f"{args.request_rate:g} requests/s"
    file = args.prompts or args.dataset_path
    prompts = file.name if file else f"{args.input_len}/{args.output_len}"
    shared = f", {args.shared_prefix} shared" if args.shared_prefix else ""
    title = f"{args.label or args.url}: {model}, {pace}, {prompts}{shared}"
    print_table(title, summary)
    cost = 1e6 * measured.client_seconds / max(1, summary.output_tokens)
    print(f"this client took {cost:.0f} us a token of processor")
    if args.goodput:
        answers = [each for each in measured.results if isinstance(each, BenchAnswer)]
        print(f"goodput {goodput(answers, args.goodput, measured.seconds):.2f} requests/s")
    if args.save_result or args.save_detailed or args.append_result:
        print(f"written: {save_result(args, build_result(args, model, measured.results, summary))}")
    if args.json:
        figures = {"model": model, **asdict(summary), "client_cpu_seconds": measured.client_seconds}
        write_json(args.json, args, figures)
    if args.png:
        rate = f"{summary.output_tokens_per_second:.0f} output tokens/s"
        answers = [result for result in measured.results if isinstance(result, BenchAnswer)]
        save_latency_plot(args.png, f"{title}: {rate}", latency_samples(answers))
