"""An estimate as text, as JSON and, for many cards, as a table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from quire.engine.checkpoint.families import FAMILIES
from quire.engine.checkpoint.kv_plan import DTYPE_BYTES, GIB
from quire.engine.config import DEMO_MODEL
from quire.server.cli.plan.estimate import BLOCK_SIZE, Estimate
from quire.server.cli.plan.machine import Machine
from quire.server.config import ServerConfig

_SHORT = 1024
"""Tokens of the context that a lone stream's speed is told for."""


def as_text(made: Estimate, name: str, better: Machine | None) -> str:
    sizes = made.sizes
    active = f", {_count(sizes.active_parameters)} per token" if sizes.experts else ""
    kept = ", in 12 bits on this CPU" if made.machine.compresses and made.dtype == "bfloat16" else ""
    quantized = f" ({sizes.quantization}, {sizes.bits:g} bits)" if sizes.quantization else ""
    lines = [
        ("model", f"{sizes.model_type}, {_count(sizes.parameters)} parameters{active}"),
        ("weights", f"{made.dtype}{quantized}: {_size(made.weight_bytes)}, by {made.weight_source}{kept}"),
        (
            "KV",
            f"{sizes.kv_formula} x {DTYPE_BYTES[made.dtype]} B = {_size(made.kv_token_bytes)} a token"
            f"{' and device' if made.machine.count > 1 else ''}; a page of {BLOCK_SIZE} tokens "
            f"{_size(made.page_bytes)}, {_size(made.layer_page_bytes)} per layer",
        ),
        ("memory", _memory(made)),
    ]
    if made.fits:
        command = shlex.join(["quire", "serve", *([] if name == DEMO_MODEL else [name]), *made.flags])
        lines += [
            ("cache", _cache(made)),
            (
                "fits",
                f"{made.concurrency:,} x {made.context:,} tokens of {_size(made.context * made.kv_token_bytes)} each",
            ),
            ("room for", ", ".join(f"{count:,} x {length:,}" for length, count in made.fitting)),
            *_speed(made),
            ("serve", command),
        ]
    else:
        lines += [("does not fit", reason) for reason in made.reasons]
        if better is not None:
            lines.append(("fits on", f"{better.count} x {better.name}" if better.count > 1 else better.name))
    lines += [("note", note) for note in notes(made)]
    return "\n".join(f"{label:<13} {text}" for label, text in lines)


def as_dict(made: Estimate, better: Machine | None) -> dict[str, Any]:
    """For programs; bytes, tokens, seconds."""
    sizes, machine = made.sizes, made.machine
    many = max(made.concurrency, 1)
    return {
        "model_type": sizes.model_type,
        "parameters": sizes.parameters,
        "active_parameters": sizes.active_parameters,
        "max_position": sizes.max_position,
        "dtype": made.dtype,
        "quantization": sizes.quantization,
        "weight_bytes": made.weight_bytes,
        "weight_source": made.weight_source,
        "machine": {"name": machine.name, "memory_bytes": machine.memory, "count": machine.count, "gpu": machine.gpu},
        "kv": {
            "bytes_per_token": made.kv_token_bytes,
            "block_size": BLOCK_SIZE,
            "page_bytes": made.page_bytes,
            "page_bytes_per_layer": made.layer_page_bytes,
            "budget_bytes": made.kv_budget,
            "num_blocks": made.num_blocks,
        },
        "fits": made.fits,
        "reasons": list(made.reasons),
        "context": made.context,
        "concurrency": made.concurrency,
        "fitting": [{"context": length, "concurrency": count} for length, count in made.fitting],
        "limits": None
        if machine.bandwidth is None or not made.fits
        else {
            "decode_tokens_per_second_alone": made.decode_limit(1, min(_SHORT, made.context)),
            "decode_tokens_per_second_full": made.decode_limit(many, made.context),
            "prefill_seconds": made.prefill_seconds(made.context),
        },
        "flags": list(made.flags),
        "fits_on": None if better is None else {"name": better.name, "count": better.count},
        "notes": notes(made),
    }


def as_table(estimates: Sequence[Estimate]) -> str:
    """One line per card: what fits, and the limits of speed."""
    head = f"{'card':<18} {'memory':>9} {'for KV':>9} {'tokens':>11} {'context x at once':>22} {'alone':>9} {'full':>9}"
    lines = [head]
    for made in estimates:
        machine = made.machine
        name = f"{machine.count} x {machine.name}" if machine.count > 1 else machine.name
        row = f"{name:<18} {machine.memory / GIB:>5.1f} GiB "
        if not made.fits:
            lines.append(row + f"  {made.reasons[0]}")
            continue
        alone, full = made.decode_limit(1, min(_SHORT, made.context)), made.decode_limit(made.concurrency, made.context)
        shape = f"{made.context:,} x {made.concurrency:,}"
        lines.append(
            row + f"{made.kv_budget / GIB:>5.1f} GiB {made.kv_tokens:>11,} {shape:>22} {alone:>9,.0f} {full:>9,.0f}"
        )
    return "\n".join([*lines, "alone, full: at most so many tokens a second, of one stream and of all that fit"])


def notes(made: Estimate) -> list[str]:
    """What a reader of the figures must know beside them."""
    sizes = made.sizes
    found = list(sizes.notes)
    if sizes.model_type not in FAMILIES:
        found.append(f"Quire does not serve {sizes.model_type or 'this'} models yet: figures only")
    if sizes.quantization:
        found.append("Quire does not load quantized weights yet: figures only")
    if made.machine.count > 1 and "tensor_parallel_size" not in ServerConfig.model_fields:
        found.append("Quire does not split a model over devices yet: figures only, without the cost of talking")
    if sizes.sliding:
        found.append(f"{sizes.sliding} of {sizes.num_layers} layers see a sliding window; all their keys are kept")
    return found


def _memory(made: Estimate) -> str:
    machine = made.machine
    each = f"{machine.count} x {machine.name}, each" if machine.count > 1 else f"{machine.name},"
    free = " free" if not machine.gpu else ""
    return f"{each} {machine.memory / GIB:.1f} GiB{free}: {made.kv_budget / GIB:.2f} GiB for the KV cache"


def _cache(made: Estimate) -> str:
    tokens = made.num_blocks * BLOCK_SIZE
    all_used = f": all that {made.concurrency:,} full contexts (--max-num-seqs) use" if tokens < made.kv_tokens else ""
    return f"{made.num_blocks:,} pages = {tokens:,} tokens = {_size(made.num_blocks * made.page_bytes)}{all_used}"


def _speed(made: Estimate) -> list[tuple[str, str]]:
    short = min(_SHORT, made.context)
    alone, full = made.decode_limit(1, short), made.decode_limit(made.concurrency, made.context)
    first = made.prefill_seconds(made.context)
    if alone is None or full is None or first is None:
        return [("speed", "unknown here: --bandwidth and --tflops give its limits")]
    return [
        (
            "decode",
            f"at most {alone:,.0f} tokens/s alone after {short:,} tokens, {full:,.0f} with "
            f"{made.concurrency:,} x {made.context:,}",
        ),
        ("prefill", f"at most {made.context / first:,.0f} tokens/s; {made.context:,} take {first:.2f} s or more"),
    ]


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,}"


def _size(size: float) -> str:
    for unit, bytes_of in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= bytes_of:
            return f"{size / bytes_of:.4g} {unit}"
    return f"{size / 1024:.4g} KiB"
