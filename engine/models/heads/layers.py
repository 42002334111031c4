"""The layers of a head that keep keys and values of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.part import Making, PageTensor, Step
from quire.engine.layers.schemes import Scheme
from quire.engine.models.decoder import Decoder
from quire.engine.models.spec import LayerSpec
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, Operations, Pages, Recorded


class HeadLayers:
    """Fill them by way of `parameters()` before use."""

    def __init__(self, specs: Mapping[str, LayerSpec], scheme: Scheme, decoder: Decoder, backend: Backend) -> None:
        """`specs`: of each layer, by its name in the checkpoint. They read and write what the decoder's layers do, in
        its types, whole on every rank."""
        shape = (decoder.spec.hidden_size, decoder.dtype, decoder.kv_dtype, decoder.device, decoder.max_model_len)
        making = Making(backend, scheme, *shape, kv_scales={})
        self._layers = [[each.part(making, name) for each in spec] for name, spec in specs.items()]
        self._backend, self._hidden, self._dtype = backend, decoder.spec.hidden_size, decoder.dtype
        self._recording: tuple[Sequence[Pages] | None, Recorded | None] = None, None

    def parameters(self) -> ParameterTable:
        table: ParameterTable = {}
        for part in (part for layer in self._layers for part in layer):
            table |= part.parameters()
        return table

    def pages(self, num_blocks: int) -> list[tuple[PageTensor, ...]]:
        """Per layer, the tensors that hold so many pages."""
        return [tuple(each for part in layer for each in part.pages(num_blocks)) for layer in self._layers]

    @property
    def page_formula(self) -> str:
        """The bytes of a page of all of them, as a sum of products."""
        kinds = Counter(part.page_formula for layer in self._layers for part in layer if part.pages(1))
        return " + ".join(f"{each} x {count} layers" for each, count in kinds.items())

    def run(
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
            made = self._backend.recorded(layers, self._hidden, self._dtype, starts=True, groups=1)
            self._recording = kv_cache, made
        return self._recording[1]
