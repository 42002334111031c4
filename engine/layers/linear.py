"""Linears of one input as one matrix product: query, key and value; gate and up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from quire.engine.layers.adapters import Adapters
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.schemes import Scheme
from quire.engine.layers.shard import WHOLE_LINEAR, Cut
from quire.kernels.backend import Linear, LinearContext


class JoinedLinear:
    """Linears with the same input, joined into one. Tensors are put one by one; with the last one all are packed and
    the unpacked ones dropped, so that loading never holds much more than the model."""

    def __init__(
        self,
        scheme: Scheme,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        wide: bool = False,
        adapters: Adapters | None = None,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        """`parts`: name in the checkpoint to out_features, in the order in which they are joined. `adapters`: where it
        gets room for some, if it does. `cuts`: what of each of the parts a rank has; None: all."""
        self._sizes = parts, in_features
        self._cuts = dict.fromkeys(parts, WHOLE_LINEAR) if cuts is None else cuts
        self._adapters = adapters
        self._scheme = scheme
        self._wide = wide
        self._stored = {name: scheme.tensors(name, in_features, out, bias=bias) for name, out in parts.items()}
        self._arrived: dict[str, dict[str, Tensor]] = {name: {} for name in parts}
        self._packed: Linear | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of its parts in the checkpoint."""
        return tuple(self._stored)

    @property
    def packed(self) -> Linear:
        assert self._packed is not None, "weights are not loaded"
        return self._packed

    def watch(self, note: Callable[[Tensor], None]) -> None:
        """Let `note` have what it reads, [rows, in_features], from now on. No backend records a watched one."""
        packed = self.packed

        def watched(x: Tensor, context: LinearContext) -> Tensor:
            note(x)
            return packed(x, context)

        self._packed = watched

    def parameters(self) -> ParameterTable:
        return {
            f"{part}.{name}": Parameter(stored.shape, stored.dtype, self._putter(part, name), self._cutter(part, name))
            for part, tensors in self._stored.items()
            for name, stored in tensors.items()
        }

    def _cutter(self, part: str, name: str) -> Callable[[Tensor], Tensor]:
        return partial(self._cuts[part].early, which=self._stored[part][name].early)

    def _putter(self, part: str, name: str) -> Callable[[Tensor], None]:
        def put(tensor: Tensor) -> None:
            self._arrived[part][name] = tensor
            if all(len(self._arrived[each]) == len(self._stored[each]) for each in self._stored):
                packed = self._scheme.pack(self._arrived, self._cuts, wide=self._wide)
                if self._adapters is not None:
                    packed = self._adapters.adapted(packed, *self._sizes, self._cuts, wide=self._wide)
                self._packed = packed
                self._arrived = {each: {} for each in self._stored}

        return put


class DenseLinear:
    """A linear whose weights a part takes as numbers, to make others of them; what is stored in few bits is expanded.
    It has no bias, and no room for adapters."""

    def __init__(
        self,
        scheme: Scheme,
        name: str,
        in_features: int,
        out_features: int,
        cut: Cut,
        take: Callable[[Tensor], None],
    ) -> None:
        """`cut`: what of it a rank has. `take` gets the rank's weights, [out, in] of the model's type, once all of its
        tensors are there."""
        self._scheme, self._name, self._cut, self._take = scheme, name, cut, take
        self._stored = scheme.tensors(name, in_features, out_features, bias=False)
        self._arrived: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        return {
            f"{self._name}.{name}": Parameter(
                stored.shape, stored.dtype, partial(self._put, name), partial(self._cut.early, which=stored.early)
            )
            for name, stored in self._stored.items()
        }

    def _put(self, name: str, tensor: Tensor) -> None:
        self._arrived[name] = tensor
        if len(self._arrived) == len(self._stored):
            self._take(self._scheme.dense(self._name, self._arrived, self._cut))
            self._arrived = {}
