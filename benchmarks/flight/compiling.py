"""The kernels of other stages, compiled by several processes: one after the other they would take longer than those."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from unittest.mock import patch

import torch

import quire.kernels.latents.probe
import quire.kernels.probe
import quire.kernels.recurrent.probe
from benchmarks.flight import experts, kernels, layers
from benchmarks.flight.finding import Finding, Say
from quire.engine.worker.compiling.processes import compile_kinds

_PROBES = (quire.kernels.probe, quire.kernels.latents.probe, quire.kernels.recurrent.probe)
_TIMING = (kernels, experts, layers)


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
    """Trials pass; those of PyTorch's products say `why_not`. What is timed runs once."""
    from quire.kernels.gpu.quantization import library, rounding, trial

    def once(function: Callable[[], object], device: torch.device, repeats: int = 1) -> list[float]:
        function()
        return [1.0]

    with ExitStack() as stack:
        for timing in _TIMING:
            stack.enter_context(patch.object(timing, "times", once))
        for module in (trial, rounding):
            stack.enter_context(patch.object(module, "why_not", return_value=None))
        for probe in _PROBES:
            stack.enter_context(patch.object(probe, "same", return_value=True))
        stack.enter_context(patch.object(library, "why_not", return_value=why_not))
        yield
