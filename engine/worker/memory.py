"""How much memory the KV cache may take on this device, and the cache itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from quire.engine.checkpoint.kv_plan import GIB, available_host_bytes, device_kv_budget, host_kv_budget
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.layers.attention import PageTensor
from quire.engine.models.decoder import Decoder, KVCache
from quire.engine.types import SamplingParams
from quire.engine.worker.device_sampler import choose_sampler
from quire.engine.worker.sampling_rules import SamplingRow, rules_of
from quire.kernels.backend import AttentionMetadata, Backend, Pages

_HEADROOM = 1 / 8
"""The share of a KV cache in the host's memory that is touched before it is needed."""
_PIECE = 512 * 2**10
"""Bytes touched at a time, which takes about a millisecond."""
_CPU_REFUSAL = "can't allocate memory"
"""Part of the message of the RuntimeError that PyTorch raises where the host's memory runs out."""


def kv_budget(config: EngineConfig, device: torch.device, step_bytes: int) -> int:
    """Bytes for the KV cache, with the weights already loaded; on a GPU a step needs `step_bytes` beside it.

    Raises ConfigError, with the arithmetic, where nothing is left.
    """
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB)
    if device.type != "cuda":
        return host_kv_budget(available_host_bytes())
    free, total = torch.cuda.mem_get_info(device)
    budget = device_kv_budget(free, total, config.gpu_memory_utilization) - step_bytes
    if budget <= 0:
        share = f"{config.gpu_memory_utilization:g} of the GPU's {total / GIB:.1f} GiB"
        held = (
            f"weights, and other programs if any, hold {(total - free) / GIB:.1f}, a step takes {step_bytes / GIB:.1f}"
        )
        raise ConfigError(
            f"gpu_memory_utilization: {share} leaves nothing for the KV cache: {held}. Raise --gpu-memory-utilization, "
            "lower --max-num-batched-tokens or --max-num-seqs, or serve a smaller model",
            param="gpu_memory_utilization",
        )
    return budget


@torch.inference_mode()
def measure_step(model: Decoder, backend: Backend, config: EngineConfig) -> int:
    """Bytes that the largest step takes on the GPU beside weights and KV cache. Runs one, on pages of its own."""
    device, length = model.device, min(config.max_num_batched_tokens, model.max_model_len)
    seqs = -(-config.max_num_batched_tokens // length)
    metadata = prompts(seqs, length, backend.block_size, device)
    pages = _shared_pages(model, metadata.block_table.numel())
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ids = torch.zeros(seqs * length, dtype=torch.int32, device=device)
    picks = min(config.max_num_seqs, len(ids))
    hidden = model.forward(ids, metadata, pages, torch.arange(picks, device=device))
    row = SamplingRow(rules_of(SamplingParams(top_p=0.5), ()), 0, length, length, ids[None], 0)
    choose_sampler(device, model.argmax, model.draw)(model.logits(hidden), [row] * picks, None)
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_allocated(device) - before
    del pages, hidden
    torch.cuda.empty_cache()
    # The graphs' own pool is that of a decode, which has fewer tokens than this step.
    return taken if config.enforce_eager else taken + taken // 4


def prompts(seqs: int, length: int, block_size: int, device: torch.device) -> AttentionMetadata:
    """A step that computes `seqs` prompts of `length` tokens from their beginning, each on pages of its own."""
    each = -(-length // block_size)
    table = torch.arange(seqs * each, dtype=torch.int32, device=device).view(seqs, each)
    positions = torch.arange(length, device=device).repeat(seqs)
    starts = torch.arange(0, seqs * length + 1, length, dtype=torch.int32, device=device)
    first = torch.arange(seqs, device=device).repeat_interleave(length) * each * block_size
    return AttentionMetadata(
        query_start=starts,
        context_lens=torch.full((seqs,), length, dtype=torch.int32, device=device),
        key_start=starts,
        block_table=table,
        positions=positions,
        slots=first + positions,
        max_query_len=length,
        max_context_len=length,
    )


def allocate_kv_cache(model: Decoder, num_blocks: int) -> KVCache:
    """The pages that every layer asks for. Their content is undefined; on Linux, untouched pages of the host take no
    memory."""
    return [_allocated(layer, model.device) for layer in model.pages(num_blocks)]


def _shared_pages(model: Decoder, num_blocks: int) -> KVCache:
    """Like allocate_kv_cache, but layers of equal shapes share one set of pages: saves memory, results are wrong."""
    layers = model.pages(num_blocks)
    kinds = {layer: _allocated(layer, model.device) for layer in layers}
    return [kinds[layer] for layer in layers]


def _allocated(layer: tuple[PageTensor, ...], device: torch.device) -> Pages:
    return tuple(torch.empty(each.shape, dtype=each.dtype, device=device) for each in layer)


class Headroom:
    """Touches pages of a KV cache in the host's memory, while the engine is idle, before a sequence needs them.

    The system maps memory at its first use, 4 KB at a time. That takes a microsecond each, or ten on a virtual machine
    whose host must do the same: then 7 % of the time that a small model takes for a prompt.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        self._caches = [cache for layer in kv_cache for cache in layer]
        pages = len(self._caches[0])
        self._piece = max(_PIECE // max(cache[0].nbytes for cache in self._caches), 1)
        self._most = int(pages * _HEADROOM)
        self._used = self._ready = self._next = 0

    def use(self, pages: Iterable[int]) -> None:
        """A step will write to these pages; they are never touched here from now on."""
        self._used = max(self._used, 1 + max(pages, default=-1))

    def grow(self) -> bool:
        """Touch some more pages of one tensor; False when enough are touched."""
        begin = max(self._used, self._ready)
        end = min(begin + self._piece, self._used + self._most, len(self._caches[0]))
        if begin >= end:
            return False
        self._caches[self._next][begin:end].zero_()
        self._next = (self._next + 1) % len(self._caches)
        if self._next == 0:
            self._ready = end
        return True


@contextmanager
def explained(what: str, param: str, advice: str) -> Iterator[None]:
    """Turns an out-of-memory error into a ConfigError that says what needed the memory, and what to change."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _CPU_REFUSAL not in str(error):
            raise
        room = ""
        if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            room = f"; {free / GIB:.1f} of the GPU's {total / GIB:.1f} GiB are free"
        raise ConfigError(f"{param}: out of memory for {what}{room}. {advice}", param=param) from error
