from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from quire.engine.checkpoint.tensor_headers import find_weight_files, text_tensor_name
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.worker.loading.weight_loader import iter_file_tensors
from quire.kernels.kv_quantization import KVScales

_SCALE_NAME = re.compile(
    r"layers\.(\d+)\.self_attn\.(?:attn\.)?(?:([kv])_scale|([kv])_proj\.(?:[kv]_scale|output_scale))$"
)
_MAX_SCALES = 2**16


def read_kv_scales(path: Path) -> dict[str, KVScales]:
    """Returns scales by layer name. If a layer has per-head scales, the largest is used. Raises ModelError."""
    scales_by_layer: dict[int, dict[str, float]] = {}
    for shard in find_weight_files(path) if path.is_dir() else ():
        for stored, tensor in iter_file_tensors(shard, lambda stored: _match_scale_name(stored) is not None):
            match = _match_scale_name(stored)
            assert match is not None
            if tensor.numel() > _MAX_SCALES:
                raise ModelError(f"model: {stored} has more numbers than a layer has heads")
            scale = _check_scale(stored, float(tensor.float().max()))
            scales_by_layer.setdefault(int(match[1]), {})[match[2] or match[3]] = scale
    return {
        f"model.layers.{layer}": KVScales(each.get("k", 1.0), each.get("v", 1.0))
        for layer, each in scales_by_layer.items()
    }


def _match_scale_name(stored: str) -> re.Match[str] | None:
    name = text_tensor_name(stored)
    return None if name is None else _SCALE_NAME.search(name)


def _check_scale(name: str, scale: float) -> float:
    if not 0 < scale < math.inf:
        raise ModelError(f"model: {name} is {scale}, and a scale is above 0")
    return scale


def read_fp8_kv_scales(config: EngineConfig, path: Path | None, kv_dtype: torch.dtype) -> Mapping[str, KVScales]:
    """Returns scales by layer name."""
    if path is None or kv_dtype != torch.float8_e4m3fn or config.load_format != "auto":
        return {}
    return read_kv_scales(path)
