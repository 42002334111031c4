"""Plans the KV cache, without torch, for `quire plan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quire.engine.checkpoint.kv_cache_groups import KVBlockNeeds
from quire.engine.checkpoint.tensor_headers import CheckpointSize
from quire.engine.common.errors import ConfigError
from quire.engine.families.base.model_config import ModelConfig

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BITS = {"int8": 8.0, "int4": 5.0, "fp8": 8.0}
"""Bits per weight, including scale and offset."""
QUANTIZED_EMBEDDING_BITS = 8.0
KV_CODE_SCALE_BYTES = {"int8": 2, "fp8": 0, "fp8_e4m3": 0}
"""Bytes of scales per head and token, by kv_cache_dtype."""
MAX_DEFAULT_CPU_KV_BYTES = 4 * GIB
"""The machine needs other memory too."""
_MAX_HOST_KV_FRACTION = 0.5
_MAX_DEFAULT_CPU_STATE_BYTES = 2 * GIB
"""The setting state_memory overrides it."""
_MAX_SNAPSHOT_SLOTS = 1024
_GPU_STATE_DIVISOR = 3
MIN_BLOCK_BYTES = 256
"""Bytes per block, for bookkeeping, if layers store nothing in blocks."""
CUDA_CONTEXT_BYTES = 600 * 2**20
MIXED_GRAPH_DECODE_SIZES = (8, 32, 64, 128, 256)
MIXED_GRAPH_PREFILL_SIZES = (32, 64, 128, 192, 256, 384, 520, 640, 768, 1024)
"""Padding costs GPU time in proportion, so large sizes are close to each other. 520 fits a prompt of 512 tokens. Larger
steps need no graphs, because the GPU then takes longer than the host's launches (14 to 18 ms for 32 layers on an H100's
host), even for small models.
"""
MAX_MIXED_GRAPHS = 32
"""Beyond it, a new graph replaces the least recently used one."""
DRIVER_BYTES_PER_GRAPH = 8 * 2**20
"""This is an unmeasured assumption."""
NCCL_BYTES_PER_GRAPH_CALL = 16 * 2**10
"""An unmeasured assumption. In NCCL before 2.22 (src/enqueue.cc, `uploadWork`), a call takes 512 bytes for each of up
to 32 channels. Later versions pass collectives as kernel arguments, up to 4 KB.
"""

DRAFT_GRAPHS_BYTES = 128 * 2**20
"""This is an unmeasured assumption."""

MeminfoReader = Callable[[str], int | None]


def max_mixed_graph_tokens(max_model_len: int, max_num_seqs: int) -> int:
    rows = next((size for size in MIXED_GRAPH_DECODE_SIZES if size >= max_num_seqs), MIXED_GRAPH_DECODE_SIZES[-1])
    return rows + max((size for size in MIXED_GRAPH_PREFILL_SIZES if size <= max_model_len), default=0)


def num_nccl_calls(num_layers: int, num_ranks: int, *, context_parallel: bool) -> int:
    """Calls per step."""
    return 0 if num_ranks == 1 else 1 + num_layers * (4 if context_parallel else 2)


def cuda_graph_bytes(
    step_bytes: int, step_tokens: int, max_graph_tokens: int | None, nccl_calls: int = 0, *, has_drafter: bool
) -> int:
    """Excludes the memory of the largest step. If `max_graph_tokens` is None, only decodes are captured."""
    draft_bytes = DRAFT_GRAPHS_BYTES if has_drafter else 0
    if max_graph_tokens is None:
        return step_bytes // 4 + draft_bytes
    bytes_per_graph = DRIVER_BYTES_PER_GRAPH + nccl_calls * NCCL_BYTES_PER_GRAPH_CALL
    return (
        max(step_bytes // 4, step_bytes * min(max_graph_tokens, step_tokens) // step_tokens)
        + MAX_MIXED_GRAPHS * bytes_per_graph
        + draft_bytes
    )


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """Each of `num_blocks` blocks is divided into one block per KV cache group."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    sizing_summary: str
    windows: tuple[int | None, ...] = (None,)
    blocks_per_context: int = 1
    state_bytes: int = 0
    request_slots: int = 1
    snapshot_slots: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def num_group_blocks(self) -> int:
        return self.num_blocks * len(self.windows)


class StateSlotCounts(NamedTuple):
    """`num_slots` includes a slot for results that belong to no sequence."""

    request_slots: int
    snapshot_slots: int

    @property
    def num_slots(self) -> int:
        return self.request_slots + self.snapshot_slots + 1


def count_state_slots(
    slot_bytes: int,
    available: int,
    state_memory_gib: float | None,
    max_num_seqs: int,
    *,
    needs_snapshots: bool,
    prefix_caching: bool,
    on_gpu: bool,
) -> StateSlotCounts:
    """With prefix caching, about half of the slots or more, at most _MAX_SNAPSHOT_SLOTS, are for snapshots. Raises
    ConfigError if no slot fits.
    """
    if not needs_snapshots:
        return StateSlotCounts(max_num_seqs, 0)
    if state_memory_gib is not None:
        memory = int(state_memory_gib * GIB)
    elif on_gpu:
        wanted = slot_bytes * ((2 if prefix_caching else 1) * max_num_seqs + 1)
        memory = min(max(available, 0) // _GPU_STATE_DIVISOR, wanted)
    else:
        memory = min(max(available, 0) // 2, _MAX_DEFAULT_CPU_STATE_BYTES)
    if (count := memory // slot_bytes - 1) < 1:
        raise ConfigError(
            f"state_memory: the recurrent states of one sequence take {2 * slot_bytes:,} bytes, plus one spare slot; "
            f"{memory:,} are available",
            param="state_memory",
        )
    request_slots = min(max_num_seqs, max(count // 2, 1) if prefix_caching else count)
    return StateSlotCounts(request_slots, min(count - request_slots, _MAX_SNAPSHOT_SLOTS) if prefix_caching else 0)


def is_embedding_quantized(quantization: str | None, quantize_embedding: bool | None) -> bool:
    return quantization is not None if quantize_embedding is None else quantize_embedding


def check_max_model_len(model: ModelConfig, max_model_len: int | None) -> None:
    """Raises ConfigError."""
    if max_model_len is not None and max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len: {max_model_len} exceeds the model's {model.max_position} positions", param="max_model_len"
        )


def host_kv_budget(available: int) -> int:
    """In bytes."""
    return max(min(MAX_DEFAULT_CPU_KV_BYTES, int(available * _MAX_HOST_KV_FRACTION)), 0)


def device_kv_budget(free: int, total: int, utilization: float) -> int:
    """Returns bytes. `utilization` is the share of `total` that may be used in the end, including by other programs."""
    return max(int(free - total * (1 - utilization)), 0)


def fit_context_and_blocks(
    available_blocks: int,
    block_needs: KVBlockNeeds,
    *,
    max_position: int,
    max_num_seqs: int,
    max_model_len: int | None = None,
) -> tuple[int, int, int]:
    """Return the context length in tokens, its blocks in all groups together, and the blocks to allocate per group. A
    given `max_model_len` is the context length even if it does not fit.
    """
    groups = len(block_needs.windows)
    length = max_model_len or block_needs.max_context_tokens(available_blocks * groups, max_position)
    blocks_per_context = block_needs.max_blocks(length)
    return length, blocks_per_context, min(available_blocks, -(-blocks_per_context * max_num_seqs // groups))


def describe_window_savings(block_needs: KVBlockNeeds, length: int, blocks_per_context: int) -> str:
    if block_needs.windows == (None,):
        return ""
    full_blocks = -(-length // block_needs.block_size)
    groups_by_window = Counter(block_needs.windows)
    group_text = ", ".join(f"{count} of {window or 'all'} tokens" for window, count in groups_by_window.items())
    num_groups = len(block_needs.windows)
    saved_fraction = 1 - blocks_per_context / (full_blocks * num_groups)
    return (
        f"; windows ({num_groups} block tables: {group_text}) save {saved_fraction:.0%} of it: "
        f"{blocks_per_context / num_groups:,.1f} blocks, not {full_blocks:,}"
    )


@dataclass(frozen=True, slots=True)
class BlockBytes:
    num_bytes: int
    formula: str


def make_kv_cache_plan(
    model: ModelConfig,
    block_needs: KVBlockNeeds,
    block: BlockBytes,
    *,
    available_bytes: int,
    slot_counts: StateSlotCounts,
    max_model_len: int | None = None,
    num_blocks: int | None = None,
    state_bytes: int = 0,
) -> KVCachePlan:
    """A given `num_blocks` may exceed `available_bytes`. Raises ConfigError if max_model_len does not fit."""
    check_max_model_len(model, max_model_len)
    cache_bytes = max(available_bytes - state_bytes, 0)
    available_blocks = num_blocks
    if available_blocks is None:
        available_blocks = cache_bytes // (block.num_bytes or MIN_BLOCK_BYTES)
    length, blocks_per_context, blocks = fit_context_and_blocks(
        available_blocks,
        block_needs,
        max_position=model.max_position,
        max_num_seqs=slot_counts.request_slots,
        max_model_len=max_model_len,
    )
    if blocks_per_context > available_blocks * len(block_needs.windows) or length < 1:
        if num_blocks:
            cache_bytes = available_blocks * block.num_bytes
        raise _context_too_long_error(block_needs, block, length, available_blocks, cache_bytes)
    if num_blocks is not None:
        blocks = num_blocks
    summary = _describe_blocks(block_needs, block, blocks, length)
    summary += describe_window_savings(block_needs, length, blocks_per_context)
    summary += _describe_state_slots(slot_counts, state_bytes)
    return KVCachePlan(
        num_blocks=blocks,
        block_size=block_needs.block_size,
        block_bytes=block.num_bytes,
        max_model_len=length,
        sizing_summary=summary,
        windows=block_needs.windows,
        blocks_per_context=blocks_per_context,
        state_bytes=state_bytes,
        request_slots=slot_counts.request_slots,
        snapshot_slots=slot_counts.snapshot_slots,
    )


def _context_too_long_error(
    block_needs: KVBlockNeeds, block: BlockBytes, length: int, available_blocks: int, cache_bytes: int
) -> ConfigError:
    groups = len(block_needs.windows)
    needed_bytes = max(block_needs.max_blocks(length), 1) * block.num_bytes // groups
    return ConfigError(
        f"max_model_len: a context of {length or 1} tokens needs {needed_bytes:,} bytes of KV "
        f"cache, {cache_bytes:,} are available; "
        f"the longest that fits is {block_needs.max_context_tokens(available_blocks * groups, length)} tokens",
        param="max_model_len",
    )


def _describe_blocks(block_needs: KVBlockNeeds, block: BlockBytes, blocks: int, length: int) -> str:
    num_contexts = blocks * len(block_needs.windows) // block_needs.max_blocks(length)
    return (
        f"KV: {block.formula or 'nothing'} = {block.num_bytes / 1024:,.0f} KiB per block; "
        f"{blocks:,} blocks = {blocks * block.num_bytes / GIB:.2f} GiB = {blocks * block_needs.block_size:,} tokens; "
        f"context {length:,}, {num_contexts} of this length at once"
    )


def _describe_state_slots(slot_counts: StateSlotCounts, state_bytes: int) -> str:
    if not state_bytes:
        return ""
    snapshot_text = f" and {slot_counts.snapshot_slots:,} snapshots" if slot_counts.snapshot_slots else ""
    return f"; states of {slot_counts.request_slots:,} sequences{snapshot_text}: {state_bytes / 2**20:,.1f} MiB"


def read_meminfo(key: str) -> int | None:
    """Return bytes; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def available_host_bytes(meminfo: MeminfoReader = read_meminfo) -> int:
    """8 GiB if unknown."""
    limits = [value for value in (meminfo("MemAvailable"), _free_cgroup_bytes()) if value is not None]
    return min(limits, default=8 * GIB)


def total_host_bytes() -> int | None:
    limits = [value for value in (read_meminfo("MemTotal"), _read_cgroup_bytes("memory.max")) if value is not None]
    return min(limits, default=None)


def check_kv_memory(gib: float | None, available_bytes: int | None, device_label: str) -> None:
    """Raises ConfigError."""
    if gib is not None and available_bytes is not None and gib * GIB > available_bytes:
        memory = f"{available_bytes / GIB:.1f} GiB of memory of {device_label}"
        message = f"kv_cache_memory: {gib:g} GiB are more than the {memory}"
        raise ConfigError(message, param="kv_cache_memory")


def check_weights_fit_memory(
    weights: CheckpointSize | None, dtype: str, quantization: str | None = None, meminfo: MeminfoReader = read_meminfo
) -> None:
    """Raises ConfigError. The system would otherwise kill the process after minutes of loading."""
    if weights is None or (free := meminfo("MemAvailable")) is None:
        return
    # CPU kernels may compress bfloat16 to 12 bits: see kernels/cpu/compress12.h.
    bytes_per_weight = DTYPE_BYTES[dtype] * (0.75 if dtype == "bfloat16" else 1)
    min_bytes = (
        weights.num_floats * (bytes_per_weight if quantization is None else QUANTIZED_BITS[quantization] / 8)
        + weights.packed_bytes
        + weights.cpu_expansion
    )
    if min_bytes > min(free, available_host_bytes(meminfo)):
        sizes = f"take {min_bytes / GIB:.1f} GiB or more, and {free / GIB:.1f} GiB of memory are free"
        quantization_hint = "" if quantization == "int4" or not weights.num_floats else "use quantization int4, "
        raise ConfigError(
            f"model: the weights {sizes}: {quantization_hint}a smaller model, or more memory", param="model"
        )


def _free_cgroup_bytes() -> int | None:
    limit, used = _read_cgroup_bytes("memory.max"), _read_cgroup_bytes("memory.current")
    return None if limit is None or used is None else max(limit - used, 0)


def _read_cgroup_bytes(name: str) -> int | None:
    """Reads control groups v2."""
    try:
        return int(Path("/sys/fs/cgroup", name).read_text())
    except (OSError, ValueError):
        return None
