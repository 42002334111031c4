"""The calibrated scales of a checkpoint's keys and values, as compressed-tensors and FP8 checkpoints store them: one
tensor for a layer's keys and one for its values, by which 8-bit floats are multiplied."""

from __future__ import annotations

import math
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from quire.engine.checkpoint.safetensors import text_tensor, weight_files
from quire.engine.errors import ModelError
from quire.kernels.kv_codes import KVScales

_SCALE = re.compile(r"layers\.(\d+)\.self_attn\.(?:attn\.)?(?:([kv])_scale|([kv])_proj\.(?:[kv]_scale|output_scale))$")
_MOST_NUMBERS = 2**16


def calibrated_scales(path: Path) -> dict[str, KVScales]:
    """By the layer's name; {} where a model directory has none. Where every head has a scale of its own, the largest
    is the layer's. Raises ModelError, naming the tensor, for what is no scale."""
    found: dict[int, dict[str, float]] = {}
    for shard in weight_files(path) if path.is_dir() else ():
        try:
            with safe_open(shard, framework="pt") as file:
                for stored in file.keys():  # noqa: SIM118 (it is no dict)
                    if (name := text_tensor(stored)) is None or (match := _SCALE.search(name)) is None:
                        continue
                    if math.prod(file.get_slice(stored).get_shape()) > _MOST_NUMBERS:
                        raise ModelError(f"model: {name} has more numbers than a layer has heads")
                    found.setdefault(int(match[1]), {})[match[2] or match[3]] = _number(
                        name, float(file.get_tensor(stored).float().max())
                    )
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model: {shard.name} cannot be read: {error}") from error
    return {f"model.layers.{layer}": KVScales(each.get("k", 1.0), each.get("v", 1.0)) for layer, each in found.items()}


def _number(name: str, scale: float) -> float:
    if not 0 < scale < math.inf:
        raise ModelError(f"model: {name} is {scale}, and a scale is above 0")
    return scale
