"""Tests the device, the dtype and the kernel cache folder that a start chooses, with a fake driver and fake folders."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.models import decoder_spec
from quire.engine.worker import device_plan as devices
from quire.engine.worker.device_memory import explain_out_of_memory
from quire.engine.worker.device_plan import (
    check_device_supports_attention,
    choose_compute_dtype_and_note,
    choose_device,
    nvidia_driver_version,
)
from quire.engine.worker.kernel_compilation.kernel_cache import prepare_kernel_cache
from quire.engine.worker.ranks import rank_startup
from quire.engine.worker.trials import backend_trials
from quire.kernels.reference import ReferenceBackend
from tests.kernels.installed import install_flash
from tests.tiny_models import FAMILIES, SHAPE

PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)  Sun Jul 27\n"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def write_driver_version(root: Path, text: str) -> Path:
    folder = root / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(text)
    return root


@pytest.mark.parametrize(("text", "version"), [(PROPRIETARY, "535.104.05"), (OPEN, "580.65.06")])
def test_driver_version_is_read_unless_gpus_are_hidden(
    text: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_driver_version(tmp_path, text)
    assert nvidia_driver_version(root) == version
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert nvidia_driver_version(root) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert nvidia_driver_version(root) == version


def test_driver_version_falls_back_to_nvidia_smi_and_device_file(tmp_path: Path) -> None:
    assert nvidia_driver_version(tmp_path) is None
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    tool.chmod(0o755)
    assert nvidia_driver_version(tmp_path) is None, "a tool without a driver"
    tool.write_text("#!/bin/sh\necho 570.86.15\n")
    assert nvidia_driver_version(tmp_path) == "570.86.15"
    tool.unlink()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert nvidia_driver_version(tmp_path) == "of unknown version"


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_driver_unusable_by_pytorch_raises_config_error(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "nvidia_driver_version", lambda: "535.104.05")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError) as raised:
        choose_device(EngineConfig(device=asked))
    assert raised.value.param == "device"
    for part in ("(535.104.05)", "2.13.0+cpu was built without CUDA", "--device cpu"):
        assert part in raised.value.message
    assert choose_device(EngineConfig(device="cpu")).type == "cpu"


def test_old_driver_error_says_required_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update")

    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    assert "start the container with --gpus all" in devices._explain_driver_failure("535.104.05", tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    message = devices._explain_driver_failure("535.104.05", tmp_path)
    assert message == (
        "an NVIDIA driver (535.104.05) is loaded, but PyTorch 2.13.0+cu130, built for CUDA 13.0, cannot use it (The "
        "NVIDIA driver on your system is too old (found version 12020).); CUDA 13.0 needs driver 580 or later, or a "
        "PyTorch for an older CUDA"
    )


def test_replica_without_own_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(EngineConfig()).type == "cuda"
    assert choose_device(EngineConfig(device="cpu", data_parallel_size=2)).type == "cpu"
    assert choose_device(EngineConfig(device="cuda", data_parallel_size=2)).type == "cuda", "as the parent starts them"
    with pytest.raises(ConfigError, match=r"data_parallel_size.*--device cpu") as raised:
        choose_device(EngineConfig(data_parallel_size=2))
    assert raised.value.param == "data_parallel_size"


def test_auto_device_without_driver_is_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "nvidia_driver_version", lambda: None)
    assert choose_device(EngineConfig()).type == "cpu"
    with pytest.raises(ConfigError, match="torch finds no NVIDIA GPU"):
        choose_device(EngineConfig(device="cuda"))


SLOW = "bfloat16 instead of {}, slow on CPUs; --dtype float32 keeps all bits, in twice the memory"


@pytest.mark.parametrize(
    ("stored", "asked", "device", "capability", "chosen"),
    [
        ("float32", "auto", "cuda", (8, 0), "bfloat16"),
        ("float32", "auto", "cuda", (12, 0), "bfloat16"),
        ("float32", "auto", "cuda", (7, 5), "float32"),
        ("float32", "float32", "cuda", (9, 0), "float32"),
        ("float16", "auto", "cuda", (9, 0), "float16"),
        ("bfloat16", "auto", "cuda", (9, 0), "bfloat16"),
        ("bfloat16", "auto", "cuda", (7, 5), "float16"),
        ("bfloat16", "bfloat16", "cuda", (7, 5), "bfloat16"),
        ("float32", "auto", "cpu", None, "float32"),
        ("float16", "auto", "cpu", None, "bfloat16"),
    ],
)
def test_compute_dtype_of_stored_requested_and_device(
    stored: str, asked: Any, device: str, capability: Any, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config, model = EngineConfig(dtype=asked), SimpleNamespace(dtype=stored)
    dtype, note = choose_compute_dtype_and_note(config, model, torch.device(device))  # type: ignore[arg-type]
    assert dtype == getattr(torch, chosen)
    kept_note = f"{chosen} of the checkpoint's {stored}; --dtype {stored} keeps it"
    assert note == (
        None if stored == chosen else SLOW.format("the checkpoint's float16") if device == "cpu" else kept_note
    )


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_float16_on_cpu_is_replaced_or_noted(backend: str) -> None:
    """Recipes for GPUs pass `--dtype half`; on a CPU a float16 product takes many times as long (issue 58)."""
    config = EngineConfig(dtype="half", attention_backend=backend)  # type: ignore[arg-type]
    dtype, note = choose_compute_dtype_and_note(config, SimpleNamespace(dtype="bfloat16"), torch.device("cpu"))  # type: ignore[arg-type]
    assert dtype == (torch.float16 if backend == "reference" else torch.bfloat16)
    assert note is not None
    assert ("many times as long" if backend == "reference" else SLOW.format("float16")) in note


def test_writable_kernel_cache_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "models/triton"))
    assert prepare_kernel_cache() is None
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "models/triton")
    assert list((tmp_path / "models/triton").iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="there is no /proc here to stand for a read-only folder")
def test_read_only_flash_attn_4_cache_falls_back_to_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "/proc/self/models/flash-attn-4")
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "quack"))
    assert prepare_kernel_cache() is None
    assert "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR" not in os.environ
    assert os.environ["QUACK_CACHE_DIR"] == str(tmp_path / "quack")


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="there is no /proc here to stand for a read-only folder")
def test_read_only_kernel_cache_falls_back_to_user_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/self/models/triton")  # nobody may write there, root included
    own = tmp_path / f"quire-triton-{os.getuid()}"
    note = prepare_kernel_cache(tmp_path)
    assert note is not None
    assert note.startswith(f"Triton's kernels are kept in {own}: uid {os.getuid()} cannot write to /proc/self/models")
    assert os.environ["TRITON_CACHE_DIR"] == str(own)
    assert own.stat().st_mode & 0o777 == 0o700
    knobs = pytest.importorskip("triton.knobs", reason="there is no Triton for this platform")
    assert knobs.cache.dir == str(own), "Triton reads the variable when it needs the folder"


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="there is no /proc here to stand for a read-only folder")
def test_kernel_cache_of_other_user_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/self/models/triton")
    uid = os.getuid()
    (tmp_path / f"quire-triton-{uid + 1}").mkdir()
    with pytest.raises(ConfigError, match=r"it belongs to another user\); set TRITON_CACHE_DIR"):
        prepare_kernel_cache(tmp_path, uid + 1)


def test_missing_c_compiler_raises_config_error() -> None:
    with (
        pytest.raises(ConfigError, match="Triton needs a C compiler"),
        explain_out_of_memory("a step", "x", "Lower it"),
    ):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")
    with pytest.raises(OSError, match="else"), explain_out_of_memory("a step", "x", "Lower it"):
        raise OSError("something else")


def test_kernel_out_of_resources_error_names_attention_backend() -> None:
    out_of_resources = pytest.importorskip("triton.runtime.errors").OutOfResources
    message = "does not compile or fit"
    with pytest.raises(ConfigError, match=message) as raised, explain_out_of_memory("a step", "x", "Lower it"):
        raise out_of_resources(98304, 65536, "shared memory")
    assert raised.value.param == "attention_backend"
    assert "98304" in raised.value.message
    assert "--attention-backend" in raised.value.message


@pytest.mark.parametrize(
    ("family", "kind"),
    [("bloom", "ALiBi of attention"), ("deepseek_v32", "sparse attention"), ("gpt_oss", None), ("olmo2", None)],
)
def test_attention_unsupported_on_gpu_is_rejected(family: str, kind: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | FAMILIES[family]))
    config = read_model_config(tmp_path)
    check_device_supports_attention(torch.device("cpu"), config, decoder_spec(config))
    if kind is None:
        check_device_supports_attention(torch.device("cuda"), config, decoder_spec(config))
    else:
        with pytest.raises(ConfigError, match=f"device: {kind} is served only on CPUs so far \\({family}\\)"):
            check_device_supports_attention(torch.device("cuda"), config, decoder_spec(config))


@pytest.fixture
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention computes correctly, except inside a CUDA graph."""

    def probe(*_: Any, capture: Any, **__: Any) -> Any:
        return lambda backend: None if capture is None else "differs from the reference in a CUDA graph"

    monkeypatch.setattr(backend_trials, "PagedAttentionProbe", probe)
    monkeypatch.setattr(backend_trials, "CudaGraphCapture", lambda device: object())
    triton_paged = pytest.importorskip("quire.kernels.gpu.triton_backend")
    monkeypatch.setattr(triton_paged.TritonBackend, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])  # torch_varlen's kernels do not run there
    install_flash(monkeypatch, None)


@pytest.mark.usefixtures("no_graphs")
@pytest.mark.parametrize("ranks", [1, 2])
def test_backend_that_fails_in_graphs_runs_eager_on_all_ranks(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds on all ranks, though only the first has tried the backend."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | FAMILIES["llama"]))
    monkeypatch.setattr(devices, "choose_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(devices, "choose_dtypes", lambda *_: devices.ModelDTypes(torch.bfloat16, torch.bfloat16, None))
    parallel_options = {"tensor_parallel_size": ranks, "decode_context_parallel_size": ranks}
    config, model = EngineConfig(model=str(tmp_path), **parallel_options), read_model_config(tmp_path)
    chosen = devices.choose_device_plan(config, model)
    assert chosen.backend_reason.startswith("Triton ")
    assert "triton: differs from the reference in a CUDA graph" in chosen.backend_reason.split("; ")
    assert devices.make_graph_capture(config, chosen.backend, chosen.device, chosen.spec) is None
    if ranks > 1:
        monkeypatch.setattr(rank_startup, "check_tensor_parallel", lambda *_, **__: None)
        monkeypatch.setattr(rank_startup, "SpmdRanks", lambda local, *_: local)
        rank_config = rank_startup.start_ranks(config, tmp_path, chosen, lambda: None, None, weights_are_tensors=False)
        assert rank_config.enforce_eager  # type: ignore[attr-defined]


@pytest.mark.parametrize(("family", "sizes"), [("llama", [16]), ("gemma4", [16, 32])])
def test_backend_trials_cover_every_head_dim(
    family: str, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_dims = list[int]()

    def probe(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, *_: Any, **__: Any) -> Any:
        return lambda backend: head_dims.append(dim)

    monkeypatch.setattr(backend_trials, "PagedAttentionProbe", probe)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | FAMILIES[family]))
    spec, types = decoder_spec(read_model_config(tmp_path)), (torch.bfloat16, torch.bfloat16)
    (trial,) = backend_trials.choose_trials(EngineConfig(enforce_eager=True), torch.device("cuda"), types, spec)
    assert trial(ReferenceBackend()) is None
    assert sorted(set(head_dims)) == sizes
    assert len(head_dims) == len(sizes)
