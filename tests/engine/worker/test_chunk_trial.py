"""A start on a GPU where chunks of recurrences were never run: see also test_child_trials.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.worker.trials.child_trials import ChildTrials
from tests.engine.harness import run
from tests.engine.worker.fake_cuda import FakeGpu
from tests.engine.worker.test_never_waits import KINDS, gpu, make_requests, start  # noqa: F401
from tests.tiny_models import save_tiny_model

pytest.importorskip("triton", reason="there is no Triton for this platform")


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """Saved before the fake GPU's libraries are installed, which transformers would look for."""
    return save_tiny_model(tmp_path, "qwen3_5")


@pytest.mark.slow
@pytest.mark.parametrize("failure", [None, "chunks of a recurrence differ from single tokens"])
def test_trial_decides_whether_long_prompts_are_chunked_and_neither_way_waits(
    model_path: Path,
    gpu: FakeGpu,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    failure: str | None,
) -> None:
    from quire.kernels.gpu import triton_launch_sizes

    monkeypatch.setattr(triton_launch_sizes, "is_hopper", lambda device: False)
    monkeypatch.setattr(triton_launch_sizes, "cuda_capability", lambda device: 89)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(ChildTrials, "find_failure", lambda *_: failure)
    engine = start(gpu, monkeypatch, graphs=True, attention_backend="triton", model=str(model_path), state_memory=0.1)
    with gpu.allows_waits():
        engine.executor.warm_prompts()
    requests = make_requests({"greedy": KINDS["greedy"]})
    assert {answer.finish_reason for answer in run(engine, requests).values()} == {"length"}
    assert ("advance_chunks" in gpu.launched) == (failure is None)
    note = f"recurrent layers compute long prompts token by token: {failure}"
    assert (note in engine.info.notes) == (failure is not None)
