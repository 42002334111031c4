"""Experts that lie on a disk instead of in memory (--experts-on-disk)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.kv_plan import GIB
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, refuse
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.schemes import Scheme
from quire.engine.models.decoder import Decoder
from quire.engine.worker.device import Chosen
from quire.engine.worker.loading.checkpoint import open_weights
from quire.engine.worker.loading.loader import Tensors
from quire.kernels.backend import Backend
from quire.kernels.experts import ExpertsOnDisk
from quire.kernels.select import experts_on_disk

_PARAM = "experts_on_disk"
_IN_MEMORY = {"tmpfs", "ramfs"}
_MOUNTS = Path("/proc/self/mountinfo")


class OnDisk(NamedTuple):
    experts: ExpertsOnDisk
    packing: tuple[Backend, Scheme]
    """As Making has it."""


def start_on_disk(
    config: EngineConfig, stored: Path, model_config: ModelConfig, chosen: Chosen, tensors: Tensors | None
) -> OnDisk | None:
    """What keeps the experts of a model, or of a rank's part, on a disk; None: nothing is to. `stored`, `tensors`: as
    open_weights takes them. Raises ConfigError."""
    if (made := _made(config, chosen)) is None:
        return None
    weights = open_weights(config, stored, model_config, made.backend, chosen.dtype, tensors)
    return OnDisk(made, (made.backend, weights.scheme))


def _made(config: EngineConfig, chosen: Chosen) -> ExpertsOnDisk | None:
    if config.experts_on_disk is None:
        asked = config.experts_in_memory is not None
        why = "says how many GiB of experts are kept in memory that are on a disk (experts_on_disk)"
        refuse("experts_in_memory", asked and why)
        return None
    refuse(
        _PARAM,
        chosen.device.type != "cpu" and "a GPU's weights are in its memory; it is for CPUs",
        not chosen.spec.parts(ExpertsSpec)
        and "the model has no experts that a file of Quire computes, and of other weights a step reads all",
        not hasattr(os, "posix_fallocate") and "this system cannot set a file's bytes aside; it is for Linux",
    )
    folder, made = Path(config.experts_on_disk), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kind = _filesystem(folder)
        refuse(_PARAM, kind in _IN_MEMORY and f"{folder} is in memory itself ({kind}); name a folder on a disk")
        processes = config.ranks_here * config.data_parallel_size
        made = experts_on_disk(chosen.backend, folder, int((config.experts_in_memory or 0) * GIB) // processes)
    except OSError as error:
        raise _wrong(f"{folder}: {(error.strerror or str(error)).lower()}") from error
    name = chosen.backend.name
    refuse(_PARAM, made is None and f"backend {name!r} reads no weights from files; --attention-backend cpu does")
    return made


@contextmanager
def completed(model: Decoder, config: EngineConfig) -> Iterator[None]:
    """Where a model's tensors are put: behind it, they are all there. Raises ConfigError where the disk is full, and
    where experts cannot be as they were asked for."""
    try:
        yield
    except OSError as error:
        if model.on_disk is None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        why = (error.strerror or str(error)).lower()
        raise _wrong(f"{config.experts_on_disk} has no room for the experts: {why}") from error
    model.complete()
    if model.on_disk is not None:
        try:
            model.on_disk.settle()
        except ValueError as error:
            raise _wrong(str(error)) from error


def _wrong(why: str) -> ConfigError:
    return ConfigError(f"{_PARAM}: {why}", param=_PARAM)


def _filesystem(folder: Path) -> str:
    """The type of the file system that the folder is on, as Linux names it; "" where that is not known."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    kinds = [line.split(" - ")[1].split()[0] for line in lines if line.split()[2] == number]
    return kinds[-1] if kinds else ""
