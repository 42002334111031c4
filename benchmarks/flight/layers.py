"""MLA and recurrent layers."""

from __future__ import annotations

import statistics
from functools import partial

import torch
from torch import Tensor

from benchmarks.flight.finding import Finding, Say, tried
from benchmarks.gpu import times
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, Backend
from quire.kernels.backend_selection import AttentionRequirements, select_backend
from quire.kernels.probes.mla_probe import MLAProbe
from quire.kernels.probes.recurrence_probe import RecurrenceProbe
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates
from quire.kernels.recurrent.selective_scan import SelectiveScan
from quire.kernels.recurrent.state_space import StateSpace

_LATENTS = {"DeepSeek-V2-Lite": (16, (512, 64, 128, 128)), "a rank of DeepSeek-V3": (32, (512, 64, 128, 128))}
_SMALL_LATENTS = {"a small one": (2, (512, 64, 32, 32))}
"""Heads; sizes of latent, rotated part, query's other part, and value."""
_DTYPES = (torch.bfloat16, torch.float32)
"""Only the first of each kind uses both."""


def layers(device: torch.device, say: Say, backend: Backend, timed: bool) -> None:
    """`timed`: speed instead of correctness. `backend`: for recurrent layers."""
    small = device.type == "cpu"
    of_latents, why = select_backend(device, torch.bfloat16, 192, attention=AttentionRequirements(latents=True))
    if not timed:
        say(Finding("latents by", why))
    for at, (name, (heads, sizes)) in enumerate((_SMALL_LATENTS if small else _LATENTS).items()):
        for dtype in () if timed else _DTYPES[: 1 if at or small else None]:
            probe = MLAProbe(device, dtype, heads, sizes)
            tried(say, f"latents of {name}, {dtype}", partial(_passes, probe, of_latents))
        for seqs, context in () if not timed else ((1, 64),) if small else ((1, 32768), (32, 2048)):
            what = f"latents of {name}, a decode of {seqs} behind {context} tokens"
            tried(say, what, partial(_timed_latents, of_latents, device, heads, seqs, context))
    for at, (name, (rule, value)) in enumerate(_rules(device, small).items()):
        for dtype in () if timed else _DTYPES[: 1 if at or small else None]:
            tried(say, f"{name}, {dtype}", partial(_passes, RecurrenceProbe(device, dtype, rule, value), backend))
        for seqs, count in () if not timed else ((1, 4),) if small else ((1, 1), (64, 1), (1, 2048)):
            what = f"{name}, {seqs} sequences of {count} tokens"
            tried(say, what, partial(_timed_rule, backend, device, rule, value, seqs, count))


def _passes(probe: MLAProbe | RecurrenceProbe, backend: Backend) -> str:
    if (wrong := probe(backend)) is not None:
        raise ValueError(wrong)
    return "as the reference"


def _rules(device: torch.device, small: bool) -> dict[str, tuple[DeltaRule | StateSpace | SelectiveScan, int]]:
    def some(*shape: int) -> Tensor:
        return torch.linspace(0.1, 1.0, torch.Size(shape).numel(), device=device).view(shape)

    if small:
        return {"a small delta net": (DeltaRule(-some(2), some(2), some(32), 1e-6, 1, 32), 32)}
    channels = 8192
    return {
        "Qwen3.5's delta net": (DeltaRule(-some(32), some(32), some(128), 1e-6, 16, 128), 128),
        "Granite 4's state space": (StateSpace(-some(48), some(48), some(48), some(48 * 64), 1e-6, 1, 128, 64), 64),
        "Falcon Mamba's scan": (
            SelectiveScan(-some(channels // 64, 16, 64), some(channels), some(channels), None, None, 1e-6),
            64,
        ),
    }


def _timed_latents(backend: Backend, device: torch.device, heads: int, seqs: int, context: int) -> str:
    pages = -(-context // backend.block_size)
    shape = backend.kv_cache_shape(seqs * pages, 1, 576, torch.bfloat16)
    cache = torch.randn(shape, device=device).bfloat16()
    table = torch.arange(seqs * pages, dtype=torch.int32, device=device).view(seqs, pages)
    starts = torch.arange(seqs + 1, dtype=torch.int32, device=device)
    lens = torch.full((seqs,), context, dtype=torch.int32, device=device)
    last = lens.long() - 1
    step = AttentionMetadata(starts, lens, starts * context, table, last, last, 1, context)
    q, softmax = torch.randn((seqs, heads, 576), device=device).bfloat16(), AttentionParams(0.07, value_dim=512)
    seconds = statistics.median(times(lambda: backend.paged_attention(q, cache, cache, step, softmax), device))
    work = seqs * context * heads * 2 * (576 + 512)
    rates = f"{seqs * context * 1152 / seconds / 1e9:.0f} GB/s, {work / seconds / 1e12:.1f} TFLOP/s"
    return f"{seconds * 1e6:.0f} us, {rates}"


def _timed_rule(
    backend: Backend,
    device: torch.device,
    rule: DeltaRule | StateSpace | SelectiveScan,
    value: int,
    seqs: int,
    count: int,
) -> str:
    kept: Recurrence = rule
    starts = torch.arange(seqs + 1, dtype=torch.int32, device=device) * count
    lens = torch.full((seqs,), count + 1, dtype=torch.int32, device=device)
    slots, at = torch.arange(seqs, device=device), torch.arange(1, count + 1, device=device).repeat(seqs)
    table = torch.zeros((seqs, 1), dtype=torch.int32, device=device)
    step = AttentionMetadata(starts, lens, starts, table, at, at, count, count + 1, state_slots=slots)
    matrices = torch.zeros((seqs, rule.num_heads, rule.key_dim, value), device=device)
    guesses = torch.zeros((seqs, 8, kept.draft_inputs_dim), device=device).bfloat16()
    sizes = (kept.input_dim, rule.num_heads * value, kept.head_inputs_dim)
    given = [torch.randn((seqs * count, size), device=device).bfloat16() for size in sizes]
    states = RecurrentStates(matrices, guesses)
    seconds = statistics.median(times(lambda: backend.run_recurrence(*given, rule, states, step), device, 10))
    read = 2 * matrices.nbytes / seconds / 1e9
    return f"{seconds * 1e6:.0f} us, {seconds / count * 1e6:.2f} a token, {read:.0f} GB/s of matrices"
