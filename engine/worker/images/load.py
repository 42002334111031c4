"""Loads a model's tower, where requests may bring images."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from quire.engine.checkpoint.files import ModelConfig, stored_at
from quire.engine.config import EngineConfig
from quire.engine.encoders.vision.choose import tower_of
from quire.engine.encoders.vision.tower import TowerMaking
from quire.engine.images.config import read_vision
from quire.engine.images.vision import Vision
from quire.engine.layers.schemes import Unquantized
from quire.engine.types import TEXT_ALONE
from quire.engine.worker.device import Chosen
from quire.engine.worker.images.features import ImageFeatures
from quire.engine.worker.loading.loader import dummy_stream, image_stream, load_weights


class LoadedTower(NamedTuple):
    """What makes features of images, or why there is none."""

    features: ImageFeatures | None
    why_not: str = ""
    weight_bytes: int = 0


def load_tower(
    config: EngineConfig, path: Path, model_config: ModelConfig, chosen: Chosen, progress: Callable[[], None]
) -> LoadedTower:
    """The tower of the model at `path`, in the model's own type: it is not quantized. Raises ModelError for weights
    that are missing or of another shape."""
    vision = None if model_config.given is not None else read_vision(path)
    if vision is None:
        return LoadedTower(None, TEXT_ALONE)
    if (why := cannot_see(config, chosen, vision, model_config)) is not None:
        return LoadedTower(None, why)
    scheme = Unquantized(chosen.of_images, chosen.dtype)
    tower = tower_of(vision, TowerMaking(chosen.of_images, scheme, chosen.dtype, model_config.hidden_size, progress))
    table = tower.parameters()
    if config.load_format == "dummy":
        stream = dummy_stream(table, config.seed, chosen.device)
    else:
        stream = image_stream(stored_at(config), tower.unused)
        if (first := next(stream, None)) is None:
            return LoadedTower(None, "the weights hold no tower for images")
        stream = chain((first,), stream)
    return LoadedTower(ImageFeatures(tower, vision), "", load_weights(table, stream, device=chosen.device))


def cannot_see(config: EngineConfig, chosen: Chosen, vision: Vision, model_config: ModelConfig) -> str | None:
    """Why an engine of this configuration serves the model's text alone; None: it serves images too."""
    if chosen.device.type != "cpu":
        return "images are read on CPUs alone so far (--device cpu)"
    if config.pipeline_parallel_size > 1:
        return "stages (--pipeline-parallel-size) read no images yet"
    if config.divides_tokens and vision.whole:
        return "ranks that divide tokens (--decode-context-parallel-size) read no images whose tokens see each other"
    if vision.image_token_id >= model_config.vocab_size:
        return "image_token_id of its config.json is outside the vocabulary"
    bounds = {"long_prefill_token_threshold": config.long_prefill_token_threshold}
    for name, most in (bounds | {"max_num_batched_tokens": config.step_tokens}).items():
        if vision.whole and most and most < vision.longest:
            return f"{name} is {most}, and an image's {vision.longest} tokens are computed in one step"
    return None
