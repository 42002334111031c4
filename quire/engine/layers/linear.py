"""Linears of one input as one matrix product: query, key and value; gate and up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from torch import Tensor

from quire.engine.layers.adapters import Adapters
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.schemes import Scheme
from quire.engine.layers.shard import WHOLE_LINEAR, Cut
from quire.kernels.backend import Linear, LinearContext, Operations
from quire.kernels.quantized import Given


class Projection(Protocol):
    """What a part multiplies its input with."""

    def parameters(self) -> ParameterTable: ...

    def apply(self, run: Operations, x: Given, context: LinearContext) -> Tensor:
        """[T, in_features] to [T, out_features]. x stays."""


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
        self._uses: list[SharedLinear] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Of its parts in the checkpoint."""
        return tuple(self._stored)

    @property
    def packed(self) -> Linear:
        assert self._packed is not None, "weights are not loaded"
        return self._packed

    def apply(self, run: Operations, x: Given, context: LinearContext) -> Tensor:
        return run.apply(self.packed, x, context)

    def used_as(self, names: tuple[str, ...]) -> SharedLinear:
        """Another use of the same weights, where its parts are called so."""
        parts, inner = self._sizes
        own = dict(zip(parts, names, strict=True))
        sizes = {own[part]: size for part, size in parts.items()}, inner
        use = SharedLinear(self._adapters, sizes, {own[part]: self._cuts[part] for part in parts})
        self._uses.append(use)
        return use

    def watch(self, note: Callable[[Tensor], None]) -> None:
        """Let `note` have what it reads, [rows, in_features], from now on. No backend records a watched one."""
        packed = self.packed

        def watched(x: Tensor, context: LinearContext) -> Tensor:
            note(x)
            return packed(x, context)

        self._packed = watched

    def parameters(self) -> ParameterTable:
        return {
            f"{part}.{name}": Parameter(
                *(each.shape, each.dtype, self._putter(part, name), partial(self._cuts[part].early, which=each.early))
            )
            for part, tensors in self._stored.items()
            for name, each in tensors.items()
        }

    def _putter(self, part: str, name: str) -> Callable[[Tensor], None]:
        def put(tensor: Tensor) -> None:
            self._arrived[part][name] = tensor
            if all(len(self._arrived[each]) == len(self._stored[each]) for each in self._stored):
                packed = self._scheme.pack(self._arrived, self._cuts, wide=self._wide)
                for use in self._uses:
                    use.take(packed)
                if self._adapters is not None:
                    packed = self._adapters.adapted(packed, *self._sizes, self._cuts, wide=self._wide)
                self._packed = packed
                self._arrived = {each: {} for each in self._stored}

        return put


class SharedLinear:
    """A further use of a JoinedLinear's weights, in another layer. It has adapters of its own."""

    def __init__(self, adapters: Adapters | None, sizes: tuple[dict[str, int], int], cuts: Mapping[str, Cut]) -> None:
        """`sizes`: as JoinedLinear's parts and in_features."""
        self._adapters, self._sizes, self._cuts = adapters, sizes, cuts
        self._packed: Linear | None = None

    def take(self, packed: Linear) -> None:
        """The weights, once they are there."""
        self._packed = packed
        if self._adapters is not None:
            self._packed = self._adapters.adapted(packed, *self._sizes, self._cuts, wide=False)

    def parameters(self) -> ParameterTable:
        """None but those of the use that has the weights."""
        return {}

    def apply(self, run: Operations, x: Given, context: LinearContext) -> Tensor:
        assert self._packed is not None, "weights are not loaded"
        return run.apply(self._packed, x, context)


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
