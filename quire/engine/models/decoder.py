"""One decoder-only transformer of any layers. It knows no request and no scheduler.

Its layers are residual ones (Touvron et al., 2023), each a tuple of parts (engine/layers/part.py): attention
and a feed-forward part as a rule. A family's file maps a config.json to a DecoderSpec; a family has no other code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.engine.checkpoint.page_groups import PageGroups, one_group
from quire.engine.layers.adapters import EMBEDDING, HEAD, Adapters
from quire.engine.layers.embedding import POSITIONS, Embedding, Positions
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import ParameterTable, parameters_of
from quire.engine.layers.part import BuildContext, PageTensor, Step, Sublayer, times
from quire.engine.layers.schemes import Scheme
from quire.engine.layers.schemes.noted import OfLayer
from quire.engine.layers.shard import WHOLE, Shard
from quire.engine.layers.stream.layer_inputs import LayerInputs
from quire.engine.models.spec import DecoderSpec
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, LinearContext, Operations, Pages, Recorded
from quire.kernels.experts import ExpertsOnDisk
from quire.kernels.kv_codes import KVScales
from quire.kernels.streaming.layers import Layers, StreamedLayers
from quire.kernels.streaming.offload import Offload

KVCache = list[Pages]
"""By place (engine/checkpoint/page_groups.py), as `Decoder.pages` and `Decoder.slots` asked for them."""
_FEW_TOKENS = 64
"""Steps of up to this many tokens run all recorded layers in one call; longer ones report progress after each layer."""
_NORM, _EMBEDDING_NORM = "model.norm", "model.embed_norm"


class _LayerPart(NamedTuple):
    """A part of a layer, among those of the layer."""

    part: Sublayer
    own: list[int]
    """Places of the tensors that it keeps, among those of the layer."""
    drops: bool
    """Whether it is the last part that keeps something: the parts behind it need not compute all tokens."""


def _steps(layer: Sequence[Sublayer]) -> list[_LayerPart]:
    """Pages lie before slots, both in the parts' order."""
    pages, slots = [part.reads for part in layer], [len(part.slots(1, 0)) for part in layer]
    found, last = [], max((at for at in range(len(layer)) if pages[at] or slots[at]), default=None)
    for at, part in enumerate(layer):
        page, slot = sum(pages[:at]), sum(pages) + sum(slots[:at])
        own = [*range(page, page + pages[at]), *range(slot, slot + slots[at])]
        found.append(_LayerPart(part, own, at == last))
    return found


class Features(NamedTuple):
    """What goes into the layers for tokens that stand for a part of an image."""

    rows: Tensor  # [P] int64, the tokens' places in the step
    values: Tensor  # [P, hidden], or [P, (1 + D) * hidden]: what is added behind each of the first D layers follows


class Decoder:
    """Weights and the forward pass. Fill it by way of `parameters()` before use."""

    made_by = ""
    """The class of transformers that computes it; "": none does."""

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
        kv_scales: Mapping[str, KVScales] | None = None,
        adapters: Adapters | None = None,
        shard: Shard = WHOLE,
        groups: PageGroups | None = None,
        layers: range | None = None,
        offload: tuple[Offload, Scheme] | None = None,
    ) -> None:
        """`scheme`: of its linears; `dtype`: of activations and all other weights. `progress` is called after every
        layer and before logits are computed. Without a `head` there are no logits. `kv_dtype`: what pages hold; None:
        `dtype`. `kv_scales`, `adapters` and `shard`: see Making. `groups`: how its layers share pages; by default each
        page is of all layers. `offload`: what keeps some of its weights elsewhere, and the scheme that packs them for
        it. `layers`: which of the model's it has, where others have the rest: the first ones with the embedding, the
        last ones with the last norm and the head."""
        self.spec, self._backend, self.progress, self.max_model_len = spec, backend, progress, max_model_len
        self.device, self.dtype, self.kv_dtype = device, dtype, dtype if kv_dtype is None else kv_dtype
        self.layers = layers = range(spec.num_layers) if layers is None else layers
        self.groups = one_group(len(layers)) if groups is None else groups
        self.is_first, self.is_last = layers.start == 0, layers.stop == spec.num_layers
        self.has_head, self.adapters, self.shard = head and self.is_last, adapters, shard
        made = (backend, scheme, spec.hidden_size, dtype, self.kv_dtype, device, max_model_len, kv_scales or {})
        self.offload: Offload | None = None if offload is None else offload[0]
        """What keeps some of its weights elsewhere than where they are multiplied; None: nothing does."""
        self._packing = scheme if offload is None else offload[1]
        experts = (self.offload.backend, self._packing) if isinstance(self.offload, ExpertsOnDisk) else None
        self._making = BuildContext(*made, adapters, shard, experts)
        self._weights = self.offload if isinstance(self.offload, StreamedLayers) else Layers()
        self.argmax, self.draw = backend.argmax, backend.draw
        self.make_parts(self._making)

    def make_parts(self, making: BuildContext) -> None:
        """What has weights."""
        spec, scheme, dtype = self.spec, making.scheme, making.dtype
        adapters, shard = making.adapters, making.shard
        self._layers = [
            [each.part(self._making_of(place, making), f"model.layers.{index}") for each in spec.layers[index]]
            for place, index in enumerate(self.layers)
        ]
        self._steps = [_steps(layer) for layer in self._layers]
        self._recording: tuple[KVCache | None, Recorded | None] = None, None
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
        self._positions = None if spec.positions is None else Positions(spec.positions, spec.hidden_size, dtype)
        self._layer_inputs = None if spec.layer_inputs is None else LayerInputs(spec.layer_inputs, making)
        embedding_norm = {_EMBEDDING_NORM: spec.hidden_size} if spec.embedding_norm else {}
        self._embedding_norm = NormWeights(embedding_norm, dtype, spec.norm)
        self._norm = NormWeights({_NORM: spec.hidden_size}, dtype, spec.norm)
        size, parts, cuts = spec.hidden_size, {HEAD: spec.vocab_size}, {HEAD: shard.outs(spec.vocab_size)}
        self._head = JoinedLinear(scheme, size, parts, bias=spec.head_bias, wide=True, adapters=adapters, cuts=cuts)

    def _making_of(self, place: int, making: BuildContext) -> BuildContext:
        """For the layer at this place among these."""
        if not isinstance(self._weights, StreamedLayers):
            return making
        return replace(making, scheme=OfLayer(self._packing, self._weights, place))

    @property
    def computes(self) -> str:
        """What computes, as far as the bits of keys and values may depend on it."""
        return f"{self._backend.name}, {self._backend.description()}"

    def converted(self, stream: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """A checkpoint's tensors as `parameters` has them."""
        return stream

    def parameters(self) -> ParameterTable:
        """Every tensor the model takes, by its name in the checkpoint."""
        tied = self.has_head and self.spec.tie_embeddings
        table = parameters_of(
            self._embedding if self.is_first or tied else None,
            self._embedding_norm if self.is_first else None,
            self._positions if self.is_first else None,
            self._layer_inputs,
            self._norm if self.is_last else None,
            self._head if self.has_head and not tied else None,
        )
        for part in (part for layer in self._layers for part in layer):
            own = part.parameters()
            table |= own | {name: table[name].shared(own[name]) for name in own.keys() & table.keys()}
        return table

    def complete(self) -> None:
        """All tensors were put."""
        for part in (part for layer in self._layers for part in layer):
            part.complete()

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Prefixes of the names of tensors that other stages have, or that a model without logits does not need."""
        others = [index for index in range(self.spec.num_layers) if index not in self.layers]
        ends = [
            *([] if self.is_first else [EMBEDDING, POSITIONS, _EMBEDDING_NORM]),
            *([] if self.is_last else [_NORM]),
            *([] if self.has_head or (self.is_last and self.spec.tie_embeddings) else [HEAD]),
        ]
        return tuple(f"{name}." for name in (*(f"model.layers.{index}" for index in others), *ends))

    def pages(self, num_blocks: int) -> list[tuple[PageTensor, ...]]:
        """By place, the tensors that hold so many pages. Layers of one place, which are of different groups, share
        them."""
        layers = [self._layers[self.groups.place_of.index(place)] for place in range(self.groups.places)]
        return [tuple(each for part in layer for each in part.pages(num_blocks)) for layer in layers]

    def slots(self, count: int, drafts: int) -> list[tuple[PageTensor, ...]]:
        """By place, the tensors of so many slots, as Sublayer.slots says it."""
        layers = [self._layers[self.groups.place_of.index(place)] for place in range(self.groups.places)]
        return [tuple(each for part in layer for each in part.slots(count, drafts)) for layer in layers]

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page in all layers of the model, those of other stages too."""
        return sum(tensor.nbytes for layer in self.every_layer for part in layer for tensor in part.pages(1))

    def slot_nbytes(self, count: int, drafts: int) -> int:
        """Of so many slots in all layers: see Sublayer.slots."""
        return sum(
            tensor.nbytes for layer in self.every_layer for part in layer for tensor in part.slots(count, drafts)
        )

    @cached_property
    def every_layer(self) -> list[list[Sublayer]]:
        """The parts of all layers of the model; of those that other stages have, without weights."""
        if len(self.layers) == self.spec.num_layers:
            return self._layers
        layers = enumerate(self.spec.layers)
        return [[each.part(self._making, f"model.layers.{index}") for each in layer] for index, layer in layers]

    @property
    def page_formula(self) -> str:
        """The bytes of a page of every group, as a product."""
        return self.formula_of(self.groups.places)

    def formula_of(self, places: int) -> str:
        """The same where a page has so many places for layers, in all processes together."""
        slots = places * self.groups.count
        unused = f" ({slots - self.spec.num_layers} of them unused)" if slots > self.spec.num_layers else ""
        layers = self.every_layer if self.groups.count == 1 else self._layers
        kinds = Counter(each.page_formula for layer in layers for each in layer if each.pages(1))
        alike = len(kinds) == 1 and all(any(each.pages(1) for each in layer) for layer in layers)
        counts = [slots] if alike else kinds.values()
        return " + ".join(f"{each} x {count} layers" for each, count in zip(kinds, counts, strict=True)) + unused

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
        features: Features | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """The same; and the residual streams [T, hidden] that go into the layers `taps`, ascending. `features` take the
        place of some tokens' embeddings."""
        assert self.is_last
        assert self.is_first or not taps
        kept = None if len(rows) == len(token_ids) else rows
        x, residual, tapped = self._through(token_ids, metadata, kv_cache, kept, taps, features)
        return self._norm.add(self._backend, _NORM, x, residual)[0], tapped

    def _through(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
        kept: Tensor | None,
        taps: Sequence[int],
        features: Features | None,
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """What comes out of the layers, as `begin` has it, the last of them with the rows `kept` alone, if they are
        given; and what goes into the layers `taps`."""
        self._weights.begin()
        x, residual = self.begin(token_ids, metadata)
        deep = list[Tensor]()
        if features is not None:
            x[features.rows], *deep = features.values.split(self.spec.hidden_size, dim=1)
        if self._layer_inputs is not None:
            images = None if features is None else features.rows
            beside = self._layer_inputs.of(token_ids, x, images, metadata.linear)
            metadata = replace(metadata, beside=beside)
        elif self.spec.reads_embeddings:
            metadata = replace(metadata, beside=x.clone())  # the stream begins as x, and may be overwritten
        begin, tapped = 0, list[Tensor]()
        for stop in sorted({*taps, *range(1, len(deep) + 1)}):
            x, residual = self._run(x, residual, metadata, kv_cache, range(begin, stop), None)
            if features is not None and 0 < stop <= len(deep):
                x[features.rows] += deep[stop - 1]
            if stop in taps:
                stream = x.clone() if residual is None else x + residual  # a backend may overwrite both
                tapped.append(stream if self.spec.stream_unit == 1 else stream.mul_(self.spec.stream_unit))
            begin = stop
        x, residual = self._run(x, residual, metadata, kv_cache, range(begin, len(self.layers)), kept)
        return x, residual, tapped

    def begin(self, token_ids: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor | None]:
        """What goes into the layers, [T, hidden]: x, and the residual stream that it is to be added to, if there is
        one."""
        x = self._embedding.look_up(token_ids, metadata.linear)
        if self._positions is not None:
            x = self._positions.add(x, metadata.positions)
        return self._embedding_norm.norm(self._backend, _EMBEDDING_NORM, x), None

    def pass_on(
        self, token_ids: Tensor, metadata: AttentionMetadata, kv_cache: KVCache, features: Features | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same after the layers; stores all T tokens' keys and values."""
        x, residual, _ = self._through(token_ids, metadata, kv_cache, None, (), features)
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
        if metadata.of_text and (recorded := self._recorded(kv_cache)) is not None:
            together = 1 if len(x) > _FEW_TOKENS or self._weights.order else self.spec.num_layers
            end = layers.stop - (kept is not None)
            for done in range(layers.start, end, together):
                self._weights.enter(done)
                x, residual = recorded(x, residual, metadata, range(done, min(done + together, end)))
                self._weights.leave(done)
                self.progress()
            done = end
        for index in range(done, layers.stop):
            rows = kept if index == layers.stop - 1 else None
            self._weights.enter(index)
            x, residual = self._layer(index, kv_cache, rows, self._backend, x, residual, metadata)
            self._weights.leave(index)
            self.progress()
        return x, residual

    def _layer(
        self,
        index: int,
        kv_cache: KVCache,
        rows: Tensor | None,
        run: Operations,
        x: Tensor,
        residual: Tensor | None,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        kept = kv_cache[self.groups.place_of[index]]
        step = Step(metadata.of(self.groups.group_of[index]), kept, rows, metadata.beside)
        for part, own, drops in self._steps[index]:
            given = replace(step, pages=tuple(kept[place] for place in own), rows=step.rows if drops else None)
            x, residual = part.forward(run, x, residual, given)
            if step.rows is not None and drops:
                step = step.behind(step.rows)
        assert residual is not None
        return (x, residual) if step.rows is None else (x[step.rows], residual[step.rows])

    def _recorded(self, kv_cache: KVCache) -> Recorded | None:
        """Its layers as one call on these pages, where the backend can."""
        if self._recording[0] is not kv_cache:
            layers = [partial(self._layer, index, kv_cache, None) for index in range(len(self.layers))]
            hidden, groups = self.spec.hidden_size, self.groups.count
            made = self._backend.recorded(layers, hidden, self.dtype, starts=self.is_first, groups=groups)
            self._recording = kv_cache, made
        return self._recording[1]

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] to their rows of the embedding, [T, hidden], not scaled."""
        return self._embedding.rows(token_ids)

    def logits(self, hidden: Tensor, context: LinearContext = NO_ADAPTERS) -> Tensor:
        """[R, hidden] to [R, vocab] float32; on ranks but the first, to their own part. `context`: of the R rows."""
        return self.shard.gather(self._own_logits(hidden, context), self.spec.vocab_size)

    def largest(self, hidden: Tensor, context: LinearContext = NO_ADAPTERS) -> tuple[Tensor, Tensor]:
        """The first token of the largest logit of each row, [R] int64 on every rank, and whether the model gave numbers
        there [R], which the first rank knows. Nothing waits for the host; ranks exchange two numbers of each row."""
        own = self._own_logits(hidden, context)
        best = self.argmax(own)
        if self.shard.group is not None:
            best = self.shard.first(own.gather(1, best[:, None]).squeeze(1), best, self.spec.vocab_size)
        return best, had_numbers(hidden, own)

    def _own_logits(self, hidden: Tensor, context: LinearContext) -> Tensor:
        """Of this rank's part of the vocabulary."""
        self.progress()
        head, cap = self._embedding.head if self.spec.tie_embeddings else self._head.packed, self.spec.logit_softcap
        logits = times(self._backend, head(hidden, context), self.spec.logit_scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def had_numbers(hidden: Tensor, logits: Tensor) -> Tensor:
    """Whether rows [R] have numbers to pick by: NaN is greater than all, and what makes one makes many. A tenth of the
    time of looking at each."""
    return hidden.amax(-1).isfinite() & ~logits[:, 0].isnan()
