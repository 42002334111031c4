"""--weights-on-disk for dense layers: the bits of layers in memory, in every weight format, on ranks and stages, with
adapters and drafts; the memory bound, rejected settings, and disk errors.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.checkpoint.layer_placement import (
    STREAMED_LAYER_SLOTS,
    max_streamed_layers,
    min_streamed_layers,
    pick_evenly_spaced_layers,
)
from quire.engine.checkpoint.tensor_headers import LAYER_PATTERN, read_checkpoint_size
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore, free_engine_memory
from quire.engine.worker.loading import weight_offload
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.cpu.decoder.disk_layers import DiskLayerStreamer
from tests.engine.harness import run
from tests.engine.models.test_moe_fields import told
from tests.engine.ranks import thread_ranks
from tests.engine.test_experts_on_disk import MISSING, answers, engine, tmp_path
from tests.engine.test_ranks import QUANTIZED, asked_with_adapters, one_thread
from tests.gguf_models import write_gguf
from tests.quantized_models import quantize_checkpoint
from tests.tiny_models import save_tiny_model

__all__ = ["one_thread", "thread_ranks", "tmp_path"]
pytestmark = [
    pytest.mark.skipif(MISSING is not None or not hasattr(os, "posix_fallocate"), reason=str(MISSING)),
    pytest.mark.usefixtures("thread_ranks", "one_thread"),
]
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 5}


def write_model(way: str, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A model in this format, and settings."""
    path = save_tiny_model(tmp_path / "model", "qwen3", **WIDE)
    if way in QUANTIZED:
        return quantize_checkpoint(path, tmp_path / "few", *QUANTIZED[way], leave=("lm_head",)), {"dtype": "bfloat16"}
    if way.startswith("Q"):
        return write_gguf(path, tmp_path / "model.gguf", lambda _: way), {"dtype": "bfloat16"}
    return path, {"dtype": way} if way.startswith(("float3", "bf")) else {"quantization": way, "dtype": "bfloat16"}


def keep_layers_in_memory(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """Keep `kept` layers in memory, whatever their size."""
    chosen = lambda sizes, _: pick_evenly_spaced_layers(len(sizes), max(len(sizes) - kept, 0))  # noqa: E731
    monkeypatch.setattr(weight_offload, "min_streamed_layers", chosen)


def layer_streamer(some: EngineCore) -> DiskLayerStreamer:
    streamed: Any = some.executor.model.offload  # type: ignore[attr-defined]
    assert isinstance(streamed, DiskLayerStreamer)
    return streamed


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["bfloat16", "float32", "int8", "int4", "fp8", "gptq", "float8", "Q4_0"])
def test_layers_on_disk_give_same_bits_as_in_memory(way: str, tmp_path: Path) -> None:
    """With no layer in memory and with some; uncached and with cached prefixes."""
    path, settings = write_model(way, tmp_path)
    if settings["dtype"] == "float32" and not CpuBackend().prefers_native_linear(torch.float32):
        pytest.skip("oneDNN multiplies here")
    expected = answers(engine(path, **settings))
    elsewhere = settings | {"weights_on_disk": str(tmp_path / "disk")}
    whole = engine(path, **elsewhere, weights_in_memory=1.0)
    sizes = layer_streamer(whole)._layer_bytes
    assert not layer_streamer(whole).streamed_layers
    assert answers(whole) == expected
    for count, memory in (
        (5, STREAMED_LAYER_SLOTS * max(sizes)),
        (3, sum(sizes[:2]) + STREAMED_LAYER_SLOTS * max(sizes)),
    ):
        some = engine(path, **elsewhere, weights_in_memory=(memory + 4096) / 2**30)
        assert len(layer_streamer(some).streamed_layers) == count
        assert answers(some) == expected
        assert answers(some) == expected
        assert any(f"{5 - count} of 5 are kept in memory" in note for note in some.info.notes)
    assert not list((tmp_path / "disk").iterdir())  # the file has no name


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "qwen3_5", "mamba2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"num_kv_blocks": 24, "max_model_len": 128},
    ],
    ids=str,
)
def test_layers_on_disk_work_with_ranks_stages_drafts_and_preemption(
    family: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path / "model", family, dtype=torch.bfloat16)
    expected = answers(engine(path, **settings))
    keep_layers_in_memory(monkeypatch, 0)
    made = engine(path, **settings, weights_on_disk=str(tmp_path / "disk"))
    assert layer_streamer(made).streamed_layers
    assert answers(made) == expected


@pytest.mark.slow
def test_layers_on_disk_serve_lora_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, requests = asked_with_adapters(tmp_path)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64, "dtype": "bfloat16"}
    expected = {name: told(each) for name, each in run(engine(path, **lora), requests).items()}
    keep_layers_in_memory(monkeypatch, 0)
    made = engine(path, **lora, weights_on_disk=str(tmp_path / "disk"))
    assert layer_streamer(made).streamed_layers
    assert {name: told(each) for name, each in run(made, requests).items()} == expected


@pytest.mark.slow
def test_interrupted_pass_does_not_corrupt_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that fails between two layers leaves any weights in the slots."""
    path = save_tiny_model(tmp_path / "model", "llama", **WIDE, dtype=torch.bfloat16)
    expected = answers(engine(path))
    keep_layers_in_memory(monkeypatch, 0)
    made = engine(path, weights_on_disk=str(tmp_path / "disk"))
    streamed = layer_streamer(made)
    for stop in range(5):
        streamed.begin_pass()
        for layer in range(stop):
            streamed.enter_layer(layer)
            streamed.leave_layer(layer)
        made.reset_prefix_cache()
        assert answers(made) == expected


def test_disk_read_error_fails_step_and_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path / "model", "llama", **WIDE, dtype=torch.bfloat16)
    made = engine(path, weights_on_disk=str(tmp_path / "disk"), weights_in_memory=2 * 300_000 / 2**30)
    expected = answers(made)
    streamed = layer_streamer(made)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        streamed.leave_layer(4)
        for layer in (2, 3, 4):
            with pytest.raises(OSError, match="Input/output error"):
                streamed.enter_layer(layer)
    made.reset_prefix_cache()
    assert answers(made) == expected


def test_streamed_layers_are_evenly_spaced_within_memory_bound() -> None:
    assert pick_evenly_spaced_layers(10, 0) == []
    assert pick_evenly_spaced_layers(10, 10) == list(range(10))
    gaps = {after - before for before, after in pairwise(pick_evenly_spaced_layers(48, 12))}
    assert gaps == {4}
    assert min_streamed_layers([10] * 8, 80) == []
    assert len(min_streamed_layers([10] * 8, 79)) == 3  # five in memory and two slots
    assert len(min_streamed_layers([10] * 8, 20)) == 8
    with pytest.raises(ValueError, match="2 layers have memory at a time, 20 bytes, and 19 are for all"):
        min_streamed_layers([10] * 8, 19)
    assert len(max_streamed_layers([10] * 8, 39)) == 3
    assert len(max_streamed_layers([10] * 8, 1000)) == 8
    for sizes in ([10] * 8, [10] * 2):
        with pytest.raises(ValueError, match="2 "):
            max_streamed_layers(sizes, 29)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"attention_backend": "reference"}, "weights_on_disk: backend 'reference' reads no weights"),
        ({"weights_in_memory": 1e-7}, "weights_on_disk: 2 layers have memory at a time, .* bytes"),
        ({"model_impl": "transformers"}, "weights_on_disk: the model's layers are computed by transformers' class"),
        ({"weights_on_disk": None, "cpu_offload_gb": 1.0}, "cpu_offload_gb: it is only for GPUs"),
    ],
)
def test_layers_on_disk_reject_unsupported_settings(settings: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    with pytest.raises(ConfigError, match=wrong):
        engine(path, **{"weights_on_disk": str(tmp_path), "dtype": "bfloat16"} | settings)


def test_resident_size_excludes_layers(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "llama")
    rest = read_checkpoint_size(path, excluded_pattern=LAYER_PATTERN)
    assert rest is not None
    config = engine(path).executor.model.spec  # type: ignore[attr-defined]
    ends = 1 if config.tie_embeddings else 2
    assert rest.num_floats == (ends * config.vocab_size + 1) * config.hidden_size
    packed = write_gguf(path, tmp_path / "model.gguf", lambda _: "F32")
    found = read_checkpoint_size(packed, excluded_pattern=LAYER_PATTERN)
    assert found is not None
    assert found.num_floats == rest.num_floats


def test_default_memory_bound_is_half_of_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path / "model", "llama", **WIDE, dtype=torch.bfloat16)
    monkeypatch.setattr(weight_offload, "available_host_bytes", lambda: 4 * 300_000)
    assert len(layer_streamer(engine(path, weights_on_disk=str(tmp_path))).streamed_layers) == 5
    monkeypatch.setattr(weight_offload, "available_host_bytes", lambda: 12 * 300_000)
    assert not layer_streamer(engine(path, weights_on_disk=str(tmp_path))).streamed_layers


def test_freed_engine_closes_weight_files_and_reader_thread(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "llama", dtype=torch.bfloat16, **WIDE)

    def files() -> int:
        links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        return sum(str(tmp_path / "disk") in link for link in links)

    made = engine(path, weights_on_disk=str(tmp_path / "disk"), weights_in_memory=2 * 300_000 / 2**30)
    answers(made)
    (thread,) = layer_streamer(made)._reader._threads
    assert files() > 0
    del made
    free_engine_memory()
    thread.join(10)  # a pending read holds the file until it ends
    assert not thread.is_alive()
    assert files() == 0
