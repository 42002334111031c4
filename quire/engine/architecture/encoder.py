from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes, count_parameters, linear_shapes, norm_shapes
from quire.engine.architecture.pooler_head import HeadLayerSpec
from quire.engine.architecture.sublayer import StepCosts
from quire.engine.common.errors import ModelError

EncoderActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
_ACTIVATIONS_BY_NAME: dict[str, EncoderActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swiglu": "silu",
}


@dataclass(frozen=True, slots=True)
class EncoderWeightNames:
    word_embeddings: str
    layer_template: str
    """Name of a layer, with {} for its index."""
    qkv: tuple[str, ...]
    out: str
    attention_norm: str
    up: tuple[str, ...]
    """Names of gate and up, of one tensor with both, or of `up` alone if the MLP has no gate."""
    down: str
    mlp_norm: str
    position_embeddings: str | None = None
    token_type_embeddings: str | None = None
    embedding_norm: str | None = None
    final_norm: str | None = None
    relative_attention_bias: str | None = None
    """Name of a [buckets, heads] tensor."""
    layer_scales: tuple[str, str] | None = None
    qk_norms: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    names: EncoderWeightNames
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    eps: float
    ropes: tuple[dict[str, Any] | None, ...]
    """Per layer; None for NoPE."""
    windows: tuple[int | None, ...]
    """Per layer: keys that a query sees on each side; None for all."""
    classifier: Callable[[int, int], Sequence[HeadLayerSpec]]
    """Called with the hidden size and number of labels."""
    activation: EncoderActivation
    positions: int = 0
    """Rows of the position table; 0 without one."""
    first_position: int = 0
    """Row of the position table for a prompt's first token."""
    segments: int = 0
    num_buckets: int = 0
    bias: bool = True
    qkv_bias: bool = True
    up_bias: bool = True
    """`qkv_bias` and `up_bias` have an effect only with `bias`."""
    norm_bias: bool = True
    gated: bool = False
    """The MLP is gated (Shazeer, 2020)."""
    gate_last: bool = False
    """In the fused tensor, the gate's rows follow those of `up`."""
    pre_norm: bool = False
    """The first attention has a norm only if has_first_layer_norm."""
    has_first_layer_norm: bool = False
    has_rms_norms: bool = False
    """Norms are RMSNorm (Zhang and Sennrich, 2019), not LayerNorm."""
    metadata_groups: tuple[int, ...] = ()
    """Per layer: index of its attention metadata. If empty, 0 for all."""
    causal: bool = False
    pads_prompts: bool = False
    """Attention includes the padding."""
    projection: tuple[HeadLayerSpec, ...] = ()
    unused_prefixes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def max_prompt_len(self) -> int | None:
        """In tokens; None without a position table."""
        return self.positions - self.first_position if self.positions else None

    def parameter_shapes(self) -> ParameterShapes:
        names = self.names
        tables = {
            names.word_embeddings: self.vocab_size,
            names.position_embeddings: self.positions,
            names.token_type_embeddings: self.segments,
        }
        shapes: ParameterShapes = {
            f"{name}.weight": (rows, self.hidden_size) for name, rows in tables.items() if name is not None and rows
        }
        if names.relative_attention_bias is not None:
            shapes[f"{names.relative_attention_bias}.weight"] = (self.num_buckets, self.num_heads)
        for name in (names.embedding_norm, names.final_norm):
            shapes |= {} if name is None else self._norm_shapes(name)
        for layer in range(self.num_layers):
            shapes |= self.layer_shapes(layer)
        return shapes

    def table_parameters(self) -> int:
        return (self.vocab_size + self.positions + self.segments) * self.hidden_size

    def step_costs(self) -> StepCosts:
        word_embeddings = self.vocab_size * self.hidden_size
        lookups = self.table_parameters() - word_embeddings
        return StepCosts(
            dense_parameters=count_parameters(self.parameter_shapes()) - lookups,
            head_parameters=word_embeddings,
            attention_width=self.num_heads * self.head_dim * self.num_layers,
        )

    def layer_shapes(self, layer: int) -> ParameterShapes:
        names, prefix = self.names, self.names.layer_template.format(layer)
        hidden, inner = self.hidden_size, self.intermediate_size
        attention_size = self.num_heads * self.head_dim
        linears = (
            (names.qkv, 3 * attention_size, hidden, self.qkv_bias),
            ((names.out,), hidden, attention_size, True),
            (names.up, inner * (2 if self.gated else 1), hidden, self.up_bias),
            ((names.down,), hidden, inner, True),
        )
        shapes = ParameterShapes()
        for parts, out, size, has_bias in linears:
            modules = [f"{prefix}.{part}" for part in parts]
            shapes |= linear_shapes(modules, out // len(parts), size, bias=self.bias and has_bias)
        if layer or not self.pre_norm or self.has_first_layer_norm:
            shapes |= self._norm_shapes(f"{prefix}.{names.attention_norm}")
        shapes |= self._norm_shapes(f"{prefix}.{names.mlp_norm}")
        shapes |= {f"{prefix}.{scale}": (hidden,) for scale in names.layer_scales or ()}
        return shapes | {f"{prefix}.{norm}.weight": (attention_size,) for norm in names.qk_norms or ()}

    def _norm_shapes(self, name: str) -> ParameterShapes:
        norm = NormSpec(self.eps, is_layer_norm=True, bias=self.norm_bias)
        return norm_shapes({name: self.hidden_size}, norm)


def parse_encoder_activation(name: str, field: str = "hidden_act") -> EncoderActivation:
    """Raises ModelError."""
    if name not in _ACTIVATIONS_BY_NAME:
        raise ModelError(f"model: {field} {name!r} is not supported")
    return _ACTIVATIONS_BY_NAME[name]
