"""Grouped-query attention (Ainslie et al., 2023) over paged keys and values, with the norms around it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.schemes import Scheme
from quire.kernels.backend import AttentionMetadata, Backend, DenseAttention, Pages, Rope, Softmax


@dataclass(frozen=True, slots=True)
class PageTensor:
    """One tensor of a layer's pages; the first axis is the page. Pages of more than 16 tokens are [pages, tokens, ...],
    so that the beginning of a page can be copied."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of one layer's attention, and the switches by which families differ."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax: Softmax
    norm_eps: float
    norm_offset: float
    """Added to the weights of all norms."""
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    """RMSNorm of every query and key head before the rotation."""
    output_norm: bool
    """RMSNorm of what attention gives, before it joins the residual stream."""


class Attention:
    """The attention part of a layer. Fill it by way of `parameters()` before use."""

    def __init__(
        self,
        spec: AttentionSpec,
        backend: Backend,
        scheme: Scheme,
        *,
        layer: str,
        cos_sin: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """`layer`: the layer's name in the checkpoint; `cos_sin`: see Rope; `dtype`: of keys and values."""
        self._spec = spec
        self._backend = backend
        self._cos_sin = cos_sin
        self._dtype = dtype
        self._prefix = prefix = f"{layer}.self_attn"
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size}
        self._qkv = JoinedLinear(scheme, spec.hidden_size, qkv, bias=spec.qkv_bias)
        self._out = JoinedLinear(scheme, q_size, {f"{prefix}.o_proj": spec.hidden_size}, bias=spec.out_bias)
        self._input_norm, self._output_norm = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
        norms = {self._input_norm: spec.hidden_size}
        if spec.output_norm:
            norms |= {self._output_norm: spec.hidden_size}
        if spec.qk_norm:
            norms |= {f"{prefix}.q_norm": spec.head_dim, f"{prefix}.k_norm": spec.head_dim}
        self._norms = NormWeights(norms, dtype, offset=spec.norm_offset)

    def parameters(self) -> ParameterTable:
        return self._norms.parameters() | self._qkv.parameters() | self._out.parameters()

    def pages(self, num_blocks: int) -> tuple[PageTensor, ...]:
        """What `forward` takes as pages: a key cache and a value cache."""
        spec = self._spec
        shape = self._backend.kv_cache_shape(num_blocks, spec.num_kv_heads, spec.head_dim, self._dtype)
        return PageTensor(shape, self._dtype), PageTensor(shape, self._dtype)

    @property
    def page_formula(self) -> str:
        """The bytes of a page, as a product."""
        spec, block = self._spec, self._backend.block_size
        return f"2 x {block} tokens x {spec.num_kv_heads} heads x {spec.head_dim} x {self._dtype.itemsize} B"

    def forward(
        self, x: Tensor, residual: Tensor | None, metadata: AttentionMetadata, pages: Pages, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, residual stream), not yet added, for x [T, hidden] and the stream to add it to (None: x is
        the embeddings). Stores keys and values of all T tokens. `rows`: return only these tokens' rows; None: all."""
        parts, backend, eps, context = self.dense, self._backend, self._spec.norm_eps, metadata.linear
        k_cache, v_cache = pages
        if residual is None:
            x, residual = backend.rms_norm(x, parts.input_norm, eps), x
        else:
            x, residual = backend.add_rms_norm(x, residual, parts.input_norm, eps)
        q = backend.rope_store(parts.qkv(x, context), parts.rope, k_cache, v_cache, metadata)
        attended = backend.paged_attention(q, k_cache, v_cache, metadata, parts.softmax).flatten(1)
        if rows is not None:
            attended, residual, context = attended[rows], residual[rows], context.at(rows)
        x = parts.out(attended, context)
        return x if parts.output_norm is None else backend.rms_norm(x, parts.output_norm, eps), residual

    @cached_property
    def dense(self) -> DenseAttention:
        """What it computes with, once its weights are there."""
        spec, norms = self._spec, self._norms
        own = (norms.get(f"{self._prefix}.q_norm"), norms.get(f"{self._prefix}.k_norm"))
        return DenseAttention(
            input_norm=norms[self._input_norm],
            qkv=self._qkv.packed,
            rope=Rope(spec.head_dim, self._cos_sin, *own, spec.norm_eps),
            softmax=spec.softmax,
            out=self._out.packed,
            output_norm=norms.get(self._output_norm),
        )
