"""Which backend computes: the fastest that can serve the model on the device, unless one is asked for by name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from torch import device, dtype

from quire.kernels.backend import Backend

_PREFERRED = {"cpu": ("cpu",), "cuda": ("flash", "torch_varlen", "triton")}
"""By kind of device, the fastest first. The reference follows everywhere."""
_MODULES = {
    "flash": "quire.kernels.gpu.flash",
    "torch_varlen": "quire.kernels.gpu.torch_varlen",
    "triton": "quire.kernels.gpu.triton_paged",
    "cpu": "quire.kernels.cpu",
    "reference": "quire.kernels.reference",
}
BACKENDS = tuple(_MODULES)


def select_backend(
    device: device, dtype: dtype, head_dim: int, name: str = "auto", softcap: bool = False
) -> tuple[Backend, str]:
    """The backend module for a model on a device, and one line on why it is this one.

    Raises ValueError for a name that is not in BACKENDS, or whose backend cannot serve the model; it says why.
    """
    if name != "auto":
        if name not in BACKENDS:
            raise ValueError(f"unknown attention backend {name!r}; one of auto, {', '.join(BACKENDS)}")
        backend, reason = _find(name, device, dtype, head_dim, softcap)
        if backend is None:
            raise ValueError(f"{name}: {reason}")
        return backend, f"{backend.description()}; asked for"
    passed_over: list[str] = []
    for name in _PREFERRED.get(device.type, ()):
        backend, reason = _find(name, device, dtype, head_dim, softcap)
        if backend is not None:
            return backend, "; ".join([backend.description(), *passed_over])
        passed_over.append(f"{name}: {reason}")
    reference = _load("reference")
    return reference, "; ".join([reference.description(), *passed_over])


def _find(name: str, device: device, dtype: dtype, head_dim: int, softcap: bool) -> tuple[Backend | None, str]:
    """The backend, or None and why it cannot serve."""
    try:
        backend = _load(name)
    except ModuleNotFoundError as error:
        return None, f"the Python package {error.name} is not installed"
    reason = backend.cannot_serve(device, dtype, head_dim, softcap)
    return (backend, "") if reason is None else (None, reason)


def _load(name: str) -> Backend:
    return cast(Backend, import_module(_MODULES[name]))
