"""What a decoder consists of: layers, each a tuple of parts' specs. A family's file maps a config.json to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

from quire.engine.checkpoint.families import AXES
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.parts.states import LayerStates, MatrixState, PagedState, SharedState, State
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.part import SublayerSpec
from quire.engine.layers.rope import axes_of
from quire.engine.layers.stream.layer_inputs import LayerInputsSpec

LayerSpec = tuple[SublayerSpec, ...]
P = TypeVar("P", bound=SublayerSpec)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    """Of the last one, behind all layers."""
    tie_embeddings: bool
    embedding_scale: float = 1.0
    positions: int | None = None
    """Rows of a learned table, which is added to the embeddings; None: there is none."""
    embedding_norm: bool = False
    """Norm of the embeddings, as `norm` says it."""
    stream_unit: float = 1.0
    """What a 1 in the residual stream stands for."""
    layer_inputs: LayerInputsSpec | None = None
    """What tokens have for each layer beside their embedding; None: nothing."""
    reads_embeddings: bool = False
    """Layers read tokens' embeddings beside the stream."""
    head_bias: bool = False
    logit_scale: float = 1.0
    """Factor of the logits,"""
    logit_softcap: float | None = None
    """which then become c * tanh(l / c)."""
    linears: Mapping[str, tuple[int, int]] | None = field(default=None, compare=False)
    """(in, out) of those that may have adapters, by name, where a class of transformers has them; None: as
    engine/lora/modules.py says it."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer_states(self) -> list[LayerStates]:
        """What the layers keep, in their order."""
        return [tuple(each.state for each in layer if each.state is not None) for layer in self.layers]

    @property
    def states(self) -> list[State]:
        """The same of all together."""
        return list(chain.from_iterable(self.layer_states))

    @property
    def needs_snapshots(self) -> bool:
        """Whether a sequence can begin behind a cached page only where a snapshot of its states was kept."""
        return any(isinstance(each, MatrixState) for each in self.states)

    @property
    def unstageable(self) -> str | None:
        """Why its layers cannot be divided among processes; None: they can."""
        if self.layer_inputs is not None:
            return "the model's layers read embeddings of their own, which the first process alone would have"
        if self.reads_embeddings:
            return "the model's layers read the tokens' embeddings, which the first process alone would have"
        if any(isinstance(each, SharedState) for each in self.states):
            return "some of the model's layers read keys and values of others, which must be in the same process"
        return None

    def indivisible(self, ranks: int) -> str | None:
        """What of it cannot be divided among so many ranks; None: all can."""
        parts = (part for layer in self.layers for part in layer)
        return next((wrong for part in parts if (wrong := part.indivisible(ranks)) is not None), None)

    def undivided_tokens(self) -> str | None:
        """Why ranks cannot divide each sequence's tokens; None: they can."""
        if all(isinstance(each, PagedState | SharedState) for each in self.states):
            return None
        return "layers that keep a state of a whole sequence cannot divide its tokens"

    def parts(self, kind: type[P]) -> list[P]:
        """All parts of a kind, in the order of the layers."""
        return [each for layer in self.layers for each in layer if isinstance(each, kind)]

    def normed(self, norm: NormSpec) -> DecoderSpec:
        """With other norms everywhere."""
        return replace(self, norm=norm).having(AttentionSpec, norm=norm).having(MlpSpec, norm=norm)

    def mixing(self, others: Sequence[SublayerSpec | None]) -> DecoderSpec:
        """With other parts in attention's place, by layer; None: it stays."""
        layers = zip(self.layers, others, strict=True)
        return replace(
            self,
            layers=tuple(
                parts if other is None else tuple(other if isinstance(each, AttentionSpec) else each for each in parts)
                for parts, other in layers
            ),
        )

    def having(self, kind: type[SublayerSpec], **fields: Any) -> DecoderSpec:
        """With other values in all parts of a kind; a list or tuple has one for each layer."""

        def changed(each: SublayerSpec, layer: int) -> SublayerSpec:
            own = {name: value[layer] if isinstance(value, list | tuple) else value for name, value in fields.items()}
            return replace(each, **own) if isinstance(each, kind) else each  # type: ignore[type-var]

        layers = enumerate(self.layers)
        return replace(self, layers=tuple(tuple(changed(each, layer) for each in parts) for layer, parts in layers))


def base_spec(config: ModelConfig, norm_offset: float = 0.0) -> DecoderSpec:
    """What every family begins with: full attention, rotated, and a gated MLP; no biases."""
    heads, norm = (config.num_heads, config.num_kv_heads, config.head_dim), NormSpec(config.norm_eps, norm_offset)
    parts = AXES.get(config.model_type)
    axes = None if parts is None else axes_of(config.rope, config.head_dim, parts)
    layer = (
        AttentionSpec(*heads, scale=config.head_dim**-0.5, rope=config.rope, norm=norm, axes=axes),
        MlpSpec(config.intermediate_size, norm),
    )
    shape = (config.vocab_size, config.hidden_size)
    return DecoderSpec(*shape, (layer,) * config.num_layers, norm, tie_embeddings=config.tie_embeddings)
