"""Loads a model's tower, where requests may bring images."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from quire.engine.checkpoint.files import ModelConfig, stored_at
from quire.engine.checkpoint.kv_plan import QUANTIZED_BITS
from quire.engine.checkpoint.stages import stage_layers
from quire.engine.config import EngineConfig
from quire.engine.encoders.vision.choose import tower_of
from quire.engine.encoders.vision.tower import TowerMaking
from quire.engine.images.config import read_vision
from quire.engine.images.vision import Vision
from quire.engine.layers.quantize import AtLoad
from quire.engine.layers.schemes import Unquantized
from quire.engine.types import TEXT_ALONE
from quire.engine.worker.device import Chosen
from quire.engine.worker.images.features import ImageFeatures, largest
from quire.engine.worker.loading.loader import dummy_stream, image_stream, load_weights
from quire.kernels.backend import Backend
from quire.kernels.gpu.images.probe import PatchesProbe
from quire.kernels.gpu.libraries.sdpa import Sdpa

_LARGEST = 5000
"""By each side, in pixels: what is decoded has no more in all."""
_HELD = 20
"""Numbers of a tower's width that are held for each patch while an image is read: the stream, queries, what attention
gives, keys and values beside their pages, and in these, of which flash-attn's have room for four windows each."""


class LoadedTower(NamedTuple):
    """What makes features of images, or why there is none."""

    features: ImageFeatures | None
    why_not: str = ""
    weight_bytes: int = 0
    step_bytes: int = 0
    """What reading takes on a GPU, where room must be left for it."""


def load_tower(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    chosen: Chosen,
    progress: Callable[[], None],
    *,
    stage: int = 0,
) -> LoadedTower:
    """The tower of the model at `path`, the linears of its layers in as few bits as are asked for; of a pipeline's
    stages the first alone has it, the others know where images stand. Raises ModelError for weights that are missing or
    of another shape."""
    vision = None if model_config.given is not None else read_vision(path)
    if vision is None:
        return LoadedTower(None, TEXT_ALONE)
    if (why := cannot_see(config, chosen, vision, model_config)) is not None:
        return LoadedTower(None, why)
    backend, dtype, device = chosen.of_images, chosen.dtype, chosen.device
    few = config.at_load
    scheme = Unquantized(backend, dtype) if few is None else AtLoad(backend, dtype, few)
    making = TowerMaking(backend, scheme, dtype, model_config.hidden_size, progress, device)
    loaded = _loaded(config, vision, making, reads=not stage)
    if device.type == "cuda" and loaded.features is not None:
        loaded = loaded._replace(step_bytes=_step_bytes(vision, dtype))
    if few is None or not backend.keeps_bits or not loaded.weight_bytes:
        return loaded
    saved = round(vision.linear_numbers * (dtype.itemsize - QUANTIZED_BITS[few] / 8))
    return loaded._replace(weight_bytes=loaded.weight_bytes - saved)


def load_vectors(
    config: EngineConfig,
    path: Path,
    size: int,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[], None],
) -> LoadedTower:
    """The tower beside an encoder of text at `path`, which makes vectors of so many numbers of images. Raises
    ModelError."""
    vision = read_vision(path)
    if vision is None:
        return LoadedTower(None, TEXT_ALONE)
    if device.type != "cpu":
        backend = Sdpa()
        if (why := cannot_read(backend, vision, dtype, device)) is not None:
            return LoadedTower(None, why)
    scheme = Unquantized(backend, dtype)
    return _loaded(config, vision, TowerMaking(backend, scheme, dtype, size, progress, device))


def _loaded(config: EngineConfig, vision: Vision, making: TowerMaking, *, reads: bool = True) -> LoadedTower:
    tower, device = tower_of(vision, making), making.device
    table = tower.parameters()
    if config.load_format == "dummy":
        stream = dummy_stream(table, config.seed, device)
    else:
        stream = image_stream(stored_at(config), tower.unused)
        if (first := next(stream, None)) is None:
            return LoadedTower(None, "the weights hold no tower for images")
        stream = chain((first,), stream)
    if not reads:
        return LoadedTower(ImageFeatures(None, vision))
    apart = config.deterministic and device.type != "cpu"
    return LoadedTower(ImageFeatures(tower, vision, apart=apart), "", load_weights(table, stream, device=device))


def _step_bytes(vision: Vision, dtype: torch.dtype) -> int:
    """Of reading the largest image there may be."""
    shape, most = vision.shape, vision.patches(largest(vision, _LARGEST))
    pixels = 3 * shape.patch_size**2 * (torch.float32.itemsize + 2 * dtype.itemsize)
    return most * (_HELD * shape.hidden_size * dtype.itemsize + pixels)


def cannot_read(backend: Backend, vision: Vision, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why this backend cannot compute a tower on a device that is no CPU, by a trial of what towers are made of."""
    shape, wide = vision.shape, vision.whole
    tried = PatchesProbe(device, dtype, shape.num_heads, shape.hidden_size // shape.num_heads, windowed=wide)
    why = tried(backend)
    return None if why is None else f"images cannot be read on {device.type} by {backend.name}: {why}"


def cannot_see(config: EngineConfig, chosen: Chosen, vision: Vision, model_config: ModelConfig) -> str | None:
    """Why an engine of this configuration serves the model's text alone; None: it serves images too."""
    device = chosen.device
    if device.type != "cpu" and (why := cannot_read(chosen.of_images, vision, chosen.dtype, device)) is not None:
        return why
    first = stage_layers(model_config.num_layers, config.pipeline_parallel_size)[0]
    if len(first) < vision.deep:
        after = f"features are added behind the first {vision.deep} layers"
        return f"{after}, and the first stage (--pipeline-parallel-size) has {len(first)}"
    if config.divides_tokens and vision.whole:
        return "ranks that divide tokens (--decode-context-parallel-size) read no images whose tokens see each other"
    if vision.image_token_id >= model_config.vocab_size:
        return "image_token_id of its config.json is outside the vocabulary"
    bounds = {"long_prefill_token_threshold": config.long_prefill_token_threshold}
    for name, most in (bounds | {"max_num_batched_tokens": config.step_tokens}).items():
        if vision.whole and most and most < vision.longest:
            return f"{name} is {most}, and an image's {vision.longest} tokens are computed in one step"
    return None
