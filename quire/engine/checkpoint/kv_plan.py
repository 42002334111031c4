"""Plans the KV cache: the size of a page, how many pages fit in memory, and how long a context they allow.

It also reads how much memory the machine has left. It does not import torch, so `quire plan` can use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quire.engine.checkpoint.page_groups import PageNeeds
from quire.engine.checkpoint.safetensors import StoredWeights
from quire.engine.errors import ConfigError
from quire.engine.families.base.model_config import ModelConfig

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BITS = {"int8": 8.0, "int4": 5.0, "fp8": 8.0}
"""Bits of a weight that is quantized at load (engine/layers/online_quantization.py), its scale's and offset's
included."""
TABLE_BITS = 8.0
"""The same for the embedding and the head, where they are quantized."""
KV_CODE_SCALE_BYTES = {"int8": 2, "fp8": 0, "fp8_e4m3": 0}
"""By kv_cache_dtype: bytes that a head of a token takes beside a byte for each number (kernels/kv_quantization.py)."""
CPU_KV_BYTES = 4 * GIB
"""The largest KV cache that is allocated on a CPU unasked: the machine needs its memory for other things too."""
_HOST_SHARE = 0.5
"""The largest share for the KV cache of the memory that is free once the weights are loaded."""
_STATE_BYTES = 2 * GIB
"""The largest memory that share_states gives unasked on a CPU."""
_MOST_SNAPSHOTS = 1024
_GPU_STATE_PART = 3
"""On a GPU share_states gives unasked at most this part of the memory: a third."""
LEAST_PAGE_BYTES = 256
"""Of a page where no layer keeps anything in it: what is noted of it, its hash for one. Prefixes are found by pages."""
CUDA_CONTEXT_BYTES = 600 * 2**20
"""Estimate for `quire plan`, which has no GPU to ask: what CUDA, its libraries and PyTorch take before any tensor."""
GRAPH_ROWS = (4, 8, 16, 32, 64, 96, 128, 192, 256)
"""For decodes, in CUDA graphs of small steps with prompts (engine/worker/graphs/mixed_batch_graphs.py). A product of up
to some 300 rows reads its weights for longer than it multiplies, on an H100."""
GRAPH_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Of prompts. Longer steps take a GPU longer than it takes the host to start their kernels, even of small models."""
MOST_GRAPHS = 32
GRAPH_BYTES = 8 * 2**20
"""What the driver keeps of a graph, beside the memory that all share: an assumption; nobody has measured it."""
CALL_BYTES = 16 * 2**10
"""Of each call of NCCL's in a graph: the same. By its sources (src/enqueue.cc, `uploadWork`, with NCCL_CUMEM_ENABLE=0)
it allocates 512 bytes for each of up to 32 channels before 2.22; since then an all-reduce or an all-gather lies in its
kernel's arguments, up to 4 KB."""

DRAFT_GRAPHS_BYTES = 128 * 2**20
"""The same of all graphs of a model or heads that draft, some thirty of a smaller model or a hundred of a layer or two:
an assumption too. They share the memory of the served model's."""

Meminfo = Callable[[str], int | None]
"""What the system says of the machine's memory: see meminfo."""


def graph_tokens(max_model_len: int, max_num_seqs: int) -> int:
    """Most tokens in a graph of a step with prompts, all rows counted."""
    rows = [size for size in GRAPH_ROWS if size < 2 * max_num_seqs] or GRAPH_ROWS[:1]
    return rows[-1] + max((size for size in GRAPH_TOKENS if size <= max_model_len), default=0)


def graph_calls(layers: int, ranks: int, *, divides_tokens: bool) -> int:
    """NCCL's calls in a step of a model of so many layers, where so many GPUs compute it: the embedding's sum, and of
    each layer two; where ranks divide the tokens of sequences, its queries' and what attention finds of them, too."""
    return 0 if ranks == 1 else 1 + layers * (4 if divides_tokens else 2)


def graphs_bytes(step_bytes: int, tokens: int, most: int | None, calls: int = 0, *, drafts: bool) -> int:
    """What CUDA graphs take beside the largest step, which has so many tokens and bytes. most: tokens in a graph of a
    step with prompts; None: only decodes become graphs, whose own pool is that of fewer tokens than this step's. calls:
    see graph_calls. drafts: whether a model or heads draft."""
    guesses = DRAFT_GRAPHS_BYTES if drafts else 0
    if most is None:
        return step_bytes // 4 + guesses
    each = GRAPH_BYTES + calls * CALL_BYTES
    return max(step_bytes // 4, step_bytes * min(most, tokens) // tokens) + MOST_GRAPHS * each + guesses


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The KV cache: num_blocks pages of block_size tokens each, for contexts of up to max_model_len tokens.

    Where groups of layers have page tables of their own, each page is cut into one for each group.
    """

    num_blocks: int
    block_size: int
    page_bytes: int
    """Bytes of one page in all layers together."""
    max_model_len: int
    arithmetic: str
    """How the numbers come about, in one line for the log."""
    windows: tuple[int | None, ...] = (None,)
    """Of the groups of layers, as PageGroups has them."""
    context_pages: int = 1
    """Groups' pages that a full context holds at most."""
    state_bytes: int = 0
    """Of what layers keep of sequences beside pages, in every slot."""
    sequences: int = 1
    """Slots of sequences, and those of snapshots beside them, as StateShares has them."""
    snapshots: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.page_bytes

    @property
    def group_pages(self) -> int:
        """Pages of single groups."""
        return self.num_blocks * len(self.windows)


class StateShares(NamedTuple):
    """How many slots sequences and snapshots have for the states that layers keep beside pages. One more slot takes
    what is computed of no sequence."""

    sequences: int
    """Those that run at a time."""
    snapshots: int
    """Those of cached prefixes, where states are too large for pages."""

    @property
    def slots(self) -> int:
        return self.sequences + self.snapshots + 1


def share_states(
    slot_bytes: int, available: int, asked: float | None, max_num_seqs: int, *, large: bool, cached: bool, gpu: bool
) -> StateShares:
    """Slots of `slot_bytes` each. `large` states get a part of the `available` bytes, `asked` GiB if that is given; if
    not, on a `gpu` what max_num_seqs sequences and as many snapshots need, but at most a third of the bytes, and on a
    CPU half of them, but at most 2 GiB. Half of it goes to snapshots where prefixes are `cached`, and more where
    sequences need less. Raises ConfigError."""
    if not large:
        return StateShares(max_num_seqs, 0)
    if asked is not None:
        memory = int(asked * GIB)
    elif gpu:
        wanted = slot_bytes * ((2 if cached else 1) * max_num_seqs + 1)
        memory = min(max(available, 0) // _GPU_STATE_PART, wanted)
    else:
        memory = min(max(available, 0) // 2, _STATE_BYTES)
    if (count := memory // slot_bytes - 1) < 1:
        raise ConfigError(
            f"state_memory: what layers keep of one sequence takes {2 * slot_bytes:,} bytes, with a slot beside it; "
            f"{memory:,} are available",
            param="state_memory",
        )
    sequences = min(max_num_seqs, max(count // 2, 1) if cached else count)
    return StateShares(sequences, min(count - sequences, _MOST_SNAPSHOTS) if cached else 0)


def int8_embedding(quantization: str | None, asked: bool | None) -> bool:
    """Whether embedding and head become 8-bit integers at load. asked: None where nothing was."""
    return quantization is not None if asked is None else asked


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
    fitting: int, needs: PageNeeds, *, max_position: int, max_num_seqs: int, max_model_len: int | None = None
) -> tuple[int, int, int]:
    """Choose a context length and a number of pages, where memory has room for `fitting` pages of every group.

    Returns the context length in tokens, the groups' pages that one such context holds at most, and the pages of every
    group to allocate: no more than max_num_seqs full contexts could use. A given max_model_len may need more pages than
    fit; callers check that.
    """
    groups = len(needs.windows)
    length = max_model_len or needs.longest(fitting * groups, max_position)
    needed = needs.most(length)
    return length, needed, min(fitting, -(-needed * max_num_seqs // groups))


def window_savings(needs: PageNeeds, length: int, needed: int) -> str:
    """What windows save, for people to read; "" where there are none. needed: the groups' pages of a context."""
    if needs.windows == (None,):
        return ""
    pages = -(-length // needs.block_size)
    tables = Counter(needs.windows)
    kinds = ", ".join(f"{count} of {window or 'all'} tokens" for window, count in tables.items())
    held, most = needed / len(needs.windows), f"{1 - needed / (pages * len(needs.windows)):.0%}"
    return f"; windows ({len(needs.windows)} page tables: {kinds}) save {most} of it: {held:,.1f} pages, not {pages:,}"


@dataclass(frozen=True, slots=True)
class PageBytes:
    """Bytes of one page in all layers together."""

    num_bytes: int
    formula: str
    """How they come about, for the log."""


def plan_kv(
    model: ModelConfig,
    needs: PageNeeds,
    page: PageBytes,
    *,
    available_bytes: int,
    shares: StateShares,
    max_model_len: int | None = None,
    num_blocks: int | None = None,
    state_bytes: int = 0,
) -> KVPlan:
    """Choose pages and context so that they fit in `available_bytes`, as `fit_pages` does.

    A given num_blocks is taken as it is, without regard to the available bytes. `state_bytes`, of all slots, are taken
    from the available ones first; `shares`: who has them. Raises ConfigError, with the numbers, if a given
    max_model_len exceeds the model's positions or the memory.
    """
    check_positions(model, max_model_len)
    cache_bytes = max(available_bytes - state_bytes, 0)
    fitting = num_blocks
    if fitting is None:
        fitting = cache_bytes // (page.num_bytes or LEAST_PAGE_BYTES)
    length, needed, blocks = fit_pages(
        fitting, needs, max_position=model.max_position, max_num_seqs=shares.sequences, max_model_len=max_model_len
    )
    if needed > fitting * len(needs.windows) or length < 1:
        if num_blocks:
            cache_bytes = fitting * page.num_bytes
        raise _context_error(needs, page, length, fitting, cache_bytes)
    if num_blocks is not None:
        blocks = num_blocks
    arithmetic = _pages_arithmetic(needs, page, blocks, length)
    arithmetic += window_savings(needs, length, needed)
    arithmetic += _states_arithmetic(shares, state_bytes)
    return KVPlan(
        num_blocks=blocks,
        block_size=needs.block_size,
        page_bytes=page.num_bytes,
        max_model_len=length,
        arithmetic=arithmetic,
        windows=needs.windows,
        context_pages=needed,
        state_bytes=state_bytes,
        sequences=shares.sequences,
        snapshots=shares.snapshots,
    )


def _context_error(needs: PageNeeds, page: PageBytes, length: int, fitting: int, cache_bytes: int) -> ConfigError:
    """fitting: pages of every group for which there is room, in `cache_bytes`."""
    groups = len(needs.windows)
    needed_bytes = max(needs.most(length), 1) * page.num_bytes // groups
    return ConfigError(
        f"max_model_len: a context of {length or 1} tokens needs {needed_bytes:,} bytes of KV "
        f"cache, {cache_bytes:,} are available; "
        f"the longest that fits is {needs.longest(fitting * groups, length)} tokens",
        param="max_model_len",
    )


def _pages_arithmetic(needs: PageNeeds, page: PageBytes, blocks: int, length: int) -> str:
    num_contexts = blocks * len(needs.windows) // needs.most(length)
    return (
        f"KV: {page.formula or 'nothing'} = {page.num_bytes / 1024:,.0f} KiB a page; "
        f"{blocks:,} pages = {blocks * page.num_bytes / GIB:.2f} GiB = {blocks * needs.block_size:,} tokens; "
        f"context {length:,}, {num_contexts} full ones at once"
    )


def _states_arithmetic(shares: StateShares, state_bytes: int) -> str:
    """Returns "" if layers keep nothing beside pages."""
    if not state_bytes:
        return ""
    snapshots = f" and {shares.snapshots:,} snapshots" if shares.snapshots else ""
    return f"; states of {shares.sequences:,} sequences{snapshots}: {state_bytes / 2**20:,.1f} MiB"


def meminfo(key: str) -> int | None:
    """Bytes that /proc/meminfo gives for a key; None where it does not exist."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def available_host_bytes(meminfo: Meminfo = meminfo) -> int:
    """Bytes that this process could still allocate.

    The smaller of what the machine has left and what our control group may still take; 8 GiB if neither can be read.
    """
    found = [value for value in (meminfo("MemAvailable"), _cgroup_headroom()) if value is not None]
    return min(found, default=8 * GIB)


def host_memory_bytes() -> int | None:
    """Bytes of memory that this machine has, or that our control group may take; None where neither can be read."""
    found = [value for value in (meminfo("MemTotal"), _cgroup_bytes("memory.max")) if value is not None]
    return min(found, default=None)


def check_kv_memory(gib: float | None, room: int | None, where: str) -> None:
    """Raise ConfigError for a KV cache of more memory than there is, before weights are loaded. room: bytes; None:
    nobody knows."""
    if gib is not None and room is not None and gib * GIB > room:
        message = f"kv_cache_memory: {gib:g} GiB are more than the {room / GIB:.1f} GiB of memory of {where}"
        raise ConfigError(message, param="kv_cache_memory")


def check_room(
    weights: StoredWeights | None, dtype: str, quantization: str | None = None, meminfo: Meminfo = meminfo
) -> None:
    """Raise ConfigError for weights that do not fit in this machine's free memory, if that is known.

    Without this check the system would kill this process, or another one, after minutes of loading.
    """
    if weights is None or (free := meminfo("MemAvailable")) is None:
        return
    # The CPU kernels may compress bfloat16 weights to 12 bits: see kernels/cpu/compress12.h.
    each = DTYPE_BYTES[dtype] * (0.75 if dtype == "bfloat16" else 1)
    least = weights.floats * (each if quantization is None else QUANTIZED_BITS[quantization] / 8) + weights.other_bytes
    if least > min(free, available_host_bytes(meminfo)):
        sizes = f"take {least / GIB:.1f} GiB or more, and {free / GIB:.1f} GiB of memory are free"
        lighter = "" if quantization == "int4" or not weights.floats else "use quantization int4, "
        raise ConfigError(f"model: the weights {sizes}: {lighter}a smaller model, or more memory", param="model")


def _cgroup_headroom() -> int | None:
    """Bytes that our control group (v2) may still allocate; None where it has no limit or is unknown."""
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    return None if limit is None or used is None else max(limit - used, 0)


def _cgroup_bytes(name: str) -> int | None:
    """What a file of our control group (v2) says; None where there is none, or no limit."""
    try:
        return int(Path("/sys/fs/cgroup", name).read_text())
    except (OSError, ValueError):  # "max" is no number
        return None
