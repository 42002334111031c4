"""The CPU backend: the methods of `Backend` (kernels/backend.py) in C++, for float32 and bfloat16.

The sources beside this file are built by setup.py and loaded by native.py. What they do not cover (another dtype) the
reference computes, except where the page layout is our own: there it is a TypeError.
A call costs a few microseconds of Python; keep it so: make no tensor that is not returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, DecoderLayer, FusedLayers, Linear, Rope, Softmax
from quire.kernels.cpu import linear, native
from quire.kernels.reference import Reference

DTYPES = (torch.float32, torch.bfloat16)
_MOST_TOKENS = 2**19
"""From this size of a vocabulary on, the reference draws."""


class Cpu(Reference):
    name = "cpu"
    block_size = 16
    library: native.Native
    """The compiled kernels; there are none where something is `missing`."""

    def __init__(self, library: native.Native | None = None, *, deterministic: bool = False) -> None:
        """library: other kernels than the best that this CPU can run."""
        super().__init__(deterministic=deterministic)
        found = native.load() if library is None else library
        self.missing = found if isinstance(found, str) else None
        """Why there are no compiled kernels, in one line; None where there are."""
        if not isinstance(found, str):
            self.library = found

    @property
    def isa(self) -> str:
        """The instruction set in use, such as "AVX-512 with bf16"."""
        return native.ISAS[self.library.isa]

    def description(self) -> str:
        return f"compiled kernels, {self.isa}"

    def cannot_serve(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        if device.type != "cpu":
            return f"runs on the CPU, not on {device.type}"
        if dtype not in DTYPES:
            return f"the compiled kernels do not take {dtype}"
        return "head_dim must be even" if head_dim % 2 else self.missing

    def kv_cache_shape(self, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
        """[pages, kv_heads, 16 * head_dim]; the last axis is laid out as kernels/cpu/layout.h says."""
        if dtype not in self.library.paged_attention:
            raise TypeError(
                f"the CPU kernels keep KV in float32 or bfloat16, not {dtype}; backend 'reference' takes any"
            )
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, not {head_dim}")
        return (num_blocks, kv_heads, self.block_size * head_dim)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        _check_cache(k, k_cache, v_cache)
        k, v = k.contiguous(), v.contiguous()
        sizes = (k_cache.stride(0), v_cache.stride(0), len(k), k_cache.shape[0], *k.shape[1:])
        outside = self.library.store_kv[k.dtype](*_pointers(k, v, k_cache, v_cache, slots), *sizes)
        if outside:
            raise IndexError(f"slots outside the {k_cache.shape[0]} pages of the cache")

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        _check_cache(q, k_cache, v_cache)
        q = q.contiguous()
        out = torch.empty_like(q)
        table, pages = metadata.block_table, k_cache.shape[0]
        _, heads, head_dim = q.shape
        lengths = (metadata.query_start, metadata.context_lens)
        sizes = (
            table.shape[1],
            k_cache.stride(0),
            v_cache.stride(0),
            pages,
            len(table),
            heads,
            k_cache.shape[1],
            head_dim,
        )
        rules = (softmax.scale, softmax.window or 0, softmax.softcap or 0.0)
        pointers = _pointers(out, q, k_cache, v_cache, *lengths, table)
        outside = self.library.paged_attention[q.dtype](*pointers, *sizes, *rules, torch.get_num_threads())
        if outside:
            raise IndexError(f"block table names a page outside the {pages} pages of the cache")
        return out

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

    def rope_store(
        self, qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        _check_cache(qkv, k_cache, v_cache)
        qkv = qkv.contiguous()
        pages, kv_heads, _ = k_cache.shape
        tokens, width = qkv.shape
        heads = width // rope.head_dim - 2 * kv_heads
        q = qkv.new_empty((tokens, heads, rope.head_dim))
        weights = (rope.q_norm, rope.k_norm, rope.cos_sin)
        for each in weights:
            if each is not None and each.dtype != torch.float32:
                raise TypeError(f"q_norm, k_norm and cos_sin must be float32, not {each.dtype}")
        pointers = _pointers(qkv, *weights, metadata.positions, metadata.slots, q, k_cache, v_cache)
        sizes = (k_cache.stride(0), v_cache.stride(0), tokens, pages, heads, kv_heads, rope.head_dim)
        outside = self.library.rope_store[qkv.dtype](*pointers, *sizes, rope.eps, torch.get_num_threads())
        if outside:
            raise IndexError(f"slots outside the {pages} pages of the cache")
        return q

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        """Our own kernel (linear.cpp), which gives a row the same bits in every batch.

        Against oneDNN with packed weights, on one Zen 4 core: 1.5 to 3 times as fast for one row, 1.1 for 32, level
        from 128 up, in both dtypes. Held to AVX-512 without bf16, oneDNN takes 3 times as long for bfloat16, and on
        AVX2 it refuses to pack it; in float32 on AVX2 it is the faster for more than a few rows, so it stays there.
        """
        library = self.library
        narrow = (
            weight.dtype == torch.float32 and library.isa in ("plain", "avx2") and torch.backends.mkldnn.is_available()
        )
        if weight.dtype not in library.linear or narrow or weight.shape[1] * weight.element_size() % 4:
            return super().pack_linear(weight, bias, wide=wide)
        return linear.PackedLinear(library, weight, bias, wide=wide)

    def fuse_layers(self, layers: Sequence[DecoderLayer], *, head_dim: int, eps: float) -> FusedLayers | None:
        return linear.fuse_layers(self.library, layers, head_dim=head_dim, eps=eps)

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


def _check_cache(x: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if not (x.dtype == k_cache.dtype == v_cache.dtype):
        raise TypeError(f"keys and values of {k_cache.dtype} and {v_cache.dtype} cannot serve {x.dtype}")


def _gate_mul(kernel: Callable[..., int], gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    *rows, size = gate_up.shape
    out = gate_up.new_empty((*rows, size // 2))
    kernel(gate_up.data_ptr(), out.data_ptr(), gate_up.numel() // size, size // 2, torch.get_num_threads())
    return out
