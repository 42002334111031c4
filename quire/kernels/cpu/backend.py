"""The CPU backend: the methods of `Backend` (kernels/backend.py) in C++, for float32 and bfloat16.

The sources beside this file are built by build.py and loaded by native.py. What they do not cover (another dtype) the
reference computes, except where the page layout is our own: there it is a TypeError.
A call costs a few microseconds of Python; keep it so: make no tensor that is not returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from quire.kernels.activation import Activation, Clamp
from quire.kernels.backend import (
    AdaptedLinear,
    AdapterSlots,
    AttentionMetadata,
    CachePair,
    Layer,
    Linear,
    Recorded,
    Table,
)
from quire.kernels.collective import Collective
from quire.kernels.cpu import linear, lora, native, quantized
from quire.kernels.cpu.decoder.calls import Now, check_caches
from quire.kernels.cpu.decoder.experts import compiled_mixture
from quire.kernels.cpu.decoder.recorder import recorded
from quire.kernels.cpu.latents import latent as latents
from quire.kernels.cpu.quantization import float8
from quire.kernels.cpu.ranks import collective
from quire.kernels.kv_codes import KV_CODES, UNSCALED, KVScales, scale_elements
from quire.kernels.latents.blocks import ReferenceBlocks
from quire.kernels.latents.latent import Latent
from quire.kernels.quantized import QuantizedWeight
from quire.kernels.recurrent.recurrence import Matrices, Recurrence
from quire.kernels.recurrent.short_conv import Columns, ShortConv
from quire.kernels.reference import Reference
from quire.kernels.rotation import Rope
from quire.kernels.routing import Experts, Mixture
from quire.kernels.softmax import Softmax

DTYPES = (torch.float32, torch.bfloat16)
_PIECE, _TILE = 16, 256
"""Tokens of a block, and of what attention merges in order (attention_tile.h)."""
_MOST_EXPERTS = 1024
_MOST_TOKENS = 2**19
"""From this size of a vocabulary on, the reference draws."""


class Cpu(Reference):
    name = "cpu"
    block_size = _PIECE
    keeps_bits = True
    passes_over = True
    library: native.Native
    """The compiled kernels; there are none where something is `missing`."""

    def __init__(
        self, library: native.Native | None = None, *, deterministic: bool = False, activation_bits: str = "auto"
    ) -> None:
        """library: other kernels than the best that this CPU can run. activation_bits: see quantized.py."""
        super().__init__(deterministic=deterministic)
        self.activation_bits = activation_bits
        found = native.load() if library is None else library
        self.missing = found if isinstance(found, str) else None
        """Why there are no compiled kernels, in one line; None where there are."""
        if not isinstance(found, str):
            self.library, self._now = found, Now(found)

    def divided(self, ranks: int) -> Cpu:
        made = Cpu(self.library, deterministic=self.deterministic, activation_bits=self.activation_bits)
        made.block_size = _TILE * ranks
        return made

    @property
    def isa(self) -> str:
        """The instruction set in use, such as "AVX-512 with bf16"."""
        return native.ISAS[self.library.isa]

    def description(self) -> str:
        better = native.unbuilt()
        advice = f" ({native.ISAS[better]} would be faster: `make install` compiles it)" if better else ""
        if native.refuses_tiles():
            advice += " (this processor has AMX tiles, but the system refuses them: a container's rules may)"
        return f"compiled kernels, {self.isa}{advice}"

    def cannot_serve(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        if device.type != "cpu":
            return f"runs on the CPU, not on {device.type}"
        if dtype not in DTYPES:
            return f"the compiled kernels do not take {dtype}"
        return "head_dim must be even" if head_dim % 2 else self.missing

    def keeps_rows_apart(self, device: torch.device, dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    def kv_cache_shape(self, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
        """[pages, kv_heads, bytes or numbers of a head]; the last axis is laid out as kernels/cpu/layout.h says, of
        codes as kernels/cpu/kv_codes.h does. Where ranks divide the tokens, [pages, pieces of 16 tokens, kv_heads, ...]
        of this rank's."""
        if dtype not in self.library.paged_attention and dtype not in KV_CODES:
            raise TypeError(
                f"the CPU kernels keep KV in float32, bfloat16 or 8 bits, not {dtype}; backend 'reference' takes any"
            )
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, not {head_dim}")
        pieces = () if self.block_size == _PIECE else (_TILE // _PIECE,)
        return (num_blocks, *pieces, kv_heads, _PIECE * (head_dim + scale_elements(dtype)))

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNSCALED
    ) -> None:
        check_caches(k, (k_cache, v_cache))
        k, v = k.contiguous(), v.contiguous()
        sizes = (k_cache.stride(0), v_cache.stride(0), len(k), k_cache.shape[0], *k.shape[1:])
        held = native.kv_format(k_cache, scales)
        given = map(native.plain, (k, v, k_cache, v_cache, held, slots))
        if self.library.store_kv[k.dtype](*given, *sizes):
            raise IndexError(f"slots outside the {k_cache.shape[0]} pages of the cache")

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        return self._now.paged_attention(q.contiguous(), k_cache, v_cache, metadata, softmax)

    def divided_attention(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: Softmax, group: Collective
    ) -> Tensor:
        return self._now.divided_attention(q.contiguous(), caches, metadata, softmax, group)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        if x.dtype not in DTYPES or weight.dtype != torch.float32 or bias.dtype != torch.float32:
            return super().layer_norm(x, weight, bias, eps)
        return self._now.layer_norm(x.contiguous(), weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """In place: returns x and residual themselves where they are contiguous."""
        if not _alike(x, residual) or weight.dtype != torch.float32 or bias.dtype != torch.float32:
            return super().add_layer_norm(x, residual, weight, bias, eps)
        return self._now.add_layer_norm(x.contiguous(), residual.contiguous(), weight, bias, eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """In place: returns residual itself where it is contiguous."""
        if not _alike(x, residual):
            return super().add(x, residual)
        return self._now.add(x.contiguous(), residual.contiguous())

    def add_gated(self, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        """In place, as `add`."""
        if not _alike(x, gate, residual):
            return super().add_gated(x, gate, residual)
        return self._now.add_gated(x.contiguous(), gate.contiguous(), residual.contiguous())

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        if x.dtype not in DTYPES:
            return super().activate(x, activation)
        return self._now.activate(x.contiguous(), activation)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in DTYPES or weight.dtype != torch.float32:
            return super().rms_norm(x, weight, eps)
        return self._now.rms_norm(x.contiguous(), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """In place: returns x and residual themselves where they are contiguous."""
        if not _alike(x, residual) or weight.dtype != torch.float32:
            return super().add_rms_norm(x, residual, weight, eps)
        return self._now.add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._now.silu_mul(gate_up.contiguous()) if gate_up.dtype in DTYPES else super().silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._now.gelu_mul(gate_up.contiguous()) if gate_up.dtype in DTYPES else super().gelu_mul(gate_up)

    def mul_columns(self, x: Tensor, beside: Tensor, first: int) -> Tensor:
        """In place: returns x itself where it is contiguous."""
        if not _alike(x, beside):
            return super().mul_columns(x, beside, first)
        return self._now.mul_columns(x.contiguous(), beside.contiguous(), first)

    def clamped_mul(self, gate_up: Tensor, clamp: Clamp) -> Tensor:
        if gate_up.dtype not in DTYPES:
            return super().clamped_mul(gate_up, clamp)
        return self._now.gated("clamped_mul", gate_up.contiguous(), *astuple(clamp))

    def rope_store(
        self, qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return self._now.rope_store(qkv.contiguous(), rope, k_cache, v_cache, metadata)

    def latent_store(self, q: Tensor, kv: Tensor, latent: Latent, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self._now.latent_store(q.contiguous(), kv.contiguous(), latent, cache, metadata)

    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: Columns, metadata: AttentionMetadata) -> Tensor:
        if bcx.dtype not in DTYPES:
            return super().short_conv(bcx, conv, columns, metadata)
        return self._now.short_conv(bcx.contiguous(), conv, columns, metadata)

    def recur(
        self, given: Tensor, z: Tensor, beside: Tensor, rule: Recurrence, states: Matrices, metadata: AttentionMetadata
    ) -> Tensor:
        if given.dtype not in DTYPES:
            return super().recur(given, z, beside, rule, states, metadata)
        return self._now.recur(given.contiguous(), z.contiguous(), beside.contiguous(), rule, states, metadata)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.dtype not in DTYPES or not x.is_contiguous():
            return super().sigmoid_mul(x, gate)
        return self._now.sigmoid_mul(x, gate.contiguous())

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        """Our own kernel (linear.cpp), which gives a row the same bits in every batch.

        Against oneDNN with packed weights, on one Zen 4 core: 1.5 to 3 times as fast for one row, 1.1 for 32, level
        from 128 up, in both dtypes. Held to AVX-512 without bf16, oneDNN takes 3 times as long for bfloat16, and on
        AVX2 it refuses to pack it; in float32 on AVX2 it is the faster for more than a few rows, so it stays there,
        but for routers of experts, which a compiled mixture calls.
        """
        router = wide and weight.dtype in self.library.linear and len(weight) <= _MOST_EXPERTS
        if not (router or self.multiplies(weight.dtype)) or weight.shape[1] * weight.element_size() % 4:
            return super().pack_linear(weight, bias, wide=wide)
        return linear.PackedLinear(self.library, weight, bias, wide=wide)

    def pack_blocks(self, weights: Sequence[Tensor], passed: int) -> Linear:
        made = [self.pack_linear(each, None) for each in weights]
        return latents.compiled_blocks(self.library, made, passed) or ReferenceBlocks(made, passed)

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Whether unquantized linears of this type are our own kernel's, which layers run in one call need."""
        narrow = dtype == torch.float32 and self.library.isa in ("plain", "avx2")
        return dtype in self.library.linear and not (narrow and torch.backends.mkldnn.is_available())

    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> Linear:
        """With integer products (quantized.cpp), or of bfloat16 for 8-bit floats (quantization/float8.cpp). Groups of
        other than 16 n inputs, parts that order their inputs differently, and such of both kinds are dequantized."""
        if dtype not in self.library.linear:
            return super().pack_quantized(weights, bias, dtype=dtype, wide=wide)
        if (floats := float8.supported(weights)) is not None:
            return float8.Float8Linear(self.library, floats, bias, dtype=dtype, wide=wide)
        if (grouped := quantized.supported(weights)) is None:
            return super().pack_quantized(weights, bias, dtype=dtype, wide=wide)
        return quantized.QuantizedLinear(
            self.library, grouped, bias, dtype=dtype, wide=wide, activation_bits=self.activation_bits
        )

    def pack_table(self, weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool) -> Table:
        grouped = quantized.supported([weight])
        if grouped is None or dtype not in self.library.linear:
            return super().pack_table(weight, dtype=dtype, tied=tied)
        linear = quantized.QuantizedLinear(
            self.library, grouped, None, dtype=dtype, wide=True, activation_bits=self.activation_bits
        )
        return Table(linear.look_up, linear if tied else None)

    def mixture(self, experts: Experts) -> Mixture:
        return compiled_mixture(self.library, experts) or super().mixture(experts)

    def adapted(self, linear: Linear, slots: AdapterSlots) -> AdaptedLinear:
        if slots.dtype not in self.library.add_adapters or slots.in_features * slots.dtype.itemsize % 4:
            return super().adapted(linear, slots)
        return lora.CompiledAdaptedLinear(self.library, linear, slots)

    def fit_int4(self, groups: Tensor, *, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
        """In C++ (quantization/fit.cpp): some thirty times as fast as PyTorch's operations."""
        if groups.device.type != "cpu":
            return super().fit_int4(groups, zero_points=zero_points)
        groups = (groups if groups.dtype in self.library.fit_int4 else groups.float()).contiguous()
        count = len(groups)
        codes = torch.empty((count, groups.shape[1] // 2), dtype=torch.uint8)
        scales, offsets = (torch.empty(count) for _ in range(2))
        kernel = self.library.fit_int4[groups.dtype]
        given = map(native.plain, (groups, codes, scales, offsets))
        kernel(*given, count, zero_points, torch.get_num_threads())
        return codes, scales, offsets

    def recorded(
        self, layers: Sequence[Layer], hidden: int, dtype: torch.dtype, *, starts: bool, groups: int
    ) -> Recorded | None:
        return recorded(self.library, layers, hidden, dtype, starts=starts, groups=groups)

    def ranks_memory(self, count: int, row_bytes: int) -> int:
        return collective.make_memory(count, row_bytes)

    def collective(self, descriptor: int, rank: int, count: int, parent: int = 0) -> Collective:
        return collective.SharedCollective(self.library, descriptor, rank, count, parent)

    def argmax(self, logits: Tensor) -> Tensor:
        if logits.dtype != torch.float32:
            return super().argmax(logits)
        logits = logits.contiguous()
        rows, size = logits.shape
        out = logits.new_empty(rows, dtype=torch.int64)
        self.library.argmax(logits.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
        return out

    def draw(self, logits: Tensor, filters: Tensor, u: Tensor) -> Tensor:
        if logits.dtype != torch.float32 or logits.shape[1] >= _MOST_TOKENS:
            return super().draw(logits, filters, u)
        logits, filters, u = logits.contiguous(), filters.contiguous(), u.contiguous()
        rows, size = logits.shape
        out = logits.new_empty(rows, dtype=torch.int64)
        pointers = [tensor.data_ptr() for tensor in (logits, filters, u, out)]
        self.library.draw(*pointers, rows, size, torch.get_num_threads())
        return out


def _alike(*tensors: Tensor) -> bool:
    """Whether all are of one type that the kernels take."""
    return tensors[0].dtype in DTYPES and all(each.dtype == tensors[0].dtype for each in tensors)
