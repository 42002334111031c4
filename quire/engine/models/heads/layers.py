"""A head with layers of its own, which keep keys and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from torch import Tensor

from quire.engine.layers.parameters import ParameterTable, parameters_of
from quire.engine.layers.part import BuildContext, PageTensor, Step
from quire.engine.layers.schemes import Scheme
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.head import DraftHead
from quire.engine.models.spec import LayerSpec
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, Operations, Pages, Recorded


class LayersHead(DraftHead):
    """It says its tokens by the decoder's own head, unless a subclass has another."""

    def __init__(self, specs: Mapping[str, LayerSpec], scheme: Scheme, decoder: Decoder, backend: Backend) -> None:
        """`specs`: of each layer, by its name in the checkpoint. They read and write what the decoder's layers do, in
        its types, whole on every rank."""
        self.device = decoder.device
        shape = (decoder.spec.hidden_size, decoder.dtype, decoder.kv_dtype, decoder.device, decoder.max_model_len)
        making = BuildContext(backend, scheme, *shape, kv_scales={})
        self._layers = [[each.part(making, name) for each in spec] for name, spec in specs.items()]
        self._decoder, self._backend = decoder, backend
        self._recording: tuple[Sequence[Pages] | None, Recorded | None] = None, None
        kinds = Counter(part.page_formula for layer in self._layers for part in layer if part.pages(1))
        self.page_formula = " + ".join(f"{each} x {count} layers" for each, count in kinds.items())

    def parameters(self) -> ParameterTable:
        return parameters_of(*chain.from_iterable(self._layers))

    def pages(self, num_blocks: int) -> list[tuple[PageTensor, ...]]:
        return [tuple(each for part in layer for each in part.pages(num_blocks)) for layer in self._layers]

    def observe(
        self,
        following: Tensor,
        hidden: Tensor,
        tapped: Sequence[Tensor],
        metadata: AttentionMetadata | None,
        kv_cache: Sequence[Pages],
    ) -> Tensor:
        assert metadata is not None
        return self.advance(following, self.states_of(hidden, tapped), metadata, kv_cache)

    def states_of(self, hidden: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        """What `advance` begins with, of what the decoder gives."""
        return hidden

    def logits(self, states: Tensor, guessed: int) -> Tensor:
        return self._decoder.logits(states)

    def _run(
        self, x: Tensor, residual: Tensor | None, metadata: AttentionMetadata, kv_cache: Sequence[Pages]
    ) -> tuple[Tensor, Tensor]:
        """(output, residual stream) behind all of them, not yet added, for x [T, hidden] and the stream to add it to
        (None: there is none yet). Stores all T tokens' keys and values. Adapters are the decoder's alone."""
        metadata = replace(metadata, linear=NO_ADAPTERS)
        if residual is None and metadata.of_text and (recorded := self._recorded(kv_cache)) is not None:
            return recorded(x, None, metadata, range(len(self._layers)))
        for index in range(len(self._layers)):
            x, residual = self._layer(index, kv_cache, self._backend, x, residual, metadata)
        assert residual is not None
        return x, residual

    def _layer(
        self,
        index: int,
        kv_cache: Sequence[Pages],
        run: Operations,
        x: Tensor,
        residual: Tensor | None,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        for part in self._layers[index]:
            x, residual = part.forward(run, x, residual, Step(metadata, kv_cache[index], None))
        assert residual is not None
        return x, residual

    def _recorded(self, kv_cache: Sequence[Pages]) -> Recorded | None:
        """Those that begin the stream as one call on these pages, where the backend can."""
        if self._recording[0] is not kv_cache:
            layers = [partial(self._layer, index, kv_cache) for index in range(len(self._layers))]
            shape = self._decoder.spec.hidden_size, self._decoder.dtype
            made = self._backend.recorded(layers, *shape, starts=True, groups=1)
            self._recording = kv_cache, made
        return self._recording[1]
