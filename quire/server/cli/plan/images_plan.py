from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.hub_download import fetch_config
from quire.engine.checkpoint.kv_cache_plan import DTYPE_BYTES
from quire.engine.checkpoint.model_resolver import resolve_hub_name
from quire.engine.common.errors import ConfigError
from quire.engine.families.base.vision.vision_spec import VisionSpec
from quire.engine.images.image_decoding import MAX_PIXELS
from quire.engine.images.vision_config import ENCODER_CACHE_BYTES, can_read_images, read_vision_spec
from quire.server.cli.plan.estimate import Estimate

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_PLACEHOLDER_TOKEN = re.compile(r"<[^>]*>|\n+")
_IMAGES_FORMAT = re.compile(r"(?:([1-9]\d{0,3})x)?([1-9]\d{0,5})x([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True)
class ImageCountAndSize:
    count: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ImagesPlan:
    """Sums over all images, except `tower_bytes`."""

    images: ImageCountAndSize
    tiles: int
    tokens: int
    feature_bytes: int
    pixel_bytes: int
    tower_bytes: int
    """0 if the vision tower is not loaded."""

    def to_json_dict(self) -> dict[str, Any]:
        images = self.images
        return {
            "count": images.count,
            "width": images.width,
            "height": images.height,
            "tiles": self.tiles,
            "tokens": self.tokens,
            "feature_bytes": self.feature_bytes,
            "kept_feature_bytes": ENCODER_CACHE_BYTES,
            "pixel_bytes": self.pixel_bytes,
            "tower_bytes": self.tower_bytes,
        }


def parse_image_count_and_size(text: str) -> ImageCountAndSize:
    match = _IMAGES_FORMAT.fullmatch(text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"COUNTxWIDTHxHEIGHT, as 1x1024x1024, got {text!r}")
    count, width, height = (int(each or 1) for each in match.groups())
    if width * height > MAX_PIXELS:
        raise argparse.ArgumentTypeError(f"an image of more than {MAX_PIXELS:,} pixels is not read")
    return ImageCountAndSize(count, width, height)


def load_required_vision_spec(model: str, revision: str | None, raw: dict[str, Any], folder: Path | None) -> VisionSpec:
    """May fetch processor files. Raises ModelError, or ConfigError if the model reads no images."""
    vision: VisionSpec | None = None
    if can_read_images(raw):
        for file in _PROCESSOR_FILES if folder is None else ():
            folder = fetch_config(resolve_hub_name(model), revision, (file,), Path())
        assert folder is not None
        vision = read_vision_spec(folder, raw)
    if vision is None:
        raise ConfigError("--images: this model does not accept images here")
    return vision


def plan_images(images: ImageCountAndSize, vision: VisionSpec, estimate: Estimate) -> ImagesPlan:
    from PIL import Image  # takes 10 ms

    layout = vision.make_layout(images.width, images.height, has_other_images=images.count > 1)
    width, count = DTYPE_BYTES[estimate.dtype], images.count
    contents = layout.iter_resized_images(Image.new("RGB", (images.width, images.height)))
    return ImagesPlan(
        images,
        count * len(layout.token_run_lengths),
        count * len(_PLACEHOLDER_TOKEN.findall(layout.placeholder_text(lambda token: "<>"))),
        count * layout.num_tokens * estimate.sizes.hidden_size * width,
        count * sum(len(each.pixels) for each in contents),
        estimate.sizes.tower_bytes(width, estimate.config.online_quantization),
    )
