"""Images per second of servers in turns: chats of one new picture, one-token answers.

    python -m benchmarks.sides.image_sides http://127.0.0.1:8000=MODEL http://127.0.0.1:9000=MODEL --side 512 --images 4

A tower that is large compared to the language model takes nearly all of the time. The first server is compared with the
others in every round.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import random
from typing import Any

from PIL import Image

from benchmarks.common.options import options
from benchmarks.common.servers import by_turns, compared, post_all

CELLS = 16
"""Random colors per side, smoothly enlarged to keep the file small."""


def picture(side: int, draw: random.Random) -> str:
    """A data: URL."""
    small, file = Image.frombytes("RGB", (CELLS, CELLS), draw.randbytes(CELLS * CELLS * 3)), io.BytesIO()
    small.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def body(model: str, side: int, draw: random.Random) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": picture(side, draw)}}
    said = [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]
    return {"model": model, "messages": said, "max_tokens": 1, "temperature": 0}


async def run(args: argparse.Namespace) -> None:
    tokens: dict[str, int] = {}

    async def measure(server: str, seed: int) -> float:
        """Images per second."""
        url, model = server.split("=")
        draw = random.Random(seed)
        bodies = [body(model, args.side, draw) for _ in range(args.images)]
        seconds, answers = await post_all(url, "/v1/chat/completions", bodies, args.concurrency)
        tokens[server] = answers[-1]["usage"]["prompt_tokens"]
        return args.images / seconds

    rates = await by_turns(args.servers, args.rounds, measure)
    for server, found in rates.items():
        told = compared(rates[args.servers[0]], found, 3)
        print(f"{server}: {told} images/s, {tokens[server]} tokens each", flush=True)


def main() -> None:
    servers = {"nargs": "+", "metavar": "URL=MODEL"}
    side, images = {"default": 512, "help": "of a picture, in pixels"}, {"default": 4, "help": "of a turn"}
    flags = {"servers": servers, "--side": side, "--images": images, "--concurrency": 2, "--rounds": 3}
    asyncio.run(run(options(__doc__, flags)))


if __name__ == "__main__":
    main()
