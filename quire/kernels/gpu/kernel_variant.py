"""The first launch of a Triton kernel variant compiles it, which takes seconds. Another process may compile variants
into Triton's cache in advance.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class KernelVariant:
    module: str
    name: str
    specialization: str
    """From Triton's hooks, for `JITFunction.preload`."""
    gpu_target: tuple[str, int | str, int]
    """Arguments of `GPUTarget`, which the specialization of Triton 3.6 lacks."""

    @property
    def kernel(self) -> JITFunction[Any]:
        kernel: JITFunction[Any] = getattr(importlib.import_module(self.module), self.name)
        return kernel

    @property
    def marker_path(self) -> Path:
        """Path of an empty file that is written after compiling."""
        digest_fields = (
            self.module,
            self.name,
            self.specialization,
            str(self.gpu_target),
            self.kernel.cache_key,
            triton.__version__,
        )
        return Path(knobs.cache.dir, "quire", hashlib.sha256("\n".join(digest_fields).encode()).hexdigest())

    def compile_variant(self) -> None:
        """Compile the variant, which needs no GPU (`set_compile_target`). Raises Triton's errors."""
        self.kernel.preload(self.specialization)
        self.marker_path.parent.mkdir(parents=True, exist_ok=True)
        self.marker_path.touch()

    @property
    def target(self) -> GPUTarget:
        return GPUTarget(*self.gpu_target)


_DEVICE_NUMBERS: dict[GPUTarget, int] = {}


class CompileOnlyDriver:
    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        # Triton keys its compiled kernels by device index.
        self._device_number = _DEVICE_NUMBERS.setdefault(target, len(_DEVICE_NUMBERS))

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device_number

    def get_current_stream(self, device: int) -> int:
        return 0


def set_compile_target(target: GPUTarget) -> None:
    """Call in a process that has no GPU and launches no kernels."""
    driver.set_active(CompileOnlyDriver(target))


def dry_run_for_variants(function: Callable[[], None]) -> list[KernelVariant]:
    """Return the variants that `function` uses and that this process has not compiled. Launches nothing. No other
    thread may launch kernels meanwhile.
    """
    variants: dict[KernelVariant, None] = {}
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def record_variant(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        gpu = driver.active.get_current_target()
        variants[
            KernelVariant(fn.module, fn.name, compile["specialization_data"], (gpu.backend, gpu.arch, gpu.warp_size))
        ] = None
        return True

    def run_without_launch(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    knobs.runtime.jit_cache_hook, JITFunction.run = record_variant, run_without_launch
    try:
        function()
    finally:
        knobs.runtime.jit_cache_hook, JITFunction.run = hook, run
    return list(variants)
