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
from quire.engine.errors import refuse
from quire.engine.layers.adapters import Adapters
from quire.engine.layers.heads import Head, Stage
from quire.engine.layers.pooling import vector_head
from quire.engine.layers.shard import WHOLE, Shard
from quire.engine.models.decoder import Decoder
from quire.engine.types import Task
from quire.engine.worker.device import Chosen
from quire.engine.worker.loading.adapted import decoder_kind
from quire.engine.worker.loading.check import Checkpoint
from quire.engine.worker.loading.checkpoint import open_weights
from quire.engine.worker.loading.kv_scales import calibrated_scales
from quire.engine.worker.loading.loader import (
    Tensors,
    dummy_stream,
    folders_stream,
    load_weights,
    named_stream,
)
from quire.engine.worker.loading.on_disk import completed, lies_on_disk, start_offload
from quire.engine.worker.memory import check_context, most_tokens, return_freed
from quire.kernels.backend import Backend
from quire.kernels.gpu.others import is_other
from quire.kernels.kv_codes import KVScales


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or a rank's part of one, and what it was made of."""

    model: Decoder
    head: Head
    """What makes vectors' numbers of hidden states."""
    pooling: Pooling
    """How it makes vectors."""
    tasks: tuple[Task, ...]
    checkpoint: Checkpoint
    adapters: Adapters | None
    quantization: str
    """How the weights are stored in few bits, for people to read."""
    read_bytes: int
    """Of all weights, as they were read."""
    groups: PageGroups
    """Of all layers of the model."""


def load_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    chosen: Chosen,
    progress: Callable[[], None],
    tensors: Tensors | None = None,
    shard: Shard = WHOLE,
    kind: type[Decoder] = Decoder,
    stage: int = -1,
) -> LoadedModel:
    """The model at `path`, its weights from `tensors` if there are any; `shard`: whose part of each layer; `stage`:
    which of a pipeline's, by default the last one, which alone has all layers. Raises ConfigError."""
    stored, device, dtype, backend = stored_at(config), chosen.device, chosen.dtype, chosen.backend
    files = stored if tensors is None else None
    layers = stage_layers(chosen.spec.num_layers, config.pipeline_parallel_size)[stage]
    on_disk = lies_on_disk(config, chosen.spec)
    if shard.rank == 0 and layers.stop == chosen.spec.num_layers:  # once, in the engine
        check_files(config, device, dtype, files, chosen.spec.num_layers, on_disk)
    pooling, tasks = read_tasks(path, model_config, config)
    length = longest_context(config, model_config, chosen)
    weights = open_weights(config, stored, model_config, backend, dtype, tensors)
    held = page_numbers(config, files, chosen.kv_dtype)
    offload = start_offload(config, stored, model_config, chosen, tensors)
    room = adapter_room(config, backend, dtype, device)
    kept, positions = keeps_all(config) is not None, model_config.max_position
    groups = page_groups(chosen.spec.layer_states, positions, backend.block_size, keep_all=kept)
    model = decoder_kind(model_config, kind)(
        chosen.spec,
        backend,
        weights.scheme,
        dtype=dtype,
        device=device,
        max_model_len=length,
        progress=progress,
        head=needs_logits(pooling, tasks),
        kv_dtype=held[0],
        kv_scales=held[1],
        adapters=room,
        shard=shard,
        groups=groups_of_stage(groups, layers),
        layers=layers,
        offload=offload,
    )
    if room is not None:
        room.elsewhere = model.elsewhere
    head = vector_head(pooling, backend, decoder_classifier, chosen.spec.hidden_size)
    folders = tuple(each.folder for each in pooling.dense)
    checkpoint = Checkpoint(model.parameters() | head.parameters(), folders, model.elsewhere)
    with completed(model, config):
        read = fill(checkpoint, config, device, model.converted(weights.stream), files, on_disk)
    return LoadedModel(model, head, pooling, tasks, checkpoint, room, weights.quantization, read, groups)


def needs_logits(pooling: Pooling, tasks: Collection[Task]) -> bool:
    return "generate" in tasks or pooling.score_tokens is not None


def longest_context(config: EngineConfig, model_config: ModelConfig, chosen: Chosen) -> int:
    """The context's length until plan_kv fits it, once the weights are loaded: the longest that might fit. Raises
    ConfigError where the model has fewer positions than were asked for, or the KV cache, whatever the weights leave
    for it, has no room for so many tokens."""
    check_positions(model_config, config.max_model_len)
    of_columns, of_pages = chosen.dtype.itemsize, chosen.kv_dtype.itemsize
    states = chosen.spec.states
    token_bytes = sum(each.numbers * (of_columns if isinstance(each, ColumnState) else of_pages) for each in states)
    if config.max_model_len is None:
        most = most_tokens(config, max(token_bytes, 1), chosen.device, chosen.backend.block_size)
        return min(model_config.max_position, most)
    # Layers with a window keep few tokens; so all pages there are may be the others'.
    kept = sum(each.numbers * of_pages for each in states if isinstance(each, PagedState) and each.window is None)
    if kept and (config.num_kv_blocks is None or not any(each.window for each in states)):
        check_context(config, kept, chosen.device, chosen.backend.block_size)
    return config.max_model_len


def check_files(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    path: Path | None,
    layers: int,
    on_disk: re.Pattern[str] | None = None,
) -> None:
    """Raise ConfigError where a CPU's memory has no room for the weights of so many layers in the files at `path`.
    on_disk: as lies_on_disk gives it."""
    if device.type == "cpu" and config.load_format == "auto" and path is not None:
        stored = read_stored_weights(path, without_mtp(layers), without=on_disk)
        check_room(stored, str(dtype).removeprefix("torch."), config.at_load)


def page_numbers(
    config: EngineConfig, path: Path | None, held: torch.dtype
) -> tuple[torch.dtype, Mapping[str, KVScales]]:
    """What pages hold, and by layer the scales of 8-bit floats, where the checkpoint at `path` has some."""
    calibrated = held == torch.float8_e4m3fn and config.load_format == "auto"
    return held, calibrated_scales(path) if calibrated and path is not None else {}


def adapter_room(config: EngineConfig, backend: Backend, dtype: torch.dtype, device: torch.device) -> Adapters | None:
    """Room for adapters, where they are served. Raises ConfigError where they cannot be."""
    if not config.enable_lora:
        return None
    refuse(
        "enable_lora",
        is_other(device) and f"adapters are served on CPUs and on GPUs of CUDA's alone so far, not on {device.type}",
        device.type == "cuda" and find_spec("triton") is None and "on a GPU it needs Triton (pip install triton)",
    )
    return Adapters(backend, config.max_loras, config.max_lora_rank, dtype, device)


def fill(
    checkpoint: Checkpoint,
    config: EngineConfig,
    device: torch.device,
    stream: Tensors,
    path: Path | None,
    on_disk: re.Pattern[str] | None = None,
) -> int:
    """Load a model's weights from the stream, and those of its dense modules from their folders in `path`, if that is
    where they are; or make them up. Returns their bytes. on_disk: as lies_on_disk gives it."""
    table = checkpoint.table
    whole = chain(
        named_stream(stream, table, checkpoint.unused),
        () if path is None else folders_stream(path, checkpoint.folders),
    )
    if config.load_format == "dummy":
        if device.type == "cpu":
            embedding, *_ = table.values()  # of the model's type, while a head of its own is float32
            here = [each for name, each in table.items() if on_disk is None or not on_disk.search(name)]
            sizes = StoredWeights(sum(math.prod(each.shape) for each in here), 0)
            check_room(sizes, str(embedding.dtype).removeprefix("torch."), config.at_load)
        whole = chain(dummy_stream(table, config.seed, device))
    given = path is None or config.weights is not None  # by a trainer, whose steps may have gone wrong
    with torch.inference_mode():
        size = load_weights(table, whole, device=device, finite=given and config.load_format != "dummy")
    return_freed()
    return size


def decoder_classifier(hidden: int, labels: int) -> list[Stage]:
    """The head of a decoder's ForSequenceClassification."""
    return [Stage("score", hidden, labels, bias=False)]
