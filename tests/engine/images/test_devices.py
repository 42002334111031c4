"""Images on a non-CPU device, and the probe that runs before a tower is loaded. The device is PyTorch's test device: it
computes on the host and rejects operations that mix the two (tests/engine/worker/other_device.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.common.config import EngineConfig
from quire.engine.common.request_params import PoolingParams
from quire.engine.common.types import EngineCoreRequest, MediaSpan
from quire.engine.engine_core import EngineCore
from quire.engine.images.vision_config import read_vision_spec
from quire.engine.worker.images import tower_loader
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.libraries.sdpa import SdpaBackend
from quire.kernels.probes.encoder_probe import EncoderProbe
from quire.kernels.reference import ReferenceBackend
from tests.engine.harness import run
from tests.engine.images.test_families import about
from tests.engine.worker.test_other_device import close, other, registers
from tests.server.images.test_pairs import save_pair
from tests.tiny_vision import picture
from tests.vision_families import FAMILIES, save_family

__all__ = ["other"]


def engine(path: Path, device: Any, **options: Any) -> EngineCore:
    plain = {"num_kv_blocks": 96, "dtype": "float32", "device": device}
    backend = {"attention_backend": "reference"} if device == "cpu" else {}
    return EngineCore(EngineConfig(model=str(path), **plain | backend | options))


def image_requests(path: Path, name: str) -> list[EngineCoreRequest]:
    return [about(path, name, "one", 1, max_tokens=4), about(path, name, "two", 2, 3, max_tokens=4)]


@pytest.mark.few(1)
@registers
@pytest.mark.parametrize(
    "name", ["qwen3_vl", *(each for each in FAMILIES if each != "qwen3_vl" and "qwen3_5" not in each)]
)
def test_image_answers_on_other_device_equal_cpu(other: None, name: str, tmp_path: Path) -> None:
    """In one batch, from cached prefixes, and in chunks."""
    path = save_family(tmp_path, name)
    requests = image_requests(path, name)
    expected = run(engine(path, "cpu"), requests)
    other_engine = engine(path, "mps")
    assert not other_engine.info.no_images
    close(run(other_engine, requests), expected)
    close(run(other_engine, requests), expected)
    chunked_engine = engine(path, "mps", max_num_batched_tokens=72)  # Gemma 4's images have 70 tokens each
    assert not chunked_engine.info.no_images
    close(run(chunked_engine, requests), expected)


def image_embedding_request(path: Path, name: str, seed: int) -> EngineCoreRequest:
    """An image alone, as the server requests its embedding."""
    vision = read_vision_spec(path)
    assert vision is not None
    (content,) = vision.make_layout(70, 50).iter_resized_images(picture(seed, 70, 50))
    span = MediaSpan(0, 1, content.digest)
    return EngineCoreRequest(id=name, prompt_ids=[0], params=PoolingParams(), seed=0, spans=(span,), images=(content,))


@registers
def test_image_embeddings_on_other_device_equal_cpu(other: None, tmp_path: Path) -> None:
    path = save_pair(tmp_path, "clip")
    requests = [image_embedding_request(path, "one", 1), image_embedding_request(path, "two", 2)]

    def embeddings(made: EngineCore) -> dict[str, np.ndarray]:
        for each in requests:
            made.add_request(each)
        outputs = [output for _ in range(9) for output in made.step()]
        return {output.id: np.frombuffer(output.vector or b"", dtype="<f4") for output in outputs}

    actual, expected = embeddings(engine(path, "mps")), embeddings(engine(path, "cpu"))
    assert actual.keys() == {"one", "two"}
    for name, vector in actual.items():
        assert vector == pytest.approx(expected[name], abs=1e-5), name


class Wrong(SdpaBackend):
    """Attends causally only, although patches see each other."""

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        return super().paged_attention(q, k_cache, v_cache, metadata, AttentionParams(softmax.scale, softmax.window))


def test_encoder_probe_rejects_backend_with_wrong_attention() -> None:
    probe = EncoderProbe(torch.device("cpu"), torch.bfloat16, 3, 72, has_window=True)
    assert probe(SdpaBackend()) is None
    assert probe(ReferenceBackend()) is None
    reason = probe(Wrong())
    assert reason == "differs from the reference for patches"


@registers
def test_failed_encoder_probe_disables_images_with_reason(
    other: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_family(tmp_path, "qwen2_vl")
    monkeypatch.setattr(tower_loader, "EncoderProbe", lambda *_, **__: lambda backend: "computes nothing")
    served = engine(path, "mps")
    assert served.info.no_images == "images cannot be read on quire_other by sdpa: computes nothing"
