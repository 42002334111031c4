"""Cost of a streamed token in the API process: `python -m benchmarks.stream_cost`, from the repository's root.

An engine process that computes nothing sends steps of one token per stream, through ProcessClient and the HTTP server,
to a reader process. With steps `--pause` apart the server's processor time per event counts, with `--pause 0` the
tokens per second. With `--api-server-count` several API processes share the engine through a leader, shown separately.
Starts and ends of streams are not measured. `--data-dir` makes streams resumable.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median
from typing import cast

import uvloop
import zmq

from benchmarks.common.options import options
from quire.engine.client.api_server_leader import ApiServerLeader
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_process import EngineProcess, Launcher
from quire.engine.client.messages import EngineStarted, Stepped, Submit, decode_to_engine
from quire.engine.client.process_client import ProcessClient
from quire.engine.client.shared_client import SharedClient
from quire.engine.common.types import EngineCoreOutput, EngineInfo
from quire.engine.core.stats import EngineStats, StepRecord
from quire.engine.processes.child import end_with_parent, read_configuration
from quire.engine.processes.heartbeat import PipeHeartbeat
from quire.engine.processes.utility_calls import START, encode, make_result
from quire.server.config import ServerConfig
from quire.server.http.server import HttpServer
from tests.server.api import NAME, make_app

INFO = EngineInfo("null", "float32", "cpu", "none", 8192, 65536, 16, 0, 0, 0.0, "none", deterministic=True)
TOKEN, MARK = 126, b"~"
"""Id and text in the tests' byte-level tokenizer; the text occurs nowhere else."""
REST_SECONDS, WINDOW_SECONDS = 2.0, 0.2
"""Pause after the first step and before the last."""
CALLS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
}


class NullProcess(EngineProcess):
    PROGRAM = ("-m", "benchmarks.stream_cost", "--engine")


def compute_nothing(address: str, descriptor: int) -> None:
    """Waits for all streams' requests, then answers all in the same steps."""
    read_configuration()
    PipeHeartbeat(descriptor)
    end_with_parent()
    streams, steps, pause = (int(os.environ[name]) for name in ("NULL_STREAMS", "NULL_STEPS", "NULL_PAUSE_US"))
    pair: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    pair.set(zmq.SNDHWM, 0)
    pair.connect(address)
    pair.send(encode(make_result(START, EngineStarted(INFO))))
    while True:
        ids: list[str] = []
        while len(ids) < streams:
            message = decode_to_engine(pair.recv())
            if isinstance(message, Submit):
                ids += [request.id for request in message.requests]
        for step in range(1, steps + 1):
            if step in (2, steps):
                time.sleep(REST_SECONDS)
            now = time.monotonic()
            reason = "length" if step == steps else None
            outputs = [EngineCoreOutput(each, [TOKEN], finish_reason=reason) for each in ids]
            chunks = tuple((each, 0, 1) for each in ids) if step == 1 else ()
            record = StepRecord(step, now, now, now, now, streams, streams, chunks, ())
            stats = EngineStats(running=streams, generation_tokens=step * streams)
            pair.send(encode(Stepped(outputs, stats, record)))
            time.sleep(pause / 1e6)


def serve(port: int, ready: Connection, hub: str | None = None, identity: str = "") -> None:
    """`hub`: address of the shared engine's process."""

    async def run() -> None:
        config = ServerConfig(served_model_name=[NAME], disable_access_log=True)
        link = (
            ProcessClient(config, launcher=Launcher(NullProcess))
            if hub is None
            else SharedClient(config, hub, identity)
        )
        app = make_app(link, data_dir=os.environ.get("NULL_DATA_DIR"))
        link.launch()

        def announce() -> None:
            gc.freeze()  # as in `quire serve`
            ready.send(os.getpid())

        async with app.router.lifespan_context(app):
            server = HttpServer(app, config, announce)
            with socket.create_server(("127.0.0.1", port), backlog=2048, reuse_port=hub is not None) as listener:
                await server.serve(sockets=[listener])

    uvloop.run(run())


def share(hub: str, count: int, ready: Connection) -> None:
    async def run() -> None:
        client = EngineClient(ProcessClient(ServerConfig(), launcher=Launcher(NullProcess)))
        client.engine_core.launch()
        shared = ApiServerLeader(client, hub)
        for number in range(count):
            shared.add(f"{number}".encode(), number)
        shared.listen()
        shared.ready(await client.engine_core.start())
        ready.send(os.getpid())
        gc.freeze()
        await asyncio.Event().wait()

    uvloop.run(run())


def start(args: argparse.Namespace, folder: str) -> tuple[list[BaseProcess], list[int], list[int]]:
    """Processes, process ids of API processes, and of the leader."""
    ready, there = multiprocessing.Pipe(duplex=False)
    spawn, address = multiprocessing.get_context("spawn").Process, f"ipc://{folder}/hub"
    if args.api_server_count == 1:
        server = spawn(target=serve, args=(args.port, there))
        server.start()
        return [server], [ready.recv()], []
    hub = spawn(target=share, args=(address, args.api_server_count, there))
    hub.start()
    own = ready.recv()
    servers = [spawn(target=serve, args=(args.port, there, address, f"{n}")) for n in range(args.api_server_count)]
    for each in servers:
        each.start()
    return [hub, *servers], [ready.recv() for _ in servers], [own]


def processor_seconds(pids: Sequence[int]) -> float:
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # clock_getcpuclockid(3)


@dataclass
class Counts:
    tokens: int = 0
    events: int = 0
    ended: int = 0
    first: float = 0.0
    """`time.monotonic()` of the first token after the pause."""
    last: float = 0.0


class Reader(asyncio.Protocol):
    def __init__(self, request: bytes, counts: Counts) -> None:
        self._request = request
        self._counts = counts

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        counts = self._counts
        counts.last = time.monotonic()
        counts.first = counts.first or counts.last
        counts.tokens += data.count(MARK)
        counts.events += data.count(b"data: ")
        counts.ended += b"[DONE]" in data


async def read_all(port: int, servers: Sequence[int], hub: Sequence[int], args: argparse.Namespace) -> None:
    path, body = CALLS[args.call]
    content = json.dumps({**body, "stream": True, "max_tokens": args.steps}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    counts, loop = Counts(), asyncio.get_running_loop()
    for _ in range(args.streams):
        await loop.create_connection(lambda: Reader(head.encode() + b"\r\n\r\n" + content, counts), "127.0.0.1", port)

    windows: list[float] = []
    """Processor microseconds per event."""

    async def until(tokens: int) -> tuple[float, float]:
        while counts.tokens < tokens:
            events, used = counts.events, processor_seconds(servers)
            await asyncio.sleep(WINDOW_SECONDS)
            if counts.events > events + args.streams:
                windows.append(1e6 * (processor_seconds(servers) - used) / (counts.events - events))
        return processor_seconds(servers), processor_seconds(hub)

    began, hub_began = await until(args.streams)
    windows.clear()
    events, counts.first = counts.events, 0.0
    ended, hub_ended = await until(args.streams * (args.steps - 1))
    used = ended - began
    tokens, events, seconds = args.streams * (args.steps - 2), counts.events - events, counts.last - counts.first
    while counts.ended < args.streams:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    shown = f"{1e6 * used / tokens:.1f} us of the API process per token; {tokens / seconds:,.0f} tokens/s; "
    if hub:
        shown = f"{1e6 * (hub_ended - hub_began) / tokens:.1f} us of the hub and {shown}"
    shown += f"{events / seconds:,.0f} events/s, {events / tokens:.2f} per token"
    if windows:  # empty if the run was too short
        shown += f", each {median(windows):.1f} us, at least {min(windows):.1f}"
    print(shown, flush=True)


def main() -> None:
    args = options(
        __doc__,
        {
            "--streams": 512,
            "--steps": 200,
            "--pause": {"default": 50_000, "help": "between two steps, in microseconds"},
            "--rounds": 2,
            "--call": {"choices": CALLS, "default": "chat"},
            "--api-server-count": 1,
            "--data-dir": {"action": "store_true", "help": "streams that can be resumed"},
            "--port": 8765,
            "--engine": {"nargs": 2, "help": argparse.SUPPRESS},
        },
    )
    if args.engine is not None:
        return compute_nothing(args.engine[0], int(args.engine[1]))
    os.environ |= {
        f"NULL_{name}": str(value)
        for name, value in (("STREAMS", args.streams), ("STEPS", args.steps), ("PAUSE_US", args.pause))
    }
    with tempfile.TemporaryDirectory() as folder:
        if args.data_dir:
            os.environ["NULL_DATA_DIR"] = f"{folder}/data"
        processes, servers, hub = start(args, folder)
        try:
            for _ in range(args.rounds):
                uvloop.run(read_all(args.port, servers, hub, args))
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join()


if __name__ == "__main__":
    main()
