from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.engine.checkpoint.kv_cache_plan import CUDA_CONTEXT_BYTES, DTYPE_BYTES, GIB, KV_CODE_SCALE_BYTES
from quire.engine.checkpoint.layer_placement import split_layers_into_stages
from quire.engine.common.config import DEMO_MODEL
from quire.engine.images.vision_config import ENCODER_CACHE_BYTES
from quire.engine.processes.gpus import describe_division
from quire.server.cli.plan.estimate import Estimate
from quire.server.cli.plan.images_plan import ImagesPlan
from quire.server.cli.plan.machine import ENGINE_HOST_BYTES, Machine

MIB = 2**20
_SHORT_CONTEXT = 1024


def format_report(
    estimate: Estimate,
    name: str,
    smallest_gpu: Machine | None,
    fitting_quantization: str | None = None,
    images_plan: ImagesPlan | None = None,
) -> str:
    if not estimate.block_bytes:
        return _format_encoder_text(estimate, name, smallest_gpu)
    lines = [
        ("model", _model_text(estimate)),
        ("weights", _weights_text(estimate)),
        *_expert_lines(estimate),
        *_streamed_layer_lines(estimate),
        ("KV", _kv_token_bytes_text(estimate)),
    ]
    if estimate.adapter_bytes:
        lines.append(("adapters", f"{_format_size(estimate.adapter_bytes)} in all, of linears"))
    if estimate.state_bytes:
        lines.append(("states", f"{_format_size(estimate.state_bytes)} in the slots of all sequences"))
    if estimate.draft_bytes:
        lines.append(("drafts", f"{_format_size(estimate.draft_bytes)} of weights"))
    if images_plan is not None:
        lines += _image_lines(estimate, images_plan)
    lines.append(("memory", _memory_text(estimate)))
    if estimate.fits:
        lines += _lines_if_model_fits(estimate, name)
    else:
        lines += _misfit_lines(estimate, smallest_gpu, fitting_quantization)
    lines += [("note", note) for note in estimate_notes(estimate)]
    return "\n".join(f"{label:<13} {text}" for label, text in lines)


def _model_text(estimate: Estimate) -> str:
    sizes = estimate.sizes
    active = f", {_format_count(sizes.active_parameters)} per token" if sizes.num_experts else ""
    return f"{sizes.model_type}, {_format_count(sizes.num_parameters)} parameters{active}"


def _weights_text(estimate: Estimate) -> str:
    sizes = estimate.sizes
    quantized = f" ({sizes.quantization}, {sizes.bits_per_weight:g} bits)" if sizes.quantization else ""
    stored_as = ""
    if estimate.machine.expands_weights(estimate.config.attention_backend) and (
        estimate.config.online_quantization or quantized
    ):
        stored_as = f", held in {estimate.dtype} on this GPU"
    elif estimate.config.online_quantization:
        stored_as = f", {estimate.config.online_quantization} at load"
    elif estimate.machine.compresses_weights and estimate.dtype == "bfloat16" and not quantized:
        stored_as = ", in 12 bits on this CPU"
    size = _format_size(estimate.weight_bytes)
    return f"{estimate.dtype}{quantized}: {size}, by {estimate.weight_source}{stored_as}"


def _kv_token_bytes_text(estimate: Estimate) -> str:
    each = " and device" if estimate.machine.count > 1 else ""
    return (
        f"{_kv_formula(estimate)} = {_format_size(estimate.kv_token_bytes)} a token{each}; "
        f"a block of {estimate.block_size} tokens "
        f"{_format_size(estimate.block_bytes)}, {_format_size(estimate.layer_block_bytes)} per layer"
    )


def _lines_if_model_fits(estimate: Estimate, name: str) -> list[tuple[str, str]]:
    lines = [("cache", _kv_cache_text(estimate))]
    if estimate.tier_plans:
        lines.append(("below it", _tiers_text(estimate)))
    size = _format_size(estimate.context_kv_bytes(estimate.context))
    lines.append(("fits", f"{estimate.concurrency:,} x {estimate.context:,} tokens of {size} each"))
    lines.append(("room for", ", ".join(f"{count:,} x {length:,}" for length, count in estimate.fitting)))
    lines += _speed_lines(estimate)
    if not unserved_reasons(estimate):
        lines.append(("serve", _serve_command(name, estimate.flags)))
    return lines


def _misfit_lines(
    estimate: Estimate, smallest_gpu: Machine | None, fitting_quantization: str | None
) -> list[tuple[str, str]]:
    lines = [("does not fit", reason) for reason in estimate.reasons]
    if fitting_quantization is not None:
        lines.append(("fits with", f"--quantization {fitting_quantization}"))
    if smallest_gpu is not None:
        count = f"{smallest_gpu.count} x " if smallest_gpu.count > 1 else ""
        lines.append(("fits on", f"{count}{smallest_gpu.name}"))
    return lines


def _expert_lines(estimate: Estimate) -> list[tuple[str, str]]:
    plan, texts = estimate.experts_plan, list[str]()
    if plan.has_whole_experts and estimate.machine.count > 1:
        each = (
            f"{plan.min_experts:,}"
            if plan.min_experts == plan.max_experts
            else f"{plan.min_experts:,} or {plan.max_experts:,}"
        )
        texts.append(f"{each} of each layer's {estimate.sizes.num_experts:,}, whole, on each device")
    if plan.disk_bytes:
        each = " on each device" if estimate.machine.count > 1 else ""
        texts.append(
            f"{_format_size(plan.disk_bytes)} in a file on disk, "
            f"{_format_size(plan.memory_bytes)} of it in memory too{each}"
        )
    return [("experts", "; ".join(texts))] if texts else []


def _streamed_layer_lines(estimate: Estimate) -> list[tuple[str, str]]:
    plan = estimate.layers_plan
    if not plan.num_layers:
        return []
    each = " on each device" if estimate.machine.count > 1 else ""
    where = "in a file on disk" if plan.from_disk else "in the host's memory"
    return [
        (
            "layers",
            f"{plan.num_streamed} of {plan.num_layers} streamed{each}: {_format_size(plan.offloaded_bytes)} {where}",
        )
    ]


def _image_lines(estimate: Estimate, images_plan: ImagesPlan) -> list[tuple[str, str]]:
    request_images = images_plan.images
    tiles = f"{images_plan.tiles:,} parts for the tower"
    room = f" of a context of {estimate.context:,}" if estimate.fits else ""
    over = ": too many" if estimate.fits and images_plan.tokens >= estimate.context else ""
    tokens = f"{images_plan.tokens:,} tokens{room}{over}"
    features = (
        f"{_format_size(images_plan.feature_bytes)} of features "
        f"({_format_size(ENCODER_CACHE_BYTES)} of all requests' are kept)"
    )
    pixels = f"{_format_size(images_plan.pixel_bytes)} of pixels while a request is open"
    loaded = f"{_format_size(images_plan.tower_bytes)}, among the weights"
    return [
        (
            "images",
            f"{request_images.count:,} x {request_images.width:,} x {request_images.height:,}: {tiles}, {tokens}",
        ),
        ("they take", f"{features}, {pixels}"),
        ("their tower", loaded if images_plan.tower_bytes else "not loaded: images are read on CPUs"),
    ]


def _kv_formula(estimate: Estimate) -> str:
    if not estimate.sizes.kv_values_per_token:
        return "no keys and values"
    ways = min(estimate.machine.count, estimate.sizes.num_kv_heads)
    formula = estimate.sizes.kv_formula + (f" / {ways} devices" if ways > 1 else "")
    width, columns = DTYPE_BYTES[estimate.dtype], estimate.sizes.conv_state_formula
    beside = f" + {columns} x {width} B" if columns else ""
    if estimate.kv_cache_dtype == "auto":
        return f"{formula} x {width} B{beside}"
    if estimate.kv_cache_dtype in DTYPE_BYTES:
        return f"{formula} x {DTYPE_BYTES[estimate.kv_cache_dtype]} B{beside}"
    scale = KV_CODE_SCALE_BYTES[estimate.kv_cache_dtype]
    return f"{formula} x 1 B" + (f", a scale of {scale} B for each head" if scale else "") + beside


def _format_encoder_text(estimate: Estimate, name: str, smallest_gpu: Machine | None) -> str:
    sizes = estimate.sizes
    lines = [
        ("model", f"{sizes.model_type}, {_format_count(sizes.num_parameters)} parameters"),
        ("weights", f"{estimate.dtype}: {_format_size(estimate.weight_bytes)}, by {estimate.weight_source}"),
        ("KV", "none: an encoder reads each prompt at once"),
    ]
    if estimate.fits:
        lines += [
            ("fits", f"prompts of up to {estimate.context:,} tokens"),
            ("serve", _serve_command(name, estimate.flags)),
        ]
    else:
        lines += [("does not fit", reason) for reason in estimate.reasons]
        if smallest_gpu is not None:
            lines.append(("fits on", smallest_gpu.name))
    return "\n".join(f"{label:<13} {text}" for label, text in lines)


def estimate_dict(
    estimate: Estimate, smallest_gpu: Machine | None, images_plan: ImagesPlan | None = None
) -> dict[str, Any]:
    """Values are in bytes, tokens and seconds."""
    sizes, machine = estimate.sizes, estimate.machine
    many = max(estimate.concurrency, 1)
    return {
        "model_type": sizes.model_type,
        "parameters": sizes.num_parameters,
        "active_parameters": sizes.active_parameters,
        "max_position": sizes.max_position,
        "dtype": estimate.dtype,
        "quantization": sizes.quantization,
        "weight_bytes": estimate.weight_bytes,
        "weight_source": estimate.weight_source,
        "adapter_bytes": estimate.adapter_bytes,
        "draft_bytes": estimate.draft_bytes,
        "experts": {
            "whole": estimate.experts_plan.has_whole_experts,
            "disk_bytes": estimate.experts_plan.disk_bytes,
            "kept_bytes": estimate.experts_plan.memory_bytes,
        },
        "layers": {
            "streamed": estimate.layers_plan.num_streamed,
            "elsewhere_bytes": estimate.layers_plan.offloaded_bytes,
        }
        | {"step_bytes": estimate.layers_plan.read_bytes},
        "state_bytes": estimate.state_bytes,
        "images": None if images_plan is None else images_plan.to_json_dict(),
        "machine": {"name": machine.name, "memory_bytes": machine.memory, "count": machine.count, "gpu": machine.gpu}
        | {"stages": machine.stages, "replicas": machine.replicas, "nodes": machine.nodes},
        "kv": {
            "dtype": estimate.dtype if estimate.kv_cache_dtype == "auto" else estimate.kv_cache_dtype,
            "bytes_per_token": estimate.kv_token_bytes,
            "block_size": estimate.block_size,
            "page_bytes": estimate.block_bytes,
            "page_bytes_per_layer": estimate.layer_block_bytes,
            "budget_bytes": estimate.kv_budget_bytes,
            "num_blocks": estimate.num_blocks,
        },
        "tiers": [
            {"name": each.name, "bytes": each.num_bytes, "tokens": each.num_tokens} for each in estimate.tier_plans
        ],
        "fits": estimate.fits,
        "reasons": list(estimate.reasons),
        "context": estimate.context,
        "concurrency": estimate.concurrency,
        "fitting": [{"context": length, "concurrency": count} for length, count in estimate.fitting],
        "limits": None
        if machine.bandwidth is None or not estimate.fits or not estimate.block_bytes
        else {
            "decode_tokens_per_second_alone": estimate.max_decode_tokens_per_second(
                1, min(_SHORT_CONTEXT, estimate.context)
            ),
            "decode_tokens_per_second_full": estimate.max_decode_tokens_per_second(many, estimate.context),
            "prefill_seconds": estimate.min_prefill_seconds(estimate.context),
        },
        "served": not unserved_reasons(estimate),
        "flags": [] if unserved_reasons(estimate) else list(estimate.flags),
        "fits_on": None if smallest_gpu is None else {"name": smallest_gpu.name, "count": smallest_gpu.count},
        "notes": estimate_notes(estimate),
    }


def format_gpu_table(estimates: Sequence[Estimate]) -> str:
    lines = [
        f"{'':<18} {'':>9} {'memory':>9} {'KV cache,':>11} {'context, tokens':>22} {'tokens/s':>9} {'tokens/s':>9}",
        f"{'card':<18} {'memory':>9} {'for KV':>9} {'tokens':>11} {'x requests at once':>22} {'alone':>9} {'full':>9}",
    ]
    for estimate in estimates:
        machine = estimate.machine
        name = f"{machine.count} x {machine.name}" if machine.count > 1 else machine.name
        row = f"{name:<18} {machine.memory / GIB:>5.1f} GiB "
        if not estimate.fits:
            lines.append(row + f"  {estimate.reasons[0]}")
            continue
        alone, full = (
            estimate.max_decode_tokens_per_second(1, min(_SHORT_CONTEXT, estimate.context)),
            estimate.max_decode_tokens_per_second(estimate.concurrency, estimate.context),
        )
        shape = f"{estimate.context:,} x {estimate.concurrency:,}"
        lines.append(
            row + f"{estimate.kv_budget_bytes / GIB:>5.1f} GiB {estimate.kv_tokens:>11,} {shape:>22} "
            f"{alone:>9,.0f} {full:>9,.0f}"
        )
    return "\n".join([*lines, "tokens/s are upper limits: of a single request, and of all requests that fit together"])


def estimate_notes(estimate: Estimate) -> list[str]:
    sizes = estimate.sizes
    talk = ["communication between GPUs and NCCL's buffers are not counted"]
    texts = [*sizes.notes, *(talk if estimate.machine.gpu and estimate.machine.count > 1 else [])]
    texts += [f"{reason}: figures only" for reason in unserved_reasons(estimate)]
    if estimate.experts_plan.disk_bytes:
        rest = (
            f"{_format_size(estimate.experts_plan.token_read_bytes)} a token are read from the disk "
            "unless the system has room to keep them"
        )
        texts.append(f"limits are those of memory; of the experts that one token chooses {rest}")
    if estimate.layers_plan.read_bytes:
        plan = estimate.layers_plan
        how = "for each GB/s that the disk reads" if plan.from_disk else "where the bus copies 25 GB/s (PCIe 4.0 x16)"
        texts.append(
            f"limits are those of memory; a step reads {_format_size(plan.read_bytes)} of layers, so there are at most "
            f"{plan.max_steps_per_second:.3g} steps a second {how}"
        )
    if estimate.experts_plan.has_whole_experts and estimate.machine.count > 1:
        texts.append("limits are as if a step read as many experts on each device; the one with the most sets the pace")
    if estimate.machine.replicas > 1:
        gpus = estimate.machine.replica_gpus
        where = f": {describe_division(gpus)}" if gpus else ""
        texts.append(f"these are the figures of each of {estimate.machine.replicas} replicas{where}")
    if (nodes := estimate.machine.nodes) > 1:
        texts.append(f"{nodes} machines like this one in a private network, each with the weight files")
    if (stages := estimate.machine.stages) > 1:
        layers = ", ".join(str(len(each)) for each in split_layers_into_stages(sizes.num_layers, stages))
        texts.append(f"stages of {layers} layers; these are the figures of one on average")
    if sizes.num_sliding_layers:
        texts.append(
            f"{sizes.num_sliding_layers} of {sizes.num_layers} layers see a sliding window; "
            f"{_sliding_window_note(estimate)}"
        )
    return texts


def _sliding_window_note(estimate: Estimate) -> str:
    if estimate.block_needs.windows == (None,):
        return "all their keys are kept"
    if not estimate.fits:
        return "keys outside of it are not kept"
    every = -(-estimate.context // estimate.block_size) * estimate.block_bytes
    saved = 1 - estimate.context_kv_bytes(estimate.context) / every
    return f"keys outside of it are not kept, which saves {saved:.0%} of a context of {estimate.context:,} tokens"


def unserved_reasons(estimate: Estimate) -> list[str]:
    reasons = list(estimate.sizes.unsupported_reasons)
    if estimate.machine.gpu and estimate.sizes.gpu_error:
        reasons.append(estimate.sizes.gpu_error)
    if estimate.kv_cache_dtype not in ("auto", *DTYPE_BYTES) and estimate.sizes.quantized_kv_error:
        reasons.append(estimate.sizes.quantized_kv_error)
    if estimate.machine.stages > 1 and estimate.machine.gpu:
        reasons.append("Quire has pipelines only on CPUs so far; --tensor-parallel-size works on GPUs too")
    if estimate.machine.count > 1 and estimate.tier_plans:
        reasons.append("Quire cannot offload the blocks of several ranks yet")
    return reasons


def _serve_command(name: str, flags: Sequence[str]) -> str:
    """Removes config.json from a path, because `quire serve` takes only directories."""
    model = str(Path(name).parent) if name.endswith(".json") else name
    return shlex.join(["quire", "serve", *([] if name == DEMO_MODEL else [model]), *flags])


_ROUNDING_MIB = 4


def _memory_text(estimate: Estimate) -> str:
    machine, utilization = estimate.machine, estimate.config.gpu_memory_utilization
    each = f"{machine.count} x {machine.name}, each" if machine.count > 1 else f"{machine.name},"
    # Whole MiB whose sum is exact: rounding errors are added to the largest step or to Quire's own memory.
    all_of_it, weights_mib, cache = (
        round(size / MIB)
        for size in (machine.memory * utilization, estimate.device_weight_bytes, estimate.kv_budget_bytes)
    )
    others = "".join(f" and {name}" for name in estimate.extra_weight_names)
    weights = f"{weights_mib:,} MiB of weights{others}"
    limit = " at most" if _is_cache_below_budget(estimate) else ""
    if not machine.gpu:
        total, own = round(machine.memory / MIB), round(ENGINE_HOST_BYTES / MIB)
        left = f"{total - own - weights_mib:,} MiB; of it {cache:,} MiB for the KV cache{limit}"
        return f"{each} {total:,} MiB free - {own:,} MiB for Quire - {weights} = {left}"
    cuda = round(CUDA_CONTEXT_BYTES / MIB)
    whole = f"{machine.memory / MIB:,.0f} MiB x {utilization:g} = {all_of_it:,} MiB"
    step = round(estimate.step_bytes / MIB)
    if all_of_it < cuda + weights_mib:
        return f"{each} {whole} - {cuda:,} MiB for CUDA - {weights}: {cuda + weights_mib - all_of_it:,} MiB too few"
    room = all_of_it - cuda - weights_mib - step
    if room > cache + _ROUNDING_MIB:
        left = f"{room:,} MiB; of it {cache:,} MiB for the KV cache{limit}"
    else:
        step, left = max(all_of_it - cuda - weights_mib - cache, 0), f"{cache:,} MiB for the KV cache{limit}"
    graphs = "" if estimate.config.enforce_eager else " and graphs"
    return f"{each} {whole} - {cuda:,} MiB for CUDA - {weights} - {step:,} MiB for the largest step{graphs} = {left}"


def _is_cache_below_budget(estimate: Estimate) -> bool:
    return 0 < estimate.num_blocks < estimate.num_fitting_blocks


def _kv_cache_text(estimate: Estimate) -> str:
    tokens = estimate.num_blocks * estimate.block_size
    contexts = f"{estimate.concurrency:,} full contexts (--max-num-seqs)"
    all_used = f": all that {contexts} use" if _is_cache_below_budget(estimate) else ""
    return (
        f"{estimate.num_blocks:,} blocks = {tokens:,} tokens = "
        f"{_format_size(estimate.num_blocks * estimate.block_bytes)}{all_used}"
    )


def _tiers_text(estimate: Estimate) -> str:
    kinds = {"host": "pinned memory of the host" if estimate.machine.gpu else "memory, set aside", "disk": "disk"}
    return "; ".join(
        f"{_format_size(each.num_bytes)} of {kinds[each.name]} = {each.num_tokens:,} tokens"
        for each in estimate.tier_plans
    )


def _speed_lines(estimate: Estimate) -> list[tuple[str, str]]:
    short = min(_SHORT_CONTEXT, estimate.context)
    alone, full = (
        estimate.max_decode_tokens_per_second(1, short),
        estimate.max_decode_tokens_per_second(estimate.concurrency, estimate.context),
    )
    first = estimate.min_prefill_seconds(estimate.context)
    if alone is None or full is None or first is None:
        return [("speed", "unknown: --bandwidth and --tflops give its limits")]
    most = "about" if estimate.machine.measured else "at most"
    least = "or so" if estimate.machine.measured else "or more"
    return [
        (
            "decode",
            f"{most} {alone:,.0f} tokens/s alone after {short:,} tokens, {full:,.0f} with "
            f"{estimate.concurrency:,} x {estimate.context:,}",
        ),
        (
            "prefill",
            f"{most} {estimate.context / first:,.0f} tokens/s; "
            f"{estimate.context:,} take {_format_duration(first)} {least}",
        ),
    ]


def _format_duration(seconds: float) -> str:
    """Two digits or whole units, as befits an estimate."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _format_count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,}"


def _format_size(size: float) -> str:
    for unit, bytes_of in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= bytes_of:
            return f"{size / bytes_of:.4g} {unit}"
    return f"{size / 1024:.4g} KiB"
