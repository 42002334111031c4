from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from quire.engine.checkpoint.kv_cache_plan import QUANTIZED_BITS
from quire.engine.checkpoint.layer_placement import split_layers_into_stages
from quire.engine.checkpoint.model_resolver import resolve_weights
from quire.engine.common.config import EngineConfig
from quire.engine.common.types import NO_IMAGES_REASON
from quire.engine.encoders.vision.tower import TowerBuildContext
from quire.engine.encoders.vision.tower_factory import make_tower
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.vision.vision_spec import VisionSpec
from quire.engine.images.vision_config import read_vision_spec
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.layers.schemes.online_quantization import OnlineQuantizedScheme
from quire.engine.worker.device_plan import DevicePlan
from quire.engine.worker.images.encoder_cache import ImageEncoderCache, make_dummy_image
from quire.engine.worker.loading.weight_loader import dummy_stream, image_weight_stream, load_weights
from quire.kernels.backend import Backend
from quire.kernels.gpu.libraries.sdpa import SdpaBackend
from quire.kernels.probes.encoder_probe import EncoderProbe

_MAX_SIDE_PIXELS = 5000
"""Decoding rejects square images with a longer side."""
_NUMBERS_PER_PATCH = 20
"""Peak number of values per patch and hidden dimension, for the residual stream, queries, attention output, keys,
values, and KV blocks. The KV blocks have room for four windows, as flash-attn needs.
"""


class LoadedTower(NamedTuple):
    encoder_cache: ImageEncoderCache | None
    text_only_reason: str = ""
    weight_bytes: int = 0
    encoding_bytes: int = 0
    """A GPU's peak memory while it encodes an image."""


def load_tower(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    chosen: DevicePlan,
    progress: Callable[[], None],
    *,
    stage: int = 0,
) -> LoadedTower:
    """Later pipeline stages get only image positions. Raises ModelError."""
    vision = None if model_config.transformers_config is not None else read_vision_spec(path)
    if vision is None:
        return LoadedTower(None, NO_IMAGES_REASON)
    if (why := find_text_only_reason(config, chosen, vision, model_config)) is not None:
        return LoadedTower(None, why)
    backend = chosen.vision_backend
    dtype = chosen.dtype
    device = chosen.device
    quantization = config.online_quantization
    scheme = (
        UnquantizedScheme(backend, dtype)
        if quantization is None
        else OnlineQuantizedScheme(backend, dtype, quantization)
    )
    context = TowerBuildContext(backend, scheme, dtype, model_config.hidden_size, progress, device)
    loaded = _make_and_load_tower(config, vision, context, encodes=not stage)
    if device.type == "cuda" and loaded.encoder_cache is not None:
        loaded = loaded._replace(encoding_bytes=_encoding_bytes(vision, dtype))
    if quantization is None or not backend.keeps_weights_quantized or not loaded.weight_bytes:
        return loaded
    saved = round(vision.num_linear_parameters * (dtype.itemsize - QUANTIZED_BITS[quantization] / 8))
    return loaded._replace(weight_bytes=loaded.weight_bytes - saved)


def load_vector_tower(
    config: EngineConfig,
    path: Path,
    size: int,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[], None],
) -> LoadedTower:
    """Raises ModelError."""
    vision = read_vision_spec(path)
    if vision is None:
        return LoadedTower(None, NO_IMAGES_REASON)
    if device.type != "cpu":
        backend = SdpaBackend()
        if (why := find_tower_backend_error(backend, vision, dtype, device)) is not None:
            return LoadedTower(None, why)
    scheme = UnquantizedScheme(backend, dtype)
    return _make_and_load_tower(config, vision, TowerBuildContext(backend, scheme, dtype, size, progress, device))


def _make_and_load_tower(
    config: EngineConfig, vision: VisionSpec, context: TowerBuildContext, *, encodes: bool = True
) -> LoadedTower:
    tower, device = make_tower(vision, context), context.device
    table = tower.parameters()
    if config.load_format == "dummy":
        stream = dummy_stream(table, config.seed, device)
    else:
        stream = image_weight_stream(resolve_weights(config), tower.unused_prefixes)
        if (first := next(stream, None)) is None:
            return LoadedTower(None, "the weights have no vision tower")
        stream = chain((first,), stream)
    if not encodes:
        return LoadedTower(ImageEncoderCache(None, vision))
    one_by_one = config.deterministic and device.type != "cpu"
    return LoadedTower(
        ImageEncoderCache(tower, vision, one_by_one=one_by_one), "", load_weights(table, stream, device=device)
    )


def _encoding_bytes(vision: VisionSpec, dtype: torch.dtype) -> int:
    shape, max_patches = vision.tower_shape, vision.num_patches(make_dummy_image(vision, _MAX_SIDE_PIXELS))
    pixels = 3 * shape.patch_size**2 * (torch.float32.itemsize + 2 * dtype.itemsize)
    return max_patches * (_NUMBERS_PER_PATCH * shape.hidden_size * dtype.itemsize + pixels)


def find_tower_backend_error(
    backend: Backend, vision: VisionSpec, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Call only for devices other than CPUs."""
    shape, is_windowed = vision.tower_shape, vision.is_bidirectional
    trial = EncoderProbe(device, dtype, shape.num_heads, shape.hidden_size // shape.num_heads, has_window=is_windowed)
    why = trial(backend)
    return None if why is None else f"images cannot be read on {device.type} by {backend.name}: {why}"


def find_text_only_reason(
    config: EngineConfig, chosen: DevicePlan, vision: VisionSpec, model_config: ModelConfig
) -> str | None:
    device = chosen.device
    if (
        device.type != "cpu"
        and (why := find_tower_backend_error(chosen.vision_backend, vision, chosen.dtype, device)) is not None
    ):
        return why
    first = split_layers_into_stages(model_config.num_layers, config.pipeline_parallel_size)[0]
    if len(first) < vision.num_deepstack_layers:
        after = f"features are added after the first {vision.num_deepstack_layers} layers"
        return f"{after}, and the first stage (--pipeline-parallel-size) has {len(first)}"
    if config.uses_context_parallel and vision.is_bidirectional:
        return (
            "ranks that divide tokens (--decode-context-parallel-size) cannot read images whose tokens attend to "
            "each other"
        )
    if vision.image_token_id >= model_config.vocab_size:
        return "image_token_id of its config.json is outside the vocabulary"
    bounds = {"long_prefill_token_threshold": config.long_prefill_token_threshold}
    for name, most in (bounds | {"max_num_batched_tokens": config.max_step_tokens}).items():
        if vision.is_bidirectional and most and most < vision.max_bidirectional_tokens:
            return f"{name} is {most}, and an image's {vision.max_bidirectional_tokens} tokens are computed in one step"
    return None
