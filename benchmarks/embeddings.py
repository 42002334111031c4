"""Speed of embeddings: `python -m benchmarks.embeddings MODEL [--peer-python PYTHON] [--rounds 3]`.

Embeds texts of 8 to 256 tokens in child processes, over HTTP, and with sentence-transformers if PYTHON has it (also
with onnx and openvino, if they start). Sides take turns, so that other load affects all. Shows medians over rounds:
texts per second, and processor seconds, which beat wall time on a shared machine. Then the latency of a single short
text, alone and while 32 streams generate, on a decoder's server (--decoder).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import httpx

from benchmarks.common.options import options as read
from benchmarks.common.servers import post_all, processor_seconds, served
from benchmarks.speculation import TEXT
from quire.engine.text.tokenizer import Tokenizer
from tests.e2e.server import Server

OURS = ("quire:float32", "quire:bfloat16")
PEERS = ("torch", "onnx", "openvino:f32", "openvino")
SHORT = "a short text of some eight tokens"
STREAMS = 32


def texts_of(tokenizer: Tokenizer, count: int) -> list[str]:
    """Uniformly distributed lengths, special tokens included."""
    generator = random.Random(5)
    words = TEXT.split()
    found = []
    for _ in range(count):
        wanted, text = generator.randint(8, 256), ""
        while len(tokenizer.encode(text)) < wanted:
            text = f"{text} {generator.choice(words)}".strip()
        found.append(text if len(tokenizer.encode(text)) <= 256 else text.rpartition(" ")[0])
    return found


Side = Callable[[], tuple[float, float]]
"""Returns wall and processor seconds."""


class Child:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    def start(cls, kind: str, python: str, model: str, texts: Path) -> Child | None:
        """Prints that the child does not start and returns None, if so."""
        script = Path(__file__).parent / "sides" / "embedding_sides.py"
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [python, str(script), kind, model, str(texts)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            child = cls(process)
            if child.line():
                return child
            errors.seek(0)
            print(f"{kind} did not start: {errors.read().strip().splitlines()[-1:]}", flush=True)
            return None

    def line(self) -> str:
        """Returns JSON, or "" at the end."""
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()) and not line.startswith("["):
            pass
        return line

    def __call__(self) -> tuple[float, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds, worked = json.loads(self.line())
        return seconds, worked

    def stop(self) -> None:
        self._process.communicate()


def over_http(server: Server, texts: Sequence[str], batch: int, at_once: int) -> tuple[float, float]:
    """A Side, over HTTP."""
    worked = processor_seconds(server.process.pid)
    parts = [texts[at : at + batch] for at in range(0, len(texts), batch)]
    asked = [{"input": list(part), "encoding_format": "base64", "truncate_prompt_tokens": -1} for part in parts]
    seconds, _ = asyncio.run(post_all(server.url, "/v1/embeddings", asked, at_once))
    return seconds, processor_seconds(server.process.pid) - worked


def throughput(options: argparse.Namespace) -> None:
    texts = texts_of(Tokenizer.from_pretrained(Path(options.model)), options.texts)
    served_model = served(options.model, "--dtype", "float32")
    with tempfile.TemporaryDirectory() as folder, served_model as server, ExitStack() as stack:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(texts), encoding="utf-8")
        peers = PEERS if options.peer_python else ()
        pythons = dict.fromkeys(OURS, sys.executable) | dict.fromkeys(peers, options.peer_python)
        sides: dict[str, Side] = {}
        for kind, python in pythons.items():
            if (child := Child.start(kind, python, options.model, file)) is not None:
                stack.callback(child.stop)
                sides[kind] = child
        sides["quire:float32, HTTP, 32 a request"] = partial(over_http, server, texts, 32, 4)
        sides["quire:float32, HTTP, 1 a request"] = partial(over_http, server, texts, 1, 32)
        rounds = [{name: side() for name, side in sides.items()} for _ in range(options.rounds + 1)]
    print(f"{len(texts)} texts, {options.rounds} rounds, medians")
    print(f"{'':36}{'texts/s':>9}{'seconds':>9}{'processor s':>13}")
    for name in sides:  # the first round warms up
        seconds, worked = map(statistics.median, zip(*(each[name] for each in rounds[1:]), strict=True))
        print(f"{name:36}{len(texts) / seconds:9.1f}{seconds:9.2f}{worked:13.2f}")


def stream_all(url: str) -> None:
    """Runs in its own process, because reading STREAMS streams would delay what is measured."""

    async def run() -> None:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
            await asyncio.gather(*(generate(client, number) for number in range(STREAMS)))

    asyncio.run(run())


async def generate(client: httpx.AsyncClient, number: int) -> None:
    """Lengths differ by `number`; otherwise all streams would end at once."""
    asked = {"prompt": f"Story {number}:", "max_tokens": 200 + 12 * number, "ignore_eos": True, "stream": True}
    while True:
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            async for _ in response.aiter_lines():
                pass


async def waits(client: httpx.AsyncClient, count: int) -> list[float]:
    """Seconds of single texts."""
    found = []
    for number in range(count):
        began = time.perf_counter()
        (await client.post("/v1/embeddings", json={"input": f"{SHORT} {number}"})).raise_for_status()
        found.append(time.perf_counter() - began)
    return found


async def running(server: Server, count: int) -> None:
    while await asyncio.to_thread(server.metric, "vllm:num_requests_running") != count:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def measure_waits(server: Server, rounds: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds of single texts alone, and during the streams."""
    alone: list[float] = []
    beside: list[float] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=None) as client:
        await waits(client, 20)
        for _ in range(rounds):
            alone += await waits(client, count)
            streams = get_context("spawn").Process(target=stream_all, args=(server.url,), daemon=True)
            streams.start()
            await running(server, STREAMS)
            beside += await waits(client, count)
            streams.kill()
            streams.join()
            await running(server, 0)
    return alone, beside


def latency(options: argparse.Namespace) -> None:
    given = [options.decoder] if options.decoder else []
    with served(*given, "--max-num-seqs", str(STREAMS + 8)) as server:
        alone, beside = asyncio.run(measure_waits(server, options.rounds, options.waits))
    median = statistics.median(alone)
    print(f"a single short text, {options.decoder or 'the embedded model'}, milliseconds")
    for name, found in (("alone", alone), (f"beside {STREAMS} streams", beside)):
        p99 = statistics.quantiles(found, n=100)[98]
        print(f"{name:20} median {statistics.median(found) * 1e3:7.1f}   p99 {p99 * 1e3:7.1f}", end="")
        print(f"   p99 / median alone {p99 / median:5.1f}")


def main() -> None:
    options = read(
        __doc__,
        {
            "model": {"help": "a folder in sentence-transformers' layout"},
            "--peer-python": {"help": "a Python that has sentence-transformers"},
            "--rounds": 3,
            "--texts": 128,
            "--decoder": {"help": "a decoder for the second part; default: the embedded model"},
            "--waits": {"default": 100, "help": "single texts a round"},
            "--only": {"choices": ["throughput", "latency"]},
        },
    )
    if options.only != "latency":
        throughput(options)
    if options.only != "throughput":
        latency(options)


if __name__ == "__main__":
    main()
