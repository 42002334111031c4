"""PyTorch devices other than cpu and cuda (NVIDIA, AMD). Tests can use PrivateUse1."""

from __future__ import annotations

import torch

OTHER_DEVICES = {"mps": "Apple's GPUs", "xpu": "Intel's GPUs"}
MPS_OUT_OF_MEMORY = "MPS backend out of memory"


def is_other_device(device: torch.device) -> bool:
    return device.type not in ("cpu", "cuda")


def require_other_device(name: str) -> torch.device:
    """Raises ValueError if PyTorch finds no such device."""
    backend_module = getattr(torch, name, None)
    if backend_module is None or not backend_module.is_available():
        missing = f"{name} was requested, but PyTorch {torch.__version__} finds none of {OTHER_DEVICES[name]} here"
        raise ValueError(f"{missing}; --device cpu serves")
    return torch.device(name)


def available_device_bytes(device: torch.device) -> int | None:
    if device.type == "mps":
        return max(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(), 0)
    try:
        return int(torch.xpu.mem_get_info(device)[0]) if device.type == "xpu" else None
    except RuntimeError:  # some Intel drivers do not report it
        return None


def empty_device_caches() -> None:
    for name in OTHER_DEVICES:
        backend_module = getattr(torch, name, None)
        if backend_module is not None and backend_module.is_available():
            backend_module.empty_cache()


def replacement_dtype_or_none(name: str, device: torch.device) -> str | None:
    """Return what --dtype auto uses instead of the checkpoint's dtype `name`; None to keep it. Not all Apple chips
    compute bfloat16, and none computes it faster than float16.
    """
    if device.type == "mps":
        return "float16" if name != "float16" else None
    if device.type != "xpu":
        return None
    if torch.xpu.is_bf16_supported():
        return "bfloat16" if name == "float32" else None
    return "float16" if name == "bfloat16" else None


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Apple's GPUs and some of Intel's lack float64."""
    return torch.float32 if is_other_device(device) else torch.float64
