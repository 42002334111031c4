"""CPUs leave experts or layers on disk (weights_on_disk), and GPUs leave layers in host memory (cpu_offload_gb)."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from quire.engine.architecture.moe import MoELayerSpec
from quire.engine.checkpoint.kv_cache_plan import GIB, available_host_bytes
from quire.engine.checkpoint.layer_placement import (
    DEFAULT_LAYER_MEMORY_FRACTION,
    STREAMED_LAYER_SLOTS,
    max_streamed_layers,
    min_streamed_layers,
)
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, refuse_setting_if
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.models.decoder import Decoder
from quire.engine.worker.device_plan import DevicePlan
from quire.engine.worker.loading.checkpoint_weights import open_weights
from quire.engine.worker.loading.model.offload_settings import DISK_PARAM, GPU_PARAM, check_offload
from quire.engine.worker.loading.model.weight_sizes import weight_bytes_after_quantization
from quire.engine.worker.loading.weight_loader import NamedTensors
from quire.kernels.backend import Backend
from quire.kernels.backend_selection import make_disk_experts, make_disk_layer_streamer
from quire.kernels.experts import DiskExperts
from quire.kernels.streaming.host_layers import HostLayerStreamer
from quire.kernels.streaming.layer_streamer import LayerStreamer
from quire.kernels.streaming.weight_offloader import WeightOffloader

MEMORY_FILESYSTEMS = {"tmpfs", "ramfs"}
_MOUNT_INFO = Path("/proc/self/mountinfo")


def make_offloader_and_scheme(
    config: EngineConfig, stored: Path, model_config: ModelConfig, chosen: DevicePlan, tensors: NamedTensors | None
) -> tuple[WeightOffloader, QuantizationScheme] | None:
    """Raises ConfigError."""
    check_offload(config, model_config, chosen)
    if config.cpu_offload_gb:
        choose_layers = partial(max_streamed_layers, offload_bytes=int(config.cpu_offload_gb * GIB))
        offload: WeightOffloader = HostLayerStreamer(chosen.backend, chosen.device, choose_layers, STREAMED_LAYER_SLOTS)
    elif config.weights_on_disk is None:
        return None
    else:
        offload = _make_disk_offloader(config, Path(config.weights_on_disk), chosen)
    return offload, open_weights(config, stored, model_config, offload.backend, chosen.dtype, tensors).scheme


def _make_disk_offloader(config: EngineConfig, folder: Path, chosen: DevicePlan) -> WeightOffloader:
    processes, memory = config.local_world_size * config.data_parallel_size, config.weights_in_memory
    offload: WeightOffloader | None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kind = filesystem_type(folder)
        refuse_setting_if(
            DISK_PARAM,
            kind in MEMORY_FILESYSTEMS and f"{folder} is on an in-memory file system ({kind}); give a folder on a disk",
        )
        if chosen.spec.sublayers_of_kind(MoELayerSpec):
            offload = make_disk_experts(chosen.backend, folder, int((memory or 0) * GIB) // processes)
        else:
            offload = make_disk_layer_streamer(
                chosen.backend, folder, partial(_choose_resident_layers, config, processes), STREAMED_LAYER_SLOTS
            )
    except OSError as error:
        raise _config_error(f"{folder}: {(error.strerror or str(error)).lower()}") from error
    name = chosen.backend.name
    refuse_setting_if(
        DISK_PARAM, offload is None and f"backend {name!r} reads no weights from files; --attention-backend cpu does"
    )
    assert offload is not None
    return offload


def _choose_resident_layers(config: EngineConfig, processes: int, sizes: Sequence[int]) -> list[int]:
    """Returns the layers to stream; the others stay in memory."""
    memory_gib = config.weights_in_memory
    memory = available_host_bytes() * DEFAULT_LAYER_MEMORY_FRACTION if memory_gib is None else memory_gib * GIB
    return min_streamed_layers(sizes, int(memory) // processes)


@contextmanager
def weight_loading_context(model: Decoder, config: EngineConfig) -> Iterator[None]:
    """The weights are final when the context exits. Raises ConfigError."""
    offload = model.offload
    if isinstance(offload, LayerStreamer):
        with _value_error_as_config_error(config):
            offload.set_expected_layer_bytes(_layer_bytes(model, config, offload.backend))
    try:
        yield
    except OSError as error:
        if config.weights_on_disk is None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        why = (error.strerror or str(error)).lower()
        raise _config_error(f"{config.weights_on_disk} has no room for the weights: {why}") from error
    if isinstance(offload, LayerStreamer):
        with _value_error_as_config_error(config):
            offload.finish_loading()  # before experts are packed, which needs final addresses
    model.process_weights_after_loading()
    if isinstance(offload, DiskExperts):
        with _value_error_as_config_error(config):
            offload.finish_loading()


@contextmanager
def _value_error_as_config_error(config: EngineConfig) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise _config_error(str(error), GPU_PARAM if config.cpu_offload_gb else DISK_PARAM) from error


def _layer_bytes(model: Decoder, config: EngineConfig, backend: Backend) -> list[int]:
    table, sizes = model.parameters(), list[int]()
    for index in model.layers:
        layer_table = {name: each for name, each in table.items() if name.startswith(f"model.layers.{index}.")}
        loaded = sum(math.prod(each.shape) * each.dtype.itemsize for each in layer_table.values())
        at_load = config.online_quantization is not None and backend.keeps_weights_quantized
        sizes.append(
            (weight_bytes_after_quantization(layer_table, config) if at_load else loaded) // model.shard.world_size
        )
    return sizes


def _config_error(why: str, param: str = DISK_PARAM) -> ConfigError:
    return ConfigError(f"{param}: {why}", param=param)


def filesystem_type(folder: Path) -> str:
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNT_INFO.read_text().splitlines()
    except OSError:
        return ""
    kinds = [line.split(" - ")[1].split()[0] for line in lines if line.split()[2] == number]
    return kinds[-1] if kinds else ""
