"""Images a second that servers read, by turns: chats of one picture that nobody sent before, with answers of a token.

    python -m benchmarks.sides.image_sides http://127.0.0.1:8000=MODEL http://127.0.0.1:9000=MODEL --side 512 --images 4

Nearly all of the time is the tower's where that is large beside the language model. The first server is compared with
each other one in every round.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import random
import statistics
import time
from typing import Any

import httpx
from PIL import Image

CELLS = 16
"""A picture is so many colours wide and high, smoothly drawn larger, so that its file is small."""


def picture(side: int, draw: random.Random) -> str:
    """A data: URL."""
    small, file = Image.frombytes("RGB", (CELLS, CELLS), draw.randbytes(CELLS * CELLS * 3)), io.BytesIO()
    small.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def body(model: str, side: int, draw: random.Random) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": picture(side, draw)}}
    said = [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]
    return {"model": model, "messages": said, "max_tokens": 1, "temperature": 0}


async def measured(server: str, args: argparse.Namespace, seed: int) -> tuple[float, int]:
    """Images a second, and a prompt's tokens."""
    url, model = server.split("=")
    draw, waiting, tokens = random.Random(seed), asyncio.Semaphore(args.concurrency), 0
    bodies = [body(model, args.side, draw) for _ in range(args.images)]
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def ask(one: dict[str, Any]) -> None:
            nonlocal tokens
            async with waiting:
                response = await client.post("/v1/chat/completions", json=one)
                response.raise_for_status()
                tokens = response.json()["usage"]["prompt_tokens"]

        began = time.perf_counter()
        await asyncio.gather(*(ask(one) for one in bodies))
        return args.images / (time.perf_counter() - began), tokens


async def run(args: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {server: [] for server in args.servers}
    tokens, seed = dict.fromkeys(args.servers, 0), int(time.time())
    for turn in range(args.rounds):
        for server in args.servers:
            rate, tokens[server] = await measured(server, args, seed + turn)
            rates[server].append(rate)
    for server in args.servers:
        pairs = [first / rate for first, rate in zip(rates[args.servers[0]], rates[server], strict=True)]
        told = " ".join(f"{rate:.3f}" for rate in rates[server])
        print(
            f"{server}: {statistics.median(rates[server]):.3f} images/s ({told}), {tokens[server]} tokens each,"
            f" the first server is x {statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="URL=MODEL")
    parser.add_argument("--side", type=int, default=512, help="of a picture, in pixels")
    parser.add_argument("--images", type=int, default=4, help="of a turn")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
