"""Latent attention (MLA: DeepSeek-V2, 2024): pages keep one latent and one rotated key of each token, for all heads.

Queries of every row are brought into the latents' space (the absorbed form), in prompts as in decodes, so that a row's
bits depend on nothing but the row. Where they need not, a backend may have keys and values of all heads made of a
prompt's latents instead (`ExpandableBlocks`), which rounds differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from quire.engine.checkpoint.parts.states import PagedState
from quire.engine.layers.linear import DenseLinear, JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import ParameterTable, parameters_of
from quire.engine.layers.part import BuildContext, Normed, PageTensor, Step, Sublayer, SublayerSpec, attend, uneven
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Linear, Operations
from quire.kernels.kv_codes import UNSCALED, scale_elements
from quire.kernels.latents.blocks import ExpandableBlocks, expandable
from quire.kernels.latents.latent import Latent
from quire.kernels.softmax import Softmax


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec(SublayerSpec):
    num_heads: int
    latent: int
    """Numbers of a latent (kv_lora_rank),"""
    rotated: int
    """of the rotated part of a key, and of a query (qk_rope_head_dim),"""
    plain: int
    """of the other part of a head's query and key (qk_nope_head_dim),"""
    value: int
    """and of a head's value (v_head_dim)."""
    query_rank: int | None
    """Of queries, where they are made of latents of their own (q_lora_rank); None: they are not."""
    scale: float
    """Of scores."""
    rope: dict[str, Any]
    """As AttentionSpec has it, for `rotated` numbers."""
    norm: NormSpec
    """Of what is projected."""
    latent_eps: float
    """Of the norms of latents."""
    neighbours: bool = True
    """As Latent says it."""
    bias: bool = False
    """Of what makes latents, and of the last linear."""

    @property
    def head_dim(self) -> int:
        """Numbers of a key as pages have it."""
        return self.latent + self.rotated

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def softcap(self) -> None:
        return None

    @property
    def state(self) -> PagedState:
        return PagedState(self.head_dim, None, self.head_dim)

    def part(self, making: BuildContext, layer: str) -> LatentAttention:
        return LatentAttention(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        return uneven(self.num_heads, f"{self.num_heads} heads", ranks)


class LatentAttention(Sublayer):
    """Ranks have some of the heads each, and all latents."""

    def __init__(self, spec: LatentAttentionSpec, making: BuildContext, layer: str) -> None:
        shard, hidden, count = making.shard, making.hidden_size, spec.num_heads
        heads = shard.span(count)
        self._spec, self._making, self._heads = spec, making, len(heads)
        self._kv_scales = making.kv_scales.get(layer, UNSCALED)
        self._prefix = prefix = f"{layer}.self_attn"
        linear = partial(JoinedLinear, making.scheme, adapters=making.adapters)
        query, width = spec.plain + spec.rotated, f"{prefix}.q_proj"
        self._q_low: JoinedLinear | None = None
        if spec.query_rank is not None:
            self._q_low = linear(hidden, {f"{prefix}.q_a_proj": spec.query_rank}, bias=spec.bias)
            width = f"{prefix}.q_b_proj"
        cuts = {width: shard.heads(heads, query)}
        self._q = linear(spec.query_rank or hidden, {width: count * query}, bias=False, cuts=cuts)
        self._kv = linear(hidden, {f"{prefix}.kv_a_proj_with_mqa": spec.head_dim}, bias=spec.bias)
        each = spec.plain + spec.value
        name, cut = f"{prefix}.kv_b_proj", shard.heads(heads, each)
        self._expansion = DenseLinear(making.scheme, name, spec.latent, count * each, cut, self._pack)
        self._absorb: Linear | None = None
        self._expand: Linear | None = None
        out, values = f"{prefix}.o_proj", count * spec.value
        self._out = linear(values, {out: hidden}, bias=spec.bias, cuts={out: shard.ins(values)})
        self._input_norm, self._low_norm = f"{layer}.input_layernorm", f"{prefix}.q_a_layernorm"
        self._latent_norm = f"{prefix}.kv_a_layernorm"
        self._norms = NormWeights({self._input_norm: hidden}, making.dtype, spec.norm)
        sizes = {self._latent_norm: spec.latent}
        if spec.query_rank is not None:
            sizes[self._low_norm] = spec.query_rank
        self._latent_norms = NormWeights(sizes, making.dtype, NormSpec(spec.latent_eps))

    def parameters(self) -> ParameterTable:
        linears = (self._q_low, self._q, self._kv, self._expansion, self._out)
        return parameters_of(self._norms, self._latent_norms, *linears)

    def normed(self) -> tuple[Normed, ...]:
        offset = self._spec.norm.offset
        if self._q_low is None:
            return (Normed(self._input_norm, offset, (self._q, self._kv)),)
        low = Normed(self._low_norm, 0.0, (self._q,))
        return Normed(self._input_norm, offset, (self._q_low, self._kv)), low

    def pages(self, num_blocks: int) -> tuple[PageTensor, ...]:
        """Latents with their rotated keys, as keys of one head; values are their beginnings."""
        kind = self._making.kv_dtype
        shape = self._making.backend.kv_cache_shape(num_blocks, 1, self._spec.head_dim, kind)
        return (PageTensor(shape, kind),)

    @property
    def page_formula(self) -> str:
        spec, kind, beside = self._spec, self._making.kv_dtype, scale_elements(self._making.kv_dtype)
        numbers = f"({spec.latent} latent + {spec.rotated} rotated{f' + {beside}' if beside else ''})"
        tokens = self._making.shard.own(self._making.backend.block_size).tile
        return f"{tokens} tokens x {numbers} x {kind.itemsize} B"

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        assert self._absorb is not None, "weights are not loaded"
        assert self._expand is not None
        reads = self._q if self._q_low is None else self._q_low
        normed, residual = self._norms.read_by((reads, self._kv), run, self._input_norm, x, residual)
        metadata, context, (cache,) = step.metadata, step.context, step.pages
        low = normed
        if self._q_low is not None:
            low = run.apply(self._q_low.packed, normed, context)
            low, _ = self._latent_norms.read_by((self._q,), run, self._low_norm, low, None)
        q, kv = run.apply(self._q.packed, low, context), run.apply(self._kv.packed, normed, context)
        parts = metadata.parts or (metadata,)
        expanded = any(self._expandable(cache, part) is not None for part in parts)
        if expanded:
            found = self._by_parts(run, q, kv, cache, parts)
        else:
            q, kv = (run.cast(each, self._making.attended_in) for each in (run.apply(self._absorb, q, context), kv))
            q = run.latent_store(q, kv, self._latent, cache, metadata)
            found = attend(run, self._making.shard, q, (cache, cache), metadata, self._softmax).flatten(1)
            found = run.cast(found, self._making.dtype)
        if step.rows is not None:
            found, residual, context = found[step.rows], residual[step.rows], context.at(step.rows)
        values = found if expanded else run.apply(self._expand, found, context)
        return run.sum(run.apply(self._out.packed, values, context), self._making.shard.group), residual

    def _expandable(self, cache: Tensor, part: AttentionMetadata) -> ExpandableBlocks | None:
        assert self._absorb is not None
        if self._making.shard.divides_tokens:  # this step's latents are on several ranks
            return None
        return expandable(self._absorb, cache, part)

    def _by_parts(
        self, run: Operations, q: Tensor, kv: Tensor, cache: Tensor, parts: Sequence[AttentionMetadata]
    ) -> Tensor:
        """What attention gives, [T, heads * value]; of parts whose latents are expanded without absorbing their
        queries."""
        assert self._absorb is not None
        assert self._expand is not None
        sizes, found = [len(part.positions) for part in parts], list[Tensor]()
        for part, own_q, own_kv in zip(parts, q.split(sizes), kv.split(sizes), strict=True):
            if (blocks := self._expandable(cache, part)) is not None:
                heads = run.latent_store(own_q.unflatten(1, (self._heads, -1)), own_kv, self._latent, cache, part)
                found.append(blocks.attend(heads, self._expand, cache, part, self._softmax))
            else:
                absorbed = run.apply(self._absorb, own_q, NO_ADAPTERS)
                heads = run.latent_store(absorbed, own_kv, self._latent, cache, part)
                attended = attend(run, self._making.shard, heads, (cache, cache), part, self._softmax)
                found.append(run.apply(self._expand, attended.flatten(1), NO_ADAPTERS))
        return torch.cat(found) if len(found) > 1 else found[0]

    def _pack(self, weight: Tensor) -> None:
        """Of kv_b_proj, what absorbs queries, and what makes values of what attention gives."""
        spec, pack = self._spec, self._making.backend.pack_blocks
        heads = weight.view(self._heads, spec.plain + spec.value, spec.latent)
        self._absorb = pack([each[: spec.plain].t().contiguous() for each in heads], spec.rotated)
        self._expand = pack([each[spec.plain :].contiguous() for each in heads], 0)

    @cached_property
    def _latent(self) -> Latent:
        spec, norm = self._spec, self._latent_norms.get(self._latent_norm)
        assert norm is not None
        table = self._making.rope_table(spec.rope, spec.rotated)
        return Latent(norm, spec.latent_eps, table, spec.neighbours, self._kv_scales)

    @cached_property
    def _softmax(self) -> Softmax:
        return Softmax(self._spec.scale, kv_scales=self._kv_scales, values=self._spec.latent)
