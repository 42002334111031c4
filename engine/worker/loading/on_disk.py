"""Weights that lie elsewhere than where they are multiplied: a CPU's experts or layers on a disk (weights_on_disk), a
GPU's layers in the host's memory (cpu_offload_gb)."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.kv_plan import GIB, available_host_bytes
from quire.engine.checkpoint.safetensors import LAYERS, ROUTED
from quire.engine.checkpoint.stages import FREE_FOR_LAYERS, STREAM_SLOTS, most_kept, most_streamed
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, refuse
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.schemes import Scheme
from quire.engine.layers.stream.shared_block import SharedBlockSpec
from quire.engine.models.decoder import Decoder
from quire.engine.models.spec import DecoderSpec
from quire.engine.worker.device import Chosen
from quire.engine.worker.loading.checkpoint import open_weights, quantized_bytes
from quire.engine.worker.loading.loader import Tensors
from quire.kernels.backend import Backend
from quire.kernels.experts import ExpertsOnDisk
from quire.kernels.gpu.others import is_other
from quire.kernels.select import experts_on_disk, layers_from_disk
from quire.kernels.streaming.from_host import LayersFromHost
from quire.kernels.streaming.layers import StreamedLayers
from quire.kernels.streaming.offload import Offload

_PARAM, _OF_GPUS = "weights_on_disk", "cpu_offload_gb"
IN_MEMORY = {"tmpfs", "ramfs"}
"""File systems whose files are no files on a disk."""
_MOUNTS = Path("/proc/self/mountinfo")


def start_offload(
    config: EngineConfig, stored: Path, model_config: ModelConfig, chosen: Chosen, tensors: Tensors | None
) -> tuple[Offload, Scheme] | None:
    """Of a model, or of a rank's part, as Decoder takes it. `stored`, `tensors`: as open_weights takes them. Raises
    ConfigError."""
    check_offload(config, model_config, chosen)
    if config.cpu_offload_gb:
        choice = partial(most_streamed, elsewhere=int(config.cpu_offload_gb * GIB))
        made: Offload = LayersFromHost(chosen.backend, chosen.device, choice, STREAM_SLOTS)
    elif config.weights_on_disk is None:
        return None
    else:
        made = _on_disk(config, Path(config.weights_on_disk), chosen)
    return made, open_weights(config, stored, model_config, made.backend, chosen.dtype, tensors).scheme


def check_offload(config: EngineConfig, model_config: ModelConfig, chosen: Chosen) -> None:
    """Raise ConfigError where weights cannot be elsewhere as they were asked for."""
    experts, device = bool(chosen.spec.parts(ExpertsSpec)), chosen.device.type
    by_class = model_config.given is not None and "the model's layers are computed by transformers' class"
    shared = bool(chosen.spec.parts(SharedBlockSpec)) and "layers of the model share weights"
    if config.cpu_offload_gb:
        refuse(
            _OF_GPUS,
            device == "cpu" and "a CPU's weights are in the host's memory; weights_on_disk leaves them on a disk",
            is_other(chosen.device) and f"layers are copied to GPUs of CUDA's alone so far, not to {device}",
            by_class,
            shared,
        )
    if config.weights_on_disk is None:
        asked = config.weights_in_memory is not None
        why = "says how many GiB of weights are kept in memory that are on a disk (weights_on_disk)"
        refuse("weights_in_memory", asked and why)
        return
    refuse(
        _PARAM,
        device != "cpu" and "it is for CPUs; cpu_offload_gb leaves a GPU's layers in the host's memory",
        by_class,
        not experts and shared,
        not hasattr(os, "posix_fallocate") and "this system cannot set a file's bytes aside; it is for Linux",
    )


def _on_disk(config: EngineConfig, folder: Path, chosen: Chosen) -> Offload:
    """A mixture's experts, or else layers."""
    processes, memory = config.ranks_here * config.data_parallel_size, config.weights_in_memory
    made: Offload | None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kind = filesystem(folder)
        refuse(_PARAM, kind in IN_MEMORY and f"{folder} is in memory itself ({kind}); name a folder on a disk")
        if chosen.spec.parts(ExpertsSpec):
            made = experts_on_disk(chosen.backend, folder, int((memory or 0) * GIB) // processes)
        else:
            made = layers_from_disk(chosen.backend, folder, partial(_kept_layers, config, processes), STREAM_SLOTS)
    except OSError as error:
        raise _wrong(f"{folder}: {(error.strerror or str(error)).lower()}") from error
    name = chosen.backend.name
    refuse(_PARAM, made is None and f"backend {name!r} reads no weights from files; --attention-backend cpu does")
    assert made is not None
    return made


def _kept_layers(config: EngineConfig, processes: int, sizes: Sequence[int]) -> list[int]:
    """As Choice has it, in each of so many processes here."""
    asked = config.weights_in_memory
    memory = available_host_bytes() * FREE_FOR_LAYERS if asked is None else asked * GIB
    return most_kept(sizes, int(memory) // processes)


def lies_on_disk(config: EngineConfig, spec: DecoderSpec) -> re.Pattern[str] | None:
    """What the names of tensors have that lie there; None: none do."""
    if config.weights_on_disk is None:
        return None
    return ROUTED if spec.parts(ExpertsSpec) else LAYERS


@contextmanager
def completed(model: Decoder, config: EngineConfig) -> Iterator[None]:
    """Where a model's tensors are put: behind it, they are all there. Raises ConfigError where the disk is full, and
    where weights cannot be elsewhere as they were asked for."""
    offload = model.offload
    if isinstance(offload, StreamedLayers):
        with _asked(config):
            offload.expect(_layer_bytes(model, config, offload.backend))
    try:
        yield
    except OSError as error:
        if config.weights_on_disk is None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        why = (error.strerror or str(error)).lower()
        raise _wrong(f"{config.weights_on_disk} has no room for the weights: {why}") from error
    if isinstance(offload, StreamedLayers):
        with _asked(config):
            offload.settle()  # mixtures are made of the addresses that weights have then
    model.complete()
    if isinstance(offload, ExpertsOnDisk):
        with _asked(config):
            offload.settle()


@contextmanager
def _asked(config: EngineConfig) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise _wrong(str(error), _OF_GPUS if config.cpu_offload_gb else _PARAM) from error


def _layer_bytes(model: Decoder, config: EngineConfig, backend: Backend) -> list[int]:
    """Of each of the process's layers, about: of ranks an even part."""
    table, found = model.parameters(), list[int]()
    for index in model.layers:
        own = {name: each for name, each in table.items() if name.startswith(f"model.layers.{index}.")}
        loaded = sum(math.prod(each.shape) * each.dtype.itemsize for each in own.values())
        at_load = config.at_load is not None and backend.keeps_bits
        found.append((quantized_bytes(own, config) if at_load else loaded) // model.shard.count)
    return found


def _wrong(why: str, param: str = _PARAM) -> ConfigError:
    return ConfigError(f"{param}: {why}", param=param)


def filesystem(folder: Path) -> str:
    """The type of the file system that the folder is on, as Linux names it; "" where that is not known."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    kinds = [line.split(" - ")[1].split()[0] for line in lines if line.split()[2] == number]
    return kinds[-1] if kinds else ""
