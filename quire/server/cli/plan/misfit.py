from __future__ import annotations

from quire.engine.checkpoint.kv_cache_plan import CUDA_CONTEXT_BYTES, GIB
from quire.server.cli.plan.estimate import Estimate, PlanRequest
from quire.server.cli.plan.experts_plan import experts_problem
from quire.server.cli.plan.machine import FLASH_BLOCK_SIZES


def misfit_reason(estimate: Estimate, request: PlanRequest) -> str | None:
    return (
        setting_reason(estimate)
        or _kv_cache_too_large_reason(estimate)
        or _weights_reason(estimate)
        or _concurrency_reason(estimate, request.concurrency or 1)
    )


def setting_reason(estimate: Estimate) -> str | None:
    """Why settings do not suit the model or the machine, whatever memory there is."""
    return (
        _dtype_or_block_size_reason(estimate)
        or _parallelism_reason(estimate)
        or estimate.layers_plan.problem
        or experts_problem(estimate.config, estimate.sizes, estimate.machine)
        or _too_few_layers_or_positions_reason(estimate)
    )


def _dtype_or_block_size_reason(estimate: Estimate) -> str | None:
    machine = estimate.machine
    config = estimate.config
    if estimate.dtype == "bfloat16" and not machine.bf16:
        return f"{machine.name} does not compute bfloat16: use --dtype float16"
    if not config.uses_context_parallel and config.block_size not in (None, estimate.block_size):
        return f"blocks have {estimate.block_size} tokens there, not {config.block_size} (--block-size)"
    return None


def _parallelism_reason(estimate: Estimate) -> str | None:
    machine = estimate.machine
    config = estimate.config
    heads = estimate.sizes.num_heads
    if machine.stages == 1 and heads % machine.count:
        return f"the model's {heads} heads cannot be divided among {machine.count} devices"
    if config.uses_context_parallel and machine.nodes > 1:
        return "ranks divide tokens (--decode-context-parallel-size) only on one machine so far"
    if config.uses_context_parallel and config.attention_backend in (*FLASH_BLOCK_SIZES, "sdpa"):
        return f"--attention-backend {config.attention_backend} has no ranks that divide tokens; auto takes triton"
    return None


def _too_few_layers_or_positions_reason(estimate: Estimate) -> str | None:
    machine = estimate.machine
    sizes = estimate.sizes
    context = estimate.config.max_model_len
    if machine.stages > sizes.num_layers:
        return f"the model's {sizes.num_layers} layers cannot be divided among {machine.stages} stages"
    if context is not None and context > sizes.max_position:
        return f"a context of {context:,} tokens exceeds the model's {sizes.max_position:,} positions"
    return None


def _kv_cache_too_large_reason(estimate: Estimate) -> str | None:
    machine = estimate.machine
    gib = estimate.config.kv_cache_memory
    available_bytes = machine.max_kv_bytes(estimate.device_weight_bytes, estimate.step_bytes)
    if gib is None or estimate.kv_budget_bytes + estimate.state_bytes <= available_bytes:
        return None
    wanted_cache = f"a KV cache of {gib:g} GiB (--kv-cache-memory)"
    return f"{wanted_cache} does not fit in the {available_bytes / GIB:.1f} GiB that are left on {machine.name}"


def _weights_reason(estimate: Estimate) -> str | None:
    if estimate.num_fitting_blocks >= 1:
        return None
    machine = estimate.machine
    available_bytes: float = machine.memory
    if machine.gpu:
        available_bytes = machine.memory * estimate.config.gpu_memory_utilization - CUDA_CONTEXT_BYTES
    weights = "the weights"
    if estimate.extra_weight_names:
        weights = " and ".join(["weights", *estimate.extra_weight_names])
    each = " on each device" if machine.count > 1 else ""
    return (
        f"{weights} take {estimate.device_weight_bytes / GIB:.1f} GiB{each} "
        f"and {machine.name} has {available_bytes / GIB:.1f} GiB "
        "for them: nothing is left for a KV cache"
    )


def _concurrency_reason(estimate: Estimate, concurrency: int) -> str | None:
    context = estimate.config.max_model_len
    if context is not None:
        num_contexts = estimate.total_group_blocks // estimate.block_needs.max_blocks(context)
        if num_contexts < concurrency:
            return _too_many_contexts_message(estimate, concurrency, context, num_contexts)
    if estimate.num_fitting_blocks < concurrency:
        return f"{concurrency} requests at once need a block each, and {estimate.num_fitting_blocks} blocks fit"
    return None


def _too_many_contexts_message(estimate: Estimate, concurrency: int, context: int, num_contexts: int) -> str:
    needs = estimate.block_needs
    needed = concurrency * needs.max_blocks(context) * estimate.block_bytes / len(needs.windows)
    shorter = needs.max_context_tokens(estimate.total_group_blocks // concurrency, context)
    fewer = f", or {num_contexts} x {context:,}" if num_contexts else ""
    return (
        f"{concurrency} x {context:,} tokens need {needed / GIB:.2f} GiB of KV cache, "
        f"{estimate.kv_budget_bytes / GIB:.2f} GiB "
        f"are left; {concurrency} x {shorter:,} tokens fit{fewer}"
    )
