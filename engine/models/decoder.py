"""One decoder-only transformer with parameters for what the families differ in. It knows no request and no scheduler.

Pre-norm layers of an attention part (engine/layers/attention.py) and a feed-forward part (engine/layers/mlp.py), as in
Touvron et al. (2023), with Gemma's norms after both where asked for. A family's file maps a config.json to a
DecoderSpec; a family has no other code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import Attention, AttentionSpec, PageTensor
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.mlp import Mlp, MlpSpec
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.rope import rope_table
from quire.engine.layers.schemes import Unquantized
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, FusedLayers, Pages, Softmax

KVCache = list[Pages]
"""Of all layers, as `Decoder.pages` asked for them."""


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
    feed_forward: Mlp


class Decoder:
    """Weights and the forward pass. Fill it by way of `parameters()` before use."""

    def __init__(
        self,
        spec: DecoderSpec,
        backend: Backend,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        progress: Callable[[], None],
    ) -> None:
        """`dtype`: of weights, activations and pages. `progress` is called after every layer and before logits are
        computed."""
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len
        self._progress = progress
        self._backend = backend
        self._scheme = Unquantized(backend, dtype)
        ropes = {str(rope): rope for rope in spec.ropes if rope is not None}
        tables = {key: rope_table(rope, spec.head_dim, max_model_len).to(device) for key, rope in ropes.items()}
        self._layers = [self._layer(index, tables.get(str(rope))) for index, rope in enumerate(spec.ropes)]
        self._embedding: Tensor | None = None
        self._norm = NormWeights({_NORM: spec.hidden_size}, dtype, offset=spec.norm_offset)
        self._head = JoinedLinear(self._scheme, spec.hidden_size, {"lm_head": spec.vocab_size}, bias=False, wide=True)
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
        return _Layer(
            Attention(attention, self._backend, self._scheme, layer=name, cos_sin=cos_sin, dtype=self.dtype),
            Mlp(mlp, self._backend, self._scheme, layer=name, dtype=self.dtype),
        )

    def parameters(self) -> ParameterTable:
        """Every tensor the model takes, by its name in the checkpoint."""
        embedding_shape = (self.spec.vocab_size, self.spec.hidden_size)
        table = {"model.embed_tokens.weight": Parameter(embedding_shape, self.dtype, self._put_embedding)}
        table |= self._norm.parameters()
        if not self.spec.tie_embeddings:
            table |= self._head.parameters()
        for layer in self._layers:
            table |= layer.attention.parameters() | layer.feed_forward.parameters()
        return table

    def pages(self, num_blocks: int) -> list[tuple[PageTensor, ...]]:
        """Per layer, the tensors that hold so many pages."""
        return [layer.attention.pages(num_blocks) for layer in self._layers]

    @property
    def page_formula(self) -> str:
        """The bytes of a page of all layers, as a sum of products."""
        counts = Counter(layer.attention.page_formula for layer in self._layers)
        return " + ".join(f"{formula} x {count} layers" for formula, count in counts.items())

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache, rows: Tensor) -> Tensor:
        """Hidden states [R, hidden] of the tokens at `rows` [R], ascending; stores all T tokens' keys and values."""
        assert self._embedding is not None
        x, residual = F.embedding(token_ids, self._embedding), None
        if self._embedding_scale != 1:
            x *= self._embedding_scale
        kept = None if len(rows) == len(token_ids) else rows
        done = 0
        if self._fused is not None and metadata.linear.adapters is None:
            together = self.spec.num_layers if len(token_ids) <= _FEW_TOKENS else 1
            end = self.spec.num_layers - (kept is not None)  # the last layer may go on with some rows alone
            for done in range(0, end, together):
                some = range(done, min(done + together, end))
                x, residual = self._fused(x, residual, metadata, kv_cache, some)
                self._progress()
            done = end
        for index in range(done, self.spec.num_layers):
            layer, some_rows = self._layers[index], kept if index == self.spec.num_layers - 1 else None
            x, residual = layer.attention.forward(x, residual, metadata, kv_cache[index], some_rows)
            context = metadata.linear if some_rows is None else metadata.linear.at(some_rows)
            x, residual = layer.feed_forward.forward(x, residual, context)
            self._progress()
        assert residual is not None
        return self._backend.add_rms_norm(x, residual, self._norm[_NORM], self.spec.norm_eps)[0]

    @cached_property
    def _fused(self) -> FusedLayers | None:
        """All layers in one call, where the backend can: every layer's parts are of the dense kind."""
        layers = [(layer.attention.dense, layer.feed_forward.dense) for layer in self._layers]
        return self._backend.fuse_layers(layers, head_dim=self.spec.head_dim, eps=self.spec.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] to [R, vocab] float32."""
        self._progress()
        logits, cap = self._head.packed(hidden, NO_ADAPTERS), self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _put_embedding(self, tensor: Tensor) -> None:
        self._embedding = tensor
        # Rounded to the weights' dtype, as Gemma was trained.
        self._embedding_scale = torch.tensor(self.spec.embedding_scale, dtype=tensor.dtype).item()
        if self.spec.tie_embeddings:
            self._head.parameters()["lm_head.weight"].put(tensor)
