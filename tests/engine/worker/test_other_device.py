"""Tests PyTorch devices that are neither CPU nor CUDA: what is chosen for them by name, and a model served on one that
PyTorch computes on the host (tests/engine/worker/other_device.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore
from quire.engine.worker import device_plan as devices
from quire.engine.worker.device_plan import choose_compute_dtype_and_note, choose_device
from quire.kernels.gpu import other_devices
from tests.engine.harness import Answer, request, run
from tests.engine.worker.other_device import other_device, tensor_in_steps
from tests.tiny_models import save_tiny_model

registers = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this PyTorch takes no device that Python computes",
)
PROMPTS = {"short": [5, 6, 7], "long": list(range(3, 60)), "one": [9]}


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "require_other_device", lambda name: other_device())
    monkeypatch.setattr(torch, "tensor", tensor_in_steps)


def engine(path: Path, **options: Any) -> EngineCore:
    return EngineCore(EngineConfig(model=str(path), **{"num_kv_blocks": 64, "dtype": "float32"} | options))


def close(one: dict[str, Answer], other: dict[str, Answer]) -> None:
    for name, answer in one.items():
        assert answer.ids == other[name].ids, name
        pairs = zip(answer.logprobs, other[name].logprobs, strict=True)
        assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in pairs)


@registers
def test_other_device_equals_cpu(other: None, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    requests = [
        request("greedy", PROMPTS["long"], max_tokens=3, logprobs=2),
        request("drawn", PROMPTS["short"], max_tokens=3, temperature=0.9, top_p=0.8, seed=4),
    ]
    device_engine = engine(path, device="mps")
    assert device_engine.info.device == "quire_other:0"
    assert not device_engine.info.deterministic
    assert "sdpa" in device_engine.info.backend
    assert any("PyTorch's own operations compute on quire_other" in note for note in device_engine.info.notes)
    close(run(device_engine, requests), run(engine(path, attention_backend="reference", device="cpu"), requests))


@pytest.mark.slow
@registers
@pytest.mark.parametrize(("family", "backend"), [("llama", "auto"), ("llama", "reference"), ("gemma2", "auto")])
def test_sampling_rules_chunks_and_prefix_cache_equal_cpu(
    family: str, backend: str, other: None, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, family)
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"logprobs": 2},
        "drawn": {"temperature": 0.9, "top_p": 0.8, "top_k": 30, "seed": 4},
        "ruled": {"repetition_penalty": 1.2, "bad_words_ids": ((5, 6),), "logit_bias": {8: 1.0}, "min_tokens": 3},
        "rare": {"temperature": 0.9, "typical_p": 0.8, "xtc_probability": 0.5, "dry_multiplier": 0.8, "seed": 4},
        "prompt": {"prompt_logprobs": 1},
    }
    requests = [
        request(f"{kind} {name}", prompt, max_tokens=12, **params)
        for kind, params in kinds.items()
        for name, prompt in PROMPTS.items()
    ]
    expected = run(engine(path, attention_backend="reference", device="cpu"), requests)
    device_engine = engine(path, attention_backend=backend, device="mps", max_num_batched_tokens=32)
    close(run(device_engine, requests), expected)
    again = run(device_engine, requests)  # with cached prefixes
    assert any(each.cached_tokens for each in again.values())
    close(again, expected)


@pytest.mark.slow
@registers
def test_speculation_on_other_device_equals_cpu(other: None, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    requests = [request(str(at), [5, 6, 7] * at, max_tokens=16, logprobs=0) for at in (2, 5)]
    speculative_engine = engine(path, device="xpu", speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    close(run(speculative_engine, requests), run(engine(path, device="cpu", attention_backend="reference"), requests))


@pytest.mark.slow
@registers
@pytest.mark.parametrize("options", [{"kv_cache_dtype": "int8"}, {"quantization": "int4"}, {"quantization": "int8"}])
def test_quantized_models_on_other_device_equal_cpu(options: dict[str, Any], other: None, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    requests = [request(name, prompt, max_tokens=8, logprobs=0) for name, prompt in PROMPTS.items()]
    options = options | {"attention_backend": "reference"}
    close(run(engine(path, device="mps", **options), requests), run(engine(path, device="cpu", **options), requests))


@registers
def test_unsupported_settings_on_other_device_are_rejected(other: None, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    refused: dict[str, list[Any]] = {
        "tensor_parallel_size": [2],
        "pipeline_parallel_size": [2],
        "data_parallel_size": [2],
        "enable_lora": [True],
        "kv_offload_memory": [1],
        "kv_offload_dir": ["/nowhere"],
        "deterministic": [True],
        "attention_backend": ["triton", "cpu"],
    }
    for name, values in refused.items():
        for value in values:
            with pytest.raises(ConfigError) as raised:
                engine(path, device="mps" if name == "data_parallel_size" else "xpu", **{name: value})
            assert raised.value.param == name


@pytest.mark.parametrize(("name", "whose"), [("mps", "Apple's"), ("xpu", "Intel's")])
def test_device_missing_in_pytorch_is_rejected(name: Any, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getattr(torch, name), "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=rf"{name} was requested, but PyTorch .* finds none of {whose} GPUs"
    ) as raised:
        choose_device(EngineConfig(device=name))
    assert raised.value.param == "device"


def test_xla_device_is_rejected() -> None:
    with pytest.raises(ValueError, match="XLA recompiles for each new shape"):
        EngineConfig(device="xla")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "stored", "bfloat16", "chosen"),
    [
        ("mps", "bfloat16", True, "float16"),
        ("mps", "float32", True, "float16"),
        ("mps", "float16", True, "float16"),
        ("xpu", "bfloat16", True, "bfloat16"),
        ("xpu", "float32", True, "bfloat16"),
        ("xpu", "float16", True, "float16"),
        ("xpu", "bfloat16", False, "float16"),
    ],
)
def test_compute_dtype_depends_on_device_and_checkpoint(
    name: str, stored: str, bfloat16: bool, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda: bfloat16)
    model = read_model_config(save_tiny_model(tmp_path, "llama", dtype=getattr(torch, stored)))
    dtype, note = choose_compute_dtype_and_note(EngineConfig(), model, torch.device(name))
    assert str(dtype) == f"torch.{chosen}"
    assert (note is None) == (stored == chosen)


def test_available_memory_is_read_from_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 4)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device: (7, 9))
    assert other_devices.available_device_bytes(torch.device("mps")) == 6
    assert other_devices.available_device_bytes(torch.device("xpu")) == 7
    assert other_devices.available_device_bytes(torch.device("cpu")) is None


def test_fp8_is_rejected_on_mps_but_not_xpu() -> None:
    for options in ({"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}):
        with pytest.raises(ConfigError, match="no 8-bit floats"):
            devices.check_non_cuda_accelerator_settings(EngineConfig(**options), torch.device("mps"))  # type: ignore[arg-type]
        devices.check_non_cuda_accelerator_settings(EngineConfig(**options), torch.device("xpu"))  # type: ignore[arg-type]
