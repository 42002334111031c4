from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.kv_cache_spec import (
    AttentionSpec,
    KVCacheSpec,
    LayerKVCacheSpecs,
    RecurrentStateSpec,
    SharedKVSpec,
)
from quire.engine.architecture.mla import MLALayerSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import (
    LinearSizes,
    ParameterShapes,
    count_parameters,
    linear_shapes,
    linear_sizes,
    norm_shapes,
)
from quire.engine.architecture.stream import EMBED_TOKENS_PER_LAYER, PER_LAYER_MODEL_PROJECTION, PerLayerInputsSpec
from quire.engine.architecture.sublayer import StepCosts, SublayerSpec

EMBED_TOKENS = "model.embed_tokens"
EMBED_POSITIONS = "model.embed_positions"
LM_HEAD = "lm_head"
FINAL_NORM = "model.norm"
EMBEDDING_NORM = "model.embed_norm"
_TABLE_WEIGHTS = tuple(f"{name}.weight" for name in (EMBED_TOKENS, EMBED_POSITIONS, EMBED_TOKENS_PER_LAYER))
LayerSpec = tuple[SublayerSpec, ...]
SpecT = TypeVar("SpecT", bound=SublayerSpec)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tie_embeddings: bool
    embedding_scale: float = 1.0
    positions: int | None = None
    embedding_norm: bool = False
    residual_multiplier: float = 1.0
    """The residual stream is stored divided by this factor."""
    per_layer_inputs: PerLayerInputsSpec | None = None
    reads_embeddings: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    """A logit l becomes c * tanh(l / c)."""
    lora_target_sizes: Mapping[str, tuple[int, int]] | None = field(default=None, compare=False)
    """(in, out) of the linears that LoRA may change in a transformers class. If None, see
    engine/lora/target_modules.py.
    """

    def parameter_shapes(self) -> ParameterShapes:
        """Excludes a tied head."""
        shapes = self.outer_shapes()
        for index, layer in enumerate(self.layers):
            for sublayer in layer:
                shapes |= sublayer.parameter_shapes(f"model.layers.{index}", self.hidden_size)
        return shapes if self.tie_embeddings else shapes | self.head_shapes()

    def outer_shapes(self) -> ParameterShapes:
        hidden = self.hidden_size
        shapes: ParameterShapes = {f"{EMBED_TOKENS}.weight": (self.vocab_size, hidden)}
        if self.positions is not None:
            shapes[f"{EMBED_POSITIONS}.weight"] = (self.positions, hidden)
        if self.per_layer_inputs is not None:
            shapes |= self.per_layer_inputs.parameter_shapes(hidden)
        norms = {EMBEDDING_NORM: hidden} if self.embedding_norm else {}
        return shapes | norm_shapes({**norms, FINAL_NORM: hidden}, self.norm)

    def head_shapes(self) -> ParameterShapes:
        return linear_shapes([LM_HEAD], self.vocab_size, self.hidden_size, bias=self.head_bias)

    def table_parameters(self) -> int:
        """Count parameters of tables that a step only looks up."""
        return count_parameters({name: shape for name, shape in self.outer_shapes().items() if name in _TABLE_WEIGHTS})

    def step_costs(self) -> StepCosts:
        hidden, head = self.hidden_size, self.vocab_size * self.hidden_size
        outer = count_parameters(self.outer_shapes()) - self.table_parameters()
        outer += head if self.tie_embeddings else count_parameters(self.head_shapes())
        costs = StepCosts(dense_parameters=outer, head_parameters=head)
        for index, layer in enumerate(self.layers):
            name, layer_shapes = f"model.layers.{index}", ParameterShapes()
            for sublayer in layer:
                shapes = sublayer.parameter_shapes(name, hidden)
                repeated = count_parameters({key: shapes[key] for key in shapes.keys() & layer_shapes.keys()})
                costs += sublayer.step_costs(name, hidden) + StepCosts(dense_parameters=-repeated)
                layer_shapes |= shapes
        return costs

    def adaptable_linears(self) -> LinearSizes:
        hidden = self.hidden_size
        linears: LinearSizes = {}
        for index, layer in enumerate(self.layers):
            for sublayer in layer:
                linears |= sublayer.adaptable_linears(f"model.layers.{index}", hidden)
        if self.per_layer_inputs is not None:
            linears[PER_LAYER_MODEL_PROJECTION] = (hidden, self.per_layer_inputs.total_size)
        return linears | {EMBED_TOKENS: (self.vocab_size, hidden)} | linear_sizes(self.head_shapes())

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer_cache_specs(self) -> list[LayerKVCacheSpecs]:
        return [tuple(each.kv_cache_spec for each in layer if each.kv_cache_spec is not None) for layer in self.layers]

    @property
    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return list(chain.from_iterable(self.layer_cache_specs))

    @property
    def needs_state_snapshots(self) -> bool:
        """True if only a state snapshot can continue a cached prefix."""
        return any(isinstance(each, RecurrentStateSpec) for each in self.kv_cache_specs)

    @property
    def pipeline_parallel_error(self) -> str | None:
        if self.per_layer_inputs is not None:
            return "the model's layers read embeddings of their own, which only the first process would have"
        if self.reads_embeddings:
            return "the model's layers read the token embeddings, which only the first process would have"
        if any(isinstance(each, SharedKVSpec) for each in self.kv_cache_specs):
            return "some of the model's layers read keys and values of others, which must be in the same process"
        return None

    def tensor_parallel_error(self, ranks: int) -> str | None:
        parts = (sublayer for layer in self.layers for sublayer in layer)
        return next((error for sublayer in parts if (error := sublayer.tensor_parallel_error(ranks)) is not None), None)

    @property
    def has_sparse_attention(self) -> bool:
        return any(each.indexer is not None for each in self.sublayers_of_kind(MLALayerSpec))

    @property
    def gpu_error(self) -> str | None:
        return next((each.gpu_error for layer in self.layers for each in layer if each.gpu_error is not None), None)

    @property
    def quantized_kv_error(self) -> str | None:
        if self.has_sparse_attention:
            return "sparse attention reads keys and values of 16 or 32 bits so far: --kv-cache-dtype auto"
        return None

    def context_parallel_error(self) -> str | None:
        if self.has_sparse_attention:
            return "sparse attention ranks all tokens of a sequence, of which each rank would have a part"
        if all(isinstance(each, AttentionSpec | SharedKVSpec) for each in self.kv_cache_specs):
            return None
        return "layers that keep a state of a whole sequence cannot divide its tokens"

    def sublayers_of_kind(self, kind: type[SpecT]) -> list[SpecT]:
        return [each for layer in self.layers for each in layer if isinstance(each, kind)]

    def with_norm(self, norm: NormSpec) -> DecoderSpec:
        return (
            replace(self, norm=norm)
            .replace_sublayer_fields(AttentionLayerSpec, norm=norm)
            .replace_sublayer_fields(MLPSpec, norm=norm)
        )

    def with_mixers(self, mixers: Sequence[SublayerSpec | None]) -> DecoderSpec:
        """None keeps a layer's attention."""
        layers = zip(self.layers, mixers, strict=True)
        return replace(
            self,
            layers=tuple(
                layer
                if mixer is None
                else tuple(mixer if isinstance(each, AttentionLayerSpec | MLALayerSpec) else each for each in layer)
                for layer, mixer in layers
            ),
        )

    def replace_sublayer_fields(self, kind: type[SublayerSpec], **fields: Any) -> DecoderSpec:
        def replace_fields(each: SublayerSpec, layer: int) -> SublayerSpec:
            own_fields = {
                name: value[layer] if isinstance(value, list | tuple) else value for name, value in fields.items()
            }
            return replace(each, **own_fields) if isinstance(each, kind) else each  # type: ignore[type-var]

        layers = enumerate(self.layers)
        return replace(
            self, layers=tuple(tuple(replace_fields(each, layer) for each in parts) for layer, parts in layers)
        )
