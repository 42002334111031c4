"""Compiles kinds of kernels in several processes, each of which gets a part of them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from subprocess import DEVNULL
from typing import IO, TYPE_CHECKING

from quire.engine.processes.child import Child, module
from quire.engine.processes.exit_cause import exit_cause
from quire.engine.replicas.cores import usable_cpus

if TYPE_CHECKING:
    from quire.kernels.gpu.kinds import Kind

_MOST_PROCESSES = 8
"""Each takes some 500 MB, for it imports PyTorch."""
_LEAST_KINDS = 4
"""Of a process, whose start takes as long as a few of them."""
_POLL_SECONDS = 0.1
_CHILD = "quire.engine.worker.compiling.child"


@dataclass(frozen=True, slots=True)
class Compiled:
    """Kinds that were not compiled before: how many are now, and how many are not."""

    count: int = 0
    failed: int = 0
    why: str = ""
    """The first error, where some failed."""

    @property
    def said(self) -> str:
        if not self.failed:
            return f"{self.count} kinds of kernels compiled"
        whole = self.count + self.failed
        return f"{self.count} of {whole} kinds of kernels compiled, the others when steps first need them: {self.why}"


def compile_kinds(kinds: Sequence[Kind], progress: Callable[[], None], child: str = _CHILD) -> Compiled:
    """A kind that does not compile is left to its first launch. `progress` is called meanwhile. child: the module that
    compiles what it reads from its input."""
    missing = [kind for kind in kinds if not kind.mark.exists()]
    count = min(_MOST_PROCESSES, usable_cpus(), -(-len(missing) // _LEAST_KINDS))
    children: list[tuple[Child, IO[bytes]]] = []
    with ExitStack() as stack:
        for part in range(count):
            jobs = json.dumps([astuple(each) for each in missing[part::count]]).encode()
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = Child(module(child), jobs, stdout=DEVNULL, stderr=errors.fileno())
            stack.callback(process.destroy)
            children.append((process, errors))
        while any(process.returncode is None for process, _ in children):
            progress()
            time.sleep(_POLL_SECONDS)
        reasons = [_reason(process, errors) for process, errors in children if process.returncode]
    failed = sum(not kind.mark.exists() for kind in missing)
    return Compiled(len(missing) - failed, failed, next(iter(reasons), "no error was told") if failed else "")


def _reason(child: Child, errors: IO[bytes]) -> str:
    """The last line that it wrote, which is an exception's message; how it ended, where it wrote none."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    assert child.returncode is not None
    ended = exit_cause(child.returncode, sender=None, oom_kills=None).description
    return next((line.strip() for line in reversed(lines) if line.strip()), f"a process that compiles {ended}")
