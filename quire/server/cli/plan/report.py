"""Formats an estimate as text or as JSON, and estimates for many cards as a table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.kv_plan import CUDA_CONTEXT_BYTES, DTYPE_BYTES, GIB, KV_CODE_SCALE_BYTES
from quire.engine.checkpoint.stages import stage_layers
from quire.engine.config import DEMO_MODEL
from quire.engine.images.config import KEPT_BYTES
from quire.server.cli.plan.estimate import Estimate
from quire.server.cli.plan.images import ImagesPlan
from quire.server.cli.plan.machine import ENGINE_HOST_BYTES, Machine

MIB = 2**20
_SHORT = 1024
"""Tokens of context for which the speed of a single stream is given."""


def as_text(
    made: Estimate,
    name: str,
    better: Machine | None,
    lighter: str | None = None,
    images: ImagesPlan | None = None,
) -> str:
    """better: where else a model that does not fit would; lighter: the --quantization with which it would here;
    images: what those of a request take."""
    sizes = made.sizes
    if not made.page_bytes:
        return _encoder_text(made, name, better)
    active = f", {_count(sizes.active_parameters)} per token" if sizes.experts else ""
    quantized = f" ({sizes.quantization}, {sizes.bits:g} bits)" if sizes.quantization else ""
    compressed = made.machine.compresses and made.dtype == "bfloat16" and not quantized
    kept = ", in 12 bits on this CPU" if compressed else ""
    kept = f", {made.config.at_load} at load" if made.config.at_load else kept
    lines = [
        ("model", f"{sizes.model_type}, {_count(sizes.parameters)} parameters{active}"),
        ("weights", f"{made.dtype}{quantized}: {_size(made.weight_bytes)}, by {made.weight_source}{kept}"),
        *_experts(made),
        *_layers(made),
        (
            "KV",
            f"{_kv_formula(made)} = {_size(made.kv_token_bytes)} a token"
            f"{' and device' if made.machine.count > 1 else ''}; a page of {made.block_size} tokens "
            f"{_size(made.page_bytes)}, {_size(made.layer_page_bytes)} per layer",
        ),
        *([("adapters", f"{_size(made.adapter_bytes)} in all, of linears")] if made.adapter_bytes else []),
        *([("states", f"{_size(made.state_bytes)} in the slots of all sequences")] if made.state_bytes else []),
        *([("drafts", f"{_size(made.draft_bytes)} of weights")] if made.draft_bytes else []),
        *([] if images is None else _images(made, images)),
        ("memory", _memory(made)),
    ]
    if made.fits:
        lines += [
            ("cache", _cache(made)),
            *([("below it", _tiers(made))] if made.tiers else []),
            (
                "fits",
                f"{made.concurrency:,} x {made.context:,} tokens of {_size(made.context_bytes(made.context))} each",
            ),
            ("room for", ", ".join(f"{count:,} x {length:,}" for length, count in made.fitting)),
            *_speed(made),
        ]
        if not unserved(made):
            lines.append(("serve", _command(name, made.flags)))
    else:
        lines += [("does not fit", reason) for reason in made.reasons]
        if lighter is not None:
            lines.append(("fits with", f"--quantization {lighter}"))
        if better is not None:
            lines.append(("fits on", f"{better.count} x {better.name}" if better.count > 1 else better.name))
    lines += [("note", note) for note in notes(made)]
    return "\n".join(f"{label:<13} {text}" for label, text in lines)


def _experts(made: Estimate) -> list[tuple[str, str]]:
    plan, found = made.experts, list[str]()
    if plan.whole and made.machine.count > 1:
        each = f"{plan.least:,}" if plan.least == plan.most else f"{plan.least:,} or {plan.most:,}"
        found.append(f"{each} of each layer's {made.sizes.experts:,}, whole, on each device")
    if plan.on_disk:
        each = " on each device" if made.machine.count > 1 else ""
        found.append(f"{_size(plan.on_disk)} in a file on disk, {_size(plan.kept)} of it in memory too{each}")
    return [("experts", "; ".join(found))] if found else []


def _layers(made: Estimate) -> list[tuple[str, str]]:
    plan = made.layers
    if not plan.layers:
        return []
    each = " on each device" if made.machine.count > 1 else ""
    where = "in a file on disk" if plan.from_disk else "in the host's memory"
    return [("layers", f"{plan.streamed} of {plan.layers} streamed{each}: {_size(plan.elsewhere)} {where}")]


def _images(made: Estimate, images: ImagesPlan) -> list[tuple[str, str]]:
    asked = images.asked
    tiles = f"{images.tiles:,} parts for the tower"
    room = f" of a context of {made.context:,}" if made.fits else ""
    over = ": too many" if made.fits and images.tokens >= made.context else ""
    tokens = f"{images.tokens:,} tokens{room}{over}"
    features = f"{_size(images.feature_bytes)} of features ({_size(KEPT_BYTES)} of all requests' are kept)"
    pixels = f"{_size(images.pixel_bytes)} of pixels while a request is open"
    loaded = f"{_size(images.tower_bytes)}, among the weights"
    return [
        ("images", f"{asked.count:,} x {asked.width:,} x {asked.height:,}: {tiles}, {tokens}"),
        ("they take", f"{features}, {pixels}"),
        ("their tower", loaded if images.tower_bytes else "not loaded: images are read on CPUs"),
    ]


def _kv_formula(made: Estimate) -> str:
    if not made.sizes.kv_numbers:
        return "no keys and values"
    ways = min(made.machine.count, made.sizes.kv_heads)
    formula = made.sizes.kv_formula + (f" / {ways} devices" if ways > 1 else "")
    width, columns = DTYPE_BYTES[made.dtype], made.sizes.state_formula
    beside = f" + {columns} x {width} B" if columns else ""
    if made.kv_cache_dtype == "auto":
        return f"{formula} x {width} B{beside}"
    if made.kv_cache_dtype in DTYPE_BYTES:
        return f"{formula} x {DTYPE_BYTES[made.kv_cache_dtype]} B{beside}"
    scale = KV_CODE_SCALE_BYTES[made.kv_cache_dtype]
    return f"{formula} x 1 B" + (f", a scale of {scale} B for each head" if scale else "") + beside


def _encoder_text(made: Estimate, name: str, better: Machine | None) -> str:
    """Of a model that keeps no KV cache."""
    sizes = made.sizes
    lines = [
        ("model", f"{sizes.model_type}, {_count(sizes.parameters)} parameters"),
        ("weights", f"{made.dtype}: {_size(made.weight_bytes)}, by {made.weight_source}"),
        ("KV", "none: an encoder reads each prompt at once"),
    ]
    if made.fits:
        lines += [("fits", f"prompts of up to {made.context:,} tokens"), ("serve", _command(name, made.flags))]
    else:
        lines += [("does not fit", reason) for reason in made.reasons]
        if better is not None:
            lines.append(("fits on", better.name))
    return "\n".join(f"{label:<13} {text}" for label, text in lines)


def as_dict(made: Estimate, better: Machine | None, images: ImagesPlan | None = None) -> dict[str, Any]:
    """The estimate for programs: sizes in bytes and tokens, times in seconds."""
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
        "adapter_bytes": made.adapter_bytes,
        "draft_bytes": made.draft_bytes,
        "experts": {"whole": made.experts.whole, "disk_bytes": made.experts.on_disk, "kept_bytes": made.experts.kept},
        "layers": {"streamed": made.layers.streamed, "elsewhere_bytes": made.layers.elsewhere}
        | {"step_bytes": made.layers.read},
        "state_bytes": made.state_bytes,
        "images": None if images is None else images.as_dict(),
        "machine": {"name": machine.name, "memory_bytes": machine.memory, "count": machine.count, "gpu": machine.gpu}
        | {"stages": machine.stages, "replicas": machine.replicas, "nodes": machine.nodes},
        "kv": {
            "dtype": made.dtype if made.kv_cache_dtype == "auto" else made.kv_cache_dtype,
            "bytes_per_token": made.kv_token_bytes,
            "block_size": made.block_size,
            "page_bytes": made.page_bytes,
            "page_bytes_per_layer": made.layer_page_bytes,
            "budget_bytes": made.kv_budget,
            "num_blocks": made.num_blocks,
        },
        "tiers": [{"name": each.name, "bytes": each.size, "tokens": each.tokens} for each in made.tiers],
        "fits": made.fits,
        "reasons": list(made.reasons),
        "context": made.context,
        "concurrency": made.concurrency,
        "fitting": [{"context": length, "concurrency": count} for length, count in made.fitting],
        "limits": None
        if machine.bandwidth is None or not made.fits or not made.page_bytes
        else {
            "decode_tokens_per_second_alone": made.decode_limit(1, min(_SHORT, made.context)),
            "decode_tokens_per_second_full": made.decode_limit(many, made.context),
            "prefill_seconds": made.prefill_seconds(made.context),
        },
        "served": not unserved(made),
        "flags": [] if unserved(made) else list(made.flags),
        "fits_on": None if better is None else {"name": better.name, "count": better.count},
        "notes": notes(made),
    }


def as_table(estimates: Sequence[Estimate]) -> str:
    """A table with one line per card: what fits, and the limits of speed."""
    lines = [
        f"{'':<18} {'':>9} {'memory':>9} {'KV cache,':>11} {'context, tokens':>22} {'tokens/s':>9} {'tokens/s':>9}",
        f"{'card':<18} {'memory':>9} {'for KV':>9} {'tokens':>11} {'x requests at once':>22} {'alone':>9} {'full':>9}",
    ]
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
    return "\n".join([*lines, "tokens/s are upper limits: of one request alone, and of all requests that fit together"])


def notes(made: Estimate) -> list[str]:
    """Reservations about the figures."""
    sizes = made.sizes
    talk = ["what GPUs send each other, and NCCL's buffers, are not counted"]
    found = [*sizes.notes, *(talk if made.machine.gpu and made.machine.count > 1 else [])]
    found += [f"{reason}: figures only" for reason in unserved(made)]
    if made.experts.on_disk:
        rest = (
            f"{_size(made.experts.token_bytes)} a token are read from the disk unless the system has room to keep them"
        )
        found.append(f"limits are those of memory; of the experts that one token chooses {rest}")
    if made.layers.read:
        plan = made.layers
        how = "for each GB/s that the disk reads" if plan.from_disk else "where the bus copies 25 GB/s (PCIe 4.0 x16)"
        found.append(
            f"limits are those of memory; a step reads {_size(plan.read)} of layers, so there are at most "
            f"{plan.steps:.3g} steps a second {how}"
        )
    if made.experts.whole and made.machine.count > 1:
        found.append("limits are as if a step read as many experts on each device; the one with the most sets the pace")
    if made.machine.replicas > 1:
        found.append(f"these are the figures of each of {made.machine.replicas} replicas")
    if (nodes := made.machine.nodes) > 1:
        found.append(f"{nodes} machines like this one in a private network, of which each needs the weights' files")
    if (stages := made.machine.stages) > 1:
        layers = ", ".join(str(len(each)) for each in stage_layers(sizes.num_layers, stages))
        found.append(f"stages of {layers} layers; these are the figures of one on average")
    if sizes.sliding:
        found.append(f"{sizes.sliding} of {sizes.num_layers} layers see a sliding window; {_saved(made)}")
    return found


def _saved(made: Estimate) -> str:
    if made.needs.windows == (None,):
        return "all their keys are kept"
    if not made.fits:
        return "keys outside of it are not kept"
    every = -(-made.context // made.block_size) * made.page_bytes
    saved = 1 - made.context_bytes(made.context) / every
    return f"keys outside of it are not kept, which saves {saved:.0%} of a context of {made.context:,} tokens"


def unserved(made: Estimate) -> list[str]:
    """Why Quire does not serve the model there; [] where it does."""
    found = list(made.sizes.unserved)
    if made.machine.stages > 1 and made.machine.gpu:
        found.append("Quire has pipelines on CPUs alone so far; --tensor-parallel-size is for GPUs too")
    if made.machine.count > 1 and made.tiers:
        found.append("Quire keeps no pages of several ranks beside their cache yet")
    return found


def _command(name: str, flags: Sequence[str]) -> str:
    """`quire serve` takes directories; a plan is made of a config.json too."""
    model = str(Path(name).parent) if name.endswith(".json") else name
    return shlex.join(["quire", "serve", *([] if name == DEMO_MODEL else [model]), *flags])


_ROUNDING = 4
"""MiB by which four rounded figures may differ."""


def _memory(made: Estimate) -> str:
    machine, utilization = made.machine, made.config.gpu_memory_utilization
    each = f"{machine.count} x {machine.name}, each" if machine.count > 1 else f"{machine.name},"
    # Whole MiB that add up: what is rounded is in the rough estimate, of the largest step or of what Quire takes.
    all_of_it, kept, cache = (
        round(size / MIB) for size in (machine.memory * utilization, made.device_weight_bytes, made.kv_budget)
    )
    others = "".join(f" and {name}" for name in made.beside)
    weights = f"{kept:,} MiB of weights{others}"
    if not machine.gpu:
        total, own = round(machine.memory / MIB), round(ENGINE_HOST_BYTES / MIB)
        left = f"{total - own - kept:,} MiB; of it {cache:,} MiB for the KV cache"
        return f"{each} {total:,} MiB free - {own:,} MiB for Quire - {weights} = {left}"
    cuda = round(CUDA_CONTEXT_BYTES / MIB)
    whole = f"{machine.memory / MIB:,.0f} MiB x {utilization:g} = {all_of_it:,} MiB"
    step = round(made.step_bytes / MIB)
    if all_of_it < cuda + kept:
        return f"{each} {whole} - {cuda:,} MiB for CUDA - {weights}: {cuda + kept - all_of_it:,} MiB too few"
    room = all_of_it - cuda - kept - step
    if room > cache + _ROUNDING:  # less than fits was asked for
        left = f"{room:,} MiB; of it {cache:,} MiB for the KV cache"
    else:
        step, left = max(all_of_it - cuda - kept - cache, 0), f"{cache:,} MiB for the KV cache"
    graphs = "" if made.config.enforce_eager else " and graphs"
    return f"{each} {whole} - {cuda:,} MiB for CUDA - {weights} - {step:,} MiB for the largest step{graphs} = {left}"


def _cache(made: Estimate) -> str:
    tokens = made.num_blocks * made.block_size
    all_used = f": all that {made.concurrency:,} full contexts (--max-num-seqs) use" if tokens < made.kv_tokens else ""
    return f"{made.num_blocks:,} pages = {tokens:,} tokens = {_size(made.num_blocks * made.page_bytes)}{all_used}"


def _tiers(made: Estimate) -> str:
    kinds = {"host": "pinned memory of the host" if made.machine.gpu else "memory, set aside", "disk": "disk"}
    return "; ".join(f"{_size(each.size)} of {kinds[each.name]} = {each.tokens:,} tokens" for each in made.tiers)


def _speed(made: Estimate) -> list[tuple[str, str]]:
    short = min(_SHORT, made.context)
    alone, full = made.decode_limit(1, short), made.decode_limit(made.concurrency, made.context)
    first = made.prefill_seconds(made.context)
    if alone is None or full is None or first is None:
        return [("speed", "unknown: --bandwidth and --tflops give its limits")]
    most = "about" if made.machine.measured else "at most"
    least = "or so" if made.machine.measured else "or more"
    return [
        (
            "decode",
            f"{most} {alone:,.0f} tokens/s alone after {short:,} tokens, {full:,.0f} with "
            f"{made.concurrency:,} x {made.context:,}",
        ),
        ("prefill", f"{most} {made.context / first:,.0f} tokens/s; {made.context:,} take {first:.2f} s {least}"),
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
