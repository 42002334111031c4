"""The CPU backend: the methods of `Backend` (kernels/backend.py) in C++, for float32 and bfloat16.

The sources beside this file are built by build.py and loaded by native.py. What they do not cover (another dtype) the
reference computes, except where the page layout is our own: there it is a TypeError.
A call costs a few microseconds of Python; keep it so: make no tensor that is not returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
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
from quire.kernels.cpu.decoder import recurrence
from quire.kernels.cpu.decoder.experts import compiled_mixture
from quire.kernels.cpu.decoder.paged import attended, attended_over_ranks
from quire.kernels.cpu.decoder.recorder import recorded
from quire.kernels.cpu.decoder.short_conv import convolved
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
from quire.kernels.rotation import NORMS, Rope
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
            self.library = found

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
        _check_cache(k, k_cache, v_cache)
        k, v = k.contiguous(), v.contiguous()
        sizes = (k_cache.stride(0), v_cache.stride(0), len(k), k_cache.shape[0], *k.shape[1:])
        held = native.kv_format(k_cache, scales)
        pointers = _pointers(k, v, k_cache, v_cache)
        outside = self.library.store_kv[k.dtype](*pointers, _address(held), slots.data_ptr(), *sizes)
        if outside:
            raise IndexError(f"slots outside the {k_cache.shape[0]} pages of the cache")

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        _check_cache(q, k_cache, v_cache)
        return attended(self.library, q, (k_cache, v_cache), metadata, softmax)

    def divided_attention(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: Softmax, group: Collective
    ) -> Tensor:
        _check_cache(q, *caches)
        assert isinstance(group, collective.SharedCollective)
        return attended_over_ranks(self.library, q, caches, metadata, softmax, group)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        kernel = self.library.layer_norm.get(x.dtype)
        if kernel is None or weight.dtype != torch.float32 or bias.dtype != torch.float32:
            return super().layer_norm(x, weight, bias, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        pointers = _pointers(x, None, weight, bias, out)
        kernel(*pointers, x.numel() // size, size, eps, torch.get_num_threads())
        return out

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """In place: returns x and residual themselves where they are contiguous."""
        kernel = self.library.layer_norm.get(x.dtype)
        if kernel is None or weight.dtype != torch.float32 or bias.dtype != torch.float32 or residual.dtype != x.dtype:
            return super().add_layer_norm(x, residual, weight, bias, eps)
        x, residual = x.contiguous(), residual.contiguous()
        size = x.shape[-1]
        pointers = _pointers(x, residual, weight, bias, x)
        kernel(*pointers, x.numel() // size, size, eps, torch.get_num_threads())
        return x, residual

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """In place: returns residual itself where it is contiguous."""
        kernel = self.library.add.get(x.dtype)
        if kernel is None or residual.dtype != x.dtype:
            return super().add(x, residual)
        x, residual = x.contiguous(), residual.contiguous()
        kernel(x.data_ptr(), residual.data_ptr(), x.numel(), torch.get_num_threads())
        return residual

    def add_gated(self, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        """In place, as `add`."""
        kernel = self.library.add_gated.get(x.dtype)
        if kernel is None or residual.dtype != x.dtype or gate.dtype != x.dtype:
            return super().add_gated(x, gate, residual)
        x, gate, residual = x.contiguous(), gate.contiguous(), residual.contiguous()
        size, threads = x.shape[-1], torch.get_num_threads()
        kernel(x.data_ptr(), gate.data_ptr(), residual.data_ptr(), x.numel() // size, size, threads)
        return residual

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        kernel = self.library.activate.get(x.dtype)
        if kernel is None:
            return super().activate(x, activation)
        x = x.contiguous()
        kernel(x.data_ptr(), x.numel(), *native.activation_numbers(activation), torch.get_num_threads())
        return x

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kernel = self.library.rms_norm.get(x.dtype)
        if kernel is None or weight.dtype != torch.float32:
            return super().rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        threads = torch.get_num_threads()
        kernel(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps, threads)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """In place: returns x and residual themselves where they are contiguous."""
        kernel = self.library.add_rms_norm.get(x.dtype)
        if kernel is None or weight.dtype != torch.float32 or residual.dtype != x.dtype:
            return super().add_rms_norm(x, residual, weight, eps)
        x, residual = x.contiguous(), residual.contiguous()
        size = x.shape[-1]
        threads = torch.get_num_threads()
        kernel(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), x.numel() // size, size, eps, threads)
        return x, residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        kernel = self.library.silu_mul.get(gate_up.dtype)
        return super().silu_mul(gate_up) if kernel is None else _gate_mul(kernel, gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        kernel = self.library.gelu_mul.get(gate_up.dtype)
        return super().gelu_mul(gate_up) if kernel is None else _gate_mul(kernel, gate_up)

    def mul_columns(self, x: Tensor, beside: Tensor, first: int) -> Tensor:
        """In place: returns x itself where it is contiguous."""
        kernel = self.library.mul_columns.get(x.dtype)
        if kernel is None or beside.dtype != x.dtype:
            return super().mul_columns(x, beside, first)
        x, beside = x.contiguous(), beside.contiguous()
        kernel(*_pointers(x, beside), *x.shape, beside.shape[1], first, torch.get_num_threads())
        return x

    def clamped_mul(self, gate_up: Tensor, clamp: Clamp) -> Tensor:
        kernel = self.library.clamped_mul.get(gate_up.dtype)
        return super().clamped_mul(gate_up, clamp) if kernel is None else _gate_mul(kernel, gate_up, *astuple(clamp))

    def rope_store(
        self, qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        _check_cache(qkv, k_cache, v_cache)
        k_cache, v_cache = native.in_pieces(k_cache), native.in_pieces(v_cache)
        qkv = qkv.contiguous()
        pages, kv_heads, _ = k_cache.shape
        tokens, width = qkv.shape
        heads = rope.heads(width, kv_heads)
        q = qkv.new_empty((tokens, heads, rope.head_dim))
        weights = (rope.q_norm, rope.k_norm, rope.v_norm, rope.cos_sin, rope.q_scale)
        for each in weights:
            if each is not None and each.dtype != torch.float32:
                raise TypeError(f"weights of norms, cos_sin and q_scale must be float32, not {each.dtype}")
        held = native.kv_format(k_cache, rope.kv_scales)
        where = _pointers(metadata.turned, metadata.slots, q, k_cache, v_cache)
        pointers = [*_pointers(qkv, *weights), NORMS.index(rope.norm), rope.projected, *where]
        shapes = (k_cache.stride(0), v_cache.stride(0), tokens, pages, heads, kv_heads, rope.head_dim)
        sizes = (*shapes, rope.eps, torch.get_num_threads())
        outside = self.library.rope_store[qkv.dtype](*pointers, _address(held), *sizes)
        if outside:
            raise IndexError(f"slots outside the {pages} pages of the cache")
        return q

    def latent_store(self, q: Tensor, kv: Tensor, latent: Latent, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        _check_cache(q, cache, cache)
        cache = native.in_pieces(cache)
        return latents.stored(self.library, q, kv, latent, cache, (metadata.positions, metadata.slots))

    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: Columns, metadata: AttentionMetadata) -> Tensor:
        if bcx.dtype not in self.library.short_conv:
            return super().short_conv(bcx, conv, columns, metadata)
        return convolved(self.library, bcx, conv, columns, metadata)

    def recur(
        self, given: Tensor, z: Tensor, beside: Tensor, rule: Recurrence, states: Matrices, metadata: AttentionMetadata
    ) -> Tensor:
        if given.dtype not in self.library.linear:
            return super().recur(given, z, beside, rule, states, metadata)
        return recurrence.computed(self.library, (given, z, beside), rule, states, metadata)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.dtype not in self.library.sigmoid_mul or not x.is_contiguous():
            return super().sigmoid_mul(x, gate)
        pointers, sizes = _pointers(x, gate.contiguous()), (gate.numel(), x.shape[1] // gate.shape[1])
        self.library.sigmoid_mul[x.dtype](*pointers, *sizes, torch.get_num_threads())
        return x

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
        kernel(*_pointers(groups, codes, scales, offsets), count, zero_points, torch.get_num_threads())
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


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _address(held: native.KVFormat | None) -> int | None:
    return None if held is None else ctypes.addressof(held)


def _check_cache(x: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.dtype != v_cache.dtype or (k_cache.dtype != x.dtype and k_cache.dtype not in KV_CODES):
        raise TypeError(f"keys and values of {k_cache.dtype} and {v_cache.dtype} cannot serve {x.dtype}")


def _gate_mul(kernel: Callable[..., int], gate_up: Tensor, *rules: float) -> Tensor:
    gate_up = gate_up.contiguous()
    *rows, size = gate_up.shape
    out = gate_up.new_empty((*rows, size // 2))
    kernel(gate_up.data_ptr(), out.data_ptr(), gate_up.numel() // size, size // 2, *rules, torch.get_num_threads())
    return out
