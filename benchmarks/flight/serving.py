"""A model of production size: one stream, a full batch, arriving requests; and HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time

import torch

from benchmarks.common.engines import Answered, answer, at_once
from benchmarks.common.servers import post_all, served
from benchmarks.flight.finding import Finding, Say, tried
from benchmarks.gpu import asked, limits, measure, model_directory, start
from quire.engine.engine_core import EngineCore, free_engine_memory
from quire.server.cli.bench.latency_stats import arrival_times, latency_distribution

_BIRDS = ["hen", "cock", "chick"]


def large(device: torch.device, say: Say) -> None:
    small = device.type == "cpu"
    args = argparse.Namespace(device=device.type, attention_backend="auto", deterministic=False, enforce_eager=False)
    copy, matmul = limits(device)
    with model_directory("tiny" if small else "llama-3.1-8b") as path:

        def alone() -> str:
            found = measure(path, args, copy, matmul, *((4, 4) if small else (32, 64)))
            parts = [
                f"{name} {each['ms']:.2f} ms ({each['share']:.0%})"
                for name, each in found.items()
                if isinstance(each, dict)
            ]
            return f"up after {found['load_s']:.1f} s; {', '.join(parts)}; no kernel in {found.get('gap', 0):.0%}"

        # Before `measure`: its profiler makes later launches slower.
        tried(say, "256 streams that keep arriving", lambda: _arrivals(start(path, args), 8 if small else 256))
        free_engine_memory()
        tried(say, "shares of the copy's bytes and the product's operations", alone)
        if not small:
            free_engine_memory()
            tried(
                say, "8 GiB of layers in the host's memory", lambda: _offloaded(start(path, args, cpu_offload_gb=8.0))
            )


def _offloaded(engine: EngineCore) -> str:
    """The bus should bound it."""
    one = at_once(engine, [asked("one", 64, 32)])["one"]
    note = next(each for each in engine.info.notes if each.startswith("layers:"))
    engine.shut_down()
    return f"{1000 * statistics.median(one.gaps):.1f} ms a token; {note}"


def _arrivals(engine: EngineCore, streams: int) -> str:
    """About 40 per second, prompts of 512 tokens, answers of 128."""
    length, tokens = (64, 8) if streams < 256 else (512, 128)
    at_once(engine, [asked("warm", length, 4)])
    began = time.perf_counter()
    found = answer(
        engine,
        [
            (when, asked(f"arrival{index}", length, tokens))
            for index, when in enumerate(arrival_times(2 * streams, 40.0, 0))
        ],
    )
    seconds = time.perf_counter() - began
    return _told(list(found.values()), seconds)


def _told(found: list[Answered], seconds: float) -> str:
    made = sum(len(each.tokens) for each in found)
    first, gaps = (
        latency_distribution(each.first for each in found),
        latency_distribution(gap for each in found for gap in each.gaps),
    )
    assert first is not None
    assert gaps is not None
    return (
        f"{made / seconds:.0f} tokens/s; first token {first.p50:.0f} ms, p99 {first.p99:.0f}; between tokens p99 "
        f"{gaps.p99:.1f} ms"
    )


def http(device: torch.device, say: Say) -> None:
    """The embedded model, started as users do."""
    began = time.monotonic()
    with served("--device", device.type) as server:
        say(Finding("quire serve", f"ready after {time.monotonic() - began:.1f} s"))
        tried(say, "64 chats at once over HTTP", lambda: _chats(server.url, 64))
        tried(say, "16 answers of a grammar beside them", lambda: _chosen(server.url, 16))


def _chats(url: str, count: int) -> str:
    asked = {"model": "quire-demo", "max_tokens": 64, "ignore_eos": True}
    said = [[{"role": "user", "content": f"Tell me of hen number {number}."}] for number in range(count)]
    bodies = [asked | {"messages": messages, "seed": number} for number, messages in enumerate(said)]
    seconds, answers = asyncio.run(post_all(url, "/v1/chat/completions", bodies, count))
    tokens = sum(each["usage"]["completion_tokens"] for each in answers)
    return f"{tokens / seconds:.0f} tokens/s, {os.cpu_count()} cores"


def _chosen(url: str, count: int) -> str:
    """JSON words, next to as many unconstrained chats."""
    schema = {"type": "json_schema", "json_schema": {"name": "bird", "schema": {"enum": _BIRDS}}}
    said = [[{"role": "user", "content": f"Which bird is number {number}?"}] for number in range(2 * count)]
    bodies = [
        {"model": "quire-demo", "max_tokens": 32, "seed": number, "messages": messages}
        | ({"response_format": schema} if number % 2 else {"ignore_eos": True})
        for number, messages in enumerate(said)
    ]
    seconds, answers = asyncio.run(post_all(url, "/v1/chat/completions", bodies, 2 * count))
    found = [each["choices"][0]["message"]["content"] for each in answers[1::2]]
    if wrong := [each for each in found if each.strip() not in {json.dumps(bird) for bird in _BIRDS}]:
        raise ValueError(f"{wrong[0]!r} is none of {_BIRDS}")
    return f"all of them in {seconds:.1f} s"
