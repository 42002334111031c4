"""What a streamed token costs the API process: `python -m benchmarks.stream_cost [completions]`.

An engine that costs nothing delivers 400 steps to 32 streams, 10 ms apart, through uvicorn to a client in another
process; the figure is the server's processor time per token.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
from multiprocessing.queues import Queue

import uvicorn
import uvloop

from quire.engine.types import EngineStats, RequestOutput
from tests.server.api import make_app
from tests.server.fake import FakeEngine

STREAMS, STEPS, STEP_SECONDS, PORT = 32, 400, 0.01, 8765
CALLS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
}


class FreeEngine(FakeEngine):
    """Has all outputs ready before the clock starts."""

    def __init__(self, results: Queue[float]) -> None:
        super().__init__(lambda request, position: 65, max_model_len=4096)
        self._results = results

    async def _run(self) -> None:
        while len(self.running) < STREAMS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        steps = [
            [
                RequestOutput(id=name, new_ids=[97], finish_reason="length" if step == STEPS - 1 else None)
                for name in self.running
            ]
            for step in range(STEPS)
        ]
        started = time.process_time()
        for outputs in steps:
            self._deliver(outputs, EngineStats())
            await asyncio.sleep(STEP_SECONDS)
        await asyncio.sleep(0.2)
        self._results.put((time.process_time() - started) / (STREAMS * STEPS))


def serve(results: Queue[float]) -> None:
    app = make_app(FreeEngine(results))
    uvicorn.run(app, port=PORT, loop="uvloop", http="httptools", log_level="warning", access_log=False)


async def read_all(path: str, body: dict[str, object]) -> None:
    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        content = json.dumps({**body, "stream": True, "max_tokens": STEPS}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        writer.write(head.encode() + b"\r\n\r\n" + content)
        data = b""
        while b"[DONE]" not in data:
            data = data[-20:] + await reader.read(65536)
        writer.close()

    await asyncio.gather(*[one() for _ in range(STREAMS)])


def main() -> None:
    results: Queue[float] = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(results,))
    server.start()
    time.sleep(3)
    uvloop.run(read_all(*CALLS[sys.argv[1] if len(sys.argv) > 1 else "chat"]))
    print(f"{results.get(timeout=30) * 1e6:.1f} us per token at {STREAMS} streams")
    server.terminate()


if __name__ == "__main__":
    main()
