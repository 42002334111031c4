"""The arithmetic of memory: what a page of KV costs, how many fit, and how long a context that allows. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.engine.checkpoint.files import ModelConfig, StoredWeights
from quire.engine.errors import ConfigError

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_KV_BYTES = 4 * GIB
"""Most KV cache on a CPU unless asked for more: the machine has other uses for its memory."""
_HOST_SHARE = 0.5
"""Of the memory still free once the weights are loaded."""
CUDA_CONTEXT_BYTES = 600 * 2**20
"""What CUDA, its libraries and PyTorch hold on a GPU before any tensor: `quire plan` cannot ask the card."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """How the KV cache is cut: num_blocks pages of block_size tokens, for contexts up to max_model_len."""

    num_blocks: int
    block_size: int
    page_bytes: int
    """All layers together."""
    max_model_len: int
    arithmetic: str
    """One line for the log."""

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.page_bytes


def check_positions(model: ModelConfig, max_model_len: int | None) -> None:
    """Raise ConfigError for a context that the model has no positions for."""
    if max_model_len is not None and max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len: {max_model_len} exceeds the model's {model.max_position} positions", param="max_model_len"
        )


def host_kv_budget(available: int) -> int:
    """Bytes for the KV cache on a CPU, of those that are free beside the weights."""
    return max(min(CPU_KV_BYTES, int(available * _HOST_SHARE)), 0)


def device_kv_budget(free: int, total: int, utilization: float) -> int:
    """Bytes for the KV cache on a GPU, of those that are free beside the weights."""
    return max(int(free - total * (1 - utilization)), 0)


def fit_pages(
    fitting: int, block_size: int, *, max_position: int, max_num_seqs: int, max_model_len: int | None = None
) -> tuple[int, int, int]:
    """Where `fitting` pages have room: the context's length, the pages of one such context, and the pages to take.

    Never more pages than max_num_seqs full contexts could use. The context may need more pages than there are.
    """
    length = max_model_len or min(max_position, fitting * block_size)
    needed = -(-length // block_size)
    return length, needed, min(fitting, needed * max_num_seqs)


def plan_kv(
    model: ModelConfig,
    *,
    page_bytes: int,
    block_size: int,
    available_bytes: int,
    max_num_seqs: int,
    max_model_len: int | None = None,
    num_blocks: int | None = None,
) -> KVPlan:
    """Fit pages and context to `available_bytes`; never more pages than max_num_seqs full contexts could use.

    page_bytes: of one page of block_size tokens, all layers together.
    Raises ConfigError, with the numbers, if an explicit max_model_len exceeds the model's positions or the memory.
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
        f"KV: {each // block_size:,} B a token x {block_size} tokens = {each / 1024:,.0f} KiB a page; "
        f"{blocks:,} pages = {blocks * each / GIB:.2f} GiB = {blocks * block_size:,} tokens; "
        f"context {length:,}, {blocks // needed} full ones at once"
    )
    return KVPlan(blocks, block_size, each, length, arithmetic)


def available_host_bytes() -> int:
    """Memory that this process could still take: the machine's, or its control group's if that is less. 8 GiB where
    neither can be read."""
    found = [value for value in (_meminfo("MemAvailable"), _cgroup_headroom()) if value is not None]
    return min(found, default=8 * GIB)


def check_room(weights: StoredWeights | None, dtype: str) -> None:
    """Raise ConfigError for weights that this machine's memory cannot hold, where the system tells it: minutes later it
    would end this process for them, or another."""
    if weights is None or (free := _meminfo("MemAvailable")) is None:
        return
    least = weights.floats * DTYPE_BYTES[dtype] * (0.75 if dtype == "bfloat16" else 1)  # kernels may keep 12 bits
    if least > min(free, available_host_bytes()):
        sizes = f"take {least / GIB:.1f} GiB or more, and {free / GIB:.1f} GiB of memory are free"
        raise ConfigError(f"model: the weights {sizes}", param="model")


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _cgroup_headroom() -> int | None:
    """Control group v2: memory.max less memory.current; None where there is no limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(int(limit) - used, 0)
