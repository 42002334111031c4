"""Explains why a GPU that seems to be present is not used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from quire.engine.common.config import EngineConfig
from quire.engine.processes.gpus import CUDA_VARIABLE, HIP_VARIABLE

_CONTAINER_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
"""NVIDIA's container runtime gives the container these GPUs."""
_NO_GPUS = ("", "void", "none")


def unused_gpu_note(
    config: EngineConfig,
    device: torch.device,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> str | None:
    """`root`: the folder that contains dev."""
    if config.device != "auto" or device.type != "cpu":
        return None
    is_hidden = any(environment.get(name) in ("", "-1") for name in (CUDA_VARIABLE, HIP_VARIABLE))
    found = None if is_hidden else _amd_reason(root) or _container_reason(environment)
    return found and f"{found}. This server computes on the CPU; --device cpu says that it should"


def _amd_reason(root: Path) -> str | None:
    kfd = root / "dev/kfd"
    if not kfd.exists():
        return None
    here, build = "an AMD GPU is here (/dev/kfd)", f"PyTorch {torch.__version__}"
    if torch.version.hip is None:
        return f"{here}, but {build} was built without ROCm: install AMD's build, or use the image for ROCm"
    if not os.access(kfd, os.R_OK | os.W_OK):
        return f"{here}, but uid {os.getuid()} may not open it: add the groups video and render"
    return f"{here}, but {build} finds none: a container needs --device /dev/kfd and --device /dev/dri"


def _container_reason(environment: Mapping[str, str]) -> str | None:
    wanted = environment.get(_CONTAINER_VARIABLE, "")
    if wanted in _NO_GPUS:
        return None
    return (
        f"this container is made for NVIDIA GPUs ({_CONTAINER_VARIABLE}={wanted}), but has none and no driver: start "
        "it with --gpus all on a machine with NVIDIA's driver and Container Toolkit, in Kubernetes with a limit of "
        "nvidia.com/gpu"
    )
