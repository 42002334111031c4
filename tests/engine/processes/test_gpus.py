"""Which GPUs a process sees, on machines that are folders, and which of them each replica gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.common.errors import ConfigError
from quire.engine.processes.gpus import (
    CUDA_VARIABLE,
    HIP_VARIABLE,
    INTEL_VARIABLE,
    TorchBuild,
    VisibleGPUs,
    describe_division,
    divide_gpus,
    find_gpus,
    read_torch_build,
)

CUDA, HIP = TorchBuild(cuda="13.0"), TorchBuild(hip="7.1")


def nvidia_machine(root: Path, count: int) -> Path:
    (root / "dev").mkdir(exist_ok=True)
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", *(f"nvidia{index}" for index in range(count))):
        (root / "dev" / name).touch()
    return root


def amd_machine(root: Path, minors: list[int], passed: list[int]) -> Path:
    """Node 0 is the processor. `passed`: render nodes that the container has."""
    (root / "dev/dri").mkdir(parents=True)
    (root / "dev/kfd").touch()
    for minor in passed:
        (root / f"dev/dri/renderD{minor}").touch()
    for node, minor in enumerate([0, *minors]):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        properties = f"caches_count 9\nsimd_count {304 * 4 if node else 0}\ndrm_render_minor {minor}\n"
        (folder / "properties").write_text(properties)
    return root


@pytest.mark.parametrize(
    ("listed", "ids"),
    [
        (None, ("0", "1", "2", "3")),
        ("2,0", ("2", "0")),
        (" 3 , 1 ", ("3", "1")),
        ("GPU-8932f937,GPU-6eeb0ca7", ("GPU-8932f937", "GPU-6eeb0ca7")),
        ("MIG-a1,MIG-b2,MIG-c3", ("MIG-a1", "MIG-b2", "MIG-c3")),
        ("0,-1,1", ("0",)),  # CUDA ignores what follows an invalid index
        ("1,9,2", ("1",)),
        ("0,,1", ("0",)),
    ],
)
def test_visible_devices_list_is_read_like_cuda(tmp_path: Path, listed: str | None, ids: tuple[str, ...]) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    gpus = find_gpus("auto", CUDA, environment, nvidia_machine(tmp_path, 4))
    assert gpus == VisibleGPUs(CUDA_VARIABLE, ids)


def test_gpu_listed_twice_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES: names GPU 1 twice"):
        find_gpus("auto", CUDA, {"CUDA_VISIBLE_DEVICES": "1,1"}, nvidia_machine(tmp_path, 4))


def test_auto_finds_no_gpus_if_torch_would_use_cpu(tmp_path: Path) -> None:
    assert find_gpus("cpu", CUDA, {}, nvidia_machine(tmp_path, 2)) is None
    assert find_gpus("auto", TorchBuild(), {}, tmp_path) is None
    assert find_gpus("auto", HIP, {}, tmp_path) is None, "AMD's PyTorch beside NVIDIA's GPUs"
    for hidden in ("", "-1"):
        assert find_gpus("auto", CUDA, {"CUDA_VISIBLE_DEVICES": hidden}, tmp_path) is None
    (tmp_path / "none").mkdir()
    assert find_gpus("auto", CUDA, {}, tmp_path / "none") is None
    assert find_gpus("cuda", CUDA, {}, tmp_path / "none") == VisibleGPUs(CUDA_VARIABLE, ()), "none is too few"


def test_amd_gpus_are_those_of_container(tmp_path: Path) -> None:
    root = amd_machine(tmp_path, [128, 136, 144, 152], passed=[128, 144])
    assert find_gpus("auto", HIP, {}, root) == VisibleGPUs(HIP_VARIABLE, ("0", "1"))
    assert find_gpus("auto", HIP, {"HIP_VISIBLE_DEVICES": "1"}, root) == VisibleGPUs(HIP_VARIABLE, ("1",))
    both = {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert find_gpus("auto", HIP, both, root) == VisibleGPUs(HIP_VARIABLE, ("1",)), "HIP prefers its own"
    assert find_gpus("auto", HIP, {"CUDA_VISIBLE_DEVICES": "1,0"}, root) == VisibleGPUs(HIP_VARIABLE, ("1", "0"))
    assert find_gpus("auto", HIP, {"ROCR_VISIBLE_DEVICES": "1"}, root) == VisibleGPUs(HIP_VARIABLE, ("0",))
    assert find_gpus("auto", CUDA, {}, root) is None, "CUDA's PyTorch beside AMD's GPUs"


def test_intel_gpus_are_found_among_drm_devices(tmp_path: Path) -> None:
    (tmp_path / "dev/dri").mkdir(parents=True)
    for name, vendor in (("renderD128", "0x8086"), ("renderD129", "0x10de"), ("renderD130", "0x8086")):
        (tmp_path / "dev/dri" / name).touch()
        (tmp_path / "sys/class/drm" / name / "device").mkdir(parents=True)
        (tmp_path / "sys/class/drm" / name / "device/vendor").write_text(f"{vendor}\n")
    assert find_gpus("xpu", None, {}, tmp_path) == VisibleGPUs(INTEL_VARIABLE, ("0", "1"))
    tiles = find_gpus("xpu", None, {"ZE_AFFINITY_MASK": "0.0,0.1,1.0"}, tmp_path)
    assert tiles == VisibleGPUs(INTEL_VARIABLE, ("0.0", "0.1", "1.0"))


def test_replicas_get_adjacent_gpus_in_order() -> None:
    gpus = VisibleGPUs(CUDA_VARIABLE, ("7", "GPU-b", "2", "1", "0"))
    parts = divide_gpus(gpus, 2, 2)
    assert parts == [("7", "GPU-b"), ("2", "1")]
    assert describe_division(parts) == "replica 0 on GPUs 7 and GPU-b, replica 1 on GPUs 2 and 1"
    assert describe_division([("3",)]) == "replica 0 on GPU 3"


@pytest.mark.parametrize(
    ("ids", "each", "message"),
    [
        ((), 1, "data_parallel_size: 2 replicas need 2 GPUs, and 0 are visible here; CUDA_VISIBLE_DEVICES may"),
        (("5",), 1, "2 replicas need 2 GPUs, and 1 is visible"),
        (("0", "1", "2"), 2, "2 replicas of 2 GPUs each .tensor_parallel_size. need 4 GPUs, and 3 are visible"),
    ],
)
def test_error_for_too_few_gpus_has_counts(ids: tuple[str, ...], each: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        divide_gpus(VisibleGPUs(CUDA_VARIABLE, ids), 2, each)
    assert raised.value.param == "data_parallel_size"


def test_torch_build_is_read_from_version_file() -> None:
    assert read_torch_build() == TorchBuild(torch.version.cuda, torch.version.hip)
