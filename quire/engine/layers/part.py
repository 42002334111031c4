"""What every part of a decoder's layer says of itself: its parameters, the state that it keeps of each sequence, and
its steps, in the kernels' own operations. A layer is a tuple of specs, each of which makes its part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quire.engine.checkpoint.parts.states import State
from quire.engine.layers.adapters import Adapters
from quire.engine.layers.linear import JoinedLinear, Projection
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.rope import Growth, alibi_bias, rope_table
from quire.engine.layers.schemes import Scheme
from quire.engine.layers.shard import WHOLE, Shard
from quire.kernels.activation import Activation
from quire.kernels.backend import AttentionMetadata, Backend, LinearContext, Operations, Pages
from quire.kernels.kv_codes import KV_CODES, KVScales
from quire.kernels.quantized import Given, rounding_of
from quire.kernels.softmax import Softmax


@dataclass(frozen=True, slots=True)
class PageTensor:
    """One tensor of a layer's pages, or slots; the first axis is the page, or slot. Pages of more than 16 tokens are
    [pages, tokens, ...], or [pages, pieces of as many tokens, ...], so that the beginning of a page can be copied."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What all parts of a model are made with, beside their own specs."""

    backend: Backend
    scheme: Scheme
    hidden_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    """What pages hold."""
    device: torch.device
    max_model_len: int
    kv_scales: Mapping[str, KVScales]
    """By the layer's name, of pages that hold 8-bit floats, where it is not 1."""
    adapters: Adapters | None = None
    """Where linears get room for some, if they do."""
    shard: Shard = WHOLE
    """Whose part of each layer it is."""
    experts: tuple[Backend, Scheme] | None = None
    """What packs routed experts, where it is not what packs all else."""
    linears: Callable[..., Projection] = JoinedLinear
    """What makes attention's linears, of JoinedLinear's arguments."""
    tables: dict[str, Tensor] = field(default_factory=dict)
    """Those of positions, which layers share."""
    shared: dict[str, JoinedLinear] = field(default_factory=dict)
    """Linears whose weights several layers have, by the name of the first one's part."""

    @property
    def attended_in(self) -> torch.dtype:
        """In which attention computes: what pages hold, where these are no codes."""
        return self.dtype if self.kv_dtype in KV_CODES else self.kv_dtype

    def rope_table(self, rope: dict[str, Any], head_dim: int) -> Tensor:
        key = f"{head_dim} {rope}"
        if key not in self.tables:
            self.tables[key] = rope_table(rope, head_dim, self.max_model_len).to(self.device)
        return self.tables[key]

    def query_scales(self, growth: Growth) -> Tensor:
        """What queries are multiplied by, by position."""
        key = f"scales {growth}"
        if key not in self.tables:
            self.tables[key] = growth.scales(self.max_model_len).to(self.device)
        return self.tables[key]

    def alibi(self, factor: float, heads: int, own: range) -> Tensor:
        """Softmax.bias of the `own` among so many heads."""
        key = f"alibi {factor} {heads}"
        if key not in self.tables:
            whole = factor * alibi_bias(heads, self.max_model_len)
            self.tables[key] = whole[own.start : own.stop].contiguous().to(self.device)
        return self.tables[key]


@dataclass(frozen=True, slots=True)
class Step:
    """What the parts of a layer must know of a step."""

    metadata: AttentionMetadata
    pages: Pages
    """What the layer keeps of sequences, in pages and in slots."""
    rows: Tensor | None
    """What comes behind the layer's state is wanted of these tokens alone, so the part that keeps it drops the others
    once they are kept; None: of all."""
    beside: Tensor | None = None
    """[T, W], what layers read of tokens beside the stream, as AttentionMetadata has it."""

    @property
    def context(self) -> LinearContext:
        return self.metadata.linear

    def behind(self, rows: Tensor) -> Step:
        """For the parts behind the one that has dropped all others."""
        beside = None if self.beside is None else self.beside[rows]
        return Step(replace(self.metadata, linear=self.context.at(rows)), self.pages, None, beside)


@dataclass(frozen=True, slots=True)
class Normed:
    """A norm and the linears of a part that read what it gives."""

    norm: str
    """Its name in the checkpoint."""
    offset: float
    """Added to its weights, as NormSpec has it."""
    linears: tuple[JoinedLinear, ...]


class Sublayer(ABC):
    """Fill it by way of `parameters()` before use."""

    @abstractmethod
    def parameters(self) -> ParameterTable:
        """Every tensor that it takes, by its name in the checkpoint."""

    def complete(self) -> None:
        """All tensors were put."""
        return None

    def normed(self) -> tuple[Normed, ...]:
        """Norms that nothing of this part reads but the linears named beside each; norms of which that cannot be said
        are left out."""
        return ()

    def pages(self, num_blocks: int) -> tuple[PageTensor, ...]:
        """What keeps its state, for so many pages; (): it keeps none."""
        return ()

    @property
    def reads(self) -> int:
        """How many tensors of pages its layer has for it: those that it keeps, or another layer's."""
        return len(self.pages(1))

    def slots(self, count: int, drafts: int) -> tuple[PageTensor, ...]:
        """The same for so many slots, each of which keeps what is not in pages of one sequence; a step computes up to
        so many drafts of it, which may turn out wrong."""
        return ()

    @property
    def page_formula(self) -> str:
        """The bytes of a page, as a product."""
        return "0"

    @abstractmethod
    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """Returns (output, residual stream), not yet added, for x [T, hidden] and the stream to add it to (None: x is
        the embeddings). Keeps the state of all T tokens."""


class SublayerSpec(ABC):
    """The shape of a part, and the switches by which families differ. Frozen."""

    __slots__ = ()

    @property
    def state(self) -> State | None:
        """What it keeps of a sequence; None: nothing."""
        return None

    @abstractmethod
    def part(self, making: BuildContext, layer: str) -> Sublayer:
        """`layer`: the layer's name in the checkpoint."""

    def indivisible(self, ranks: int) -> str | None:
        """What of it cannot be divided among so many ranks; None: all can."""
        return None


def uneven(size: int, what: str, ranks: int) -> str | None:
    """What SublayerSpec.indivisible says where so many, which messages call `what`, are no equal parts."""
    return f"the model's {what} cannot be divided among {ranks} ranks" if size % ranks else None


def attend(
    run: Operations, shard: Shard, q: Tensor, caches: tuple[Tensor, Tensor], metadata: AttentionMetadata, rule: Softmax
) -> Tensor:
    """Operations.paged_attention of this rank's heads q [T, H, D], whoever keeps which keys and values."""
    if shard.divides_tokens:
        assert shard.group is not None
        return run.divided_attention(q, caches, metadata, rule, shard.group)
    return run.paged_attention(q, *caches, metadata, rule)


def gated(run: Operations, gate_up: Tensor, reader: JoinedLinear, *, gelu: bool = False) -> Given:
    """Operations.silu_mul, or gelu_mul, as the linear that alone reads it takes it."""
    if (found := rounding_of((reader.packed,), gate_up)) is not None:
        form, whole = found
        return form.gate(gate_up, gelu=gelu, whole=whole)
    return run.gelu_mul(gate_up) if gelu else run.silu_mul(gate_up)


def times(run: Operations, x: Tensor, factor: float) -> Tensor:
    """x * factor; may overwrite x."""
    return x if factor == 1 else run.activate(x, Activation("times", slope=factor))
