"""Tests how a worker starts, for decoders and encoders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.worker import device_plan
from quire.engine.worker.startup import start_worker
from tests.tiny_encoders import save_tiny_encoder
from tests.tiny_models import save_tiny_model


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_start_worker_limits_threads_to_usable_cpus(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device_plan, "usable_cpus", lambda: 1)
    path = save_tiny_encoder(tmp_path, family) if family == "bert" else save_tiny_model(tmp_path, family)
    start_worker(EngineConfig(model=str(path)), path, read_model_config(path), lambda: None)
    assert torch.get_num_threads() == 1
