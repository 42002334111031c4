"""Layers in one call, as a CUDA graph computes them on a GPU: the kernels that their operations would call are noted
once, with the pointers that they are called with, and recorded.cpp runs the list."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Layer, LinearContext, Operations, Recorded, Rope, Softmax
from quire.kernels.collective import RankEnded
from quire.kernels.cpu import native
from quire.kernels.cpu.decoder.experts import CompiledMixture
from quire.kernels.cpu.linear import CompiledLinear
from quire.kernels.cpu.lora import CompiledAdaptedLinear
from quire.kernels.cpu.ranks.collective import SharedCollective
from quire.kernels.kv_codes import KV_CODES

_FIXED, _PER_TOKEN, _BUFFER, _OF_STEP, _FETCH = range(5)
"""How an argument follows from its value, as recorded.cpp has it."""
_ALIGNED = 64
"""Bytes of a token's part of a buffer: a multiple of this."""


class _NotOurs(Exception):
    """An operation that no compiled kernel computes."""


@dataclass(frozen=True, slots=True)
class _Given:
    """An argument that a step gives."""

    kind: int
    value: int


_TOKENS, _PAGES = _Given(_PER_TOKEN, 1), _Given(_FETCH, 0)
_X, _RESIDUAL, _STARTS, _CONTEXTS, _POSITIONS, _ADAPTERS, _STRIDE, _SEQUENCES, _THREADS = (
    _Given(_OF_STEP, number) for number in range(9)
)
_FIRST_TABLE = 9
"""The step's number of the first group's table; its slots follow, then those of the other groups."""


@dataclass(slots=True, eq=False)
class _Buffer:
    """Stands for a tensor [T, *shape] of the model's type."""

    shape: tuple[int, ...]
    place: _Given

    @property
    def width(self) -> int:
        return prod(self.shape)

    def flatten(self, _: int) -> _Buffer:
        return _Buffer((self.width,), self.place)


class _Recorder(Operations):
    """Takes buffers for tensors. Raises _NotOurs."""

    def __init__(self, hidden: int, dtype: torch.dtype, groups: int) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        """What is noted: the kernel, and what it is called with."""
        self.ends = [0]
        """Calls before each layer, and before the end."""
        self.token_bytes = 0
        """Of the buffers of the layer that needs most."""
        self._hidden, self._dtype = hidden, dtype
        adapters: Any = _ADAPTERS
        paged: list[Any] = [_Given(_OF_STEP, _FIRST_TABLE + number) for number in range(2 * groups)]
        tables, slots = paged[::2], paged[1::2]
        given: dict[str, Any] = {"query_start": _STARTS, "context_lens": _CONTEXTS, "key_start": None}
        given |= {"block_table": tables[0], "positions": _POSITIONS, "slots": slots[0]}
        step = AttentionMetadata(**given, max_query_len=0, max_context_len=0, linear=LinearContext(adapters))
        self._metadata = step.grouped(tables, slots)

    def note(self, layer: Layer, *, starts: bool) -> None:
        """What a layer returns must be where it found it, so that any layers can be run."""
        self._used = 0
        stream: Any = _Buffer((self._hidden,), _RESIDUAL)
        given: Any = stream if starts else _Buffer((self._hidden,), _X)
        x: Any
        x, residual = layer(self, given, None if starts else stream, self._metadata)
        assert residual is stream
        if x is not given:
            made = [any(each is x for each in arguments) for _, arguments in self.calls].index(True)
            assert starts or not any(each is given for _, those in self.calls[made + 1 :] for each in those)
            x.place = _X
        self.ends.append(len(self.calls))

    def apply(self, linear: Any, x: Any, context: LinearContext) -> Any:
        if isinstance(linear, CompiledAdaptedLinear):
            out = self.apply(linear.linear, x, context)
            self._call("add_adapters", linear.native, _ADAPTERS, x, out, _TOKENS, _THREADS)
            return out
        if not isinstance(linear, CompiledLinear) or linear.dtype != self._dtype or linear.native.wide:
            raise _NotOurs
        assert linear.inner == x.width
        out = self._buffer(linear.outs)
        self._call("linear", linear.native, x, out, _TOKENS, _THREADS, _PAGES)
        return out

    def mix(self, mixture: Any, x: Any) -> Any:
        if not isinstance(mixture, CompiledMixture):
            raise _NotOurs
        self._call("mix_experts", mixture.native, x, x, _TOKENS, _THREADS)
        return x

    def sum(self, x: Any, group: Any) -> Any:
        if group is not None:
            if not isinstance(group, SharedCollective):
                raise _NotOurs
            self._call("sum_ranks", group.native, x, _Given(_PER_TOKEN, x.width), _THREADS)
        return x

    def rms_norm(self, x: Any, weight: Tensor, eps: float) -> Any:
        out = self._buffer(x.width)
        self._call("rms_norm", x, weight, out, _TOKENS, x.width, eps, _THREADS)
        return out

    def add_rms_norm(self, x: Any, residual: Any, weight: Tensor, eps: float) -> Any:
        self._call("add_rms_norm", x, residual, weight, _TOKENS, x.width, eps, _THREADS)
        return x, residual

    def silu_mul(self, gate_up: Any) -> Any:
        return self._gated("silu_mul", gate_up)

    def gelu_mul(self, gate_up: Any) -> Any:
        return self._gated("gelu_mul", gate_up)

    def _gated(self, kernel: str, gate_up: Any) -> Any:
        out = self._buffer(gate_up.width // 2)
        self._call(kernel, gate_up, out, _TOKENS, out.width, _THREADS)
        return out

    def rope_store(self, qkv: Any, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: Any) -> Any:
        kv_heads, dim = k_cache.shape[1], rope.head_dim
        heads = qkv.width // dim - 2 * kv_heads
        q, weights = self._buffer(heads, dim), (rope.q_norm, rope.k_norm, rope.cos_sin)
        caches = self._caches(k_cache, v_cache, rope.kv_scales)
        sizes = (k_cache.stride(0), v_cache.stride(0), _TOKENS, len(k_cache), heads, kv_heads, dim, rope.eps)
        self._call("rope_store", qkv, *weights, metadata.positions, metadata.slots, q, *caches, *sizes, _THREADS)
        return q

    def paged_attention(self, q: Any, k_cache: Tensor, v_cache: Tensor, metadata: Any, softmax: Softmax) -> Any:
        if softmax.ahead != 0 or softmax.bias is not None:
            raise _NotOurs
        out, caches = self._buffer(*q.shape), self._caches(k_cache, v_cache, softmax.kv_scales)
        where = (_STARTS, _CONTEXTS, metadata.block_table, _STRIDE)
        sizes = (k_cache.stride(0), v_cache.stride(0), len(k_cache), _SEQUENCES, q.shape[0], k_cache.shape[1])
        rules = (softmax.scale, softmax.window or 0, softmax.softcap or 0.0, 0, None, 0, 0, softmax.sinks)
        self._call("paged_attention", out, q, *caches, *where, *sizes, q.shape[1], *rules, _THREADS)
        return out

    def _caches(self, k_cache: Tensor, v_cache: Tensor, scales: Any) -> tuple[Any, ...]:
        if k_cache.dtype != v_cache.dtype or (k_cache.dtype != self._dtype and k_cache.dtype not in KV_CODES):
            raise TypeError(f"keys and values of {k_cache.dtype} and {v_cache.dtype} cannot serve {self._dtype}")
        return k_cache, v_cache, native.kv_format(k_cache, scales)

    def _buffer(self, *shape: int) -> _Buffer:
        made = _Buffer(shape, _Given(_BUFFER, self._used))
        self._used += -(-made.width * self._dtype.itemsize // _ALIGNED) * _ALIGNED
        self.token_bytes = max(self.token_bytes, self._used)
        return made

    def _call(self, kernel: str, *arguments: Any) -> None:
        self.calls.append((kernel, arguments))


def recorded(
    library: native.Native, layers: Sequence[Layer], hidden: int, dtype: torch.dtype, *, starts: bool, groups: int
) -> Recorded | None:
    """`Backend.recorded`; None where a linear, a mixture or the ranks' sums are not ours."""
    recorder = _Recorder(hidden, dtype, groups)
    try:
        for index, layer in enumerate(layers):
            recorder.note(layer, starts=starts and index == 0)
    except _NotOurs:
        return None
    return _Program(library, recorder, dtype)


class _Program:
    def __init__(self, library: native.Native, recorder: _Recorder, dtype: torch.dtype) -> None:
        self._noted = recorder.calls  # keeps alive what the pointers below point to
        self._ends, self._token_bytes = recorder.ends, recorder.token_bytes
        self._run = library.run_calls[dtype]
        self._calls = (native.Call * len(self._noted))()
        for call, (kernel, arguments) in zip(self._calls, self._noted, strict=True):
            given = zip(arguments, native.SIGNATURES[kernel], strict=True)
            values = (native.Argument * len(arguments))(*(_argument(each, kind) for each, kind in given))
            call.kernel, call.arguments, call.count = library.caller(kernel, dtype), values, len(values)

    def __call__(
        self, x: Tensor, residual: Tensor | None, metadata: AttentionMetadata, layers: range
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        x, residual = (torch.empty_like(x), x) if residual is None else (x, residual.contiguous())
        adapters, table = metadata.linear.adapters, metadata.block_table
        stream = (x.data_ptr(), residual.data_ptr())
        where = (metadata.query_start.data_ptr(), metadata.context_lens.data_ptr(), metadata.positions.data_ptr())
        sizes = (0 if adapters is None else adapters.data_ptr(), table.shape[1], len(table), torch.get_num_threads())
        values = [*stream, *where, *sizes]
        for each in (metadata, *metadata.others):
            values += (each.block_table.data_ptr(), each.slots.data_ptr())
        begin, end = self._ends[layers.start], self._ends[layers.stop]
        first = ctypes.addressof(self._calls) + begin * ctypes.sizeof(native.Call)
        step = (ctypes.c_int64 * len(values))(*values)
        if failed := self._run(first, end - begin, step, len(x), len(table), self._token_bytes):
            if self._noted[begin + failed - 1][0] == "sum_ranks":
                raise RankEnded
            raise IndexError("a block table or a slot names a page outside of the cache")
        return x, residual


def _argument(each: Any, kind: type) -> native.Argument:
    """`kind`: of the kernel's own argument."""
    match each:
        case _Given():
            return native.Argument(each.kind, each.value)
        case _Buffer():
            return native.Argument(each.place.kind, each.place.value)
        case Tensor():
            return native.Argument(_FIXED, each.data_ptr())
        case ctypes.Structure():
            return native.Argument(_FIXED, ctypes.addressof(each))
    return native.Argument(
        0, struct.unpack("<i", struct.pack("<f", each))[0] if kind is ctypes.c_float else int(each or 0)
    )
