"""Which backend computes: the fastest that can serve the model on the device, unless one is asked for by name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from torch import device, dtype

from kernels.attention import Backend

_PREFERRED = {"cpu": ("cpu",), "cuda": ("flash", "torch_varlen")}
"""By kind of device, the fastest first. The reference follows everywhere."""
BACKENDS = ("flash", "torch_varlen", "cpu", "reference")


def select_backend(device: device, dtype: dtype, head_dim: int, name: str = "auto") -> tuple[Backend, str]:
    """The backend module for a model on a device, and one line on why it is this one.

    Raises ValueError for a name that is not in BACKENDS, or whose backend cannot serve the model; it says why.
    """
    if name != "auto":
        if name not in BACKENDS:
            raise ValueError(f"unknown attention backend {name!r}; one of auto, {', '.join(BACKENDS)}")
        backend = _load(name)
        if (reason := backend.cannot_serve(device, dtype, head_dim)) is not None:
            raise ValueError(f"{name}: {reason}")
        return backend, f"{backend.description()}; asked for"
    passed_over = []
    for name in (*_PREFERRED.get(device.type, ()), "reference"):
        backend = _load(name)
        reason = backend.cannot_serve(device, dtype, head_dim)
        if reason is None:
            break
        passed_over.append(f"{name}: {reason}")
    return backend, "; ".join([backend.description(), *passed_over])


def _load(name: str) -> Backend:
    return cast(Backend, import_module(f"kernels.{name}"))
