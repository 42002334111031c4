"""Linears of one input as one matrix product: query, key and value; gate and up."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.schemes import Scheme
from quire.kernels.backend import Linear


class JoinedLinear:
    """Linears with the same input, joined into one. Tensors are put one by one; with the last one all are packed and
    the unpacked ones dropped, so that loading never holds much more than the model."""

    def __init__(
        self, scheme: Scheme, in_features: int, parts: dict[str, int], *, bias: bool, wide: bool = False
    ) -> None:
        """`parts`: name in the checkpoint to out_features, in the order in which they are joined."""
        self._scheme = scheme
        self._wide = wide
        self._stored = {name: scheme.tensors(in_features, out, bias=bias) for name, out in parts.items()}
        self._arrived: dict[str, dict[str, Tensor]] = {name: {} for name in parts}
        self._packed: Linear | None = None

    @property
    def packed(self) -> Linear:
        assert self._packed is not None, "weights are not loaded"
        return self._packed

    def parameters(self) -> ParameterTable:
        return {
            f"{part}.{name}": Parameter(stored.shape, stored.dtype, self._putter(part, name))
            for part, tensors in self._stored.items()
            for name, stored in tensors.items()
        }

    def _putter(self, part: str, name: str) -> Callable[[Tensor], None]:
        def put(tensor: Tensor) -> None:
            self._arrived[part][name] = tensor
            if all(len(self._arrived[each]) == len(self._stored[each]) for each in self._stored):
                self._packed = self._scheme.pack(list(self._arrived.values()), wide=self._wide)
                self._arrived = {each: {} for each in self._stored}

        return put
