"""What computes a model: device, types of numbers, backend, and how decodes become graphs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from quire.engine.checkpoint.families import wide_activations
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, refuse
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.models import decoder_spec
from quire.engine.models.asked import has_chunks, has_latents, has_sinks, head_size, widest
from quire.engine.models.spec import DecoderSpec
from quire.engine.replicas.cores import usable_cpus
from quire.engine.worker.graphs.capture import CudaCapture
from quire.engine.worker.loading.adapted import check_adapted
from quire.engine.worker.trials import choose_trials, why_eager_prompts
from quire.kernels.backend import Backend
from quire.kernels.cpu.backend import Cpu
from quire.kernels.gpu.others import OTHERS, better_type, is_other, other_device
from quire.kernels.probe import Capture
from quire.kernels.select import Trial, select_backend

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PAGES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
_LEAST_DRIVER = {"12": "525", "13": "580"}
"""By the major version of CUDA: the oldest driver for it, from NVIDIA's table of CUDA's minor version compatibility."""
_ONEDNN_ISA = "AVX512_CORE_BF16"
"""With AMX, oneDNN's bfloat16 products of a row depend on the number of rows (seen from 12 to 32). Where our own
kernels do not compute, that breaks the promise of the same tokens. oneDNN reads this before its first product."""


def check_attention(device: torch.device, model: ModelConfig, spec: DecoderSpec) -> None:
    """Raise ConfigError for attention, or what stands in its place, that is not computed there."""
    parts, kind = spec.parts(AttentionSpec), model.model_type
    biased = any(each.alibi is not None for each in parts)
    on_cpus = f"ALiBi of attention ({kind}) is served on CPUs alone so far: --device cpu"
    refuse("device", biased and device.type != "cpu" and on_cpus)
    states = {"states of sequences (delta nets, Mamba)": spec.needs_snapshots, "latent attention": has_latents(spec)}
    on_cuda = "on CPUs and on GPUs of CUDA's alone so far: --device cpu"
    refuse("device", *(f"{what} ({kind}): {on_cuda}" for what, found in states.items() if found and is_other(device)))


def set_up_cpu(config: EngineConfig) -> None:
    """Threads, of which each rank on this machine gets an equal part; and the instructions that PyTorch's own products
    may use."""
    ranks, threads = config.ranks_here, config.threads
    if threads is None:
        threads = torch.get_num_threads()
        threads = threads if "OMP_NUM_THREADS" in os.environ else min(threads, usable_cpus())
    if (each := max(threads // ranks, 1)) != torch.get_num_threads():
        torch.set_num_threads(each)
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _ONEDNN_ISA)


def choose_device(config: EngineConfig) -> torch.device:
    """Raises ConfigError where a GPU cannot be used that was asked for, or that has a driver and so ought to be."""
    if config.device in OTHERS:
        try:
            other = other_device(config.device)
        except ValueError as error:
            raise ConfigError(f"device: {error}", param="device") from error
        return check_replicas(config, other)
    if config.device == "cpu" or torch.cuda.is_available():
        return check_replicas(config, torch.device("cuda" if config.device == "auto" else config.device))
    driver = nvidia_driver()
    if driver is not None:
        raise ConfigError(f"device: {_unusable(driver)}; --device cpu serves without it", param="device")
    if config.device == "cuda":
        raise ConfigError("device: cuda was asked for, but torch finds no NVIDIA GPU", param="device")
    return torch.device("cpu")


def for_card(config: EngineConfig) -> EngineConfig:
    """The configuration with what its GPU decides, if it computes on one. Raises ConfigError as `choose_device`."""
    if config.max_num_batched_tokens is not None or (device := choose_device(config)).type != "cuda":
        return config
    return config.of_card(torch.cuda.get_device_properties(device).total_memory)


def check_replicas(config: EngineConfig, device: torch.device) -> torch.device:
    """The device. Raises ConfigError for replicas on a GPU."""
    refuse(
        "data_parallel_size",
        device.type != "cpu"
        and config.data_parallel_size > 1
        and "replicas are served on CPUs alone so far: --device cpu, or a server for each GPU",
    )
    return device


def check_other(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError for what is not served on a device of PyTorch's that is neither a CPU nor one of CUDA's."""
    if not is_other(device):
        return
    where = f"not on {device.type}: "
    refuse("deterministic", config.deterministic and f"{where}PyTorch's products there may depend on the batch")
    tiers = f"{where}pages are kept beside the cache of CPUs and of CUDA's GPUs alone so far"
    for name in ("kv_offload_memory", "kv_offload_dir", "kv_offload_tier"):
        refuse(name, bool(getattr(config, name)) and tiers)
    for name in ("quantization", "kv_cache_dtype") if device.type == "mps" else ():  # it has no float8 at all
        eight = str(getattr(config, name)).startswith("fp8")
        refuse(name, eight and f"{where}Apple's GPUs have no 8-bit floats; int8 is served")


def nvidia_driver(root: Path = Path("/")) -> str | None:
    """The version of the NVIDIA driver that is loaded, "of unknown version" if it does not say; None: there is none, or
    CUDA_VISIBLE_DEVICES hides every GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        if (found := re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", text)) is not None:
            return found[1]
    except OSError:
        pass
    if (tool := shutil.which("nvidia-smi")) is not None:
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            return done.stdout.strip().splitlines()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            pass  # a tool without a driver
    return "of unknown version" if (root / "dev/nvidia0").exists() else None


def _unusable(driver: str, root: Path = Path("/")) -> str:
    """Why PyTorch cannot use the GPU of this driver, and what would help."""
    built = torch.version.cuda
    here = f"an NVIDIA driver ({driver}) is loaded"
    if built is None:
        return f"{here}, but PyTorch {torch.__version__} was built without CUDA: install a build of it with CUDA"
    least = _LEAST_DRIVER.get(built.split(".")[0])
    but = f"{here}, but PyTorch {torch.__version__}, built for CUDA {built}, cannot use it"
    if not (root / "dev/nvidia0").exists() and not (root / "dev/dxg").exists():
        return f"{but}, for there is no /dev/nvidia0: start a container with --gpus all"
    try:
        torch.cuda.init()
        said = "no device"
    except (RuntimeError, AssertionError) as error:
        said = str(error).strip().splitlines()[0]
    needs = "" if least is None else f"; CUDA {built} needs driver {least} or later, or a PyTorch for an older CUDA"
    return f"{but} ({said}){needs}"


@dataclass(frozen=True, slots=True)
class Types:
    computed: torch.dtype
    held: torch.dtype
    """By pages of keys and values."""
    changed: str | None
    """Why it is not the checkpoint's type, where it is not."""


def choose_types(config: EngineConfig, model: ModelConfig, device: torch.device) -> Types:
    """Raises ConfigError."""
    if _in_float32(config, model, device):
        why = "float32, beside weights of few bits, with keys and values of {}; --dtype bfloat16 computes in that"
        held = torch.bfloat16 if config.kv_cache_dtype == "auto" else _PAGES[config.kv_cache_dtype]
        return Types(torch.float32, held, why.format(str(held).removeprefix("torch.")))
    dtype, changed = choose_dtype(config, model, device)
    held = dtype if config.kv_cache_dtype == "auto" else _PAGES[config.kv_cache_dtype]
    wrong = None
    if held == torch.bfloat16 != dtype:
        if device.type != "cpu":
            wrong = f"on {device.type} keys and values have the model's type, or 8 bits: --dtype bfloat16"
        elif model.given is not None:
            wrong = "with transformers' class (see --model-impl) they have the model's type: --dtype bfloat16"
    if wrong is not None:
        raise ConfigError(f"kv_cache_dtype: {wrong}", param="kv_cache_dtype")
    return Types(dtype, held, changed)


def choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> tuple[torch.dtype, str | None]:
    """The type asked for, or the checkpoint's; and a note where auto makes another of it.

    CPUs compute no float16 that can be avoided; GPUs from Ampere on compute bfloat16 many times as fast as float32, and
    their fast attention takes nothing wider. GPUs before it have tensor cores for float16 alone. Of other devices
    kernels/gpu/others.py says it.
    """
    name = config.dtype if config.dtype != "auto" else model.dtype
    note = None
    if name == "float16" and device.type == "cpu":
        name, note = _instead_of_float16(config)
    elif config.dtype == "auto" and (better := _better_type(name, device)) is not None:
        note, name = f"{better} of the checkpoint's {name}; --dtype {name} keeps it", better
    if name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ConfigError(f"dtype: the checkpoint's {name!r} is not supported; choose one of {known}", param="dtype")
    return _DTYPES[name], note


def _in_float32(config: EngineConfig, model: ModelConfig, device: torch.device) -> bool:
    """Whether the weights have few bits and our kernels take them so: these kernels round activations of any type, and
    bfloat16 in the residual stream would be most of what rounding changes. It costs a twentieth to a tenth of the
    time."""
    if config.dtype != "auto" or not wide_activations(model.raw):  # so that most starts need not load the kernels here
        return False
    return device.type == "cpu" and config.attention_backend in ("auto", "cpu") and Cpu().missing is None


def _instead_of_float16(config: EngineConfig) -> tuple[str, str]:
    """The type that a CPU computes in where float16 is meant, and a note on it.

    A float16 product takes many times as long there as one of bfloat16, which holds every number of float16's range
    with 8 bits instead of 11. float32 holds all of them, in twice the memory.
    """
    if config.attention_backend not in ("auto", "cpu"):
        return "float16", "float16 on a CPU takes many times as long as bfloat16: --dtype bfloat16"
    source = "the checkpoint's float16" if config.dtype == "auto" else "float16"
    return (
        "bfloat16",
        f"bfloat16 instead of {source}, slow on CPUs; --dtype float32 keeps all bits, in twice the memory",
    )


def _better_type(name: str, device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    if is_other(device):
        return better_type(name, device)
    if torch.cuda.get_device_capability(device)[0] >= 8:
        return "bfloat16" if name == "float32" else None
    return "float16" if name == "bfloat16" else None


@dataclass(frozen=True, slots=True)
class Chosen:
    """What computes a model."""

    spec: DecoderSpec
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    """What pages hold."""
    changed: str | None
    """Why it is not the checkpoint's type, where it is not."""
    backend: Backend
    why: str
    """Why it is this backend."""
    of_images: Backend
    """The same for a tower of images, whose keys and values no ranks divide."""
    eager_prompts: str | None = None
    """Why no graph is to hold steps with prompts, though some hold decodes. Of ranks the first one knows it."""


def kept_in(config: EngineConfig, chosen: Chosen) -> str:
    """What keys and values are kept in, by the setting's names; auto: the model's type."""
    if config.kv_cache_dtype != "auto" or chosen.kv_dtype == chosen.dtype:
        return config.kv_cache_dtype
    return str(chosen.kv_dtype).removeprefix("torch.")


def choose(config: EngineConfig, model_config: ModelConfig, *, tried: bool = False) -> Chosen:
    """Raises ConfigError where nothing can serve the model as it is configured. tried: another rank has tried the
    backend that the configuration names, on a GPU like this."""
    check_adapted(config, model_config)
    device = choose_device(config)
    check_other(config, device)
    types = choose_types(config, model_config, device)
    dtype, held = types.computed, types.held
    spec = with_whole_experts(config, decoder_spec(replace(model_config, context=config.max_model_len)))
    check_attention(device, model_config, spec)
    backend, why = choose_backend(config, device, (dtype, held), spec, tried=tried)
    of_text = dividing_tokens(config, device, spec, backend) if config.divides_tokens else backend
    # A tower on a GPU reads images one by one where bits must not depend on the batch: then its kernels may.
    of_images = type(backend)() if config.deterministic and device.type == "cuda" else backend
    eager = None if tried else why_eager_prompts(config, device, (dtype, held), spec, backend)
    return Chosen(spec, device, dtype, held, types.changed, of_text, why, of_images, eager)


def dividing_tokens(config: EngineConfig, device: torch.device, spec: DecoderSpec, backend: Backend) -> Backend:
    """The backend for ranks that divide every sequence's tokens. Raises ConfigError where they cannot."""
    asked, divided = config.speculative_config, backend.divided(config.decode_context_parallel_size)
    refuse(
        "decode_context_parallel_size",
        spec.undivided_tokens(),
        config.nnodes > 1 and "ranks of one machine alone divide tokens so far (nnodes)",
        asked is not None
        and asked.has_weights
        and f"speculative_config: {asked.method!r} has pages of its own; ngram, suffix and grammar have none",
    )
    assert divided is not None
    divided.in_graphs = backend.in_graphs
    return divided


def with_whole_experts(config: EngineConfig, spec: DecoderSpec) -> DecoderSpec:
    """With experts that are whole on one rank each, where that is asked for. Raises ConfigError where it cannot be."""
    if not config.enable_expert_parallel:
        return spec
    refuse(
        "enable_expert_parallel",
        not spec.parts(ExpertsSpec) and "the model has no experts that a file of Quire computes; leave it out",
        config.tensor_parallel_size == 1
        and config.ranks * config.data_parallel_size > 1
        and "experts are divided among the ranks of tensor_parallel_size, which is 1",
    )
    return spec.having(ExpertsSpec, whole=True)


def choose_backend(
    config: EngineConfig,
    device: torch.device,
    types: tuple[torch.dtype, torch.dtype],
    spec: DecoderSpec,
    *,
    tried: bool = False,
) -> tuple[Backend, str]:
    """The backend for a model and pages of these types, and why it is this one; tried: see `choose`. Raises ConfigError
    for one that cannot serve, and for --deterministic where that cannot be promised: on a GPU without Triton, and where
    a CPU has but plain PyTorch's products."""
    deterministic = config.deterministic and device.type == "cuda"
    if deterministic and find_spec("triton") is None:
        raise ConfigError("deterministic: needs Triton (pip install triton)", param="deterministic")
    dtype, held = types
    wanted = (dtype, head_size(spec, device), config.attention_backend, widest(spec).softcap is not None)
    try:
        trials = [] if tried else choose_trials(config, device, types, spec)
        if config.block_size is not None:
            otherwise: list[Trial | None] = [*trials] or [None]
            trials = [partial(_of_pages, config.block_size, each) for each in otherwise]
        backend, why = select_backend(
            device,
            *wanted,
            sinks=has_sinks(spec),
            latents=has_latents(spec),
            chunks=has_chunks(spec),
            deterministic=deterministic,
            kv_dtype=held,
            activation_bits=config.activation_bits,
            ranks=config.decode_context_parallel_size,
            trials=trials,
        )
    except ConfigError:
        raise
    except ValueError as error:
        pages = config.block_size is not None and config.attention_backend == "auto"
        name = "block_size" if pages else "attention_backend"
        raise ConfigError(f"{name}: {error}", param=name) from error
    if config.deterministic and not backend.keeps_rows_apart(device, dtype):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"deterministic: PyTorch's {name} products on this CPU may depend on the batch: use another --dtype",
            param="deterministic",
        )
    return backend, f"{why}; deterministic" if deterministic else why


def _of_pages(tokens: int, trial: Trial | None, backend: Backend) -> str | None:
    """A Trial that a backend with pages of another size fails."""
    if backend.block_size != tokens:
        return f"its pages have {backend.block_size} tokens, not {tokens} (block_size)"
    return None if trial is None else trial(backend)


def choose_capture(config: EngineConfig, backend: Backend, device: torch.device, spec: DecoderSpec) -> Capture | None:
    """What captures steps as graphs; None: nothing does."""
    holds = holds_decodes(backend, spec)
    return CudaCapture(device) if holds and device.type == "cuda" and not config.enforce_eager else None


def holds_decodes(backend: Backend, spec: DecoderSpec) -> bool:
    """Whether a graph can hold decodes of such a model."""
    attention_alone = not spec.parts(ExpertsSpec) and not spec.needs_snapshots
    return backend.in_graphs == "steps" or (backend.in_graphs == "decodes" and attention_alone)
