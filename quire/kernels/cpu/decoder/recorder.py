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

from quire.kernels.backend import AttentionMetadata, Layer, LinearContext, Operations, Recorded
from quire.kernels.collective import RankEnded
from quire.kernels.cpu import native
from quire.kernels.cpu.decoder.calls import Calls, Where
from quire.kernels.cpu.decoder.experts import CompiledMixture
from quire.kernels.cpu.latents.latent import CompiledBlocks
from quire.kernels.cpu.linear import CompiledLinear
from quire.kernels.cpu.lora import CompiledAdaptedLinear
from quire.kernels.cpu.ranks.collective import SharedCollective
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


class _Recorder(Calls, Operations):
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
                return self.call("add_adapters", out, linear.native, _ADAPTERS, x, out, _TOKENS)
            case CompiledLinear(dtype=self._dtype) if not linear.native.wide:
                out = self._buffer(linear.outs)
                return self._note("linear", out, linear.native, x, out, _TOKENS, _THREADS, _PAGES)
            case CompiledBlocks(dtype=self._dtype):
                out = self._buffer(linear.outs)
                return self.call("linear_blocks", out, linear.native, x, out, _TOKENS)
        raise _NotOurs

    def mix(self, mixture: Any, x: Any, routed: Any) -> Any:
        if not isinstance(mixture, CompiledMixture):
            raise _NotOurs
        out = self._buffer(x.width)
        return self.call("mix_experts", out, mixture.native, x, routed, out, _TOKENS)

    def sum(self, x: Any, group: Any) -> Any:
        if not isinstance(group, SharedCollective | None):
            raise _NotOurs
        return x if group is None else self.call("sum_ranks", x, group.native, x, self.numbers(x))

    def paged_attention(self, q: Any, k_cache: Tensor, v_cache: Tensor, metadata: Any, softmax: Softmax) -> Any:
        if softmax.ahead != 0:
            raise _NotOurs
        return super().paged_attention(q, k_cache, v_cache, metadata, softmax)

    def like(self, x: _Buffer) -> _Buffer:
        return self._buffer(*x.shape, dtype=x.dtype)

    def halved(self, x: _Buffer) -> _Buffer:
        return self._buffer(x.width // 2, dtype=x.dtype)

    def new(self, x: _Buffer, *shape: int) -> _Buffer:
        return self._buffer(*shape, dtype=x.dtype)

    def viewed(self, x: _Buffer, *shape: int) -> _Buffer:
        return _Buffer(x.kind, x.value, shape, x.dtype)

    def rows(self, x: _Buffer) -> tuple[Any, int]:
        return _TOKENS, x.width

    def tokens(self, x: _Buffer) -> Any:
        return _TOKENS

    def width(self, x: Any) -> Any:
        return x.width if isinstance(x, _Buffer) else _WIDTH

    def numbers(self, x: _Buffer) -> Any:
        return _Given(_PER_TOKEN, x.width)

    def where(self, metadata: Any) -> Where:
        return Where(_STARTS, _CONTEXTS, metadata.block_table, _STRIDE, _SEQUENCES, _STATES, _SEEN, _KNOWN)

    def join(self, x: Any, y: Any) -> Any:
        second = y.width if isinstance(y, _Buffer) else self._hidden  # what lies beside the stream, as wide as it
        out = self._buffer(x.width + second)
        return self.call("join", out, x, y, out, *self.rows(x), second)

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        if x.dtype == dtype:
            return x
        out = self._buffer(*x.shape, dtype=dtype)
        return self.call("cast", out, x, out, self.numbers(x))

    def _buffer(self, *shape: int, dtype: torch.dtype | None = None) -> _Buffer:
        """dtype: by default the model's."""
        made = _Buffer(_BUFFER, self._used, shape, self._dtype if dtype is None else dtype)
        self._used += -(-made.width * made.dtype.itemsize // _ALIGNED) * _ALIGNED
        self._token_bytes = max(self._token_bytes, self._used)
        return made

    def call(self, kernel: str, gives: Any, *arguments: Any, wrong: str = "") -> Any:
        if kernel in ("paged_attention", "ranks_attention"):
            self._attends_in = gives.dtype
        return self._note(kernel, gives, *arguments, _THREADS)

    def _note(self, kernel: str, gives: Any, *arguments: Any) -> Any:
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
        values = [
            *(0 if each is None else each.data_ptr() for each in (*where, *perhaps)),
            *(0 if beside is None else beside.shape[1], table.shape[1], len(table), torch.get_num_threads()),
            *(each.data_ptr() for step in given for each in (step.block_table, step.slots)),
        ]
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
        case Tensor() | ctypes.Structure():
            return native.Argument(_FIXED, native.plain(each))
    bits = struct.unpack("<i", struct.pack("<f", each))[0] if kind is ctypes.c_float else int(each or 0)
    return native.Argument(_FIXED, bits)
