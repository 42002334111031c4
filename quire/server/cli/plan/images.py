"""What images take: tokens of the context, and memory."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from quire.engine.checkpoint.download import fetch_config
from quire.engine.checkpoint.files import hub_model
from quire.engine.checkpoint.kv_plan import DTYPE_BYTES
from quire.engine.errors import ConfigError
from quire.engine.images.config import KEPT_BYTES, read_vision, reads_images
from quire.engine.images.decode import MOST_PIXELS
from quire.engine.images.vision import Vision
from quire.server.cli.plan.estimate import Estimate

_PREPARING = ("preprocessor_config.json", "processor_config.json")
_TOKEN = re.compile(r"<[^>]*>|\n+")
"""Of what stands for an image: its marks, and the breaks between rows."""
_GIVEN = re.compile(r"(?:([1-9]\d{0,3})x)?([1-9]\d{0,5})x([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True)
class Images:
    """Those of a request, all of one size."""

    count: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ImagesPlan:
    """What they take of a model's context and of memory, in bytes."""

    asked: Images
    tiles: int
    """What the tower reads one by one, of all images, as all figures are."""
    tokens: int
    """With those around and between what features stand for."""
    feature_bytes: int
    pixel_bytes: int
    """Of the tiles' pixels, which the server and the engine keep as long as a request is open."""
    tower_bytes: int
    """0 where the tower is not loaded."""

    def as_dict(self) -> dict[str, Any]:
        asked = self.asked
        return {
            "count": asked.count,
            "width": asked.width,
            "height": asked.height,
            "tiles": self.tiles,
            "tokens": self.tokens,
            "feature_bytes": self.feature_bytes,
            "kept_feature_bytes": KEPT_BYTES,
            "pixel_bytes": self.pixel_bytes,
            "tower_bytes": self.tower_bytes,
        }


def images(text: str) -> Images:
    """From COUNTxWIDTHxHEIGHT or WIDTHxHEIGHT, as argparse wants it."""
    found = _GIVEN.fullmatch(text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"COUNTxWIDTHxHEIGHT, as 1x1024x1024, got {text!r}")
    count, width, height = (int(each or 1) for each in found.groups())
    if width * height > MOST_PIXELS:
        raise argparse.ArgumentTypeError(f"an image of more than {MOST_PIXELS:,} pixels is not read")
    return Images(count, width, height)


def vision_of(model: str, revision: str | None, raw: dict[str, Any], folder: Path | None) -> Vision:
    """What the model reads of images; of a hub id the files that say how they are prepared are fetched. Raises
    ConfigError where it reads none, and ModelError."""
    vision: Vision | None = None
    if reads_images(raw):
        for file in _PREPARING if folder is None else ():
            folder = fetch_config(hub_model(model), revision, file, Path())
        assert folder is not None
        vision = read_vision(folder, raw)
    if vision is None:
        raise ConfigError("--images: this model reads no images here")
    return vision


def planned_images(asked: Images, vision: Vision, made: Estimate) -> ImagesPlan:
    """What they take with the model of an estimate."""
    layout = vision.layout(asked.width, asked.height, several=asked.count > 1)
    width, count = DTYPE_BYTES[made.dtype], asked.count
    hidden = made.sizes.head_parameters // made.sizes.vocab_size
    contents = layout.contents(Image.new("RGB", (asked.width, asked.height)))
    return ImagesPlan(
        asked,
        count * len(layout.runs),
        count * len(_TOKEN.findall(layout.shown(lambda token: "<>"))),
        count * layout.tokens * hidden * width,
        count * sum(len(each.pixels) for each in contents),
        made.sizes.tower_bytes(width, made.config.at_load),
    )
