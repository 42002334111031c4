"""The layers of a head that keep keys and values of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.part import Making, PageTensor, Step
from quire.engine.layers.schemes import Scheme
from quire.engine.models.decoder import Decoder
from quire.engine.models.spec import LayerSpec
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, Pages


class HeadLayers:
    """Fill them by way of `parameters()` before use."""

    def __init__(self, specs: Mapping[str, LayerSpec], scheme: Scheme, decoder: Decoder, backend: Backend) -> None:
        """`specs`: of each layer, by its name in the checkpoint. They read and write what the decoder's layers do, in
        its types, whole on every rank."""
        shape = (decoder.spec.hidden_size, decoder.dtype, decoder.kv_dtype, decoder.device, decoder.max_model_len)
        making = Making(backend, scheme, *shape, kv_scales={})
        self._layers = [[each.part(making, name) for each in spec] for name, spec in specs.items()]
        self._backend = backend

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
        for layer, pages in zip(self._layers, kv_cache, strict=True):
            for part in layer:
                x, residual = part.forward(self._backend, x, residual, Step(metadata, pages, None))
        assert residual is not None
        return x, residual
