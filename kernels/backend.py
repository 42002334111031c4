"""The contract that every backend keeps: its methods, and the types they take.

`Reference` (kernels/reference.py) computes all of it in plain PyTorch and is the judge in tests; the other backends
override what they compute faster. kernels/select.py chooses one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Pages = tuple[Tensor, ...]
"""A layer's page tensors, as its attention part asked for them; the first axis of each is the page."""


@dataclass(frozen=True, slots=True)
class LinearContext:
    """What a linear must know of the rows that it multiplies."""

    adapters: Tensor | None = None
    """[rows] int64: the slot of each row's adapter. None: no row has an adapter."""

    def at(self, rows: Tensor) -> LinearContext:
        """The context of these rows alone."""
        return self if self.adapters is None else LinearContext(self.adapters[rows])


NO_ADAPTERS = LinearContext()
Linear = Callable[[Tensor, LinearContext], Tensor]
"""[rows, in_features] to [rows, out_features]."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step lie: T tokens, ragged over S sequences. All tensors are on the model's device.

    Sequence s owns tokens query_start[s] to query_start[s + 1] of the step; they are the last ones of its
    context_lens[s] tokens, and the KV of all of these is in the pages that block_table[s] names, in order.
    """

    query_start: Tensor  # [S + 1] int32, cumulative token counts
    context_lens: Tensor  # [S] int32, keys per sequence, this step's tokens included
    key_start: Tensor  # [S + 1] int32, cumulative context_lens
    block_table: Tensor  # [S, most pages of a row] int32, padded with any valid page id
    positions: Tensor  # [T] int64, absolute position of each token
    slots: Tensor  # [T] int64, page id * block size + offset: where each token's KV is stored
    max_query_len: int
    max_context_len: int
    linear: LinearContext = NO_ADAPTERS  # of the T tokens


@dataclass(frozen=True, slots=True)
class Softmax:
    """How a query weighs the keys of its sequence."""

    scale: float
    """Factor of the scores."""
    window: int | None = None
    """Keys that a query sees, itself included; None: all."""
    softcap: float | None = None
    """c replaces a score s by c * tanh(s / c)."""


@dataclass(frozen=True, slots=True)
class Rope:
    """What happens to query and key heads before attention: RMSNorm where there are weights, [D] float32, then the
    rotation."""

    head_dim: int
    cos_sin: Tensor | None
    """[most positions, D]: cosines in the first half of a row, sines in the second, float32; pairs are (i, i + D/2) as
    in the Llama checkpoints. None leaves positions out (NoPE layers)."""
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class DenseAttention:
    """Grouped-query attention with its norms, as engine/layers/attention.py computes it. Norms are [hidden] float32."""

    input_norm: Tensor
    qkv: Linear
    rope: Rope
    softmax: Softmax
    out: Linear
    output_norm: Tensor | None
    """Norm of what attention gives, before it joins the residual stream."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A gated MLP with its norms, as engine/layers/mlp.py computes it."""

    input_norm: Tensor
    gate_up: Linear
    gelu: bool
    """The gate is GELU in its tanh approximation, not SiLU."""
    down: Linear
    output_norm: Tensor | None


DecoderLayer = tuple[DenseAttention, DenseMlp]
FusedLayers = Callable[[Tensor, Tensor | None, AttentionMetadata, Sequence[Pages], range], tuple[Tensor, Tensor]]
"""Called with (x, residual, metadata, pages of all layers, range of layers to run). x [T, hidden] is the output of the
previous MLP, not yet added to the stream `residual` (None: x is the embeddings). Returns the same two after the last of
the layers. Overwrites both arguments. No token may have an adapter."""


class Backend(ABC):
    """Tensors in, tensors out. Shapes: T tokens, H query heads, K key-value heads, D head_dim."""

    name: str
    block_size: int
    """Tokens in a page."""

    @abstractmethod
    def description(self) -> str:
        """What computes, for the log: the library and its version, the instruction set."""

    @abstractmethod
    def cannot_serve(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        """Why it cannot serve such a model there, in one line that says what would help; None where it can. No other
        method may be called where it cannot. softcap: the model caps its attention scores."""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Shape of one layer's key cache and of its value cache; the first axis is the page.

        The layout inside a page is the backend's own, but its element count is always block_size * K * D, and pages of
        more than 16 tokens are [tokens, ...], so that a page's beginning can be copied.
        """

    @abstractmethod
    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        """Write k, v [T, K, D] to the pages at slots [T]."""

    @abstractmethod
    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        """Causal attention of q [T, H, D] over its sequences' pages, [T, H, D].

        The query at position p sees keys max(0, p - window + 1) to p.
        H is a multiple of K; query head h reads key-value head h // (H / K). Scores and sums are float32.
        A row's result depends on nothing but its own query and keys: the batch, the chunking and the page ids do not
        change a bit of it (except on a GPU where the backend was not made deterministic).
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019). The weight is float32, and
        the arithmetic, rounded to the dtype of x at the end."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), all [T, hidden]. May overwrite x and residual."""

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for gate_up [T, 2 * F], gate in the first half: [T, F]."""

    @abstractmethod
    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """The same with GELU in the tanh approximation (Hendrycks and Gimpel, 2016)."""

    @abstractmethod
    def rope_store(
        self, qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Split qkv [T, (H + 2K) * D], norm and rotate q and k, store k and v. Returns q [T, H, D].

        K follows from the caches' element count. May overwrite qkv.
        """

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        """x @ weight.T + bias, weight [out, in], in whatever form is fastest; `weight` may be dropped afterwards.

        wide: the result is float32, of the same sums, whatever the dtype of x.
        """

    @abstractmethod
    def fuse_layers(self, layers: Sequence[DecoderLayer], *, head_dim: int, eps: float) -> FusedLayers | None:
        """Consecutive layers as one call, with the bits of the methods above; None where the backend has no such
        call."""

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """The first of the largest values of each row, [R, vocab] to [R] int64."""

    @abstractmethod
    def draw(self, logits: Tensor, filters: Tensor, u: Tensor) -> Tensor:
        """A token for each row of logits [R, vocab] float32: [R] int64.

        filters [R, 4] float64: temperature (above 0), top_k (from 1 to vocab), top_p, min_p. Top-k, then top-p of what
        it left (Holtzman et al., 2020), and min-p keep what is at or above a threshold value, so equal logits are
        kept or dropped together. The result is the first kept token, in the vocabulary's order, at which the cumulative
        probability exceeds u times that of all kept tokens. u [R] float64 is from 0 to below 1.
        """
