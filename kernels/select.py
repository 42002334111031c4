"""Which backend computes: the fastest that can serve the model on the device, unless one is asked for by name."""

from __future__ import annotations

from torch import device, dtype

from quire.kernels.backend import Backend
from quire.kernels.cpu.backend import Cpu
from quire.kernels.gpu.flash import Flash
from quire.kernels.gpu.torch_varlen import TorchVarlen
from quire.kernels.reference import Reference

_PREFERRED = {"cpu": ("cpu",), "cuda": ("flash", "torch_varlen", "triton")}
"""By kind of device, the fastest first. The reference follows everywhere."""


def _triton(*, deterministic: bool = False) -> Backend:
    from quire.kernels.gpu.triton_paged import Triton  # importing Triton takes a second

    return Triton(deterministic=deterministic)


_MADE_BY = {"flash": Flash, "torch_varlen": TorchVarlen, "triton": _triton, "cpu": Cpu, "reference": Reference}
BACKENDS = tuple(_MADE_BY)


def select_backend(
    device: device,
    dtype: dtype,
    head_dim: int,
    name: str = "auto",
    softcap: bool = False,
    *,
    deterministic: bool = False,
) -> tuple[Backend, str]:
    """A backend for a model on a device, and one line on why it is this one. deterministic: see `Reference`.

    Raises ValueError for a name that is not in BACKENDS, or whose backend cannot serve the model; it says why.
    """

    def find(name: str) -> tuple[Backend | None, str]:
        """The backend, or None and why it cannot serve."""
        try:
            backend = _MADE_BY[name](deterministic=deterministic)
        except ModuleNotFoundError as error:
            return None, f"the Python package {error.name} is not installed"
        reason = backend.cannot_serve(device, dtype, head_dim, softcap)
        return (backend, "") if reason is None else (None, reason)

    if name != "auto":
        if name not in BACKENDS:
            raise ValueError(f"unknown attention backend {name!r}; one of auto, {', '.join(BACKENDS)}")
        backend, reason = find(name)
        if backend is None:
            raise ValueError(f"{name}: {reason}")
        return backend, f"{backend.description()}; asked for"
    passed_over: list[str] = []
    for name in _PREFERRED.get(device.type, ()):
        backend, reason = find(name)
        if backend is not None:
            return backend, "; ".join([backend.description(), *passed_over])
        passed_over.append(f"{name}: {reason}")
    reference = Reference(deterministic=deterministic)
    return reference, "; ".join([reference.description(), *passed_over])
