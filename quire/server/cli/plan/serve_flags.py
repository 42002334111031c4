from __future__ import annotations

from quire.engine.common.config import DEFAULT_DISK_GIB, EngineConfig
from quire.server.cli.plan.draft_plan import DraftPlan
from quire.server.cli.plan.estimate import Estimate

_DEFAULTS = EngineConfig()


def serve_flags(estimate: Estimate, draft: DraftPlan | None, context: int | None, seqs: int) -> tuple[str, ...]:
    """If `context` is None, the model's own context length applies. `seqs`: maximum number of concurrent requests."""
    machine = estimate.machine
    config = estimate.config
    parallelism = "pipeline" if machine.stages > 1 else "tensor"
    utilization = config.gpu_memory_utilization
    disk = config.kv_disk_gib
    memory = config.weights_in_memory
    draft_json = None if draft is None else draft.speculative_config.model_dump_json(exclude_unset=True)
    flag_values: tuple[tuple[str, object], ...] = (  # None: the flag is left out; "": it has no value
        ("--max-model-len", context),
        ("--rope-context", config.rope_context),
        (f"--{parallelism}-parallel-size", machine.count if machine.count > 1 else None),
        ("--decode-context-parallel-size", machine.count if config.uses_context_parallel else None),
        ("--enable-expert-parallel", "" if config.enable_expert_parallel else None),
        ("--one-shot-sums", "" if config.one_shot_sums else None),
        ("--nnodes", machine.nodes if machine.nodes > 1 else None),
        ("--master-addr", "ADDRESS" if machine.nodes > 1 else None),
        ("--data-parallel-size", machine.replicas if machine.replicas > 1 else None),
        ("--block-size", config.block_size),
        ("--dtype", estimate.dtype if config.dtype != "auto" or estimate.dtype != estimate.sizes.dtype else None),
        ("--quantization", config.online_quantization),
        ("--kv-cache-dtype", config.kv_cache_dtype if config.kv_cache_dtype != "auto" else None),
        ("--quantize-embedding", "" if config.quantize_embedding else None),
        ("--no-quantize-embedding", "" if config.quantize_embedding is False else None),
        ("--enable-lora", "" if config.enable_lora else None),
        ("--max-loras", config.max_loras if config.enable_lora else None),
        ("--max-lora-rank", config.max_lora_rank if config.enable_lora else None),
        ("--max-cpu-loras", config.max_cpu_loras if config.enable_lora else None),
        ("--speculative-config", draft_json),
        ("--max-num-seqs", seqs if seqs != _DEFAULTS.max_num_seqs else None),
        (
            "--gpu-memory-utilization",
            f"{utilization:g}" if machine.gpu and utilization != _DEFAULTS.gpu_memory_utilization else None,
        ),
        ("--kv-cache-memory", None if config.kv_cache_memory is None else f"{config.kv_cache_memory:g}"),
        ("--weights-on-disk", config.weights_on_disk),
        ("--weights-in-memory", f"{memory:g}" if memory and config.weights_on_disk is not None else None),
        ("--cpu-offload-gb", f"{config.cpu_offload_gb:g}" if config.cpu_offload_gb else None),
        ("--kv-offload-memory", f"{config.kv_offload_memory:g}" if config.kv_offload_memory else None),
        ("--kv-offload-dir", config.kv_offload_dir),
        ("--kv-offload-disk", f"{disk:g}" if config.kv_offload_dir is not None and disk != DEFAULT_DISK_GIB else None),
    )
    words = [word for flag, value in flag_values if value is not None for word in (flag, str(value))]
    return tuple(word for word in words if word)
