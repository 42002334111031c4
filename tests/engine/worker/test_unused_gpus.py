"""A GPU that seems to be there and is not used is a sentence of the start, on machines that are folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.engine.worker.startup_steps.unused_gpus import unused_gpu_note

CPU = torch.device("cpu")
ASKED: dict[str, str] = {"NVIDIA_VISIBLE_DEVICES": "all"}


def note(root: Path, environment: dict[str, str], device: Any = "auto") -> str | None:
    return unused_gpu_note(EngineConfig(device=device), CPU, environment, root)


def test_gpu_container_without_driver_notes_how_to_start(tmp_path: Path) -> None:
    told = note(tmp_path, ASKED)
    assert told is not None
    for part in ("NVIDIA_VISIBLE_DEVICES=all", "--gpus all", "nvidia.com/gpu", "computes on the CPU", "--device cpu"):
        assert part in told


@pytest.mark.parametrize("environment", [{}, {"NVIDIA_VISIBLE_DEVICES": "void"}, ASKED | {"CUDA_VISIBLE_DEVICES": ""}])
def test_no_note_if_nothing_is_missing(tmp_path: Path, environment: dict[str, str]) -> None:
    assert note(tmp_path, environment) is None


def test_no_note_if_device_was_chosen(tmp_path: Path) -> None:
    assert note(tmp_path, ASKED, "cpu") is None
    assert unused_gpu_note(EngineConfig(), torch.device("cuda"), ASKED, tmp_path) is None


def test_amd_gpu_with_other_torch_build_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an MI300 with the image for CUDA."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    monkeypatch.setattr(torch.version, "hip", None)
    told = note(tmp_path, ASKED)
    assert told is not None
    assert f"PyTorch {torch.__version__} was built without ROCm: install AMD's build, or use the image for ROCm" in told
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert "finds none: a container needs --device /dev/kfd and --device /dev/dri" in str(note(tmp_path, {}))
    assert note(tmp_path, {"HIP_VISIBLE_DEVICES": "-1"}) is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "add the groups video and render" in str(note(tmp_path, {}))


def test_start_line_has_unused_gpu_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    notes = EngineCore(EngineConfig(num_kv_blocks=8, threads=1)).info.notes
    assert any("--gpus all" in each for each in notes)
