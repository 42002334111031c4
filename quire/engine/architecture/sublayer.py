from __future__ import annotations

from quire.engine.architecture.kv_cache_spec import State
from quire.engine.architecture.parameter_shapes import LinearSizes, ParameterShapes, linear_sizes


class SublayerSpec:
    """Subclasses are frozen dataclasses."""

    __slots__ = ()

    @property
    def kv_cache_spec(self) -> State | None:
        """None: nothing is kept per sequence."""
        return None

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        """`layer`: the layer's name in the checkpoint."""
        raise NotImplementedError(f"{type(self).__name__} does not say its parameters")

    def adaptable_linears(self, layer: str, hidden_size: int) -> LinearSizes:
        return linear_sizes(self.parameter_shapes(layer, hidden_size))

    def tensor_parallel_error(self, ranks: int) -> str | None:
        """None if everything can be divided among `ranks`."""
        return None


def divisibility_error(size: int, description: str, ranks: int) -> str | None:
    """None if `size` is a multiple of `ranks`."""
    return f"the model's {description} cannot be divided among {ranks} ranks" if size % ranks else None
