"""One decoder-only transformer with parameters for what the families differ in. It knows no request and no scheduler.

Pre-norm blocks of grouped-query attention and a gated MLP (Touvron et al., 2023), with Gemma's norms after both where
asked for. A family's file maps a config.json to a DecoderSpec; nothing else of it is code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.parameters import FusedLinear, Parameter, ParameterTable
from quire.engine.layers.rope import rope_table
from quire.kernels.backend import AttentionMetadata, Backend, DecoderLayer, FusedLayers, Pages, Rope, Softmax

KVCache = list[Pages]
"""Of all layers, of the shape the backend asked for."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder's shape, and the switches that tell families apart."""

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
    """RMSNorm of what attention and the MLP give, too, before it joins the stream."""
    norm_offset: float = 0.0
    """Added to the weights of all norms."""
    gelu: bool = False
    """The MLP's gate: GELU in its tanh approximation, not SiLU."""
    embedding_scale: float = 1.0
    softcap: float | None = None
    """Attention scores s become c * tanh(s / c)."""
    logit_softcap: float | None = None
    """So do logits."""

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
"""Up to as many, all layers run in one call; more take long enough to tell of progress after each."""


class Decoder:
    """Weights and the forward pass. Fill it by way of `parameters()` before use."""

    def __init__(
        self,
        spec: DecoderSpec,
        backend: Backend,
        *,
        device: torch.device,
        max_model_len: int,
        progress: Callable[[], None],
    ) -> None:
        """`progress` is called after every layer and before logits are computed."""
        self.spec = spec
        self.device = device
        self.max_model_len = max_model_len
        self._progress = progress
        self._backend = backend
        ropes = {str(rope): rope for rope in spec.ropes if rope is not None}
        tables = {key: rope_table(rope, spec.head_dim, max_model_len).to(device) for key, rope in ropes.items()}
        self._layers = [_Layer(spec, backend, index, tables.get(str(rope))) for index, rope in enumerate(spec.ropes)]
        self._embedding: Tensor | None = None
        self._norm: Tensor | None = None
        self._head = FusedLinear(backend, spec.hidden_size, {"lm_head": spec.vocab_size}, bias=False, wide=True)
        self.argmax, self.draw = backend.argmax, backend.draw

    def parameters(self) -> ParameterTable:
        """Every tensor the model takes, by its name in the checkpoint."""
        embedding_shape = (self.spec.vocab_size, self.spec.hidden_size)
        table = {
            "model.embed_tokens.weight": Parameter(embedding_shape, self._put_embedding),
            "model.norm.weight": Parameter((self.spec.hidden_size,), self._put_norm),
        }
        if not self.spec.tie_embeddings:
            table |= self._head.parameters()
        for layer in self._layers:
            table |= layer.parameters()
        return table

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache, rows: Tensor) -> Tensor:
        """Hidden states [R, hidden] of the tokens at `rows` [R], ascending; stores all T tokens' keys and values."""
        assert self._embedding is not None
        assert self._norm is not None
        x, residual = F.embedding(token_ids, self._embedding), None
        if self._embedding_scale != 1:
            x *= self._embedding_scale
        kept = None if len(rows) == len(token_ids) else rows
        done = 0
        if self._fused is not None:
            together = self.spec.num_layers if len(token_ids) <= _FEW_TOKENS else 1
            end = self.spec.num_layers - (kept is not None)  # from there on only some rows are of use
            for done in range(0, end, together):
                some = range(done, min(done + together, end))
                x, residual = self._fused(x, residual, metadata, kv_cache, some)
                self._progress()
            done = end
        for index in range(done, self.spec.num_layers):
            some_rows = kept if index == self.spec.num_layers - 1 else None
            x, residual = self._layers[index].forward(x, residual, metadata, kv_cache[index], some_rows)
            self._progress()
        assert residual is not None
        return self._backend.add_rms_norm(x, residual, self._norm, self.spec.norm_eps)[0]

    @cached_property
    def _fused(self) -> FusedLayers | None:
        """All layers in one call, where the backend can."""
        layers = [layer.ready for layer in self._layers]
        return self._backend.fuse_layers(layers, head_dim=self.spec.head_dim, eps=self.spec.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] to [R, vocab] float32."""
        self._progress()
        logits, cap = self._head(hidden), self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _put_embedding(self, tensor: Tensor) -> None:
        self._embedding = tensor
        # Rounded to the weights' dtype, as Gemma was trained.
        self._embedding_scale = torch.tensor(self.spec.embedding_scale, dtype=tensor.dtype).item()
        if self.spec.tie_embeddings:
            self._head.parameters()["lm_head.weight"].put(tensor)

    def _put_norm(self, tensor: Tensor) -> None:
        self._norm = tensor.float() + self.spec.norm_offset


class _Layer:
    def __init__(self, spec: DecoderSpec, backend: Backend, index: int, cos_sin: Tensor | None) -> None:
        self._spec = spec
        self._backend = backend
        self._index = index
        self._cos_sin = cos_sin
        self._gate_mul = backend.gelu_mul if spec.gelu else backend.silu_mul
        self._mlp_input_norm = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
        self._prefix = prefix = f"model.layers.{index}"
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
        gate_up = {f"{mlp}.gate_proj": spec.intermediate_size, f"{mlp}.up_proj": spec.intermediate_size}
        self._qkv = FusedLinear(backend, spec.hidden_size, qkv, bias=spec.qkv_bias)
        self._out = FusedLinear(backend, q_size, {f"{attention}.o_proj": spec.hidden_size}, bias=spec.out_bias)
        self._gate_up = FusedLinear(backend, spec.hidden_size, gate_up, bias=spec.mlp_bias)
        down = {f"{mlp}.down_proj": spec.hidden_size}
        self._down = FusedLinear(backend, spec.intermediate_size, down, bias=spec.mlp_bias)
        self._norms: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        hidden, head = (self._spec.hidden_size,), (self._spec.head_dim,)
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if self._spec.post_norms:
            norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
        if self._spec.qk_norm:
            norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
        table = {
            f"{self._prefix}.{name}.weight": Parameter(shape, lambda tensor, name=name: self._put_norm(name, tensor))  # type: ignore[misc]
            for name, shape in norms.items()
        }
        for linear in (self._qkv, self._out, self._gate_up, self._down):
            table |= linear.parameters()
        return table

    def forward(
        self, x: Tensor, residual: Tensor | None, metadata: AttentionMetadata, pages: Pages, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(output of the MLP, residual stream), the sum still to be made; `rows`: go on with these tokens alone."""
        parts, backend, eps = self.ready, self._backend, self._spec.norm_eps
        if residual is None:
            x, residual = backend.rms_norm(x, parts.input_norm, eps), x
        else:
            x, residual = backend.add_rms_norm(x, residual, parts.input_norm, eps)
        q = backend.rope_store(parts.qkv(x), parts.rope, *pages, metadata)
        attended = backend.paged_attention(q, *pages, metadata, parts.softmax).flatten(1)
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        x = parts.out(attended)
        if parts.attention_norm is not None:
            x = backend.rms_norm(x, parts.attention_norm, eps)
        x, residual = backend.add_rms_norm(x, residual, parts.output_norm, eps)
        x = parts.down(self._gate_mul(parts.gate_up(x)))
        if parts.mlp_norm is not None:
            x = backend.rms_norm(x, parts.mlp_norm, eps)
        return x, residual

    @cached_property
    def ready(self) -> DecoderLayer:
        """The layer's parts, once its weights are there."""
        spec, norms = self._spec, self._norms
        own = (norms.get("self_attn.q_norm"), norms.get("self_attn.k_norm"))
        return DecoderLayer(
            qkv=self._qkv.packed,
            out=self._out.packed,
            gate_up=self._gate_up.packed,
            down=self._down.packed,
            input_norm=norms["input_layernorm"],
            output_norm=norms[self._mlp_input_norm],
            attention_norm=norms["post_attention_layernorm"] if spec.post_norms else None,
            mlp_norm=norms.get("post_feedforward_layernorm"),
            rope=Rope(spec.head_dim, self._cos_sin, *own, spec.norm_eps),
            softmax=Softmax(spec.scale, spec.windows[self._index], spec.softcap),
            gelu=spec.gelu,
        )

    def _put_norm(self, name: str, tensor: Tensor) -> None:
        self._norms[name] = tensor.float() + self._spec.norm_offset
