from __future__ import annotations

import math
import re
from itertools import chain
from pathlib import Path

import torch

from quire.engine.checkpoint.kv_cache_plan import check_weights_fit_memory
from quire.engine.checkpoint.mtp_names import make_main_model_filter
from quire.engine.checkpoint.tensor_headers import CheckpointSize, read_checkpoint_size
from quire.engine.common.config import EngineConfig
from quire.engine.worker.device_memory import trim_host_memory
from quire.engine.worker.loading.weight_check import ExpectedWeights
from quire.engine.worker.loading.weight_loader import (
    NamedTensors,
    dummy_stream,
    load_weights,
    prefixed_folders_stream,
    rename_tensors_to_table_names,
)


def check_weights_fit(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    path: Path | None,
    layers: int,
    on_disk: re.Pattern[str] | None = None,
) -> None:
    """Raises ConfigError."""
    if device.type == "cpu" and config.load_format == "auto" and path is not None:
        stored = read_checkpoint_size(path, make_main_model_filter(layers), excluded_pattern=on_disk)
        check_weights_fit_memory(stored, str(dtype).removeprefix("torch."), config.online_quantization)


def fill_weights(
    expected_weights: ExpectedWeights,
    config: EngineConfig,
    device: torch.device,
    stream: NamedTensors,
    path: Path | None,
    on_disk: re.Pattern[str] | None = None,
) -> int:
    """Returns the number of bytes loaded. The pooler's dense modules are read from subfolders of `path`."""
    table = expected_weights.parameter_table
    all_tensors = chain(
        rename_tensors_to_table_names(stream, table, expected_weights.optional_prefixes),
        () if path is None else prefixed_folders_stream(path, expected_weights.extra_folders),
    )
    if config.load_format == "dummy":
        if device.type == "cpu":
            embedding, *_ = table.values()  # has the model's dtype; an untied head is float32
            resident = [each for name, each in table.items() if on_disk is None or not on_disk.search(name)]
            sizes = CheckpointSize(sum(math.prod(each.shape) for each in resident), 0)
            check_weights_fit_memory(sizes, str(embedding.dtype).removeprefix("torch."), config.online_quantization)
        all_tensors = chain(dummy_stream(table, config.seed, device))
    is_untrusted = path is None or config.weights is not None  # a trainer's weights may have diverged
    with torch.inference_mode():
        size = load_weights(
            table, all_tensors, device=device, require_finite=is_untrusted and config.load_format != "dummy"
        )
    trim_host_memory()
    return size
