from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.moe import MoELayerSpec
from quire.engine.checkpoint.config_reader import uses_float32_activations
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, refuse_setting_if
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.models import decoder_spec
from quire.engine.models.requirements import (
    attention_head_dim,
    attention_requirements,
    has_mla,
)
from quire.engine.processes.cpu_cores import usable_cpus
from quire.engine.worker.graphs.graph_capture import CudaGraphCapture
from quire.engine.worker.loading.transformers_support import check_transformers_settings
from quire.engine.worker.trials.backend_trials import choose_trials, find_eager_prefill_reason, make_child_trials
from quire.engine.worker.trials.child_trials import ChildTrials
from quire.engine.worker.trials.chunk_trial import enable_chunks_after_trial
from quire.kernels.backend import Backend
from quire.kernels.backend_selection import BackendTrial, select_backend
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.gpu.other_devices import (
    OTHER_DEVICES,
    is_other_device,
    replacement_dtype_or_none,
    require_other_device,
)
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES
from quire.kernels.probes.backend_probe import GraphCapture

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
_MIN_DRIVERS = {"12": "525", "13": "580"}
"""From NVIDIA's CUDA minor version compatibility table: the oldest driver for each CUDA major version."""
_FOLLOWER_TRIAL_SECONDS = 60.0
"""How long a rank other than the first waits for a trial that the first rank left no verdict of."""
_ONEDNN_ISA = "AVX512_CORE_BF16"
"""Disables AMX in oneDNN. With AMX, a row's bfloat16 product depends on the number of rows (seen for 12 to 32 rows).
oneDNN reads this setting before its first product.
"""


def check_device_supports_attention(device: torch.device, model: ModelConfig, spec: DecoderSpec) -> None:
    """Raises ConfigError."""
    kind, error = model.model_type, None if device.type == "cpu" else spec.gpu_error
    refuse_setting_if("device", error and f"{error} ({kind}): --device cpu")
    states = {"states of sequences (delta nets, Mamba)": spec.needs_state_snapshots, "latent attention": has_mla(spec)}
    on_cuda = "only on CPUs and CUDA GPUs so far: --device cpu"
    refuse_setting_if(
        "device",
        *(f"{what} ({kind}): {on_cuda}" for what, is_used in states.items() if is_used and is_other_device(device)),
    )


def check_kv_dtype_supports_attention(kv_dtype: torch.dtype, spec: DecoderSpec) -> None:
    """Raises ConfigError."""
    refuse_setting_if("kv_cache_dtype", kv_dtype in QUANTIZED_KV_DTYPES and spec.quantized_kv_error)


def configure_cpu(config: EngineConfig) -> None:
    ranks, threads = config.local_world_size, config.threads
    if threads is None:
        threads = torch.get_num_threads()
        threads = threads if "OMP_NUM_THREADS" in os.environ else min(threads, usable_cpus())
    if (each := max(threads // ranks, 1)) != torch.get_num_threads():
        torch.set_num_threads(each)
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _ONEDNN_ISA)


def choose_device(config: EngineConfig) -> torch.device:
    """Raises ConfigError."""
    if config.device in OTHER_DEVICES:
        try:
            other = require_other_device(config.device)
        except ValueError as error:
            raise ConfigError(f"device: {error}", param="device") from error
        return refuse_unassigned_replica(config, other)
    if config.device == "cpu" or torch.cuda.is_available():
        return refuse_unassigned_replica(config, torch.device("cuda" if config.device == "auto" else config.device))
    driver = nvidia_driver_version()
    if driver is not None:
        raise ConfigError(f"device: {_explain_driver_failure(driver)}; --device cpu serves without it", param="device")
    if config.device == "cuda":
        raise ConfigError("device: cuda was requested, but torch finds no NVIDIA GPU", param="device")
    return torch.device("cpu")


def apply_gpu_defaults(config: EngineConfig) -> EngineConfig:
    """Raises ConfigError."""
    if config.max_num_batched_tokens is not None or (device := choose_device(config)).type != "cuda":
        return config
    return config.with_gpu_default_step_tokens(torch.cuda.get_device_properties(device).total_memory)


def refuse_unassigned_replica(config: EngineConfig, device: torch.device) -> torch.device:
    """Raises ConfigError if this replica would share its GPU with other replicas. Replicas that have GPUs of their own
    are started with --device cuda or xpu.
    """
    is_on_gpu = config.data_parallel_size > 1 and device.type != "cpu"
    refuse_setting_if(
        "data_parallel_size",
        is_on_gpu and config.device == "mps" and "Apple's computers have one GPU, and replicas need one each",
        is_on_gpu
        and config.device == "auto"
        and "PyTorch uses a GPU, but /dev lists none to divide: --device cuda with CUDA_VISIBLE_DEVICES names them, "
        "--device cpu serves replicas without",
    )
    return device


def check_non_cuda_accelerator_settings(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError."""
    if not is_other_device(device):
        return
    where = f"not on {device.type}: "
    refuse_setting_if(
        "deterministic", config.deterministic and f"{where}PyTorch's products there may depend on the batch"
    )
    tiers = f"{where}blocks are offloaded only from CPUs and CUDA GPUs so far"
    for name in ("kv_offload_memory", "kv_offload_dir", "kv_offload_tier"):
        refuse_setting_if(name, bool(getattr(config, name)) and tiers)
    for name in ("quantization", "kv_cache_dtype") if device.type == "mps" else ():
        eight = str(getattr(config, name)).startswith("fp8")
        refuse_setting_if(name, eight and f"{where}Apple's GPUs have no 8-bit floats; int8 is served")


def nvidia_driver_version(root: Path = Path("/")) -> str | None:
    """None if no NVIDIA driver is found, or if CUDA_VISIBLE_DEVICES hides all GPUs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        if (match := re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)) is not None:
            return match[1]
    except OSError:
        pass
    if (tool := shutil.which("nvidia-smi")) is not None:
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            return done.stdout.strip().splitlines()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            pass
    return "of unknown version" if (root / "dev/nvidia0").exists() else None


def _explain_driver_failure(driver: str, root: Path = Path("/")) -> str:
    cuda_version = torch.version.cuda
    here = f"an NVIDIA driver ({driver}) is loaded"
    if cuda_version is None:
        return f"{here}, but PyTorch {torch.__version__} was built without CUDA: install a build of it with CUDA"
    min_driver = _MIN_DRIVERS.get(cuda_version.split(".")[0])
    but = f"{here}, but PyTorch {torch.__version__}, built for CUDA {cuda_version}, cannot use it"
    if not (root / "dev/nvidia0").exists() and not (root / "dev/dxg").exists():
        return f"{but}, because /dev/nvidia0 does not exist: start the container with --gpus all"
    try:
        torch.cuda.init()
        cause = "no device"
    except (RuntimeError, AssertionError) as error:
        cause = str(error).strip().splitlines()[0]
    needs = (
        ""
        if min_driver is None
        else f"; CUDA {cuda_version} needs driver {min_driver} or later, or a PyTorch for an older CUDA"
    )
    return f"{but} ({cause}){needs}"


@dataclass(frozen=True, slots=True)
class ModelDTypes:
    compute_dtype: torch.dtype
    kv_dtype: torch.dtype
    change_note: str | None
    """Why the dtype differs from the checkpoint's."""


def choose_dtypes(config: EngineConfig, model: ModelConfig, device: torch.device) -> ModelDTypes:
    """Raises ConfigError."""
    if _prefers_float32_activations(config, model, device):
        why = "float32, with quantized weights and keys and values in {}; --dtype bfloat16 computes in that"
        kv_dtype = torch.bfloat16 if config.kv_cache_dtype == "auto" else _KV_DTYPES[config.kv_cache_dtype]
        return ModelDTypes(torch.float32, kv_dtype, why.format(str(kv_dtype).removeprefix("torch.")))
    dtype, change_note = choose_compute_dtype_and_note(config, model, device)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else _KV_DTYPES[config.kv_cache_dtype]
    wrong = None
    if kv_dtype == torch.bfloat16 != dtype:
        if device.type != "cpu":
            wrong = f"on {device.type} keys and values have the model's type, or 8 bits: --dtype bfloat16"
        elif model.transformers_config is not None:
            wrong = "with transformers' class (see --model-impl) they have the model's type: --dtype bfloat16"
    if wrong is not None:
        raise ConfigError(f"kv_cache_dtype: {wrong}", param="kv_cache_dtype")
    return ModelDTypes(dtype, kv_dtype, change_note)


def choose_compute_dtype_and_note(
    config: EngineConfig, model: ModelConfig, device: torch.device
) -> tuple[torch.dtype, str | None]:
    """With Quire's CPU kernels, bfloat16 replaces float16, even if the user asked for float16. If the user asked for no
    dtype, bfloat16 replaces float32 on GPUs from Ampere on, and float16 replaces bfloat16 on older GPUs, whose tensor
    cores support only float16. Raises ConfigError.
    """
    name = config.dtype if config.dtype != "auto" else model.dtype
    note = None
    if name == "float16" and device.type == "cpu":
        name, note = _cpu_float16_substitute_and_note(config)
    elif config.dtype == "auto" and (better := _faster_dtype(name, device)) is not None:
        note, name = f"{better} of the checkpoint's {name}; --dtype {name} keeps it", better
    if name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ConfigError(f"dtype: the checkpoint's {name!r} is not supported; choose one of {known}", param="dtype")
    return _DTYPES[name], note


def _prefers_float32_activations(config: EngineConfig, model: ModelConfig, device: torch.device) -> bool:
    """Quire's CPU kernels round activations anyway, so a bfloat16 residual stream would cause most of the error.
    float32 takes 5 to 10 % more time.
    """
    if config.dtype != "auto" or not uses_float32_activations(model.raw):  # checked first, to avoid loading kernels
        return False
    return device.type == "cpu" and config.attention_backend in ("auto", "cpu") and CpuBackend().missing_reason is None


def _cpu_float16_substitute_and_note(config: EngineConfig) -> tuple[str, str]:
    if config.attention_backend not in ("auto", "cpu"):
        return "float16", "float16 on a CPU takes many times as long as bfloat16: --dtype bfloat16"
    source = "the checkpoint's float16" if config.dtype == "auto" else "float16"
    return (
        "bfloat16",
        f"bfloat16 instead of {source}, slow on CPUs; --dtype float32 keeps all bits, in twice the memory",
    )


def _faster_dtype(name: str, device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    if is_other_device(device):
        return replacement_dtype_or_none(name, device)
    if torch.cuda.get_device_capability(device)[0] >= 8:
        return "bfloat16" if name == "float32" else None
    return "float16" if name == "bfloat16" else None


@dataclass(frozen=True, slots=True)
class DevicePlan:
    spec: DecoderSpec
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    dtype_note: str | None
    backend: Backend
    backend_reason: str
    vision_backend: Backend
    """For the vision tower, whose attention is not sharded under context parallelism."""
    eager_prefill_reason: str | None = None
    """Why CUDA graphs contain decodes but no prefills. None on follower ranks, and if graphs contain prefills too."""
    stepwise_recurrence_reason: str | None = None
    """Why long prompts of recurrent layers are computed token by token."""


def kv_cache_dtype_name(config: EngineConfig, chosen: DevicePlan) -> str:
    """The value "auto" means the model's dtype."""
    if config.kv_cache_dtype != "auto" or chosen.kv_dtype == chosen.dtype:
        return config.kv_cache_dtype
    return str(chosen.kv_dtype).removeprefix("torch.")


def choose_device_plan(
    config: EngineConfig,
    model_config: ModelConfig,
    progress: Callable[[], None] = lambda: None,
    *,
    backend_tried: bool = False,
) -> DevicePlan:
    """`progress` is called repeatedly while a child process tries a backend. Raises ConfigError."""
    check_transformers_settings(config, model_config)
    device = choose_device(config)
    check_non_cuda_accelerator_settings(config, device)
    types = choose_dtypes(config, model_config, device)
    dtype, kv_dtype = types.compute_dtype, types.kv_dtype
    spec = apply_expert_parallel(config, decoder_spec(replace(model_config, max_model_len=config.max_model_len)))
    check_device_supports_attention(device, model_config, spec)
    check_kv_dtype_supports_attention(kv_dtype, spec)
    child_trials = make_child_trials(config, device, nvidia_driver_version, progress)
    if child_trials is not None and backend_tried:  # a rank that is silent for longer counts as lost
        child_trials = replace(child_trials, timeout_seconds=_FOLLOWER_TRIAL_SECONDS)
    backend, why = choose_backend(config, device, (dtype, kv_dtype), spec, child_trials, backend_tried=backend_tried)
    text_backend = context_parallel_backend(config, device, spec, backend) if config.uses_context_parallel else backend
    # Deterministic towers on GPUs encode images one by one, so their kernels may depend on the batch.
    vision_backend = type(backend)() if config.deterministic and device.type == "cuda" else backend
    eager_prefill_reason = (
        None
        if backend_tried
        else find_eager_prefill_reason(config, device, (dtype, kv_dtype), spec, backend, child_trials)
    )
    stepwise_recurrence_reason = enable_chunks_after_trial(text_backend, device, dtype, spec, child_trials)
    return DevicePlan(
        spec,
        device,
        dtype,
        kv_dtype,
        types.change_note,
        text_backend,
        why,
        vision_backend,
        eager_prefill_reason,
        stepwise_recurrence_reason,
    )


def context_parallel_backend(
    config: EngineConfig, device: torch.device, spec: DecoderSpec, backend: Backend
) -> Backend:
    """Raises ConfigError."""
    speculative, parallel_backend = (
        config.speculative_config,
        backend.make_context_parallel_backend(config.decode_context_parallel_size),
    )
    refuse_setting_if(
        "decode_context_parallel_size",
        spec.context_parallel_error(),
        config.nnodes > 1 and "only ranks of one machine can divide tokens so far (nnodes)",
        speculative is not None
        and speculative.has_weights
        and f"speculative_config: {speculative.method!r} has its own KV cache; ngram, suffix and grammar have none",
    )
    assert parallel_backend is not None
    parallel_backend.cuda_graph_support = backend.cuda_graph_support
    return parallel_backend


def apply_expert_parallel(config: EngineConfig, spec: DecoderSpec) -> DecoderSpec:
    """Raises ConfigError."""
    if not config.enable_expert_parallel:
        return spec
    refuse_setting_if(
        "enable_expert_parallel",
        not spec.sublayers_of_kind(MoELayerSpec)
        and "the model has no experts that a file of Quire computes; leave it out",
        config.tensor_parallel_size == 1
        and config.world_size * config.data_parallel_size > 1
        and "experts are divided among the ranks of tensor_parallel_size, which is 1",
    )
    return spec.replace_sublayer_fields(MoELayerSpec, is_expert_parallel=True)


def choose_backend(
    config: EngineConfig,
    device: torch.device,
    types: tuple[torch.dtype, torch.dtype],
    spec: DecoderSpec,
    child_trials: ChildTrials | None = None,
    *,
    backend_tried: bool = False,
) -> tuple[Backend, str]:
    """Returns the backend and the reason for it. Raises ConfigError. Determinism needs Triton on GPUs; on CPUs, some of
    PyTorch's products depend on the batch.
    """
    deterministic = config.deterministic and device.type == "cuda"
    if deterministic and find_spec("triton") is None:
        raise ConfigError("deterministic: needs Triton (pip install triton)", param="deterministic")
    dtype, kv_dtype = types
    attention = attention_requirements(spec, kv_dtype, ranks=config.decode_context_parallel_size)
    head_dim = attention_head_dim(spec, device)
    try:
        trials = [] if backend_tried else choose_trials(config, device, types, spec, child_trials)
        if config.block_size is not None:
            otherwise: list[BackendTrial | None] = [*trials] or [None]
            trials = [partial(_check_block_size_then_try, config.block_size, each) for each in otherwise]
        backend, why = select_backend(
            device,
            dtype,
            head_dim,
            config.attention_backend,
            attention,
            deterministic=deterministic,
            activation_bits=config.activation_bits,
            trials=trials,
        )
    except ConfigError:
        raise
    except ValueError as error:
        pages = config.block_size is not None and config.attention_backend == "auto"
        name = "block_size" if pages else "attention_backend"
        raise ConfigError(f"{name}: {error}", param=name) from error
    if config.deterministic and not backend.is_batch_invariant(device, dtype):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"deterministic: PyTorch's {name} products on this CPU may depend on the batch: use another --dtype",
            param="deterministic",
        )
    return backend, f"{why}; deterministic" if deterministic else why


def _check_block_size_then_try(tokens: int, trial: BackendTrial | None, backend: Backend) -> str | None:
    if backend.block_size != tokens:
        return f"its blocks have {backend.block_size} tokens, not {tokens} (block_size)"
    return None if trial is None else trial(backend)


def make_graph_capture(
    config: EngineConfig, backend: Backend, device: torch.device, spec: DecoderSpec
) -> GraphCapture | None:
    holds = can_capture_decodes(backend, spec)
    return CudaGraphCapture(device) if holds and device.type == "cuda" and not config.enforce_eager else None


def can_capture_decodes(backend: Backend, spec: DecoderSpec) -> bool:
    attention_alone = not spec.sublayers_of_kind(MoELayerSpec) and not spec.needs_state_snapshots
    return backend.cuda_graph_support == "steps" or (backend.cuda_graph_support == "decodes" and attention_alone)
