"""Finds the GPUs that a process sees, and divides them among replicas. Variables such as CUDA_VISIBLE_DEVICES must be
set before a process starts. So the parent, which never imports PyTorch, predicts what PyTorch will see.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from quire.engine.common.errors import ConfigError

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
HIP_VARIABLE = "HIP_VISIBLE_DEVICES"
INTEL_VARIABLE = "ZE_AFFINITY_MASK"
_ROCR_VARIABLE = "ROCR_VISIBLE_DEVICES"
"""Hides GPUs from HIP. HIP_VISIBLE_DEVICES then numbers only the GPUs that are left."""
_INTEL_VENDOR = "0x8086"
PARAM = "data_parallel_size"


class TorchBuild(NamedTuple):
    cuda: str | None = None
    hip: str | None = None


@dataclass(frozen=True, slots=True)
class VisibleGPUs:
    variable: str
    ids: tuple[str, ...]


def read_torch_build() -> TorchBuild:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchBuild()
    try:
        names = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except OSError:
        return TorchBuild()
    return TorchBuild(names.get("cuda"), names.get("hip"))


def find_gpus(
    device: str,
    build: TorchBuild | None = None,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> VisibleGPUs | None:
    """Returns the GPUs that PyTorch uses with this --device; None means the CPU. `root` contains dev and sys. "auto"
    chooses like choose_device (worker/device_plan.py), provided that GPUs are files in /dev. Raises ConfigError if the
    operator names a GPU twice.
    """
    if device not in ("auto", "cuda", "xpu"):
        return None
    if device == "xpu":
        return _visible(INTEL_VARIABLE, environment.get(INTEL_VARIABLE), None, _count_intel_gpus(root))
    build = read_torch_build() if build is None else build
    if build.hip is not None:
        count = _count_amd_gpus(root)
        if (left := environment.get(_ROCR_VARIABLE)) is not None:
            count = min(count, len(_split(left)))
        gpus = _visible(HIP_VARIABLE, visible_list(environment, is_hip=True), count, count)
    elif build.cuda is not None:
        count = _count_nvidia_gpus(root)
        gpus = _visible(CUDA_VARIABLE, visible_list(environment, is_hip=False), count, count)
    else:
        return None
    if device == "auto" and (not count or not gpus.ids):
        return None
    return gpus


def visible_variable(*, is_hip: bool) -> str:
    return HIP_VARIABLE if is_hip else CUDA_VARIABLE


def visible_list(environment: Mapping[str, str], *, is_hip: bool) -> str | None:
    """None means all GPUs. If HIP's variable is not set, CUDA's counts."""
    own = environment.get(visible_variable(is_hip=is_hip))
    return environment.get(CUDA_VARIABLE) if own is None else own


def divide_gpus(gpus: VisibleGPUs, replicas: int, gpus_per_replica: int) -> list[tuple[str, ...]]:
    """Raises ConfigError if there are too few."""
    needed, there = replicas * gpus_per_replica, len(gpus.ids)
    if there < needed:
        each = f" of {gpus_per_replica} GPUs each (tensor_parallel_size)" if gpus_per_replica > 1 else ""
        are = "is" if there == 1 else "are"
        message = (
            f"{PARAM}: {replicas} replicas{each} need {needed} GPUs, and {there} {are} visible here; "
            f"{gpus.variable} may name them"
        )
        raise ConfigError(message, param=PARAM)
    return [gpus.ids[start : start + gpus_per_replica] for start in range(0, needed, gpus_per_replica)]


def describe_division(parts: Sequence[Sequence[str]]) -> str:
    return ", ".join(
        f"replica {index} on GPU{'s' if len(part) > 1 else ''} {' and '.join(part)}" for index, part in enumerate(parts)
    )


def _visible(variable: str, listed: str | None, bound: int | None, count: int) -> VisibleGPUs:
    """`listed`: the variable's value. `bound`: number of existing GPUs; None or 0 if unknown."""
    if listed is None:
        return VisibleGPUs(variable, tuple(map(str, range(count))))
    ids: list[str] = []
    for each in _split(listed):
        if each.lstrip("-").isdigit() and (int(each) < 0 or (bound and int(each) >= bound)):
            break  # CUDA and HIP ignore what follows an invalid index
        if each in ids:
            raise ConfigError(f"{variable}: names GPU {each} twice", param=PARAM)
        ids.append(each)
    return VisibleGPUs(variable, tuple(ids))


def _split(listed: str) -> list[str]:
    entries = [each.strip() for each in listed.split(",")]
    return entries[: entries.index("")] if "" in entries else entries


def _count_nvidia_gpus(root: Path) -> int:
    """A container has files only for its own GPUs. WSL has a single file, which counts as one GPU."""
    files = [each for each in (root / "dev").glob("nvidia[0-9]*") if each.name.removeprefix("nvidia").isdigit()]
    return len(files) or int((root / "dev/dxg").exists())


def _count_amd_gpus(root: Path) -> int:
    """/sys lists all GPUs of the machine. In a container, only the container's GPUs have files in /dev."""
    if not (root / "dev/kfd").exists():
        return 0
    count = 0
    for file in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        try:
            properties = dict(line.split(maxsplit=1) for line in file.read_text("ascii").splitlines() if " " in line)
            is_gpu = int(properties.get("simd_count", 0)) > 0
            minor = int(properties.get("drm_render_minor", 0))
        except (OSError, ValueError):
            continue
        count += is_gpu and (not minor or (root / f"dev/dri/renderD{minor}").exists())
    return count


def _count_intel_gpus(root: Path) -> int:
    count = 0
    for file in (root / "sys/class/drm").glob("renderD*/device/vendor"):
        try:
            vendor = file.read_text("ascii").strip()
        except (OSError, ValueError):
            continue
        count += vendor == _INTEL_VENDOR and (root / "dev/dri" / file.parent.parent.name).exists()
    return count
