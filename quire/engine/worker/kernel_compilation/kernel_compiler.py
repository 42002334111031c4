from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from subprocess import DEVNULL
from typing import IO, TYPE_CHECKING

from quire.engine.processes.child import Child, end_processes, module
from quire.engine.processes.cpu_cores import usable_cpus
from quire.engine.processes.exit_cause import exit_cause
from quire.engine.worker.kernel_compilation.kernel_cache import compile_lock

if TYPE_CHECKING:
    from quire.kernels.gpu.kernel_variant import KernelVariant

_MAX_PROCESSES = 8
"""Each process takes about 500 MB of memory, because it imports PyTorch."""
_MIN_VARIANTS_PER_PROCESS = 4
"""Starting a process takes as long as compiling a few variants."""
_POLL_SECONDS = 0.1
_COMPILE_WORKER = "quire.engine.worker.kernel_compilation.compile_worker"


@dataclass(frozen=True, slots=True)
class CompileResult:
    """Counts only newly compiled variants."""

    num_compiled: int = 0
    num_failed: int = 0
    first_error: str = ""

    @property
    def summary(self) -> str:
        if not self.num_failed:
            return f"{self.num_compiled} kinds of kernels compiled"
        total = self.num_compiled + self.num_failed
        return (
            f"{self.num_compiled} of {total} kinds of kernels compiled, "
            f"the others when steps first need them: {self.first_error}"
        )


def compile_variants(
    variants: Sequence[KernelVariant], progress: Callable[[], None], worker_module: str = _COMPILE_WORKER
) -> CompileResult:
    """Variants that fail here are compiled again at their first launch."""
    with compile_lock(progress):
        return _compile_missing_variants(variants, progress, worker_module)


def _compile_missing_variants(
    variants: Sequence[KernelVariant], progress: Callable[[], None], worker_module: str
) -> CompileResult:
    missing = [kind for kind in variants if not kind.marker_path.exists()]
    count = min(_MAX_PROCESSES, usable_cpus(), -(-len(missing) // _MIN_VARIANTS_PER_PROCESS))
    children: list[tuple[Child, IO[bytes]]] = []
    with ExitStack() as stack:
        for part in range(count):
            jobs = json.dumps([astuple(each) for each in missing[part::count]]).encode()
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = Child(module(worker_module), jobs, stdout=DEVNULL, stderr=errors.fileno())
            stack.callback(end_processes, [process], 0.0)
            children.append((process, errors))
        while any(process.returncode is None for process, _ in children):
            progress()
            time.sleep(_POLL_SECONDS)
        reasons = [_failure_reason(process, errors) for process, errors in children if process.returncode]
    failed = sum(not kind.marker_path.exists() for kind in missing)
    return CompileResult(len(missing) - failed, failed, next(iter(reasons), "no error was reported") if failed else "")


def _failure_reason(child: Child, errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    assert child.returncode is not None
    ended = exit_cause(child.returncode, sender=None, oom_kills=None).description
    return next((line.strip() for line in reversed(lines) if line.strip()), f"a process that compiles {ended}")
