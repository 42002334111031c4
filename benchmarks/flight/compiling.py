"""Compiles other stages' kernels in several processes: in sequence they would take longer than the stages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from unittest.mock import patch

import torch

import quire.kernels.probes.backend_probe
import quire.kernels.probes.mla_probe
import quire.kernels.probes.recurrence_probe
from benchmarks.flight import experts, kernels, layers
from benchmarks.flight.finding import Finding, Say
from quire.engine.worker.kernel_compilation.kernel_compiler import compile_variants
from quire.kernels.gpu.quantization import activation_rounding, torch_matmul, weight_trial

_PROBES = (quire.kernels.probes.backend_probe, quire.kernels.probes.mla_probe, quire.kernels.probes.recurrence_probe)
_TIMING = (kernels, experts, layers)


def ahead(device: torch.device, say: Say) -> None:
    """Runs in its own process, where launches are skipped and count as correct."""
    if device.type != "cuda":
        say(Finding("kernels", "nothing to compile on a CPU"))
        return
    from quire.kernels.gpu.kernel_variant import dry_run_for_variants

    began = time.monotonic()
    kinds = dict.fromkeys(dry_run_for_variants(lambda: _stages(device)))
    found = time.monotonic()
    compiled = compile_variants(list(kinds), lambda: None)
    took = f"found in {found - began:.0f} s; in {time.monotonic() - found:.0f} s {compiled.summary}"
    say(Finding("kernels", f"{len(kinds)} kinds, {took}", held=not compiled.num_failed))
    if wrong := Counter(kind.name for kind in kinds if not kind.marker_path.exists()):
        say(Finding("kernels that do not compile", ", ".join(f"{name} ({n})" for name, n in wrong.items()), held=False))


def _stages(device: torch.device) -> None:
    """If a stage raises, the kernels after that are compiled when the stage runs."""
    for why_not in (None, "so that Triton's own products are among them"):
        with _believed(why_not):
            for stage in (kernels.attention, kernels.products) if why_not is None else (kernels.products,):
                with suppress(Exception):
                    stage(device, lambda _: None)


@contextmanager
def _believed(why_not: str | None) -> Iterator[None]:
    """All trials pass, but that of PyTorch's products returns `why_not`. Timed functions run once."""

    def once(function: Callable[[], object], device: torch.device, repeats: int = 1) -> list[float]:
        function()
        return [1.0]

    with ExitStack() as stack:
        for timing in _TIMING:
            stack.enter_context(patch.object(timing, "times", once))
        for module in (weight_trial, activation_rounding):
            stack.enter_context(patch.object(module, "trial_failure_reason", return_value=None))
        for probe in _PROBES:
            stack.enter_context(patch.object(probe, "is_close", return_value=True))
        stack.enter_context(patch.object(torch_matmul, "trial_failure_reason", return_value=why_not))
        yield
