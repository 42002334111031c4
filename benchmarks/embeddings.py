"""How fast embeddings are: `python -m benchmarks.embeddings MODEL [--peer-python PYTHON] [--rounds 3]`.

Texts of 8 to 256 tokens are embedded in this process's children and over HTTP, and by sentence-transformers where
PYTHON has it (and its backends onnx and openvino, as far as these start). The sides take turns, so that what else the
machine does meets all of them. Shown are the medians of the rounds: texts per second, and seconds of processor time,
which tell more than the clock on a machine that others use. Then the seconds of a single short text, alone and while
32 streams generate, on a server of a decoder (--decoder), in turns too.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """Texts of 8 to 256 tokens, evenly spread, special tokens included."""
    generator = random.Random(5)
    words = TEXT.split()
    found = []
    for _ in range(count):
        wanted, text = generator.randint(8, 256), ""
        while len(tokenizer.encode(text)) < wanted:
            text = f"{text} {generator.choice(words)}".strip()
        found.append(text if len(tokenizer.encode(text)) <= 256 else text.rpartition(" ")[0])
    return found


@dataclass
class Child:
    """A side in a process of its own."""

    name: str
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    worked: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, kind: str, python: str, model: str, texts: Path) -> Child | None:
        """None, and a line that says so, where it does not start."""
        script = Path(__file__).with_name("embedding_sides.py")
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [python, str(script), kind, model, str(texts)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            assert process.stdout is not None
            while (line := process.stdout.readline()) and not line.startswith("["):
                pass
            if line:
                return cls(kind, process)
            errors.seek(0)
            print(f"{kind} did not start: {errors.read().strip().splitlines()[-1:]}", flush=True)
            return None

    def round(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith("["):
            assert line, f"{self.name} ended"
        seconds, worked = json.loads(line)
        self.seconds.append(seconds)
        self.worked.append(worked)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@dataclass
class OverHttp:
    """A server that is asked for so many texts a request, some requests at once."""

    name: str
    server: Server
    texts: Sequence[str]
    batch: int
    at_once: int
    seconds: list[float] = field(default_factory=list)
    worked: list[float] = field(default_factory=list)

    def round(self) -> None:
        worked, began = processor_seconds(self.server.process.pid), time.perf_counter()
        parts = [self.texts[at : at + self.batch] for at in range(0, len(self.texts), self.batch)]
        asked = [{"input": list(part), "encoding_format": "base64", "truncate_prompt_tokens": -1} for part in parts]
        asyncio.run(post_all(self.server.url, "/v1/embeddings", asked, self.at_once))
        self.seconds.append(time.perf_counter() - began)
        self.worked.append(processor_seconds(self.server.process.pid) - worked)


def throughput(options: argparse.Namespace) -> None:
    texts = texts_of(Tokenizer.load(Path(options.model)), options.texts)
    served_model = served(options.model, "--dtype", "float32")
    with tempfile.TemporaryDirectory() as folder, served_model as server:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(texts), encoding="utf-8")
        pythons = [(kind, sys.executable) for kind in OURS]
        pythons += [(kind, options.peer_python) for kind in PEERS if options.peer_python]
        children = [Child.start(kind, python, options.model, file) for kind, python in pythons]
        sides: list[Child | OverHttp] = [child for child in children if child is not None]
        sides.append(OverHttp("quire:float32, HTTP, 32 a request", server, texts, 32, 4))
        sides.append(OverHttp("quire:float32, HTTP, 1 a request", server, texts, 1, 32))
        try:
            for number in range(options.rounds + 1):
                for side in sides:
                    side.round()
                    if number == 0:  # warms up
                        side.seconds.clear()
                        side.worked.clear()
        finally:
            for child in children:
                if child is not None:
                    child.stop()
    print(f"{len(texts)} texts, {options.rounds} rounds, medians")
    print(f"{'':36}{'texts/s':>9}{'seconds':>9}{'processor s':>13}")
    for side in sides:
        seconds, worked = statistics.median(side.seconds), statistics.median(side.worked)
        print(f"{side.name:36}{len(texts) / seconds:9.1f}{seconds:9.2f}{worked:13.2f}")


def stream_all(url: str) -> None:
    """Read STREAMS streams of the server at this address, until the process ends: in one of its own, because reading
    so many keeps it busy, and what is measured would wait for it."""

    async def run() -> None:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
            await asyncio.gather(*(generate(client, number) for number in range(STREAMS)))

    asyncio.run(run())


async def generate(client: httpx.AsyncClient, number: int) -> None:
    """A stream after the other. Each has a length of its own, as otherwise all would end, and begin anew, at once."""
    asked = {"prompt": f"Story {number}:", "max_tokens": 200 + 12 * number, "ignore_eos": True, "stream": True}
    while True:
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            async for _ in response.aiter_lines():
                pass


async def waits(client: httpx.AsyncClient, count: int) -> list[float]:
    """Seconds of single short texts, one after the other."""
    found = []
    for number in range(count):
        began = time.perf_counter()
        (await client.post("/v1/embeddings", json={"input": f"{SHORT} {number}"})).raise_for_status()
        found.append(time.perf_counter() - began)
    return found


async def running(server: Server, count: int) -> None:
    """Returns when so many requests run."""
    while await asyncio.to_thread(server.metric, "vllm:num_requests_running") != count:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def measure_waits(server: Server, rounds: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds of single texts alone, and beside the streams."""
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
