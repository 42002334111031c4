"""The kernels of other stages, compiled by several processes: one after the other they would take longer than those."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from unittest.mock import patch

import torch

import quire.kernels.latents.probe
import quire.kernels.probe
import quire.kernels.recurrent.probe
from benchmarks.flight import kernels
from benchmarks.flight.finding import Finding, Say
from quire.engine.worker.compiling.processes import compile_kinds

_PROBES = (quire.kernels.probe, quire.kernels.latents.probe, quire.kernels.recurrent.probe)


def ahead(device: torch.device, say: Say) -> None:
    """In a process of its own, for nothing that it computes is right: launches are left out and said to be right."""
    if device.type != "cuda":
        say(Finding("kernels", "nothing to compile on a CPU"))
        return
    from quire.kernels.gpu.kinds import recorded

    began = time.monotonic()
    kinds = dict.fromkeys(recorded(lambda: _stages(device)))
    found = time.monotonic()
    compiled = compile_kinds(list(kinds), lambda: None)
    took = f"found in {found - began:.0f} s; in {time.monotonic() - found:.0f} s {compiled.said}"
    say(Finding("kernels", f"{len(kinds)} kinds, {took}", held=not compiled.failed))
    if wrong := Counter(kind.name for kind in kinds if not kind.mark.exists()):
        say(Finding("kernels that do not compile", ", ".join(f"{name} ({n})" for name, n in wrong.items()), held=False))


def _stages(device: torch.device) -> None:
    """What an exception ends is compiled when its own stage needs it."""
    for why_not in (None, "so that Triton's own products are among them"):
        with _believed(why_not):
            for stage in (kernels.attention, kernels.products) if why_not is None else (kernels.products,):
                with suppress(Exception):
                    stage(device, lambda _: None)


@contextmanager
def _believed(why_not: str | None) -> Iterator[None]:
    """Trials pass; those of PyTorch's products say `why_not`."""
    from quire.kernels.gpu.quantization import library

    with ExitStack() as stack:
        for probe in _PROBES:
            stack.enter_context(patch.object(probe, "same", return_value=True))
        stack.enter_context(patch.object(library, "why_not", return_value=why_not))
        yield
