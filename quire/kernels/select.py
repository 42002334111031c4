"""Which backend computes: the fastest that can serve the model on the device, unless one is asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from torch import cuda, device, dtype, version

from quire.kernels.backend import Backend
from quire.kernels.cpu import native
from quire.kernels.cpu.backend import Cpu
from quire.kernels.cpu.decoder.from_disk import LayersFromDisk
from quire.kernels.cpu.decoder.mapped import MappedArena, MappedExperts
from quire.kernels.experts import ExpertsOnDisk
from quire.kernels.gpu.libraries.flash import Flash
from quire.kernels.gpu.libraries.flash3 import Flash3
from quire.kernels.gpu.libraries.flash4 import Flash4
from quire.kernels.gpu.libraries.sdpa import Sdpa
from quire.kernels.gpu.libraries.torch_varlen import TorchVarlen
from quire.kernels.kv_codes import KV_CODES
from quire.kernels.reference import Reference
from quire.kernels.streaming.layers import Choice, StreamedLayers

_ON_GPUS = ("flash", "torch_varlen", "triton", "sdpa")
_PREFERRED = {
    "cpu": ("cpu",),
    "rocm": ("triton", "sdpa"),
    "cuda 7": ("flash", "torch_varlen", "sdpa"),  # Triton compiles without tensor cores there, and spills kilobytes
    "cuda 9": ("flash3", "flash4", *_ON_GPUS),
    "cuda 10": ("flash4", *_ON_GPUS),
}
"""By kind of device, and of GPUs the major compute capability, the fastest first; other GPUs have _ON_GPUS, and what
is neither a CPU nor a GPU of NVIDIA's or AMD's has sdpa. The reference follows everywhere."""


def _triton(*, deterministic: bool = False) -> Backend:
    from quire.kernels.gpu.triton_paged import Triton  # importing Triton takes a second

    return Triton(deterministic=deterministic)


_MADE_BY = {
    "flash3": Flash3,
    "flash4": Flash4,
    "flash": Flash,
    "torch_varlen": TorchVarlen,
    "triton": _triton,
    "sdpa": Sdpa,
    "cpu": Cpu,
    "reference": Reference,
}
BACKENDS = tuple(_MADE_BY)


def _preferred(device: device) -> tuple[str, ...]:
    if device.type != "cuda":
        return _PREFERRED.get(device.type, ("sdpa",))
    if version.hip is not None:  # an MI300's capability is 9.x, too, and PyTorch calls it a CUDA device
        return _PREFERRED["rocm"]
    major, _ = cuda.get_device_capability(device)
    return _PREFERRED.get(f"cuda {major}", _ON_GPUS)


_NO_PARTS = "does not tell what of attention a part of the keys gives, which ranks that divide tokens merge"
Trial = Callable[[Backend], str | None]
"""Tries a backend on the device (kernels/probe.py): None, or why it cannot compute there."""


def select_backend(
    device: device,
    dtype: dtype,
    head_dim: int,
    name: str = "auto",
    softcap: bool = False,
    *,
    sinks: bool = False,
    latents: bool = False,
    chunks: bool = False,
    deterministic: bool = False,
    kv_dtype: dtype | None = None,
    activation_bits: str = "auto",
    ranks: int = 1,
    trials: Sequence[Trial] = (),
) -> tuple[Backend, str]:
    """A backend for a model on a device, and one line on why it is this one. deterministic: see `Reference`. sinks,
    latents, chunks: of attention. kv_dtype: what pages hold; None: the model's type. activation_bits: see
    kernels/cpu/quantized.py. ranks: that divide every sequence's tokens. trials: what it must pass, if anything; where
    no fast backend passes the first trial, the next one decides.

    Raises ValueError for a name that is not in BACKENDS, for a backend that cannot serve the model or fails the first
    trial, and where none passes any; it says why."""
    made_by: dict[str, Callable[..., Backend]] = {**_MADE_BY, "cpu": partial(Cpu, activation_bits=activation_bits)}

    def find(name: str, trial: Trial | None) -> tuple[Backend | None, str]:
        """The backend, or None and why it cannot serve."""
        try:
            backend = made_by[name](deterministic=deterministic)
        except ModuleNotFoundError as error:
            return None, f"the Python package {error.name} is not installed"
        reason = backend.cannot_serve(device, dtype, head_dim, softcap)
        if reason is None and kv_dtype in KV_CODES:
            reason = backend.cannot_hold(kv_dtype)
        if reason is None:
            reason = backend.cannot_attend(sinks=sinks, latents=latents, chunks=chunks)
        if reason is None and ranks > 1 and backend.divided(ranks) is None:
            reason = _NO_PARTS
        if reason is None and trial is not None:
            reason = trial(backend)
        return (backend, "") if reason is None else (None, reason)

    tried: Sequence[Trial | None] = trials or (None,)
    if name != "auto":
        if name not in BACKENDS:
            raise ValueError(f"unknown attention backend {name!r}; one of auto, {', '.join(BACKENDS)}")
        backend, reason = find(name, tried[0])
        if backend is None:
            raise ValueError(f"{name}: {reason}")
        return backend, f"{backend.description()}; asked for"
    passed_over: dict[str, str] = {}
    for trial, name in product(tried, _preferred(device)):
        backend, reason = find(name, trial)
        if backend is not None:
            return backend, "; ".join([backend.description(), *passed_over.values()])
        passed_over.setdefault(name, f"{name}: {reason}")
    backend, reason = find("reference", tried[-1])
    if backend is None:
        raise ValueError("; ".join(["nothing computes here", *passed_over.values(), f"reference: {reason}"]))
    return backend, "; ".join([backend.description(), *passed_over.values()])


def experts_on_disk(backend: Backend, folder: Path, memory: int) -> ExpertsOnDisk | None:
    """What packs and mixes experts as this backend does, but in a file of the folder; memory: bytes for those that are
    used most. None where the backend has no such way. Raises OSError where no file can be made there."""
    if not isinstance(backend, Cpu):
        return None
    made = MappedExperts(arena := MappedArena(folder), memory)
    made.backend = _packing_into(arena, backend)
    return made


def layers_from_disk(backend: Backend, folder: Path, choice: Choice, slots: int) -> StreamedLayers | None:
    """What packs layers into a file of the folder, and reads them from there. Likewise."""
    if not isinstance(backend, Cpu):
        return None
    made = LayersFromDisk(arena := MappedArena(folder), choice, slots)
    made.backend = _packing_into(arena, backend)
    return made


def _packing_into(arena: MappedArena, backend: Cpu) -> Cpu:
    library = native.Native(backend.library.isa, arena)
    return Cpu(library, deterministic=backend.deterministic, activation_bits=backend.activation_bits)
