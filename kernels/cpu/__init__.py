"""The CPU backend: the functions of `Backend` (kernels/backend.py) in C++, for float32 and bfloat16.

The sources beside this file are built by setup.py and loaded by native.py. What they do not cover (another dtype)
goes to the reference, except where the page layout is our own: there it is a TypeError.
A call costs a few microseconds of Python; keep it so: no tensor is made that is not returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.backend import AttentionMetadata, DecoderLayer, FusedLayers, Linear, Rope, Softmax
from quire.kernels.cpu import linear, native

__all__ = ["BLOCK_SIZE", "DTYPES", "NAME", "add_rms_norm", "argmax", "available", "cannot_serve", "description", "draw"]
__all__ += ["fuse_layers", "gelu_mul", "isa", "kv_cache_shape", "pack_linear", "paged_attention", "rms_norm"]
__all__ += ["rope_store", "silu_mul", "store_kv", "why_not"]

NAME = "cpu"
DTYPES = (torch.float32, torch.bfloat16)
BLOCK_SIZE = 16
_MOST_TOKENS = 2**19
"""Vocabularies from there on are the reference's to draw from."""


@cache
def _load() -> native.Native | str:
    """The library, or why there is none."""
    try:
        isas = native.runnable()
        missing = "the C++ kernels were not built; install a C++ compiler such as g++, then Quire again"
        return native.Native(isas[-1]) if isas else missing
    except (OSError, AttributeError) as error:  # a library that does not fit this machine, or is from another version
        return f"the C++ kernels cannot be loaded: {error}"


def available() -> bool:
    return not why_not()


def isa() -> str:
    """The instruction set in use, such as "AVX-512 with bf16". Only where available()."""
    return native.ISAS[_native().isa]


def why_not() -> str:
    """One line on why available() is False."""
    found = _load()
    return found if isinstance(found, str) else ""


def description() -> str:
    return f"compiled kernels, {isa()}"


def cannot_serve(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False) -> str | None:
    if device.type != "cpu":
        return f"runs on the CPU, not on {device.type}"
    if dtype not in DTYPES:
        return f"the compiled kernels do not take {dtype}"
    return "head_dim must be even" if head_dim % 2 else why_not() or None


def _native() -> native.Native:
    found = _load()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def kv_cache_shape(num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """[pages, kv_heads, 16 * head_dim]; the last axis is laid out as kernels/cpu/layout.h says."""
    if dtype not in _native().paged_attention:
        raise TypeError(f"the CPU kernels keep KV in float32 or bfloat16, not {dtype}; backend 'reference' takes any")
    if head_dim % 2:
        raise ValueError(f"head_dim must be even, not {head_dim}")
    return (num_blocks, kv_heads, BLOCK_SIZE * head_dim)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    _check_cache(k, k_cache, v_cache)
    k, v = k.contiguous(), v.contiguous()
    sizes = (k_cache.stride(0), v_cache.stride(0), len(k), k_cache.shape[0], *k.shape[1:])
    outside = _native().store_kv[k.dtype](*_pointers(k, v, k_cache, v_cache, slots), *sizes)
    if outside:
        raise IndexError(f"slots outside the {k_cache.shape[0]} pages of the cache")


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
) -> Tensor:
    _check_cache(q, k_cache, v_cache)
    q = q.contiguous()
    out = torch.empty_like(q)
    table, pages = metadata.block_table, k_cache.shape[0]
    _, heads, head_dim = q.shape
    lengths = (metadata.query_start, metadata.context_lens)
    sizes = (table.shape[1], k_cache.stride(0), v_cache.stride(0), pages, len(table), heads, k_cache.shape[1], head_dim)
    rules = (softmax.scale, softmax.window or 0, softmax.softcap or 0.0)
    pointers = _pointers(out, q, k_cache, v_cache, *lengths, table)
    outside = _native().paged_attention[q.dtype](*pointers, *sizes, *rules, torch.get_num_threads())
    if outside:
        raise IndexError(f"block table names a page outside the {pages} pages of the cache")
    return out


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _check_cache(x: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if not (x.dtype == k_cache.dtype == v_cache.dtype):
        raise TypeError(f"keys and values of {k_cache.dtype} and {v_cache.dtype} cannot serve {x.dtype}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    kernel = _native().rms_norm.get(x.dtype)
    if kernel is None or weight.dtype != torch.float32:
        return reference.rms_norm(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    threads = torch.get_num_threads()
    kernel(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps, threads)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """In place: returns x and residual themselves where they are contiguous."""
    kernel = _native().add_rms_norm.get(x.dtype)
    if kernel is None or weight.dtype != torch.float32 or residual.dtype != x.dtype:
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    size = x.shape[-1]
    threads = torch.get_num_threads()
    kernel(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), x.numel() // size, size, eps, threads)
    return x, residual


def silu_mul(gate_up: Tensor) -> Tensor:
    kernel = _native().silu_mul.get(gate_up.dtype)
    return reference.silu_mul(gate_up) if kernel is None else _gate_mul(kernel, gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    kernel = _native().gelu_mul.get(gate_up.dtype)
    return reference.gelu_mul(gate_up) if kernel is None else _gate_mul(kernel, gate_up)


def _gate_mul(kernel: Callable[..., int], gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    *rows, size = gate_up.shape
    out = gate_up.new_empty((*rows, size // 2))
    kernel(gate_up.data_ptr(), out.data_ptr(), gate_up.numel() // size, size // 2, torch.get_num_threads())
    return out


def rope_store(qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
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
    outside = _native().rope_store[qkv.dtype](*pointers, *sizes, rope.eps, torch.get_num_threads())
    if outside:
        raise IndexError(f"slots outside the {pages} pages of the cache")
    return q


def pack_linear(weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
    """Our own kernel (linear.cpp), which gives a row the same bits in every batch.

    Against oneDNN with packed weights, on one Zen 4 core: 1.5 to 3 times as fast for one row, 1.1 for 32, level from
    128 up, in both dtypes. Held to AVX-512 without bf16, oneDNN takes 3 times as long for bfloat16, and on AVX2 it
    refuses to pack it; in float32 on AVX2 it is the faster for more than a few rows, so it stays there.
    """
    library = _native()
    narrow = weight.dtype == torch.float32 and library.isa in ("plain", "avx2") and torch.backends.mkldnn.is_available()
    if weight.dtype not in library.linear or narrow or weight.shape[1] * weight.element_size() % 4:
        return reference.pack_linear(weight, bias, wide=wide)
    return linear.PackedLinear(library, weight, bias, wide=wide)


def fuse_layers(layers: Sequence[DecoderLayer], *, head_dim: int, eps: float) -> FusedLayers | None:
    return linear.fuse_layers(_native(), layers, head_dim=head_dim, eps=eps)


def argmax(logits: Tensor) -> Tensor:
    if logits.dtype != torch.float32:
        return reference.argmax(logits)
    logits = logits.contiguous()
    rows, size = logits.shape
    out = logits.new_empty(rows, dtype=torch.int64)
    _native().argmax(logits.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
    return out


def draw(logits: Tensor, filters: Tensor, u: Tensor) -> Tensor:
    if logits.dtype != torch.float32 or logits.shape[1] >= _MOST_TOKENS:
        return reference.draw(logits, filters, u)
    logits, filters, u = logits.contiguous(), filters.contiguous(), u.contiguous()
    rows, size = logits.shape
    out = logits.new_empty(rows, dtype=torch.int64)
    pointers = [tensor.data_ptr() for tensor in (logits, filters, u, out)]
    _native().draw(*pointers, rows, size, torch.get_num_threads())
    return out
