"""One decoder-only transformer with parameters for what the families differ in. It knows no request and no scheduler.

Pre-norm layers of an attention part (engine/layers/attention.py) and a feed-forward part (engine/layers/mlp.py, or
engine/layers/moe.py), as in Touvron et al. (2023), with Gemma's norms after both where asked for. A family's file maps
a config.json to a DecoderSpec; a family has no other code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.page_groups import PageGroups, one_group
from quire.engine.layers.adapters import EMBEDDING, HEAD, Adapters
from quire.engine.layers.attention import Attention, AttentionSpec, PageTensor
from quire.engine.layers.embedding import Embedding
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.mlp import Mlp, MlpSpec
from quire.engine.layers.moe import ExpertsSpec, Moe
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.rope import rope_table
from quire.engine.layers.schemes import Scheme
from quire.engine.layers.shard import WHOLE, Shard
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, LinearContext, Pages, Softmax
from quire.kernels.kv_codes import UNSCALED, KVScales
from quire.kernels.layers import FusedLayers

KVCache = list[Pages]
"""By place (engine/checkpoint/page_groups.py), as `Decoder.pages` asked for them."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder's shape, and the switches by which families differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tie_embeddings: bool
    ropes: tuple[dict[str, Any] | None, ...]
    """Per layer: how positions are rotated in, as ModelConfig.rope says it; None: not at all (NoPE)."""
    windows: tuple[int | None, ...]
    """Per layer: keys a query sees, itself included; None: all."""
    scale: float
    """Of attention scores."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of every query and key head before the rotation."""
    post_norms: bool = False
    """RMSNorm of what attention and the MLP give as well, before it joins the residual stream."""
    norm_offset: float = 0.0
    """Added to the weights of all norms."""
    gelu: bool = False
    """The MLP's gate: GELU in its tanh approximation, not SiLU."""
    embedding_scale: float = 1.0
    softcap: float | None = None
    """Attention scores s become c * tanh(s / c)."""
    logit_softcap: float | None = None
    """The same for logits."""
    sinks: bool = False
    """Every query head has a score beside those of its keys, which takes a part of the weights (Softmax.sinks)."""
    experts: tuple[ExpertsSpec | None, ...] = ()
    """Per layer: experts in the place of the MLP; None: an MLP; (): no layer has experts."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def base_spec(config: ModelConfig) -> dict[str, Any]:
    """The DecoderSpec fields every family reads alike: full attention, rotated, no biases."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "norm_eps": config.norm_eps,
        "tie_embeddings": config.tie_embeddings,
        "ropes": (config.rope,) * config.num_layers,
        "windows": (None,) * config.num_layers,
        "scale": config.head_dim**-0.5,
    }


_FEW_TOKENS = 64
"""Steps of up to this many tokens run all fused layers in one call; longer ones report progress after each layer."""
_NORM = "model.norm"


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: Attention
    feed_forward: Mlp | Moe


class Decoder:
    """Weights and the forward pass. Fill it by way of `parameters()` before use."""

    def __init__(
        self,
        spec: DecoderSpec,
        backend: Backend,
        scheme: Scheme,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        progress: Callable[[], None],
        head: bool = True,
        kv_dtype: torch.dtype | None = None,
        kv_scales: Mapping[int, KVScales] | None = None,
        adapters: Adapters | None = None,
        shard: Shard = WHOLE,
        groups: PageGroups | None = None,
        layers: range | None = None,
    ) -> None:
        """`scheme`: of its linears; `dtype`: of activations and all other weights. `progress` is called after every
        layer and before logits are computed. Without a `head` there are no logits. `kv_dtype`: what pages hold; None:
        `dtype`. `kv_scales`: by layer, of pages that hold 8-bit floats, where it is not 1. `adapters`: where its
        linears get room for some, if they do. `shard`: whose part of each layer it is. `groups`: how its layers
        share pages; by default each page is of all layers. `layers`: which of the model's it has, where others have the
        rest: the first ones with the embedding, the last ones with the last norm and the head."""
        self.spec = spec
        self.dtype = dtype
        self.kv_dtype = dtype if kv_dtype is None else kv_dtype
        self._kv_scales = kv_scales or {}
        self.device = device
        self.max_model_len = max_model_len
        self._progress = progress
        self._backend = backend
        self._scheme = scheme
        self.adapters = adapters
        self.shard = shard
        self.layers = layers = range(spec.num_layers) if layers is None else layers
        self.groups = one_group(len(layers)) if groups is None else groups
        self.is_first, self.is_last = layers.start == 0, layers.stop == spec.num_layers
        self.has_head = head and self.is_last
        ropes = {str(rope): rope for rope in spec.ropes if rope is not None}
        tables = {key: rope_table(rope, spec.head_dim, max_model_len).to(device) for key, rope in ropes.items()}
        self._layers = [self._layer(index, tables.get(str(spec.ropes[index]))) for index in layers]
        self._embedding = Embedding(
            scheme,
            spec.vocab_size,
            spec.hidden_size,
            tied=spec.tie_embeddings and self.has_head,
            looks_up=self.is_first,
            scale=spec.embedding_scale,
            dtype=dtype,
            adapters=adapters,
            shard=shard,
        )
        self._norm = NormWeights({_NORM: spec.hidden_size}, dtype, offset=spec.norm_offset)
        head_parts, cuts = {HEAD: spec.vocab_size}, {HEAD: shard.outs(spec.vocab_size)}
        size = spec.hidden_size
        self._head = JoinedLinear(scheme, size, head_parts, bias=False, wide=True, adapters=adapters, cuts=cuts)
        self.argmax, self.draw = backend.argmax, backend.draw

    def _layer(self, index: int, cos_sin: Tensor | None) -> _Layer:
        """Which parts make the layer."""
        spec, name = self.spec, f"model.layers.{index}"
        attention = AttentionSpec(
            hidden_size=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            softmax=Softmax(spec.scale, spec.windows[index], spec.softcap),
            norm_eps=spec.norm_eps,
            norm_offset=spec.norm_offset,
            qkv_bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            qk_norm=spec.qk_norm,
            output_norm=spec.post_norms,
            sinks=spec.sinks,
        )
        attends = Attention(
            attention,
            self._backend,
            self._scheme,
            layer=name,
            cos_sin=cos_sin,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            kv_scales=self._kv_scales.get(index, UNSCALED),
            adapters=self.adapters,
            shard=self.shard,
        )
        return _Layer(attends, self._feed_forward(name, spec.experts[index] if spec.experts else None))

    def _feed_forward(self, layer: str, experts: ExpertsSpec | None) -> Mlp | Moe:
        spec, parts = self.spec, (self._backend, self._scheme)
        if experts is not None:
            return Moe(
                experts, *parts, layer=layer, dtype=self.dtype, hidden_size=spec.hidden_size, norm_eps=spec.norm_eps
            )
        mlp = MlpSpec(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            norm_eps=spec.norm_eps,
            norm_offset=spec.norm_offset,
            bias=spec.mlp_bias,
            gelu=spec.gelu,
            output_norm=spec.post_norms,
        )
        return Mlp(mlp, *parts, layer=layer, dtype=self.dtype, adapters=self.adapters, shard=self.shard)

    @property
    def computes(self) -> str:
        """What computes, as far as the bits of keys and values may depend on it."""
        return f"{self._backend.name}, {self._backend.description()}"

    def parameters(self) -> ParameterTable:
        """Every tensor the model takes, by its name in the checkpoint."""
        tied = self.has_head and self.spec.tie_embeddings
        table = self._embedding.parameters() if self.is_first or tied else {}
        table |= self._norm.parameters() if self.is_last else {}
        if self.has_head and not tied:
            table |= self._head.parameters()
        for layer in self._layers:
            table |= layer.attention.parameters() | layer.feed_forward.parameters()
        return table

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """What the names begin with of tensors that other stages have."""
        others = [index for index in range(self.spec.num_layers) if index not in self.layers]
        ends = [*([] if self.is_first else [EMBEDDING]), *([] if self.is_last else [_NORM, HEAD])]
        return tuple(f"{name}." for name in (*(f"model.layers.{index}" for index in others), *ends))

    def pages(self, num_blocks: int) -> list[tuple[PageTensor, ...]]:
        """By place, the tensors that hold so many pages. Layers of one place, which are of different groups, share
        them."""
        return [layer.attention.pages(num_blocks) for layer in self._layers[: self.groups.places]]

    @property
    def page_formula(self) -> str:
        """The bytes of a page of every group, as a product."""
        return self.formula_of(self.groups.places)

    def formula_of(self, places: int) -> str:
        """The same where a page has so many places for layers, in all processes together."""
        slots = places * self.groups.count
        unused = f" ({slots - self.spec.num_layers} of them unused)" if slots > self.spec.num_layers else ""
        return f"{self._layers[0].attention.page_formula} x {slots} layers{unused}"

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache, rows: Tensor) -> Tensor:
        """Hidden states [R, hidden] of the tokens at `rows` [R], ascending; stores all T tokens' keys and values."""
        return self.forward_tapped(token_ids, metadata, kv_cache, rows, ())[0]

    def forward_tapped(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
        rows: Tensor,
        taps: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        """The same; and the residual streams [T, hidden] that go into the layers `taps`, ascending."""
        x, residual = self.begin(token_ids, metadata)
        kept = None if len(rows) == len(token_ids) else rows
        begin, tapped = 0, list[Tensor]()
        assert self.is_last
        assert self.is_first or not taps
        for tap in taps:
            x, residual = self._run(x, residual, metadata, kv_cache, range(begin, tap), None)
            tapped.append(x.clone() if residual is None else x + residual)  # a backend may overwrite both
            begin = tap
        x, residual = self._run(x, residual, metadata, kv_cache, range(begin, len(self.layers)), kept)
        assert residual is not None
        return self._backend.add_rms_norm(x, residual, self._norm[_NORM], self.spec.norm_eps)[0], tapped

    def begin(self, token_ids: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor | None]:
        """What goes into the layers, [T, hidden]: x, and the residual stream that it is to be added to, if there is
        one."""
        return self._embedding.look_up(token_ids, metadata.linear), None

    def pass_on(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache) -> tuple[Tensor, Tensor]:
        """The same after the layers; stores all T tokens' keys and values."""
        x, residual = self.begin(token_ids, metadata)
        x, residual = self._run(x, residual, metadata, kv_cache, range(len(self.layers)), None)
        assert residual is not None
        return x, residual

    def _run(
        self,
        x: Tensor,
        residual: Tensor | None,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
        layers: range,
        kept: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Some of its layers one after the other, by their place among these; the last of them goes on with the rows
        `kept` alone, if they are given."""
        done = layers.start
        if self._fused is not None:
            together = self.spec.num_layers if len(x) <= _FEW_TOKENS else 1
            end = layers.stop - (kept is not None)
            for done in range(layers.start, end, together):
                some = range(done, min(done + together, end))
                x, residual = self._fused(x, residual, metadata, kv_cache, some)
                self._progress()
            done = end
        for index in range(done, layers.stop):
            layer, some_rows = self._layers[index], kept if index == layers.stop - 1 else None
            group, place = self.groups.group_of[index], self.groups.place_of[index]
            x, residual = layer.attention.forward(x, residual, metadata.of(group), kv_cache[place], some_rows)
            context = metadata.linear if some_rows is None else metadata.linear.at(some_rows)
            x, residual = layer.feed_forward.forward(x, residual, context)
            self._progress()
        return x, residual

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] to their rows of the embedding, [T, hidden], not scaled."""
        return self._embedding.rows(token_ids)

    @cached_property
    def _fused(self) -> FusedLayers | None:
        """All layers in one call, where the backend can."""
        paged = zip(self._layers, self.groups.group_of, self.groups.place_of, strict=True)
        layers = [
            (replace(layer.attention.fusible, group=group, place=place), layer.feed_forward.fusible)
            for layer, group, place in paged
        ]
        spec = self.spec
        return self._backend.fuse_layers(layers, head_dim=spec.head_dim, eps=spec.norm_eps, group=self.shard.group)

    def logits(self, hidden: Tensor, context: LinearContext = NO_ADAPTERS) -> Tensor:
        """[R, hidden] to [R, vocab] float32; on ranks but the first, to their own part. `context`: of the R rows."""
        self._progress()
        head, cap = self._embedding.head if self.spec.tie_embeddings else self._head.packed, self.spec.logit_softcap
        logits = self.shard.gather(head(hidden, context), self.spec.vocab_size)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
