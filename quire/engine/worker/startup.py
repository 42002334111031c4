from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from quire.engine.checkpoint.family_spec import is_encoder
from quire.engine.checkpoint.kv_cache_plan import KVCachePlan
from quire.engine.common.config import EngineConfig
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.worker.device_memory import check_kv_cache_fits_device, release_cached_memory
from quire.engine.worker.device_plan import choose_device, choose_device_plan, configure_cpu
from quire.engine.worker.kernel_compilation.kernel_cache import compile_lock, prepare_kernel_cache
from quire.engine.worker.loading.weight_loader import NamedTensors
from quire.engine.worker.ranks.rank_startup import start_ranks
from quire.engine.worker.startup_steps.decoder_startup import DecoderStartup
from quire.engine.worker.startup_steps.encoder_startup import start_encoder
from quire.engine.worker.startup_steps.started_worker import StartedWorker
from quire.engine.worker.startup_steps.worker_weights import WorkerWeights, load_worker_weights
from quire.engine.worker.warmup import WarmupResult, warm_up_runner


def start_worker(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    progress: Callable[[], None],
    tensors: NamedTensors | None = None,
    on_rank_end: Callable[[int], None] | None = None,
) -> StartedWorker:
    """`progress` is called after every layer. Raises ConfigError."""
    device = choose_device(config)
    check_kv_cache_fits_device(config, device)
    is_cuda = device.type == "cuda"
    kernel_cache_note = prepare_kernel_cache() if is_cuda else None
    configure_cpu(config)
    if is_encoder(model_config):
        return start_encoder(config, path, model_config, device, progress, tensors, kernel_cache_note)
    with compile_lock(progress) if is_cuda else nullcontext():
        device_plan = choose_device_plan(config, model_config, progress)
    ranks = start_ranks(config, path, device_plan, progress, on_rank_end, weights_are_tensors=tensors is not None)
    try:
        startup = DecoderStartup(config, path, model_config, device_plan, ranks)
        weights = load_worker_weights(config, path, model_config, device_plan, ranks, progress, tensors)
        kv_plan = startup.plan_kv_cache(weights)
        worker, warmup = _allocate_and_warm_up(startup, config, weights, kv_plan, kernel_cache_note)
        fitting_plan, graph_note = startup.shrink_to_measured_graphs(weights, kv_plan, warmup.graph_bytes)
        if fitting_plan is not kv_plan:
            del worker  # graphs contain the blocks' addresses, so graphs and blocks are made anew
            ranks.release_followers_caches()
            gc.collect()  # runners have reference cycles
            release_cached_memory()
            worker, warmup = _allocate_and_warm_up(startup, config, weights, fitting_plan, kernel_cache_note)
        return replace(worker, warmup_notes=tuple(note for note in (graph_note, *warmup.notes) if note is not None))
    except BaseException:
        ranks.stop_ranks()
        raise


def _allocate_and_warm_up(
    startup: DecoderStartup,
    config: EngineConfig,
    weights: WorkerWeights,
    kv_plan: KVCachePlan,
    kernel_cache_note: str | None,
) -> tuple[StartedWorker, WarmupResult]:
    allocation = startup.allocate_on_all_ranks(weights, kv_plan)
    worker = startup.make_worker(weights, kv_plan, allocation, kernel_cache_note)
    drafter = None if worker.started_drafter is None else worker.started_drafter.drafter
    return worker, warm_up_runner(worker.executor, config.warmup_seconds, config.max_step_tokens, drafter)
