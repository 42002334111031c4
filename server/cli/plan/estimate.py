"""From a model's sizes and a machine to what fits and how fast it can be at most.

Speed is a roofline (Williams et al., 2009): a step takes at least the time to read its weights and keys once, and at
least the time of its arithmetic. Real steps take longer; no step takes less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.engine.checkpoint.files import StoredWeights, read_raw_config, read_stored_weights, resolve_model
from quire.engine.checkpoint.kv_plan import DTYPE_BYTES, GIB, fit_pages
from quire.engine.checkpoint.sizes import ModelSizes, read_sizes
from quire.engine.config import EngineConfig
from quire.engine.errors import ModelError
from quire.server.cli.plan.machine import Machine, read_cards

BLOCK_SIZE = 16
"""Tokens of a page; the kernels that need larger ones waste less than one such page per request."""
_DEFAULTS = EngineConfig()
MAX_NUM_SEQS = _DEFAULTS.max_num_seqs
STEP_TOKENS = _DEFAULTS.max_num_batched_tokens
UTILIZATION = _DEFAULTS.gpu_memory_utilization
_COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for; None: what fits."""

    dtype: str = "auto"
    context: int | None = None
    concurrency: int | None = None
    utilization: float = UTILIZATION
    max_num_seqs: int = MAX_NUM_SEQS
    kv_cache_memory: float | None = None
    """GiB."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes are those of one device where there are several."""

    sizes: ModelSizes
    machine: Machine
    dtype: str
    weight_bytes: int
    """Of the whole model."""
    weight_source: str
    kv_token_bytes: int
    page_bytes: int
    layer_page_bytes: int
    """Of one layer, not split over devices."""
    kv_budget: int
    num_blocks: int = 0
    """As the server will cut it with the flags below."""
    context: int = 0
    concurrency: int = 0
    """Full contexts at once, no more than --max-num-seqs."""
    fitting: tuple[tuple[int, int], ...] = ()
    """(context, how many of it at once), for contexts of powers of two."""
    reasons: tuple[str, ...] = ()
    """Why it does not fit; empty when it does."""
    flags: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def kv_tokens(self) -> int:
        return self.kv_budget // self.page_bytes * BLOCK_SIZE

    def decode_limit(self, streams: int, context: int) -> float | None:
        """Most tokens a second, all streams together, each with so long a context; None on an unknown machine."""
        machine, sizes = self.machine, self.sizes
        if machine.bandwidth is None or machine.flops is None:
            return None
        read = self._weight_bytes_of(sizes.touched(streams)) / machine.count
        read += streams * context * self.kv_token_bytes
        work = streams * (2 * sizes.active_parameters + 4 * sizes.attention_width * context) / machine.count
        return streams / max(read / machine.bandwidth, work / machine.flops)

    def prefill_seconds(self, tokens: int) -> float | None:
        """Least seconds from a prompt to its first token; None on an unknown machine."""
        machine, sizes = self.machine, self.sizes
        if machine.bandwidth is None or machine.flops is None:
            return None
        body = sizes.active_parameters - sizes.head_parameters
        work = tokens * 2 * body + 2 * sizes.head_parameters + 2 * sizes.attention_width * tokens**2
        read = self._weight_bytes_of(sizes.touched(tokens))
        return max(work / machine.flops, read / machine.bandwidth) / machine.count

    def _weight_bytes_of(self, parameters: int) -> float:
        return self.weight_bytes * parameters / self.sizes.parameters


_SQUEEZED_AWAY = 0.24
"""Of a linear's bytes: a quarter, but for the few weights that are kept whole (kernels/cpu/compress12.h)."""


def weights_by_arithmetic(sizes: ModelSizes, dtype: str) -> int:
    """Bytes of the weights in this type, quantized linears at their own bits."""
    return round(sizes.parameters * DTYPE_BYTES[dtype] * sizes.weight_ratio)


def step_bytes(sizes: ModelSizes, width: int) -> int:
    """What the largest step takes on a GPU, roughly: some 20 hidden states of a token, and the sampler's copies of the
    logits. The engine measures it instead."""
    hidden = sizes.head_parameters // sizes.vocab_size
    return STEP_TOKENS * 20 * hidden * width + MAX_NUM_SEQS * sizes.vocab_size * 4 * 4


def serving_dtype(sizes: ModelSizes, machine: Machine, asked: str) -> str:
    """The type asked for, or what the server's auto makes of the checkpoint's on this machine."""
    if asked != "auto":
        return asked
    name = sizes.dtype if sizes.dtype in DTYPE_BYTES else "bfloat16"
    if name == "float16" and not machine.gpu:
        return "bfloat16"
    return "float16" if name == "bfloat16" and not machine.bf16 else name


def estimate(sizes: ModelSizes, machine: Machine, wishes: Wishes, stored: StoredWeights | None = None) -> Estimate:
    """`stored`: what the checkpoint's headers tell, if there are any."""
    dtype = serving_dtype(sizes, machine, wishes.dtype)
    width = DTYPE_BYTES[dtype]
    weights = weights_by_arithmetic(sizes, dtype) if stored is None else stored.floats * width + stored.other_bytes
    on_device = weights // machine.count
    if not machine.gpu and sizes.embeddings < 2 * sizes.head_parameters:
        on_device += sizes.head_parameters * width  # the CPU's kernels pack a tied head into a copy of its own
    if machine.compresses and dtype == "bfloat16":
        linears = on_device - sizes.head_parameters * width  # all but the embedding table
        on_device -= round(linears * _SQUEEZED_AWAY)
    split = min(machine.count, sizes.kv_heads)
    token = sizes.kv_numbers * width // split
    page = token * BLOCK_SIZE
    budget = machine.kv_budget(on_device, step_bytes(sizes, width), wishes.utilization)
    if wishes.kv_cache_memory is not None:
        budget = int(wishes.kv_cache_memory * GIB)
    made = Estimate(
        sizes=sizes,
        machine=machine,
        dtype=dtype,
        weight_bytes=weights,
        weight_source="config.json" if stored is None else "safetensors headers",
        kv_token_bytes=token,
        page_bytes=page,
        layer_page_bytes=sizes.kv_numbers * width * BLOCK_SIZE // sizes.num_layers,
        kv_budget=budget,
    )
    return _fitted(made, wishes, on_device)


def predicted_tokens(config: EngineConfig, machine: Machine) -> int | None:
    """Of the KV cache that an engine will cut with this configuration; None where no plan can be made, or none is
    needed because the pages are given. The model's files are there already."""
    if config.num_kv_blocks is not None:
        return None
    try:
        raw, folder = read_raw_config(str(resolve_model(config.model, config.revision)))
        stored = read_stored_weights(folder) if folder is not None and config.load_format == "auto" else None
        wishes = Wishes(
            dtype=config.dtype,
            context=config.max_model_len,
            utilization=config.gpu_memory_utilization,
            max_num_seqs=config.max_num_seqs,
            kv_cache_memory=config.kv_cache_memory,
        )
        return estimate(read_sizes(raw), machine, wishes, stored).num_blocks * BLOCK_SIZE or None
    except ModelError:
        return None


def _fitted(made: Estimate, wishes: Wishes, on_device: int) -> Estimate:
    pages = made.kv_budget // made.page_bytes
    longest = made.sizes.max_position
    reasons = _reasons(made, wishes, on_device, pages)
    if reasons:
        return replace(made, reasons=tuple(reasons))
    asked = wishes.context
    if asked is None and wishes.concurrency is not None:
        asked = min(longest, pages // wishes.concurrency * BLOCK_SIZE)
    seqs = max(wishes.max_num_seqs, wishes.concurrency or 0)
    context, needed, blocks = fit_pages(pages, BLOCK_SIZE, max_position=longest, max_num_seqs=seqs, max_model_len=asked)
    flags = []
    if asked is not None or context < longest:
        flags += ["--max-model-len", str(context)]
    if wishes.dtype != "auto" or made.dtype != made.sizes.dtype:
        flags += ["--dtype", made.dtype]
    if seqs != MAX_NUM_SEQS:
        flags += ["--max-num-seqs", str(seqs)]
    if made.machine.gpu and wishes.utilization != UTILIZATION:
        flags += ["--gpu-memory-utilization", f"{wishes.utilization:g}"]
    if wishes.kv_cache_memory is not None:
        flags += ["--kv-cache-memory", f"{wishes.kv_cache_memory:g}"]
    lengths = [2**power for power in range(9, 24) if 2**power < longest] + [longest]
    fitting = tuple((length, pages // -(-length // BLOCK_SIZE)) for length in lengths)
    return replace(
        made,
        num_blocks=blocks,
        context=context,
        concurrency=min(pages // needed, seqs),
        fitting=tuple((length, count) for length, count in fitting if count),
        flags=tuple(flags),
    )


def _reasons(made: Estimate, wishes: Wishes, on_device: int, pages: int) -> list[str]:
    """Why it does not fit, with the numbers and what would help."""
    machine, sizes = made.machine, made.sizes
    if made.dtype == "bfloat16" and not machine.bf16:
        return [f"{machine.name} does not compute bfloat16: use --dtype float16"]
    if wishes.context is not None and wishes.context > sizes.max_position:
        return [f"a context of {wishes.context:,} tokens exceeds the model's {sizes.max_position:,} positions"]
    if pages < 1:
        room = machine.memory * (wishes.utilization if machine.gpu else 1.0)
        each = " on each device" if machine.count > 1 else ""
        return [
            f"the weights take {on_device / GIB:.1f} GiB{each} and {machine.name} has {room / GIB:.1f} GiB to use: "
            "nothing is left for a KV cache"
        ]
    context, together = wishes.context, wishes.concurrency or 1
    if context is not None and pages // -(-context // BLOCK_SIZE) < together:
        needed = together * -(-context // BLOCK_SIZE) * made.page_bytes
        shorter = pages // together * BLOCK_SIZE
        fewer = pages // -(-context // BLOCK_SIZE)
        return [
            f"{together} x {context:,} tokens need {needed / GIB:.2f} GiB of KV cache, {made.kv_budget / GIB:.2f} GiB "
            f"are left; {together} x {shorter:,} tokens fit" + (f", or {fewer} x {context:,}" if fewer else "")
        ]
    if pages < together:
        return [f"{together} requests at once need a page each, and {pages} pages fit"]
    return []


def cheapest(sizes: ModelSizes, wishes: Wishes, stored: StoredWeights | None) -> Machine | None:
    """The GPU of the table with the least memory on which it fits, or several of them."""
    cards = sorted(read_cards().values(), key=lambda card: (card.memory, card.bandwidth or 0.0))
    for count in _COUNTS:
        for card in cards:
            machine = replace(card, count=count)
            if estimate(sizes, machine, wishes, stored).fits:
                return machine
    return None
