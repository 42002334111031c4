from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from torch import Tensor

from quire.engine.architecture.draft_heads import EagleSpec, MTPSpec
from quire.engine.layers.builders import build_sublayer
from quire.engine.layers.parameters import ParameterTable, merge_parameters
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.layers.sublayer import CacheTensorSpec, ForwardContext
from quire.engine.layers.sublayer_shapes import SublayerShapes
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.draft_head import DraftHead, draft_build_context
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, LayerCache, Operations, RecordedLayers


class TransformerHead(DraftHead):
    def __init__(
        self, spec: MTPSpec | EagleSpec, scheme: QuantizationScheme, decoder: Decoder, backend: Backend
    ) -> None:
        """The layers have the decoder's sizes and dtypes, and are not sharded."""
        self.device = decoder.device
        build_context = draft_build_context(scheme, decoder, backend)
        self._layers = [
            [build_sublayer(each, build_context, name) for each in layer] for name, layer in spec.layers_by_name.items()
        ]
        self._outer_shapes = SublayerShapes(spec.outer_shapes(), build_context)
        self._decoder, self._backend = decoder, backend
        self._recorded_layers: tuple[Sequence[LayerCache] | None, RecordedLayers | None] = None, None
        kinds = Counter(
            sublayer.block_bytes_formula
            for layer in self._layers
            for sublayer in layer
            if sublayer.block_tensor_specs(1)
        )
        self.block_bytes_formula = " + ".join(f"{each} x {count} layers" for each, count in kinds.items())

    def parameters(self) -> ParameterTable:
        return merge_parameters(*chain.from_iterable(self._layers))

    def block_tensor_specs(self, num_blocks: int) -> list[tuple[CacheTensorSpec, ...]]:
        return [
            tuple(each for sublayer in layer for each in sublayer.block_tensor_specs(num_blocks))
            for layer in self._layers
        ]

    def compute_states(
        self,
        next_tokens: Tensor,
        hidden: Tensor,
        aux_hidden_states: Sequence[Tensor],
        metadata: AttentionMetadata | None,
        kv_cache: Sequence[LayerCache],
    ) -> Tensor:
        assert metadata is not None
        return self.advance_states(next_tokens, self.initial_states(hidden, aux_hidden_states), metadata, kv_cache)

    def initial_states(self, hidden: Tensor, aux_hidden_states: Sequence[Tensor]) -> Tensor:
        return hidden

    def compute_logits(self, states: Tensor, num_drafted: int) -> Tensor:
        return self._decoder.compute_logits(states)

    def _run_layers(
        self, x: Tensor, residual: Tensor | None, metadata: AttentionMetadata, kv_cache: Sequence[LayerCache]
    ) -> tuple[Tensor, Tensor]:
        """Returns output and residual stream, which are not added yet, for x [T, hidden]. Stores all T tokens' keys and
        values. Ignores adapters, which apply only to the decoder.
        """
        metadata = replace(metadata, linear_context=NO_ADAPTERS)
        if (
            residual is None
            and metadata.is_text_only
            and (recorded := self._get_recorded_layers_call(kv_cache)) is not None
        ):
            return recorded(x, None, metadata, range(len(self._layers)))
        for index in range(len(self._layers)):
            x, residual = self._run_layer(index, kv_cache, self._backend, x, residual, metadata)
        assert residual is not None
        return x, residual

    def _run_layer(
        self,
        index: int,
        kv_cache: Sequence[LayerCache],
        ops: Operations,
        x: Tensor,
        residual: Tensor | None,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        for sublayer in self._layers[index]:
            x, residual = sublayer.forward(ops, x, residual, ForwardContext(metadata, kv_cache[index], None))
        assert residual is not None
        return x, residual

    def _get_recorded_layers_call(self, kv_cache: Sequence[LayerCache]) -> RecordedLayers | None:
        """Returns None if the backend cannot record layers."""
        if self._recorded_layers[0] is not kv_cache:
            layers = [partial(self._run_layer, index, kv_cache) for index in range(len(self._layers))]
            shape = self._decoder.spec.hidden_size, self._decoder.dtype
            recorded = self._backend.record_layers(layers, *shape, starts=True, groups=1)
            self._recorded_layers = kv_cache, recorded
        return self._recorded_layers[1]
