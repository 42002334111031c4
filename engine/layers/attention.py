"""Grouped-query attention (Ainslie et al., 2023) over paged keys and values, with the norms around it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from quire.engine.layers.adapters import Adapters
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.schemes import Scheme
from quire.engine.layers.shard import WHOLE, Shard
from quire.kernels.backend import AttentionMetadata, Backend, Pages, Rope, Softmax
from quire.kernels.kv_codes import KVScales, scale_elements
from quire.kernels.layers import DenseAttention


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
    input_size: int | None = None
    """Of what is projected; None: hidden_size."""
    input_norm: bool = True
    """RMSNorm of what is projected."""
    sinks: bool = False
    """See Softmax.sinks."""


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
        kv_dtype: torch.dtype,
        kv_scales: KVScales,
        adapters: Adapters | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        """`layer`: the layer's name in the checkpoint; `cos_sin`: see Rope; `dtype`: the model's; `kv_dtype`: what
        pages hold; `kv_scales`: of those that hold 8-bit floats; `adapters`: see JoinedLinear; `shard`: whose part it
        is."""
        heads, kv_heads = shard.span(spec.num_heads), shard.kv_heads(spec.num_kv_heads)
        self._spec = replace(spec, num_heads=len(heads), num_kv_heads=len(kv_heads))
        self._shard = shard
        self._backend = backend
        self._cos_sin = cos_sin
        self._kv_dtype = kv_dtype
        self._kv_scales = kv_scales
        self._prefix = prefix = f"{layer}.self_attn"
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = {f"{prefix}.q_proj": q_size, f"{prefix}.k_proj": kv_size, f"{prefix}.v_proj": kv_size}
        cuts = {name: shard.heads(kv_heads, spec.head_dim) for name in qkv}
        cuts[f"{prefix}.q_proj"] = shard.heads(heads, spec.head_dim)
        size = spec.input_size or spec.hidden_size
        self._qkv = JoinedLinear(scheme, size, qkv, bias=spec.qkv_bias, adapters=adapters, cuts=cuts)
        out, ins = {f"{prefix}.o_proj": spec.hidden_size}, {f"{prefix}.o_proj": shard.ins(q_size)}
        self._out = JoinedLinear(scheme, q_size, out, bias=spec.out_bias, adapters=adapters, cuts=ins)
        self._input_norm, self._output_norm = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
        norms = {self._input_norm: spec.hidden_size} if spec.input_norm else {}
        if spec.output_norm:
            norms |= {self._output_norm: spec.hidden_size}
        if spec.qk_norm:
            norms |= {f"{prefix}.q_norm": spec.head_dim, f"{prefix}.k_norm": spec.head_dim}
        self._norms = NormWeights(norms, dtype, offset=spec.norm_offset)
        self._sinks: Tensor | None = None

    def parameters(self) -> ParameterTable:
        table = self._norms.parameters() | self._qkv.parameters() | self._out.parameters()
        if self._spec.sinks:
            table[f"{self._prefix}.sinks"] = Parameter((self._spec.num_heads,), torch.float32, self._put_sinks)
        return table

    def _put_sinks(self, sinks: Tensor) -> None:
        self._sinks = sinks

    def pages(self, num_blocks: int) -> tuple[PageTensor, ...]:
        """What `forward` takes as pages: a key cache and a value cache."""
        spec = self._spec
        shape = self._backend.kv_cache_shape(num_blocks, spec.num_kv_heads, spec.head_dim, self._kv_dtype)
        return PageTensor(shape, self._kv_dtype), PageTensor(shape, self._kv_dtype)

    @property
    def page_formula(self) -> str:
        """The bytes of a page, as a product."""
        spec, block, kind, beside = self._spec, self._backend.block_size, self._kv_dtype, scale_elements(self._kv_dtype)
        head = f"({spec.head_dim} + {beside})" if beside else f"{spec.head_dim}"
        return f"2 x {block} tokens x {spec.num_kv_heads} heads x {head} x {kind.itemsize} B"

    def forward(
        self, x: Tensor, residual: Tensor | None, metadata: AttentionMetadata, pages: Pages, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, residual stream), not yet added, for x [T, hidden] and the stream to add it to (None: x is
        the embeddings). Stores keys and values of all T tokens. `rows`: return only these tokens' rows; None: all."""
        norm, backend, eps = self._norms[self._input_norm], self._backend, self._spec.norm_eps
        if residual is None:
            x, residual = backend.rms_norm(x, norm, eps), x
        else:
            x, residual = backend.add_rms_norm(x, residual, norm, eps)
        return self.attend(x, residual, metadata, pages, rows)

    def attend(
        self, x: Tensor, residual: Tensor, metadata: AttentionMetadata, pages: Pages, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same for x [T, input_size] that is normed already, if it is to be."""
        spec, backend, context = self._spec, self._backend, metadata.linear
        k_cache, v_cache = pages
        q = backend.rope_store(self._qkv.packed(x, context), self._rope, k_cache, v_cache, metadata)
        attended = backend.paged_attention(q, k_cache, v_cache, metadata, self._softmax).flatten(1)
        if rows is not None:
            attended, residual, context = attended[rows], residual[rows], context.at(rows)
        x, norm = self._shard.sum(self._out.packed(attended, context)), self._norms.get(self._output_norm)
        return x if norm is None else backend.rms_norm(x, norm, spec.norm_eps), residual

    @cached_property
    def _rope(self) -> Rope:
        own = (self._norms.get(f"{self._prefix}.q_norm"), self._norms.get(f"{self._prefix}.k_norm"))
        return Rope(self._spec.head_dim, self._cos_sin, *own, self._spec.norm_eps, self._kv_scales)

    @cached_property
    def _softmax(self) -> Softmax:
        assert (self._sinks is not None) == self._spec.sinks, "weights are not loaded"
        return replace(self._spec.softmax, kv_scales=self._kv_scales, sinks=self._sinks)

    @cached_property
    def fusible(self) -> DenseAttention:
        """What it computes with, once its weights are there."""
        return DenseAttention(
            input_norm=self._norms[self._input_norm],
            qkv=self._qkv.packed,
            rope=self._rope,
            softmax=self._softmax,
            out=self._out.packed,
            output_norm=self._norms.get(self._output_norm),
        )
