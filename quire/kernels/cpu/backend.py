"""C++ kernels for float32 and bfloat16. The reference computes operations on other dtypes, but operations on KV caches
raise TypeError for them, because the reference cannot read the kernels' KV layout. add_* and mul_by_column_slice work
in place on contiguous arguments. A call takes a few microseconds of Python, so methods create only tensors that they
return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import (
    AdapterSlotSpec,
    AttentionMetadata,
    CachePair,
    LayerFunction,
    Linear,
    LinearWithLora,
    RecordedLayers,
)
from quire.kernels.collective import Collective
from quire.kernels.cpu import lora, native_library
from quire.kernels.cpu.decoder.compiled_moe import make_compiled_moe
from quire.kernels.cpu.decoder.layer_recorder import record_layers
from quire.kernels.cpu.decoder.recurrence import COMPILED_RULES
from quire.kernels.cpu.kernel_calls import ImmediateCalls, check_cache_dtypes
from quire.kernels.cpu.linears.linear_backend import CpuLinearBackend
from quire.kernels.cpu.ranks import shared_collective
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES, UNIT_KV_SCALES, KVScales, num_scale_elements
from quire.kernels.latent_params import KeySelectionParams, LatentNormRopeParams
from quire.kernels.parameters.activation import Activation, ClampedSwiGLU
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv
from quire.kernels.routing import MoE, MoEComponents

KERNEL_DTYPES = (torch.float32, torch.bfloat16)
_PIECE_TOKENS, _TILE_TOKENS = 16, 256
"""Tokens per block without context parallelism, and tokens per tile of keys. Attention merges tiles in order."""
_MAX_VOCAB = 2**19
"""If the vocabulary has this many tokens or more, the reference samples."""


class CpuBackend(CpuLinearBackend):
    name = "cpu"
    block_size = _PIECE_TOKENS
    skips_negative_slots = True

    def __init__(
        self,
        library: native_library.NativeLibrary | None = None,
        *,
        deterministic: bool = False,
        activation_bits: str = "auto",
    ) -> None:
        """If `library` is None, the library for this CPU's instruction set is loaded."""
        super().__init__(library, deterministic=deterministic, activation_bits=activation_bits)
        if self.missing_reason is None:
            self._calls = ImmediateCalls(self.library)

    def make_context_parallel_backend(self, ranks: int) -> CpuBackend:
        backend = CpuBackend(self.library, deterministic=self.deterministic, activation_bits=self.activation_bits)
        backend.block_size = _TILE_TOKENS * ranks
        return backend

    @property
    def isa(self) -> str:
        return native_library.ISAS[self.library.isa]

    def description(self) -> str:
        better = native_library.best_unbuilt_isa()
        advice = f" ({native_library.ISAS[better]} would be faster: `make install` compiles it)" if better else ""
        if native_library.is_amx_refused():
            advice += " (this processor has AMX tiles, but the system refuses them: a container's rules may)"
        return f"compiled kernels, {self.isa}{advice}"

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        if device.type != "cpu":
            return f"runs on the CPU, not on {device.type}"
        if dtype not in KERNEL_DTYPES:
            return f"the compiled kernels do not take {dtype}"
        return "head_dim must be even" if head_dim % 2 else self.missing_reason

    def is_batch_invariant(self, device: torch.device, dtype: torch.dtype) -> bool:
        return dtype in KERNEL_DTYPES

    def kv_cache_shape(self, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Return [blocks, kv_heads, elements of a head] (layout.h, or kv_codes.h if quantized), or [blocks, pieces of
        16 tokens, kv_heads, ...] under decode context parallelism.
        """
        if dtype not in self.library.paged_attention and dtype not in QUANTIZED_KV_DTYPES:
            raise TypeError(
                f"the CPU kernels keep KV in float32, bfloat16 or 8 bits, not {dtype}; backend 'reference' takes any"
            )
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, not {head_dim}")
        pieces = () if self.block_size == _PIECE_TOKENS else (_TILE_TOKENS // _PIECE_TOKENS,)
        return (num_blocks, *pieces, kv_heads, _PIECE_TOKENS * (head_dim + num_scale_elements(dtype)))

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNIT_KV_SCALES
    ) -> None:
        check_cache_dtypes(k, (k_cache, v_cache))
        k, v = k.contiguous(), v.contiguous()
        sizes = (k_cache.stride(0), v_cache.stride(0), len(k), k_cache.shape[0], *k.shape[1:])
        kv_format = native_library.kv_format(k_cache, scales)
        pointers = map(native_library.to_ctypes, (k, v, k_cache, v_cache, kv_format, slots))
        if self.library.store_kv[k.dtype](*pointers, *sizes):
            raise IndexError(f"slots outside the {k_cache.shape[0]} blocks of the cache")

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        return self._calls.paged_attention(q.contiguous(), k_cache, v_cache, metadata, softmax)

    def context_parallel_attention(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: AttentionParams, group: Collective
    ) -> Tensor:
        return self._calls.context_parallel_attention(q.contiguous(), caches, metadata, softmax, group)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        if x.dtype not in KERNEL_DTYPES or weight.dtype != torch.float32 or bias.dtype != torch.float32:
            return super().layer_norm(x, weight, bias, eps)
        return self._calls.layer_norm(x.contiguous(), weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not _share_kernel_dtype(x, residual) or weight.dtype != torch.float32 or bias.dtype != torch.float32:
            return super().add_layer_norm(x, residual, weight, bias, eps)
        return self._calls.add_layer_norm(x.contiguous(), residual.contiguous(), weight, bias, eps)

    def add_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        if not _share_kernel_dtype(x, residual):
            return super().add_residual(x, residual)
        return self._calls.add_residual(x.contiguous(), residual.contiguous())

    def add_gated(self, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        if not _share_kernel_dtype(x, gate, residual):
            return super().add_gated(x, gate, residual)
        return self._calls.add_gated(x.contiguous(), gate.contiguous(), residual.contiguous())

    def apply_activation(self, x: Tensor, activation: Activation) -> Tensor:
        if x.dtype not in KERNEL_DTYPES:
            return super().apply_activation(x, activation)
        return self._calls.apply_activation(x.contiguous(), activation)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in KERNEL_DTYPES or weight.dtype != torch.float32:
            return super().rms_norm(x, weight, eps)
        return self._calls.rms_norm(x.contiguous(), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not _share_kernel_dtype(x, residual) or weight.dtype != torch.float32:
            return super().add_rms_norm(x, residual, weight, eps)
        return self._calls.add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return (
            self._calls.silu_mul(gate_up.contiguous()) if gate_up.dtype in KERNEL_DTYPES else super().silu_mul(gate_up)
        )

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return (
            self._calls.gelu_mul(gate_up.contiguous()) if gate_up.dtype in KERNEL_DTYPES else super().gelu_mul(gate_up)
        )

    def mul_by_column_slice(self, x: Tensor, per_layer_inputs: Tensor, first: int) -> Tensor:
        if not _share_kernel_dtype(x, per_layer_inputs):
            return super().mul_by_column_slice(x, per_layer_inputs, first)
        return self._calls.mul_by_column_slice(x.contiguous(), per_layer_inputs.contiguous(), first)

    def clamp_silu_mul(self, gate_up: Tensor, clamp: ClampedSwiGLU) -> Tensor:
        if gate_up.dtype not in KERNEL_DTYPES:
            return super().clamp_silu_mul(gate_up, clamp)
        return self._calls.call_gated("clamped_mul", gate_up.contiguous(), *astuple(clamp))

    def rope_and_store_kv(
        self, qkv: Tensor, rope: QKNormRopeParams, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return self._calls.rope_and_store_kv(qkv.contiguous(), rope, k_cache, v_cache, metadata)

    def rope_and_store_latent_kv(
        self, q: Tensor, kv: Tensor, latent: LatentNormRopeParams, cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return self._calls.rope_and_store_latent_kv(q.contiguous(), kv.contiguous(), latent, cache, metadata)

    def select_keys(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        params: KeySelectionParams,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        return self._calls.select_keys(q.contiguous(), k.contiguous(), weights.contiguous(), params, cache, metadata)

    def sparse_attention(
        self, q: Tensor, cache: Tensor, selected: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        return self._calls.sparse_attention(q.contiguous(), cache, selected.contiguous(), metadata, softmax)

    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: ConvStates, metadata: AttentionMetadata) -> Tensor:
        if bcx.dtype not in KERNEL_DTYPES:
            return super().short_conv(bcx, conv, columns, metadata)
        return self._calls.short_conv(bcx.contiguous(), conv, columns, metadata)

    def run_recurrence(
        self,
        inputs: Tensor,
        z: Tensor,
        head_inputs: Tensor,
        rule: Recurrence,
        states: RecurrentStates,
        metadata: AttentionMetadata,
    ) -> Tensor:
        if inputs.dtype not in KERNEL_DTYPES or not isinstance(rule, COMPILED_RULES):
            return super().run_recurrence(inputs, z, head_inputs, rule, states, metadata)
        return self._calls.run_recurrence(
            inputs.contiguous(), z.contiguous(), head_inputs.contiguous(), rule, states, metadata
        )

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.dtype not in KERNEL_DTYPES or not x.is_contiguous():
            return super().sigmoid_mul(x, gate)
        return self._calls.sigmoid_mul(x, gate.contiguous())

    def make_moe(self, experts: MoEComponents) -> MoE:
        return make_compiled_moe(self.library, experts) or super().make_moe(experts)

    def make_linear_with_lora(self, linear: Linear, slots: AdapterSlotSpec) -> LinearWithLora:
        if slots.dtype not in self.library.add_adapters or slots.in_features * slots.dtype.itemsize % 4:
            return super().make_linear_with_lora(linear, slots)
        return lora.CompiledLinearWithLora(self.library, linear, slots)

    def fit_int4(self, groups: Tensor, *, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Fit in C++, about thirty times as fast as in PyTorch."""
        if groups.device.type != "cpu":
            return super().fit_int4(groups, zero_points=zero_points)
        groups = (groups if groups.dtype in self.library.fit_int4 else groups.float()).contiguous()
        count = len(groups)
        codes = torch.empty((count, groups.shape[1] // 2), dtype=torch.uint8)
        scales, offsets = (torch.empty(count) for _ in range(2))
        kernel = self.library.fit_int4[groups.dtype]
        pointers = map(native_library.to_ctypes, (groups, codes, scales, offsets))
        kernel(*pointers, count, zero_points, torch.get_num_threads())
        return codes, scales, offsets

    def record_layers(
        self, layers: Sequence[LayerFunction], hidden: int, dtype: torch.dtype, *, starts: bool, groups: int
    ) -> RecordedLayers | None:
        return record_layers(self.library, layers, hidden, dtype, starts=starts, groups=groups)

    def create_rank_memory(self, count: int, row_bytes: int) -> int:
        return shared_collective.create_shared_memory(count, row_bytes)

    def make_collective(self, descriptor: int, rank: int, count: int, parent: int = 0) -> Collective:
        return shared_collective.SharedCollective(self.library, descriptor, rank, count, parent)

    def argmax(self, logits: Tensor) -> Tensor:
        if logits.dtype != torch.float32:
            return super().argmax(logits)
        logits = logits.contiguous()
        rows, size = logits.shape
        out = logits.new_empty(rows, dtype=torch.int64)
        self.library.argmax(logits.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        return out

    def sample_tokens(self, logits: Tensor, filters: Tensor, u: Tensor) -> Tensor:
        if logits.dtype != torch.float32 or logits.shape[1] >= _MAX_VOCAB:
            return super().sample_tokens(logits, filters, u)
        logits = logits.contiguous()
        filters = filters.contiguous()
        u = u.contiguous()
        rows, size = logits.shape
        out = logits.new_empty(rows, dtype=torch.int64)
        pointers = [tensor.data_ptr() for tensor in (logits, filters, u, out)]
        self.library.draw(*pointers, rows, size, torch.get_num_threads())
        return out


def _share_kernel_dtype(*tensors: Tensor) -> bool:
    return tensors[0].dtype in KERNEL_DTYPES and all(each.dtype == tensors[0].dtype for each in tensors)
