"""Estimates, from a model's sizes and a machine, what fits in memory and how fast the model can be at most.

The limit of speed is the roofline model's (Williams et al., 2009): a step takes at least as long as reading its weights
and keys once, and at least as long as its arithmetic. Real steps take longer.
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
"""Tokens of a page. Some kernels need larger pages; that wastes less than one of these larger pages per request."""
_DEFAULTS = EngineConfig()
MAX_NUM_SEQS = _DEFAULTS.max_num_seqs
STEP_TOKENS = _DEFAULTS.max_num_batched_tokens
UTILIZATION = _DEFAULTS.gpu_memory_utilization
_COUNTS = (1, 2, 4, 8)
"""Numbers of devices that `cheapest` tries."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for. None means: whatever fits."""

    dtype: str = "auto"
    context: int | None = None
    concurrency: int | None = None
    utilization: float = UTILIZATION
    max_num_seqs: int = MAX_NUM_SEQS
    kv_cache_memory: float | None = None
    """GiB; None: the server's own rule."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What fits on a machine. Bytes are those of one device if there are several, unless a field says otherwise."""

    sizes: ModelSizes
    machine: Machine
    dtype: str
    weight_bytes: int
    """Bytes of the whole model."""
    weight_source: str
    kv_token_bytes: int
    page_bytes: int
    layer_page_bytes: int
    """Bytes of one layer's part of a page, not divided among devices."""
    kv_budget: int
    num_blocks: int = 0
    """Pages that the server will allocate when it is started with `flags`."""
    context: int = 0
    concurrency: int = 0
    """How many full contexts fit at once; no more than --max-num-seqs."""
    fitting: tuple[tuple[int, int], ...] = ()
    """Pairs of a context length and how many such contexts fit at once, for lengths that are powers of two."""
    reasons: tuple[str, ...] = ()
    """Why the model does not fit; empty when it does."""
    flags: tuple[str, ...] = ()
    """Flags of `quire serve` for what was asked for."""

    @property
    def fits(self) -> bool:
        return not self.reasons

    @property
    def kv_tokens(self) -> int:
        return self.kv_budget // self.page_bytes * BLOCK_SIZE

    def decode_limit(self, streams: int, context: int) -> float | None:
        """The most tokens per second of `streams` streams together, each with `context` tokens.

        None if the machine's bandwidth and arithmetic are unknown.
        """
        machine, sizes = self.machine, self.sizes
        if machine.bandwidth is None or machine.flops is None:
            return None
        read = self._weight_bytes_of(sizes.touched(streams)) / machine.count
        read += streams * context * self.kv_token_bytes
        work = streams * (2 * sizes.active_parameters + 4 * sizes.attention_width * context) / machine.count
        return streams / max(read / machine.bandwidth, work / machine.flops)

    def prefill_seconds(self, tokens: int) -> float | None:
        """The least seconds from a prompt to its first token; None if the machine's speed is unknown."""
        machine, sizes = self.machine, self.sizes
        if machine.bandwidth is None or machine.flops is None:
            return None
        body = sizes.active_parameters - sizes.head_parameters
        work = tokens * 2 * body + 2 * sizes.head_parameters + 2 * sizes.attention_width * tokens**2
        read = self._weight_bytes_of(sizes.touched(tokens))
        return max(work / machine.flops, read / machine.bandwidth) / machine.count

    def _weight_bytes_of(self, parameters: int) -> float:
        return self.weight_bytes * parameters / self.sizes.parameters


_COMPRESSION_SAVES = 0.24
"""Share of the linear layers' bytes that compression to 12 bits saves: a quarter, less the few weights that are stored
uncompressed (kernels/cpu/compress12.h)."""


def weights_by_arithmetic(sizes: ModelSizes, dtype: str) -> int:
    """Bytes of the weights in this type; quantized linear layers take their own number of bits."""
    return round(sizes.parameters * DTYPE_BYTES[dtype] * sizes.weight_ratio)


def step_bytes(sizes: ModelSizes, width: int) -> int:
    """A rough estimate of the bytes that the largest step takes on a GPU; the engine measures it.

    It consists of some 20 hidden states per token, `width` bytes per number, and the sampler's copies of the logits.
    """
    hidden = sizes.head_parameters // sizes.vocab_size
    return STEP_TOKENS * 20 * hidden * width + MAX_NUM_SEQS * sizes.vocab_size * 4 * 4


def serving_dtype(sizes: ModelSizes, machine: Machine, asked: str) -> str:
    """The type asked for; for "auto" the type that the server chooses for the checkpoint on this machine."""
    if asked != "auto":
        return asked
    name = sizes.dtype if sizes.dtype in DTYPE_BYTES else "bfloat16"
    if name == "float16" and not machine.gpu:
        return "bfloat16"
    return "float16" if name == "bfloat16" and not machine.bf16 else name


def estimate(sizes: ModelSizes, machine: Machine, wishes: Wishes, stored: StoredWeights | None = None) -> Estimate:
    """stored: the size of the weights according to the checkpoint's headers, if its files are there."""
    dtype = serving_dtype(sizes, machine, wishes.dtype)
    width = DTYPE_BYTES[dtype]
    weights = weights_by_arithmetic(sizes, dtype) if stored is None else stored.floats * width + stored.other_bytes
    on_device = weights // machine.count
    if not machine.gpu and sizes.embeddings < 2 * sizes.head_parameters:
        on_device += sizes.head_parameters * width  # the CPU kernels make a packed copy of a tied head
    if machine.compresses and dtype == "bfloat16":
        linears = on_device - sizes.head_parameters * width  # all but the embedding table
        on_device -= round(linears * _COMPRESSION_SAVES)
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
    """Tokens that the KV cache of an engine with this configuration will hold.

    None if no estimate can be made, or none is needed because num_kv_blocks is given. The model's files must exist.
    """
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
    """The estimate completed with what fits, or with the reasons why it does not. on_device: bytes of the weights."""
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
    """Why the model does not fit, with the numbers and with what would help; [] if it does."""
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
    """The GPU of the table with the least memory on which the model fits, or several such GPUs; None if none do."""
    cards = sorted(read_cards().values(), key=lambda card: (card.memory, card.bandwidth or 0.0))
    for count in _COUNTS:
        for card in cards:
            machine = replace(card, count=count)
            if estimate(sizes, machine, wishes, stored).fits:
                return machine
    return None
