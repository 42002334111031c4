from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from quire.engine.checkpoint.family_spec import build_encoder_spec
from quire.engine.checkpoint.model_resolver import resolve_weights
from quire.engine.checkpoint.pooling import read_pooling_and_tasks
from quire.engine.common.config import EngineConfig
from quire.engine.encoders.encoder import Encoder
from quire.engine.encoders.encoder_runner import EncoderRunner
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.layers.pooling import Pooler
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.worker.device_memory import explain_weights_out_of_memory
from quire.engine.worker.device_plan import check_non_cuda_accelerator_settings, choose_compute_dtype_and_note
from quire.engine.worker.images.tower_loader import load_vector_tower
from quire.engine.worker.loading.model.weight_filling import check_weights_fit, fill_weights
from quire.engine.worker.loading.pooler import make_encoder_pooler_head, read_tokenizer
from quire.engine.worker.loading.weight_check import ExpectedWeights
from quire.engine.worker.loading.weight_loader import NamedTensors, checkpoint_stream
from quire.engine.worker.startup_steps.encoder_settings import (
    check_encoder_config,
    choose_encoder_backend,
    determine_batch_invariance,
    encoder_context_length,
)
from quire.engine.worker.startup_steps.started_worker import (
    StartedWorker,
    make_engine_info,
    make_grammar_compiler,
    plan_without_kv_cache,
)
from quire.engine.worker.startup_steps.unused_gpus import unused_gpu_note


def start_encoder(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    device: torch.device,
    progress: Callable[[], None],
    tensors: NamedTensors | None,
    kernel_cache_note: str | None,
) -> StartedWorker:
    """See start_worker. Raises ConfigError."""
    check_non_cuda_accelerator_settings(config, device)
    dtype, changed = choose_compute_dtype_and_note(config, model_config, device)
    stored = resolve_weights(config)
    check_weights_fit(config, device, dtype, None if tensors is not None else stored, model_config.num_layers)
    pooling, tasks = read_pooling_and_tasks(path, model_config, config)
    check_encoder_config(config)
    spec = build_encoder_spec(model_config)
    length = encoder_context_length(config, model_config, spec.max_prompt_len, pooling.max_seq_length)
    backend, why = choose_encoder_backend(config, device, dtype, spec.head_dim)
    deterministic = determine_batch_invariance(config, backend, device, dtype)
    with explain_weights_out_of_memory(None):
        scheme = UnquantizedScheme(backend, dtype)
        model = Encoder(
            spec, backend, scheme, dtype=dtype, device=device, max_model_len=length, report_progress=progress
        )
        head = make_encoder_pooler_head(spec, pooling, backend)
        table = model.parameters() | head.parameters()
        checkpoint = ExpectedWeights(table, tuple(each.folder for each in pooling.dense_modules), spec.unused_prefixes)
        stream = checkpoint_stream(stored) if tensors is None else iter(tensors)
        images = load_vector_tower(config, path, pooling.vector_size, backend, dtype, device, progress)
        weight_bytes = images.weight_bytes + fill_weights(
            checkpoint, config, device, stream, None if tensors is not None else stored
        )
    pooler = Pooler(pooling, head, config.max_num_seqs, spec.hidden_size, device)
    padding = read_tokenizer(config, path).pad_token_id or 0 if spec.pads_prompts else None
    plan = plan_without_kv_cache(length, config.max_num_seqs)
    info = make_engine_info(
        config,
        plan,
        None,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        backend=f"{backend.name} ({why})",
        weight_bytes=weight_bytes,
        deterministic=deterministic,
        tasks=tasks,
        notes=[note for note in (changed, kernel_cache_note, unused_gpu_note(config, device)) if note is not None],
        no_images=images.text_only_reason,
    )
    return StartedWorker(
        executor=EncoderRunner(model, pooler, images.encoder_cache, padding),
        kv_plan=plan,
        engine_info=info,
        pooling=pooling,
        needs_whole_prompts=True,
        caches_prefixes=False,
        step_costs=[],
        expected_weights=checkpoint.detach_from_model(),
        get_grammar_compiler=lambda: make_grammar_compiler(config, path, model_config),
    )
