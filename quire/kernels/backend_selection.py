from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from torch import cuda, device, dtype, version

from quire.kernels.backend import Backend
from quire.kernels.cpu import native_library
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.cpu.decoder.disk_layers import DiskLayerStreamer
from quire.kernels.cpu.decoder.mapped_experts import MappedDiskExperts, MappedWeightArena
from quire.kernels.experts import DiskExperts
from quire.kernels.gpu.libraries.flash2 import Flash2Backend
from quire.kernels.gpu.libraries.flash3 import Flash3Backend
from quire.kernels.gpu.libraries.flash4 import Flash4Backend
from quire.kernels.gpu.libraries.sdpa import SdpaBackend
from quire.kernels.gpu.libraries.torch_varlen import TorchVarlenBackend
from quire.kernels.gpu.torch_backend import TorchBackend
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES
from quire.kernels.streaming.layer_streamer import LayerSelector, LayerStreamer

_GPU_BACKENDS = ("flash", "torch_varlen", "triton", "sdpa")
_PREFERRED = {
    "cpu": ("cpu",),
    "rocm": ("triton", "sdpa"),
    "cuda 7": ("flash", "torch_varlen", "sdpa"),  # Triton uses no tensor cores there, and spills kilobytes
    "cuda 9": ("flash3", "flash4", *_GPU_BACKENDS),
    "cuda 10": ("flash4", *_GPU_BACKENDS),
}
"""Backends by device and major compute capability, fastest first."""


def _make_triton(*, deterministic: bool = False) -> Backend:
    from quire.kernels.gpu.triton_backend import TritonBackend

    return TritonBackend(deterministic=deterministic)


_BACKEND_FACTORIES: dict[str, Callable[..., Backend]] = {
    "flash3": Flash3Backend,
    "flash4": Flash4Backend,
    "flash": Flash2Backend,
    "torch_varlen": TorchVarlenBackend,
    "triton": _make_triton,
    "sdpa": SdpaBackend,
    "cpu": CpuBackend,
    "reference": TorchBackend,
}
BACKENDS = tuple(_BACKEND_FACTORIES)


def make_backend(name: str, *, deterministic: bool) -> Backend:
    return _BACKEND_FACTORIES[name](deterministic=deterministic)


def _preferred_backends(device: device) -> tuple[str, ...]:
    if device.type != "cuda":
        return _PREFERRED.get(device.type, ("sdpa",))
    if version.hip is not None:  # PyTorch calls an MI300 a CUDA device of capability 9.x
        return _PREFERRED["rocm"]
    major, _ = cuda.get_device_capability(device)
    return _PREFERRED.get(f"cuda {major}", _GPU_BACKENDS)


_NO_CONTEXT_PARALLEL = "does not return the log-sum-exp that ranks with parts of the keys need to merge their results"
BackendTrial = Callable[[Backend], str | None]
"""Returns why a backend cannot compute on the device; None if it can."""


@dataclass(frozen=True, slots=True)
class AttentionRequirements:
    softcap: bool = False
    sinks: bool = False
    latents: bool = False
    chunks: bool = False
    kv_dtype: dtype | None = None
    """None: the model's dtype."""
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class _CandidateBackends:
    device: device
    dtype: dtype
    head_dim: int
    attention: AttentionRequirements
    deterministic: bool
    activation_bits: str

    def make_backend_or_reason(self, name: str, trial: BackendTrial | None) -> tuple[Backend | None, str]:
        try:
            backend = self._make_backend(name)
        except ModuleNotFoundError as error:
            return None, f"the Python package {error.name} is not installed"
        reason = self._unsupported_reason(backend)
        if reason is None and trial is not None:
            reason = trial(backend)
        return (backend, "") if reason is None else (None, reason)

    def _make_backend(self, name: str) -> Backend:
        if name == "cpu":
            return CpuBackend(deterministic=self.deterministic, activation_bits=self.activation_bits)
        return make_backend(name, deterministic=self.deterministic)

    def _unsupported_reason(self, backend: Backend) -> str | None:
        attention = self.attention
        reason = backend.unsupported_reason(self.device, self.dtype, self.head_dim, attention.softcap)
        if reason is None and attention.kv_dtype in QUANTIZED_KV_DTYPES:
            reason = backend.unsupported_kv_dtype_reason(attention.kv_dtype)
        if reason is None:
            reason = backend.unsupported_attention_reason(
                sinks=attention.sinks, latents=attention.latents, chunks=attention.chunks
            )
        if reason is None and attention.ranks > 1 and backend.make_context_parallel_backend(attention.ranks) is None:
            reason = _NO_CONTEXT_PARALLEL
        return reason


def select_backend(
    device: device,
    dtype: dtype,
    head_dim: int,
    name: str = "auto",
    attention: AttentionRequirements = AttentionRequirements(),
    *,
    deterministic: bool = False,
    activation_bits: str = "auto",
    trials: Sequence[BackendTrial] = (),
) -> tuple[Backend, str]:
    """Return a backend, and a text for the log. If `name` is "auto", this is the first preferred backend that passes
    the first trial. If none does, the next trial is run on all of them. The reference comes last.

    Raises ValueError for an unknown name, for a named backend that cannot serve the model or fails the first trial, and
    if not even the reference passes the last trial.
    """
    candidates = _CandidateBackends(device, dtype, head_dim, attention, deterministic, activation_bits)
    attempts: Sequence[BackendTrial | None] = trials or (None,)
    if name != "auto":
        if name not in BACKENDS:
            raise ValueError(f"unknown attention backend {name!r}; one of auto, {', '.join(BACKENDS)}")
        backend, reason = candidates.make_backend_or_reason(name, attempts[0])
        if backend is None:
            raise ValueError(f"{name}: {reason}")
        return backend, f"{backend.description()}; asked for"
    passed_over: dict[str, str] = {}
    for trial, name in product(attempts, _preferred_backends(device)):
        backend, reason = candidates.make_backend_or_reason(name, trial)
        if backend is not None:
            return backend, "; ".join([backend.description(), *passed_over.values()])
        passed_over.setdefault(name, f"{name}: {reason}")
    backend, reason = candidates.make_backend_or_reason("reference", attempts[-1])
    if backend is None:
        raise ValueError("; ".join(["nothing computes here", *passed_over.values(), f"reference: {reason}"]))
    return backend, "; ".join([backend.description(), *passed_over.values()])


def make_disk_experts(backend: Backend, folder: Path, memory: int) -> DiskExperts | None:
    """`memory` is the number of bytes for the most used experts. Raises OSError."""
    if not isinstance(backend, CpuBackend):
        return None
    arena = MappedWeightArena(folder)
    experts = MappedDiskExperts(arena, memory)
    experts.backend = _make_arena_backend(arena, backend)
    return experts


def make_disk_layer_streamer(backend: Backend, folder: Path, choice: LayerSelector, slots: int) -> LayerStreamer | None:
    """The streamer stores layers in an unnamed file in `folder`. Raises OSError."""
    if not isinstance(backend, CpuBackend):
        return None
    arena = MappedWeightArena(folder)
    layers = DiskLayerStreamer(arena, choice, slots)
    layers.backend = _make_arena_backend(arena, backend)
    return layers


def _make_arena_backend(arena: MappedWeightArena, backend: CpuBackend) -> CpuBackend:
    library = native_library.NativeLibrary(backend.library.isa, arena)
    return CpuBackend(library, deterministic=backend.deterministic, activation_bits=backend.activation_bits)
