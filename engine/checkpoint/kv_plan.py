"""Plans the KV cache: the size of a page, how many pages fit in memory, and how long a context they allow.

It also reads how much memory the machine has left. It does not import torch, so `quire plan` can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.engine.checkpoint.files import ModelConfig, StoredWeights
from quire.engine.errors import ConfigError

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_KV_BYTES = 4 * GIB
"""The largest KV cache that is allocated on a CPU unasked: the machine needs its memory for other things too."""
_HOST_SHARE = 0.5
"""The largest share for the KV cache of the memory that is free once the weights are loaded."""
CUDA_CONTEXT_BYTES = 600 * 2**20
"""Estimate for `quire plan`, which has no GPU to ask: what CUDA, its libraries and PyTorch take before any tensor."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The KV cache: num_blocks pages of block_size tokens each, for contexts of up to max_model_len tokens."""

    num_blocks: int
    block_size: int
    page_bytes: int
    """Bytes of one page in all layers together."""
    max_model_len: int
    arithmetic: str
    """How the numbers come about, in one line for the log."""

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.page_bytes


def check_positions(model: ModelConfig, max_model_len: int | None) -> None:
    """Raise ConfigError for a context that is longer than the model supports."""
    if max_model_len is not None and max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len: {max_model_len} exceeds the model's {model.max_position} positions", param="max_model_len"
        )


def host_kv_budget(available: int) -> int:
    """Bytes for the KV cache on a CPU. available: free bytes once the weights are loaded."""
    return max(min(CPU_KV_BYTES, int(available * _HOST_SHARE)), 0)


def device_kv_budget(free: int, total: int, utilization: float) -> int:
    """Bytes for the KV cache on a GPU.

    free: free bytes once the weights are loaded. total: bytes of the GPU. utilization: the share of `total` that may be
    in use once the KV cache is allocated.
    """
    return max(int(free - total * (1 - utilization)), 0)


def fit_pages(
    fitting: int, block_size: int, *, max_position: int, max_num_seqs: int, max_model_len: int | None = None
) -> tuple[int, int, int]:
    """Choose a context length and a number of pages, where memory has room for `fitting` pages.

    Returns the context length in tokens, the pages of one such context, and the pages to allocate: no more than
    max_num_seqs full contexts could use. A given max_model_len may need more pages than fit; callers check that.
    """
    length = max_model_len or min(max_position, fitting * block_size)
    needed = -(-length // block_size)
    return length, needed, min(fitting, needed * max_num_seqs)


def plan_kv(
    model: ModelConfig,
    *,
    page_bytes: int,
    formula: str,
    block_size: int,
    available_bytes: int,
    max_num_seqs: int,
    max_model_len: int | None = None,
    num_blocks: int | None = None,
) -> KVPlan:
    """Choose pages and context so that they fit in `available_bytes`, as `fit_pages` does.

    page_bytes: of one page of block_size tokens, all layers together; `formula` explains them in the log. A given
    num_blocks is taken as it is, without regard to the available bytes. Raises ConfigError, with the numbers, if a
    given max_model_len exceeds the model's positions or the memory.
    """
    each = page_bytes
    check_positions(model, max_model_len)
    fitting = available_bytes // each if num_blocks is None else num_blocks
    length, needed, blocks = fit_pages(
        fitting, block_size, max_position=model.max_position, max_num_seqs=max_num_seqs, max_model_len=max_model_len
    )
    if needed > fitting or length < 1:
        raise ConfigError(
            f"max_model_len: a context of {length or 1} tokens needs {max(needed, 1) * each:,} bytes of KV cache, "
            f"{fitting * each if num_blocks else available_bytes:,} are available; "
            f"the longest that fits is {fitting * block_size} tokens",
            param="max_model_len",
        )
    blocks = fitting if num_blocks is not None else blocks
    arithmetic = (
        f"KV: {formula} = {each / 1024:,.0f} KiB a page; "
        f"{blocks:,} pages = {blocks * each / GIB:.2f} GiB = {blocks * block_size:,} tokens; "
        f"context {length:,}, {blocks // needed} full ones at once"
    )
    return KVPlan(blocks, block_size, each, length, arithmetic)


def available_host_bytes() -> int:
    """Bytes that this process could still allocate.

    The smaller of what the machine has left and what our control group may still take; 8 GiB if neither can be read.
    """
    found = [value for value in (_meminfo("MemAvailable"), _cgroup_headroom()) if value is not None]
    return min(found, default=8 * GIB)


def check_room(weights: StoredWeights | None, dtype: str) -> None:
    """Raise ConfigError for weights that do not fit in this machine's free memory, if that is known.

    Without this check the system would kill this process, or another one, after minutes of loading.
    """
    if weights is None or (free := _meminfo("MemAvailable")) is None:
        return
    # The CPU kernels may compress bfloat16 weights to 12 bits: see kernels/cpu/compress12.h.
    least = weights.floats * DTYPE_BYTES[dtype] * (0.75 if dtype == "bfloat16" else 1)
    if least > min(free, available_host_bytes()):
        sizes = f"take {least / GIB:.1f} GiB or more, and {free / GIB:.1f} GiB of memory are free"
        raise ConfigError(f"model: the weights {sizes}", param="model")


def _meminfo(key: str) -> int | None:
    """Bytes that /proc/meminfo gives for a key; None where it does not exist."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _cgroup_headroom() -> int | None:
    """Bytes that our control group (v2) may still allocate; None where it has no limit or is unknown."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(int(limit) - used, 0)
