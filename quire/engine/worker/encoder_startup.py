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
from quire.engine.encoders.runner import EncoderRunner
from quire.engine.errors import ConfigError, refuse
from quire.engine.layers.heads import Head
from quire.engine.layers.pooling import Pooler, vector_head
from quire.engine.layers.schemes import Unquantized
from quire.engine.worker.device import check_other, choose_device, choose_dtype
from quire.engine.worker.images.load import load_vectors
from quire.engine.worker.loading.check import Checkpoint
from quire.engine.worker.loading.loader import Tensors, checkpoint_stream
from quire.engine.worker.loading.model import check_files, fill
from quire.engine.worker.loading.pooler import read_tokenizer
from quire.engine.worker.memory import explained_weights
from quire.engine.worker.startup import Worker, grammar_compiler, info_of
from quire.kernels.backend import Backend
from quire.kernels.reference import Reference
from quire.kernels.select import select_backend

_MOST_TOKENS = 2**17
"""No encoder was trained for longer prompts: tables with a row for each position do not grow with what config.json
claims."""


def start_encoder(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    progress: Callable[[], None],
    tensors: Tensors | None = None,
    on_rank_end: Callable[[int], None] | None = None,
) -> Worker:
    """Load the model at `path`, with `tensors` for weights if there are any. Raises ConfigError, naming the key at
    fault. `progress` is called after every layer."""
    device = _device(config)
    dtype, changed = choose_dtype(config, model_config, device)
    stored = stored_at(config)
    check_files(config, device, dtype, None if tensors is not None else stored, model_config.num_layers)
    pooling, tasks = read_tasks(path, model_config, config)
    check_encoder(config)
    spec = encoder_spec(model_config)
    length = context_of(config, model_config, spec.longest, pooling.max_length)
    backend, why = choose_encoder_backend(config, device, dtype, spec.head_dim)
    deterministic = _keeps_rows_apart(config, backend, device, dtype)
    with explained_weights():
        scheme = Unquantized(backend, dtype)
        model = Encoder(spec, backend, scheme, dtype=dtype, device=device, max_model_len=length, progress=progress)
        head = _head(spec, pooling, backend)
        table = model.parameters() | head.parameters()
        checkpoint = Checkpoint(table, tuple(each.folder for each in pooling.dense), spec.unused)
        stream = checkpoint_stream(stored) if tensors is None else iter(tensors)
        images = load_vectors(config, path, pooling.size, backend, dtype, device, progress)
        weight_bytes = images.weight_bytes + fill(
            checkpoint, config, device, stream, None if tensors is not None else stored
        )
    pooler = Pooler(pooling, head, config.max_num_seqs, spec.hidden_size, device)
    padding = read_tokenizer(config, path).pad_token_id or 0 if spec.filled else None
    plan = no_pages(length, config.max_num_seqs)
    info = info_of(
        *(config, plan, None),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        backend=f"{backend.name} ({why})",
        weight_bytes=weight_bytes,
        deterministic=deterministic,
        tasks=tasks,
        notes=[] if changed is None else [changed],
        no_images=images.why_not,
    )
    return Worker(
        runner=EncoderRunner(model, pooler, images.features, padding),
        plan=plan,
        info=info,
        pooling=pooling,
        whole_prompts=True,
        caches_prefixes=False,
        step_costs=[],
        checkpoint=checkpoint.bare(),
        compiler=lambda: grammar_compiler(config, path, model_config),
    )


def _device(config: EngineConfig) -> torch.device:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config)
    check_other(config, device)
    return device


def _keeps_rows_apart(config: EngineConfig, backend: Backend, device: torch.device, dtype: torch.dtype) -> bool:
    apart, name = backend.keeps_rows_apart(device, dtype), str(dtype).removeprefix("torch.")
    refuse("deterministic", config.deterministic and not apart and f"not promised for encoders in {name} here")
    return apart


def _head(spec: EncoderSpec, pooling: Pooling, backend: Backend) -> Head:
    if spec.projection:
        return Head(spec.projection, backend)
    return vector_head(pooling, backend, spec.classifier, spec.hidden_size)


def check_encoder(config: EngineConfig) -> None:
    """Raise ConfigError for what decoders alone can have."""
    for name, asked, why in (
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
        refuse(name, asked and why)


def context_of(config: EngineConfig, model: ModelConfig, longest: int | None, trained: int | None) -> int:
    """Tokens of the longest prompt: what is asked for, or what the model was trained for. Raises ConfigError."""
    most = min(each for each in (model.max_position, longest, _MOST_TOKENS) if each is not None)
    if config.max_model_len is not None and config.max_model_len > most:
        wrong = f"max_model_len: {config.max_model_len} exceeds the model's {most} positions"
        raise ConfigError(wrong, param="max_model_len")
    return config.max_model_len or min(most, trained or most)


def choose_encoder_backend(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[Backend, str]:
    """The backend and why it is this one. On a GPU only plain PyTorch lets a token see what comes after it so far."""
    wanted = config.attention_backend
    if device.type != "cpu":
        if wanted not in ("auto", "reference"):
            wrong = f"attention_backend: {wanted} does not serve encoders; reference does"
            raise ConfigError(wrong, param="attention_backend")
        return Reference(), f"encoders on {device.type} run on plain PyTorch"
    try:
        return select_backend(device, dtype, head_dim, wanted, activation_bits=config.activation_bits)
    except ValueError as error:
        raise ConfigError(f"attention_backend: {error}", param="attention_backend") from error


def no_pages(max_model_len: int, max_num_seqs: int) -> KVPlan:
    """A place for each sequence, which takes no memory: nothing of a prompt outlives its step."""
    arithmetic = f"no KV: an encoder reads each prompt at once; up to {max_model_len:,} tokens"
    return KVPlan(max_num_seqs, max_model_len, 0, max_model_len, arithmetic, sequences=max_num_seqs)
