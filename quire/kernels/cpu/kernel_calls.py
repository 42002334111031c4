from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_num_threads

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, CachePair
from quire.kernels.collective import RankEnded
from quire.kernels.cpu import native_library
from quire.kernels.cpu.decoder import recurrence
from quire.kernels.cpu.decoder.short_conv import check_short_conv
from quire.kernels.cpu.mla.checks import check_key_selection_params, check_latent_params
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES, KVScales
from quire.kernels.latent_params import KeySelectionParams, LatentNormRopeParams
from quire.kernels.parameters.activation import Activation
from quire.kernels.qk_norm_rope import NORM_KINDS, QKNormRopeParams
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv

_UNLIMITED = 2**31 - 1


class StepInputs(NamedTuple):
    query_start: Any
    context_lens: Any
    block_table: Any
    table_stride: Any
    num_sequences: Any
    state_slots: Any
    num_state_tokens: Any
    num_verified_tokens: Any


class KernelCalls(ABC):
    """Turns operations into kernel calls, on contiguous tensors or on placeholders. x is [T, ...] in a kernel dtype.
    Raises TypeError or ValueError for unsupported arguments.
    """

    @abstractmethod
    def empty_like(self, x: Any) -> Any: ...

    @abstractmethod
    def empty_half_width(self, x: Any) -> Any: ...

    @abstractmethod
    def empty_per_token(self, x: Any, *shape: int, dtype: torch.dtype | None = None) -> Any:
        """Return an uninitialized [T, *shape]. If dtype is None, x's dtype is used."""

    @abstractmethod
    def view_per_token(self, x: Any, *shape: int) -> Any:
        """Reshape to [T, *shape]."""

    @abstractmethod
    def rows_and_width(self, x: Any) -> tuple[Any, Any]:
        """Return the number of rows along x's last axis, and their width."""

    @abstractmethod
    def num_tokens_argument(self, x: Any) -> Any: ...

    @abstractmethod
    def token_width_argument(self, x: Any) -> Any:
        """Return the number of elements per token."""

    @abstractmethod
    def num_elements_argument(self, x: Any) -> Any: ...

    @abstractmethod
    def step_inputs(self, metadata: Any) -> StepInputs: ...

    @abstractmethod
    def call_kernel(self, kernel: str, result: Any, *arguments: Any, error_message: str = "") -> Any:
        """Call a kernel with `arguments` and the number of threads. Returns `result`. If the kernel fails, raises
        IndexError with error_message, or RankEnded.
        """

    def rms_norm(self, x: Any, weight: Tensor, eps: float) -> Any:
        out = self.empty_like(x)
        return self.call_kernel("rms_norm", out, x, weight, out, *self.rows_and_width(x), eps)

    def add_rms_norm(self, x: Any, residual: Any, weight: Tensor, eps: float) -> Any:
        return self.call_kernel("add_rms_norm", (x, residual), x, residual, weight, *self.rows_and_width(x), eps)

    def layer_norm(self, x: Any, weight: Tensor, bias: Tensor, eps: float) -> Any:
        out = self.empty_like(x)
        return self.call_kernel("layer_norm", out, x, None, weight, bias, out, *self.rows_and_width(x), eps)

    def add_layer_norm(self, x: Any, residual: Any, weight: Tensor, bias: Tensor, eps: float) -> Any:
        return self.call_kernel("layer_norm", (x, residual), x, residual, weight, bias, x, *self.rows_and_width(x), eps)

    def add_residual(self, x: Any, residual: Any) -> Any:
        return self.call_kernel("add", residual, x, residual, self.num_elements_argument(x))

    def add_gated(self, x: Any, gate: Any, residual: Any) -> Any:
        return self.call_kernel("add_gated", residual, x, gate, residual, *self.rows_and_width(x))

    def apply_activation(self, x: Any, activation: Activation) -> Any:
        return self.call_kernel(
            "activate", x, x, self.num_elements_argument(x), *native_library.activation_arguments(activation)
        )

    def silu_mul(self, gate_up: Any) -> Any:
        return self.call_gated("silu_mul", gate_up)

    def gelu_mul(self, gate_up: Any) -> Any:
        return self.call_gated("gelu_mul", gate_up)

    def call_gated(self, kernel: str, gate_up: Any, *rules: float) -> Any:
        out = self.empty_half_width(gate_up)
        return self.call_kernel(kernel, out, gate_up, out, *self.rows_and_width(out), *rules)

    def mul_by_column_slice(self, x: Any, per_layer_inputs: Any, first: int) -> Any:
        return self.call_kernel(
            "mul_columns",
            x,
            x,
            per_layer_inputs,
            *self.rows_and_width(x),
            self.token_width_argument(per_layer_inputs),
            first,
        )

    def sigmoid_mul(self, x: Any, gate: Any) -> Any:
        return self.call_kernel(
            "sigmoid_mul",
            x,
            x,
            gate,
            self.num_elements_argument(gate),
            self.token_width_argument(x) // self.token_width_argument(gate),
        )

    def rope_and_store_kv(
        self, qkv: Any, rope: QKNormRopeParams, k_cache: Tensor, v_cache: Tensor, metadata: Any
    ) -> Any:
        caches = _kernel_cache_arguments(qkv, (k_cache, v_cache), rope.kv_scales)
        (pages, kv_heads, _), dim = caches[0].shape, rope.head_dim
        weights = (rope.q_norm, rope.k_norm, rope.v_norm, rope.cos_sin, rope.q_scale)
        for each in weights:
            if each is not None and each.dtype != torch.float32:
                raise TypeError(f"weights of norms, cos_sin and q_scale must be float32, not {each.dtype}")
        heads = rope.num_query_heads_of_width(self.token_width_argument(qkv), kv_heads)
        q, kinds = self.empty_per_token(qkv, heads, dim), (NORM_KINDS.index(rope.norm_kind), rope.num_kv_projections)
        where = (metadata.rope_positions, metadata.slot_mapping, q, *caches, *_cache_page_strides(caches))
        sizes = (self.num_tokens_argument(qkv), pages, heads, kv_heads, dim, rope.eps)
        error_message = f"slots outside the {pages} blocks of the cache"
        return self.call_kernel("rope_store", q, qkv, *weights, *kinds, *where, *sizes, error_message=error_message)

    def paged_attention(self, q: Any, k_cache: Tensor, v_cache: Tensor, metadata: Any, softmax: AttentionParams) -> Any:
        ahead = _UNLIMITED if softmax.lookahead is None else softmax.lookahead
        return self._call_attention("paged_attention", (), q, (k_cache, v_cache), metadata, softmax, ahead)

    def context_parallel_attention(
        self, q: Any, caches: CachePair, metadata: Any, softmax: AttentionParams, group: Any
    ) -> Any:
        return self._call_attention(
            "ranks_attention", (group.native,), q, caches, metadata, softmax, num_ranks=group.world_size
        )

    def _call_attention(
        self,
        kernel: str,
        group: tuple[Any, ...],
        q: Any,
        caches: CachePair,
        metadata: Any,
        softmax: AttentionParams,
        *more: int,
        num_ranks: int = 1,
    ) -> Any:
        pages, kernel_caches = len(caches[0]), _kernel_cache_arguments(q, caches, softmax.kv_scales)
        (*_, heads, dim), step = q.shape, self.step_inputs(metadata)
        out = self.empty_per_token(q, heads, softmax.value_dim or dim)
        where = (
            *kernel_caches,
            step.query_start,
            step.context_lens,
            step.block_table,
            step.table_stride,
            *_cache_page_strides(kernel_caches),
        )
        sizes = (pages, step.num_sequences, heads * num_ranks, kernel_caches[0].shape[1], dim)
        rules = (softmax.scale, _window_or_negative_chunk(softmax), softmax.softcap or 0.0, *more)
        native_library.check_sinks(softmax.sinks, heads)
        extras = (
            softmax.relative_bias,
            *native_library.relative_bias_stride_and_origin(softmax.relative_bias),
            softmax.sinks,
            softmax.value_dim or 0,
        )
        error_message = f"block table names a block outside the {pages} blocks of the cache"
        return self.call_kernel(
            kernel, out, *group, out, q, *where, *sizes, *rules, *extras, error_message=error_message
        )

    def rope_and_store_latent_kv(
        self, q: Any, kv: Any, latent: LatentNormRopeParams, cache: Tensor, metadata: Any
    ) -> Any:
        check_latent_params(latent)
        cache, _, held = _kernel_cache_arguments(q, (cache, cache), latent.kv_scales)
        size, rotated = latent.latent_and_rope_dims
        heads = self.token_width_argument(q) // (size + rotated)
        arguments_before = (
            q,
            kv,
            latent.norm_weight,
            latent.cos_sin,
            latent.is_interleaved,
            metadata.positions,
            metadata.slot_mapping,
            cache,
            held,
        )
        sizes = (cache.stride(0), self.num_tokens_argument(q), len(cache), heads, size, rotated, latent.eps)
        error_message = f"slots outside the {len(cache)} blocks of the cache"
        return self.call_kernel(
            "latent_store",
            self.view_per_token(q, heads, size + rotated),
            *arguments_before,
            *sizes,
            error_message=error_message,
        )

    def select_keys(
        self, q: Any, k: Any, weights: Any, params: KeySelectionParams, cache: Tensor, metadata: Any
    ) -> Any:
        heads, dim = self.token_width_argument(weights), self.token_width_argument(k)
        check_key_selection_params(params, dim)
        if {q.dtype, k.dtype, weights.dtype} != {cache.dtype}:
            raise TypeError(f"index keys of {cache.dtype} cannot serve {q.dtype}, {k.dtype} and {weights.dtype}")
        step, out = self.step_inputs(metadata), self.empty_per_token(q, params.top_k, dtype=torch.int32)
        return self.call_kernel(
            "select_keys",
            out,
            q,
            k,
            weights,
            params.norm_weight,
            params.norm_bias,
            params.cos_sin,
            params.is_interleaved,
            metadata.positions,
            metadata.slot_mapping,
            cache,
            cache.stride(0),
            step.query_start,
            step.context_lens,
            step.block_table,
            step.table_stride,
            out,
            self.num_tokens_argument(q),
            len(cache),
            step.num_sequences,
            heads,
            dim,
            params.cos_sin.shape[1],
            params.top_k,
            params.eps,
            error_message=f"a block table or slots outside the {len(cache)} blocks of the cache",
        )

    def sparse_attention(self, q: Any, cache: Tensor, selected: Any, metadata: Any, softmax: AttentionParams) -> Any:
        if cache.dtype != q.dtype:
            raise TypeError(f"sparse attention reads keys of {q.dtype}, not {cache.dtype}")
        assert softmax.value_dim is not None
        (*_, heads, dim), step = q.shape, self.step_inputs(metadata)
        out = self.empty_per_token(q, heads, softmax.value_dim)
        return self.call_kernel(
            "sparse_attention",
            out,
            out,
            q,
            cache,
            selected,
            step.query_start,
            step.context_lens,
            step.block_table,
            step.table_stride,
            cache.stride(0),
            len(cache),
            step.num_sequences,
            heads,
            dim,
            softmax.scale,
            softmax.value_dim,
            selected.shape[-1],
            error_message=f"keys that a query does not see, or blocks outside the {len(cache)} of the cache",
        )

    def short_conv(self, bcx: Any, conv: ShortConv, columns: ConvStates, metadata: Any) -> Any:
        check_short_conv(conv, columns, bcx.dtype)
        step, wide = self.step_inputs(metadata), self.token_width_argument(bcx) // conv.num_input_parts
        assert step.state_slots is not None
        out, pages = self.empty_per_token(bcx, wide), 0 if columns.piece_ends is None else len(columns.piece_ends)
        tensors = (bcx, conv.weight, conv.bias, out, columns.piece_ends, columns.slot_columns)
        where = (
            step.query_start,
            step.context_lens,
            step.block_table,
            step.table_stride,
            step.state_slots,
            pages,
            len(columns.slot_columns),
        )
        sizes = (step.num_sequences, wide, conv.conv_width, columns.columns_per_slot, conv.is_gated)
        error_message = "a block table or a slot points outside of the columns"
        return self.call_kernel("short_conv", out, *tensors, *where, *sizes, error_message=error_message)

    def run_recurrence(
        self, inputs: Any, z: Any, head_inputs: Any, rule: Recurrence, states: RecurrentStates, metadata: Any
    ) -> Any:
        recurrence.check_recurrence(rule, states, inputs.dtype)
        out = self.empty_like(z)
        kernel_arguments = recurrence.recurrence_kernel_arguments(rule)
        step = self.step_inputs(metadata)
        assert step.state_slots is not None
        where = (
            step.query_start,
            step.context_lens,
            step.num_state_tokens,
            step.num_verified_tokens,
            step.state_slots,
            len(states.matrices),
            step.num_sequences,
        )
        weights_and_states = (*kernel_arguments.weights, out, states.matrices, states.draft_inputs)
        sizes = (*kernel_arguments.sizes, states.draft_inputs.shape[1], *kernel_arguments.rules)
        error_message = "there is no such slot, or it has room for fewer draft tokens"
        return self.call_kernel(
            kernel_arguments.kernel,
            out,
            inputs,
            z,
            head_inputs,
            *weights_and_states,
            *where,
            *sizes,
            error_message=error_message,
        )


class ImmediateCalls(KernelCalls):
    def __init__(self, library: native_library.NativeLibrary) -> None:
        self._library = library

    def empty_like(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def empty_half_width(self, x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))

    def empty_per_token(self, x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return x.new_empty((len(x), *shape), dtype=dtype)

    def view_per_token(self, x: Tensor, *shape: int) -> Tensor:
        return x.view(len(x), *shape)

    def rows_and_width(self, x: Tensor) -> tuple[int, int]:
        return x.numel() // x.shape[-1], x.shape[-1]

    def num_tokens_argument(self, x: Tensor) -> int:
        return len(x)

    def token_width_argument(self, x: Tensor) -> int:
        return prod(x.shape[1:])

    def num_elements_argument(self, x: Tensor) -> int:
        return x.numel()

    def step_inputs(self, metadata: AttentionMetadata) -> StepInputs:
        table, guesses = metadata.block_table, metadata.state_and_verified_counts
        seen, known = (None, None) if guesses is None else (guesses.num_state_tokens, guesses.num_verified_tokens)
        step = (metadata.query_start, metadata.context_lens, table, table.shape[1], len(table), metadata.state_slots)
        return StepInputs(*step, seen, known)

    def call_kernel(self, kernel: str, result: Any, *arguments: Any, error_message: str = "") -> Any:
        dtype = next(each.dtype for each in arguments if isinstance(each, Tensor))
        function = getattr(self._library, kernel)[dtype]
        failed = function(*map(native_library.to_ctypes, arguments), get_num_threads())
        if error_message and failed:
            raise RankEnded if kernel == "ranks_attention" and failed == 1 else IndexError(error_message)
        return result


def check_cache_dtypes(x: Any, caches: CachePair) -> None:
    """Raises TypeError unless both caches have the same dtype, which is x's or one of QUANTIZED_KV_DTYPES."""
    keys, values = (each.dtype for each in caches)
    if keys != values or (keys != x.dtype and keys not in QUANTIZED_KV_DTYPES):
        raise TypeError(f"keys and values of {keys} and {values} cannot serve {x.dtype}")


def _kernel_cache_arguments(
    x: Any, caches: CachePair, scales: KVScales
) -> tuple[Tensor, Tensor, native_library.KVFormat | None]:
    check_cache_dtypes(x, caches)
    k_cache, v_cache = (native_library.view_as_kernel_blocks(each) for each in caches)
    return k_cache, v_cache, native_library.kv_format(k_cache, scales)


def _cache_page_strides(kernel_caches: tuple[Tensor, Tensor, Any]) -> tuple[int, int]:
    return kernel_caches[0].stride(0), kernel_caches[1].stride(0)


def _window_or_negative_chunk(softmax: AttentionParams) -> int:
    """Encode the window as attention_tile.h expects it: 0 for no window, negative for a chunked window."""
    return (softmax.window or 0) * (-1 if softmax.has_chunked_window else 1)
