"""Makes a model and reads its weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import torch

from quire.engine.checkpoint.alike.mtp import without_mtp
from quire.engine.checkpoint.files import ModelConfig, stored_at
from quire.engine.checkpoint.kv_plan import check_positions, check_room
from quire.engine.checkpoint.page_groups import PageGroups, keeps_all, page_groups
from quire.engine.checkpoint.parts.states import ColumnState, PagedState
from quire.engine.checkpoint.pooling import Pooling, read_tasks
from quire.engine.checkpoint.safetensors import StoredWeights, read_stored_weights
from quire.engine.checkpoint.stages import groups_of_stage, stage_layers
from quire.engine.config import EngineConfig
from quire.engine.errors import refuse_setting
from quire.engine.layers.adapters import AdapterManager
from quire.engine.layers.pooler_head import HeadLayerSpec, PoolerHead
from quire.engine.layers.pooling import make_pooler_head
from quire.engine.layers.shard import UNSHARDED, ModelShard
from quire.engine.layers.sublayer import BuildContext
from quire.engine.models.decoder import Decoder
from quire.engine.types import Task
from quire.engine.worker.device_memory import check_context_length, max_kv_tokens, trim_host_memory
from quire.engine.worker.device_plan import DevicePlan
from quire.engine.worker.loading.checkpoint_weights import open_weights
from quire.engine.worker.loading.kv_scales import read_kv_scales
from quire.engine.worker.loading.transformers_support import decoder_class
from quire.engine.worker.loading.weight_check import ExpectedWeights
from quire.engine.worker.loading.weight_loader import (
    NamedTensors,
    dummy_stream,
    folders_stream,
    load_weights,
    match_table_names,
)
from quire.engine.worker.loading.weight_offload import complete_offload, on_disk_pattern, start_offload
from quire.kernels.backend import Backend
from quire.kernels.gpu.other_devices import is_other_device
from quire.kernels.kv_quantization import KVScales


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or a rank's part of one, and what it was made of."""

    model: Decoder
    pooling_head: PoolerHead
    """What makes vectors' numbers of hidden states."""
    pooling: Pooling
    """How it makes vectors."""
    tasks: tuple[Task, ...]
    expected_weights: ExpectedWeights
    adapter_slots: AdapterManager | None
    quantization: str
    """How the weights are stored in few bits, for people to read."""
    read_bytes: int
    """Of all weights, as they were read."""
    kv_groups: PageGroups
    """Of all layers of the model."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What of a model a process has."""

    shard: ModelShard = UNSHARDED
    """Whose part of each layer."""
    kind: type[Decoder] = Decoder
    """Of a model that transformers' class does not compute."""
    stage: int = -1
    """Which of a pipeline's; the last one alone has all layers where there is no pipeline."""


WHOLE_MODEL = ModelPart()


def load_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    chosen: DevicePlan,
    progress: Callable[[], None],
    tensors: NamedTensors | None = None,
    part: ModelPart = WHOLE_MODEL,
) -> LoadedModel:
    """The `part` of the model at `path`, its weights from `tensors` if there are any. Raises ConfigError."""
    stored = stored_at(config)
    device = chosen.device
    dtype = chosen.dtype
    backend = chosen.backend
    files = stored if tensors is None else None
    layers = stage_layers(chosen.spec.num_layers, config.pipeline_parallel_size)[part.stage]
    on_disk = on_disk_pattern(config, chosen.spec)
    if part.shard.rank == 0 and layers.stop == chosen.spec.num_layers:  # once, in the engine
        check_weights_fit(config, device, dtype, files, chosen.spec.num_layers, on_disk)
    pooling, tasks = read_tasks(path, model_config, config)
    length = max_context_length(config, model_config, chosen)
    weights = open_weights(config, stored, model_config, backend, dtype, tensors)
    kv_scales = read_kv_scales_of_files(config, files, chosen.kv_dtype)
    offload = start_offload(config, stored, model_config, chosen, tensors)
    adapter_slots = make_adapter_slots(config, backend, dtype, device)
    groups = page_groups(
        chosen.spec.layer_cache_specs,
        model_config.max_position,
        backend.block_size,
        keep_all=keeps_all(config) is not None,
    )
    build_context = BuildContext(
        backend=backend,
        scheme=weights.scheme,
        hidden_size=chosen.spec.hidden_size,
        dtype=dtype,
        kv_dtype=chosen.kv_dtype,
        device=device,
        max_model_len=length,
        kv_scales=kv_scales,
        adapters=adapter_slots,
        shard=part.shard,
    )
    model = decoder_class(model_config, part.kind)(
        chosen.spec,
        build_context,
        progress,
        head=needs_logits(pooling, tasks),
        groups=groups_of_stage(groups, layers),
        layers=layers,
        offload=offload,
    )
    if adapter_slots is not None:
        adapter_slots.missing_prefixes = model.missing_prefixes
    head = make_pooler_head(pooling, backend, decoder_classifier, chosen.spec.hidden_size)
    folders = tuple(each.folder for each in pooling.dense)
    expected_weights = ExpectedWeights(model.parameters() | head.parameters(), folders, model.missing_prefixes)
    with complete_offload(model, config):
        read_bytes = fill_weights(
            expected_weights, config, device, model.convert_weights(weights.stream), files, on_disk
        )
    return LoadedModel(
        model, head, pooling, tasks, expected_weights, adapter_slots, weights.quantization, read_bytes, groups
    )


def needs_logits(pooling: Pooling, tasks: Collection[Task]) -> bool:
    return "generate" in tasks or pooling.score_tokens is not None


def max_context_length(config: EngineConfig, model_config: ModelConfig, chosen: DevicePlan) -> int:
    """The context's length until plan_kv fits it, once the weights are loaded: the longest that might fit. Raises
    ConfigError where the model has fewer positions than were asked for, or the KV cache, whatever the weights leave
    for it, has no room for so many tokens."""
    check_positions(model_config, config.max_model_len)
    state_itemsize, kv_itemsize = chosen.dtype.itemsize, chosen.kv_dtype.itemsize
    states = chosen.spec.kv_cache_specs
    token_bytes = sum(
        each.numbers * (state_itemsize if isinstance(each, ColumnState) else kv_itemsize) for each in states
    )
    if config.max_model_len is None:
        max_tokens = max_kv_tokens(config, max(token_bytes, 1), chosen.device, chosen.backend.block_size)
        return min(model_config.max_position, max_tokens)
    # Layers with a window keep few tokens; so all pages there are may be the others'.
    full_token_numbers = sum(
        each.numbers * kv_itemsize for each in states if isinstance(each, PagedState) and each.window is None
    )
    if full_token_numbers and (config.num_kv_blocks is None or not any(each.window for each in states)):
        check_context_length(config, full_token_numbers, chosen.device, chosen.backend.block_size)
    return config.max_model_len


def check_weights_fit(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    path: Path | None,
    layers: int,
    on_disk: re.Pattern[str] | None = None,
) -> None:
    """Raise ConfigError where a CPU's memory has no room for the weights of so many layers in the files at `path`.
    on_disk: as on_disk_pattern gives it."""
    if device.type == "cpu" and config.load_format == "auto" and path is not None:
        stored = read_stored_weights(path, without_mtp(layers), without=on_disk)
        check_room(stored, str(dtype).removeprefix("torch."), config.online_quantization)


def read_kv_scales_of_files(config: EngineConfig, path: Path | None, kv_dtype: torch.dtype) -> Mapping[str, KVScales]:
    """By layer the scales of pages that hold 8-bit floats, where the checkpoint at `path` has some."""
    if path is None or kv_dtype != torch.float8_e4m3fn or config.load_format != "auto":
        return {}
    return read_kv_scales(path)


def make_adapter_slots(
    config: EngineConfig, backend: Backend, dtype: torch.dtype, device: torch.device
) -> AdapterManager | None:
    """Room for adapters, where they are served. Raises ConfigError where they cannot be."""
    if not config.enable_lora:
        return None
    refuse_setting(
        "enable_lora",
        is_other_device(device)
        and f"adapters are served on CPUs and on GPUs of CUDA's alone so far, not on {device.type}",
        device.type == "cuda" and find_spec("triton") is None and "on a GPU it needs Triton (pip install triton)",
    )
    return AdapterManager(backend, config.max_loras, config.max_lora_rank, dtype, device)


def fill_weights(
    expected_weights: ExpectedWeights,
    config: EngineConfig,
    device: torch.device,
    stream: NamedTensors,
    path: Path | None,
    on_disk: re.Pattern[str] | None = None,
) -> int:
    """Load a model's weights from the stream, and those of its dense modules from their folders in `path`, if that is
    where they are; or make them up. Returns their bytes. on_disk: as on_disk_pattern gives it."""
    table = expected_weights.parameter_table
    all_tensors = chain(
        match_table_names(stream, table, expected_weights.optional_prefixes),
        () if path is None else folders_stream(path, expected_weights.extra_folders),
    )
    if config.load_format == "dummy":
        if device.type == "cpu":
            embedding, *_ = table.values()  # of the model's type, while a head of its own is float32
            resident = [each for name, each in table.items() if on_disk is None or not on_disk.search(name)]
            sizes = StoredWeights(sum(math.prod(each.shape) for each in resident), 0)
            check_room(sizes, str(embedding.dtype).removeprefix("torch."), config.online_quantization)
        all_tensors = chain(dummy_stream(table, config.seed, device))
    is_untrusted = path is None or config.weights is not None  # by a trainer, whose steps may have gone wrong
    with torch.inference_mode():
        size = load_weights(
            table, all_tensors, device=device, require_finite=is_untrusted and config.load_format != "dummy"
        )
    trim_host_memory()
    return size


def decoder_classifier(hidden: int, labels: int) -> list[HeadLayerSpec]:
    """The head of a decoder's ForSequenceClassification."""
    return [HeadLayerSpec("score", hidden, labels, bias=False)]
