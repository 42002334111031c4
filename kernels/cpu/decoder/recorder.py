"""Layers in one call, as a CUDA graph computes them on a GPU: the kernels that their operations would call are noted
once, with the pointers that they are called with, and recorded.cpp runs the list."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.backend import AttentionMetadata, CachePair, Layer, LinearContext, Operations, Recorded
from quire.kernels.collective import RankEnded
from quire.kernels.cpu import native
from quire.kernels.cpu.decoder import recurrence
from quire.kernels.cpu.decoder.experts import CompiledMixture
from quire.kernels.cpu.decoder.short_conv import check_columns
from quire.kernels.cpu.latents.latent import CompiledBlocks, check_latent
from quire.kernels.cpu.linear import CompiledLinear
from quire.kernels.cpu.lora import CompiledAdaptedLinear
from quire.kernels.cpu.ranks.collective import SharedCollective
from quire.kernels.kv_codes import KV_CODES
from quire.kernels.latents.latent import Latent
from quire.kernels.recurrent.recurrence import Matrices, Recurrence
from quire.kernels.recurrent.short_conv import Columns, ShortConv
from quire.kernels.rotation import NORMS, Rope
from quire.kernels.softmax import Softmax

_FIXED, _PER_TOKEN, _BUFFER, _OF_STEP, _FETCH = range(5)
"""How an argument follows from its value, as recorded.cpp has it."""
_ALIGNED = 64
"""Bytes of a token's part of a buffer: a multiple of this."""


class _NotOurs(Exception):
    """An operation that no compiled kernel computes."""


@dataclass(slots=True, eq=False)
class _Given:
    """An argument that a step gives."""

    kind: int
    value: int


@dataclass(slots=True, eq=False)
class _Buffer(_Given):
    """Stands for a tensor [T, *shape]."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return prod(self.shape)

    def flatten(self, _: int) -> _Buffer:
        return _Buffer(self.kind, self.value, (self.width,), self.dtype)


_TOKENS, _PAGES = _Given(_PER_TOKEN, 1), _Given(_FETCH, 0)
_X, _RESIDUAL, _STARTS, _CONTEXTS, _POSITIONS, _ADAPTERS, _STATES, _SEEN, _KNOWN, _BESIDE, _WIDTH = (
    _Given(_OF_STEP, number) for number in range(11)
)
_STRIDE, _SEQUENCES, _THREADS = (_Given(_OF_STEP, number) for number in range(11, 14))
_FIRST_TABLE = 14
"""The step's number of the first group's table; its slots follow, then those of the other groups."""


class _Recorder(Operations):
    """Takes buffers for tensors. Raises _NotOurs."""

    def __init__(self, library: native.Native, hidden: int, dtype: torch.dtype, groups: int) -> None:
        self._library, self._hidden, self._dtype = library, hidden, dtype
        # Kernels, and what they are called with, which lives on here.
        self._noted: list[tuple[str, tuple[Any, ...]]] = []
        self._attends_in = dtype
        self._ends = [0]  # calls before each layer, and before the end
        self._used = self._token_bytes = 0  # bytes of buffers: of this layer, and of the one that needs most
        step: Any = (_STARTS, _CONTEXTS, None, None, _POSITIONS, None, 0, 0, LinearContext(cast(Any, _ADAPTERS)))
        paged: list[Any] = [_Given(_OF_STEP, _FIRST_TABLE + number) for number in range(2 * groups)]
        beside: Any = _BESIDE
        first = replace(AttentionMetadata(*step), block_table=paged[0], slots=paged[1], beside=beside)
        self._metadata = first.grouped(paged[::2], paged[1::2])

    def note(self, layer: Layer, *, starts: bool) -> None:
        """What a layer returns must be where it found it, so that any layers can be run."""
        self._used = 0
        stream: Any = _Buffer(_OF_STEP, _RESIDUAL.value, (self._hidden,), self._dtype)
        given: Any = stream if starts else _Buffer(_OF_STEP, _X.value, (self._hidden,), self._dtype)
        x: Any
        x, residual = layer(self, given, None if starts else stream, self._metadata)
        assert residual is stream
        if x is not given:
            made = [any(each is x for each in arguments) for _, arguments in self._noted].index(True)
            assert starts or not any(each is given for _, those in self._noted[made + 1 :] for each in those)
            x.kind, x.value = _OF_STEP, _X.value
        self._ends.append(len(self._noted))

    def apply(self, linear: Any, x: Any, context: LinearContext) -> Any:
        match linear:
            case CompiledAdaptedLinear():
                out = self.apply(linear.linear, x, context)
                return self._call("add_adapters", out, linear.native, _ADAPTERS, x, out, _TOKENS, _THREADS)
            case CompiledLinear(dtype=self._dtype) if not linear.native.wide:
                out = self._buffer(linear.outs)
                return self._call("linear", out, linear.native, x, out, _TOKENS, _THREADS, _PAGES)
            case CompiledBlocks(dtype=self._dtype):
                out = self._buffer(linear.outs)
                return self._call("linear_blocks", out, linear.native, x, out, _TOKENS, _THREADS)
        raise _NotOurs

    def mix(self, mixture: Any, x: Any, routed: Any) -> Any:
        if not isinstance(mixture, CompiledMixture):
            raise _NotOurs
        out = self._buffer(x.width)
        return self._call("mix_experts", out, mixture.native, x, routed, out, _TOKENS, _THREADS)

    def sum(self, x: Any, group: Any) -> Any:
        if not isinstance(group, SharedCollective | None):
            raise _NotOurs
        size = _Given(_PER_TOKEN, x.width)
        return x if group is None else self._call("sum_ranks", x, group.native, x, size, _THREADS)

    def rms_norm(self, x: Any, weight: Tensor, eps: float) -> Any:
        out = self._buffer(x.width)
        return self._call("rms_norm", out, x, weight, out, _TOKENS, x.width, eps, _THREADS)

    def add_rms_norm(self, x: Any, residual: Any, weight: Tensor, eps: float) -> Any:
        return self._call("add_rms_norm", (x, residual), x, residual, weight, _TOKENS, x.width, eps, _THREADS)

    def layer_norm(self, x: Any, weight: Tensor, bias: Tensor, eps: float) -> Any:
        out = self._buffer(x.width)
        return self._call("layer_norm", out, x, None, weight, bias, out, _TOKENS, x.width, eps, _THREADS)

    def add_layer_norm(self, x: Any, residual: Any, weight: Tensor, bias: Tensor, eps: float) -> Any:
        gives = (x, residual)
        return self._call("layer_norm", gives, x, residual, weight, bias, x, _TOKENS, x.width, eps, _THREADS)

    def add(self, x: Any, residual: Any) -> Any:
        return self._call("add", residual, x, residual, _Given(_PER_TOKEN, x.width), _THREADS)

    def add_gated(self, x: Any, gate: Any, residual: Any) -> Any:
        return self._call("add_gated", residual, x, gate, residual, _TOKENS, x.width, _THREADS)

    def activate(self, x: Any, activation: Activation) -> Any:
        size, numbers = _Given(_PER_TOKEN, x.width), native.activation_numbers(activation)
        return self._call("activate", x, x, size, *numbers, _THREADS)

    def silu_mul(self, gate_up: Any) -> Any:
        out = self._buffer(gate_up.width // 2)
        return self._call("silu_mul", out, gate_up, out, _TOKENS, out.width, _THREADS)

    def gelu_mul(self, gate_up: Any) -> Any:
        out = self._buffer(gate_up.width // 2)
        return self._call("gelu_mul", out, gate_up, out, _TOKENS, out.width, _THREADS)

    def mul_columns(self, x: Any, beside: Any, first: int) -> Any:
        width = beside.width if isinstance(beside, _Buffer) else _WIDTH
        return self._call("mul_columns", x, x, beside, _TOKENS, x.width, width, first, _THREADS)

    def rope_store(self, qkv: Any, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: Any) -> Any:
        k_cache, v_cache = native.in_pieces(k_cache), native.in_pieces(v_cache)
        kv_heads, dim = k_cache.shape[1], rope.head_dim
        kinds = (NORMS.index(rope.norm), rope.projected)
        weights = (rope.q_norm, rope.k_norm, rope.v_norm, rope.cos_sin, rope.q_scale, *kinds)
        q = self._buffer(rope.heads(qkv.width, kv_heads), dim, dtype=qkv.dtype)
        where = (metadata.positions, metadata.slots, q, *self._caches(qkv, k_cache, v_cache, rope.kv_scales))
        sizes = (k_cache.stride(0), v_cache.stride(0), _TOKENS, len(k_cache), q.shape[0], kv_heads, dim, rope.eps)
        return self._call("rope_store", q, qkv, *weights, *where, *sizes, _THREADS)

    def paged_attention(self, q: Any, k_cache: Tensor, v_cache: Tensor, metadata: Any, softmax: Softmax) -> Any:
        if softmax.ahead != 0:
            raise _NotOurs
        out = self._attended(q, softmax)
        caches = self._caches(q, k_cache, v_cache, softmax.kv_scales)
        where = (_STARTS, _CONTEXTS, metadata.block_table, _STRIDE, k_cache.stride(0), v_cache.stride(0))
        sizes = (len(k_cache), _SEQUENCES, q.shape[0], k_cache.shape[1], q.shape[1])
        _, *columns = native.bias_arguments(softmax.bias)
        beside = (softmax.bias, *columns, softmax.sinks, softmax.values or 0)
        rules = (softmax.scale, softmax.window or 0, softmax.softcap or 0.0, 0, *beside)
        return self._call("paged_attention", out, out, q, *caches, *where, *sizes, *rules, _THREADS)

    def divided_attention(self, q: Any, caches: CachePair, metadata: Any, softmax: Softmax, group: Any) -> Any:
        out, pages = self._attended(q, softmax), len(caches[0])
        k_cache, v_cache = native.in_pieces(caches[0]), native.in_pieces(caches[1])
        held = self._caches(q, k_cache, v_cache, softmax.kv_scales)
        where = (_STARTS, _CONTEXTS, metadata.block_table, _STRIDE, k_cache.stride(0), v_cache.stride(0))
        sizes = (pages, _SEQUENCES, q.shape[0] * group.count, k_cache.shape[1], q.shape[1])
        _, *columns = native.bias_arguments(softmax.bias)
        beside = (softmax.bias, *columns, softmax.sinks, softmax.values or 0)
        rules = (softmax.scale, softmax.window or 0, softmax.softcap or 0.0, *beside)
        return self._call("ranks_attention", out, group.native, out, q, *held, *where, *sizes, *rules, _THREADS)

    def latent_store(self, q: Any, kv: Any, latent: Latent, cache: Tensor, metadata: Any) -> Any:
        check_latent(latent)
        cache = native.in_pieces(cache)
        _, where, held = self._caches(q, cache, cache, latent.kv_scales)
        size, rotated = latent.sizes
        given = (q, kv, latent.norm, latent.cos_sin, latent.neighbours, metadata.positions, metadata.slots, where, held)
        heads = q.width // (size + rotated)
        sizes = (cache.stride(0), _TOKENS, len(cache), heads, size, rotated, latent.eps, _THREADS)
        return self._call("latent_store", _Buffer(q.kind, q.value, (heads, size + rotated), q.dtype), *given, *sizes)

    def short_conv(self, bcx: Any, conv: ShortConv, columns: Columns, metadata: Any) -> Any:
        check_columns(conv, columns, self._dtype)
        out, pages = self._buffer(bcx.width // conv.inputs), 0 if columns.ends is None else len(columns.ends)
        where = (_STARTS, _CONTEXTS, metadata.block_table, _STRIDE, _STATES, pages, len(columns.recent))
        kept = (columns.ends, columns.recent)
        sizes = (_SEQUENCES, out.width, conv.width, columns.kept, conv.gated)
        return self._call("short_conv", out, bcx, conv.weight, conv.bias, out, *kept, *where, *sizes, _THREADS)

    def recur(self, given: Any, z: Any, beside: Any, rule: Recurrence, states: Matrices, metadata: Any) -> Any:
        recurrence.check(rule, states, self._dtype)
        out, native_rule = self._buffer(z.width), recurrence.native_rule(rule)
        where = (_STARTS, _CONTEXTS, _SEEN, _KNOWN, _STATES, len(states.matrices), _SEQUENCES)
        kept = (*native_rule.weights, out, states.matrices, states.guesses)
        sizes = (*native_rule.sizes, states.guesses.shape[1], *native_rule.rules)
        return self._call(native_rule.kernel, out, given, z, beside, *kept, *where, *sizes, _THREADS)

    def join(self, x: Any, y: Any) -> Any:
        second = y.width if isinstance(y, _Buffer) else self._hidden  # what lies beside the stream, as wide as it
        out = self._buffer(x.width + second)
        return self._call("join", out, x, y, out, _TOKENS, x.width, second, _THREADS)

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        if x.dtype == dtype:
            return x
        out = self._buffer(*x.shape, dtype=dtype)
        return self._call("cast", out, x, out, _Given(_PER_TOKEN, x.width), _THREADS)

    def sigmoid_mul(self, x: Any, gate: Any) -> Any:
        return self._call("sigmoid_mul", x, x, gate, _Given(_PER_TOKEN, gate.width), x.width // gate.width, _THREADS)

    def _attended(self, q: Any, softmax: Softmax) -> Any:
        self._attends_in = q.dtype
        return self._buffer(q.shape[0], softmax.values or q.shape[1], dtype=q.dtype)

    def _caches(self, x: Any, k_cache: Tensor, v_cache: Tensor, scales: Any) -> tuple[Any, ...]:
        if k_cache.dtype != v_cache.dtype or (k_cache.dtype != x.dtype and k_cache.dtype not in KV_CODES):
            raise TypeError(f"keys and values of {k_cache.dtype} and {v_cache.dtype} cannot serve {x.dtype}")
        return k_cache, v_cache, native.kv_format(k_cache, scales)

    def _buffer(self, *shape: int, dtype: torch.dtype | None = None) -> _Buffer:
        """dtype: by default the model's."""
        made = _Buffer(_BUFFER, self._used, shape, self._dtype if dtype is None else dtype)
        self._used += -(-made.width * made.dtype.itemsize // _ALIGNED) * _ALIGNED
        self._token_bytes = max(self._token_bytes, self._used)
        return made

    def _call(self, kernel: str, gives: Any, *arguments: Any) -> Any:
        self._noted.append((kernel, arguments))
        return gives

    def end(self) -> None:
        """No layer follows."""
        self._calls = (native.Call * len(self._noted))()
        for call, (kernel, arguments) in zip(self._calls, self._noted, strict=True):
            given = [_argument(*each) for each in zip(arguments, native.SIGNATURES[kernel], strict=True)]
            dtype = next(each.dtype for each in arguments if isinstance(each, _Buffer))
            call.kernel, call.count = self._library.caller(kernel, dtype), len(given)
            call.arguments = (native.Argument * len(given))(*given)

    def run(
        self, x: Tensor, residual: Tensor | None, metadata: AttentionMetadata, layers: range
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        x, residual = (torch.empty_like(x), x) if residual is None else (x, residual.contiguous())
        table, given = metadata.block_table, (metadata, *metadata.others)
        where = (x, residual, metadata.query_start, metadata.context_lens, metadata.turned)
        guesses = metadata.guesses
        bounds = (None, None) if guesses is None else (guesses.seen, guesses.known)
        beside = metadata.beside
        perhaps = (metadata.linear.adapters, metadata.state_slots, *bounds, beside)
        values = [each.data_ptr() for each in where]
        values += [0 if each is None else each.data_ptr() for each in perhaps]
        values += [0 if beside is None else beside.shape[1]]
        values += [table.shape[1], len(table), torch.get_num_threads()]
        values += [each.data_ptr() for step in given for each in (step.block_table, step.slots)]
        begin, end = self._ends[layers.start], self._ends[layers.stop]
        first = ctypes.addressof(self._calls) + begin * ctypes.sizeof(native.Call)
        numbers, sizes = (ctypes.c_int64 * len(values))(*values), (len(x), len(table), self._token_bytes)
        if failed := self._library.run_calls[self._attends_in](first, end - begin, numbers, *sizes):
            if self._noted[begin + failed - 1][0] in ("sum_ranks", "ranks_attention"):
                raise RankEnded
            raise IndexError("a block table or a slot names a page outside of the cache")
        return x, residual


def recorded(
    library: native.Native, layers: Sequence[Layer], hidden: int, dtype: torch.dtype, *, starts: bool, groups: int
) -> Recorded | None:
    """`Backend.recorded`; None where a linear, a mixture or the ranks' sums are not ours."""
    recorder = _Recorder(library, hidden, dtype, groups)
    try:
        for index, layer in enumerate(layers):
            recorder.note(layer, starts=starts and index == 0)
    except _NotOurs:
        return None
    recorder.end()
    return recorder.run


def _argument(each: Any, kind: type) -> native.Argument:
    """`kind`: of the kernel's own argument."""
    match each:
        case _Given():
            return native.Argument(each.kind, each.value)
        case Tensor():
            return native.Argument(_FIXED, each.data_ptr())
        case ctypes.Structure():
            return native.Argument(_FIXED, ctypes.addressof(each))
    bits = struct.unpack("<i", struct.pack("<f", each))[0] if kind is ctypes.c_float else int(each or 0)
    return native.Argument(_FIXED, bits)
