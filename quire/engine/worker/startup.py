from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from quire.engine.checkpoint.family_spec import is_encoder
from quire.engine.common.config import EngineConfig
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.worker.device_memory import check_kv_cache_fits_device
from quire.engine.worker.device_plan import choose_device, choose_device_plan, configure_cpu
from quire.engine.worker.kernel_compilation.kernel_cache import compile_lock, prepare_kernel_cache
from quire.engine.worker.loading.weight_loader import NamedTensors
from quire.engine.worker.ranks.rank_startup import start_ranks
from quire.engine.worker.startup_steps.decoder_startup import DecoderStartup
from quire.engine.worker.startup_steps.encoder_startup import start_encoder
from quire.engine.worker.startup_steps.started_worker import StartedWorker
from quire.engine.worker.startup_steps.worker_weights import load_worker_weights


def start_worker(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    progress: Callable[[], None],
    tensors: NamedTensors | None = None,
    on_rank_end: Callable[[int], None] | None = None,
) -> StartedWorker:
    """`tensors` replace the files' weights. `progress` is called after every layer. Raises ConfigError."""
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
        allocation = startup.allocate_on_all_ranks(weights, kv_plan)
        return startup.make_worker(weights, kv_plan, allocation, kernel_cache_note)
    except BaseException:
        ranks.stop_ranks()
        raise
