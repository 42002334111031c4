"""Compiles kinds of kernels in several processes, each of which gets a part of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from subprocess import DEVNULL
from typing import TYPE_CHECKING

from quire.engine.processes.child import Child, module

if TYPE_CHECKING:
    from quire.kernels.gpu.kinds import Kind

_MOST_PROCESSES = 8
"""Each takes some 500 MB, for it imports PyTorch."""
_LEAST_KINDS = 4
"""Of a process, whose start takes as long as a few of them."""
_POLL_SECONDS = 0.1


def compile_kinds(kinds: Sequence[Kind], progress: Callable[[], None]) -> int:
    """Those that were not compiled before, and how many these are. A kind that does not compile is left to its first
    launch, whose error says why. `progress` is called meanwhile."""
    missing = [kind for kind in kinds if not kind.mark.exists()]
    count = min(_MOST_PROCESSES, os.cpu_count() or 1, -(-len(missing) // _LEAST_KINDS))
    children: list[Child] = []
    try:
        for part in range(count):
            jobs = [astuple(each) for each in missing[part::count]]
            name = "quire.engine.worker.compiling.child"
            children.append(Child(module(name), json.dumps(jobs).encode(), stdout=DEVNULL, stderr=DEVNULL))
        while any(child.returncode is None for child in children):
            progress()
            time.sleep(_POLL_SECONDS)
    finally:
        for child in children:
            child.destroy()
    return len(missing)
