"""Experts that lie on a disk instead of in memory (--experts-on-disk)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.engine.checkpoint.kv_plan import GIB
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.worker.device import Chosen
from quire.kernels.on_disk import ExpertsOnDisk
from quire.kernels.select import experts_on_disk

_IN_MEMORY = {"tmpfs", "ramfs"}
_MOUNTS = Path("/proc/self/mountinfo")


def start_on_disk(config: EngineConfig, chosen: Chosen) -> ExpertsOnDisk | None:
    """What keeps the experts of a model, or of a rank's part, on a disk; None: nothing is to. Raises ConfigError."""
    if config.experts_on_disk is None:
        if config.experts_in_memory is not None:
            wrong = "says how many GiB of experts are kept in memory that are on a disk (experts_on_disk)"
            raise ConfigError(f"experts_in_memory: {wrong}", param="experts_in_memory")
        return None
    folder, made = Path(config.experts_on_disk), None
    if chosen.device.type != "cpu":
        raise _wrong("a GPU's weights are in its memory; it is for CPUs")
    if not chosen.spec.parts(ExpertsSpec):
        raise _wrong("the model has no experts that a file of Quire computes, and of other weights a step reads all")
    if not hasattr(os, "posix_fallocate"):
        raise _wrong("this system cannot set a file's bytes aside; it is for Linux")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (kind := _filesystem(folder)) in _IN_MEMORY:
            raise _wrong(f"{folder} is in memory itself ({kind}); name a folder on a disk")
        processes = config.ranks_here * config.data_parallel_size
        made = experts_on_disk(chosen.backend, folder, int((config.experts_in_memory or 0) * GIB) // processes)
    except OSError as error:
        raise _wrong(f"{folder}: {(error.strerror or str(error)).lower()}") from error
    if made is None:
        raise _wrong(f"backend {chosen.backend.name!r} reads no weights from files; --attention-backend cpu does")
    return made


def settle(on_disk: ExpertsOnDisk) -> str:
    """All weights are there; says what is where. Raises ConfigError where they cannot be as they were asked for."""
    try:
        return on_disk.settle()
    except ValueError as error:
        raise _wrong(str(error)) from error


@contextmanager
def written(config: EngineConfig) -> Iterator[None]:
    """Turns a disk that is full into a ConfigError."""
    try:
        yield
    except OSError as error:
        if config.experts_on_disk is None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        why = (error.strerror or str(error)).lower()
        raise _wrong(f"{config.experts_on_disk} has no room for the experts: {why}") from error


def _wrong(why: str) -> ConfigError:
    return ConfigError(f"experts_on_disk: {why}", param="experts_on_disk")


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
