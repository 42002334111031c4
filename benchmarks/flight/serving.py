"""A model of production size over HTTP and in this process; and the embedded model over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.common.engines import at_once
from benchmarks.common.servers import post_all, served
from benchmarks.flight.finding import Finding, Say, tried
from benchmarks.gpu import asked, limits, measure, model_directory, start
from quire.engine.engine_core import EngineCore, free_engine_memory

_ARRIVALS = ["--request-rate", "40", "--max-concurrency", "256", "--num-requests", "512"]
_ARRIVALS += ["--input-len", "512", "--output-len", "128"]
_AT_ONCE = ["--concurrency", "64", "--num-requests", "128", "--input-len", "128", "--output-len", "64"]
_DRAWN = [*_AT_ONCE, "--temperature", "0.7"]
_SMALL_LOAD = ["--num-requests", "8", "--input-len", "32", "--output-len", "4", "--vocab", "900"]
"""Overrides flags before it."""
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

        tried(say, "shares of the copy's bytes and the product's operations", alone)
        if not small:
            free_engine_memory()
            tried(
                say, "8 GiB of layers in the host's memory", lambda: _offloaded(start(path, args, cpu_offload_gb=8.0))
            )


def _offloaded(engine: EngineCore) -> str:
    """Measures decode with offloaded layers, which the bus should limit."""
    one = at_once(engine, [asked("one", 64, 32)])["one"]
    note = next(each for each in engine.info.notes if each.startswith("layers:"))
    engine.shut_down()
    return f"{1000 * statistics.median(one.gaps):.1f} ms a token; {note}"


def arrivals(device: torch.device, say: Say) -> None:
    """8 billion random weights over HTTP with the server's defaults: about 40 requests per second with prompts of 512
    tokens and answers of 128, up to 256 at once; then 64 at once, greedy and drawn.
    """
    _serve_large(device, say, {"256 rows, 40 arrivals/s": _ARRIVALS, "64 greedy": _AT_ONCE, "64 drawn": _DRAWN})


def flash4(device: torch.device, say: Say) -> None:
    """Like `arrivals`, with the attention backend that the image prefers."""
    if device.type == "cuda" and (find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None):
        say(Finding("flash-attn 4", "not installed", held=False))
        return
    backend = "flash4" if device.type == "cuda" else "auto"
    _serve_large(device, say, {"256 rows, 40 arrivals/s, flash4": _ARRIVALS}, "--attention-backend", backend)


def _serve_large(device: torch.device, say: Say, loads: dict[str, list[str]], *options: str) -> None:
    small = device.type == "cpu"
    limits = ["--max-model-len", "2048"] if small else ["--max-model-len", "16384", "--max-num-seqs", "256"]
    options = (*options, *limits, "--warmup-seconds", "10", "--device", device.type)
    with model_directory("tiny" if small else "llama-3.1-8b") as path:
        began = time.monotonic()
        with served(str(path), "--load-format", "dummy", "--skip-tokenizer-init", *options) as server:
            say(Finding("quire serve, 8 billion weights", f"ready after {time.monotonic() - began:.1f} s"))
            for name, load in loads.items():
                tried(say, name, lambda: _bench(server.url, [*load, *(_SMALL_LOAD if small else [])]))  # noqa: B023
            for line in server.log.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.lstrip().startswith(("attention ", "memory ", "note ")):
                    say(Finding("quire serve", line.strip()[:400]))


def _bench(url: str, load: list[str]) -> str:
    """Measures with `quire bench serve`, a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        command = [sys.executable, "-m", "quire", "bench", "serve", "--url", url, *load, "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError((done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1])
        found = json.loads(file.read_text(encoding="utf-8"))
    first, gaps = found["ttft_ms"], found["itl_ms"] or {"p50": 0.0, "p99": 0.0}  # None: an event per answer
    return (
        f"{found['output_tokens_per_second']:.0f} tokens/s; first token {first['p50']:.0f} ms, p99 {first['p99']:.0f}; "
        f"between tokens {gaps['p50']:.1f} ms, p99 {gaps['p99']:.1f}; {found['requests']} answers"
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
    """Asks for JSON words, next to as many unconstrained chats."""
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
