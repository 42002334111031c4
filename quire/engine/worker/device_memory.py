from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.engine.architecture.kv_cache_spec import KVCacheSpec, KVElementSizes
from quire.engine.checkpoint.kv_cache_groups import max_draft_tokens_per_step
from quire.engine.checkpoint.kv_cache_plan import (
    GIB,
    MAX_DEFAULT_CPU_KV_BYTES,
    available_host_bytes,
    check_kv_memory,
    cuda_graph_bytes,
    device_kv_budget,
    host_kv_budget,
    max_mixed_graph_tokens,
    num_nccl_calls,
    total_host_bytes,
)
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, QuireError
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import BlockCopy, SlotCopy
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.images.vision_config import ENCODER_CACHE_BYTES
from quire.engine.layers.sublayer import CacheTensorSpec
from quire.engine.lora.target_modules import effective_max_cpu_loras, num_adapter_weights, target_linears
from quire.engine.models.decoder import Decoder, KVCache
from quire.engine.worker.sampling.device_sampler import choose_sampler
from quire.engine.worker.sampling.sampling_rules import SamplingRow, make_request_sampling_rules
from quire.kernels.attention.context_shard import ContextShard, single_shard
from quire.kernels.backend import AttentionMetadata, Backend, LayerCache, LinearContext
from quire.kernels.device.error_messages import describe_compiler_error, describe_kernel_error, is_triton_error
from quire.kernels.gpu.other_devices import MPS_OUT_OF_MEMORY, available_device_bytes, empty_device_caches

_PREFAULT_FRACTION = 1 / 8
_PREFAULT_BYTES = 512 * 2**10
_OUT_OF_MEMORY_MESSAGES = ("can't allocate memory", MPS_OUT_OF_MEMORY)
"""PyTorch raises RuntimeErrors with these texts on hosts and Apple GPUs."""


def check_kv_cache_fits_device(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError."""
    kv_gib = config.kv_cache_memory
    if device.type == "cpu":
        check_kv_memory(kv_gib and kv_gib * config.data_parallel_size, total_host_bytes(), "this machine")
    elif device.type == "cuda" and kv_gib is not None:
        gpus = config.tensor_parallel_size
        where = "the GPU" if gpus == 1 else f"the {gpus} GPUs"
        check_kv_memory(kv_gib, torch.cuda.mem_get_info(device)[1] * gpus, where)


def kv_budget(
    config: EngineConfig, device: torch.device, step_bytes: int, *, keeps_weights_quantized: bool = True
) -> int:
    """Returns the setting kv_cache_memory or else what is left after `step_bytes`, in bytes; on a CPU, this replica's
    share. Call once weights are loaded. Raises ConfigError.
    """
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB)
    if device.type != "cuda":
        device_free = available_device_bytes(device)
        room = available_host_bytes() if device_free is None else device_free
        free = room - step_bytes - int((config.kv_offload_memory or 0) * GIB)
        return host_kv_budget(free) // (config.data_parallel_size if device_free is None else 1)
    free, total = torch.cuda.mem_get_info(device)
    budget = device_kv_budget(free, total, config.gpu_memory_utilization) - step_bytes
    if budget <= 0:
        share = f"{config.gpu_memory_utilization:g} of the GPU's {total / GIB:.1f} GiB"
        memory_use = (
            f"weights, and other programs if any, hold {(total - free) / GIB:.1f}, a step takes {step_bytes / GIB:.1f}"
        )
        raise ConfigError(
            f"gpu_memory_utilization: {share} leaves nothing for the KV cache: {memory_use}. "
            "Raise --gpu-memory-utilization, "
            "lower --max-num-batched-tokens or --max-num-seqs, or "
            f"{_smaller_weights_advice(keeps_weights_quantized=keeps_weights_quantized)}",
            param="gpu_memory_utilization",
        )
    return budget


class ContextMemory:
    """What contexts need, known before weights are loaded. The KV cache is planned afterwards, from the memory that is
    then left.
    """

    def __init__(
        self,
        config: EngineConfig,
        specs: Sequence[KVCacheSpec],
        element_sizes: KVElementSizes,
        device: torch.device,
        block_size: int,
    ) -> None:
        self._config = config
        self._specs = specs
        self._element_sizes = element_sizes
        self._device = device
        self._block_size = block_size

    def longest_context(self, most: int) -> int:
        """Returns an upper bound, so that per-position tables do not grow with the context length in config.json."""
        if self._config.num_kv_blocks is not None:
            return min(most, self._config.num_kv_blocks * self._block_size)
        return self._longest_fitting(most, self._max_kv_bytes())

    def check(self, max_model_len: int) -> None:
        """Raises ConfigError."""
        if self._config.num_kv_blocks is not None:
            return self._check_blocks(max_model_len, self._config.num_kv_blocks)
        available = self._max_kv_bytes()
        if self._config.kv_cache_memory is None and self._device.type == "cpu":
            available = min(available, host_kv_budget(available_host_bytes()) * self._config.nnodes)
        if (needed := self._needed_bytes(max_model_len)) > available:
            raise ConfigError(
                f"max_model_len: a context of {max_model_len} tokens needs {needed:,} bytes of KV cache, "
                f"{available:,} are available; the longest that fits is at most "
                f"{self._longest_fitting(max_model_len, available)} tokens",
                param="max_model_len",
            )

    def _check_blocks(self, max_model_len: int, num_kv_blocks: int) -> None:
        """With windows, contexts may have more tokens than the blocks. Recurrent states are not in blocks."""
        page_bytes = sum(each.page_size_bytes(self._block_size, self._element_sizes) for each in self._specs)
        longest = num_kv_blocks * self._block_size
        if not page_bytes or max_model_len <= longest or any(each.window for each in self._specs):
            return
        raise ConfigError(
            f"max_model_len: a context of {max_model_len} tokens needs {-(-max_model_len // self._block_size):,} KV "
            f"blocks, num_kv_blocks is {num_kv_blocks:,}; the longest that fits is at most {longest} tokens",
            param="max_model_len",
        )

    def _needed_bytes(self, num_tokens: int) -> int:
        drafts = max_draft_tokens_per_step(self._config)
        return sum(
            each.max_memory_usage_bytes(num_tokens, self._block_size, self._element_sizes, drafts)
            for each in self._specs
        )

    def _longest_fitting(self, most: int, available: int) -> int:
        return max(bisect_right(range(most + 1), available, key=self._needed_bytes) - 1, 0)

    def _max_kv_bytes(self) -> int:
        config, is_gpu = self._config, self._device.type == "cuda"
        if config.kv_cache_memory is not None:
            budget = int(config.kv_cache_memory * GIB)
        else:
            budget = torch.cuda.mem_get_info(self._device)[1] if is_gpu else MAX_DEFAULT_CPU_KV_BYTES
        return budget * (config.tensor_parallel_size if is_gpu else config.nnodes)  # heads are divided among ranks


class StepReserve(NamedTuple):
    step_bytes: int
    graph_bytes: int = 0
    """An estimate."""


class AvailableMemory(NamedTuple):
    kv_bytes: int
    graph_bytes: int
    """Already subtracted from kv_bytes."""


def measure_available_memory(
    model: Decoder, model_config: ModelConfig, backend: Backend, config: EngineConfig, image_bytes: int = 0
) -> AvailableMemory:
    """`image_bytes`: a GPU's peak memory while it encodes an image. All GPU ranks must call this at the same time."""
    reserve = find_step_reserve(model, model_config, backend, config)
    reserved = max(reserve.step_bytes, image_bytes) + reserve.graph_bytes + (ENCODER_CACHE_BYTES if image_bytes else 0)
    kv_bytes = kv_budget(config, model.device, reserved, keeps_weights_quantized=backend.keeps_weights_quantized)
    return AvailableMemory(kv_bytes, reserve.graph_bytes)


def find_step_reserve(model: Decoder, model_config: ModelConfig, backend: Backend, config: EngineConfig) -> StepReserve:
    """On a GPU, measures the largest step. On other devices, returns the bytes of the LoRA adapters."""
    if model.device.type != "cuda":
        if not config.enable_lora:
            return StepReserve(0)
        linears = target_linears(model_config) if model.spec.lora_target_sizes is None else model.spec.lora_target_sizes
        each = num_adapter_weights(linears, config.max_lora_rank) * model.dtype.itemsize
        return StepReserve(each * effective_max_cpu_loras(config.max_loras, config.max_cpu_loras))
    tokens = config.max_step_tokens
    with explain_out_of_memory(f"a step of {tokens} tokens", "max_num_batched_tokens", "Lower it, or --max-num-seqs"):
        return measure_step_bytes(model, backend, config)


@torch.inference_mode()
def measure_step_bytes(model: Decoder, backend: Backend, config: EngineConfig) -> StepReserve:
    """Run the largest step on a dummy KV cache. Returns the step's peak memory in bytes, without weights and KV cache,
    and an estimate for CUDA graphs.
    """
    device, length = model.device, min(config.max_step_tokens, model.max_model_len)
    seqs = -(-config.max_step_tokens // length)
    own = model.shard.context_shard(backend.block_size)
    metadata = prefill_metadata(seqs, length, backend.block_size, device, model.groups.num_groups, own)
    if model.adapters is not None:
        linear = LinearContext.from_adapter_slots(torch.ones_like(metadata.positions))
        others = tuple(replace(each, linear_context=linear) for each in metadata.other_groups)
        metadata = replace(metadata, linear_context=linear, other_groups=others)
    kv_cache = _allocate_dummy_kv_cache(
        model, metadata.block_table.numel() * model.groups.num_groups + (own.world_size > 1), seqs
    )
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ids = torch.zeros(seqs * length, dtype=torch.int32, device=device)
    num_samples = min(config.max_num_seqs, len(ids))
    hidden = model.forward(ids, metadata, kv_cache, torch.arange(num_samples, device=device))
    if model.has_head:
        row = SamplingRow(make_request_sampling_rules(SamplingParams(top_p=0.5), ()), 0, length, length, ids[None], 0)
        choose_sampler(device, model.argmax, model.sample_tokens, model.shard.group)(
            model.compute_logits(hidden, metadata.linear_context.select_rows(torch.arange(num_samples, device=device))),
            [row] * num_samples,
            None,
        )
    torch.cuda.synchronize(device)
    peak_bytes = torch.cuda.max_memory_allocated(device) - before
    del kv_cache, hidden
    torch.cuda.empty_cache()
    if config.enforce_eager:
        return StepReserve(peak_bytes)
    max_graph_tokens = (
        max_mixed_graph_tokens(length, config.max_num_seqs) if backend.cuda_graph_support == "steps" else None
    )
    ranks = config.tensor_parallel_size
    calls = num_nccl_calls(model.spec.num_layers, ranks, context_parallel=config.uses_context_parallel)
    graph_bytes = cuda_graph_bytes(peak_bytes, len(ids), max_graph_tokens, calls, has_drafter=config.has_draft_weights)
    return StepReserve(peak_bytes, graph_bytes)


def prefill_metadata(
    seqs: int,
    length: int,
    block_size: int,
    device: torch.device,
    groups: int = 1,
    context_shard: ContextShard | None = None,
) -> AttentionMetadata:
    """Keys and values of tokens outside `context_shard` go to one extra block."""
    blocks_per_seq = -(-length // block_size)
    table = torch.arange(seqs * blocks_per_seq, dtype=torch.int32, device=device).view(seqs, blocks_per_seq)
    positions = torch.arange(length, device=device).repeat(seqs)
    starts = torch.arange(0, seqs * length + 1, length, dtype=torch.int32, device=device)
    tables = [table + group * table.numel() for group in range(groups)]
    shard = (
        single_shard(block_size)
        if context_shard is None
        else replace(context_shard, remote_slot=groups * table.numel() * context_shard.tokens_per_page)
    )
    rows = torch.arange(seqs, device=device).repeat_interleave(length)
    slots = [shard.slot_mapping(group_table[rows, positions // block_size].long(), positions) for group_table in tables]
    first_group = AttentionMetadata(
        query_start=starts,
        context_lens=torch.full((seqs,), length, dtype=torch.int32, device=device),
        key_start=starts,
        block_table=table,
        positions=positions,
        slot_mapping=slots[0],
        max_query_len=length,
        max_context_len=length,
        is_full_prefill=True,
        state_slots=torch.arange(seqs, device=device),
    )
    return first_group.with_block_tables(tables, slots)


class KVModule(Protocol):
    device: torch.device

    @property
    def block_bytes_formula(self) -> str: ...

    def block_tensor_specs(self, num_blocks: int) -> list[tuple[CacheTensorSpec, ...]]: ...


def block_bytes(model: KVModule) -> int:
    return sum(tensor.total_bytes for layer in model.block_tensor_specs(1) for tensor in layer)


def block_bytes_of_all_groups(model: Decoder, places: int) -> int:
    """`places`: the layers per block, summed over all pipeline stages."""
    if model.groups.num_groups > 1:
        return block_bytes(model) * places // model.groups.layers_per_block * model.groups.num_groups
    return model.all_stages_block_bytes


def allocate_kv_blocks(model: KVModule, num_blocks: int) -> list[Tensor]:
    """Stacks tensors of the same shape and dtype as [tensors, blocks, ...], so that one operation covers a block in all
    layers. Device tensors are zeroed, because kernels also read unwritten blocks before a sliding window, with weight
    0. Host tensors are not zeroed.
    """
    kinds = Counter(each for layer in model.block_tensor_specs(num_blocks) for each in layer)
    make = torch.empty if model.device.type == "cpu" else torch.zeros
    return [make((count, *kind.shape), dtype=kind.dtype, device=model.device) for kind, count in kinds.items()]


def kv_cache_by_layer(model: KVModule, tensors: Sequence[Tensor], states: Sequence[LayerCache] = ()) -> KVCache:
    layers = model.block_tensor_specs(tensors[0].shape[1] if tensors else 1)  # a stage may have slot states only
    kinds = dict.fromkeys(each for layer in layers for each in layer)
    parts = {kind: iter(each) for kind, each in zip(kinds, tensors, strict=True)}
    layer_states = states or [()] * len(layers)
    return [(*(next(parts[kind]) for kind in layer), *own) for layer, own in zip(layers, layer_states, strict=True)]


def allocate_slot_states(model: Decoder, slots: int, drafts: int) -> list[LayerCache]:
    """Per layer index in the block. Host tensors are not zeroed, because slots are written before they are read."""
    make = torch.empty if model.device.type == "cpu" else torch.zeros
    layers = model.slot_tensor_specs(slots, drafts)
    return [tuple(make(each.shape, dtype=each.dtype, device=model.device) for each in layer) for layer in layers]


def slot_state_bytes(model: Decoder, config: EngineConfig) -> int:
    return model.total_slot_bytes(1, max_draft_tokens_per_step(config))


def copy_slot_states(states: Sequence[LayerCache], copy: SlotCopy) -> None:
    for each in chain.from_iterable(states):
        each[copy.target] = each[copy.source]


def copy_block_prefix(tensors: Sequence[Tensor], copy: BlockCopy, own_range: range) -> None:
    count = len(own_range[: max(copy.num_tokens - own_range.start, 0)])
    for each in tensors:
        end = count * each.shape[2] // len(own_range)
        each[:, copy.target, :end] = each[:, copy.source, :end]


def _allocate_dummy_kv_cache(model: Decoder, num_blocks: int, slots: int) -> KVCache:
    """Layers with equal shapes share their tensors, so what a step computes with this cache is wrong."""
    layers = [
        pages + own
        for pages, own in zip(model.block_tensor_specs(num_blocks), model.slot_tensor_specs(slots, 0), strict=True)
    ]
    kinds = {
        layer: tuple(torch.empty(each.shape, dtype=each.dtype, device=model.device) for each in layer)
        for layer in layers
    }
    return [kinds[layer] for layer in layers]


class KVPrefaulter:
    """The first touch of a 4 KB page takes a microsecond, or ten on some virtual machines, where that adds up to 7 % of
    a small model's prefill time.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        self._cache_tensors = [cache for layer in kv_cache for cache in layer]
        self._num_blocks = len(self._cache_tensors[0]) if self._cache_tensors else 0
        self._blocks_per_touch = max(
            _PREFAULT_BYTES // max((cache[0].nbytes for cache in self._cache_tensors), default=1), 1
        )
        self._max_blocks_ahead = int(self._num_blocks * _PREFAULT_FRACTION)
        self._num_used = self._num_touched = self._next_tensor = 0

    def mark_used(self, block_ids: Iterable[int]) -> None:
        """From now on, touch neither these blocks nor any with a smaller id."""
        self._num_used = max(self._num_used, 1 + max(block_ids, default=-1))

    def touch_next(self) -> bool:
        begin = max(self._num_used, self._num_touched)
        end = min(begin + self._blocks_per_touch, self._num_used + self._max_blocks_ahead, self._num_blocks)
        if begin >= end:
            return False
        self._cache_tensors[self._next_tensor][begin:end].zero_()
        self._next_tensor = (self._next_tensor + 1) % len(self._cache_tensors)
        if self._next_tensor == 0:
            self._num_touched = end
        return True


class GpuMemory(NamedTuple):
    total: int
    free: int
    allocator: int


def measure_gpu_memory(device: torch.device) -> GpuMemory | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total, free, torch.cuda.memory_reserved(device))


def trim_host_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_cached_memory() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    empty_device_caches()
    trim_host_memory()


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(each in str(error) for each in _OUT_OF_MEMORY_MESSAGES)


@contextmanager
def explain_out_of_memory(what: str, param: str, advice: str) -> Iterator[None]:
    """Turn out-of-memory, compiler and Triton errors into a ConfigError with advice."""
    try:
        yield
    except QuireError:
        raise
    except Exception as error:
        if (compiler := describe_compiler_error(error)) is not None:
            raise ConfigError(compiler) from error
        if is_triton_error(error):
            wrong = f"a Triton kernel does not compile or fit on this GPU: {describe_kernel_error(error)}"
            advice = "--attention-backend torch_varlen or reference does without it"
            raise ConfigError(f"attention_backend: {wrong}; {advice}", param="attention_backend") from error
        if not is_out_of_memory(error):
            raise
        room = ""
        if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            room = f"; {free / GIB:.1f} of the GPU's {total / GIB:.1f} GiB are free"
        raise ConfigError(f"{param}: out of memory for {what}{room}. {advice}", param=param) from error


def explain_weights_out_of_memory(backend: Backend | None) -> AbstractContextManager[None]:
    """`backend` is None for encoders."""
    advice = (
        "serve a smaller model"
        if backend is None
        else _smaller_weights_advice(keeps_weights_quantized=backend.keeps_weights_quantized)
    )
    message = f"Free memory that other processes hold, or {advice}; quire plan shows what fits"
    return explain_out_of_memory("the weights", "model", message)


def _smaller_weights_advice(*, keeps_weights_quantized: bool) -> str:
    if keeps_weights_quantized:
        return "use --quantization int4 or a smaller model"
    return "serve a smaller model (--quantization saves no memory with this attention backend)"


def allocate_kv_blocks_checked(model: Decoder, num_blocks: int) -> list[torch.Tensor]:
    """Raises ConfigError if memory runs out."""
    param = "gpu_memory_utilization" if model.device.type == "cuda" else "kv_cache_memory"
    with explain_out_of_memory(f"{num_blocks} blocks of KV cache", param, "Lower it, or --max-model-len"):
        return allocate_kv_blocks(model, num_blocks)
