"""Kinds of Triton kernels: what is compiled apart, for arguments of other types, sizes that are constants, alignments.

Triton compiles a kind, for seconds, when it is first launched. `recorded` says which ones something would launch,
without a launch; another process may compile them (`Kind.compile`), and this one then finds them in Triton's folder.
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
class Kind:
    module: str
    name: str
    specialization: str
    """As Triton's hooks give it and `JITFunction.preload` takes it."""
    gpu: tuple[str, int | str, int]
    """What it is compiled for, as `GPUTarget` takes it. Triton 3.6's specialization does not say it, 3.7's does."""

    @property
    def kernel(self) -> JITFunction[Any]:
        kernel: JITFunction[Any] = getattr(importlib.import_module(self.module), self.name)
        return kernel

    @property
    def mark(self) -> Path:
        """An empty file beside what Triton keeps, where this kind was compiled before."""
        said = (self.module, self.name, self.specialization, str(self.gpu), self.kernel.cache_key, triton.__version__)
        return Path(knobs.cache.dir, "quire", hashlib.sha256("\n".join(said).encode()).hexdigest())

    def compile(self) -> None:
        """Into Triton's folder. Raises what Triton raises; the GPU need not be there (`aim`)."""
        self.kernel.preload(self.specialization)
        self.mark.parent.mkdir(parents=True, exist_ok=True)
        self.mark.touch()

    @property
    def target(self) -> GPUTarget:
        return GPUTarget(*self.gpu)


_NUMBERS: dict[GPUTarget, int] = {}


class NoGpu:
    """A driver of which the compiler asks the target alone."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        # Triton keeps what it has compiled by the number of the device.
        self._number = _NUMBERS.setdefault(target, len(_NUMBERS))

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0


def aim(target: GPUTarget) -> None:
    """Compile for this GPU from now on, in a process that has none and launches nothing."""
    driver.set_active(NoGpu(target))


def recorded(function: Callable[[], None]) -> list[Kind]:
    """The kinds that `function` would launch and that were not compiled in this process. Nothing is launched meanwhile,
    not even what is compiled: what kernels write is not written. Not beside other threads that launch kernels."""
    found: dict[Kind, None] = {}
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        gpu = driver.active.get_current_target()
        found[Kind(fn.module, fn.name, compile["specialization_data"], (gpu.backend, gpu.arch, gpu.warp_size))] = None
        return True  # do not compile

    def launch_nothing(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **options)

    knobs.runtime.jit_cache_hook, JITFunction.run = note, launch_nothing
    try:
        function()
    finally:
        knobs.runtime.jit_cache_hook, JITFunction.run = hook, run
    return list(found)
