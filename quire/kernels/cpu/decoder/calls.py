"""Defines once, for each operation of a layer, which kernel it calls with which arguments. `Now` calls the kernels at
once; the recorder (recorder.py) notes the same calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_num_threads

from quire.kernels.activation import Activation
from quire.kernels.backend import AttentionMetadata, CachePair
from quire.kernels.collective import RankEnded
from quire.kernels.cpu import native
from quire.kernels.cpu.decoder import recurrence
from quire.kernels.cpu.decoder.short_conv import check_columns
from quire.kernels.cpu.latents.latent import check_latent
from quire.kernels.kv_codes import KV_CODES, KVScales
from quire.kernels.latents.latent import Latent
from quire.kernels.recurrent.recurrence import Matrices, Recurrence
from quire.kernels.recurrent.short_conv import Columns, ShortConv
from quire.kernels.rotation import NORMS, Rope
from quire.kernels.softmax import Softmax

_ALL = 2**31 - 1


class Where(NamedTuple):
    """What kernels read of a step's metadata: tensors and numbers."""

    starts: Any
    contexts: Any
    table: Any
    stride: Any
    """The table's columns."""
    sequences: Any
    """The table's rows."""
    states: Any
    seen: Any
    known: Any


class Calls(ABC):
    """Operations of kernels/backend.py on contiguous tensors or on their stand-ins. x is [T, ...] and has a type that
    kernels take. The operations raise TypeError or ValueError for other arguments that kernels do not take."""

    @abstractmethod
    def like(self, x: Any) -> Any:
        """An uninitialized result with x's shape and type."""

    @abstractmethod
    def halved(self, x: Any) -> Any:
        """An uninitialized result that is half as wide as x."""

    @abstractmethod
    def new(self, x: Any, *shape: int) -> Any:
        """An uninitialized result of x's type, with this shape for each token of x."""

    @abstractmethod
    def viewed(self, x: Any, *shape: int) -> Any:
        """A view of x with this shape for each token."""

    @abstractmethod
    def rows(self, x: Any) -> tuple[Any, Any]:
        """The number of rows along the last axis of x, and their width."""

    @abstractmethod
    def tokens(self, x: Any) -> Any: ...

    @abstractmethod
    def width(self, x: Any) -> Any:
        """How many numbers each token has."""

    @abstractmethod
    def numbers(self, x: Any) -> Any:
        """How many numbers x has."""

    @abstractmethod
    def where(self, metadata: Any) -> Where: ...

    @abstractmethod
    def call(self, kernel: str, gives: Any, *arguments: Any, wrong: str = "") -> Any:
        """Call a kernel with tensors, structures and numbers, and the number of threads behind them; `wrong`: what it
        means where it refuses, if it can. Returns `gives`."""

    def rms_norm(self, x: Any, weight: Tensor, eps: float) -> Any:
        out = self.like(x)
        return self.call("rms_norm", out, x, weight, out, *self.rows(x), eps)

    def add_rms_norm(self, x: Any, residual: Any, weight: Tensor, eps: float) -> Any:
        return self.call("add_rms_norm", (x, residual), x, residual, weight, *self.rows(x), eps)

    def layer_norm(self, x: Any, weight: Tensor, bias: Tensor, eps: float) -> Any:
        out = self.like(x)
        return self.call("layer_norm", out, x, None, weight, bias, out, *self.rows(x), eps)

    def add_layer_norm(self, x: Any, residual: Any, weight: Tensor, bias: Tensor, eps: float) -> Any:
        return self.call("layer_norm", (x, residual), x, residual, weight, bias, x, *self.rows(x), eps)

    def add(self, x: Any, residual: Any) -> Any:
        return self.call("add", residual, x, residual, self.numbers(x))

    def add_gated(self, x: Any, gate: Any, residual: Any) -> Any:
        return self.call("add_gated", residual, x, gate, residual, *self.rows(x))

    def activate(self, x: Any, activation: Activation) -> Any:
        return self.call("activate", x, x, self.numbers(x), *native.activation_numbers(activation))

    def silu_mul(self, gate_up: Any) -> Any:
        return self.gated("silu_mul", gate_up)

    def gelu_mul(self, gate_up: Any) -> Any:
        return self.gated("gelu_mul", gate_up)

    def gated(self, kernel: str, gate_up: Any, *rules: float) -> Any:
        """Call a kernel whose input is a gate and up, side by side."""
        out = self.halved(gate_up)
        return self.call(kernel, out, gate_up, out, *self.rows(out), *rules)

    def mul_columns(self, x: Any, beside: Any, first: int) -> Any:
        return self.call("mul_columns", x, x, beside, *self.rows(x), self.width(beside), first)

    def sigmoid_mul(self, x: Any, gate: Any) -> Any:
        return self.call("sigmoid_mul", x, x, gate, self.numbers(gate), self.width(x) // self.width(gate))

    def rope_store(self, qkv: Any, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: Any) -> Any:
        caches = _held(qkv, (k_cache, v_cache), rope.kv_scales)
        (pages, kv_heads, _), dim = caches[0].shape, rope.head_dim
        weights = (rope.q_norm, rope.k_norm, rope.v_norm, rope.cos_sin, rope.q_scale)
        for each in weights:
            if each is not None and each.dtype != torch.float32:
                raise TypeError(f"weights of norms, cos_sin and q_scale must be float32, not {each.dtype}")
        heads = rope.heads(self.width(qkv), kv_heads)
        q, kinds = self.new(qkv, heads, dim), (NORMS.index(rope.norm), rope.projected)
        where = (metadata.turned, metadata.slots, q, *caches, *_strides(caches))
        sizes = (self.tokens(qkv), pages, heads, kv_heads, dim, rope.eps)
        wrong = f"slots outside the {pages} pages of the cache"
        return self.call("rope_store", q, qkv, *weights, *kinds, *where, *sizes, wrong=wrong)

    def paged_attention(self, q: Any, k_cache: Tensor, v_cache: Tensor, metadata: Any, softmax: Softmax) -> Any:
        ahead = _ALL if softmax.ahead is None else softmax.ahead
        return self._attended("paged_attention", (), q, (k_cache, v_cache), metadata, softmax, ahead)

    def divided_attention(self, q: Any, caches: CachePair, metadata: Any, softmax: Softmax, group: Any) -> Any:
        return self._attended("ranks_attention", (group.native,), q, caches, metadata, softmax, times=group.count)

    def _attended(
        self,
        kernel: str,
        group: tuple[Any, ...],
        q: Any,
        caches: CachePair,
        metadata: Any,
        softmax: Softmax,
        *more: int,
        times: int = 1,
    ) -> Any:
        """`times`: the number of ranks that have as many heads as q each."""
        pages, held = len(caches[0]), _held(q, caches, softmax.kv_scales)
        (*_, heads, dim), step = q.shape, self.where(metadata)
        out = self.new(q, heads, softmax.values or dim)
        where = (*held, step.starts, step.contexts, step.table, step.stride, *_strides(held))
        sizes = (pages, step.sequences, heads * times, held[0].shape[1], dim)
        rules = (softmax.scale, softmax.native_window, softmax.softcap or 0.0, *more)
        native.check_sinks(softmax.sinks, heads)
        beside = (softmax.bias, *native.bias_columns(softmax.bias), softmax.sinks, softmax.values or 0)
        wrong = f"block table names a page outside the {pages} pages of the cache"
        return self.call(kernel, out, *group, out, q, *where, *sizes, *rules, *beside, wrong=wrong)

    def latent_store(self, q: Any, kv: Any, latent: Latent, cache: Tensor, metadata: Any) -> Any:
        check_latent(latent)
        cache, _, held = _held(q, (cache, cache), latent.kv_scales)
        size, rotated = latent.sizes
        heads = self.width(q) // (size + rotated)
        given = (q, kv, latent.norm, latent.cos_sin, latent.neighbours, metadata.positions, metadata.slots, cache, held)
        sizes = (cache.stride(0), self.tokens(q), len(cache), heads, size, rotated, latent.eps)
        wrong = f"slots outside the {len(cache)} pages of the cache"
        return self.call("latent_store", self.viewed(q, heads, size + rotated), *given, *sizes, wrong=wrong)

    def short_conv(self, bcx: Any, conv: ShortConv, columns: Columns, metadata: Any) -> Any:
        check_columns(conv, columns, bcx.dtype)
        step, wide = self.where(metadata), self.width(bcx) // conv.inputs
        assert step.states is not None
        out, pages = self.new(bcx, wide), 0 if columns.ends is None else len(columns.ends)
        given = (bcx, conv.weight, conv.bias, out, columns.ends, columns.recent)
        where = (step.starts, step.contexts, step.table, step.stride, step.states, pages, len(columns.recent))
        sizes = (step.sequences, wide, conv.width, columns.kept, conv.gated)
        wrong = "a block table or a slot names what the columns do not have"
        return self.call("short_conv", out, *given, *where, *sizes, wrong=wrong)

    def recur(self, given: Any, z: Any, beside: Any, rule: Recurrence, states: Matrices, metadata: Any) -> Any:
        recurrence.check(rule, states, given.dtype)
        out, how, step = self.like(z), recurrence.native_rule(rule), self.where(metadata)
        assert step.states is not None
        where = (step.starts, step.contexts, step.seen, step.known, step.states, len(states.matrices), step.sequences)
        kept = (*how.weights, out, states.matrices, states.guesses)
        sizes = (*how.sizes, states.guesses.shape[1], *how.rules)
        wrong = "there is no such slot, or there are more guesses than it keeps"
        return self.call(how.kernel, out, given, z, beside, *kept, *where, *sizes, wrong=wrong)


class Now(Calls):
    """Calls kernels at once. It makes no tensor that is not returned."""

    def __init__(self, library: native.Native) -> None:
        self._library = library

    def like(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def halved(self, x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))

    def new(self, x: Tensor, *shape: int) -> Tensor:
        return x.new_empty((len(x), *shape))

    def viewed(self, x: Tensor, *shape: int) -> Tensor:
        return x.view(len(x), *shape)

    def rows(self, x: Tensor) -> tuple[int, int]:
        return x.numel() // x.shape[-1], x.shape[-1]

    def tokens(self, x: Tensor) -> int:
        return len(x)

    def width(self, x: Tensor) -> int:
        return prod(x.shape[1:])

    def numbers(self, x: Tensor) -> int:
        return x.numel()

    def where(self, metadata: AttentionMetadata) -> Where:
        table, guesses = metadata.block_table, metadata.guesses
        seen, known = (None, None) if guesses is None else (guesses.seen, guesses.known)
        step = (metadata.query_start, metadata.context_lens, table, table.shape[1], len(table), metadata.state_slots)
        return Where(*step, seen, known)

    def call(self, kernel: str, gives: Any, *arguments: Any, wrong: str = "") -> Any:
        dtype = next(each.dtype for each in arguments if isinstance(each, Tensor))
        function = getattr(self._library, kernel)[dtype]
        failed = function(*map(native.plain, arguments), get_num_threads())
        if wrong and failed:  # others return nothing
            raise RankEnded if kernel == "ranks_attention" and failed == 1 else IndexError(wrong)
        return gives


def check_caches(x: Any, caches: CachePair) -> None:
    """Raise TypeError if the caches have a type that cannot serve x."""
    keys, values = (each.dtype for each in caches)
    if keys != values or (keys != x.dtype and keys not in KV_CODES):
        raise TypeError(f"keys and values of {keys} and {values} cannot serve {x.dtype}")


def _held(x: Any, caches: CachePair, scales: KVScales) -> tuple[Tensor, Tensor, native.KVFormat | None]:
    """The caches as kernels take them, and the format of their numbers."""
    check_caches(x, caches)
    k_cache, v_cache = (native.in_pieces(each) for each in caches)
    return k_cache, v_cache, native.kv_format(k_cache, scales)


def _strides(held: tuple[Tensor, Tensor, Any]) -> tuple[int, int]:
    return held[0].stride(0), held[1].stride(0)
