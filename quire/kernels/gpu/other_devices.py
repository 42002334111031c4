"""Devices that PyTorch has beside CPUs and NVIDIA's and AMD's GPUs: mps (Apple's GPUs) and xpu (Intel's).

Nothing here is made for them: PyTorch's own operations compute, by the backends sdpa and reference. A device that is
neither cpu nor cuda is taken for such a one everywhere, so that PyTorch's PrivateUse1 can stand for it in tests.
"""

from __future__ import annotations

import torch

OTHER_DEVICES = {"mps": "Apple's GPUs", "xpu": "Intel's GPUs"}
MPS_OUT_OF_MEMORY = "MPS backend out of memory"
"""Part of the message of the RuntimeError that PyTorch raises there."""


def is_other_device(device: torch.device) -> bool:
    return device.type not in ("cpu", "cuda")


def require_other_device(name: str) -> torch.device:
    """Raises ValueError with one sentence where this PyTorch has none of OTHERS[name]."""
    backend_module = getattr(torch, name, None)
    if backend_module is None or not backend_module.is_available():
        missing = f"{name} was asked for, but PyTorch {torch.__version__} finds none of {OTHER_DEVICES[name]} here"
        raise ValueError(f"{missing}; --device cpu serves")
    return torch.device(name)


def available_device_bytes(device: torch.device) -> int | None:
    """Of the device's memory; None where PyTorch does not say."""
    if device.type == "mps":
        return max(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(), 0)
    try:
        return int(torch.xpu.mem_get_info(device)[0]) if device.type == "xpu" else None
    except RuntimeError:  # some of Intel's drivers do not say
        return None


def empty_device_caches() -> None:
    """Hand what PyTorch keeps of freed memory back to the system."""
    for name in OTHER_DEVICES:
        backend_module = getattr(torch, name, None)
        if backend_module is not None and backend_module.is_available():
            backend_module.empty_cache()


def replacement_dtype_or_none(name: str, device: torch.device) -> str | None:
    """What --dtype auto makes of a checkpoint's type there; None: it stays. Not all of Apple's chips compute bfloat16,
    and none computes it faster than float16."""
    if device.type == "mps":
        return "float16" if name != "float16" else None
    if device.type != "xpu":
        return None
    if torch.xpu.is_bf16_supported():
        return "bfloat16" if name == "float32" else None
    return "float16" if name == "bfloat16" else None


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """For sums of many numbers: Apple's GPUs have no float64, and not all of Intel's."""
    return torch.float32 if is_other_device(device) else torch.float64
