"""--cpu-offload-gb, with a CPU in a GPU's place: the bits of a model that is all on the device, in eager steps and
graphs; rejected settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.common.errors import ConfigError
from quire.engine.worker.loading import weight_offload
from quire.kernels.streaming.host_layers import HostLayerStreamer
from tests.engine.harness import run
from tests.engine.ranks import thread_ranks
from tests.engine.test_experts_on_disk import answers, engine
from tests.engine.test_ranks import one_thread
from tests.engine.worker.test_graphs import fake_flash, picked, start, traffic
from tests.kernels.fake_capture import FakeCapture
from tests.tiny_models import save_tiny_model

__all__ = ["fake_flash", "one_thread", "thread_ranks"]
pytestmark = pytest.mark.usefixtures("thread_ranks", "one_thread")
REFERENCE: dict[str, Any] = {"attention_backend": "reference", "dtype": "float32"}
SHAPE: dict[str, Any] = {"num_hidden_layers": 5}


@pytest.fixture(autouse=True)
def stands_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears are PyTorch's products, as on a GPU, and their weights may be offloaded."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(weight_offload, "check_offload", lambda *_: None)


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_size": 2}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma2"])
def test_cpu_offload_gives_same_bits_as_device_weights(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family, **(SHAPE if family == "llama" else {"num_hidden_layers": 4}))
    settings = REFERENCE | settings
    expected = answers(engine(path, **settings))
    made = engine(path, **settings, cpu_offload_gb=1.0)
    streamed: Any = made.executor.model.offload  # type: ignore[attr-defined]
    assert isinstance(streamed, HostLayerStreamer)
    assert len(streamed.streamed_layers) == len(made.executor.model.layers)  # type: ignore[attr-defined]
    assert answers(made) == expected  # the same steps, because PyTorch's products may depend on the number of rows
    assert any("are in host memory" in note for note in made.info.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
def test_graph_replay_copies_offloaded_weights_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay copies the weights again, whatever the slots hold."""
    expected = picked(run(start(monkeypatch, None), traffic()))
    capture = FakeCapture()
    made = start(monkeypatch, capture, cpu_offload_gb=1.0)
    streamed: Any = made.executor.model.offload  # type: ignore[attr-defined]
    assert len(streamed.streamed_layers) > 2
    begin = streamed.begin_pass

    def begun() -> None:
        for slot in streamed._slots:
            slot.zero_()
        begin()

    monkeypatch.setattr(streamed, "begin_pass", begun)
    assert picked(run(made, traffic())) == expected
    assert capture.replays > len(capture.recordings) > 2


def test_cpu_offload_below_two_layers_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path, "llama", **SHAPE)
    with pytest.raises(ConfigError, match=r"cpu_offload_gb: 2 layers have memory in any case: only from .* bytes on"):
        engine(path, **REFERENCE, cpu_offload_gb=1e-6)
