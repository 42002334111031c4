"""How much memory the KV cache may take on this device, and the cache itself."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.kv_plan import (
    CPU_KV_BYTES,
    GIB,
    available_host_bytes,
    check_kv_memory,
    device_kv_budget,
    graph_calls,
    graph_tokens,
    graphs_bytes,
    host_kv_budget,
    host_memory_bytes,
)
from quire.engine.checkpoint.page_groups import most_drafts
from quire.engine.config import EngineConfig
from quire.engine.core.scheduler_output import BlockCopy, SlotCopy
from quire.engine.errors import ConfigError, QuireError
from quire.engine.images.config import KEPT_BYTES
from quire.engine.layers.part import PageTensor
from quire.engine.lora.modules import adapted_linears, adapter_numbers, kept_adapters
from quire.engine.models.decoder import Decoder, KVCache
from quire.engine.types import SamplingParams
from quire.engine.worker.sampling.device_sampler import choose_sampler
from quire.engine.worker.sampling.sampling_rules import SamplingRow, rules_of
from quire.kernels.attention.own import Own, whole
from quire.kernels.backend import AttentionMetadata, Backend, LinearContext, Pages
from quire.kernels.gpu.faults import compiler_fault, fault, of_triton
from quire.kernels.gpu.others import MPS_IS_FULL, free_bytes, let_go

_HEADROOM = 1 / 8
"""The share of a KV cache in the host's memory that is touched before it is needed."""
_PIECE = 512 * 2**10
"""Bytes touched at a time, which takes about a millisecond."""
_REFUSALS = ("can't allocate memory", MPS_IS_FULL)
"""Parts of the messages of the RuntimeErrors that PyTorch raises where the host's memory runs out, or Apple's GPU's."""


def check_memory(config: EngineConfig, device: torch.device) -> None:
    """Raise ConfigError for a KV cache of more memory than the devices have."""
    asked = config.kv_cache_memory
    if device.type == "cpu":
        check_kv_memory(asked and asked * config.data_parallel_size, host_memory_bytes(), "this machine")
    elif device.type == "cuda" and asked is not None:
        gpus = config.tensor_parallel_size
        where = "the GPU" if gpus == 1 else f"the {gpus} GPUs"
        check_kv_memory(asked, torch.cuda.mem_get_info(device)[1] * gpus, where)


def kv_budget(config: EngineConfig, device: torch.device, step_bytes: int) -> int:
    """Bytes for the KV cache, with the weights already loaded; `step_bytes` are needed beside it.

    Raises ConfigError, with the arithmetic, where nothing is left.
    """
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB)
    if device.type != "cuda":
        room = available_host_bytes() if (there := free_bytes(device)) is None else there
        free = room - step_bytes - int((config.kv_offload_memory or 0) * GIB)
        return host_kv_budget(free) // config.data_parallel_size
    free, total = torch.cuda.mem_get_info(device)
    budget = device_kv_budget(free, total, config.gpu_memory_utilization) - step_bytes
    if budget <= 0:
        share = f"{config.gpu_memory_utilization:g} of the GPU's {total / GIB:.1f} GiB"
        held = (
            f"weights, and other programs if any, hold {(total - free) / GIB:.1f}, a step takes {step_bytes / GIB:.1f}"
        )
        raise ConfigError(
            f"gpu_memory_utilization: {share} leaves nothing for the KV cache: {held}. Raise --gpu-memory-utilization, "
            "lower --max-num-batched-tokens or --max-num-seqs, use --quantization int4, or serve a smaller model",
            param="gpu_memory_utilization",
        )
    return budget


def most_tokens(config: EngineConfig, token_bytes: int, device: torch.device, block_size: int) -> int:
    """A bound on the tokens that the KV cache will hold, known before the weights are loaded; at least one page's.
    token_bytes: of a token in all layers.

    It keeps tables with a row for each position from growing with what config.json claims.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks * block_size
    if config.kv_cache_memory is not None:
        budget = int(config.kv_cache_memory * GIB)
    else:
        budget = CPU_KV_BYTES if device.type != "cuda" else torch.cuda.mem_get_info(device)[1]
    budget *= config.tensor_parallel_size if device.type == "cuda" else config.nnodes  # each has some of the heads
    return max(budget // token_bytes, block_size)


def check_context(config: EngineConfig, token_bytes: int, device: torch.device, block_size: int) -> None:
    """Raise ConfigError, before the weights are loaded, for a max_model_len that cannot fit in what the KV cache gets
    at most. token_bytes: of a token in all layers that keep every token."""
    asked, most = config.max_model_len or 0, most_tokens(config, token_bytes, device, block_size)
    if config.num_kv_blocks is None and config.kv_cache_memory is None and device.type == "cpu":
        most = min(most, host_kv_budget(available_host_bytes()) * config.nnodes // token_bytes)
    if asked > most:
        raise ConfigError(
            f"max_model_len: a context of {asked} tokens needs {asked * token_bytes:,} bytes of KV cache, "
            f"{most * token_bytes:,} are available; the longest that fits is at most {most} tokens",
            param="max_model_len",
        )


def available_bytes(
    model: Decoder, model_config: ModelConfig, backend: Backend, config: EngineConfig, reading: int = 0
) -> int:
    """What the model's device has for the KV cache. reading: bytes that an image takes on a GPU while it is read,
    beside the features of those that are kept. Of ranks on GPUs all must call it at the same time."""
    step = set_aside(model, model_config, backend, config)
    return kv_budget(config, model.device, max(step, reading) + (KEPT_BYTES if reading else 0))


def set_aside(model: Decoder, model_config: ModelConfig, backend: Backend, config: EngineConfig) -> int:
    """Bytes that the largest step takes on a GPU; on a CPU, where nothing is set aside for it, those of adapters."""
    if model.device.type != "cuda":
        if not config.enable_lora:
            return 0
        linears = adapted_linears(model_config) if model.spec.linears is None else model.spec.linears
        each = adapter_numbers(linears, config.max_lora_rank) * model.dtype.itemsize
        return each * kept_adapters(config.max_loras, config.max_cpu_loras)
    tokens = config.step_tokens
    with explained(f"a step of {tokens} tokens", "max_num_batched_tokens", "Lower it, or --max-num-seqs"):
        return measure_step(model, backend, config)


@torch.inference_mode()
def measure_step(model: Decoder, backend: Backend, config: EngineConfig) -> int:
    """Bytes that the largest step takes on the GPU beside weights and KV cache. Runs one, on pages of its own."""
    device, length = model.device, min(config.step_tokens, model.max_model_len)
    seqs = -(-config.step_tokens // length)
    own = model.shard.own(backend.block_size)
    metadata = prompts(seqs, length, backend.block_size, device, model.groups.count, own)
    if model.adapters is not None:
        linear = LinearContext.of(torch.ones_like(metadata.positions))
        others = tuple(replace(each, linear=linear) for each in metadata.others)
        metadata = replace(metadata, linear=linear, others=others)
    pages = _shared_pages(model, metadata.block_table.numel() * model.groups.count + (own.count > 1), seqs)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ids = torch.zeros(seqs * length, dtype=torch.int32, device=device)
    picks = min(config.max_num_seqs, len(ids))
    hidden = model.forward(ids, metadata, pages, torch.arange(picks, device=device))
    if model.has_head:
        row = SamplingRow(rules_of(SamplingParams(top_p=0.5), ()), 0, length, length, ids[None], 0)
        choose_sampler(device, model.argmax, model.draw, model.shard.group)(
            model.logits(hidden, metadata.linear.at(torch.arange(picks, device=device))), [row] * picks, None
        )
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_allocated(device) - before
    del pages, hidden
    torch.cuda.empty_cache()
    if config.enforce_eager:
        return taken
    most = graph_tokens(length, config.max_num_seqs) if backend.in_graphs == "steps" else None
    ranks = config.tensor_parallel_size
    calls = graph_calls(model.spec.num_layers, ranks, divides_tokens=config.divides_tokens)
    return taken + graphs_bytes(taken, len(ids), most, calls, drafts=config.has_drafts)


def prompts(
    seqs: int, length: int, block_size: int, device: torch.device, groups: int = 1, own: Own | None = None
) -> AttentionMetadata:
    """A step that computes `seqs` prompts of `length` tokens from their beginning, each on pages of its own, in each
    group of layers; tokens that are not `own` (None: all are) go to a page behind them."""
    each = -(-length // block_size)
    table = torch.arange(seqs * each, dtype=torch.int32, device=device).view(seqs, each)
    positions = torch.arange(length, device=device).repeat(seqs)
    starts = torch.arange(0, seqs * length + 1, length, dtype=torch.int32, device=device)
    tables = [table + group * table.numel() for group in range(groups)]
    kept = whole(block_size) if own is None else replace(own, elsewhere=groups * table.numel() * own.tile)
    rows = torch.arange(seqs, device=device).repeat_interleave(length)
    slots = [kept.slots(each[rows, positions // block_size].long(), positions) for each in tables]
    first_group = AttentionMetadata(
        query_start=starts,
        context_lens=torch.full((seqs,), length, dtype=torch.int32, device=device),
        key_start=starts,
        block_table=table,
        positions=positions,
        slots=slots[0],
        max_query_len=length,
        max_context_len=length,
        whole=True,
        state_slots=torch.arange(seqs, device=device),
    )
    return first_group.grouped(tables, slots)


class Paged(Protocol):
    """What keeps keys and values: a decoder, or a head that drafts for it."""

    device: torch.device

    @property
    def page_formula(self) -> str: ...

    def pages(self, num_blocks: int) -> list[tuple[PageTensor, ...]]: ...


def page_bytes(model: Paged) -> int:
    """Of one page of one group of layers (engine/checkpoint/page_groups.py)."""
    return sum(tensor.nbytes for layer in model.pages(1) for tensor in layer)


def whole_page_bytes(model: Decoder, places: int) -> int:
    """Of a page of every group, which has so many places for layers in all stages of a pipeline together."""
    if model.groups.count > 1:
        return page_bytes(model) * places // model.groups.places * model.groups.count
    return model.page_nbytes


def allocate_pages(model: Paged, num_blocks: int) -> list[Tensor]:
    """The pages of all layers, those of one kind as one tensor [tensors, pages, ...]: what happens to a page in all
    layers is one operation. Their content is undefined on the host, where untouched pages take no memory on Linux; on
    other devices it is zeros, as kernels read pages before a window, of weight 0, that may have never been written."""
    kinds = Counter(each for layer in model.pages(num_blocks) for each in layer)
    make = torch.empty if model.device.type == "cpu" else torch.zeros
    return [make((count, *kind.shape), dtype=kind.dtype, device=model.device) for kind, count in kinds.items()]


def layers_of(model: Paged, pages: Sequence[Tensor], states: Sequence[Pages] = ()) -> KVCache:
    """What of the `allocate_pages` each layer asks for, and behind it what it has of the `allocate_states`."""
    layers = model.pages(pages[0].shape[1] if pages else 1)  # none: of a stage whose layers keep slots alone
    kinds = dict.fromkeys(each for layer in layers for each in layer)
    parts = {kind: iter(each) for kind, each in zip(kinds, pages, strict=True)}
    beside = states or [()] * len(layers)
    return [(*(next(parts[kind]) for kind in layer), *own) for layer, own in zip(layers, beside, strict=True)]


def allocate_states(model: Decoder, slots: int, drafts: int) -> list[Pages]:
    """By place, what the layers keep of sequences beside pages, in so many slots;
    `drafts`: see Sublayer.slots. What is in a slot is not read before its owner has written it."""
    make = torch.empty if model.device.type == "cpu" else torch.zeros
    layers = model.slots(slots, drafts)
    return [tuple(make(each.shape, dtype=each.dtype, device=model.device) for each in layer) for layer in layers]


def slot_bytes(model: Decoder, config: EngineConfig) -> int:
    """Of a slot of these, as a configuration asks for it, in all stages of a pipeline together."""
    return model.slot_nbytes(1, most_drafts(config))


def copy_slot(states: Sequence[Pages], copy: SlotCopy) -> None:
    for each in chain.from_iterable(states):
        each[copy.target] = each[copy.source]


def copy_page(pages: Sequence[Tensor], copy: BlockCopy, own: range) -> None:
    """Only for large pages, of whose tokens these are `own`: they lie token by token, or piece by piece, in every
    layout."""
    count = len(own[: max(copy.tokens - own.start, 0)])
    for each in pages:
        end = count * each.shape[2] // len(own)
        each[:, copy.target, :end] = each[:, copy.source, :end]


def _shared_pages(model: Decoder, num_blocks: int, slots: int) -> KVCache:
    """Like allocate_pages and allocate_states, but layers of equal shapes share one set of pages: saves memory, results
    are wrong."""
    layers = [pages + own for pages, own in zip(model.pages(num_blocks), model.slots(slots, 0), strict=True)]
    kinds = {
        layer: tuple(torch.empty(each.shape, dtype=each.dtype, device=model.device) for each in layer)
        for layer in layers
    }
    return [kinds[layer] for layer in layers]


class Headroom:
    """Touches pages of a KV cache in the host's memory, while the engine is idle, before a sequence needs them.

    The system maps memory at its first use, 4 KB at a time. That takes a microsecond each, or ten on a virtual machine
    whose host must do the same: then 7 % of the time that a small model takes for a prompt.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        self._caches = [cache for layer in kv_cache for cache in layer]
        self._pages = len(self._caches[0]) if self._caches else 0  # a stage whose layers keep slots alone has none
        self._piece = max(_PIECE // max((cache[0].nbytes for cache in self._caches), default=1), 1)
        self._most = int(self._pages * _HEADROOM)
        self._used = self._ready = self._next = 0

    def use(self, pages: Iterable[int]) -> None:
        """A step will write to these pages; they are never touched here from now on."""
        self._used = max(self._used, 1 + max(pages, default=-1))

    def grow(self) -> bool:
        """Touch some more pages of one tensor; False when enough are touched."""
        begin = max(self._used, self._ready)
        end = min(begin + self._piece, self._used + self._most, self._pages)
        if begin >= end:
            return False
        self._caches[self._next][begin:end].zero_()
        self._next = (self._next + 1) % len(self._caches)
        if self._next == 0:
            self._ready = end
        return True


def return_freed() -> None:
    """Hand memory that was freed back to the system, where the C library can: what loading took and nothing uses."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def return_memory() -> None:
    """The same for the device's memory too."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    let_go()
    return_freed()


@contextmanager
def explained(what: str, param: str, advice: str) -> Iterator[None]:
    """Turns an out-of-memory error into a ConfigError that says what needed the memory, and what to change; one of the
    compiler that Triton needs into one that says how to install it; and one of Triton's own into one that names the
    setting by which another backend serves."""
    try:
        yield
    except QuireError:
        raise
    except Exception as error:
        if (compiler := compiler_fault(error)) is not None:
            raise ConfigError(compiler) from error
        if of_triton(error):
            wrong = f"a Triton kernel does not compile or fit on this GPU: {fault(error)}"
            advice = "--attention-backend torch_varlen or reference does without it"
            raise ConfigError(f"attention_backend: {wrong}; {advice}", param="attention_backend") from error
        if not isinstance(error, torch.OutOfMemoryError) and not any(each in str(error) for each in _REFUSALS):
            raise
        room = ""
        if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            room = f"; {free / GIB:.1f} of the GPU's {total / GIB:.1f} GiB are free"
        raise ConfigError(f"{param}: out of memory for {what}{room}. {advice}", param=param) from error


def explained_weights() -> AbstractContextManager[None]:
    """`explained`, where weights are loaded."""
    advice = "Use quantization int4, serve a smaller model, or free memory that others hold; quire plan says what fits"
    return explained("the weights", "model", advice)


def allocate_explained(model: Decoder, blocks: int) -> list[torch.Tensor]:
    """As allocate_pages. Raises ConfigError naming the setting where memory is short."""
    param = "gpu_memory_utilization" if model.device.type == "cuda" else "kv_cache_memory"
    with explained(f"{blocks} pages of KV cache", param, "Lower it, or --max-model-len"):
        return allocate_pages(model, blocks)
