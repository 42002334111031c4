"""Records the kernel calls of several layers, which recorded.cpp runs in one call, like a CUDA graph."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, LayerFunction, LinearContext, Operations, RecordedLayers
from quire.kernels.collective import RankEnded
from quire.kernels.cpu import native_library
from quire.kernels.cpu.decoder.compiled_moe import CompiledMoE
from quire.kernels.cpu.decoder.recurrence import COMPILED_RULES
from quire.kernels.cpu.kernel_calls import KernelCalls, StepInputs
from quire.kernels.cpu.linear import CompiledLinearBase
from quire.kernels.cpu.lora import CompiledLinearWithLora
from quire.kernels.cpu.mla.per_head_linear import CompiledPerHeadLinear
from quire.kernels.cpu.ranks.shared_collective import SharedCollective
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates

_FIXED, _PER_TOKEN, _BUFFER, _STEP_VALUE, _PAGES_FETCH = range(5)
"""Kinds of arguments, numbered as in recorded.cpp."""
_ALIGNMENT = 64
"""In bytes. A buffer's bytes per token are a multiple of this."""


class _UnsupportedOperation(Exception): ...


@dataclass(slots=True, eq=False)
class _StepArgument:
    kind: int
    value: int


@dataclass(slots=True, eq=False)
class _PlaceholderTensor(_StepArgument):
    """A stand-in for a tensor [T, *shape] while layers are recorded."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements_per_token(self) -> int:
        return prod(self.shape)

    def flatten(self, _: int) -> _PlaceholderTensor:
        return _PlaceholderTensor(self.kind, self.value, (self.elements_per_token,), self.dtype)


_TOKENS, _PAGES = _StepArgument(_PER_TOKEN, 1), _StepArgument(_PAGES_FETCH, 0)
(
    _X,
    _RESIDUAL,
    _STARTS,
    _CONTEXTS,
    _POSITIONS,
    _ADAPTERS,
    _STATE_SLOTS,
    _NUM_STATE_TOKENS,
    _NUM_VERIFIED_TOKENS,
    _PER_LAYER_INPUTS,
    _WIDTH,
) = (_StepArgument(_STEP_VALUE, number) for number in range(11))
_STRIDE, _SEQUENCES, _THREADS = (_StepArgument(_STEP_VALUE, number) for number in range(11, 14))
_FIRST_TABLE = 14
"""Number of the step value that is the first KV cache group's block table. The next number is this group's slot
mapping. Then come the table and the mapping of each other group.
"""


class _LayerRecorder(KernelCalls, Operations):
    def __init__(self, library: native_library.NativeLibrary, hidden: int, dtype: torch.dtype, groups: int) -> None:
        self._library = library
        self._hidden = hidden
        self._dtype = dtype
        # Keeps the arguments alive.
        self._recorded_calls: list[tuple[str, tuple[Any, ...]]] = []
        self._attention_dtype = dtype
        self._layer_ends = [0]  # index of each layer's first call, then the number of calls
        self._used_bytes = self._token_bytes = 0  # buffer bytes per token: current layer, maximum of all layers
        step: Any = (_STARTS, _CONTEXTS, None, None, _POSITIONS, None, 0, 0, LinearContext(cast(Any, _ADAPTERS)))
        paged: list[Any] = [_StepArgument(_STEP_VALUE, _FIRST_TABLE + number) for number in range(2 * groups)]
        per_layer_inputs: Any = _PER_LAYER_INPUTS
        first = replace(
            AttentionMetadata(*step), block_table=paged[0], slot_mapping=paged[1], per_layer_inputs=per_layer_inputs
        )
        self._metadata = first.with_block_tables(paged[::2], paged[1::2])

    def record_layer(self, layer: LayerFunction, *, starts: bool) -> None:
        """The layer's result must replace its input in memory, so that any range of layers can run."""
        self._used_bytes = 0
        stream: Any = _PlaceholderTensor(_STEP_VALUE, _RESIDUAL.value, (self._hidden,), self._dtype)
        layer_input: Any = stream if starts else _PlaceholderTensor(_STEP_VALUE, _X.value, (self._hidden,), self._dtype)
        x: Any
        x, residual = layer(self, layer_input, None if starts else stream, self._metadata)
        assert residual is stream
        if x is not layer_input:
            producer = [any(each is x for each in arguments) for _, arguments in self._recorded_calls].index(True)
            assert starts or not any(
                each is layer_input for _, those in self._recorded_calls[producer + 1 :] for each in those
            )
            x.kind, x.value = _STEP_VALUE, _X.value
        self._layer_ends.append(len(self._recorded_calls))

    def apply_linear(self, linear: Any, x: Any, context: LinearContext) -> Any:
        match linear:
            case CompiledLinearWithLora():
                out = self.apply_linear(linear.linear, x, context)
                return self.call_kernel("add_adapters", out, linear.native, _ADAPTERS, x, out, _TOKENS)
            case CompiledLinearBase(dtype=self._dtype) if not linear.native.wide:
                out = self._allocate_buffer(linear.out_features)
                return self._record_call("linear", out, linear.native, x, out, _TOKENS, _THREADS, _PAGES)
            case CompiledPerHeadLinear(dtype=self._dtype):
                out = self._allocate_buffer(linear.out_features)
                return self.call_kernel("linear_blocks", out, linear.native, x, out, _TOKENS)
        raise _UnsupportedOperation

    def run_moe(self, moe: Any, x: Any, router_input: Any) -> Any:
        if not isinstance(moe, CompiledMoE):
            raise _UnsupportedOperation
        out = self._allocate_buffer(x.elements_per_token)
        return self.call_kernel("mix_experts", out, moe.native, x, router_input, out, _TOKENS)

    def run_recurrence(
        self, inputs: Any, z: Any, head_inputs: Any, rule: Recurrence, states: RecurrentStates, metadata: Any
    ) -> Any:
        if not isinstance(rule, COMPILED_RULES):
            raise _UnsupportedOperation
        return super().run_recurrence(inputs, z, head_inputs, rule, states, metadata)

    def all_reduce(self, x: Any, group: Any) -> Any:
        if not isinstance(group, SharedCollective | None):
            raise _UnsupportedOperation
        return x if group is None else self.call_kernel("sum_ranks", x, group.native, x, self.num_elements_argument(x))

    def paged_attention(self, q: Any, k_cache: Tensor, v_cache: Tensor, metadata: Any, softmax: AttentionParams) -> Any:
        if softmax.lookahead != 0:
            raise _UnsupportedOperation
        return super().paged_attention(q, k_cache, v_cache, metadata, softmax)

    def empty_like(self, x: _PlaceholderTensor) -> _PlaceholderTensor:
        return self._allocate_buffer(*x.shape, dtype=x.dtype)

    def empty_half_width(self, x: _PlaceholderTensor) -> _PlaceholderTensor:
        return self._allocate_buffer(x.elements_per_token // 2, dtype=x.dtype)

    def empty_per_token(
        self, x: _PlaceholderTensor, *shape: int, dtype: torch.dtype | None = None
    ) -> _PlaceholderTensor:
        return self._allocate_buffer(*shape, dtype=dtype or x.dtype)

    def view_per_token(self, x: _PlaceholderTensor, *shape: int) -> _PlaceholderTensor:
        return _PlaceholderTensor(x.kind, x.value, shape, x.dtype)

    def rows_and_width(self, x: _PlaceholderTensor) -> tuple[Any, int]:
        return _TOKENS, x.elements_per_token

    def num_tokens_argument(self, x: _PlaceholderTensor) -> Any:
        return _TOKENS

    def token_width_argument(self, x: Any) -> Any:
        return x.elements_per_token if isinstance(x, _PlaceholderTensor) else _WIDTH

    def num_elements_argument(self, x: _PlaceholderTensor) -> Any:
        return _StepArgument(_PER_TOKEN, x.elements_per_token)

    def step_inputs(self, metadata: Any) -> StepInputs:
        return StepInputs(
            _STARTS,
            _CONTEXTS,
            metadata.block_table,
            _STRIDE,
            _SEQUENCES,
            _STATE_SLOTS,
            _NUM_STATE_TOKENS,
            _NUM_VERIFIED_TOKENS,
        )

    def concat_columns(self, x: Any, y: Any) -> Any:
        second = (
            y.elements_per_token if isinstance(y, _PlaceholderTensor) else self._hidden
        )  # otherwise y is as wide as the residual stream
        out = self._allocate_buffer(x.elements_per_token + second)
        return self.call_kernel("join", out, x, y, out, *self.rows_and_width(x), second)

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        if x.dtype == dtype:
            return x
        out = self._allocate_buffer(*x.shape, dtype=dtype)
        return self.call_kernel("cast", out, x, out, self.num_elements_argument(x))

    def _allocate_buffer(self, *shape: int, dtype: torch.dtype | None = None) -> _PlaceholderTensor:
        buffer = _PlaceholderTensor(_BUFFER, self._used_bytes, shape, self._dtype if dtype is None else dtype)
        self._used_bytes += -(-buffer.elements_per_token * buffer.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._token_bytes = max(self._token_bytes, self._used_bytes)
        return buffer

    def call_kernel(self, kernel: str, result: Any, *arguments: Any, error_message: str = "") -> Any:
        if kernel in ("paged_attention", "ranks_attention", "sparse_attention"):
            self._attention_dtype = result.dtype
        return self._record_call(kernel, result, *arguments, _THREADS)

    def _record_call(self, kernel: str, result: Any, *arguments: Any) -> Any:
        self._recorded_calls.append((kernel, arguments))
        return result

    def finish_recording(self) -> None:
        self._calls = (native_library.Call * len(self._recorded_calls))()
        for call, (kernel, arguments) in zip(self._calls, self._recorded_calls, strict=True):
            encoded = [
                _encode_argument(*each) for each in zip(arguments, native_library.SIGNATURES[kernel], strict=True)
            ]
            dtype = next(each.dtype for each in arguments if isinstance(each, _PlaceholderTensor))
            call.kernel, call.count = self._library.call_wrapper_address(kernel, dtype), len(encoded)
            call.arguments = (native_library.Argument * len(encoded))(*encoded)

    def run_layers(
        self, x: Tensor, residual: Tensor | None, metadata: AttentionMetadata, layers: range
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        x, residual = (torch.empty_like(x), x) if residual is None else (x, residual.contiguous())
        table, groups = metadata.block_table, (metadata, *metadata.other_groups)
        where = (x, residual, metadata.query_start, metadata.context_lens, metadata.rope_positions)
        guesses = metadata.state_and_verified_counts
        bounds = (None, None) if guesses is None else (guesses.num_state_tokens, guesses.num_verified_tokens)
        per_layer_inputs = metadata.per_layer_inputs
        optional_tensors = (metadata.linear_context.adapter_slots, metadata.state_slots, *bounds, per_layer_inputs)
        values = [
            *(0 if each is None else each.data_ptr() for each in (*where, *optional_tensors)),
            0 if per_layer_inputs is None else per_layer_inputs.shape[1],
            table.shape[1],
            len(table),
            torch.get_num_threads(),
            *(each.data_ptr() for step in groups for each in (step.block_table, step.slot_mapping)),
        ]
        begin, end = self._layer_ends[layers.start], self._layer_ends[layers.stop]
        first = ctypes.addressof(self._calls) + begin * ctypes.sizeof(native_library.Call)
        numbers, sizes = (ctypes.c_int64 * len(values))(*values), (len(x), len(table), self._token_bytes)
        if failed := self._library.run_calls[self._attention_dtype](first, end - begin, numbers, *sizes):
            if self._recorded_calls[begin + failed - 1][0] in ("sum_ranks", "ranks_attention"):
                raise RankEnded
            raise IndexError("a block table or a slot points outside of the cache")
        return x, residual


def record_layers(
    library: native_library.NativeLibrary,
    layers: Sequence[LayerFunction],
    hidden: int,
    dtype: torch.dtype,
    *,
    starts: bool,
    groups: int,
) -> RecordedLayers | None:
    recorder = _LayerRecorder(library, hidden, dtype, groups)
    try:
        for index, layer in enumerate(layers):
            recorder.record_layer(layer, starts=starts and index == 0)
    except _UnsupportedOperation:
        return None
    recorder.finish_recording()
    return recorder.run_layers


def _encode_argument(each: Any, kind: type) -> native_library.Argument:
    match each:
        case _StepArgument():
            return native_library.Argument(each.kind, each.value)
        case Tensor() | ctypes.Structure():
            return native_library.Argument(_FIXED, native_library.to_ctypes(each))
    bits = struct.unpack("<i", struct.pack("<f", each))[0] if kind is ctypes.c_float else int(each or 0)
    return native_library.Argument(_FIXED, bits)
