"""Starts the device half: device, dtype, backend, weights, KV cache, runner; each is chosen in one function."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from quire.engine.checkpoint.files import ModelConfig, read_stored_weights, resolve_model
from quire.engine.checkpoint.kv_plan import KVPlan, check_positions, check_room, plan_kv
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.models import decoder_spec
from quire.engine.models.decoder import Decoder, DecoderSpec
from quire.engine.text.grammar import GrammarCompiler, vocabulary_of
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.worker.grammar import SlotGrammars
from quire.engine.worker.graphs import Capture, CudaCapture
from quire.engine.worker.inputs import Slots
from quire.engine.worker.loader import dummy_stream, load_weights, safetensors_stream
from quire.engine.worker.memory import allocate_kv_cache, explained, kv_budget, measure_step
from quire.engine.worker.runner import Runner
from quire.kernels.backend import Backend
from quire.kernels.select import select_backend

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Worker:
    """A device half that is ready, and what was chosen for it."""

    runner: Runner
    plan: KVPlan
    device: str
    dtype: str
    backend: str
    """Its name and why it was chosen."""
    weight_bytes: int
    steps_ahead: int
    """How many steps may be under way while the next one is decided."""


def start_worker(config: EngineConfig, path: Path, model_config: ModelConfig, progress: Callable[[], None]) -> Worker:
    """Load the model at `path` and allocate its KV cache. Raises ConfigError, naming the key at fault.

    `progress` is called after every layer of every step: a step may take long, but a layer that does not end hangs.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    check_positions(model_config, config.max_model_len)
    device = choose_device(config)
    # With AMX, oneDNN's bfloat16 products of a row depend on the number of rows (seen from 12 to 32). Where our own
    # kernels do not compute, that breaks the promise of the same tokens. oneDNN reads this before its first product.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    dtype = choose_dtype(config, model_config, device)
    dtype_name = str(dtype).removeprefix("torch.")
    if device.type == "cpu" and config.load_format == "auto":
        check_room(read_stored_weights(path), dtype_name)
    spec = decoder_spec(model_config)
    backend, why = choose_backend(config, device, dtype, spec)
    # plan_kv fits the context's length once the weights are loaded; until then it is the longest that is allowed.
    length = config.max_model_len or model_config.max_position
    with explained("the weights", "model", "Serve a smaller model, or free memory that other programs hold"):
        model = Decoder(spec, backend, dtype=dtype, device=device, max_model_len=length, progress=progress)
        weight_bytes = fill(model, config, path)
    step_bytes = 0
    if device.type == "cuda":
        tokens = config.max_num_batched_tokens
        with explained(f"a step of {tokens} tokens", "max_num_batched_tokens", "Lower it, or --max-num-seqs"):
            step_bytes = measure_step(model, backend, config)
    plan = plan_kv(
        model_config,
        page_bytes=sum(tensor.nbytes for layer in model.pages(1) for tensor in layer),
        formula=model.page_formula,
        block_size=backend.block_size,
        available_bytes=kv_budget(config, device, step_bytes),
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        num_blocks=config.num_kv_blocks,
    )
    capture = choose_capture(config, backend, device)
    scratch = None if capture is None else plan.num_blocks
    param = "gpu_memory_utilization" if device.type == "cuda" else "kv_cache_memory"
    with explained(f"{plan.num_blocks} pages of KV cache", param, "Lower it, or --max-model-len"):
        blocks = plan.num_blocks + (scratch is not None)
        kv_cache = allocate_kv_cache(model, blocks)
    slots = Slots(config.max_num_seqs, plan.max_model_len, backend.block_size, device, scratch_page=scratch)
    grammars = SlotGrammars(lambda: grammar_compiler(config, path, model_config))
    runner = Runner(model, kv_cache, slots, grammars, model_config.eos_token_ids, capture)
    # On a CPU the step itself occupies the host, so running ahead overlaps nothing and delays every token by a step.
    ahead = 1 if device.type == "cuda" else 0
    return Worker(runner, plan, str(device), dtype_name, f"{backend.name} ({why})", weight_bytes, ahead)


def grammar_compiler(config: EngineConfig, path: Path, model_config: ModelConfig) -> GrammarCompiler:
    """Takes about a second for 32,000 tokens. Raises ModelError where the model has no tokenizer that fits."""
    tokenizer = Tokenizer.load(path if config.tokenizer is None else resolve_model(config.tokenizer, config.revision))
    return GrammarCompiler(vocabulary_of(tokenizer, model_config.vocab_size, model_config.eos_token_ids))


def choose_device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch finds no NVIDIA GPU", param="device")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def choose_backend(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, spec: DecoderSpec
) -> tuple[Backend, str]:
    """The backend and why it is this one. Raises ConfigError for one that cannot serve, and for --deterministic where
    Triton, which computes its products, is missing."""
    deterministic = config.deterministic and device.type == "cuda"  # a CPU's results never depend on the batch
    if deterministic and find_spec("triton") is None:
        raise ConfigError("deterministic: needs Triton (pip install triton)", param="deterministic")
    wanted = (dtype, spec.head_dim, config.attention_backend, spec.softcap is not None)
    try:
        backend, why = select_backend(device, *wanted, deterministic=deterministic)
    except ValueError as error:
        raise ConfigError(f"attention_backend: {error}", param="attention_backend") from error
    return backend, f"{why}; deterministic" if deterministic else why


def choose_capture(config: EngineConfig, backend: Backend, device: torch.device) -> Capture | None:
    """What captures decode steps as graphs; None: nothing does. The reference's attention reads lengths on the host,
    which no graph can hold."""
    able = device.type == "cuda" and backend.name != "reference"
    return CudaCapture(device) if able and not config.enforce_eager else None


def choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The type asked for, or the checkpoint's; CPUs compute float16 poorly, so there auto makes it bfloat16."""
    name = config.dtype if config.dtype != "auto" else model.dtype
    if config.dtype == "auto" and name == "float16" and device.type == "cpu":
        name = "bfloat16"
    if name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise ConfigError(f"dtype: the checkpoint's {name!r} is not supported; choose one of {known}", param="dtype")
    return _DTYPES[name]


def fill(model: Decoder, config: EngineConfig, path: Path) -> int:
    """Load the model's weights, or make them up. Returns their bytes."""
    table, stream = model.parameters(), safetensors_stream(path)
    if config.load_format == "dummy":
        stream = dummy_stream(table, config.seed, model.device)
    with torch.inference_mode():
        return load_weights(table, stream, device=model.device)
