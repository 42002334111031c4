"""Multi-head latent attention (DeepSeek-V2, 2024).

If results must not depend on the batch, queries are absorbed into latent space even in prefill, so that a row's bits
depend on the row alone. Otherwise backends may expand a prompt's latents (`ExpandablePerHeadLinear`), which rounds
differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from quire.engine.architecture.mla import IndexerSpec, MLALayerSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.layers.linear import DequantizedWeightLoader, FusedLinear
from quire.engine.layers.parameters import ParameterTable, merge_parameters
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.layers.sublayer import (
    BuildContext,
    CacheTensorSpec,
    ForwardContext,
    SmoothableNorm,
    Sublayer,
    compute_attention,
)
from quire.engine.layers.sublayer_shapes import SublayerShapes
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Linear, LinearContext, Operations
from quire.kernels.kv_quantization import UNIT_KV_SCALES, num_scale_elements
from quire.kernels.latent_params import KeySelectionParams, LatentNormRopeParams
from quire.kernels.mla.per_head_linear import ExpandablePerHeadLinear, as_worthwhile_expandable_or_none
from quire.kernels.quantized_tensors import Activations


class Indexer:
    """Each rank has the whole indexer."""

    def __init__(
        self,
        spec: IndexerSpec,
        build_context: BuildContext,
        shapes: SublayerShapes,
        prefix: str,
        make_rope_table: Callable[[], Tensor],
    ) -> None:
        """`make_rope_table` makes KeySelectionParams.cos_sin."""
        self._spec = spec
        self._build_context = build_context
        self._make_rope_table = make_rope_table
        self._queries, self._keys = (shapes.make_linear([f"{prefix}.{name}"]) for name in ("wq_b", "wk"))
        # This linear is never quantized, as in checkpoints with quantized weights.
        dense = UnquantizedScheme(build_context.backend, build_context.dtype)
        self._weights = shapes.with_context(scheme=dense, adapters=None).make_linear([f"{prefix}.weights_proj"])
        self._key_norm = f"{prefix}.k_norm"
        self._norms = shapes.make_norms([self._key_norm], spec.key_norm)

    @property
    def query_linears(self) -> tuple[FusedLinear, ...]:
        """They read query latents."""
        return (self._queries,)

    @property
    def hidden_linears(self) -> tuple[FusedLinear, ...]:
        """They read normed hidden states."""
        return self._keys, self._weights

    def parameters(self) -> ParameterTable:
        return merge_parameters(self._queries, self._keys, self._weights, self._norms)

    def cache_tensor_spec(self, num_blocks: int) -> CacheTensorSpec:
        """Index keys are never quantized."""
        kind = self._build_context.attention_dtype
        return CacheTensorSpec(
            self._build_context.backend.kv_cache_shape(num_blocks, 1, self._spec.head_dim, kind), kind
        )

    def select_keys(
        self,
        ops: Operations,
        inputs: tuple[Activations, Activations],
        cache: Tensor,
        metadata: AttentionMetadata,
        context: LinearContext,
    ) -> Tensor:
        """`inputs`: normed hidden states, and query latents."""
        hidden, q_latent = inputs
        q, k, weights = (
            ops.cast(ops.apply_linear(linear.packed_linear, x, context), self._build_context.attention_dtype)
            for linear, x in ((self._queries, q_latent), (self._keys, hidden), (self._weights, hidden))
        )
        return ops.select_keys(q, k, weights, self._params, cache, metadata)

    @cached_property
    def _params(self) -> KeySelectionParams:
        weight, bias = self._norms.get_weight(self._key_norm), self._norms.get_bias(self._key_norm)
        assert weight is not None
        assert bias is not None
        return KeySelectionParams(
            weight,
            bias,
            self._spec.key_norm.eps,
            self._make_rope_table(),
            self._spec.is_interleaved,
            min(self._spec.top_k, self._build_context.max_model_len),
        )


class MLAttention(Sublayer):
    def __init__(self, spec: MLALayerSpec, build_context: BuildContext, layer: str) -> None:
        shard = build_context.shard
        shapes = SublayerShapes(spec.parameter_shapes(layer, build_context.hidden_size), build_context)
        heads = shard.rank_span(spec.num_heads)
        self._spec = spec
        self._build_context = build_context
        self._num_heads = len(heads)
        self._kv_scales = build_context.kv_scales.get(layer, UNIT_KV_SCALES)
        self._prefix = prefix = f"{layer}.self_attn"
        q_a, q, q_b, kv_a, kv_b, out = (
            f"{prefix}.{name}"
            for name in ("q_a_proj", "q_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
        )
        self._q_a = shapes.make_linear([q_a]) if q_a in shapes else None
        q = q if self._q_a is None else q_b
        query_dim = spec.qk_nope_head_dim + spec.qk_rope_head_dim
        self._q = shapes.make_linear([q], {q: shard.head_slice(heads, query_dim)})
        self._kv_a = shapes.make_linear([kv_a])
        cut = shard.head_slice(heads, spec.qk_nope_head_dim + spec.v_head_dim)
        kv_b_sizes = shapes.in_features(kv_b), shapes.output_sizes([kv_b])[kv_b]
        self._kv_b = DequantizedWeightLoader(build_context.scheme, kv_b, *kv_b_sizes, cut, self._pack_kv_b)
        self._absorb_queries: Linear | None = None
        self._expand_values: Linear | None = None
        self._out = shapes.make_linear([out], {out: shard.input_slice(shapes.in_features(out))})
        self._input_norm, self._q_a_norm = f"{layer}.input_layernorm", f"{prefix}.q_a_layernorm"
        self._kv_a_norm = f"{prefix}.kv_a_layernorm"
        self._norms = shapes.make_norms([self._input_norm], spec.norm)
        self._latent_norms = shapes.make_norms((self._kv_a_norm, self._q_a_norm), NormSpec(spec.latent_eps))
        self._indexer = None
        if spec.indexer is not None:
            assert spec.rope is not None
            make_rope_table = partial(build_context.rope_table, spec.rope, spec.qk_rope_head_dim)
            self._indexer = Indexer(spec.indexer, build_context, shapes, f"{prefix}.indexer", make_rope_table)

    def parameters(self) -> ParameterTable:
        linears = (self._q_a, self._q, self._kv_a, self._kv_b, self._out)
        return merge_parameters(self._norms, self._latent_norms, *linears, self._indexer)

    def smoothable_norms(self) -> tuple[SmoothableNorm, ...]:
        offset = self._spec.norm.weight_offset
        if self._q_a is None:
            return (SmoothableNorm(self._input_norm, offset, (self._q, self._kv_a)),)
        index_query_linears, index_hidden_linears = self._indexer_linears
        low = SmoothableNorm(self._q_a_norm, 0.0, (self._q, *index_query_linears))
        return SmoothableNorm(self._input_norm, offset, (self._q_a, self._kv_a, *index_hidden_linears)), low

    @property
    def _indexer_linears(self) -> tuple[tuple[FusedLinear, ...], tuple[FusedLinear, ...]]:
        indexer = self._indexer
        return ((), ()) if indexer is None else (indexer.query_linears, indexer.hidden_linears)

    def block_tensor_specs(self, num_blocks: int) -> tuple[CacheTensorSpec, ...]:
        """Keys of one head, each a latent and a rotated key, then index keys. Values are the latents in the keys."""
        kind = self._build_context.kv_dtype
        shape = self._build_context.backend.kv_cache_shape(num_blocks, 1, self._spec.head_dim, kind)
        latents = CacheTensorSpec(shape, kind)
        return (latents,) if self._indexer is None else (latents, self._indexer.cache_tensor_spec(num_blocks))

    @property
    def block_bytes_formula(self) -> str:
        spec = self._spec
        kind = self._build_context.kv_dtype
        scale_size = num_scale_elements(self._build_context.kv_dtype)
        index = "" if spec.indexer is None else f" + {spec.indexer.head_dim} index"
        scales = f" + {scale_size}" if scale_size else ""
        numbers = f"({spec.kv_lora_rank} latent + {spec.qk_rope_head_dim} rotated{index}{scales})"
        tokens = self._build_context.shard.context_shard(self._build_context.backend.block_size).tokens_per_page
        return f"{tokens} tokens x {numbers} x {kind.itemsize} B"

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        assert self._absorb_queries is not None, "weights are not loaded"
        assert self._expand_values is not None
        q_input = self._q if self._q_a is None else self._q_a
        index_query_linears, index_hidden_linears = self._indexer_linears
        normed, residual = self._norms.norm_for_linears(
            (q_input, self._kv_a, *index_hidden_linears), ops, self._input_norm, x, residual
        )
        metadata = step.metadata
        context = step.linear_context
        cache = step.cache[0]
        q_latent = normed
        if self._q_a is not None:
            q_latent = ops.apply_linear(self._q_a.packed_linear, normed, context)
            q_latent, _ = self._latent_norms.norm_for_linears(
                (self._q, *index_query_linears), ops, self._q_a_norm, q_latent, None
            )
        q, kv = (
            ops.apply_linear(self._q.packed_linear, q_latent, context),
            ops.apply_linear(self._kv_a.packed_linear, normed, context),
        )
        parts = metadata.decode_prefill_parts or (metadata,)
        expanded = any(self._latent_expanding_linear_or_none(cache, part) is not None for part in parts)
        if expanded:
            attended = self._attend_decode_and_prefill(ops, q, kv, cache, parts)
        else:
            q, kv = (
                ops.cast(each, self._build_context.attention_dtype)
                for each in (ops.apply_linear(self._absorb_queries, q, context), kv)
            )
            q = ops.rope_and_store_latent_kv(q, kv, self._latent_store_params, cache, metadata)
            if self._indexer is None:
                attended = compute_attention(
                    ops, self._build_context.shard, q, (cache, cache), metadata, self._attention_params
                )
            else:
                selected = self._indexer.select_keys(ops, (normed, q_latent), step.cache[1], metadata, context)
                attended = ops.sparse_attention(q, cache, selected, metadata, self._attention_params)
            attended = attended.flatten(1)
            attended = ops.cast(attended, self._build_context.dtype)
        if step.selected_rows is not None:
            attended = attended[step.selected_rows]
            residual = residual[step.selected_rows]
            context = context.select_rows(step.selected_rows)
        values = attended if expanded else ops.apply_linear(self._expand_values, attended, context)
        return ops.all_reduce(
            ops.apply_linear(self._out.packed_linear, values, context), self._build_context.shard.group
        ), residual

    def _latent_expanding_linear_or_none(
        self, cache: Tensor, part: AttentionMetadata
    ) -> ExpandablePerHeadLinear | None:
        assert self._absorb_queries is not None
        if self._build_context.shard.is_context_parallel or self._indexer is not None:
            return None  # latents are spread over ranks, or a query does not see all of them
        return as_worthwhile_expandable_or_none(self._absorb_queries, cache, part)

    def _attend_decode_and_prefill(
        self, ops: Operations, q: Tensor, kv: Tensor, cache: Tensor, parts: Sequence[AttentionMetadata]
    ) -> Tensor:
        """Returns [T, heads * value]. Expands latents where worthwhile."""
        assert self._absorb_queries is not None
        assert self._expand_values is not None
        sizes, outputs = [len(part.positions) for part in parts], list[Tensor]()
        for part, part_q, part_kv in zip(parts, q.split(sizes), kv.split(sizes), strict=True):
            if (expandable_absorb := self._latent_expanding_linear_or_none(cache, part)) is not None:
                heads = ops.rope_and_store_latent_kv(
                    part_q.unflatten(1, (self._num_heads, -1)), part_kv, self._latent_store_params, cache, part
                )
                outputs.append(
                    expandable_absorb.attend_expanded(heads, self._expand_values, cache, part, self._attention_params)
                )
            else:
                absorbed = ops.apply_linear(self._absorb_queries, part_q, NO_ADAPTERS)
                heads = ops.rope_and_store_latent_kv(absorbed, part_kv, self._latent_store_params, cache, part)
                attended = compute_attention(
                    ops, self._build_context.shard, heads, (cache, cache), part, self._attention_params
                )
                outputs.append(ops.apply_linear(self._expand_values, attended.flatten(1), NO_ADAPTERS))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _pack_kv_b(self, weight: Tensor) -> None:
        """One part of kv_b_proj absorbs queries, the other turns attention outputs into values."""
        spec, pack = self._spec, self._build_context.backend.pack_per_head_linear
        heads = weight.view(self._num_heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank)
        self._absorb_queries = pack(
            [each[: spec.qk_nope_head_dim].t().contiguous() for each in heads], spec.qk_rope_head_dim
        )
        self._expand_values = pack([each[spec.qk_nope_head_dim :].contiguous() for each in heads], 0)

    @cached_property
    def _latent_store_params(self) -> LatentNormRopeParams:
        spec, norm = self._spec, self._latent_norms.get_weight(self._kv_a_norm)
        assert norm is not None
        table = None if spec.rope is None else self._build_context.rope_table(spec.rope, spec.qk_rope_head_dim)
        return LatentNormRopeParams(
            norm, spec.latent_eps, table, spec.is_interleaved, self._kv_scales, unrotated_dim=spec.qk_rope_head_dim
        )

    @cached_property
    def _attention_params(self) -> AttentionParams:
        return AttentionParams(self._spec.scale, kv_scales=self._kv_scales, value_dim=self._spec.kv_lora_rank)
