"""Films the live view under load, for the README: `python -m tests.web.engine_picture [docs/engine.webp]`.

Server, chats and page are real, and the film runs as fast as they did. Only the pointer is drawn, because a headless
Chromium (Debian: chromium and chromium-driver) shows none. Other programs should rest meanwhile: on a busy machine
the page stands still for seconds.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image, ImageDraw

from tests.e2e.server import Server
from tests.tree import ROOT
from tests.web.browser import Browser, running_browser

PICTURE = ROOT / "docs/engine.webp"
WIDTH, HEIGHT = 830, 650
"""CSS pixels; GitHub shows a README 830 to 1,000 pixels wide."""
SCALE = 2
"""A browser's flag sets it: if emulated, each screenshot would make the pointer leave the map."""
ASIDE = (WIDTH - 40.0, HEIGHT - 40.0)
"""Where the pointer rests, beside map and dialog."""
FRAMES_PER_SECOND = 8
NUM_BLOCKS = 370
"""Ten full rows of the map."""
SQUARE = 20
"""CSS pixels from one of the map's squares to the next: LARGEST in quire/server/web/js/engine/blockmap.js."""
FIRST_OWNER, UNLISTED = 2, 0x7FFF
"""The map's codes, as in quire/engine/common/types.py."""
ARROW = ((0, 0), (0, 17), (4, 13.2), (6.7, 19.4), (9.6, 18.1), (7, 12), (12.2, 12))

SYSTEM = (
    "You are an old storyteller who sits by the fire of an inn at the edge of the dark forest. Travelers come in from "
    "the snow, and each of them asks you for a tale. You tell of kings and their three sons, of foxes who are wiser "
    "than hunters, of poor girls who find a golden ring in a well, and of giants who are afraid of mice. In your tales "
    "the proud are laughed at, the kind find their way home, and whoever shares his bread with a beggar is helped by "
    "him later. You speak plainly. You say what the people in the tale see, hear and say to each other. You never "
    "explain what a tale means, because the travelers will find that out on their way. When somebody asks what "
    "happened next, you go on where you stopped, and you forget nobody whom you have named before. When the fire is "
    "low, you tell how the tale ended, and wish the travelers a good night."
)
HEROES = (
    *("fox", "miller", "king", "princess", "giant", "wolf"),
    *("tailor", "raven", "fisherman", "soldier", "goose", "shepherd"),
)
QUESTIONS = ("Tell me a story about a {}.", "What did the {} do next?", "Whom did the {} meet?", "Tell me more.") * 3


def tell(server: Server, messages: list[dict[str, str]], max_tokens: int, ended: threading.Event) -> str:
    """Stream one answer and return its text, or what there was of it when the filming ended."""
    body = {"messages": messages, "max_tokens": max_tokens, "stream": True}
    parts = []
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if ended.is_set():
                break
            if line.startswith("data: {"):
                parts.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
    return "".join(parts)


def converse(server: Server, hero: str, ended: threading.Event) -> None:
    """Ask one question after the other; each prompt begins with the conversation so far."""
    messages = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question.format(hero)})
        messages.append({"role": "assistant", "content": tell(server, messages, 330, ended)})
        if ended.is_set():
            return


def read_long_prompt(server: Server, ended: threading.Event) -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")[:3200]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Make a tale of this:\n{text}"}]
    tell(server, messages, 600, ended)


@contextmanager
def load(server: Server) -> Iterator[None]:
    """One long prompt, and conversations that begin one after the other."""
    ended = threading.Event()
    threads = [threading.Thread(target=read_long_prompt, args=(server, ended))]
    threads += [threading.Thread(target=converse, args=(server, hero, ended)) for hero in HEROES]

    def begin() -> None:
        for thread in threads:
            thread.start()
            time.sleep(0.35)

    starter = threading.Thread(target=begin)
    starter.start()
    try:
        yield
    finally:
        ended.set()
        starter.join()
        for thread in threads:
            thread.join()


@dataclass
class Film:
    """Screenshots (base64 of PNG), each with the second when it was taken and where the pointer was."""

    page: Browser
    pointer: tuple[float, float] = ASIDE
    shots: list[tuple[float, str, tuple[float, float]]] = field(default_factory=list)

    def shoot(self, seconds: float, to: tuple[float, float] | None = None) -> None:
        """Take frames for `seconds`; meanwhile the pointer glides to `to`."""
        began, start = time.monotonic(), self.pointer
        for number in count(1):
            done = min(1.0, (time.monotonic() - began) / seconds)
            if to is not None:
                eased = done * done * (3 - 2 * done)
                self.pointer = (start[0] + (to[0] - start[0]) * eased, start[1] + (to[1] - start[1]) * eased)
                self._mouse("mouseMoved")
            shot = self.page.driver.execute_cdp_cmd("Page.captureScreenshot", {"optimizeForSpeed": True})
            self.shots.append((time.monotonic(), shot["data"], self.pointer))
            if done == 1.0:
                return
            time.sleep(max(0.0, began + number / FRAMES_PER_SECOND - time.monotonic()))

    def click(self) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, button="left", clickCount=1)

    def _mouse(self, kind: str, **more: Any) -> None:
        x, y = self.pointer
        self.page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more})

    def save(self, path: Path, last_seconds: float) -> None:
        """Write a looped WebP without loss; a frame is shown until the next differs."""
        frames = [(at, draw_frame(data, pointer)) for at, data, pointer in self.shots]
        kept = frames[:1]
        for before, frame in pairwise(frames):
            if frame[1].tobytes() != before[1].tobytes():
                kept.append(frame)
        moments = [at for at, _ in kept] + [frames[-1][0] + last_seconds]
        durations = [round(1000 * (until - at)) for at, until in pairwise(moments)]
        first, *others = [image for _, image in kept]
        options: dict[str, Any] = {"lossless": True, "quality": 100, "method": 6, "minimize_size": True, "loop": 0}
        first.save(path, save_all=True, append_images=others, duration=durations, **options)
        print(f"{path}: {path.stat().st_size:,} bytes, {len(kept)} frames in {sum(durations) / 1000:.1f} s")
        print(f"before its last frame the picture stands still for at most {max(durations[:-1]) / 1000:.1f} s")


def draw_frame(data: str, pointer: tuple[float, float]) -> Image.Image:
    """Add an arrow with smooth edges: drawn on a fourfold copy of the surroundings, which is then reduced."""
    frame = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    left, top = (round(each * SCALE) - 4 for each in pointer)
    box = (left, top, left + round(22 * SCALE), top + round(28 * SCALE))
    large = frame.crop(box).resize((4 * (box[2] - box[0]), 4 * (box[3] - box[1])))
    points = [(16 + 4 * SCALE * x, 16 + 4 * SCALE * y) for x, y in ARROW]
    pen = ImageDraw.Draw(large)
    pen.polygon(points, fill="black")
    pen.line([*points, *points[:2]], fill="white", width=8, joint="curve")
    frame.paste(large.resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.LANCZOS), box[:2])
    return frame


def read_map(server: Server) -> tuple[list[dict[str, Any]], np.ndarray]:
    """The requests that the map's codes refer to, and the code of each block."""
    with httpx.stream("GET", f"{server.url}/v1/engine/events", timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and (engine := json.loads(line[6:]).get("engine")):
                codes = np.frombuffer(zlib.decompress(base64.b64decode(engine["pages"])), np.uint16)
                return engine["requests"], codes
    raise RuntimeError("the server ended the stream")


def find_block_center(page: Browser, block: int) -> tuple[float, float]:
    """The middle of a block's square in the window."""
    left, top, width = page.run(
        "const box = document.getElementById('pages').getBoundingClientRect(); return [box.left, box.top, box.width]"
    )
    row, column = divmod(block, int(width // SQUARE))
    return left + (column + 0.45) * SQUARE, top + (row + 0.45) * SQUARE


def owned_block(server: Server) -> int:
    """A block that only the request with the most tokens from the prefix cache holds."""
    requests, codes = read_map(server)
    owned = [code - FIRST_OWNER for code in np.unique(codes) if FIRST_OWNER <= code < UNLISTED]
    chosen = max(owned, key=lambda index: requests[index]["cached_tokens"])
    blocks = np.flatnonzero(codes == chosen + FIRST_OWNER)
    return int(blocks[len(blocks) // 2])


def film_engine(page: Browser, server: Server) -> Film:
    page.open(f"{server.url}/#/engine")
    metrics = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 0, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page.until(lambda: page.text("#live") == "Live" and page.text("#legend b") == str(NUM_BLOCKS))
    page.run("scrollTo(0, document.getElementById('figures').offsetTop - 70)")
    film = Film(page)
    film.shoot(0.4)
    with load(server):
        film.shoot(5.5)
        codes = read_map(server)[1]
        film.shoot(0.8, to=find_block_center(page, int(codes.argmax())))
        film.shoot(1.4)
        film.shoot(0.7, to=find_block_center(page, owned_block(server)))
        film.shoot(0.8)
        film.click()
        page.one("#explain-dialog[open]")
        film.shoot(0.6, to=ASIDE)
    return film


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, nargs="?", default=PICTURE)
    path = parser.parse_args().picture
    with (
        tempfile.TemporaryDirectory() as folder,
        running_browser(Path(folder, "profile"), f"--force-device-scale-factor={SCALE}") as page,
    ):
        options = f"--num-kv-blocks {NUM_BLOCKS} --max-model-len 2048 --threads 1".split()  # a core is the browser's
        server = Server(Path(folder, "server.log"), *options)
        try:
            film = film_engine(page, server)
        finally:
            server.stop()
        film.save(path, last_seconds=3.5)


if __name__ == "__main__":
    main()
