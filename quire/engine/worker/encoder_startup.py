"""Starts the device half of an encoder: device, dtype, backend, weights, runner. It keeps no KV cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from quire.engine.checkpoint.files import ModelConfig, stored_at
from quire.engine.checkpoint.kv_plan import KVPlan
from quire.engine.checkpoint.pooling import Pooling, read_tasks
from quire.engine.config import EngineConfig
from quire.engine.encoders import encoder_spec
from quire.engine.encoders.encoder import Encoder, EncoderSpec
from quire.engine.encoders.encoder_runner import EncoderRunner
from quire.engine.errors import ConfigError, refuse_setting
from quire.engine.layers.pooler_head import PoolerHead
from quire.engine.layers.pooling import Pooler, make_pooler_head
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.worker.device_memory import explain_weights_memory
from quire.engine.worker.device_plan import check_other_device, choose_compute_dtype, choose_device
from quire.engine.worker.images.tower_loader import load_vector_tower
from quire.engine.worker.loading.model_loader import check_weights_fit, fill_weights
from quire.engine.worker.loading.pooler import read_tokenizer
from quire.engine.worker.loading.weight_check import ExpectedWeights
from quire.engine.worker.loading.weight_loader import NamedTensors, checkpoint_stream
from quire.engine.worker.started_worker import StartedWorker, make_engine_info, make_grammar_compiler
from quire.kernels.backend import Backend
from quire.kernels.backend_selection import select_backend
from quire.kernels.reference import ReferenceBackend

_MAX_TOKENS = 2**17
"""No encoder was trained for longer prompts: tables with a row for each position do not grow with what config.json
claims."""


def start_encoder(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    progress: Callable[[], None],
    tensors: NamedTensors | None = None,
    on_rank_end: Callable[[int], None] | None = None,
) -> StartedWorker:
    """Load the model at `path`, with `tensors` for weights if there are any. Raises ConfigError, naming the key at
    fault. `progress` is called after every layer."""
    device = _choose_encoder_device(config)
    dtype, changed = choose_compute_dtype(config, model_config, device)
    stored = stored_at(config)
    check_weights_fit(config, device, dtype, None if tensors is not None else stored, model_config.num_layers)
    pooling, tasks = read_tasks(path, model_config, config)
    check_encoder_config(config)
    spec = encoder_spec(model_config)
    length = encoder_context_length(config, model_config, spec.max_prompt_len, pooling.max_length)
    backend, why = choose_encoder_backend(config, device, dtype, spec.head_dim)
    deterministic = _check_batch_invariance(config, backend, device, dtype)
    with explain_weights_memory():
        scheme = UnquantizedScheme(backend, dtype)
        model = Encoder(
            spec, backend, scheme, dtype=dtype, device=device, max_model_len=length, report_progress=progress
        )
        head = _make_vector_head(spec, pooling, backend)
        table = model.parameters() | head.parameters()
        checkpoint = ExpectedWeights(table, tuple(each.folder for each in pooling.dense), spec.unused_prefixes)
        stream = checkpoint_stream(stored) if tensors is None else iter(tensors)
        images = load_vector_tower(config, path, pooling.size, backend, dtype, device, progress)
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
        notes=[] if changed is None else [changed],
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
        expected_weights=checkpoint.strip_model(),
        get_grammar_compiler=lambda: make_grammar_compiler(config, path, model_config),
    )


def _choose_encoder_device(config: EngineConfig) -> torch.device:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config)
    check_other_device(config, device)
    return device


def _check_batch_invariance(config: EngineConfig, backend: Backend, device: torch.device, dtype: torch.dtype) -> bool:
    batch_invariant, name = backend.is_batch_invariant(device, dtype), str(dtype).removeprefix("torch.")
    refuse_setting(
        "deterministic", config.deterministic and not batch_invariant and f"not promised for encoders in {name} here"
    )
    return batch_invariant


def _make_vector_head(spec: EncoderSpec, pooling: Pooling, backend: Backend) -> PoolerHead:
    if spec.projection:
        return PoolerHead(spec.projection, backend)
    return make_pooler_head(pooling, backend, spec.classifier, spec.hidden_size)


def check_encoder_config(config: EngineConfig) -> None:
    """Raise ConfigError for what decoders alone can have."""
    for name, is_set, why in (
        ("tensor_parallel_size", config.tensor_parallel_size > 1, "encoders are not divided"),
        ("pipeline_parallel_size", config.pipeline_parallel_size > 1, "encoders are not divided"),
        ("enable_expert_parallel", config.enable_expert_parallel, "encoders have no experts"),
        ("one_shot_sums", config.one_shot_sums, "encoders are not divided"),
        ("weights_on_disk", config.weights_on_disk is not None, "encoders are held in memory"),
        ("block_size", config.block_size is not None, "encoders keep no pages"),
        ("cpu_offload_gb", config.cpu_offload_gb > 0, "encoders are held on the device"),
        ("enable_lora", config.enable_lora, "encoders have no adapters"),
        ("quantization", config.quantization is not None, "encoders are not quantized"),
        ("kv_cache_dtype", config.kv_cache_dtype != "auto", "encoders keep no KV cache"),
        ("quantize_embedding", config.quantize_embedding, "encoders are not quantized"),
    ):
        refuse_setting(name, is_set and why)


def encoder_context_length(
    config: EngineConfig, model: ModelConfig, longest: int | None, trained_length: int | None
) -> int:
    """Tokens of the longest prompt: what is asked for, or what the model was trained for. Raises ConfigError."""
    max_tokens = min(each for each in (model.max_position, longest, _MAX_TOKENS) if each is not None)
    if config.max_model_len is not None and config.max_model_len > max_tokens:
        wrong = f"max_model_len: {config.max_model_len} exceeds the model's {max_tokens} positions"
        raise ConfigError(wrong, param="max_model_len")
    return config.max_model_len or min(max_tokens, trained_length or max_tokens)


def choose_encoder_backend(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[Backend, str]:
    """The backend and why it is this one. On a GPU only plain PyTorch lets a token see what comes after it so far."""
    wanted = config.attention_backend
    if device.type != "cpu":
        if wanted not in ("auto", "reference"):
            wrong = f"attention_backend: {wanted} does not serve encoders; reference does"
            raise ConfigError(wrong, param="attention_backend")
        return ReferenceBackend(), f"encoders on {device.type} run on plain PyTorch"
    try:
        return select_backend(device, dtype, head_dim, wanted, activation_bits=config.activation_bits)
    except ValueError as error:
        raise ConfigError(f"attention_backend: {error}", param="attention_backend") from error


def plan_without_kv_cache(max_model_len: int, max_num_seqs: int) -> KVPlan:
    """A place for each sequence, which takes no memory: nothing of a prompt outlives its step."""
    arithmetic = f"no KV: an encoder reads each prompt at once; up to {max_model_len:,} tokens"
    return KVPlan(max_num_seqs, max_model_len, 0, max_model_len, arithmetic, sequences=max_num_seqs)
