"""Loads a model's tower, where requests may bring images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from quire.engine.checkpoint.files import ModelConfig, stored_at
from quire.engine.config import EngineConfig
from quire.engine.encoders.siglip import Tower
from quire.engine.images.config import VisionConfig, read_vision
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
    scheme = Unquantized(chosen.backend, chosen.dtype)
    tower = Tower(vision, model_config.hidden_size, chosen.backend, scheme, dtype=chosen.dtype, progress=progress)
    table = tower.parameters()
    dummy = config.load_format == "dummy"
    stream = dummy_stream(table, config.seed, chosen.device) if dummy else image_stream(stored_at(config))
    return LoadedTower(ImageFeatures(tower), "", load_weights(table, stream, device=chosen.device))


def cannot_see(config: EngineConfig, chosen: Chosen, vision: VisionConfig, model_config: ModelConfig) -> str | None:
    """Why an engine of this configuration serves the model's text alone; None: it serves images too."""
    if chosen.device.type != "cpu":
        return "images are read on CPUs alone so far (--device cpu)"
    if config.tensor_parallel_size > 1:
        return "ranks (--tensor-parallel-size) read no images yet"
    if config.pipeline_parallel_size > 1:
        return "stages (--pipeline-parallel-size) read no images yet"
    if vision.image_token_id >= model_config.vocab_size:
        return "image_token_id of its config.json is outside the vocabulary"
    return None
