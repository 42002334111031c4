"""A model that transformers' class computes, behind the interface of our Decoder: pages, hidden states, logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.pytorch_utils import Conv1D

from quire.engine.checkpoint.adapted import first_position
from quire.engine.errors import ModelError
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.parameters import Parameter, ParameterTable, whole
from quire.engine.layers.part import BuildContext
from quire.engine.layers.schemes import Unquantized
from quire.engine.layers.shard import WHOLE
from quire.engine.models.adapted.attention import Paged
from quire.engine.models.adapted.build import body_of, build, in_one_line
from quire.engine.models.adapted.experts import OurExperts
from quire.engine.models.adapted.interface import attend_by, mix_by
from quire.engine.models.adapted.modules import (
    OurLinear,
    RowsApart,
    foreign_products,
    multiplies,
    our_norm,
    transposed,
    turned,
)
from quire.engine.models.adapted.positions import GivenPositions, RotationTable, is_rotation, takes_length
from quire.engine.models.adapted.probe import inputs_of
from quire.engine.models.adapted.ranks import UNDIVIDED, division_of
from quire.engine.models.adapted.rows import ByRows
from quire.engine.models.adapted.spec import ROUTERS, AdaptedSpec
from quire.engine.models.adapted.weights import Conversion, TensorStream
from quire.engine.models.decoder import Decoder, Features, KVCache, had_numbers
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, LinearContext


class _BodyOutput(BaseModelOutputWithPast):
    """What a body returns: the hidden states, and None of whatever else a class's body may return."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _BodyStandIn(nn.Module):
    """In the place of the body while the head is computed: it gives the hidden states that it was given."""

    hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _BodyOutput(last_hidden_state=self.hidden)


class AdaptedDecoder(Decoder):
    """Fill it by way of `parameters()` before use, then call `ready`."""

    sums = True
    """Whether ranks add up their parts of a result. False while one rank computes alone, whose numbers mean nothing."""

    def make_parts(self, making: BuildContext) -> None:
        """It has all layers: see check_adapted."""
        spec, backend = self.spec, making.backend
        assert isinstance(spec, AdaptedSpec)
        self._spec, self._first, self._parts = spec, first_position(spec.given), making
        attention, self.made_by = spec.of_rank(making.shard), spec.made_by
        self._layers = [[each.part(making, "")] for each in attention]
        self._linear = NO_ADAPTERS
        self._model = model = build(spec.given, making.dtype)
        self._division = UNDIVIDED if making.shard.count == 1 else division_of(model, making.shard.count)
        self._conversion = Conversion(model)
        self._paged = Paged(backend, attention, self.groups, self.progress)
        # A GPU computes each number alike, wherever it stands.
        on_cpu = making.device.type == "cpu"
        self._by_rows: AbstractContextManager[object] = ByRows(backend) if on_cpu else nullcontext()
        self._table = self._replace()
        attend_by(model, self._paged)
        (name, self._body), self._given = body_of(model), _BodyStandIn()
        _set(model, name, self._given)

    @property
    def computes(self) -> str:
        return f"{super().computes}, {self.made_by} of transformers {transformers.__version__}"

    def parameters(self) -> ParameterTable:
        return dict(self._table)

    def converted(self, stream: Iterable[tuple[str, Tensor]]) -> TensorStream:
        """Buffers, which not all checkpoints hold, go to their
        modules."""
        for name, tensor in self._conversion.converted(stream):
            own = name.rpartition(".")[2]
            if (module := self._buffers.get(name)) is not None:
                setattr(module, own, tensor.to(device=self.device, dtype=getattr(module, own).dtype))
            else:
                yield name, tensor

    def forward_tapped(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
        rows: Tensor,
        taps: Sequence[int],
        features: Features | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        assert not taps
        assert features is None
        self._paged.begin(metadata, kv_cache)
        self._linear = metadata.linear
        positions = metadata.positions[None]
        positions = positions + self._first if self._first else positions
        with self._by_rows:
            found = self._body(**inputs_of(self._body, token_ids.long()[None], positions))
        self._paged.end()
        return found[0][0][rows], []

    def logits(self, hidden: Tensor, context: LinearContext = NO_ADAPTERS) -> Tensor:
        self.progress()
        self._given.hidden, self._linear = hidden[None], context
        with self._by_rows:  # embeddings are not asked for, so that nothing looks ids up
            logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        self._given.hidden = None
        return logits.float()

    def largest(self, hidden: Tensor, context: LinearContext = NO_ADAPTERS) -> tuple[Tensor, Tensor]:
        """Of logits that the class itself puts together, where there are ranks."""
        logits = self.logits(hidden, context)
        best, group = self.argmax(logits), self.shard.group
        return best if group is None else group.share(best), had_numbers(hidden, logits)

    def _replace(self) -> ParameterTable:
        """Put our modules in the place of the class's where they are the same function; the tensors of all."""
        model, table = self._model, ParameterTable()
        head, made = model.get_output_embeddings(), dict[int, nn.Module]()
        positions, context = self.max_model_len, self._spec.rope_context or self.max_model_len
        for name, module in list(model.named_modules(remove_duplicate=False)):
            if id(module) in made:
                _set(model, name, made[id(module)])
            elif type(module) is nn.Linear and name in self._spec.called:
                ours, own = self._our_linear(name, module, wide=module is head)
                self._join(table, own)
                _set(model, name, made.setdefault(id(module), ours))
            elif (norm := our_norm(name, module, self._parts)) is not None:
                self._join(table, norm.weights.parameters())
                _set(model, name, made.setdefault(id(module), norm))
            elif type(module) is Conv1D and name in self._spec.called:
                ours, own = self._our_linear(name, transposed(module), wide=module is head)
                self._join(table, {each: turned(parameter) for each, parameter in own.items()})
                _set(model, name, made.setdefault(id(module), ours))
            elif OurExperts.fits(module):
                divided = (self.shard, self._sum) if name in self._division.experts else (WHOLE, None)
                experts = OurExperts(module, name, self._parts.scheme, self.dtype, *divided)
                self._join(table, experts.parameters())
                mix_by(module, experts)
        self._make_buffers()
        self._join(table, self._others())
        self.foreign_products = foreign_products(model, self._spec.called)
        self._buffers = {name: model.get_submodule(name.rpartition(".")[0]) for name, _ in model.named_buffers()}
        for name, module in list(model.named_modules()):
            if is_rotation(module):
                _set(model, name, RotationTable(module, positions, context))
            elif multiplies(module):
                _set(model, name, RowsApart(module, self._parts.backend))
            elif takes_length(module):
                _set(model, name, GivenPositions(module, lambda: self._paged.positions))
        return table

    def _join(self, table: ParameterTable, more: ParameterTable) -> None:
        """Add to a table, under the names that are the parameters' own; what is there goes to both."""
        for name, parameter in more.items():
            own = self._conversion.own_name(name)
            table[own] = table[own].shared(parameter) if own in table else parameter

    def _our_linear(self, name: str, module: nn.Linear, *, wide: bool) -> tuple[OurLinear, ParameterTable]:
        outs, scheme = {name: module.out_features}, self._parts.scheme
        stored = scheme.tensors(name, module.in_features, module.out_features, bias=False).get("weight")
        if name.endswith(ROUTERS) and stored is not None and stored.dtype == self.dtype:
            scheme = Unquantized(self._parts.backend, self.dtype)  # no router gets few bits: its choices would change
        adapters = self.adapters if name in (self._spec.linears or ()) else None
        cut = self._division.cut(name, module, self.shard)
        ours = JoinedLinear(
            scheme,
            module.in_features,
            outs,
            bias=module.bias is not None,
            wide=wide,
            adapters=adapters,
            cuts={name: cut},
        )
        total = None if cut.ins is None else self._sum
        return OurLinear(ours, module, self.dtype, self.device, lambda: self._linear, cut, total), ours.parameters()

    def _own_heads(self, numbers: Tensor) -> Tensor:
        span = self.shard.span(len(numbers))
        return numbers[span.start : span.stop]

    def _sum(self, x: Tensor) -> Tensor:
        return self.shard.sum(x) if self.sums else x

    def _make_buffers(self) -> None:
        """Buffers that no checkpoint holds, as the class makes them. Raises ModelError where it makes none."""
        makers = {name: each for name, each in self._model.named_modules() if isinstance(each, PreTrainedModel)}
        for path, module in self._model.named_modules():
            missing = [(name, each) for name, each in module.named_buffers(recurse=False) if each.is_meta]
            for name, buffer in missing:
                setattr(module, name, torch.zeros_like(buffer, device=self.device))
            if missing:
                nearest = max((name for name in makers if f"{path}.".startswith(f"{name}." if name else "")), key=len)
                try:
                    makers[nearest]._init_weights(module)
                except Exception as error:  # whatever it makes of config.json's numbers
                    what = f"transformers' {type(self._model).__name__} does not make {path}.{missing[0][0]}"
                    raise ModelError(f"model: {what}: {in_one_line(error)}") from error

    def _others(self) -> ParameterTable:
        """The parameters that stay in modules of the class."""
        table: ParameterTable = {}
        for name, module in self._model.named_modules():
            for own, each in module.named_parameters(recurse=False):
                full = f"{name}.{own}" if name else own
                cut = self._own_heads if full in self._division.heads else whole
                self._join(table, {full: Parameter(tuple(each.shape), each.dtype, partial(_put, module, own), cut)})
        return table


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    setattr(module, name, nn.Parameter(tensor, requires_grad=False))


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, own, module)
